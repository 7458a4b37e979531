"""Typed messages between routers and instances, and the request and answer types they carry.

The transport is one ZMQ socket for each instance: the instance binds a ROUTER, each router connects a
DEALER. A message is one frame of msgpack, a tagged union decoded into the types below and nothing else; no
pickle, and a frame above ``MAX_FRAME_BYTES`` is dropped with a counted error.

A session's life::

    router                                   instance
      Hello(router_id, session) ───────────────>    (repeated as the router's heartbeat)
      <─────────────── Ready(identity, limits)      once for each new session
      AddRequest ──────────────────────────────>
      <──────────────────────────── StepOutputs     one for each engine step, all its requests
      AbortRequests ───────────────────────────>
      <────────────────────────────── Heartbeat     every heartbeat_interval_s, with the load
      <──────────────────────────── CacheEvents     after each step that changed the prefix index, where asked for

A router that reconnects starts a new session; the instance aborts what the older session of that router left,
and what belongs to a session whose Hello has not come for ``session_timeout_s``.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any, TypeVar

import msgspec

from pdserve.kv_layout import ModelIdentity

T = TypeVar("T")

PROTOCOL_VERSION = 2
MAX_FRAME_BYTES = 64 * 1024 * 1024
_MAX_ERROR_CHARACTERS = 200

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256, pattern=r"\A[ -~]*\Z")]
"""What a router calls itself, its sessions and its requests: it comes into logs and answers."""


class Role(enum.StrEnum):
    """What a pool uses an instance for. Both roles run the same engine; a decode instance can prefill."""

    PREFILL = "prefill"
    DECODE = "decode"


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"
    """EOS, a stop token id, or (found by the detokenising side) a stop string."""
    LENGTH = "length"
    """max_tokens or the model's context limit."""
    HANDOFF = "handoff"
    """A prefill leg made its token; the request goes on at a decode instance."""
    ABORT = "abort"
    """The client left or the router gave up."""
    TIMEOUT = "timeout"
    """The request's deadline passed."""
    ERROR = "error"
    """The engine could not go on with it; ``RequestOutput.error`` says why."""


class GrammarKind(enum.StrEnum):
    """How a grammar is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    """The whole answer matches; the syntax is that of Rust's ``regex``."""
    LARK = "lark"
    """Lark's syntax as llguidance extends it; the answer is a ``start``."""


class GrammarSpec(msgspec.Struct, frozen=True, array_like=True):
    """What an answer may look like."""

    kind: GrammarKind
    text: str


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is chosen and when a request ends.

    Attributes:
        max_tokens: at most this many output tokens; None = up to the context limit.
        min_tokens: EOS and stop conditions are held back until this many output tokens.
        temperature: 0 = greedy.
        top_k: 0 or -1 = all tokens.
        top_p: nucleus mass in (0, 1].
        min_p: least probability relative to the likeliest token, in [0, 1].
        repetition_penalty: > 1 discourages tokens of prompt and output.
        presence_penalty: subtracted once from tokens that the output has.
        frequency_penalty: subtracted for each occurrence in the output.
        logit_bias: added to the logits of these token ids.
        seed: with (seed, position) each draw is fixed; a router or ``LLM`` fills in one where absent.
        stop: strings that end the text; checked where tokens become text, not in the engine.
        include_stop_str_in_output: keep the stop string in the text.
        stop_token_ids: token ids that end the request, besides EOS.
        ignore_eos: go on after EOS.
        logprobs: this many top alternatives for each output token; None = no logprobs at all.
        prompt_logprobs: the same for prompt tokens.
        skip_special_tokens: leave special tokens out of the text.
        grammar: tokens that it does not allow are not chosen, and EOS only where the answer is whole.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    grammar: GrammarSpec | None = None


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities at one position.

    Attributes:
        token_id: the token that stands there.
        logprob: its log probability under the unmodified distribution (before penalties and temperature).
        rank: 1 = the likeliest token.
        top_ids: the likeliest tokens, best first; ties in order of token id.
        top_logprobs: theirs.
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class KVTransferParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a prefill instance's connector tells a decode instance's connector, through the router.

    Made by connectors only; the router strips anything of the kind that a client sends.

    Attributes:
        connector: registered name of the connector that made it.
        transfer_id: unique for each transfer, never reused.
        engine_id: the producer, with its generation.
        num_tokens: tokens of KV the producer computed.
        num_bytes: bytes of KV behind them.
        payload: the connector's own plain values.
    """

    connector: str
    transfer_id: str
    engine_id: str = ""
    num_tokens: int = 0
    num_bytes: int = 0
    payload: dict[str, Any] = {}


class WireError(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A ``PdserveError`` on the wire."""

    code: str
    message: str
    http_status: int = 500
    param: str | None = None
    retryable: bool = False


class TimelineEvent(msgspec.Struct, frozen=True, array_like=True):
    """One moment in a request's life.

    Attributes:
        name: one of the names in ``TIMELINE_EVENTS``.
        time_ns: wall clock, nanoseconds since the epoch, of the process where it happened.
        detail: plain numbers, for example ``{"num_tokens": 512}``.
    """

    name: str
    time_ns: int
    detail: dict[str, float] = {}


TIMELINE_EVENTS = (
    "arrived",  # router: the request was parsed
    "tokenized",  # router
    "prefill_sent",  # router: chose a prefill instance
    "queued",  # instance: entered the engine's queue
    "prefill_started",  # instance: first scheduled
    "prefill_chunk",  # instance: a chunk was computed; detail num_tokens, num_computed_tokens
    "first_token",  # instance: first token sampled by this instance
    "kv_saved",  # prefill instance: KV can be fetched; detail num_tokens, num_bytes
    "decode_sent",  # router: chose a decode instance
    "kv_load_started",  # decode instance; detail num_tokens
    "kv_loaded",  # decode instance; detail num_tokens, num_bytes
    "kv_load_failed",  # decode instance; the tokens are recomputed
    "first_decode_step",  # decode instance: the step of its first token begins
    "preempted",  # instance
    "retried",  # router: went on elsewhere after an instance was lost
    "finished",  # router or instance
)


# --- router to instance -------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """Opens a session and, repeated, keeps it alive.

    Attributes:
        router_id: the router, unique for each start.
        session: the session's name.
        wants_cache_events: send `CacheEvents`, the whole index first.
    """

    router_id: Name
    session: Name
    protocol_version: int = PROTOCOL_VERSION
    wants_cache_events: bool = False


class AddRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="add"):
    """One leg of a request, tokenised.

    Attributes:
        request_id: the router's internal id, unique for each leg and try.
        prompt_token_ids: the prompt.
        output_token_ids: tokens already produced (the hand-off's first token, or all of them after a
            failover); the engine continues behind them, and max_tokens counts them.
        sampling: the client's parameters, the same on every leg.
        handoff: a prefill leg: finish with HANDOFF after one new token unless that token ends the request.
        kv_transfer_params: from the prefill leg's answer.
        priority: lower goes first under the priority policy; FCFS ignores it.
        cache_salt: blocks are shared only between requests with the same salt.
        timeout_s: the engine ends the request with TIMEOUT after this long from its receipt.
    """

    request_id: Name
    prompt_token_ids: list[int]
    output_token_ids: list[int] = []
    sampling: SamplingParams
    handoff: bool = False
    kv_transfer_params: KVTransferParams | None = None
    priority: int = 0
    cache_salt: str = ""
    timeout_s: float | None = None


class AbortRequests(msgspec.Struct, frozen=True, tag="abort"):
    """Stop these requests; unknown and finished ids are ignored."""

    request_ids: list[str]


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    """The router leaves: abort what belongs to its session."""


RouterMessage = Hello | AddRequest | AbortRequests | Goodbye


# --- instance to router -------------------------------------------------------------------------------


class InstanceLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What an instance accepts."""

    max_model_len: int
    max_num_seqs: int
    max_queue_len: int
    num_blocks: int
    vocab_size: int
    max_logprobs: int


class InstanceLoad(msgspec.Struct, frozen=True, kw_only=True):
    """How busy an instance is."""

    num_waiting: int = 0
    num_running: int = 0
    num_used_blocks: int = 0
    num_blocks: int = 0
    draining: bool = False


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """Answers a new session's Hello.

    Attributes:
        instance_id: the instance's name, stable over restarts.
        generation: unique for each start of the process.
        role: the pool it was started for.
        model: the name the model is served under.
        identity: model fingerprint and layout; a pool takes equal ones only.
        limits: what it accepts.
        connector: registered name of its connector.
        load: its load now.
        http_port: port of its /health, /metrics and /about, on the same host; None if it has none.
    """

    session: str
    instance_id: str
    generation: str
    role: Role
    model: str
    identity: ModelIdentity
    limits: InstanceLimits
    connector: str
    load: InstanceLoad
    http_port: int | None = None
    protocol_version: int = PROTOCOL_VERSION


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """Answers a Hello that the instance cannot serve (another protocol version)."""

    session: str
    reason: str


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="heartbeat"):
    """The instance lives and is this busy."""

    generation: str
    load: InstanceLoad


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one engine step did for one request.

    Attributes:
        request_id: as in AddRequest.
        new_token_ids: tokens sampled in this step, oldest first.
        logprobs: one entry for each of them, where asked for.
        prompt_logprobs: one entry for each prompt token from the second on; sent once.
        finish_reason: set on the request's last output.
        stop_token_id: the stop token that ended it; None when EOS or nothing did.
        error: set with ERROR (and TIMEOUT).
        kv_transfer_params: a prefill leg's last output: where the KV is.
        num_cached_tokens: prompt tokens not computed here: local prefix hits and loaded KV. Set on the output
            that carries the first new token.
        num_external_tokens: the part of them that a connector loaded.
        events: timeline events since the last output.
    """

    request_id: str
    new_token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: WireError | None = None
    kv_transfer_params: KVTransferParams | None = None
    num_cached_tokens: int = 0
    num_external_tokens: int = 0
    events: list[TimelineEvent] = []


class StepOutputs(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """One engine step's outputs for one router's requests."""

    outputs: list[RequestOutput]
    load: InstanceLoad


class CacheEvents(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="cache"):
    """How the instance's prefix index changed.

    Attributes:
        stored: digests of block contents that can be hit from now on.
        evicted: digests of those that no block has any more.
        replaces_all: ``stored`` is the whole index; what was told before is void.
    """

    stored: list[bytes] = []
    evicted: list[bytes] = []
    replaces_all: bool = False


InstanceMessage = Ready | Refused | Heartbeat | StepOutputs | CacheEvents

_encoder = msgspec.msgpack.Encoder()
_router_message_decoder = msgspec.msgpack.Decoder(RouterMessage)
_instance_message_decoder = msgspec.msgpack.Decoder(InstanceMessage)


def encode(message: RouterMessage | InstanceMessage) -> bytes:
    """One frame."""
    return _encoder.encode(message)


def decode_frame(decoder: msgspec.msgpack.Decoder[T], frame: bytes) -> T:
    """Decode one frame; whatever stands in it, there is one way to fail, and it says little of what the frame holds.

    Raises:
        msgspec.DecodeError: it is no message that ``decoder`` knows (ValidationError is a subclass).
    """
    try:
        return decoder.decode(frame)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(f"{type(error).__name__}: the frame holds no text, or nests too deep") from None
    except msgspec.DecodeError as error:
        raise type(error)(str(error)[:_MAX_ERROR_CHARACTERS]) from None


def decode_router_message(frame: bytes) -> RouterMessage:
    """Decode what a router sent.

    Raises:
        msgspec.DecodeError: not a message of the protocol.
    """
    return decode_frame(_router_message_decoder, frame)


def decode_instance_message(frame: bytes) -> InstanceMessage:
    """Decode what an instance sent.

    Raises:
        msgspec.DecodeError: not a message of the protocol.
    """
    return decode_frame(_instance_message_decoder, frame)
