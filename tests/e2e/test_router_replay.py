"""A real router process over instances that replay tokens: what clients see while instances come, fail and go."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from processes import find_free_port, wait_until

from pdserve.text import Tokenizer

sys.path.insert(0, str(Path(__file__).parent.parent))

from replay_instance import replay_token

MODEL = "smollm2-135m-instruct"
REPLAY = str(Path(__file__).parent.parent / "replay_instance.py")
PROMPT = "The house stands on a hill"
NUM_TOKENS = 60
VOCAB_SIZE = 49152


@dataclass
class Replay:
    """One replaying instance's process."""

    role: str
    directory: Path
    options: list[str] = field(default_factory=list)
    port: int = field(default_factory=find_free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def stats(self) -> dict[str, int]:
        path = self.directory / f"{self.port}.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def start(self) -> Replay:
        command = [sys.executable, REPLAY, "--role", self.role, "--port", str(self.port)]
        command += ["--stats-file", str(self.directory / f"{self.port}.json"), *self.options]
        self.process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return self

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()


class Service:
    """A router over replaying instances."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.instances: list[Replay] = []
        self.port = find_free_port()
        self.log = directory / "router.log"
        self.router: subprocess.Popen[bytes] | None = None

    def add(self, role: str, *options: str) -> Replay:
        self.instances.append(Replay(role, self.directory, list(options)).start())
        return self.instances[-1]

    def start(self, *options: str) -> Service:
        command = [sys.executable, "-m", "pdserve.router.main", "--port", str(self.port), *options]
        for instance in self.instances:
            command += [f"--{instance.role}", instance.address]
        with self.log.open("wb") as log:
            self.router = subprocess.Popen(command, stdout=log, stderr=log)
        return self

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=20)

    def get_pools(self) -> dict[str, int]:
        with contextlib.suppress(httpx.TransportError):
            pools = httpx.get(f"{self.url}/ready").json()["pools"]
            return {role: pool["usable"] for role, pool in pools.items()}
        return {}

    def wait_for(self, prefill: int, decode: int) -> Service:
        wait_until(
            lambda: self.get_pools() == {"prefill": prefill, "decode": decode},
            f"{prefill} prefill and {decode} decode instances being usable",
        )
        return self

    def complete(self, **fields: Any) -> Any:
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "seed": 1, **fields}
        return self.client.completions.create(**body)

    def stream_text(self, **fields: Any) -> Iterator[str]:
        for chunk in self.complete(stream=True, **fields):
            yield "".join(choice.text for choice in chunk.choices)

    def get_metric(self, name: str) -> float:
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        found = [line for line in lines if line.split("{")[0].split(" ")[0] == f"pdserve_router_{name}"]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)

    def close(self) -> None:
        for process in (self.router, *(instance.process for instance in self.instances)):
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()


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
    assert service.router.wait(15) == 0


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_leaves_is_cancelled_at_the_instance(service: Service, stream: bool) -> None:
    prefill = service.add("prefill", "--handoff-ms", "60000")
    decode = service.add("decode", "--step-ms", "20")
    service.start("--prefill-wait-s", "0").wait_for(1, 1)

    def leave(**fields: Any) -> None:
        body = {"prompt": PROMPT, "max_tokens": 1000, "stream": stream, **fields}
        with contextlib.suppress(httpx.ReadTimeout), httpx.Client(timeout=0.5) as client:  # noqa: SIM117
            with client.stream("POST", f"{service.url}/v1/completions", json=body) as answer:
                for number, _ in enumerate(answer.iter_lines()):
                    if number > 8:
                        return

    leave()
    wait_until(lambda: prefill.stats.get("aborted") == 1, "the prefill leg being aborted", 5)
    assert decode.stats["added"] == 0
    prefill.kill()
    service.wait_for(0, 1)
    leave(n=2)
    wait_until(lambda: decode.stats.get("aborted") == 2, "both decode legs being aborted", 5)
    assert service.get_metric("client_disconnects_total") == 2
    assert service.get_metric("num_requests_running") == 0


def test_stop_string_aborts_the_decode_leg(service: Service, expected: str, tokenizer: Tokenizer) -> None:
    decode = service.add("decode", "--step-ms", "20")
    service.start().wait_for(0, 1)
    stop = expected[20:26]
    assert service.complete(stop=stop, max_tokens=1000).choices[0].text == expected[: expected.index(stop)]
    wait_until(lambda: decode.stats.get("aborted") == 1, "the leg being aborted", 5)


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
            decode.process.wait(10)
            decode.start()
    assert text == expected


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
    wait_until(lambda: service.get_metric("num_requests_running") == 0, "the place being free", 5)
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
        assert service.router.wait(20) == 2
    (line,) = service.log.read_text().splitlines()
    assert line == f"error: port {service.port} on 127.0.0.1 is in use; choose another with --port"


def test_stopping_the_router_ends_its_streams_and_says_goodbye(service: Service) -> None:
    decode = service.add("decode", "--step-ms", "20")
    service.start("--shutdown-timeout-s", "1").wait_for(0, 1)
    stream = service.stream_text(max_tokens=1000)
    next(stream)
    assert service.router is not None
    service.router.send_signal(signal.SIGTERM)
    with pytest.raises(openai.APIError, match="the router is stopping"):
        list(stream)
    assert service.router.wait(10) == 0
    wait_until(lambda: decode.stats["aborted"] == 1, "the leg being aborted", 5)
    assert "Traceback" not in service.log.read_text()
