"""Tokenizers that the tests of this folder share, and the import of the makers next to them."""

import sys
from pathlib import Path

import pytest

from pdserve.checkpoint import prepare_tokenizer, resolve_model
from pdserve.text.tokenizer import Tokenizer, load_tokenizer

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def smollm2_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PDSERVE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        return prepare_tokenizer(resolve_model("smollm2-135m-instruct"))


@pytest.fixture(scope="session")
def smollm2(smollm2_directory: Path) -> Tokenizer:
    return load_tokenizer(smollm2_directory)


@pytest.fixture
def spm(tmp_path: Path) -> Tokenizer:
    from tiny_tokenizers import write_spm

    return load_tokenizer(write_spm(tmp_path / "spm"))
