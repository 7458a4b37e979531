"""The tokenizer that measures prompts, found without asking any network."""

from __future__ import annotations

from pathlib import Path

from pdserve.checkpoint import prepare_tokenizer, resolve_model
from pdserve.errors import ConfigError
from pdserve.text.tokenizer import Tokenizer, load_tokenizer


def load_named_tokenizer(model: str) -> Tokenizer:
    """The tokenizer of ``model``, as after ``--model``.

    Raises:
        ConfigError: it is not there.
    """
    return load_tokenizer(prepare_tokenizer(resolve_model(model)))


def find_tokenizer(named: str | None, served_name: str) -> Tokenizer | None:
    """The tokenizer that the user named, else the served model's if its name is enough to find it here.

    Args:
        named: ``--tokenizer``.
        served_name: the model's name in the API. One of the form owner/name is not looked up: it could stand for a
            download of gigabytes that nobody asked for.

    Raises:
        ConfigError: the named one is not there.
    """
    if named is not None:
        return load_named_tokenizer(named)
    if "/" in served_name and not Path(served_name).exists():
        return None
    try:
        return load_named_tokenizer(served_name)
    except ConfigError:
        return None
