"""The router's settings, one section for each part of it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pdserve.errors import ConfigError
from pdserve.router.policies import build_policy, policy_names
from pdserve.settings import section, setting
from pdserve.text.message_format import find_message_format
from pdserve.text.reasoning import REASONING_TAGS
from pdserve.text.tool_calls import FORMATS


@dataclass(frozen=True)
class HttpSettings:
    """Where clients connect."""

    host: str = setting("127.0.0.1", help="address that clients connect to; 0.0.0.0 for every one", metavar="ADDRESS")
    port: int = setting(8000, help="port that clients connect to; 0 = the system chooses", minimum=0, maximum=65535)
    tls_certificate: str | None = setting(
        None, help="PEM file, read again when it changes: clients connect by HTTPS", metavar="PATH"
    )
    tls_key: str | None = setting(None, help="the certificate's unencrypted private key, a PEM file", metavar="PATH")
    ready_file: str | None = setting(
        None, help="once clients can connect, write the address to this file as JSON", metavar="PATH"
    )
    max_body_bytes: int = setting(
        8 * 1024 * 1024, help="largest request body; beyond it the answer is 413", minimum=1024
    )
    client_stall_timeout_s: float = setting(
        30.0, help="a client that takes nothing of its answer for this long is cut off", minimum=0.1
    )
    shutdown_timeout_s: float = setting(10.0, help="on SIGTERM, running requests have this long to finish", minimum=0)
    log_level: str | None = setting(None, help="debug, info, warning or error; default: PDSERVE_LOG_LEVEL, else info")


@dataclass(frozen=True)
class ServedModelSettings:
    """Which model's tokenizer and chat template the router uses."""

    model: str = setting(
        "smollm2-135m-instruct",
        help="the model that the instances run: directory, hub id, .gguf file, or a packaged model's name",
    )
    served_model_name: str | None = setting(None, help="name in the API; default: the model's own name")


@dataclass(frozen=True)
class AnswerSettings:
    """How chat answers are read."""

    tool_call_parser: str = setting(
        "auto",
        help=f"how the model writes tool calls: {', '.join(FORMATS)}; auto = as its chat template shows, none = not",
        metavar="NAME",
    )
    reasoning_parser: str = setting(
        "none", help=f"how the model marks its reasoning: {', '.join(REASONING_TAGS)}, or none", metavar="NAME"
    )


_ADDRESS = re.compile(r"(tcp://)?(?P<host>\w[\w.-]*|\[[0-9A-Fa-f:.]+(%[\w.-]+)?\]):(?P<port>[0-9]{1,5})", re.ASCII)
"""A name, an IPv4 address, or an IPv6 address in brackets, and a port: what ZMQ connects to without an error."""

_POLICY_HELP = f"how a {{}} instance is chosen: {', '.join(policy_names())}, or module:Class"


@dataclass(frozen=True)
class PoolSettings:
    """The instances, and how one of them is chosen."""

    prefill: list[str] = setting(
        [], help="addresses of prefill instances; none = decode instances do everything", metavar="HOST:PORT"
    )
    decode: list[str] = setting([], help="addresses of decode instances", metavar="HOST:PORT")
    instances_file: str | None = setting(
        None, help="TOML file with lists prefill and decode, read again when it changes", metavar="PATH"
    )
    discovery: str | None = setting(
        None, help="Redis where instances announce themselves, like redis://host:6379/0", metavar="URL"
    )
    discovery_interval_s: float = setting(1.0, help="how often the file or Redis is looked at", minimum=0.05)
    curve_secret_key: str | None = setting(
        None, help="this router's .secret file (pdserve keys curve): connections are encrypted", metavar="PATH"
    )
    curve_peer_keys: str | None = setting(
        None,
        help="public keys of the instances, called HOST:PORT or HOST, or one key of all; read again when it changes",
        metavar="PATH",
    )
    prefill_policy: str = setting("least_loaded", help=_POLICY_HELP.format("prefill"), metavar="NAME")
    decode_policy: str = setting("least_loaded", help=_POLICY_HELP.format("decode"), metavar="NAME")
    cache_events: bool = setting(
        True, help="policies that go by prefix ask instances what they have; else they go by what was sent there"
    )
    max_faults: int = setting(3, help="faults of its own in a row after which an instance rests; 0 = never", minimum=0)
    ejection_s: float = setting(5.0, help="how long it rests; doubled each time it fails again", minimum=0.1)
    slow_start_s: float = setting(5.0, help="a fresh instance gets its full share of work after this", minimum=0)
    heartbeat_interval_s: float = setting(
        1.0, help="how often each instance is told that the router lives", minimum=0.01
    )
    heartbeat_timeout_s: float = setting(10.0, help="an instance silent for this long is lost", minimum=0.1)


@dataclass(frozen=True)
class HandoffSettings:
    """A request's way through the pools, and where it goes on when an instance is lost."""

    disaggregation_threshold_tokens: int = setting(
        0, help="prompts with fewer uncached tokens than this are not handed off; decode does all of it", minimum=0
    )
    max_tries: int = setting(3, help="instances that may fail one request before its client gets an error", minimum=1)
    prefill_wait_s: float = setting(
        1.0, help="how long a request waits for a lost prefill pool before decode does all of it", minimum=0
    )
    failover_wait_s: float = setting(
        30.0, help="how long a request whose answer has begun waits for an instance to go on at", minimum=0
    )


@dataclass(frozen=True)
class AdmissionSettings:
    """How much is let in at once."""

    max_concurrent: int = setting(1024, help="client requests served at once", minimum=1)
    max_queue: int = setting(1024, help="client requests that may wait; beyond it the answer is 429", minimum=0)
    key_max_concurrent: int = setting(
        0, help="requests of one API key that wait or are served at once; beyond it 429; 0 = no limit", minimum=0
    )
    key_tokens_per_minute: int = setting(
        0, help="prompt and output tokens of one API key in a minute; beyond it 429; 0 = no limit", minimum=0
    )
    max_choices: int = setting(128, help="largest number of prompts times n in one request", minimum=1)
    request_timeout_s: float = setting(
        600.0, help="a request that takes longer ends with 504; its client may ask for less", minimum=0.1
    )
    timeline_capacity: int = setting(1000, help="requests whose timelines are kept", minimum=1)


@dataclass(frozen=True)
class AccessSettings:
    """Who may ask."""

    api_keys_file: str | None = setting(
        None, help="file of API keys' digests, read again when it changes; also: PDSERVE_API_KEYS", metavar="PATH"
    )
    public_metrics: bool = setting(False, help="GET /metrics needs no API key")


@dataclass(frozen=True)
class TracingSettings:
    """Traces of requests."""

    otlp_endpoint: str | None = setting(
        None, help="send traces to this OpenTelemetry collector, like http://host:4318/v1/traces", metavar="URL"
    )
    trace_sample_ratio: float = setting(
        1.0, help="share of requests that are traced where the client's traceparent does not say", minimum=0, maximum=1
    )


@dataclass(frozen=True)
class RouterSettings:
    """All of the router's settings."""

    http: HttpSettings = section(HttpSettings)
    model: ServedModelSettings = section(ServedModelSettings)
    answers: AnswerSettings = section(AnswerSettings)
    pools: PoolSettings = section(PoolSettings)
    handoff: HandoffSettings = section(HandoffSettings)
    admission: AdmissionSettings = section(AdmissionSettings)
    access: AccessSettings = section(AccessSettings)
    tracing: TracingSettings = section(TracingSettings)


def check_settings(settings: RouterSettings) -> None:
    """Refuse what single values do not show.

    Raises:
        ConfigError: naming the setting, its value and what is accepted.
    """
    find_message_format(settings.answers.tool_call_parser, settings.answers.reasoning_parser, template="")
    if (settings.http.tls_certificate is None) != (settings.http.tls_key is None):
        raise ConfigError("--tls-certificate and --tls-key belong together")
    pools = settings.pools
    given = [
        name
        for name, value in (
            ("--prefill and --decode", pools.prefill or pools.decode),
            ("--instances-file", pools.instances_file),
            ("--discovery", pools.discovery),
        )
        if value
    ]
    if len(given) > 1:
        raise ConfigError(f"instances are given by {' and by '.join(given)}; choose one way")
    if not pools.decode and given in ([], ["--prefill and --decode"]):
        raise ConfigError(
            "no decode instance is given; name at least one with --decode HOST:PORT, or use --instances-file or "
            "--discovery"
        )
    endpoints = [endpoint_of(address) for address in (*pools.prefill, *pools.decode)]
    doubled = sorted({endpoint for endpoint in endpoints if endpoints.count(endpoint) > 1})
    if doubled:
        raise ConfigError(f"instance {doubled[0]} is given more than once, to --prefill or --decode")
    for policy in (pools.prefill_policy, pools.decode_policy):
        build_policy(policy)
    if pools.heartbeat_timeout_s <= pools.heartbeat_interval_s:
        raise ConfigError(
            f"heartbeat_timeout_s is {pools.heartbeat_timeout_s}; it must be above heartbeat_interval_s, "
            f"{pools.heartbeat_interval_s}"
        )


def endpoint_of(address: str) -> str:
    """The ZMQ endpoint of an instance's address: ``host:port`` or ``tcp://host:port``.

    Raises:
        ConfigError: the address is neither.
    """
    parts = _ADDRESS.fullmatch(address)
    if parts is None or not 0 < int(parts["port"]) < 65536:
        raise ConfigError(f"instance address {address!r} is not of the form HOST:PORT")
    return f"tcp://{parts['host']}:{parts['port']}"
