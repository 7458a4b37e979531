"""One instance's process from its command line to its exit status. What `prefill` and `decode` share.

The order matters: settings, then both ports (a taken one is told before a model is loaded), then the compute
threads, then the model, and only then the first answer to a router.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

from pdserve.announcements import Announcement, AnnouncementBoard
from pdserve.engine.server.about import build_about
from pdserve.engine.server.announcer import Announcer
from pdserve.engine.server.counters import ServerCounters
from pdserve.engine.server.http_port import HttpPort, build_app
from pdserve.engine.server.inbox import Inbox, Page
from pdserve.engine.server.instance_server import InstanceServer, Phase
from pdserve.engine.server.listening import (
    ReadyNote,
    bind_http_socket,
    bind_router_socket,
    build_gate,
    url_host,
    warn_of_open_door,
)
from pdserve.engine.server.settings import InstanceConfig
from pdserve.engine.server.signals import DrainOnSignal
from pdserve.engine.server.socket_thread import SocketThread
from pdserve.engine.server.watchdog import BlockWatchdog
from pdserve.errors import ConfigError
from pdserve.log import configure_logging
from pdserve.protocol import Ready, Role
from pdserve.ready_file import write_ready_file
from pdserve.settings import describe_settings, load_settings

if TYPE_CHECKING:
    from pdserve.engine.core import EngineCore

logger = logging.getLogger("pdserve.instance")


def run_instance(role: Role, config_type: type[InstanceConfig], argv: Sequence[str] | None = None) -> int:
    """Run a prefill or decode instance until it is told to end.

    Args:
        role: the pool it is for.
        config_type: the settings with this role's defaults.
        argv: the command line; None = this process's.

    Returns:
        The exit status: 0 after a drain, 1 when the engine failed, 2 when it cannot start with these settings.
    """
    started_s = time.monotonic()
    try:
        config = load_settings(
            config_type,
            prog=f"run-{role}",
            description=f"Run one {role} instance: an engine that routers connect to.",
            examples=_examples(role),
            argv=argv,
        )
        return _Instance(role, config, started_s).run()
    except ConfigError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 2


class _Instance:
    """Holds what `run` opens, so that it closes all of it whatever happens."""

    def __init__(self, role: Role, config: InstanceConfig, started_s: float) -> None:
        self._role = role
        self._config = config
        self._started_s = started_s
        self._inbox = Inbox()
        self._server: InstanceServer | None = None
        self._signals = DrainOnSignal(self._inbox)

    def run(self) -> int:
        settings = self._config.instance
        context = zmq.Context[zmq.Socket[bytes]]()
        gate = build_gate(context, settings)
        router_socket, port = bind_router_socket(context, settings.host, settings.port, gate)
        try:
            http_socket = bind_http_socket(settings.host, settings.resolve_http_port())
            try:
                return self._run_bound(router_socket, port, http_socket)
            finally:
                http_socket.close()
        finally:
            router_socket.close(linger=0)
            context.term()

    def _run_bound(self, router_socket: zmq.Socket[bytes], port: int, http_socket: socket.socket) -> int:
        settings = self._config.instance
        instance_id = settings.resolve_instance_id(self._role, port)
        generation = f"{time.time_ns():x}-{secrets.token_hex(4)}"
        configure_logging(instance_id, settings.log_level)
        logger.info("settings", extra={"kv": describe_settings(self._config)})
        warn_of_open_door(settings)
        host = url_host(settings.host)
        note = ReadyNote(
            instance_id=instance_id,
            generation=generation,
            role=self._role,
            pid=os.getpid(),
            address=f"tcp://{host}:{port}",
            http=f"http://{host}:{http_socket.getsockname()[1]}",
        )
        self._signals.install()
        app = build_app(
            self._inbox,
            self._phase,
            debug_blocks=settings.debug_blocks,
            get_about=lambda: build_about(
                instance_id=instance_id,
                generation=generation,
                role=self._role,
                connector=self._config.engine.connector,
            ),
        )
        http_port = HttpPort(app, http_socket)
        http_port.start()
        try:
            return self._load_and_serve(router_socket, note, port)
        finally:
            http_port.close()

    def _load_and_serve(self, router_socket: zmq.Socket[bytes], note: ReadyNote, port: int) -> int:
        engine = self._build_engine(note)
        try:
            self._server = self._build_server(engine, router_socket, note)
            self._signals.serving = True
            logger.info(
                "ready in %.1f s: routers connect to %s, HTTP at %s",
                time.monotonic() - self._started_s, note.address, note.http,
            )  # fmt: skip
            if self._config.instance.ready_file is not None:
                write_ready_file(Path(self._config.instance.ready_file), asdict(note))
            with self._announced(note, port):
                return self._server.run()
        finally:
            engine.close()

    def _announced(self, note: ReadyNote, port: int) -> contextlib.AbstractContextManager[object]:
        """Tells routers of the instance while it serves, where a Redis is given."""
        settings = self._config.instance
        if settings.discovery is None:
            return contextlib.nullcontext()
        announcement = Announcement(
            role=self._role,
            address=settings.resolve_advertised_address(port),
            instance_id=note.instance_id,
            generation=note.generation,
        )
        return Announcer(AnnouncementBoard(settings.discovery), announcement)

    def _build_engine(self, note: ReadyNote) -> EngineCore:
        import torch

        from pdserve.engine.core import EngineCore

        torch.set_num_threads(self._config.engine.model.num_threads or 1)
        return EngineCore.build(
            self._config.engine,
            role=self._role,
            engine_id=f"{note.instance_id}@{note.generation}",
            on_progress=logger.info,
            wake_up=self._inbox.wake,
        )

    def _build_server(self, engine: EngineCore, router_socket: zmq.Socket[bytes], note: ReadyNote) -> InstanceServer:
        from pdserve.engine.metrics import render_metrics

        counters = ServerCounters()
        ready = Ready(
            session="",
            instance_id=note.instance_id,
            generation=note.generation,
            role=self._role,
            model=engine.model_name,
            identity=engine.identity,
            limits=engine.limits,
            connector=self._config.engine.connector.connector,
            load=engine.get_load(),
            http_port=int(note.http.rpartition(":")[2]),
        )
        return InstanceServer(
            engine,
            SocketThread(router_socket, ready, self._inbox, self._config.instance, counters),
            self._inbox,
            drain_timeout_s=self._config.instance.drain_timeout_s,
            counters=counters,
            pages={
                Page.METRICS: lambda: (
                    render_metrics(engine.get_stats(), self._role, note.instance_id) + counters.render()
                ),
                Page.BLOCKS: lambda: msgspec.json.encode(engine.get_block_report()),
            },
            watchdog=self._build_watchdog(engine),
        )

    def _build_watchdog(self, engine: EngineCore) -> BlockWatchdog | None:
        settings = self._config.instance
        if not settings.watchdog_interval_s:
            return None
        return BlockWatchdog(lambda: engine.check_blocks(settings.max_transfer_age_s), settings.watchdog_interval_s)

    def _phase(self) -> Phase:
        return Phase.STARTING if self._server is None else self._server.phase


def _examples(role: Role) -> list[str]:
    return [
        f"run-{role}",
        f"run-{role} --model ./SmolLM2-135M-Instruct --host 0.0.0.0 --num-threads 8",
        f"run-{role} --connector shared_storage --connector-option path=/mnt/kv",
        f"run-{role} --config {role}.toml --port 0 --ready-file /run/{role}.json",
    ]
