"""``pdserve bench`` as a user meets it: against a real router, and with the real model in process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prompts import PROMPTS
from replay_service import replay_service

PNG = b"\x89PNG"
SMALL = ["--num-blocks", "128", "--max-model-len", "512"]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pdserve.cli", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def read(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    options = ["--step-ms", "2", "--handoff-ms", "3"]
    with replay_service(tmp_path_factory.mktemp("replay"), instance_options=options) as url:
        yield url


def test_serve_counts_every_token_of_a_real_service(url: str, tmp_path: Path) -> None:
    output, plot = tmp_path / "r.json", tmp_path / "r.png"
    done = bench(
        *("serve", "--url", f"{url}/v1", "--num-requests", "20", "--rate", "40", "--output-tokens", "5-30"),
        *("--prompt-tokens", "10-60", "--slo-ttft-ms", "60000", "--slo-itl-ms", "60000"),
        *("--output", str(output), "--plot", str(plot)),
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "20 of 20" in done.stdout
    assert plot.read_bytes().startswith(PNG)
    content = read(output)
    requests = content["requests"]
    assert all(10 <= request["num_prompt_tokens"] <= 60 for request in requests)
    assert all(len(request["event_times_s"]) <= request["num_output_tokens"] for request in requests)
    assert content["summary"]["num_output_tokens"] == sum(request["num_output_tokens"] for request in requests)
    assert content["summary"]["attainment"] == 1.0
    assert content["summary"]["itl_s"]["p50"] > 0.001  # a step takes 2 ms
    assert all(request["sent_s"] >= request["due_s"] for request in requests)


def test_serve_sends_files_of_prompts_and_conversations(url: str, tmp_path: Path) -> None:
    chat = tmp_path / "p.jsonl"
    lines = [{"messages": [{"role": "user", "content": f"Question {i}?"}], "max_tokens": i + 1} for i in range(5)]
    chat.write_text("\n".join(map(json.dumps, lines)))
    output = tmp_path / "r.json"
    done = bench(
        *("serve", "--url", url, "--prompts-file", str(chat), "--endpoint", "chat", "--output", str(output)),
        *("--max-concurrency", "2"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [request["num_output_tokens"] for request in read(output)["requests"]] == [1, 2, 3, 4, 5]

    turns = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because of that."}]
    sharegpt = tmp_path / "s.json"
    sharegpt.write_text(json.dumps([{"conversations": turns}] * 3)[:-20])
    done = bench("serve", "--url", url, "--sharegpt", str(sharegpt), "--num-requests", "2", "--output-tokens", "reply")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "note: The file is cut off; its 2 whole conversations are used." in done.stdout


@pytest.mark.parametrize(
    ("options", "text", "message"),
    [
        (["--model", "other"], None, "does not serve 'other'; it serves smollm2-135m-instruct"),
        ([], "", "holds no prompts"),
        ([], '{"prompt": ', "line 1, is not JSON"),
        ([], '{"messages": [{"role": "user", "content": "a"}]}', "send them with --endpoint chat"),
        (["--tokenizer", "no-such-model"], None, "no-such-model"),
    ],
)
def test_mistakes_are_one_line_and_status_2(
    url: str, tmp_path: Path, options: list[str], text: str | None, message: str
) -> None:
    if text is not None:
        path = tmp_path / "p.jsonl"
        path.write_text(text)
        options = [*options, "--prompts-file", str(path)]
    done = bench("serve", "--url", url, *options)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr


def test_requests_that_are_refused_are_counted_named_and_status_1(tmp_path: Path) -> None:
    output = tmp_path / "r.json"
    with replay_service(tmp_path, instance_options=["--refuse", "rate_limit_exceeded:429"]) as url:
        done = bench("serve", "--url", url, "--num-requests", "6", "--output", str(output))
    assert done.returncode == 1
    assert done.stderr == ""
    assert "lost: 6 of 6 requests; no figure above counts them\n  6 x http_429: " in done.stdout
    summary = read(output)["summary"]
    assert summary["ttft_s"] is None
    assert [(lost["kind"], lost["count"]) for lost in summary["lost"]] == [("http_429", 6)]


def test_requests_that_end_half_way_are_lost(tmp_path: Path) -> None:
    with replay_service(
        tmp_path,
        instance_options=["--step-ms", "1", "--die-after-tokens", "40"],
        router_options=["--failover-wait-s", "0", "--prefill-wait-s", "0"],
    ) as url:
        done = bench("serve", "--url", url, "--num-requests", "4", "--output-tokens", "60", "--num-warmups", "0")
    assert done.returncode == 1
    assert "requests; no figure above counts them" in done.stdout
    assert "stream_error" in done.stdout or "http_503" in done.stdout


def test_sweep_finds_the_rate_of_a_running_service(url: str, tmp_path: Path) -> None:
    output, plot = tmp_path / "r.json", tmp_path / "r.png"
    done = bench(
        *("sweep", "--url", url, "--rates", "40", "20", "--point-s", "1", "--output-tokens", "4"),
        *("--slo-ttft-ms", "60000", "--slo-itl-ms", "60000", "--output", str(output), "--plot", str(plot)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (deployment,) = read(output)["deployments"].values()
    assert [point["rate"] for point in deployment["points"]] == [20.0, 40.0]
    assert [point["summary"]["num_requests"] for point in deployment["points"]] == [20, 40]
    assert deployment["best_rate"] == 40.0
    assert plot.read_bytes().startswith(PNG)


def test_compare_starts_pdserve_and_measures_all_in_turn(url: str, only_supervisor: None, tmp_path: Path) -> None:
    output = tmp_path / "r.json"
    done = bench(
        *("compare", "--peer", f"replay={url}", "--scenarios", "custom", "--num-requests", "3", "--rounds", "2"),
        *("--prompt-tokens", "20", "--output-tokens", "4", "--num-blocks", "128", "--output", str(output)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    turns = [line for line in done.stdout.splitlines() if line.startswith("round ")]
    assert turns == [
        *("round 1 of 2: pdserve 0:1", "round 1 of 2: replay"),
        *("round 2 of 2: replay", "round 2 of 2: pdserve 0:1"),
    ]
    content = read(output)
    assert {name: len(rounds) for name, rounds in content["scenarios"]["custom"].items()} == {
        "pdserve 0:1": 2,
        "replay": 2,
    }
    for rounds in content["scenarios"]["custom"].values():
        assert [(one["num_ok"], one["num_output_tokens"], one["num_prompt_tokens"]) for one in rounds] == [
            (3, 12, 60)
        ] * 2
    assert all(time_s > 0 for time_s in content["start_times_s"]["pdserve 0:1"])
    assert content["start_times_s"]["replay"] == [None, None]


def test_floors_are_quick(tmp_path: Path) -> None:
    output = tmp_path / "r.json"
    done = bench("floors", "--seconds", "0.02", "--num-threads", "1", "--output", str(output))
    assert done.returncode == 0, done.stderr
    (floors,) = read(output)["floors"]
    steps = [floors["decode_step_s"][size] for size in ("1", "8", "32", "64", "256")]
    assert steps == sorted(steps)
    assert "prefill of 1,000 tokens, ms" in done.stdout


def test_handoff_compares_connectors_with_a_copy(tmp_path: Path) -> None:
    output = tmp_path / "r.json"
    done = bench(
        *("handoff", "--connectors", "memory", "shared_storage", "--prompt-tokens", "20", "40", "--repeats", "2"),
        *("--output", str(output)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "40 prompt tokens as-served: 3 blocks, 1.11 MB" in done.stdout
    hand_offs = read(output)["hand_offs"]
    moved = [(one["connector"], one["num_prompt_tokens"], one["way"], one["num_bytes"]) for one in hand_offs]
    block_bytes = 368_640
    assert moved == [
        (name, num_tokens, way, num_blocks * block_bytes)
        for name in ("memory", "shared_storage")
        for num_tokens, num_blocks in ((20, 2), (40, 3))
        for way in ("as-served", "at-once")
        for _ in range(2)
    ]
    assert all(min(one["save_s"], one["load_s"], one["memcpy_s"]) > 0 for one in hand_offs)


def test_latency_times_every_step_of_the_real_model(tmp_path: Path) -> None:
    output = tmp_path / "r.json"
    done = bench(
        *("latency", *SMALL, "--batch", "2", "--prompt-tokens", "40", "--output-tokens", "6", "--repeats", "2"),
        *("--floor-seconds", "0.02", "--output", str(output)),
    )
    assert done.returncode == 0, done.stderr
    content = read(output)
    assert len(content["runs"]) == 2
    for one in content["runs"]:
        decode = [step for step in one["steps"] if step["is_decode"]]
        assert [step["num_tokens"] for step in decode] == [2] * 5
        assert [request["num_output_tokens"] for request in one["requests"]] == [6, 6]
    assert content["floors"]["step_s"] > 0
    refused = bench("latency", *SMALL, "--prompt-tokens", "600")
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1].startswith("error: a request of 600 + 128 tokens cannot run: ")


def test_throughput_runs_every_request_of_a_mix(tmp_path: Path) -> None:
    output = tmp_path / "r.json"
    done = bench(
        *("throughput", *SMALL, "--num-requests", "6", "--prompt-tokens", "10-50", "--output-tokens", "2-6"),
        *("--floor-seconds", "0", "--output", str(output)),
    )
    assert done.returncode == 0, done.stderr
    content = read(output)
    assert content["summary"]["num_ok"] == 6
    assert content["floor_s"] is None
    assert sum(step["num_tokens"] for step in content["steps"]) == content["summary"]["num_output_tokens"]


def test_perplexity_of_quantised_weights_beside_the_model_itself(tmp_path: Path) -> None:
    text, output = tmp_path / "t.txt", tmp_path / "r.json"
    text.write_text(" ".join(PROMPTS), encoding="utf-8")
    arguments = ("perplexity", "--text", str(text), "--output", str(output))
    done = bench(*arguments, "--window-tokens", "100", "--max-windows", "3", "--quantization", "w8a8")
    assert done.returncode == 0, done.stderr
    assert "on 3 windows of 100 tokens" in done.stdout
    results = read(output)["perplexity"]
    assert list(results) == ["none", "w8a8"]
    assert 2 < results["none"] < 60
    assert results["w8a8"] == pytest.approx(results["none"], rel=0.05)
    assert results["w8a8"] != results["none"]
    short = bench(*arguments, "--window-tokens", "5000")
    assert short.returncode == 2
    assert "tokens; a window has 5000 (--window-tokens)" in short.stderr
