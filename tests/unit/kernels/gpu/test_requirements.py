from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError

import pytest
import torch

from pdserve.errors import ConfigError
from pdserve.kernels.gpu import requirements
from pdserve.kernels.gpu.requirements import require_flash_attn, require_gpu


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int]], None]:
    """Lets torch report a GPU of some compute capability."""

    def report(capability: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla V100")

    return report


def test_a_torch_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match=r"torch .* is built without CUDA; .*use device cpu"):
        require_gpu()


def test_a_machine_without_a_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="finds no usable GPU; look at nvidia-smi"):
        require_gpu()


def test_an_old_gpu_is_named(gpu: Callable[[tuple[int, int]], None]) -> None:
    gpu((7, 0))
    with pytest.raises(ConfigError, match=r"Tesla V100 has compute capability 7\.0; .* need 8\.0 or newer"):
        require_gpu()


def test_the_first_gpu_is_taken(gpu: Callable[[tuple[int, int]], None], monkeypatch: pytest.MonkeyPatch) -> None:
    gpu((9, 0))
    monkeypatch.setattr(requirements, "find_spec", lambda _: object())
    assert require_gpu() == torch.device("cuda", 0)
    monkeypatch.setattr(requirements, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"Triton is missing; install pdserve\[gpu\]"):
        require_gpu()


def test_a_missing_or_old_flash_attn_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_nothing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(requirements, "version", find_nothing)
    with pytest.raises(ConfigError, match="the package flash-attn is missing"):
        require_flash_attn()
    monkeypatch.setattr(requirements, "version", lambda _: "2.5.9.post1")
    with pytest.raises(ConfigError, match=r"version 2\.5\.9\.post1 is too old"):
        require_flash_attn()
    monkeypatch.setattr(requirements, "version", lambda _: "2.8.3")
    assert require_flash_attn() == "2.8.3"
