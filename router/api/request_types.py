"""The bodies that clients send, as types.

The types' bounds are checked as a body is parsed and printed in the OpenAPI document, so the two cannot differ. Bounds
that depend on the model or on several fields are checked behind it: `pdserve.router.api.prepare`,
`pdserve.request_checks`.

What a type does not name is either known not to be supported, which is a plain 400 when it is asked for, or has no
influence on the answer and is ignored. So are ``kv_transfer_params``: only connectors make them.

A field that is absent or null stays None: defaults belong to `pdserve.protocol.SamplingParams`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from pdserve.errors import RequestError
from pdserve.request_checks import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS

_MAX_INT64 = 2**63 - 1
"""No wire carries more."""
Natural = Annotated[int, Meta(ge=0, le=_MAX_INT64)]
Positive = Annotated[int, Meta(ge=1, le=_MAX_INT64)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=_MAX_INT64)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
TokenIdText = Annotated[str, Meta(pattern="^[0-9]{1,10}$")]
Bias = Annotated[float, Meta(ge=-100, le=100)]

_PROMPT_ITEMS = {"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "array", "items": {"type": "integer"}}]}
_MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"type": "string"},
        "content": {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["type", "text"],
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                    },
                },
                {"type": "null"},
            ],
            "description": "May be absent only beside tool_calls.",
        },
        "tool_calls": {"type": ["array", "null"], "items": {"type": "object"}},
    },
}
_TOOL = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {"name": {"type": "string", "minLength": 1}},
        },
    },
}
_TOOL_CHOICES = [
    {"enum": ["auto", "none", "required"]},
    {
        "type": "object",
        "required": ["type", "function"],
        "properties": {
            "type": {"const": "function"},
            "function": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
        },
    },
]

PromptList = Annotated[list[Any], Meta(min_length=1, extra_json_schema={"items": _PROMPT_ITEMS})]
Messages = Annotated[list[dict[str, Any]], Meta(min_length=1, extra_json_schema={"items": _MESSAGE})]
Tools = Annotated[list[Any], Meta(extra_json_schema={"items": _TOOL})]
ToolChoice = Annotated[str | dict[str, Any], Meta(extra_json_schema={"anyOf": _TOOL_CHOICES})]


class JsonSchemaFormat(msgspec.Struct, kw_only=True, rename={"json_schema": "schema"}):
    """OpenAI's wrapping of a JSON schema. Every schema is followed to the letter, ``strict`` or not."""

    json_schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """What an answer is: ``json_schema`` stands beside the type of that name."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's extension: one of these."""

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1)] | None = None
    grammar: str | None = None


class StreamOptions(msgspec.Struct, kw_only=True):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    continuous_usage_stats: Annotated[bool, Meta(extra_json_schema={"const": False})] | None = None


class GenerationFields(msgspec.Struct, kw_only=True):
    """What both endpoints take: OpenAI's fields, and below them extensions by the names that vLLM gave them."""

    model: str | None = None
    max_tokens: Positive | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    n: Positive | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=4)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[TokenIdText, Bias], Meta(max_length=MAX_LOGIT_BIAS)] | None = None
    seed: Int64 | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None

    top_k: Annotated[int, Meta(ge=-1, le=_MAX_INT64)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    min_tokens: Natural | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Natural | None = None
    priority: Int64 | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    add_special_tokens: bool | None = None
    timeout: Annotated[float, Meta(gt=0, description="Seconds.")] | None = None
    structured_outputs: StructuredOutputs | None = None


class CompletionFields(GenerationFields, kw_only=True):
    """Body of ``POST /v1/completions``."""

    prompt: str | PromptList
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    echo: bool | None = None
    best_of: Positive | None = None


class ChatFields(GenerationFields, kw_only=True):
    """Body of ``POST /v1/chat/completions``."""

    messages: Messages
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None


class TokenizeFields(msgspec.Struct, kw_only=True):
    """Body of ``POST /tokenize``: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None


class DetokenizeFields(msgspec.Struct, kw_only=True):
    """Body of ``POST /detokenize``."""

    model: str | None = None
    tokens: list[Natural]


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    # OpenAI's
    "suffix": ("",),
    "functions": ([],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "parallel_tool_calls": (True,),
    "verbosity": ("medium",),
    # of one endpoint only
    "echo": (False,),
    "best_of": (1,),
    "max_completion_tokens": (),
    "top_logprobs": (0,),
    # extensions of others
    "use_beam_search": (False,),
    "logits_processors": ([],),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    "guided_json": (),
    "guided_regex": ("",),
    "guided_choice": ([],),
    "guided_grammar": ("",),
    "documents": ([],),
    "chat_template": (),
    "mm_processor_kwargs": ({},),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
}
"""Fields that would change the answer and are not supported, at least not by every endpoint, with the values that ask
for nothing."""

_OF_PROMPTS = frozenset(("functions", "documents", "chat_template", "mm_processor_kwargs", "truncate_prompt_tokens"))
"""Those of them that would change a prompt."""

_PLACE = re.compile(r" - at (?:`key` in )?`\$\.?(.*?)(?:\[\.\.\.\])?`$")
_MAX_SHOWN_CHARACTERS = 60

Fields = TypeVar("Fields", bound=msgspec.Struct)


@functools.cache
def get_unsupported(kind: type[msgspec.Struct]) -> Mapping[str, tuple[Any, ...]]:
    """The fields that a body of this kind may have with values that ask for nothing only, with those values."""
    names = _NEUTRAL.keys() if issubclass(kind, GenerationFields) else _OF_PROMPTS
    return MappingProxyType({name: _NEUTRAL[name] for name in names if name not in kind.__struct_fields__})


def parse_body(body: bytes, kind: type[Fields]) -> Fields:
    """The body as its type.

    Raises:
        RequestError: it is no JSON object, a field is missing, has a wrong type or is out of its bounds, or an
            unsupported one is set.
    """
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    unsupported = get_unsupported(kind)
    for name in unsupported.keys() & value.keys():
        if value[name] is not None and value[name] not in unsupported[name]:
            raise RequestError(f"{name} is not supported", param=name, code="unsupported_parameter")
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _explain(error, value) from None


def _explain(error: msgspec.ValidationError, body: dict[str, Any]) -> RequestError:
    """``Expected `int` >= 1 - at `$.max_tokens` `` names the parameter in front and its value behind."""
    place = _PLACE.search(str(error))
    param = place.group(1) if place else None
    text = str(error)[: place.start()] if place else str(error)
    if not param and "required field `" in text:
        param = text.rpartition("required field `")[2].rstrip("`")
        return RequestError(f"{param} is required", param=param, code="missing_required_parameter")
    if "matching regex" in text:
        text = "keys are token ids in digits"
    code = "invalid_type" if ", got `" in text else "invalid_value"
    value = body.get(param or "")
    if code == "invalid_value" and isinstance(value, int | float | str):
        text = f"{text}, got {value!r:.{_MAX_SHOWN_CHARACTERS}}"
    subject = f"{param}: " if param else ""
    return RequestError(f"{subject}{text[:1].lower()}{text[1:]}", param=param or None, code=code)
