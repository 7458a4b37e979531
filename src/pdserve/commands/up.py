"""``pdserve up``: a whole service on one machine, from one command to Ctrl-C."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pdserve import env
from pdserve.commands.ask import AskError, Service, start_asking
from pdserve.commands.screen import Screen
from pdserve.decode.main import DecodeConfig
from pdserve.engine.config import ConnectorSettings, EngineConfig
from pdserve.engine.server.listening import bind_http_socket
from pdserve.engine.server.settings import InstanceConfig, InstanceSettings
from pdserve.errors import ConfigError
from pdserve.prefill.main import PrefillConfig
from pdserve.router.config import RouterSettings
from pdserve.settings import load_settings, section, setting, to_arguments
from pdserve.supervisor.deployment import Deployment
from pdserve.supervisor.member import Member, Plan, State, Surroundings
from pdserve.supervisor.placement import Placement, available_cores, can_pin, share_cores
from pdserve.supervisor.run_directory import RunDirectory
from pdserve.supervisor.stop_request import StopRequest

_LOOPBACK = "127.0.0.1"
_ORPHAN_GRACE_S = 5.0
_SERVED_TIMEOUT_S = 30.0
_SERVED_POLL_S = 0.05
_AUTO = "auto"


@dataclass(frozen=True)
class UpSettings:
    """How many processes, and where clients connect."""

    prefill: int = setting(1, help="prefill instances; 0 = decode instances do everything", minimum=0)
    decode: int = setting(1, help="decode instances", minimum=1)
    host: str = setting(_LOOPBACK, help="address that clients connect to", metavar="ADDRESS")
    port: int = setting(8000, help="port that clients connect to; 0 = the system chooses", minimum=0, maximum=65535)
    ask: str | None = setting(
        None, help="once all is ready, ask this and show the answer and the way it took", metavar="PROMPT"
    )
    pin: bool = setting(True, help="give each instance cores of its own where there are enough")
    log_level: str | None = setting(None, help="debug, info, warning or error; default: PDSERVE_LOG_LEVEL, else info")
    drain_timeout_s: float = setting(10.0, help="at the end, running requests have this long to finish", minimum=0)


@dataclass(frozen=True)
class UpConfig:
    """All settings of ``pdserve up``: its own, its instances' and its router's."""

    up: UpSettings = field(default_factory=UpSettings)
    engine: EngineConfig = field(default_factory=lambda: EngineConfig(connector=ConnectorSettings(connector=_AUTO)))
    router: RouterSettings = section(
        RouterSettings,
        exclude=(
            *("host", "port", "ready_file", "shutdown_timeout_s", "model", "served_model_name"),
            *("prefill", "decode", "heartbeat_interval_s", "heartbeat_timeout_s", "log_level"),
            *("instances_file", "discovery", "discovery_interval_s", "curve_secret_key", "curve_peer_keys"),
        ),
    )


def run(argv: Sequence[str]) -> int:
    """Bring everything up, serve until told to stop, and take everything down again.

    Raises:
        ConfigError: a setting is wrong or a process could not start.
    """
    config = load_settings(
        UpConfig,
        prog="pdserve up",
        description="Start prefill and decode instances and a router on this machine, and watch them.",
        examples=[
            'pdserve up --ask "What is a KV cache?"',
            "pdserve up --prefill 2 --decode 2 --model ./SmolLM2-135M-Instruct --port 8000",
            "pdserve up --prefill 0                       # one pool: decode instances do everything",
            "pdserve up --connector shared_storage --connector-option path=/mnt/kv",
            "pdserve up --config service.toml",
        ],
        argv=argv,
    )
    # A taken port is told before models are loaded; the router binds it for good at the end.
    bind_http_socket(config.up.host, config.up.port, "--port").close()
    stop_request = StopRequest()
    stop_request.install()
    screen = Screen()
    with contextlib.closing(RunDirectory(_ORPHAN_GRACE_S)) as run_directory:
        surroundings = Surroundings(
            directory=run_directory.path,
            log_level=config.up.log_level or env.get_log_level(),
            show_line=partial(screen.say, file=sys.stderr),
            announce=screen.say,
            watch=run_directory.watch,
        )
        deployment = Deployment(surroundings, stop_request, config.up.drain_timeout_s)
        with _stopping(deployment):
            return _serve(config, deployment, stop_request, run_directory.path, screen)


@contextlib.contextmanager
def _stopping(deployment: Deployment) -> Iterator[None]:
    try:
        yield
    finally:
        deployment.stop()


def _serve(config: UpConfig, deployment: Deployment, stop_request: StopRequest, directory: Path, screen: Screen) -> int:
    instances = deployment.start(plan_instances(config, directory))
    if stop_request.is_set:
        return 0
    (router,) = deployment.start([plan_router(config, instances)])
    if stop_request.is_set or router.note is None:
        return 0
    service = Service(str(router.note["http"]), config.router.http.tls_certificate)
    if not _wait_until_served(service, stop_request):
        return 0
    screen.say(describe(deployment.members, service.url))
    if config.up.ask is not None:
        start_asking(service, config.up.ask, screen)
    decoders = instances[config.up.prefill :]

    def is_lost() -> bool:
        return router.state is State.GIVEN_UP or all(decoder.state is State.GIVEN_UP for decoder in decoders)

    deployment.watch(is_lost)
    if stop_request.is_set:
        screen.say("stopping")
        return 0
    raise ConfigError("nothing is left that could serve; see the lines above")


def _wait_until_served(service: Service, stop_request: StopRequest) -> bool:
    """Wait until the router has found its instances; False when the user wants to stop before that.

    Raises:
        ConfigError: it does not find them.
    """
    deadline_s = time.monotonic() + _SERVED_TIMEOUT_S
    while not stop_request.is_set:
        with contextlib.suppress(OSError, AskError):
            service.get_json("/ready")
            return True
        if time.monotonic() >= deadline_s:
            raise ConfigError(f"the router reached no instance within {_SERVED_TIMEOUT_S:.0f} s; see the lines above")
        time.sleep(_SERVED_POLL_S)
    return False


def plan_instances(config: UpConfig, directory: Path) -> list[Plan]:
    """One plan for each instance, prefill first; ``directory`` holds KV unless the user chose a place."""
    num_instances = config.up.prefill + config.up.decode
    placement = share_cores(
        available_cores(),
        num_instances,
        num_threads=config.engine.model.num_threads,
        pin=config.up.pin and can_pin(),
    )
    engine = resolve_engine(config, placement, directory)
    names = [f"prefill-{index}" for index in range(config.up.prefill)]
    names += [f"decode-{index}" for index in range(config.up.decode)]
    return [_plan_instance(name, engine, config.up, cores) for name, cores in zip(names, placement.cores, strict=True)]


def resolve_engine(config: UpConfig, placement: Placement, directory: Path) -> EngineConfig:
    """The engine's settings with threads and connector decided."""
    connector = config.engine.connector
    if connector.connector == _AUTO:
        name = "shared_storage" if config.up.prefill else "null"
        connector = dataclasses.replace(connector, connector=name)
    if connector.connector == "shared_storage":
        options = {"path": str(directory / "kv"), **connector.connector_options}
        connector = dataclasses.replace(connector, connector_options=options)
    model = dataclasses.replace(config.engine.model, num_threads=placement.num_threads)
    return dataclasses.replace(config.engine, model=model, connector=connector)


def _plan_instance(name: str, engine: EngineConfig, up: UpSettings, cores: Sequence[int] | None) -> Plan:
    role = name.partition("-")[0]
    config_type: type[InstanceConfig] = PrefillConfig if role == "prefill" else DecodeConfig

    def build_arguments(note: Mapping[str, Any] | None) -> list[str]:
        settings = InstanceSettings(
            host=_LOOPBACK,
            port=_port_of(note, "address"),
            http_port=_port_of(note, "http"),
            instance_id=name,
            drain_timeout_s=up.drain_timeout_s,
        )
        return to_arguments(config_type(engine=engine, instance=settings))

    return Plan(name, f"pdserve.{role}.main", build_arguments, cores)


def plan_router(config: UpConfig, instances: Sequence[Member]) -> Plan:
    """The router's plan, with the addresses that the instances got."""
    addresses = [str(member.note["address"]) for member in instances if member.note is not None]
    settings = config.router
    model = config.engine.model
    settings = dataclasses.replace(
        settings,
        model=dataclasses.replace(settings.model, model=model.model, served_model_name=model.served_model_name),
        pools=dataclasses.replace(
            settings.pools, prefill=addresses[: config.up.prefill], decode=addresses[config.up.prefill :]
        ),
    )

    def build_arguments(note: Mapping[str, Any] | None) -> list[str]:
        http = dataclasses.replace(
            settings.http,
            host=config.up.host,
            port=config.up.port if note is None else int(note["port"]),
            shutdown_timeout_s=config.up.drain_timeout_s,
        )
        return to_arguments(dataclasses.replace(settings, http=http))

    return Plan("router", "pdserve.router.main", build_arguments)


def describe(members: Sequence[Member], url: str) -> str:
    """The table of processes, and where to send requests."""
    rows = [("process", "pid", "cores", "address", "health and metrics")]
    for member in members:
        note = member.note or {}
        cores = "any" if member.plan.cores is None else ",".join(map(str, member.plan.cores))
        rows.append((member.plan.name, str(member.pid), cores, note.get("address", url), note.get("http", url)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, f"ready: {url}/v1 speaks the OpenAI API; Ctrl-C ends everything"])


def _port_of(note: Mapping[str, Any] | None, key: str) -> int:
    return 0 if note is None else int(str(note[key]).rpartition(":")[2])
