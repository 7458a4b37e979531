"""The shapes of what clients get: for the OpenAPI document, and for the type checker where answers are put together.

OpenAI's fields, and with them ``stop_reason`` and ``prompt_logprobs``, which vLLM has.
"""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

FinishReason = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(TypedDict):
    """A part of the prompt's tokens."""

    cached_tokens: int


class Usage(TypedDict):
    """Tokens of a request: each prompt once, the tokens of every choice."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptLogprob(TypedDict):
    """One candidate for a token of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each token of the prompt the candidates by token id; null for the first."""


class CompletionLogprobs(TypedDict):
    """Parallel lists, one item for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    """One completion of one prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    prompt_logprobs: NotRequired[PromptLogprobs | None]


class Completion(TypedDict):
    """Answer of ``POST /v1/completions``; streamed, the ``data`` of each event."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]


class LogprobCandidate(TypedDict):
    """A token and how likely it was."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(LogprobCandidate):
    """A token of the answer and the likeliest ones at its place."""

    top_logprobs: list[LogprobCandidate]


class ChatLogprobs(TypedDict):
    """One entry for each token."""

    content: list[TokenLogprob]
    refusal: None


class FunctionCall(TypedDict):
    """What is called; the arguments are a JSON object as text, as the model wrote it."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """A call of one of the request's tools."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class FunctionCallDelta(TypedDict):
    """The name comes first, the arguments in fragments."""

    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """A part of a call; its first part has id, type and name."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionCallDelta


class ChatMessage(TypedDict):
    """The assistant's turn."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(TypedDict):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None


class ChatCompletion(TypedDict):
    """Answer of ``POST /v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: NotRequired[PromptLogprobs]


class ChatDelta(TypedDict, total=False):
    """What an event adds to the assistant's turn."""

    role: Literal["assistant"]
    content: str
    reasoning_content: str
    tool_calls: list[ToolCallDelta]


class ChatChunkChoice(TypedDict):
    """What an event adds to one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None


class ChatChunk(TypedDict):
    """The ``data`` of each event of a streamed ``POST /v1/chat/completions``."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]


class Model(TypedDict):
    """The model that is served; ``max_model_len`` is null while no instance is up."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None


class ModelList(TypedDict):
    """Answer of ``GET /v1/models``."""

    object: Literal["list"]
    data: list[Model]


class Tokens(TypedDict):
    """Answer of ``POST /tokenize``."""

    count: int
    max_model_len: int | None
    tokens: list[int]


class Text(TypedDict):
    """Answer of ``POST /detokenize``."""

    prompt: str


class Status(TypedDict):
    """A state in one word."""

    status: str


class PoolSize(TypedDict):
    """Instances that are known, and those that could take a request now."""

    configured: int
    usable: int


class Readiness(Status):
    """Answer of ``GET /ready``."""

    pools: dict[str, PoolSize]


class ErrorDetail(TypedDict):
    """What is wrong; ``param`` names the field, where it is one."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(TypedDict):
    """Body of every error; after a stream has begun, the ``data`` of an event."""

    error: ErrorDetail
