from __future__ import annotations

import pytest
import torch

from pdserve.errors import ConfigError
from pdserve.kernels.registry import DTYPES, backend_names, get_backend


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_auto_is_a_registered_backend_of_the_dtype(dtype: torch.dtype) -> None:
    backend = get_backend("auto", dtype)
    assert backend.name in backend_names()
    assert backend.dtype == dtype


def test_the_reference_runs_everywhere() -> None:
    assert get_backend("reference", torch.bfloat16).name == "reference"


def test_unknown_names_and_dtypes_are_refused_with_what_is_accepted() -> None:
    with pytest.raises(ConfigError, match=r"'turbo' is unknown; use auto, .*reference"):
        get_backend("turbo", torch.float32)
    with pytest.raises(ConfigError, match=r"torch\.float16 is not supported; use bfloat16 or float32"):
        get_backend("auto", torch.float16)


def test_without_onednn_auto_falls_back_and_onednn_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_has_mkldnn", False)
    assert get_backend("auto", torch.float32).name == "reference"
    with pytest.raises(ConfigError, match="this torch is built without oneDNN; use 'reference'"):
        get_backend("onednn", torch.float32)


def test_numerics_tells_backends_and_dtypes_apart_and_is_stable() -> None:
    classes = [get_backend("reference", dtype).numerics for dtype in DTYPES]
    classes.append(get_backend("auto", torch.float32).numerics)
    assert len(set(classes)) == len(classes)
    assert [get_backend("reference", dtype).numerics for dtype in DTYPES] == classes[:2]


def test_quantised_weights_need_the_compiled_backend() -> None:
    assert get_backend("auto", torch.bfloat16, "int8").name == "cpp"
    assert get_backend("cpp", torch.bfloat16, "w8a8").name == "cpp"
    with pytest.raises(ConfigError, match=r"int8 needs dtype bfloat16 .* not torch.float32 and auto"):
        get_backend("auto", torch.float32, "int8")
    with pytest.raises(ConfigError, match=r"w8a8 needs .* backend cpp, not torch.bfloat16 and onednn"):
        get_backend("onednn", torch.bfloat16, "w8a8")
    with pytest.raises(ConfigError, match="quantization 'int3' is unknown; use none, int8, w8a8"):
        get_backend("auto", torch.bfloat16, "int3")


def test_what_cannot_compute_on_a_gpu_is_refused_before_one_is_looked_for() -> None:
    with pytest.raises(ConfigError, match="quantization int8 needs device cpu"):
        get_backend("auto", torch.bfloat16, "int8", "cuda")
    with pytest.raises(ConfigError, match="'cpp' does not compute on a GPU; use auto, triton, flash-attn"):
        get_backend("cpp", torch.bfloat16, device="cuda")
    with pytest.raises(ConfigError, match=r"flash-attn computes in bfloat16, not torch\.float32"):
        get_backend("flash-attn", torch.float32, device="cuda")
    with pytest.raises(ConfigError, match="device 'tpu' is unknown; use cpu, cuda"):
        get_backend("auto", torch.bfloat16, device="tpu")
    with pytest.raises(ConfigError, match="'triton' computes on a GPU; set device to cuda"):
        get_backend("triton", torch.bfloat16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_one_plain_line() -> None:
    with pytest.raises(ConfigError, match=r"^device cuda: [^\n]*use device cpu$"):
        get_backend("auto", torch.bfloat16, device="cuda")
