"""The endpoints that do not generate: models, tokens, health, metrics and timelines."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from pdserve.errors import RequestError, UnavailableError
from pdserve.peers.addresses import is_loopback
from pdserve.router.api.answer_types import Model
from pdserve.router.api.body import read_body
from pdserve.router.api.errors import json_response
from pdserve.router.api.prepare import render_chat
from pdserve.router.api.request_types import DetokenizeFields, TokenizeFields, parse_body
from pdserve.router.api.service import RouterService, run_tokenizer


def list_models(service: RouterService) -> Response:
    """``GET /v1/models``."""
    return json_response({"object": "list", "data": [_describe_model(service)]})


def show_model(service: RouterService, name: str) -> Response:
    """``GET /v1/models/{name}``."""
    service.check_model(name)
    return json_response(_describe_model(service))


async def tokenize(service: RouterService, request: Request) -> Response:
    """``POST /tokenize``."""
    fields = parse_body(await read_body(request, service.settings.http.max_body_bytes), TokenizeFields)
    service.check_model(fields.model)
    if (fields.prompt is None) == (fields.messages is None):
        raise RequestError("give either prompt or messages", param="prompt")
    if fields.prompt is None:
        token_ids = await render_chat(service, fields)
    else:
        text, adds = fields.prompt, True if fields.add_special_tokens is None else fields.add_special_tokens
        token_ids = await run_tokenizer(lambda: service.tokenizer.encode(text, adds), len(text))
    return json_response({"count": len(token_ids), "max_model_len": _get_max_model_len(service), "tokens": token_ids})


async def detokenize(service: RouterService, request: Request) -> Response:
    """``POST /detokenize``."""
    fields = parse_body(await read_body(request, service.settings.http.max_body_bytes), DetokenizeFields)
    service.check_model(fields.model)
    vocab_size = service.tokenizer.vocab_size
    wrong = next((i for i in fields.tokens if not 0 <= i < vocab_size), None)
    if wrong is not None:
        raise RequestError(
            f"tokens holds token id {wrong}; this model's ids go from 0 to {vocab_size - 1}", param="tokens"
        )
    return json_response({"prompt": service.tokenizer.decode(fields.tokens, skip_special_tokens=False)})


def show_ready(service: RouterService) -> Response:
    """``GET /ready``: 200 if a request could be served now."""
    pools = {
        pool.role: {"configured": len(pool.instances), "usable": len(pool.usable)}
        for pool in (service.fleet.prefill, service.fleet.decode)
    }
    status = "ready" if service.fleet.is_serving else "waiting for a decode instance"
    if service.drain.is_draining:
        status = "draining"
    return json_response({"status": status, "pools": pools}, status=200 if status == "ready" else 503)


def start_drain(service: RouterService, request: Request) -> Response:
    """``POST /drain``: with an administrator's key, because it ends the router; without keys from this machine only.

    Where there are keys, the machine does not count: behind a proxy everyone comes from this one.

    Raises:
        RequestError: 403, somebody else asks.
    """
    if service.key_ring is not None:
        if not getattr(request.state, "is_admin", False):
            raise RequestError(
                "POST /drain needs an administrator's API key", code="insufficient_permissions", http_status=403
            )
    elif not is_loopback(request.client.host if request.client else ""):
        raise RequestError("POST /drain is taken from the router's own machine only", code="forbidden", http_status=403)
    service.drain.begin()
    return json_response({"status": "draining"}, status=202)


def show_metrics(service: RouterService) -> Response:
    """``GET /metrics``."""
    return Response(service.metrics.render(), media_type=CONTENT_TYPE_LATEST)


def show_timeline(service: RouterService, name: str) -> Response:
    """``GET /v1/requests/{name}/timeline``."""
    timeline = service.timelines.get(name)
    if timeline is None:
        kept = service.settings.admission.timeline_capacity
        raise RequestError(
            f"no request of this id is among the last {kept}", param="id", code="request_not_found", http_status=404
        )
    return json_response(timeline.describe())


def _describe_model(service: RouterService) -> Model:
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.created_s,
        "owned_by": "pdserve",
        "max_model_len": _get_max_model_len(service),
    }


def _get_max_model_len(service: RouterService) -> int | None:
    """None while no instance is up that could say."""
    try:
        return service.fleet.get_limits().max_model_len
    except UnavailableError:
        return None
