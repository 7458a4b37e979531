"""The compiled kernels as Python calls them: found or compiled, loaded, their structures and signatures.

ctypes calls a plain C function in about a microsecond and lets other Python threads run meanwhile.
"""

from __future__ import annotations

import ctypes
import logging
from ctypes import POINTER, Structure, c_float, c_int, c_int64, c_void_p
from pathlib import Path

from pdserve.checkpoint.cached_directory import build_once
from pdserve.errors import ConfigError
from pdserve.kernels.native_build import (
    COMPILED_DIR,
    CompileError,
    Variant,
    compile_variant,
    find_compiler,
    get_variants,
)

logger = logging.getLogger(__name__)

_CPUINFO = Path("/proc/cpuinfo")


class NativeLinear(Structure):
    """``Linear`` of csrc/api.h."""

    _fields_ = (
        ("panels", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
        ("in_features", c_int64),
        ("out_features", c_int64),
        ("format", c_int64),
    )


class NativeTables(Structure):
    """``Tables`` of csrc/vocabulary.h."""

    _fields_ = (
        ("embedding", NativeLinear),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("num_positions", c_int64),
        ("head_dim", c_int64),
    )


class NativeStep(Structure):
    """``Step`` of csrc/api.h."""

    _fields_ = (
        ("num_tokens", c_int64),
        ("num_requests", c_int64),
        ("query_start_loc", c_void_p),
        ("seq_lens", c_void_p),
        ("block_table", c_void_p),
        ("table_stride", c_int64),
        ("slot_mapping", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("threads", c_int64),
    )


class NativeKvLayer(Structure):
    """``KvLayer`` of csrc/api.h."""

    _fields_ = (
        ("base", c_void_p),
        ("block_stride", c_int64),
        ("value_stride", c_int64),
        ("head_stride", c_int64),
        ("block_shift", c_int64),
        ("num_blocks", c_int64),
        ("is_float", c_int64),
    )


class NativeHeads(Structure):
    """``Heads`` of csrc/api.h."""

    _fields_ = (("num_heads", c_int64), ("num_kv_heads", c_int64), ("head_dim", c_int64), ("scale", c_float))


class NativeProjected(Structure):
    """``Projected`` of csrc/elementwise.h."""

    _fields_ = (
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("q_stride", c_int64),
        ("k_stride", c_int64),
        ("v_stride", c_int64),
    )


class NativeLayer(Structure):
    """``Layer`` of csrc/decoder.h."""

    _fields_ = (
        ("input_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("post_attention_norm", c_void_p),
        ("qkv", NativeLinear),
        ("output", NativeLinear),
        ("gate_up", NativeLinear),
        ("down", NativeLinear),
    )


class NativeDecoder(Structure):
    """``Decoder`` of csrc/decoder.h."""

    _fields_ = (
        ("layers", POINTER(NativeLayer)),
        ("num_layers", c_int64),
        ("final_norm", c_void_p),
        ("heads", NativeHeads),
        ("eps", c_float),
        ("hidden_size", c_int64),
        ("intermediate_size", c_int64),
    )


_LINEAR = (c_int, (c_void_p, c_int64, c_int64, POINTER(NativeLinear), c_void_p, c_int64))
_SIGNATURES = {
    "pds_pack_linear": (None, (c_void_p, c_int64, POINTER(NativeLinear))),
    "pds_linear": _LINEAR,
    "pds_linear_float32": _LINEAR,
    "pds_linear_argmax": (c_int, (c_void_p, c_int64, c_int64, POINTER(NativeLinear), c_void_p, c_void_p, c_int64)),
    "pds_look_up": (
        c_int,
        (POINTER(NativeTables), c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int64),
    ),
    "pds_rms_norm": (None, (c_void_p, c_int64, c_int64, c_void_p, c_float, c_void_p, c_int64)),
    "pds_add_rms_norm": (None, (c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_float, c_void_p, c_int64)),
    "pds_silu_mul": (None, (c_void_p, c_int64, c_int64, c_void_p, c_int64)),
    "pds_rotate_and_store": (
        c_int,
        (POINTER(NativeProjected), POINTER(NativeStep), POINTER(NativeKvLayer), POINTER(NativeHeads), c_void_p),
    ),
    "pds_attend": (
        c_int,
        (c_void_p, POINTER(NativeStep), POINTER(NativeKvLayer), POINTER(NativeHeads), c_void_p),
    ),
    "pds_exchange_bytes": (c_int64, (c_int64,)),
    "pds_gather": (c_int, (c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64, c_int64, c_void_p)),
    "pds_workspace_elements": (c_int64, (POINTER(NativeDecoder), c_int64)),
    "pds_decode_layers": (
        c_int,
        (
            POINTER(NativeDecoder),
            POINTER(NativeStep),
            POINTER(NativeKvLayer),
            c_int64,
            c_void_p,
            c_void_p,
            c_void_p,
            c_int64,
            c_int64,
        ),
    ),
}


def require_done(status: int) -> None:
    """Raise unless ``status``, what a kernel returned, says that it is done.

    Raises:
        MemoryError: it could not have its scratch memory, or a row is larger than what ranks exchange at once.
        IndexError: a block id or slot lies outside the KV memory, or a token id or position outside the model's tables;
            nothing was read or written.
        TimeoutError: another rank did not come to an exchange in time.
    """
    if status == 1:
        raise MemoryError("a kernel could not have its scratch memory")
    if status == 2:
        raise IndexError("a block id or slot of this step lies outside the KV memory")
    if status == 3:
        raise IndexError("a token id or position of this step lies outside the model's tables")
    if status == 4:
        raise TimeoutError("another rank of this engine did not come to an exchange in time")
    assert status == 0


def get_supported_variants() -> tuple[Variant, ...]:
    """The variants that this processor and operating system run, the fastest first."""
    flags = _read_cpu_flags()
    return tuple(variant for variant in get_variants() if variant.cpu_flags <= flags)


def choose_variant(name: str | None) -> Variant:
    """The variant called ``name``, or the fastest.

    Raises:
        ConfigError: this processor doesn't run it.
    """
    supported = get_supported_variants()
    for variant in supported:
        if name in (None, variant.name):
            return variant
    known = ", ".join(variant.name for variant in supported)
    raise ConfigError(f"kernel variant {name!r} does not run on this processor; it runs {known}")


def load_library(variant: Variant) -> ctypes.CDLL:
    """The library of ``variant``: as installed, as compiled before, or compiled now.

    Raises:
        ConfigError: it is not there and cannot be compiled, or does not load; the message says what is missing.
    """
    path = find_library(variant)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise ConfigError(f"the compiled kernels {path} cannot be loaded: {error}") from error
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def find_library(variant: Variant) -> Path:
    """The file of ``variant``'s library, compiled into the cache where the package doesn't hold it.

    Raises:
        ConfigError: there is no compiler, it fails, or the cache cannot be written.
    """
    installed = COMPILED_DIR / variant.library_name
    if installed.exists():
        return installed

    def build(directory: Path) -> None:
        logger.info("compiling the %s kernels with %s, once for this version", variant.name, find_compiler())
        compile_variant(variant, directory / variant.library_name)

    try:
        return build_once(Path(variant.library_name).stem, build, folder="kernels") / variant.library_name
    except CompileError as error:
        raise ConfigError(f"the C++ kernels are not compiled: {error}") from error


def _read_cpu_flags() -> frozenset[str]:
    """What the processor has, as Linux says it; nothing on other systems."""
    if not _CPUINFO.exists():
        return frozenset()
    for line in _CPUINFO.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()
