"""``run-router``: the OpenAI API in front of prefill and decode instances.

It loads the tokenizer and the chat template, connects to the instances that are given, and serves until SIGTERM
or Ctrl-C; running requests then have ``--shutdown-timeout-s`` to finish. A second signal ends them at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import signal
import socket
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import uvicorn
import uvloop

from pdserve import env
from pdserve.announcements import AnnouncementBoard
from pdserve.checkpoint import prepare_tokenizer, resolve_model
from pdserve.errors import ConfigError
from pdserve.log import configure_logging
from pdserve.peers.addresses import is_loopback
from pdserve.ready_file import write_ready_file
from pdserve.router.admission import Admission
from pdserve.router.api.app import build_app
from pdserve.router.api.service import RouterService
from pdserve.router.config import AccessSettings, HttpSettings, PoolSettings, RouterSettings, check_settings
from pdserve.router.fleet import Fleet
from pdserve.router.http_protocol import build_http_protocol
from pdserve.router.keys.key_ring import KeyRing
from pdserve.router.keys.sources import read_keys
from pdserve.router.membership.directory import Directory, DirectoryError, check_members
from pdserve.router.membership.instances_file import InstancesFile
from pdserve.router.membership.redis_directory import RedisDirectory
from pdserve.router.metrics import RouterMetrics
from pdserve.router.timeline import TimelineStore
from pdserve.router.tls import ServerCertificate
from pdserve.router.tracing.tracer import build_tracer
from pdserve.router.watched_files import WatchedFiles
from pdserve.settings import describe_settings, load_settings
from pdserve.text import ChatTemplate, load_tokenizer
from pdserve.text.message_format import find_message_format

logger = logging.getLogger("pdserve.router.main")

_BACKLOG = 2048
KEEP_ALIVE_S = 75
"""Longer than clients keep idle connections (httpx and openai: 5 s), or a request may meet the router's hanging up."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the router; returns the exit status: 0 when it was stopped, 2 when it cannot start."""
    try:
        settings = load_settings(
            RouterSettings,
            prog="run-router",
            description="Serve the OpenAI API in front of prefill and decode instances.",
            examples=[
                "run-router --prefill 127.0.0.1:8100 --decode 127.0.0.1:8200",
                "run-router --decode 10.0.0.5:8200 --decode 10.0.0.6:8200 --host 0.0.0.0",
                "run-router --config router.toml --port 0 --ready-file /run/router.json",
            ],
            argv=argv,
        )
        check_settings(settings)
        configure_logging("router", settings.http.log_level)
        listening = bind_http_socket(settings.http)
        with contextlib.closing(listening):
            return _serve(settings, listening)
    except ConfigError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def bind_http_socket(settings: HttpSettings) -> socket.socket:
    """The listening socket for clients.

    Raises:
        ConfigError: the port is taken, or the address is not one of this machine.
    """
    host, port = settings.host, settings.port
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen(_BACKLOG)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} on {host} is in use; choose another with --port") from None
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(f"{host} is not an address of this machine; choose another with --host") from None
        raise ConfigError(f"cannot listen on {host}:{port} (--host, --port): {error.strerror}") from None
    return bound


def build_service(settings: RouterSettings, certificate: ServerCertificate | None = None) -> RouterService:
    """Load the tokenizer and compose the router's parts.

    Args:
        settings: all of them.
        certificate: what clients see, if anything; read, and read again when it changes.

    Raises:
        ConfigError: files of the model, of keys or of the certificate are missing or wrong.
    """
    key_ring, watched_files = build_key_ring(settings.access)
    if certificate is not None:
        watched_files.append(WatchedFiles(certificate.paths, certificate.load, "the TLS certificate and key were"))
    source = resolve_model(settings.model.model)
    directory = prepare_tokenizer(source)
    tokenizer = load_tokenizer(directory)
    chat_template = ChatTemplate(directory, tokenizer)
    answers = settings.answers
    message_format = find_message_format(answers.tool_call_parser, answers.reasoning_parser, chat_template.source)
    model_name = settings.model.served_model_name or source.name
    metrics = RouterMetrics()
    return RouterService(
        settings=settings,
        model_name=model_name,
        tokenizer=tokenizer,
        chat_template=chat_template,
        message_format=message_format,
        fleet=Fleet(
            settings.pools,
            router_id=uuid.uuid4().hex,
            model_name=model_name,
            metrics=metrics,
            uses_prefixes=settings.handoff.disaggregation_threshold_tokens > 0,
        ),
        admission=Admission(settings.admission, metrics),
        metrics=metrics,
        timelines=TimelineStore(settings.admission.timeline_capacity),
        directory=build_directory(settings.pools),
        tracer=build_tracer(settings.tracing, model_name),
        key_ring=key_ring,
        watched_files=watched_files,
    )


def build_key_ring(settings: AccessSettings) -> tuple[KeyRing | None, list[WatchedFiles]]:
    """The API keys, None where there are none, and the file that they come from.

    Raises:
        ConfigError: the file, or the environment, holds something else.
    """
    path = None if settings.api_keys_file is None else Path(settings.api_keys_file)
    environment = env.get_api_keys()
    if path is None and environment is None:
        return None, []
    key_ring = KeyRing(())

    def load() -> None:
        key_ring.replace(read_keys(path, environment))

    if path is None:
        load()
        return key_ring, []
    return key_ring, [WatchedFiles([path], load, "the API keys were")]


def build_directory(settings: PoolSettings) -> Directory | None:
    """Where the list of instances comes from when it may change; None when it is given once.

    Raises:
        ConfigError: the file is wrong now, or Redis cannot be used.
    """
    if settings.instances_file is not None:
        directory = InstancesFile(Path(settings.instances_file))
        try:
            check_members(directory.read())
        except DirectoryError as error:
            raise ConfigError(f"--instances-file: {error}") from None
        return directory
    if settings.discovery is not None:
        return RedisDirectory(AnnouncementBoard(settings.discovery))
    return None


def _serve(settings: RouterSettings, listening: socket.socket) -> int:
    logger.info("settings", extra={"kv": describe_settings(settings)})
    certificate = build_certificate(settings.http)
    service = build_service(settings, certificate)
    _warn_of_open_doors(settings.http, service)
    config = uvicorn.Config(
        build_app(service),
        http=build_http_protocol(settings.http.client_stall_timeout_s),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(round(settings.http.shutdown_timeout_s), 1),
        ssl_context_factory=None if certificate is None else lambda *_: certificate.context,
    )
    server = _Server(config, listening, settings.http, service)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(server.serve(sockets=[listening]))
    return 0 if server.started else 2


def build_certificate(settings: HttpSettings) -> ServerCertificate | None:
    """The certificate that the settings name; not read yet."""
    if settings.tls_certificate is None or settings.tls_key is None:
        return None
    return ServerCertificate(Path(settings.tls_certificate), Path(settings.tls_key))


def _warn_of_open_doors(settings: HttpSettings, service: RouterService) -> None:
    if is_loopback(settings.host):
        return
    if service.key_ring is None:
        logger.warning("whoever reaches %s may use it: give API keys with --api-keys-file", settings.host)
    elif settings.tls_certificate is None:
        logger.warning("API keys and prompts come to %s unencrypted: give --tls-certificate", settings.host)


class _Server(uvicorn.Server):
    """Uvicorn's server, ending with status 0 on a signal and telling when it can be reached."""

    def __init__(
        self, config: uvicorn.Config, listening: socket.socket, settings: HttpSettings, service: RouterService
    ) -> None:
        super().__init__(config)
        self._listening = listening
        self._settings = settings
        self._service = service
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to serve, then say where.

        Raises:
            ConfigError: that cannot be said.
        """
        await super().startup(sockets=sockets)
        # What was loaded stays for good: looking through it for garbage would stop all streams for a twentieth of a
        # second each time.
        gc.collect()
        gc.freeze()
        host, port = self._listening.getsockname()[:2]
        scheme = "http" if self._settings.tls_certificate is None else "https"
        url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        logger.info("clients connect to %s", url)
        self._draining = asyncio.create_task(self._stop_once_drained())
        if self._settings.ready_file is not None:
            note = {"http": url, "host": host, "port": port, "pid": os.getpid()}
            try:
                write_ready_file(Path(self._settings.ready_file), note)
            except ConfigError:
                await self.shutdown(sockets)
                raise

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop to serve."""
        if self._draining is not None:
            self._draining.cancel()
        await super().shutdown(sockets=sockets)

    async def _stop_once_drained(self) -> None:
        await self._service.drain.wait_until_drained(self._service.admission, self._settings.shutdown_timeout_s)
        logger.info("drained: stopping")
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop at the first signal, drop what still runs at the second; never raise it again afterwards."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, number)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _stop(self, number: signal.Signals) -> None:
        logger.info("%s: stopping", number.name)
        self.force_exit = self.should_exit
        self.should_exit = True


if __name__ == "__main__":
    sys.exit(main())
