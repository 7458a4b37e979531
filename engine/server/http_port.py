"""An instance's HTTP port: is it alive, may it get requests, its metrics, and the order to drain.

Runs in a thread of its own and is up before the model is loaded, so that a load that takes minutes can be told
from a process that hangs.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import socket
import threading
from collections.abc import Callable

import msgspec
import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pdserve.engine.server.about import About
from pdserve.engine.server.inbox import Drain, Inbox, Page, Scrape
from pdserve.engine.server.instance_server import Phase
from pdserve.peers.addresses import is_loopback

logger = logging.getLogger(__name__)

_SCRAPE_TIMEOUT_S = 10.0


def build_app(
    inbox: Inbox,
    get_phase: Callable[[], Phase],
    *,
    debug_blocks: bool = False,
    get_about: Callable[[], About] | None = None,
) -> Starlette:
    """The routes.

    Args:
        inbox: the way to the engine's thread.
        get_phase: what the instance is doing; called on this app's thread.
        debug_blocks: whether to tell who holds which KV block.
        get_about: the instance's description; called on a thread of its own.
    """

    async def health(_: Request) -> Response:
        alive = get_phase() is not Phase.ENDED
        return JSONResponse({"status": get_phase()}, status_code=200 if alive else 503)

    async def ready(_: Request) -> Response:
        return JSONResponse({"status": get_phase()}, status_code=200 if get_phase() is Phase.READY else 503)

    async def metrics(_: Request) -> Response:
        return await scrape(Page.METRICS, CONTENT_TYPE_LATEST)

    async def blocks(_: Request) -> Response:
        return await scrape(Page.BLOCKS, "application/json")

    async def scrape(page: Page, media_type: str) -> Response:
        if get_phase() not in (Phase.READY, Phase.DRAINING):
            return JSONResponse({"status": get_phase()}, status_code=503)
        command = Scrape(page, concurrent.futures.Future())
        inbox.put(command)
        try:
            body = await asyncio.wait_for(asyncio.wrap_future(command.answer), _SCRAPE_TIMEOUT_S)
        except TimeoutError:
            message = f"the engine's thread did not answer within {_SCRAPE_TIMEOUT_S:.0f} s"
            return JSONResponse({"status": get_phase(), "message": message}, status_code=503)
        return Response(body, media_type=media_type)

    async def drain(request: Request) -> Response:
        return _start_drain(inbox, request)

    routes = [
        Route("/health", health),
        Route("/ready", ready),
        Route("/metrics", metrics),
        Route("/drain", drain, methods=["POST"]),
    ]
    if get_about is not None:

        async def about(_: Request) -> Response:
            # A store on a file system that hangs must not hold up /health.
            found = await asyncio.to_thread(get_about)
            return Response(msgspec.json.encode(found), media_type="application/json")

        routes.append(Route("/about", about))
    if debug_blocks:
        routes.append(Route("/debug/blocks", blocks))
    return Starlette(routes=routes)


def _start_drain(inbox: Inbox, request: Request) -> Response:
    """From this machine only: it ends the instance, and the port asks nobody who he is."""
    if not is_loopback(request.client.host if request.client else ""):
        return JSONResponse({"message": "POST /drain is taken from the instance's own machine only"}, status_code=403)
    inbox.put(Drain("POST /drain"))
    return JSONResponse({"status": Phase.DRAINING}, status_code=202)


class HttpPort:
    """Serves an app on a bound socket, in a thread, from `start` to `close`."""

    def __init__(self, app: Starlette, bound: socket.socket) -> None:
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", ws="none", timeout_graceful_shutdown=1
        )
        self._server = uvicorn.Server(config)
        self._socket = bound
        self._thread = threading.Thread(target=self._run, name="pdserve-http", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def close(self) -> None:
        """End the thread and close the socket. Idempotent."""
        self._server.should_exit = True
        self._thread.join(3.0)
        self._socket.close()

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        except Exception:
            logger.exception("the HTTP port failed; the instance goes on without it")
