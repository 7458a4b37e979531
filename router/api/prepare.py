"""From parsed fields to checked, tokenised prompts and choices that can run. A text is tokenised exactly once."""

from __future__ import annotations

import dataclasses
import uuid
from dataclasses import dataclass, field

import msgspec

from pdserve.errors import RequestError
from pdserve.protocol import AddRequest, InstanceLimits, SamplingParams
from pdserve.request_checks import check_length, check_request
from pdserve.router.api.request_types import ChatFields, CompletionFields, GenerationFields, TokenizeFields
from pdserve.router.api.sampling import build_sampling, with_seed_of_choice
from pdserve.router.api.service import RouterService, run_tokenizer
from pdserve.router.api.structured import AskedGrammar, find_grammar
from pdserve.router.api.tools import AskedTools, read_tools
from pdserve.router.choice import Choice
from pdserve.router.flow import RequestFlow
from pdserve.router.legs import GenerationRequest
from pdserve.router.record import ChoiceRecord, RequestRecord
from pdserve.text.text_stream import TextStream
from pdserve.text.tool_calls import FORCED_FORMAT

_DEFAULT_COMPLETION_TOKENS = 16
_OWN_ARGUMENTS = frozenset(
    ("self", "messages", "tools", "add_generation_prompt", "continue_final_message", "call_format")
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt.

    Attributes:
        token_ids: its tokens.
        text: as the client wrote it; None when it came as token ids or messages.
    """

    token_ids: list[int]
    text: str | None = None


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A client's request, checked: nothing raw goes past this point.

    Attributes:
        prompts: one or several.
        sampling: of each prompt's first choice; a prompt's own max_tokens may be less.
        n: choices for each prompt.
        best_of: choices made for each prompt, of which the n likeliest are shown.
        stream: answer as server-sent events.
        include_usage: end the stream with the usage.
        priority: as in `AddRequest`.
        cache_salt: as in `AddRequest`.
        timeout_s: the client's own; None = the router's.
        is_chat: the answer is a message.
        tools: what it may, or must, call.
        grammar_field: the client's field that asks for the answer's grammar; None where none does.
    """

    prompts: list[Prompt]
    sampling: list[SamplingParams]
    n: int
    best_of: int
    stream: bool
    include_usage: bool
    priority: int
    cache_salt: str
    timeout_s: float | None
    is_chat: bool = False
    tools: AskedTools = field(default_factory=AskedTools)
    grammar_field: str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)


async def prepare_completion(service: RouterService, fields: CompletionFields) -> PreparedRequest:
    """Check and tokenise the body of ``/v1/completions``.

    Raises:
        RequestError: what is wrong with it.
        UnavailableError: no instance is up that could say what it accepts.
    """
    service.check_model(fields.model)
    limits = service.fleet.get_limits()
    max_tokens = _DEFAULT_COMPLETION_TOKENS if fields.max_tokens is None else fields.max_tokens
    asked = await _check_grammar(find_grammar(fields))
    sampling = build_sampling(
        fields, max_tokens=max_tokens, logprobs=fields.logprobs, grammar=None if asked is None else asked.spec
    )
    best_of = _check_best_of(fields)
    if best_of is not None and sampling.logprobs is None:
        sampling = msgspec.structs.replace(sampling, logprobs=0)
    if fields.echo and fields.logprobs is not None and sampling.prompt_logprobs is None:
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=fields.logprobs)
    prompts = await _tokenize_prompts(service, fields)
    if fields.max_tokens is None:
        sampling_of_prompts = [_fit(sampling, len(prompt.token_ids), limits) for prompt in prompts]
    else:
        sampling_of_prompts = [sampling] * len(prompts)
    prepared = _check(service, fields, prompts, sampling_of_prompts, limits, best_of)
    return dataclasses.replace(prepared, grammar_field=None if asked is None else asked.field)


async def prepare_chat(service: RouterService, fields: ChatFields) -> PreparedRequest:
    """Check and tokenise the body of ``/v1/chat/completions``.

    Raises:
        RequestError: what is wrong with it.
        UnavailableError: no instance is up that could say what it accepts.
    """
    service.check_model(fields.model)
    limits = service.fleet.get_limits()
    num_top = fields.top_logprobs
    if num_top and not fields.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    max_tokens = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
    tools = read_tools(fields.tools, fields.tool_choice, has_place=service.chat_template.takes_tools)
    if fields.parallel_tool_calls is False:
        tools = tools.with_one_call()
    asked = await _check_grammar(tools.build_grammar(service.message_format, service.tokenizer, find_grammar(fields)))
    sampling = build_sampling(
        fields,
        max_tokens=max_tokens,
        logprobs=(num_top or 0) if fields.logprobs else None,
        grammar=None if asked is None else asked.spec,
    )
    token_ids = await render_chat(service, fields)
    try:
        prepared = _check(service, fields, [Prompt(token_ids)], [sampling], limits)
    except RequestError as error:
        # The common checks know the fields by the names that completions have.
        if error.param == "prompt":
            error.param = "messages"
        elif error.param == "max_tokens" and fields.max_completion_tokens is not None:
            error.param = "max_completion_tokens"
        raise
    return dataclasses.replace(
        prepared, is_chat=True, tools=tools, grammar_field=None if asked is None else asked.field
    )


async def render_chat(service: RouterService, fields: ChatFields | TokenizeFields) -> list[int]:
    """Token ids of a conversation.

    Raises:
        RequestError: the messages or the template's arguments are wrong.
    """
    messages = fields.messages or []
    continues = bool(fields.continue_final_message)
    adds = not continues if fields.add_generation_prompt is None else fields.add_generation_prompt
    arguments = fields.chat_template_kwargs or {}
    if taken := _OWN_ARGUMENTS & arguments.keys():
        raise RequestError(f"chat_template_kwargs may not set {min(taken)}", param="chat_template_kwargs")
    tools = read_tools(fields.tools, fields.tool_choice, has_place=service.chat_template.takes_tools).definitions
    call_format = service.message_format.tool_calls or FORCED_FORMAT
    try:
        num_characters = len(str(messages)) + len(str(tools or ""))
    except RecursionError:
        raise RequestError("messages or tools nest too deep", param="messages") from None
    return await run_tokenizer(
        lambda: service.chat_template.render(
            messages,
            tools,
            add_generation_prompt=adds,
            continue_final_message=continues,
            call_format=call_format,
            **arguments,
        ),
        num_characters,
    )


def build_choices(
    service: RouterService,
    request: PreparedRequest,
    record: RequestRecord,
    *,
    deadline_s: float,
    session_id: str,
) -> list[Choice]:
    """The choices, in the order of their indexes: all of the first prompt, then all of the second, and so on."""
    choices: list[Choice] = []
    shown_special_ids: frozenset[int] = frozenset()
    if request.is_chat:
        shown_special_ids = service.message_format.get_tag_ids(
            service.tokenizer, has_tools=bool(request.tools.names), must_call=request.tools.must_call
        )
    for prompt, sampling in zip(request.prompts, request.sampling, strict=True):
        for number in range(request.best_of):
            own = with_seed_of_choice(sampling, number)
            generation = GenerationRequest(
                uuid.uuid4().hex, prompt.token_ids, own, deadline_s, request.priority, request.cache_salt, session_id
            )
            choice_record = ChoiceRecord(record, len(choices))
            flow = RequestFlow(generation, service.fleet, service.settings.handoff, choice_record)
            stream = TextStream(service.tokenizer, prompt.token_ids, own, shown_special_ids)
            choices.append(Choice(len(choices), flow, stream, choice_record))
    return choices


# --- prompts ------------------------------------------------------------------------------------------


async def _tokenize_prompts(service: RouterService, fields: CompletionFields) -> list[Prompt]:
    prompt = fields.prompt
    if isinstance(prompt, str):
        return [await _tokenize(service, prompt, fields)]
    if all(type(item) is int for item in prompt):
        return [Prompt(prompt)]
    if len(prompt) > service.settings.admission.max_choices:
        raise RequestError(
            f"prompt has {len(prompt)} entries; at most {service.settings.admission.max_choices} are taken",
            param="prompt",
        )
    if all(isinstance(item, str) for item in prompt):
        return [await _tokenize(service, text, fields) for text in prompt]
    if all(isinstance(item, list) and all(type(i) is int for i in item) for item in prompt):
        return [Prompt(item) for item in prompt]
    raise RequestError(
        "prompt must be a string, a list of strings, a list of token ids, or a list of lists of token ids",
        param="prompt",
        code="invalid_type",
    )


async def _tokenize(service: RouterService, text: str, fields: CompletionFields) -> Prompt:
    if not text:
        raise RequestError("the prompt is empty; it must hold at least one character", param="prompt")
    adds = True if fields.add_special_tokens is None else fields.add_special_tokens
    return Prompt(await run_tokenizer(lambda: service.tokenizer.encode(text, adds), len(text)), text)


def _check_best_of(fields: CompletionFields) -> int | None:
    """More choices than are shown; None when all are."""
    n = 1 if fields.n is None else fields.n
    if fields.best_of is None or fields.best_of == n:
        return None
    if fields.best_of < n:
        raise RequestError(f"best_of is {fields.best_of}; it must be at least n, which is {n}", param="best_of")
    if fields.stream:
        raise RequestError("best_of above n is not available with stream", param="best_of")
    return fields.best_of


# --- checks -------------------------------------------------------------------------------------------


async def _check_grammar(asked: AskedGrammar | None) -> AskedGrammar | None:
    if asked is not None:
        await asked.check()
    return asked


def _fit(sampling: SamplingParams, num_prompt_tokens: int, limits: InstanceLimits) -> SamplingParams:
    """The default number of tokens, or what fits behind the prompt, but never less than min_tokens asks for."""
    room = max(limits.max_model_len - num_prompt_tokens, 1)
    default = max(_DEFAULT_COMPLETION_TOKENS, sampling.min_tokens)
    return msgspec.structs.replace(sampling, max_tokens=min(default, room))


def _check(
    service: RouterService,
    fields: GenerationFields,
    prompts: list[Prompt],
    sampling_of_prompts: list[SamplingParams],
    limits: InstanceLimits,
    best_of: int | None = None,
) -> PreparedRequest:
    n = 1 if fields.n is None else fields.n
    max_choices = service.settings.admission.max_choices
    if n * len(prompts) > max_choices:
        raise RequestError(f"n is {n}; prompts times n may be {max_choices} at most", param="n")
    if best_of is not None and best_of * len(prompts) > max_choices:
        raise RequestError(f"best_of is {best_of}; prompts times best_of may be {max_choices} at most", param="best_of")
    if fields.stream and fields.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs are not available with stream", param="prompt_logprobs")
    if fields.stream_options is not None and not fields.stream:
        raise RequestError("stream_options needs stream to be true", param="stream_options")
    if fields.stream_options is not None and fields.stream_options.continuous_usage_stats:
        raise RequestError(
            "stream_options.continuous_usage_stats is not supported; include_usage is",
            param="stream_options.continuous_usage_stats",
            code="unsupported_parameter",
        )
    for prompt, sampling in zip(prompts, sampling_of_prompts, strict=True):
        check_request(AddRequest(request_id="", prompt_token_ids=prompt.token_ids, sampling=sampling), limits)
        check_length(len(prompt.token_ids), sampling.max_tokens, limits)
    return PreparedRequest(
        prompts=prompts,
        sampling=sampling_of_prompts,
        n=n,
        best_of=best_of or n,
        stream=bool(fields.stream),
        include_usage=bool(fields.stream_options and fields.stream_options.include_usage),
        priority=fields.priority or 0,
        cache_salt=fields.cache_salt or "",
        timeout_s=fields.timeout,
    )
