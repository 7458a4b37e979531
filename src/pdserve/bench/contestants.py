"""Who takes part in a comparison: pdserve in its splits, the peers that are installed, and servers that run already."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.bench.client.settings import base_url
from pdserve.bench.servers.gguf_copy import prepare_gguf
from pdserve.bench.servers.pdserve_server import Split, plan_pdserve
from pdserve.bench.servers.peers import PeerSettings, plan_llama_cpp, plan_transformers, plan_vllm
from pdserve.bench.servers.server import ServerPlan
from pdserve.checkpoint import prepare_weights, resolve_model
from pdserve.engine.config import EngineConfig
from pdserve.errors import ConfigError
from pdserve.settings import setting

_DEFAULT_MODEL_LEN = 2048
_LLAMA_SERVER = "llama-server"


@dataclass(frozen=True)
class ContestantSettings:
    """Who is compared."""

    splits: list[str] = setting(
        ["0:1"], help="pdserve's instances, PREFILL:DECODE; several are compared with one another", metavar="P:D"
    )
    vllm_venv: str | None = setting(None, help="virtual environment with vLLM's CPU build", metavar="DIR")
    llama_server: str | None = setting(
        None, help="llama.cpp's server; default: llama-server where it is in the PATH", metavar="PATH"
    )
    llama_gguf: str | None = setting(
        None,
        help="the model for llama.cpp; default: made of the model's own GGUF file, in the same dtype",
        metavar="PATH",
    )
    transformers_venv: str | None = setting(None, help="virtual environment with torch and transformers", metavar="DIR")
    peers: dict[str, Any] = setting(
        {}, help="a server that runs already, as name=url (repeatable); it is not pinned", metavar="NAME=URL"
    )
    prefix_caching: bool = setting(False, help="let every server reuse equal prefixes")


def plan_contestants(settings: ContestantSettings, engine: EngineConfig, cores: tuple[int, ...]) -> list[ServerPlan]:
    """Everybody who takes part, pdserve's first split in front: the others are compared with it.

    Args:
        settings: who.
        engine: the settings of pdserve's engines; model, dtype, context and requests at once hold for the peers.
        cores: what every server runs on.

    Raises:
        ConfigError: a peer that the user named is not installed.
    """
    plans = [plan_pdserve(Split.parse(text), engine) for text in settings.splits]
    if not plans:
        raise ConfigError("--splits: name at least one, as in 0:1")
    source = resolve_model(engine.model.model)
    dtype = engine.model.dtype
    peer_settings = PeerSettings(
        directory=prepare_weights(source, dtype),
        model_name=engine.model.served_model_name or source.name,
        dtype=dtype,
        max_model_len=engine.model.max_model_len or _DEFAULT_MODEL_LEN,
        max_num_seqs=engine.scheduler.max_num_seqs,
        cores=cores,
        prefix_caching=settings.prefix_caching,
    )
    if settings.vllm_venv is not None:
        plans.append(plan_vllm(settings.vllm_venv, peer_settings))
    llama_server = settings.llama_server or shutil.which(_LLAMA_SERVER)
    if llama_server is not None:
        gguf = Path(settings.llama_gguf) if settings.llama_gguf else prepare_gguf(source, dtype)
        plans.append(plan_llama_cpp(llama_server, gguf, peer_settings))
    if settings.transformers_venv is not None:
        plans.append(plan_transformers(settings.transformers_venv, peer_settings))
    plans += [ServerPlan(name, (), base_url(str(url), "--peer")) for name, url in settings.peers.items()]
    names = [plan.name for plan in plans]
    if len(set(names)) < len(names):
        raise ConfigError(f"two servers have the same name: {', '.join(names)}")
    return plans


def list_absent(settings: ContestantSettings) -> list[str]:
    """A line for each peer that could have taken part and was not named."""
    lines = []
    if settings.vllm_venv is None:
        lines.append("vLLM is not compared: --vllm-venv names its environment")
    if settings.llama_server is None and shutil.which(_LLAMA_SERVER) is None:
        lines.append("llama.cpp is not compared: --llama-server names its server")
    if settings.transformers_venv is None:
        lines.append("transformers is not compared: --transformers-venv names its environment")
    return lines
