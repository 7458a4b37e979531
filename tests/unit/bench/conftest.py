from __future__ import annotations

import pytest

from pdserve.bench.workload.tokenizers import load_named_tokenizer
from pdserve.text import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_named_tokenizer("smollm2-135m-instruct")
