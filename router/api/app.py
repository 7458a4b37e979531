"""The application: routes to endpoints, and how errors become answers."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

import pdserve
from pdserve.errors import PdserveError, RequestError
from pdserve.router.api import generate, operations, page, status
from pdserve.router.api.authentication import PUBLIC_PATHS, Authentication
from pdserve.router.api.boundary import HttpBoundary
from pdserve.router.api.errors import error_response, json_response
from pdserve.router.api.openapi import build_document
from pdserve.router.api.service import RouterService
from pdserve.router.membership.directory import follow


def build_app(service: RouterService) -> FastAPI:
    """The application of one router; it connects to the instances while it runs."""

    @asynccontextmanager
    async def run_fleet(_: FastAPI) -> AsyncIterator[None]:
        service.fleet.start()
        following = [asyncio.create_task(_follow_members(service))]
        following += [asyncio.create_task(files.follow()) for files in service.watched_files]
        try:
            yield
        finally:
            for task in following:
                task.cancel()
            await asyncio.gather(*following, return_exceptions=True)
            await service.fleet.close()
            await asyncio.to_thread(service.tracer.close)

    app = FastAPI(title="pdserve", version=pdserve.__version__, docs_url=None, redoc_url=None, lifespan=run_fleet)
    if service.key_ring is not None:
        public_paths = PUBLIC_PATHS | ({"/metrics"} if service.settings.access.public_metrics else set())
        app.add_middleware(
            Authentication,
            key_ring=service.key_ring,
            count_refused=service.metrics.unauthorized_requests.inc,
            public_paths=public_paths,
        )
    app.add_middleware(HttpBoundary)
    app.add_exception_handler(PdserveError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    _add_generation_routes(app, service)
    _add_operation_routes(app, service)
    app.openapi = functools.cache(lambda: build_document(app))  # type: ignore[method-assign]
    return app


async def _follow_members(service: RouterService) -> None:
    """Keep the pools as their list says, where it may change."""
    if service.directory is not None:
        await follow(service.directory, service.fleet.apply, service.settings.pools.discovery_interval_s)


def _add_generation_routes(app: FastAPI, service: RouterService) -> None:
    @app.post("/v1/completions", response_model=None)
    async def completions(request: Request) -> Response:
        """Complete a prompt."""
        return await generate.answer_completion(service, request)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        return await generate.answer_chat(service, request)

    @app.post("/tokenize", response_model=None)
    async def tokenize(request: Request) -> Response:
        """Token ids of a prompt or of messages."""
        return await operations.tokenize(service, request)

    @app.post("/detokenize", response_model=None)
    async def detokenize(request: Request) -> Response:
        """Text of token ids."""
        return await operations.detokenize(service, request)


def _add_operation_routes(app: FastAPI, service: RouterService) -> None:
    @app.get("/v1/models", response_model=None)
    async def models() -> Response:
        """The model that is served."""
        return operations.list_models(service)

    @app.get("/v1/models/{name:path}", response_model=None)
    async def model(name: str) -> Response:
        """One model."""
        return operations.show_model(service, name)

    @app.get("/v1/requests/{name}/timeline", response_model=None)
    async def timeline(name: str) -> Response:
        """What happened to a request, and when."""
        return operations.show_timeline(service, name)

    @app.get("/v1/status", response_model=None)
    async def show_status() -> Response:
        """The pools, the load and the last requests."""
        return status.show_status(service)

    page_response = page.build_page()

    @app.get("/", response_model=None)
    async def show_page() -> Response:
        """A page that shows all of it live."""
        return page_response

    @app.get("/health", response_model=None)
    async def health() -> Response:
        """Whether the router lives."""
        return json_response({"status": "ok"})

    @app.get("/ready", response_model=None)
    async def ready() -> Response:
        """Whether a request could be served now."""
        return operations.show_ready(service)

    @app.post("/drain", response_model=None)
    async def drain(request: Request) -> Response:
        """Refuse new work, finish what runs, then end."""
        return operations.start_drain(service, request)

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        """Prometheus metrics."""
        return operations.show_metrics(service)


async def _answer_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, PdserveError)
    return error_response(error)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    response = error_response(RequestError(message, code=code, http_status=error.status_code))
    response.headers.update(error.headers or {})
    return response
