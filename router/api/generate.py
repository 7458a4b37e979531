"""The two endpoints that generate: parse, check, tokenise, and hand over to `GenerationResponse`."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from pdserve.errors import PdserveError
from pdserve.router.api.answers import Answer, Envelope
from pdserve.router.api.body import read_body
from pdserve.router.api.chat import ChatAnswer
from pdserve.router.api.client_headers import read_session_id, read_timeout
from pdserve.router.api.completions import CompletionAnswer
from pdserve.router.api.errors import error_response
from pdserve.router.api.prepare import PreparedRequest, build_choices, prepare_chat, prepare_completion
from pdserve.router.api.request_types import ChatFields, CompletionFields, parse_body
from pdserve.router.api.responding import GenerationResponse
from pdserve.router.api.service import RouterService
from pdserve.router.rate_limits import ANONYMOUS
from pdserve.router.record import RequestRecord

Prepare = Callable[[RouterService, Envelope, bytes], Awaitable[tuple[PreparedRequest, Answer]]]


async def answer_completion(service: RouterService, request: Request) -> Response:
    """``POST /v1/completions``."""
    return await _answer(service, request, "completions", "cmpl", _prepare_completion)


async def answer_chat(service: RouterService, request: Request) -> Response:
    """``POST /v1/chat/completions``."""
    return await _answer(service, request, "chat", "chatcmpl", _prepare_chat)


async def _answer(service: RouterService, request: Request, endpoint: str, prefix: str, prepare: Prepare) -> Response:
    envelope = Envelope(
        f"{prefix}-{uuid.uuid4().hex}", int(time.time()), service.model_name, service.system_fingerprint
    )
    record = RequestRecord(
        envelope.response_id,
        request.state.request_id,
        endpoint,
        metrics=service.metrics,
        recompute_warning=service.recompute_warning,
        tracer=service.tracer,
        traceparent=request.headers.get("traceparent", ""),
    )
    arrived_s = asyncio.get_running_loop().time()
    try:
        service.drain.check()
        timeout_s = read_timeout(request.headers, service.settings.admission.request_timeout_s)
        session_id = read_session_id(request.headers)
        body = await read_body(request, service.settings.http.max_body_bytes)
        prepared, answer = await prepare(service, envelope, body)
    except PdserveError as error:
        record.end(error.code)
        return error_response(error)
    record.note_tokenized(prepared.num_prompt_tokens)
    service.timelines.add(record.timeline)
    deadline_s = arrived_s + min(timeout_s, prepared.timeout_s or timeout_s)
    choices = build_choices(service, prepared, record, deadline_s=deadline_s, session_id=session_id)
    key_id = getattr(request.state, "key_id", ANONYMOUS)
    return GenerationResponse(service, prepared, choices, answer, record, deadline_s=deadline_s, key_id=key_id)


async def _prepare_completion(
    service: RouterService, envelope: Envelope, body: bytes
) -> tuple[PreparedRequest, Answer]:
    fields = parse_body(body, CompletionFields)
    prepared = await prepare_completion(service, fields)
    answer = CompletionAnswer(
        envelope,
        service.tokenizer,
        prepared,
        echo=bool(fields.echo),
        wants_logprobs=fields.logprobs is not None,
        wants_prompt_logprobs=fields.prompt_logprobs is not None,
    )
    return prepared, answer


async def _prepare_chat(service: RouterService, envelope: Envelope, body: bytes) -> tuple[PreparedRequest, Answer]:
    fields = parse_body(body, ChatFields)
    prepared = await prepare_chat(service, fields)
    (prompt,) = prepared.prompts
    readers = [
        service.message_format.build_reader(
            prepared.tools.names,
            prompt.token_ids,
            service.tokenizer,
            must_call=prepared.tools.must_call,
            has_grammar=prepared.grammar_field is not None,
        )
        for _ in range(prepared.n)
    ]
    answer = ChatAnswer(envelope, service.tokenizer, prepared, readers, wants_logprobs=bool(fields.logprobs))
    return prepared, answer
