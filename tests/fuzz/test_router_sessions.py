"""A router whose only instance sends what no instance sends: each request ends, and honest answers count as ever."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import zmq
import zmq.asyncio
from api_bench import MODEL, load_text
from hostile_frames import hostile_frames
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from replay_instance import ReplayInstance, ReplayOptions, replay_token

from pdserve.protocol import (
    AddRequest,
    CacheEvents,
    FinishReason,
    Heartbeat,
    Hello,
    InstanceLoad,
    KVTransferParams,
    Ready,
    Refused,
    RequestOutput,
    StepOutputs,
    TimelineEvent,
    TokenLogprobs,
    WireError,
    decode_router_message,
    encode,
)
from pdserve.router.admission import Admission
from pdserve.router.api.app import build_app
from pdserve.router.api.service import RouterService
from pdserve.router.config import AdmissionSettings, HandoffSettings, PoolSettings, RouterSettings
from pdserve.router.fleet import Fleet
from pdserve.router.metrics import RouterMetrics
from pdserve.router.timeline import TimelineStore

PROMPT, SEED, NUM_TOKENS = [5, 6, 7], 3, 4
BODY = {"prompt": PROMPT, "seed": SEED, "max_tokens": NUM_TOKENS, "logprobs": 1}
SESSION = "s" * 32
LEG = "q" * 64
"""Stands for the leg's id in frames that are made before there is one; the real one is made as long."""
LOAD = InstanceLoad(num_running=1, num_waiting=1, num_used_blocks=1, num_blocks=9)


def build_ready(session: str) -> Ready:
    replay = ReplayInstance.__new__(ReplayInstance)
    replay.options, replay.generation, replay.port, replay.live = ReplayOptions(), "g0", 1, {}
    return replay.ready(session)


MESSAGES = [
    build_ready(SESSION),
    Refused(session=SESSION, reason="no"),
    Heartbeat(generation="g0", load=LOAD),
    CacheEvents(stored=[b"\x01" * 16], evicted=[b"\x02" * 16]),
    *(
        StepOutputs(outputs=[output], load=LOAD)
        for output in (
            RequestOutput(
                request_id=LEG,
                new_token_ids=[1500, 1501],
                logprobs=[TokenLogprobs(1500, -0.5, 1, [1500], [-0.5]), TokenLogprobs(1501, -0.5, 1, [1501], [-0.5])],
                num_cached_tokens=1,
                num_external_tokens=1,
                events=[TimelineEvent("first_token", 1, {"num_tokens": 1.0})],
            ),
            RequestOutput(request_id=LEG, new_token_ids=[1502], finish_reason=FinishReason.STOP, stop_token_id=1502),
            RequestOutput(
                request_id=LEG,
                finish_reason=FinishReason.HANDOFF,
                kv_transfer_params=KVTransferParams(connector="c", transfer_id="t", num_tokens=3, num_bytes=9),
            ),
            RequestOutput(
                request_id=LEG,
                finish_reason=FinishReason.ERROR,
                error=WireError(code="c", message="m", http_status=400, param="p"),
            ),
            RequestOutput(request_id=LEG, finish_reason=FinishReason.ABORT),
            RequestOutput(request_id=LEG, prompt_logprobs=[TokenLogprobs(6, -0.5, 1, [6], [-0.5])] * 2),
        )
    ),
]


class LyingInstance:
    """Answers each request with the frames in ``lies``, and then as an honest instance would."""

    def __init__(self) -> None:
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.lies: list[bytes] = []
        self.sessions: dict[bytes, str] = {}

    async def run(self) -> None:
        while True:
            peer, frame = await self.socket.recv_multipart()
            match decode_router_message(frame):
                case Hello() as hello:
                    if self.sessions.get(peer) != hello.session:
                        self.sessions[peer] = hello.session
                        await self.send(peer, encode(build_ready(hello.session)))
                    else:
                        await self.send(peer, encode(Heartbeat(generation="g0", load=InstanceLoad(num_blocks=9))))
                case AddRequest() as request:
                    await self.answer(peer, request)

    async def answer(self, peer: bytes, request: AddRequest) -> None:
        lies, self.lies = self.lies, []
        leg = request.request_id.encode()
        assert len(leg) <= len(LEG)
        for lie in lies:
            # The placeholder is a string of 64 characters: 0xd9, its length, itself.
            named = lie.replace(b"\xd9" + bytes([len(LEG)]) + LEG.encode(), b"\xd9" + bytes([len(leg)]) + leg)
            await self.send(peer, named.replace(SESSION.encode(), self.sessions[peer].encode()))
        for position in range(len(request.output_token_ids), NUM_TOKENS):
            token_id = replay_token(request.prompt_token_ids, request.sampling.seed or 0, position, 49152)
            output = RequestOutput(
                request_id=request.request_id,
                new_token_ids=[token_id],
                logprobs=[TokenLogprobs(token_id, -0.5, 1, [token_id], [-0.5])],
                finish_reason=FinishReason.LENGTH if position == NUM_TOKENS - 1 else None,
            )
            await self.send(peer, encode(StepOutputs(outputs=[output], load=InstanceLoad(num_blocks=9))))

    async def send(self, peer: bytes, frame: bytes) -> None:
        await self.socket.send_multipart([peer, frame])


class Router:
    """The application over a real fleet, on a loop that outlives the examples."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.runner.run(self._start())

    async def _start(self) -> None:
        self.instance = LyingInstance()
        pools = PoolSettings(decode=[f"127.0.0.1:{self.instance.port}"], heartbeat_interval_s=0.2, max_faults=0)
        self.settings = RouterSettings(
            pools=pools,
            admission=AdmissionSettings(request_timeout_s=20.0, timeline_capacity=10),
            handoff=HandoffSettings(failover_wait_s=3.0),
        )
        metrics = RouterMetrics()
        tokenizer, chat_template = load_text()
        self.fleet = Fleet(pools, router_id="r", model_name=MODEL, metrics=metrics, uses_prefixes=True)
        service = RouterService(
            settings=self.settings,
            model_name=MODEL,
            tokenizer=tokenizer,
            chat_template=chat_template,
            fleet=self.fleet,
            admission=Admission(self.settings.admission, metrics),
            metrics=metrics,
            timelines=TimelineStore(10),
        )
        self.telling = asyncio.create_task(self.instance.run())
        self.fleet.start()
        transport = httpx.ASGITransport(build_app(service))
        self.client = httpx.AsyncClient(transport=transport, base_url="http://router", timeout=60)

    def ask(self, lies: list[bytes], **fields: Any) -> httpx.Response:
        """One request, answered with these lies first; waits until the instance is taken again."""

        async def main() -> httpx.Response:
            self.instance.lies = lies
            async with asyncio.timeout(60):
                while not self.fleet.is_serving:
                    await asyncio.sleep(0.002)
                return await self.client.post("/v1/completions", json={**BODY, **fields})

        return self.runner.run(main())

    def look(self) -> list[int]:
        """Statuses of the pages that show what instances said."""

        async def main() -> list[int]:
            return [(await self.client.get(path)).status_code for path in ("/v1/status", "/metrics", "/ready")]

        return self.runner.run(main())

    def close(self) -> None:
        async def main() -> None:
            await self.client.aclose()
            await self.fleet.close()
            self.telling.cancel()
            await asyncio.gather(self.telling, return_exceptions=True)
            self.instance.socket.close()
            await asyncio.to_thread(self.instance.context.term)

        self.runner.run(main())
        self.runner.close()


@pytest.fixture(scope="module")
def router() -> Iterator[Router]:
    made = Router()
    yield made
    made.close()


def test_lying_instances_cost_their_own_requests_only(router: Router, caplog: pytest.LogCaptureFixture) -> None:
    honest = router.ask([])
    assert honest.status_code == 200
    expected = honest.json()["choices"]
    statuses, num_deceived = set(), 0

    @settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(lies=st.lists(hostile_frames(MESSAGES), min_size=1, max_size=4), streams=st.booleans())
    def test(lies: list[bytes], streams: bool) -> None:
        nonlocal num_deceived
        answer = router.ask(lies, stream=streams)
        statuses.add(answer.status_code)
        num_deceived += not streams and answer.json().get("choices") != expected
        if streams and answer.status_code == 200:
            assert answer.text.endswith("data: [DONE]\n\n")
        assert router.look()[:2] == [200, 200]
        honest = router.ask([])
        assert honest.status_code == 200, honest.text
        assert honest.json()["choices"] == expected

    test()
    assert {200, 400} <= statuses <= {200, 400, 500, 503, 504}
    assert num_deceived > 5, "the lies were told to nobody"
    assert not [record for record in caplog.records if record.exc_info], "an error that nobody expected"
