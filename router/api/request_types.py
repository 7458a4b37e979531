"""The bodies that clients send, as types.

What a type does not name is either known not to be supported, which is a plain 400 when it is asked for, or has no
influence on the answer and is ignored. So are ``kv_transfer_params``: only connectors make them.

A field that is absent or null stays None: defaults belong to `pdserve.protocol.SamplingParams`.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from pdserve.errors import RequestError


class StreamOptions(msgspec.Struct, kw_only=True):
    """Options of a streamed answer."""

    include_usage: bool | None = None


class GenerationFields(msgspec.Struct, kw_only=True):
    """What both endpoints take: OpenAI's fields, and below them extensions by the names that vLLM gave them."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    user: str | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    add_special_tokens: bool | None = None
    timeout: float | None = None


class CompletionFields(GenerationFields, kw_only=True):
    """Body of ``POST /v1/completions``."""

    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None


class ChatFields(GenerationFields, kw_only=True):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None


class TokenizeFields(msgspec.Struct, kw_only=True):
    """Body of ``POST /tokenize``: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None


class DetokenizeFields(msgspec.Struct, kw_only=True):
    """Body of ``POST /detokenize``."""

    model: str | None = None
    tokens: list[int]


_NEUTRAL: dict[str, tuple[Any, ...]] = {
    # OpenAI's
    "suffix": ("",),
    "functions": ([],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
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
    "structured_outputs": (),
    "documents": ([],),
    "chat_template": (),
    "mm_processor_kwargs": ({},),
}
"""Fields that would change the answer and are not supported (chat takes its own of them), with the values that ask for
nothing."""

Fields = TypeVar("Fields", bound=msgspec.Struct)


def parse_body(body: bytes, kind: type[Fields]) -> Fields:
    """The body as its type.

    Raises:
        RequestError: it is no JSON object, a field has a wrong type or is missing, or an unsupported one is set.
    """
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    for name in (_NEUTRAL.keys() & value.keys()) - set(kind.__struct_fields__):
        if value[name] is not None and value[name] not in _NEUTRAL[name]:
            raise RequestError(f"{name} is not supported", param=name, code="unsupported_parameter")
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _explain(error) from None


def _explain(error: msgspec.ValidationError) -> RequestError:
    """``Expected `int`, got `str` - at `$.max_tokens` `` names the parameter in front."""
    text, _, path = str(error).partition(" - at `$")
    param = path.rstrip("`").lstrip(".") or None
    if param is None and "required field `" in text:
        param = text.rpartition("required field `")[2].rstrip("`")
        return RequestError(f"{param} is required", param=param, code="missing_required_parameter")
    place = f"{param}: " if param else ""
    return RequestError(f"{place}{text[:1].lower()}{text[1:]}", param=param, code="invalid_type")
