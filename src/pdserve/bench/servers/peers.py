"""Other people's servers, as they are started to be compared with: vLLM's CPU build, llama.cpp's, transformers.

Every one gets the same weights, context, number of requests at once, cores and dtype, and no prefix cache unless all
have one. docs/benchmarks.md tells how to install them.
"""

from __future__ import annotations

import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

from pdserve.bench.servers import transformers_server
from pdserve.bench.servers.server import ServerPlan
from pdserve.errors import ConfigError

_LOOPBACK = "127.0.0.1"
_START_TIMEOUT_S = 600.0
_OFFLINE = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}
_KV_CACHE_GB = 2
_ALLOCATOR_NAMES = ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4")
_LIBRARY_DIRECTORIES = ("/usr/lib", "/usr/lib64", "/usr/local/lib")


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """What every peer is given.

    Attributes:
        directory: the model in Hugging Face's form.
        model_name: the name it is served under.
        dtype: of the weights.
        max_model_len: longest prompt plus answer.
        max_num_seqs: requests at once.
        cores: the cores it runs on; one thread for each.
        prefix_caching: whether equal prefixes are reused.
    """

    directory: Path
    model_name: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    cores: tuple[int, ...]
    prefix_caching: bool


def plan_vllm(venv: str, settings: PeerSettings) -> ServerPlan:
    """The server of vLLM out of a virtual environment.

    Raises:
        ConfigError: it is not installed there.
    """
    program = _find_in(venv, "vllm", "--vllm-venv", "vLLM")
    port = _find_free_port()
    cores = ",".join(map(str, settings.cores))
    caching = "--enable-prefix-caching" if settings.prefix_caching else "--no-enable-prefix-caching"
    return ServerPlan(
        name="vLLM",
        command=[
            *(str(program), "serve", str(settings.directory), "--served-model-name", settings.model_name),
            *("--host", _LOOPBACK, "--port", str(port), "--dtype", settings.dtype, caching),
            *("--max-model-len", str(settings.max_model_len), "--max-num-seqs", str(settings.max_num_seqs)),
        ],
        url=f"http://{_LOOPBACK}:{port}",
        environment={
            **_OFFLINE,
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": str(_KV_CACHE_GB),
            # Left alone it binds itself to one core.
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            **_preload(Path(venv)),
        },
        start_timeout_s=_START_TIMEOUT_S,
    )


def plan_llama_cpp(program: str, gguf: Path, settings: PeerSettings) -> ServerPlan:
    """llama.cpp's server.

    Args:
        program: path or name of ``llama-server``.
        gguf: the same weights as a GGUF file.
        settings: what every peer is given.

    Raises:
        ConfigError: it is not there.
    """
    found = shutil.which(program)
    if found is None:
        raise ConfigError(f"--llama-server: {program!r} is no program here; docs/benchmarks.md says how to get it")
    port = _find_free_port()
    threads = str(len(settings.cores))
    caching = "--cache-prompt" if settings.prefix_caching else "--no-cache-prompt"
    return ServerPlan(
        name="llama.cpp",
        command=[
            *(found, "-m", str(gguf), "--alias", settings.model_name, "--host", _LOOPBACK, "--port", str(port)),
            *("-t", threads, "-tb", threads, "-np", str(settings.max_num_seqs), "--kv-unified", caching, "--offline"),
            *("-c", str(settings.max_model_len * max(settings.max_num_seqs // 4, 1))),
        ],
        url=f"http://{_LOOPBACK}:{port}",
        environment=_OFFLINE,
        start_timeout_s=_START_TIMEOUT_S,
    )


def plan_transformers(venv: str, settings: PeerSettings) -> ServerPlan:
    """Transformers' ``generate`` in static batches, behind a server of our own that runs in its environment.

    Raises:
        ConfigError: there is no Python in that environment.
    """
    python = _find_in(venv, "python", "--transformers-venv", "Python")
    port = _find_free_port()
    return ServerPlan(
        name="transformers",
        command=[
            *(str(python), str(Path(transformers_server.__file__).resolve())),
            *("--model", str(settings.directory), "--name", settings.model_name, "--dtype", settings.dtype),
            *("--port", str(port), "--batch-size", str(settings.max_num_seqs)),
            *("--threads", str(len(settings.cores))),
        ],
        url=f"http://{_LOOPBACK}:{port}",
        environment={**_OFFLINE, "PYTHONSAFEPATH": "1"},
        start_timeout_s=_START_TIMEOUT_S,
    )


def _find_in(venv: str, program: str, flag: str, what: str) -> Path:
    path = Path(venv).expanduser().absolute() / "bin" / program
    if not path.is_file():
        raise ConfigError(f"{flag}: {what} is not installed in {venv}; docs/benchmarks.md says how to install it")
    return path


def _preload(venv: Path) -> dict[str, str]:
    """The allocator and OpenMP library that vLLM's authors ask for, where they are found."""
    found = []
    for directory in map(Path, _LIBRARY_DIRECTORIES):
        candidates = [path for name in _ALLOCATOR_NAMES for path in (directory / name, *directory.glob(f"*/{name}"))]
        found += [path for path in candidates if path.is_file()][:1]
    libraries = [str(path) for path in found[:1]]
    libraries += [str(path) for path in sorted(venv.glob("**/libiomp5.so"))[:1]]
    return {"LD_PRELOAD": ":".join(libraries)} if libraries else {}


def _find_free_port() -> int:
    """A port that is free now; peers take no port of the system's choice that they would tell."""
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        return int(probe.getsockname()[1])
