"""Real engines that die at chosen moments of a hand-off: the client's tokens are those of one engine, each once."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from processes import Deployment, ManagedProcess, wait_until

pytest.importorskip("nixl")

sys.path.insert(0, str(Path(__file__).parent.parent / "soak"))

from tiny_model import build_tiny_model

from pdserve.engine import LLM, SamplingParams

NUM_TOKENS = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def service(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """One prefill and two decode instances. The router is patient, so that only deaths are losses."""
    deployment = Deployment(
        tmp_path_factory.mktemp("service"),
        num_decode=2,
        engine_options=["--model", str(model), "--connector", "nixl", "--debug-blocks"],
        router_options=["--model", str(model), "--heartbeat-timeout-s", "120"],
        store_option=False,
    )
    with deployment:
        yield deployment


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[LLM]:
    alone = LLM(str(model), num_blocks=256)
    yield alone
    alone.close()


@dataclass
class Stream:
    """A client's stream; the events that have come."""

    lines: Iterator[str]
    text: str = ""
    finish_reasons: list[str] = field(default_factory=list)
    num_tokens: int | None = None

    def read_event(self) -> bool:
        """The next event; False at the end."""
        for line in self.lines:
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                return False
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event["error"]
            for choice in event["choices"]:
                self.text += choice["text"]
                self.finish_reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
            if event.get("usage"):
                self.num_tokens = event["usage"]["completion_tokens"]
            return True
        raise AssertionError("the stream broke off")


class HandOff:
    """A request that has its first token, while no decode instance can take it up yet."""

    def __init__(self, service: Deployment, prompt: list[int]) -> None:
        self.service = service
        self.prompt = prompt
        (self.prefill,) = service.prefill
        self._client = httpx.Client(base_url=service.url, timeout=120)
        self._num_before = service.router.get_metric("pdserve_router_handoffs_total")
        for decode in service.decode:
            send(decode, signal.SIGSTOP)
        request = self._client.build_request("POST", "/v1/completions", json=self._body)
        self._response = self._client.send(request, stream=True)
        self.stream = Stream(self._response.iter_lines())
        while not self.stream.text:
            self.stream.read_event()
        router = service.router
        wait_until(
            lambda: router.get_metric("pdserve_router_handoffs_total") > self._num_before, "the prefill's answer"
        )

    @property
    def _body(self) -> dict[str, object]:
        return {
            "prompt": self.prompt,
            "max_tokens": NUM_TOKENS,
            "seed": 5,
            "temperature": 1.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def let_decode_go_on(self) -> None:
        for decode in self.service.decode:
            send(decode, signal.SIGCONT)

    def wait_for_load(self) -> ManagedProcess:
        """The decode instance that loads the KV now."""

        def find() -> ManagedProcess | None:
            for decode in self.service.decode:
                report = httpx.get(f"{decode.ready['http']}/debug/blocks", timeout=30).json()
                if any(holding["purpose"] == "loading" for holding in report["holdings"]):
                    return decode
            return None

        found: ManagedProcess = wait_until(find, "the load")
        return found

    def finish(self, engine: LLM) -> None:
        """The client has everything once, and nothing is held afterwards."""
        while self.stream.read_event():
            pass
        self._response.close()
        self._client.close()
        params = SamplingParams(temperature=1.0, seed=5, max_tokens=NUM_TOKENS, ignore_eos=True)
        (expected,) = engine.generate([self.prompt], [params], use_tqdm=False)
        assert self.stream.text == expected.text
        assert self.stream.num_tokens == NUM_TOKENS
        assert self.stream.finish_reasons == ["length"]
        for instance in self.service.instances:
            if not instance.is_alive:
                instance.start()
                instance.wait_ready()
        wait_until(lambda: count_usable(self.service) == 3, "the pools being whole again", 60)
        self.service.wait_idle()


def send(instance: ManagedProcess, number: signal.Signals) -> None:
    assert instance.process is not None
    instance.process.send_signal(number)


def count_usable(service: Deployment) -> int:
    pools = httpx.get(f"{service.url}/ready", timeout=30).json()["pools"]
    return sum(pool["usable"] for pool in pools.values())


def make_prompt(family: int) -> list[int]:
    return [1000 + 7 * family + 3 * position for position in range(75)]


def test_prefill_that_dies_before_decode_loads(service: Deployment, engine: LLM) -> None:
    hand_off = HandOff(service, make_prompt(1))
    hand_off.prefill.kill()
    hand_off.let_decode_go_on()
    hand_off.finish(engine)


def test_prefill_that_dies_while_decode_loads(service: Deployment, engine: LLM) -> None:
    hand_off = HandOff(service, make_prompt(2))
    send(hand_off.prefill, signal.SIGSTOP)
    hand_off.let_decode_go_on()
    hand_off.wait_for_load()
    hand_off.prefill.kill()
    hand_off.finish(engine)


def test_decode_that_dies_while_it_loads(service: Deployment, engine: LLM) -> None:
    hand_off = HandOff(service, make_prompt(3))
    send(hand_off.prefill, signal.SIGSTOP)
    hand_off.let_decode_go_on()
    hand_off.wait_for_load().kill()
    send(hand_off.prefill, signal.SIGCONT)
    hand_off.finish(engine)
