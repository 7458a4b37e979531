"""Settings of the engine, one section for each component. Plain values only: this module imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from pdserve.errors import ConfigError
from pdserve.settings import setting


@dataclass(frozen=True)
class ModelSettings:
    """Which model, and how it is computed."""

    model: str = setting(
        "smollm2-135m-instruct",
        help="Hugging Face directory, hub id, .gguf file, or the name of a model that comes in a package",
    )
    served_model_name: str | None = setting(None, help="name in the API; default: the model's own name")
    dtype: str = setting("bfloat16", choices=("bfloat16", "float32"), help="dtype of weights and activations")
    max_model_len: int | None = setting(
        None, help="longest prompt plus answer, in tokens; default: the model's context length"
    )
    quantization: str = setting(
        "none",
        choices=("none", "int8", "w8a8"),
        help="of the weights: int8, or w8a8 = activations too; needs bfloat16 and the compiled kernels",
    )
    device: str = setting(
        "cpu", choices=("cpu", "cuda"), help="where to compute; cuda = the first GPU that the process sees"
    )
    kernel_backend: str = setting("auto", help="kernels to compute with; auto = the fastest that runs here")
    num_threads: int | None = setting(
        None,
        help="compute threads of one instance, shared by its workers; default: 1 (pdserve up shares the cores out)",
    )
    tensor_parallel_size: int = setting(
        1, help="worker processes that share each layer's heads and features; must divide them", minimum=1
    )
    pipeline_parallel_size: int = setting(1, help="worker processes that share the layers", minimum=1)
    worker_timeout_s: float = setting(
        60.0,
        help="worker processes that leave a step unanswered for this long end the engine: one of them hangs",
        minimum=1,
        maximum=300,
    )


@dataclass(frozen=True)
class CacheSettings:
    """KV memory."""

    block_size: int = setting(16, help="tokens in a KV block")
    kv_dtype: str = setting(
        "auto", choices=("auto", "bfloat16", "float32"), help="dtype of KV memory; auto = the model's dtype"
    )
    num_blocks: int | None = setting(None, help="KV blocks; default: from memory_fraction")
    memory_fraction: float = setting(
        0.1, help="share of the memory available at start that KV blocks take, in (0, 0.95]"
    )
    enable_prefix_caching: bool = setting(True, help="reuse KV blocks of equal prefixes")


@dataclass(frozen=True)
class SchedulerSettings:
    """Who runs when."""

    policy: str = setting("fcfs", choices=("fcfs", "priority"), help="order of the waiting queue")
    max_num_seqs: int = setting(64, help="requests that run at once")
    max_num_batched_tokens: int = setting(512, help="token budget of one step; longer prompts are chunked")
    max_queue_len: int = setting(1024, help="requests that may wait; beyond it the instance answers 429")
    kv_load_failure_policy: str = setting(
        "recompute",
        choices=("recompute", "fail"),
        help="what becomes of a request whose KV could not be loaded",
    )


@dataclass(frozen=True)
class ConnectorSettings:
    """How KV moves between engines."""

    connector: str = setting("shared_storage", help="a registered connector's name, or module:Class")
    connector_options: dict[str, Any] = setting(
        {}, help="the connector's own settings, as key=value (repeatable) or a TOML table"
    )


@dataclass(frozen=True)
class EngineConfig:
    """All of an engine's settings."""

    model: ModelSettings = field(default_factory=ModelSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    connector: ConnectorSettings = field(default_factory=ConnectorSettings)


_SECTIONS = {
    "model": ModelSettings,
    "cache": CacheSettings,
    "scheduler": SchedulerSettings,
    "connector": ConnectorSettings,
}


def build_config(**settings: Any) -> EngineConfig:
    """An engine's config from flat settings, each named as in its section.

    Raises:
        ConfigError: a name that no section has.
    """
    sections: dict[str, Any] = {}
    for name, section in _SECTIONS.items():
        own = {f.name for f in fields(section)}
        mine = {key: settings.pop(key) for key in list(settings) if key in own}
        sections[name] = replace(section(), **mine)
    if settings:
        known = sorted(f.name for section in _SECTIONS.values() for f in fields(section))
        raise ConfigError(f"unknown setting {sorted(settings)[0]!r}; the known ones are {', '.join(known)}")
    return EngineConfig(**sections)
