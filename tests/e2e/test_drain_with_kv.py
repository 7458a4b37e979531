"""SIGTERM to a real prefill instance whose KV is still wanted; the router and the decode engine are played here."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq.asyncio
from pd_pair import Alone, Answer, build_core
from processes import ManagedProcess

from pdserve.connectors.testing.free_port import find_free_port
from pdserve.engine.core import EngineCore
from pdserve.protocol import (
    AddRequest,
    CacheEvents,
    FinishReason,
    KVTransferParams,
    RequestOutput,
    Role,
    SamplingParams,
)
from pdserve.router.instance import Instance, SessionSettings

pytest.importorskip("nixl")

sys.path.insert(0, str(Path(__file__).parent.parent / "soak"))

from tiny_model import build_tiny_model

PROMPT = list(range(1000, 1075))
SAMPLING = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
DRAIN_TIMEOUT_S = 60.0


class Nobody:
    """Is told of the session and does nothing."""

    def instance_ready(self, instance: Instance) -> None:
        pass

    def instance_lost(self, instance: Instance) -> None:
        pass

    def instance_load_changed(self, instance: Instance) -> None:
        pass

    def instance_cache_changed(self, instance: Instance, events: CacheEvents) -> None:
        pass

    def wire_error(self, instance: Instance) -> None:
        pass


def start_prefill(directory: Path, model: Path, drain_timeout_s: float) -> ManagedProcess:
    command = ["pdserve.prefill.main", "--model", str(model), "--num-blocks", "256", "--connector", "nixl"]
    command += ["--port", str(find_free_port()), "--http-port", "0", "--drain-timeout-s", f"{drain_timeout_s}"]
    prefill = ManagedProcess("prefill", command, directory)
    prefill.start()
    prefill.wait_ready()
    return prefill


@asynccontextmanager
async def router_to(prefill: ManagedProcess) -> AsyncIterator[Instance]:
    """A router's session with the instance."""
    context = zmq.asyncio.Context()
    instance = Instance(
        prefill.ready["address"].removeprefix("tcp://"),
        Role.PREFILL,
        router_id="r",
        context=context,
        observer=Nobody(),
        settings=SessionSettings(heartbeat_interval_s=0.2, heartbeat_timeout_s=60.0),
    )
    running = asyncio.create_task(instance.run())
    try:
        await until(lambda: instance.is_usable)
        yield instance
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await asyncio.to_thread(context.term)


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


async def ask(instance: Instance, name: str) -> list[RequestOutput]:
    """A prefill leg to its end."""
    leg = instance.start_leg(
        AddRequest(request_id=name, prompt_token_ids=PROMPT, sampling=SAMPLING, handoff=True, timeout_s=60.0)
    )
    outputs = [await leg.next_output()]
    while outputs[-1].finish_reason is None:
        outputs.append(await leg.next_output())
    return outputs


async def hand_over(instance: Instance) -> tuple[list[int], KVTransferParams]:
    outputs = await ask(instance, "wanted")
    assert outputs[-1].finish_reason is FinishReason.HANDOFF
    params = outputs[-1].kv_transfer_params
    assert params is not None
    return [token_id for output in outputs for token_id in output.new_token_ids], params


def take_over(decode: EngineCore, first: list[int], params: KVTransferParams) -> Answer:
    answer = Answer(token_ids=list(first))
    decode.add_request(
        AddRequest(
            request_id="wanted",
            prompt_token_ids=PROMPT,
            output_token_ids=first,
            sampling=SAMPLING,
            kv_transfer_params=params,
        )
    )
    while answer.finish_reason is None:
        for output in decode.step():
            answer.take(output)
            answer.finish_reason = output.finish_reason
    return answer


def test_it_refuses_new_work_serves_the_pending_read_and_ends(tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "model")
    alone = Alone(model=str(model))
    (expected,) = alone.generate([PROMPT], SAMPLING)
    alone.close()
    prefill = start_prefill(tmp_path, model, DRAIN_TIMEOUT_S)
    decode = build_core(Role.DECODE, model=str(model), connector="nixl", num_blocks=256)

    async def main() -> Answer:
        async with router_to(prefill) as instance:
            first, params = await hand_over(instance)
            assert prefill.process is not None
            prefill.process.send_signal(signal.SIGTERM)
            await until(lambda: instance.load.draining)
            (refused,) = await ask(instance, "too late")
            assert refused.error is not None
            assert (refused.error.http_status, refused.error.retryable) == (503, True)
            return take_over(decode, first, params)

    try:
        answer = asyncio.run(main())
        decode.close()
        assert (answer.token_ids, answer.num_external_tokens) == (expected.token_ids, len(PROMPT))
        assert prefill.process is not None
        assert prefill.process.wait(DRAIN_TIMEOUT_S) == 0
        assert "drain deadline" not in prefill.log.read_text()
    finally:
        prefill.kill()


def test_kv_that_nobody_fetches_keeps_it_to_its_deadline_and_no_longer(tmp_path: Path) -> None:
    prefill = start_prefill(tmp_path, build_tiny_model(tmp_path / "model"), 1.5)

    async def main() -> None:
        async with router_to(prefill) as instance:
            await hand_over(instance)

    try:
        asyncio.run(main())
        began = time.monotonic()
        assert prefill.stop() == 0  # the lease would last for a minute
        assert time.monotonic() - began >= 1.5
        assert "drain deadline" in prefill.log.read_text()
    finally:
        prefill.kill()
