from __future__ import annotations

import json
from pathlib import Path

from pdserve.bench.comparison import Results, find_possible, read_rounds, render
from pdserve.bench.measure.model_floors import MachineRates, ModelCosts
from pdserve.bench.measure.samples import Failure, RequestSample
from pdserve.bench.measure.summary import Objective, Summary, summarise
from pdserve.bench.rate_search import RatePoint
from pdserve.bench.scenarios import SCENARIOS, TTFT_P50
from pdserve.bench.serve import ServeConfig
from pdserve.bench.show.plots import plot_run, plot_sweep
from pdserve.bench.show.report import list_notes, render_summary
from pdserve.bench.show.results import describe_samples, describe_summary, write_results
from pdserve.bench.show.tables import format_ms, format_number, format_share, format_table

PNG = b"\x89PNG"


def samples(num_ok: int, num_lost: int = 0, *, ttft_s: float = 0.1, has_usage: bool = True) -> list[RequestSample]:
    events = [ttft_s, ttft_s + 0.02, ttft_s + 0.04]
    whole = [RequestSample(i, 0.0, 0.0, 0.0, events, events[-1], 10, 3, has_usage) for i in range(num_ok)]
    failure = Failure("http_503", "no instance")
    lost = [RequestSample(num_ok + i, 0.0, 0.0, 0.0, [], 0.01, failure=failure) for i in range(num_lost)]
    return whole + lost


def test_numbers_as_people_read_them() -> None:
    values = [format_number(v) for v in (None, 0, 0.1234, 1.234, 12.34, 123.4, 12345.6)]
    assert values == ["-", "0", "0.123", "1.23", "12.3", "123", "12,346"]
    assert (format_ms(0.0123), format_ms(None), format_share(0.915)) == ("12.3", "-", "91.5%")


def test_columns_line_up() -> None:
    assert format_table([["", "a"], ["row", "1,000"]]).splitlines() == ["         a", "---  -----", "row  1,000"]


def test_a_report_without_losses_says_nothing_of_them() -> None:
    text = render_summary(summarise(samples(4)))
    assert "4 of 4" in text
    assert "lost" not in text
    assert "goodput" not in text
    (row,) = (line for line in text.splitlines() if line.startswith("time to first token"))
    assert row.split()[-5:] == ["100.0"] * 5


def test_a_report_names_what_was_lost_and_why() -> None:
    text = render_summary(summarise(samples(3, 2), Objective(ttft_s=1.0)))
    assert "3 of 5" in text
    assert "lost: 2 of 5 requests; no figure above counts them\n  2 x http_503: no instance" in text
    assert "60.0%" in text


def test_a_report_of_nothing_but_losses_has_no_figures() -> None:
    text = render_summary(summarise(samples(0, 2)))
    (row,) = (line for line in text.splitlines() if line.startswith("time to first token"))
    assert row.split()[-5:] == ["-"] * 5


def test_what_a_reader_has_to_know_is_said() -> None:
    assert list_notes(summarise(samples(2))) == []
    (note,) = list_notes(summarise(samples(2, has_usage=False)))
    assert note.startswith("the server sent no usage for 2 requests")
    coarse = samples(1)
    coarse[0].num_output_tokens = 6
    assert list_notes(summarise(coarse)) == ["an event carried 2.00 tokens on average: ITL is the time between events"]
    late = samples(1)
    late[0].clock_s = -0.5
    (note,) = list_notes(summarise(late))
    assert note.startswith("requests were sent up to 500.0 ms after they were due")


def test_results_are_json_with_settings_and_machine(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    run = samples(1, 1)
    results = {"summary": describe_summary(summarise(run)), "requests": describe_samples(run)}
    write_results(str(path), "serve", ServeConfig(), results)
    content = json.loads(path.read_text())
    assert content["command"] == "pdserve bench serve"
    assert content["settings"]["workload.prompt_tokens"] == "200"
    assert content["machine"]["cores"] >= 1
    assert content["summary"]["lost"] == [{"kind": "http_503", "count": 1, "example": "no instance"}]
    assert content["summary"]["ttft_s"]["p50"] == 0.1
    assert content["requests"][0]["event_times_s"] == [0.1, 0.12, 0.14]
    assert content["requests"][1]["failure"] == {"kind": "http_503", "message": "no instance"}


def test_plots_are_drawn_whatever_was_lost(tmp_path: Path) -> None:
    run, sweep = tmp_path / "run.png", tmp_path / "sweep.png"
    plot_run(str(run), samples(3, 1), "title")
    plot_run(str(tmp_path / "lost.png"), samples(0, 2), "title")
    objective = Objective(ttft_s=0.5, itl_s=0.1)
    points = [RatePoint(1.0, summarise(samples(3), objective)), RatePoint(2.0, summarise(samples(0, 2), objective))]
    plot_sweep(str(sweep), {"a": points, "b": points[:1]}, objective)
    for path in (run, sweep, tmp_path / "lost.png"):
        assert path.read_bytes().startswith(PNG)


# --- compare --------------------------------------------------------------------------------------------


def results(own: list[Summary], peer: list[Summary]) -> Results:
    costs = ModelCosts(
        body_weights=1000, head_weights=100, num_layers=1, attention_width=10, kv_bytes_per_token=1, weight_bytes=2
    )
    return Results(
        {"prefill": {"pdserve 0:1": own, "peer": peer}},
        {"pdserve 0:1": [2.0, 4.0], "peer": [None, None]},
        costs,
        MachineRates(num_threads=1, read_bytes_per_s=1e9, copy_bytes_per_s=1e9, flops=costs.prefill_flops(1024) * 40),
    )


def test_ratios_of_a_comparison_say_how_many_times_better_the_first_is() -> None:
    own = [summarise(samples(2, ttft_s=0.1)), summarise(samples(2, ttft_s=0.2))]
    peer = [summarise(samples(2, ttft_s=0.3)), summarise(samples(2, ttft_s=0.4))]
    text = render(results(own, peer), [SCENARIOS["prefill"]], ["pdserve 0:1", "peer"], [0, 1])
    (row,) = (line for line in text.splitlines() if line.startswith("TTFT p50, ms"))
    # 1,024 tokens take a fortieth of a second at least: 25 ms of the 150.
    assert row.split()[3:] == ["150", "350", "2.50", "(2.00..3.00)", "25", "16.7%"]
    assert "pdserve 0:1" in text
    assert "ran already" in text
    assert "lost" not in text


def test_rounds_with_losses_are_not_compared() -> None:
    own = [summarise(samples(2, ttft_s=0.1))] * 2
    peer = [summarise(samples(2, ttft_s=0.3)), summarise(samples(1, 1, ttft_s=0.01))]
    assert read_rounds(TTFT_P50, peer) == [300.0, None]
    made = results(own, peer)
    assert made.num_lost == 1
    text = render(made, [SCENARIOS["prefill"]], ["pdserve 0:1", "peer"], [0])
    (row,) = (line for line in text.splitlines() if line.startswith("TTFT p50, ms"))
    assert row.split()[5:7] == ["3.00", "(3.00..3.00)"]
    assert "peer lost requests; the rounds it lost them in are not compared:" in text
    assert "1 x http_503: no instance" in text


def test_what_is_possible_is_said_where_it_can_be() -> None:
    made = results([], [])
    rates = made.rates
    assert rates is not None
    decode, burst = SCENARIOS["decode"], SCENARIOS["burst"]
    step_s = made.costs.decode_step_floor_s(rates, 1, 128 + 64)
    assert find_possible(decode.metrics[0], made, decode) == 1 / step_s
    burst_s = made.costs.batch_floor_s(rates, [200] * 64, [64] * 64, 32)
    assert find_possible(burst.metrics[0], made, burst) == 64 * 64 / burst_s
    assert find_possible(TTFT_P50, made, SCENARIOS["poisson"]) is None
    made.rates = None
    assert find_possible(decode.metrics[0], made, decode) is None
