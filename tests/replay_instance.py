"""An instance without a model: it follows the protocol and makes tokens by a fixed rule.

A token depends on the prompt, the seed and its position only, as an engine's does, so a test can say which tokens
a client must get whatever failed on the way. It runs as a process (``python tests/replay_instance.py --help``), and
it is what the router's own cost is measured with: a step costs it next to nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from pdserve.kv_layout import KVCacheSpec, ModelIdentity
from pdserve.protocol import (
    AbortRequests,
    AddRequest,
    FinishReason,
    Goodbye,
    Heartbeat,
    Hello,
    InstanceLimits,
    InstanceLoad,
    KVTransferParams,
    Ready,
    RequestOutput,
    Role,
    StepOutputs,
    TimelineEvent,
    TokenLogprobs,
    WireError,
    decode_router_message,
    encode,
)

FIRST_TEXT_TOKEN = 1000
"""Below lie special tokens and single bytes; answers are easier to read without them."""
HEARTBEAT_S = 0.25
CACHED_TOKENS = 7
"""What a prefill leg, and a request that decode does whole, report as reused."""


class ReplayedAnswer:
    """The tokens of one answer; making one does not depend on the prompt's length."""

    def __init__(self, prompt_token_ids: Sequence[int], seed: int, vocab_size: int) -> None:
        self._hash = hashlib.blake2b(repr((tuple(prompt_token_ids), seed)).encode(), digest_size=8)
        self._num_tokens = vocab_size - FIRST_TEXT_TOKEN

    def token_at(self, position: int) -> int:
        """The token at ``position`` (0 = first output token)."""
        state = self._hash.copy()
        state.update(position.to_bytes(8, "little"))
        return FIRST_TEXT_TOKEN + int.from_bytes(state.digest(), "little") % self._num_tokens


def replay_token(prompt_token_ids: Sequence[int], seed: int, position: int, vocab_size: int) -> int:
    """The token at ``position`` of the answer that a prompt and a seed get."""
    return ReplayedAnswer(prompt_token_ids, seed, vocab_size).token_at(position)


def build_identity(weights: str = "w0") -> ModelIdentity:
    kv = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=8, block_size=1, dtype="bfloat16")
    return ModelIdentity(weights=weights, architecture="a0", compute_dtype="bfloat16", numerics="replay", kv=kv)


@dataclass
class ReplayOptions:
    role: Role = Role.DECODE
    host: str = "127.0.0.1"
    port: int = 0
    instance_id: str = ""
    model: str = "smollm2-135m-instruct"
    weights: str = "w0"
    vocab_size: int = 49152
    max_model_len: int = 2048
    step_ms: float = 0.0
    handoff_ms: float = 0.0
    refuse: str = ""
    die_after_tokens: int | None = None
    script: list[int] | None = None
    keep_kv: bool = True
    ready_file: Path | None = None
    stats_file: Path | None = None


@dataclass
class LiveRequest:
    peer: bytes
    message: AddRequest
    answer: ReplayedAnswer
    output_token_ids: list[int]
    num_new_tokens: int = 0
    handoff_due_s: float | None = None
    events: list[TimelineEvent] = field(default_factory=list)

    def add_event(self, name: str, **detail: float) -> None:
        self.events.append(TimelineEvent(name, time.time_ns(), detail))

    def take_events(self) -> list[TimelineEvent]:
        events, self.events = self.events, []
        return events


class ReplayInstance:
    def __init__(self, options: ReplayOptions) -> None:
        self.options = options
        self.generation = uuid.uuid4().hex
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        for option in (zmq.LINGER, zmq.SNDHWM, zmq.RCVHWM):
            self.socket.setsockopt(option, 0)
        self.socket.bind(f"tcp://{options.host}:{options.port or '*'}")
        self.port = int(self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self.live: dict[tuple[bytes, str], LiveRequest] = {}
        self.peers: dict[bytes, str] = {}
        self.num_tokens_made = 0
        self.stats: dict[str, int] = {"added": 0, "handoffs": 0, "aborted": 0, "finished": 0, "with_kv": 0}

    def run(self) -> None:
        self.write(self.options.ready_file, {"address": f"127.0.0.1:{self.port}", "pid": os.getpid()})
        self.write(self.options.stats_file, self.stats)
        next_step_s = next_heartbeat_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            due_s = next_step_s if self.live else next_heartbeat_s
            if self.socket.poll(max(min(due_s, next_heartbeat_s) - now_s, 0) * 1000):
                self.take_messages()
            now_s = time.monotonic()
            if now_s >= next_heartbeat_s:
                next_heartbeat_s = now_s + HEARTBEAT_S
                for peer in self.peers:
                    self.send(peer, Heartbeat(generation=self.generation, load=self.load))
            if self.live and now_s >= next_step_s:
                next_step_s = now_s + self.options.step_ms / 1000
                self.step(now_s)

    # --- in ---

    def take_messages(self) -> None:
        before = dict(self.stats)
        while self.socket.poll(0):
            peer, frame = self.socket.recv_multipart()
            match decode_router_message(frame):
                case Hello() as hello if self.peers.get(peer) != hello.session:
                    self.peers[peer] = hello.session
                    self.send(peer, self.ready(hello.session))
                case AddRequest() as message:
                    self.add(peer, message)
                case AbortRequests(request_ids):
                    for request_id in request_ids:
                        self.stats["aborted"] += self.live.pop((peer, request_id), None) is not None
                case Goodbye():
                    self.peers.pop(peer, None)
                    self.live = {key: request for key, request in self.live.items() if key[0] != peer}
        if self.stats != before:
            self.write(self.options.stats_file, self.stats)

    def add(self, peer: bytes, message: AddRequest) -> None:
        self.stats["added"] += 1
        self.stats["with_kv"] += message.kv_transfer_params is not None
        if self.options.refuse:
            code, status = self.options.refuse.split(":")
            retryable = status in ("429", "500", "503")
            error = WireError(code=code, message=f"refused: {code}", http_status=int(status), retryable=retryable)
            output = RequestOutput(request_id=message.request_id, finish_reason=FinishReason.ERROR, error=error)
            self.send(peer, StepOutputs(outputs=[output], load=self.load))
            return
        answer = ReplayedAnswer(message.prompt_token_ids, message.sampling.seed or 0, self.options.vocab_size)
        request = LiveRequest(peer, message, answer, list(message.output_token_ids))
        request.add_event("queued")
        request.add_event("prefill_started")
        if message.kv_transfer_params is not None:
            request.add_event("kv_load_started", num_tokens=len(message.prompt_token_ids))
            request.add_event("kv_loaded", num_bytes=message.kv_transfer_params.num_bytes)
        self.live[peer, message.request_id] = request

    # --- out ---

    def step(self, now_s: float) -> None:
        if self.options.die_after_tokens == 0:
            os._exit(9)
        by_peer: dict[bytes, list[RequestOutput]] = {}
        for key, request in list(self.live.items()):
            output = self.go_on(request, now_s)
            if output is None:
                continue
            by_peer.setdefault(request.peer, []).append(output)
            if output.finish_reason is not None:
                del self.live[key]
                self.stats["finished"] += 1
        for peer, outputs in by_peer.items():
            self.send(peer, StepOutputs(outputs=outputs, load=self.load))
        limit = self.options.die_after_tokens
        if limit is not None and self.num_tokens_made >= limit:
            time.sleep(0.05)  # lets the last frame leave: the tests are about what follows it
            os._exit(9)

    def go_on(self, request: LiveRequest, now_s: float) -> RequestOutput | None:
        if request.handoff_due_s is not None:
            return self.hand_off(request) if now_s >= request.handoff_due_s else None
        message, sampling = request.message, request.message.sampling
        position = len(request.output_token_ids)
        token_id = request.answer.token_at(position) if self.options.script is None else self.options.script[position]
        request.output_token_ids.append(token_id)
        request.num_new_tokens += 1
        self.num_tokens_made += 1
        is_first = request.num_new_tokens == 1
        if is_first:
            request.add_event("first_decode_step" if position else "first_token")
        finish_reason = self.find_finish_reason(request, token_id)
        if finish_reason is not None:
            request.add_event("finished")
        elif message.handoff:
            request.handoff_due_s = now_s + self.options.handoff_ms / 1000
        return RequestOutput(
            request_id=message.request_id,
            new_token_ids=[token_id],
            logprobs=[self.logprobs(token_id, sampling.logprobs)] if sampling.logprobs is not None else None,
            prompt_logprobs=self.prompt_logprobs(request) if is_first and not position else None,
            finish_reason=finish_reason,
            stop_token_id=token_id if finish_reason is FinishReason.STOP else None,
            num_cached_tokens=self.count_cached(message) if is_first else 0,
            events=request.take_events(),
        )

    def find_finish_reason(self, request: LiveRequest, token_id: int) -> FinishReason | None:
        sampling = request.message.sampling
        if token_id in sampling.stop_token_ids and len(request.output_token_ids) >= sampling.min_tokens:
            return FinishReason.STOP
        num_tokens = len(request.message.prompt_token_ids) + len(request.output_token_ids)
        if sampling.max_tokens is not None and len(request.output_token_ids) >= sampling.max_tokens:
            return FinishReason.LENGTH
        return FinishReason.LENGTH if num_tokens >= self.options.max_model_len else None

    def hand_off(self, request: LiveRequest) -> RequestOutput:
        self.stats["handoffs"] += 1
        num_tokens = len(request.message.prompt_token_ids)
        request.add_event("kv_saved", num_tokens=num_tokens, num_bytes=100 * num_tokens)
        params = KVTransferParams(
            connector="replay", transfer_id=uuid.uuid4().hex, num_tokens=num_tokens, num_bytes=100 * num_tokens
        )
        return RequestOutput(
            request_id=request.message.request_id,
            finish_reason=FinishReason.HANDOFF,
            kv_transfer_params=params,
            events=request.take_events(),
        )

    def count_cached(self, message: AddRequest) -> int:
        if message.kv_transfer_params is not None:
            return len(message.prompt_token_ids) if self.options.keep_kv else 0
        return 0 if message.output_token_ids else min(CACHED_TOKENS, len(message.prompt_token_ids))

    def logprobs(self, token_id: int, num_top: int) -> TokenLogprobs:
        top_ids = [token_id, *range(FIRST_TEXT_TOKEN, FIRST_TEXT_TOKEN + num_top)][:num_top]
        return TokenLogprobs(token_id, -0.5, 1, top_ids, [-0.5 - i for i in range(num_top)])

    def prompt_logprobs(self, request: LiveRequest) -> list[TokenLogprobs] | None:
        num_top = request.message.sampling.prompt_logprobs
        if num_top is None:
            return None
        return [self.logprobs(token_id, num_top) for token_id in request.message.prompt_token_ids[1:]]

    @property
    def load(self) -> InstanceLoad:
        return InstanceLoad(num_running=len(self.live), num_blocks=1000)

    def ready(self, session: str) -> Ready:
        options = self.options
        return Ready(
            session=session,
            instance_id=options.instance_id or f"replay-{options.role}-{self.port}",
            generation=self.generation,
            role=options.role,
            model=options.model,
            identity=build_identity(options.weights),
            limits=InstanceLimits(
                max_model_len=options.max_model_len,
                max_num_seqs=64,
                max_queue_len=1024,
                num_blocks=1000,
                vocab_size=options.vocab_size,
                max_logprobs=20,
            ),
            connector="replay",
            load=self.load,
        )

    def send(self, peer: bytes, message: Ready | Heartbeat | StepOutputs) -> None:
        self.socket.send_multipart([peer, encode(message)])

    @staticmethod
    def write(path: Path | None, value: dict[str, object] | dict[str, int]) -> None:
        if path is not None:
            temporary = path.with_suffix(f".{os.getpid()}")
            temporary.write_text(json.dumps(value), encoding="utf-8")
            temporary.replace(path)


def parse_options() -> ReplayOptions:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--role", type=Role, default=Role.DECODE, help="prefill or decode")
    parser.add_argument(
        "--host",
        default=ReplayOptions.host,
        help="0.0.0.0 makes one process an instance at each of 127.0.0.1, .2, .3 …",
    )
    parser.add_argument("--port", type=int, default=0, help="0 = the system chooses; see --ready-file")
    parser.add_argument("--instance-id", default="")
    parser.add_argument("--model", default=ReplayOptions.model)
    parser.add_argument("--weights", default="w0", help="digest that stands for the model's weights")
    parser.add_argument("--vocab-size", type=int, default=ReplayOptions.vocab_size)
    parser.add_argument("--max-model-len", type=int, default=ReplayOptions.max_model_len)
    parser.add_argument("--step-ms", type=float, default=0.0, help="time between two steps")
    parser.add_argument("--handoff-ms", type=float, default=0.0, help="time from a first token to its HANDOFF")
    parser.add_argument("--refuse", default="", metavar="CODE:STATUS", help="answer every request with this error")
    parser.add_argument(
        "--die-after-tokens", type=int, help="end hard once so many tokens were sent; 0 = with the first request"
    )
    parser.add_argument("--script", type=json.loads, metavar="JSON", help="list of the token ids that all answers have")
    parser.add_argument("--lose-kv", dest="keep_kv", action="store_false", help="find nothing after a hand-off")
    parser.add_argument("--ready-file", type=Path)
    parser.add_argument("--stats-file", type=Path)
    return ReplayOptions(**vars(parser.parse_args()))


if __name__ == "__main__":
    ReplayInstance(parse_options()).run()
