"""A scripted engine behind a real server on a real loopback socket, and a router's end of it."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import zmq

from pdserve.engine.server.counters import ServerCounters
from pdserve.engine.server.inbox import Drain, Inbox, Page
from pdserve.engine.server.instance_server import InstanceServer
from pdserve.engine.server.listening import bind_router_socket
from pdserve.engine.server.settings import InstanceSettings
from pdserve.engine.server.socket_thread import SocketThread
from pdserve.errors import OverloadedError, RequestError
from pdserve.kv_layout import KVCacheSpec, ModelIdentity
from pdserve.protocol import (
    AddRequest,
    CacheEvents,
    FinishReason,
    GrammarKind,
    GrammarSpec,
    Hello,
    InstanceLimits,
    InstanceLoad,
    Ready,
    RequestOutput,
    Role,
    SamplingParams,
    StepOutputs,
    decode_instance_message,
    encode,
)

DEADLINE_S = 30.0


def wait_until(condition: Callable[[], object], what: str = "the condition") -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s, f"{what} did not come about"
        time.sleep(0.002)


class ScriptedEngine:
    """Answers a prompt ending in t with t+1, t+2, …; the test may stop its steps or make them fail."""

    def __init__(self) -> None:
        self.live: dict[str, AddRequest] = {}
        self.made: dict[str, int] = {}
        self.aborted: list[str] = []
        self.may_step = threading.Event()
        self.may_step.set()
        self.in_step = threading.Event()
        self.max_live = 100
        self.holds_kv = False
        self.fails_with: Exception | None = None
        self.num_steps = 0
        self.listening = False
        self.cache_events: CacheEvents | None = None
        self.step_s = 0.001
        """What a step takes; 0 floods the router."""
        self.may_compile = threading.Event()
        self.may_compile.set()
        self.compiling: list[str] = []

    def compile_grammar(self, grammar: GrammarSpec) -> None:
        self.compiling.append(grammar.text)
        assert self.may_compile.wait(DEADLINE_S)
        if grammar.text == "wrong":
            raise RequestError("the grammar cannot be followed", param="grammar")
        if grammar.text == "mistake":
            raise ZeroDivisionError("a mistake in the engine")

    def add_request(self, request: AddRequest) -> None:
        assert request.request_id not in self.live
        if request.prompt_token_ids == [666]:
            raise ZeroDivisionError("a mistake in the engine")
        if not request.prompt_token_ids:
            raise RequestError("the prompt is empty", param="prompt")
        if len(self.live) >= self.max_live:
            raise OverloadedError("full")
        self.live[request.request_id] = request
        self.made[request.request_id] = 0

    def abort_requests(self, request_ids) -> None:
        for request_id in request_ids:
            if self.live.pop(request_id, None) is not None:
                self.aborted.append(request_id)

    def has_work(self) -> bool:
        return bool(self.live)

    def has_transfers(self) -> bool:
        return self.holds_kv

    def step(self) -> list[RequestOutput]:
        self.in_step.set()
        assert self.may_step.wait(DEADLINE_S)
        self.in_step.clear()
        time.sleep(self.step_s)
        self.num_steps += 1
        if self.fails_with is not None:
            raise self.fails_with
        outputs = []
        for request_id, request in list(self.live.items()):
            self.made[request_id] += 1
            token = request.prompt_token_ids[-1] + self.made[request_id]
            done = self.made[request_id] == request.sampling.max_tokens
            outputs.append(
                RequestOutput(
                    request_id=request_id,
                    new_token_ids=[token],
                    finish_reason=FinishReason.LENGTH if done else None,
                )
            )
            if done:
                del self.live[request_id]
        return outputs

    def get_load(self) -> InstanceLoad:
        return InstanceLoad(num_running=len(self.live), num_blocks=9)

    def listen_to_cache(self) -> CacheEvents:
        self.listening = True
        return CacheEvents(stored=[b"old"], replaces_all=True)

    def ignore_cache(self) -> None:
        self.listening = False

    def take_cache_events(self) -> CacheEvents | None:
        events, self.cache_events = self.cache_events, None
        return events


class RouterEnd:
    """A router's connection: one DEALER, one session."""

    def __init__(self, context: zmq.Context, port: int, router_id: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(f"tcp://127.0.0.1:{port}")
        self.router_id = router_id
        self.session = uuid.uuid4().hex
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.others: list = []

    def send(self, message) -> None:
        self.socket.send(encode(message))

    def hello(self, **changes) -> None:
        fields = {"router_id": self.router_id, "session": self.session} | changes
        self.send(Hello(**fields))

    def open(self) -> Ready:
        self.hello()
        return self.wait_for(Ready)

    def add(self, request_id: str, prompt: list[int], max_tokens: int = 3, grammar: str | None = None) -> None:
        spec = None if grammar is None else GrammarSpec(GrammarKind.REGEX, grammar)
        self.send(
            AddRequest(
                request_id=request_id,
                prompt_token_ids=prompt,
                sampling=SamplingParams(max_tokens=max_tokens, grammar=spec),
            )
        )

    def receive(self, timeout_s: float) -> bool:
        """Take one message off the socket, if one comes in time."""
        if not self.socket.poll(timeout_s * 1000):
            return False
        message = decode_instance_message(self.socket.recv())
        if isinstance(message, StepOutputs):
            for output in message.outputs:
                self.outputs.setdefault(output.request_id, []).append(output)
        self.others.append(message)
        return True

    def wait_for(self, kind: type, matches: Callable = lambda _: True):
        end_s = time.monotonic() + DEADLINE_S
        seen = 0
        while True:
            for index in range(seen, len(self.others)):
                message = self.others[index]
                if isinstance(message, kind) and matches(message):
                    del self.others[: index + 1]
                    return message
            seen = len(self.others)
            assert self.receive(end_s - time.monotonic()), f"no {kind.__name__} came"

    def finish(self, request_id: str) -> list[RequestOutput]:
        """All outputs of a request, once it has ended."""
        end_s = time.monotonic() + DEADLINE_S
        while not any(output.finish_reason for output in self.outputs.get(request_id, [])):
            assert self.receive(end_s - time.monotonic()), f"{request_id} did not finish"
        return self.outputs[request_id]

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.finish(request_id) for token in output.new_token_ids]


class Instance:
    """A running server and what the test may look at."""

    def __init__(self, settings: InstanceSettings) -> None:
        self.engine = ScriptedEngine()
        self.inbox = Inbox()
        self.counters = ServerCounters()
        self.status: int | None = None
        self.context = zmq.Context()
        socket, self.port = bind_router_socket(self.context, settings.host, 0)
        self.server = InstanceServer(
            self.engine,
            SocketThread(socket, build_ready(), self.inbox, settings, self.counters),
            self.inbox,
            drain_timeout_s=settings.drain_timeout_s,
            counters=self.counters,
            pages={
                Page.METRICS: lambda: b"engine_metrics 1\n" + self.counters.render(),
                Page.BLOCKS: lambda: b"{}",
            },
        )
        self.routers: list[RouterEnd] = []
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        self.status = self.server.run()

    def connect(self, router_id: str = "router-a") -> RouterEnd:
        self.routers.append(RouterEnd(self.context, self.port, router_id))
        return self.routers[-1]

    def count(self, name: str, **labels: str) -> float:
        return self.counters.registry.get_sample_value(f"pdserve_server_{name}", labels) or 0.0

    def join(self) -> int | None:
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive()
        return self.status

    def close(self) -> None:
        self.engine.may_step.set()
        self.engine.holds_kv = False
        self.inbox.put(Drain("test ends"))
        for router in self.routers:
            router.socket.close()
        self.join()
        self.context.term()


def build_ready() -> Ready:
    spec = KVCacheSpec(num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")
    return Ready(
        session="",
        instance_id="prefill-0",
        generation="g1",
        role=Role.PREFILL,
        model="scripted",
        identity=ModelIdentity("w", "a", "float32", "scripted", spec),
        limits=InstanceLimits(
            max_model_len=100, max_num_seqs=4, max_queue_len=8, num_blocks=9, vocab_size=99, max_logprobs=5
        ),
        connector="null",
        load=InstanceLoad(num_blocks=9),
    )


@pytest.fixture
def start_instance() -> Iterator[Callable[..., Instance]]:
    """Starts instances with changed settings; all of them are closed at the end."""
    instances: list[Instance] = []

    def start(**changes) -> Instance:
        instances.append(Instance(replace(InstanceSettings(heartbeat_interval_s=0.05), **changes)))
        return instances[-1]

    yield start
    for instance in instances:
        instance.close()


@pytest.fixture
def wait() -> Callable[..., None]:
    return wait_until
