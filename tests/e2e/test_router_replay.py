"""A real router process over instances that replay tokens: what clients see while instances come, fail and go."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from processes import wait_until

from pdserve.text import Tokenizer

sys.path.insert(0, str(Path(__file__).parent.parent))

from replay_instance import replay_token
from replay_service import MODEL, NUM_TOKENS, PROMPT, VOCAB_SIZE, Replay, Service


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    made = Service(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="module")
def prompt_ids(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(PROMPT)


@pytest.fixture(scope="module")
def expected(tokenizer: Tokenizer, prompt_ids: list[int]) -> str:
    return tokenizer.decode([replay_token(prompt_ids, 1, position, VOCAB_SIZE) for position in range(NUM_TOKENS)])


def test_openai_clients_get_every_token_once(service: Service, expected: str) -> None:
    service.add("prefill", "--handoff-ms", "5")
    decode = service.add("decode")
    service.start().wait_for(1, 1)
    answer = service.complete()
    assert answer.choices[0].text == expected
    assert answer.usage.completion_tokens == NUM_TOKENS
    assert answer.usage.prompt_tokens_details.cached_tokens == min(7, answer.usage.prompt_tokens - 1)
    assert "".join(service.stream_text()) == expected
    assert decode.stats["with_kv"] == 2
    *_, last = service.complete(stream=True, stream_options={"include_usage": True})
    assert last.usage == answer.usage
    both = service.complete(n=2)
    assert both.choices[0].text == expected != both.choices[1].text
    assert service.complete(seed=2).choices[0].text == both.choices[1].text

    messages = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    chat = service.client.chat.completions.create(
        model=MODEL, messages=messages, max_completion_tokens=9, seed=1, logprobs=True, top_logprobs=2
    )
    assert len(chat.choices[0].logprobs.content) == chat.usage.completion_tokens == 9
    parts = service.client.chat.completions.create(
        model=MODEL, messages=messages, max_completion_tokens=9, seed=1, stream=True
    )
    assert "".join(part.choices[0].delta.content or "" for part in parts) == chat.choices[0].message.content

    timeline = httpx.get(f"{service.url}/v1/requests/{answer.id}/timeline").json()
    assert [leg["role"] for leg in timeline["instances"]] == ["prefill", "decode"]
    assert timeline["kv_bytes_moved"] == 100 * answer.usage.prompt_tokens
    assert {"route", "prefill", "kv_save", "kv_load", "handoff", "decode", "total"} <= set(timeline["stages_ms"])

    for fields, error in (
        ({"max_tokens": 0}, openai.BadRequestError),
        ({"model": "other"}, openai.NotFoundError),
        ({"prompt": "word " * 3000}, openai.BadRequestError),
    ):
        with pytest.raises(error):
            service.complete(**fields)
    assert service.router is not None
    service.router.send_signal(signal.SIGTERM)
    assert service.router.wait(30) == 0


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_leaves_is_cancelled_at_the_instance(service: Service, stream: bool) -> None:
    prefill = service.add("prefill", "--handoff-ms", "60000")
    decode = service.add("decode", "--step-ms", "20")
    service.start("--prefill-wait-s", "0").wait_for(1, 1)

    def leave(**fields: Any) -> None:
        body = {"prompt": PROMPT, "max_tokens": 1000, "stream": stream, **fields}
        with contextlib.suppress(httpx.ReadTimeout), httpx.Client(timeout=1.5) as client:  # noqa: SIM117
            with client.stream("POST", f"{service.url}/v1/completions", json=body) as answer:
                for number, _ in enumerate(answer.iter_lines()):
                    if number > 8:
                        return

    leave()
    wait_until(lambda: prefill.stats.get("aborted") == 1, "the prefill leg being aborted")
    assert decode.stats["added"] == 0
    prefill.kill()
    service.wait_for(0, 1)
    leave(n=2)
    wait_until(lambda: decode.stats.get("aborted") == 2, "both decode legs being aborted")
    assert service.get_metric("client_disconnects_total") == 2
    assert service.get_metric("num_requests_running") == 0


def test_stop_string_aborts_the_decode_leg(service: Service, expected: str, tokenizer: Tokenizer) -> None:
    decode = service.add("decode", "--step-ms", "20")
    service.start().wait_for(0, 1)
    stop = expected[20:26]
    assert service.complete(stop=stop, max_tokens=1000).choices[0].text == expected[: expected.index(stop)]
    wait_until(lambda: decode.stats.get("aborted") == 1, "the leg being aborted")


def test_killed_decode_instance_costs_the_client_a_pause(service: Service, expected: str) -> None:
    service.add("prefill")
    decodes = [service.add("decode", "--step-ms", "10"), service.add("decode", "--step-ms", "10")]
    service.start().wait_for(1, 2)
    text, killed = "", False
    for part in service.stream_text():
        text += part
        if len(text) > 60 and not killed:
            killed = True
            busy = next(decode for decode in decodes if decode.stats["added"])
            busy.kill()
    assert killed
    assert text == expected
    assert service.get_metric("retries_total") == 1
    service.wait_for(1, 1)
    busy.start()
    service.wait_for(1, 2)
    assert [service.complete().choices[0].text for _ in range(2)] == [expected] * 2


def test_only_decode_instance_may_be_restarted_in_mid_stream(service: Service, expected: str) -> None:
    service.add("prefill")
    decode = service.add("decode", "--step-ms", "10", "--die-after-tokens", "20")
    service.start().wait_for(1, 1)
    text = ""
    for part in service.stream_text():
        text += part
        if decode.process is not None and decode.process.poll() is not None:
            pytest.fail("tokens came from a dead instance")
        if len(text) > 60 and decode.options:
            # It dies by itself at its 20th token; what starts in its place lives.
            assert decode.process is not None
            decode.options = []
            decode.process.wait(30)
            decode.start()
    assert text == expected


def test_prefill_that_dies_before_its_token_is_replaced_by_another(service: Service, expected: str) -> None:
    dying, other = service.add("prefill", "--die-after-tokens", "0"), service.add("prefill")
    decode = service.add("decode")
    service.start("--prefill-policy", "round_robin").wait_for(2, 1)
    for _ in range(2):
        assert "".join(service.stream_text()) == expected
    assert dying.process is not None
    assert dying.process.wait(30) == 9
    assert (other.stats["added"], decode.stats["with_kv"]) == (2, 2)
    assert service.get_metric("retries_total") == 1


@pytest.mark.parametrize("num_tokens", ["0", "10"])
def test_decode_that_dies_twice_costs_two_pauses(service: Service, expected: str, num_tokens: str) -> None:
    """Before its first token, and in mid-stream; only then is there one that lives."""
    prefill = service.add("prefill")
    dying = [service.add("decode", "--step-ms", "2", "--die-after-tokens", num_tokens) for _ in range(2)]
    service.start().wait_for(1, 2)
    stream = service.stream_text()
    text = next(stream)
    for instance in dying:
        assert instance.process is not None
        assert instance.process.wait(30) == 9
    dying[0].options = []
    dying[0].start()
    assert text + "".join(stream) == expected
    assert service.get_metric("retries_total") == 2
    assert (prefill.stats["added"], dying[0].stats["with_kv"]) == (1, 0)


def test_decode_that_dies_again_and_again_ends_in_a_plain_error(service: Service, expected: str) -> None:
    service.add("prefill")
    dying = [service.add("decode", "--step-ms", "2", "--die-after-tokens", "10") for _ in range(3)]
    service.start().wait_for(1, 3)
    text = ""
    with pytest.raises(openai.APIError, match="3 instances failed the request"):  # noqa: PT012
        for part in service.stream_text():
            text += part
    assert text
    assert expected.startswith(text)
    for instance in dying:
        assert instance.process is not None
        assert instance.process.wait(30) == 9
    assert httpx.get(f"{service.url}/health").status_code == 200


def test_stuck_decode_instance_is_lost_by_its_silence(service: Service, expected: str) -> None:
    decodes = [service.add("decode", "--step-ms", "10"), service.add("decode", "--step-ms", "10")]
    service.start("--heartbeat-timeout-s", "1", "--heartbeat-interval-s", "0.25").wait_for(0, 2)
    text, stopped = "", False
    for part in service.stream_text():
        text += part
        if len(text) > 60 and not stopped:
            stopped = True
            busy = next(decode for decode in decodes if decode.stats["added"])
            busy.signal(signal.SIGSTOP)
    assert text == expected
    busy.signal(signal.SIGCONT)
    service.wait_for(0, 2)
    assert service.complete().choices[0].text == expected


@pytest.mark.parametrize("handoff_ms", ["0", "60000"])
def test_killed_prefill_pool_leaves_decode_to_do_it(service: Service, expected: str, handoff_ms: str) -> None:
    prefill = service.add("prefill", "--handoff-ms", handoff_ms)
    service.add("decode", "--step-ms", "2")
    service.start("--prefill-wait-s", "0.2").wait_for(1, 1)
    text = ""
    for part in service.stream_text():
        if not text:
            prefill.kill()
        text += part
    assert text == expected
    service.wait_for(0, 1)
    assert service.complete().choices[0].text == expected
    assert service.get_metric("colocated_fallbacks_total") == 1


def test_instance_of_another_model_is_refused_until_it_is_alone(service: Service) -> None:
    first, other = service.add("decode"), service.add("decode", "--weights", "w1")
    service.start().wait_for(0, 1)
    wait_until(lambda: "is refused" in service.log.read_text(), "the refusal")
    refusals = [line for line in service.log.read_text().splitlines() if "is refused" in line]
    assert len(refusals) == 1
    assert "weights" in refusals[0]
    refused = other if other.address in refusals[0] else first
    admitted = first if refused is other else other
    service.complete()
    assert (admitted.stats["added"], refused.stats["added"]) == (1, 0)
    admitted.kill()
    wait_until(lambda: _served_by(service, refused), "the other one taking over")


def _served_by(service: Service, instance: Replay) -> bool:
    with contextlib.suppress(openai.APIStatusError):
        service.complete(max_tokens=1)
    return instance.stats["added"] > 0


def test_full_and_empty_pools_have_their_statuses(service: Service) -> None:
    full = [service.add("decode", "--refuse", "rate_limit_exceeded:429") for _ in range(2)]
    service.start().wait_for(0, 2)
    with pytest.raises(openai.RateLimitError) as caught:
        service.complete()
    assert int(caught.value.response.headers["retry-after"]) >= 1
    assert [instance.stats["added"] for instance in full] == [1, 1]
    for instance in full:
        instance.kill()
    service.wait_for(0, 0)
    with pytest.raises(openai.InternalServerError) as unavailable:
        service.complete()
    assert unavailable.value.status_code == 503
    assert httpx.get(f"{service.url}/health").status_code == 200


def test_admission_bounds_what_runs_and_what_waits(service: Service) -> None:
    service.add("decode", "--step-ms", "20")
    service.start("--max-concurrent", "1", "--max-queue", "0").wait_for(0, 1)
    running = service.stream_text(max_tokens=200)
    next(running)
    with pytest.raises(openai.RateLimitError):
        service.complete()
    running.close()  # type: ignore[attr-defined]
    wait_until(lambda: service.get_metric("num_requests_running") == 0, "the place being free")
    assert service.complete(max_tokens=1).choices[0].finish_reason == "length"


def test_garbage_from_the_network_does_not_harm(service: Service, expected: str) -> None:
    service.add("decode")
    service.start().wait_for(0, 1)
    for data in (b"\x00" * 100, b"GET / HTTP/9\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\ncontent-length: 5\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", service.port)) as connection:
            connection.sendall(data)
    assert service.complete().choices[0].text == expected


def test_port_in_use_is_one_line(service: Service) -> None:
    with socket.create_server(("127.0.0.1", service.port)):
        service.start("--decode", "127.0.0.1:1")
        assert service.router is not None
        assert service.router.wait(30) == 2
    (line,) = service.log.read_text().splitlines()
    assert line == f"error: port {service.port} on 127.0.0.1 is in use; choose another with --port"


def test_a_ready_file_that_cannot_be_written_is_one_line(service: Service, tmp_path: Path) -> None:
    service.start("--decode", "127.0.0.1:1", "--ready-file", str(tmp_path / "none" / "ready.json"))
    assert service.router is not None
    assert service.router.wait(30) == 2
    log = service.log.read_text()
    assert log.splitlines()[-1].endswith("ready.json: No such file or directory")
    assert "Traceback" not in log


def test_stopping_the_router_ends_its_streams_and_says_goodbye(service: Service) -> None:
    decode = service.add("decode", "--step-ms", "20")
    service.start("--shutdown-timeout-s", "1").wait_for(0, 1)
    stream = service.stream_text(max_tokens=1000)
    next(stream)
    assert service.router is not None
    service.router.send_signal(signal.SIGTERM)
    with pytest.raises(openai.APIError, match="the router is stopping"):
        list(stream)
    assert service.router.wait(30) == 0
    wait_until(lambda: decode.stats["aborted"] == 1, "the leg being aborted")
    assert "Traceback" not in service.log.read_text()


def test_drained_router_finishes_what_runs_refuses_the_rest_and_ends(service: Service, expected: str) -> None:
    service.add("prefill")
    service.add("decode", "--step-ms", "30")
    service.start("--shutdown-timeout-s", "60").wait_for(1, 1)
    stream = service.stream_text()
    text = next(stream)
    assert httpx.post(f"{service.url}/drain").status_code == 202
    ready = httpx.get(f"{service.url}/ready")
    assert (ready.status_code, ready.json()["status"]) == (503, "draining")
    with pytest.raises(openai.APIStatusError) as refused:
        service.complete()
    assert refused.value.status_code == 503
    assert refused.value.response.headers["retry-after"]
    assert text + "".join(stream) == expected
    assert service.router is not None
    assert service.router.wait(30) == 0
