"""Lets the end-to-end tests import their own surroundings, and loads what they share once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

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
