"""Lets the end-to-end tests import their own surroundings, and loads what they share once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock

sys.path.insert(0, str(Path(__file__).parent))

from prompts import PROMPTS, build_long_text

from pdserve.checkpoint import prepare_tokenizer, resolve_model
from pdserve.text import Tokenizer, load_tokenizer

MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer(prepare_tokenizer(resolve_model(MODEL)))


@pytest.fixture(scope="session")
def prompt_ids(tokenizer: Tokenizer) -> list[list[int]]:
    """Every prompt of the collection as token ids."""
    return [tokenizer.encode(prompt, add_special_tokens=True) for prompt in PROMPTS]


@pytest.fixture(scope="session")
def long_ids(tokenizer: Tokenizer) -> list[list[int]]:
    """Three prompts of more than 1,000 tokens."""
    texts = [build_long_text(20, topic) for topic in range(3)]
    ids = [tokenizer.encode(text, add_special_tokens=True) for text in texts]
    assert all(len(i) > 1000 for i in ids)
    return ids


@pytest.fixture
def only_supervisor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Whoever starts ``pdserve up`` does so alone, for its traces on the machine are looked for.

    Tests run in several processes, whose temporary directories have one parent.
    """
    with FileLock(tmp_path_factory.getbasetemp().parent / "supervisor.lock"):
        yield
