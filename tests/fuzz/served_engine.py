"""A real engine with a tiny model behind a real instance's socket, in threads of the test's process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq

from pdserve.connectors.testing.engines.tiny_model import write_tiny_model
from pdserve.engine.config import build_config
from pdserve.engine.core import EngineCore
from pdserve.engine.server.counters import ServerCounters
from pdserve.engine.server.inbox import Drain, Inbox
from pdserve.engine.server.instance_server import InstanceServer
from pdserve.engine.server.listening import bind_router_socket
from pdserve.engine.server.settings import InstanceSettings
from pdserve.engine.server.socket_thread import SocketThread
from pdserve.protocol import Ready, Role

DEADLINE_S = 60.0


def wait_until(condition: Callable[[], Any], what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"{what} did not come about"
        time.sleep(0.002)


class ServedEngine:
    """The engine, its server and their threads."""

    def __init__(self, directory: Path, role: Role, connector: str, options: Mapping[str, Any]) -> None:
        config = build_config(
            model=str(write_tiny_model(directory / "model")),
            connector=connector,
            connector_options=dict(options),
            block_size=8,
            num_blocks=64,
            max_num_batched_tokens=256,
        )
        self.engine = EngineCore.build(config, role=role, engine_id=f"{role}@fuzz", on_progress=lambda _: None)
        self.inbox, self.counters = Inbox(), ServerCounters()
        self.context = zmq.Context()
        settings = InstanceSettings(drain_timeout_s=0.0, session_timeout_s=600.0)
        socket, self.port = bind_router_socket(self.context, "127.0.0.1", 0)
        ready = Ready(
            session="", instance_id="i", generation="g", role=role, model="tiny", identity=self.engine.identity,
            limits=self.engine.limits, connector=connector, load=self.engine.get_load(),
        )  # fmt: skip
        thread = SocketThread(socket, ready, self.inbox, settings, self.counters)
        self.server = InstanceServer(
            self.engine, thread, self.inbox, drain_timeout_s=0.0, counters=self.counters, pages={}
        )
        self.status: int | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        self.status = self.server.run()

    @property
    def is_alive(self) -> bool:
        return self.thread.is_alive()

    def count(self, name: str) -> float:
        """A counter's value, summed over its labels."""
        families = self.counters.registry.collect()
        return sum(s.value for family in families for s in family.samples if s.name == f"pdserve_server_{name}")

    def close(self) -> None:
        self.inbox.put(Drain("the test ends"))
        self.thread.join(DEADLINE_S)
        self.engine.close()
        self.context.term()


@contextmanager
def served_engine(directory: Path, role: Role, connector: str, options: Mapping[str, Any]) -> Iterator[ServedEngine]:
    made = ServedEngine(directory, role, connector, options)
    try:
        yield made
    finally:
        made.close()
