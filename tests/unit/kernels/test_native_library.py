"""Compiling and finding the libraries, with and without a compiler."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pdserve.errors import ConfigError
from pdserve.kernels import native_build, native_library
from pdserve.kernels.native_build import compile_variant, find_compiler, get_variants
from pdserve.kernels.native_library import find_library, get_supported_variants
from pdserve.kernels.registry import get_backend

PORTABLE = get_variants()[-1]
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")


@pytest.fixture
def nothing_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No library came with the package and none is cached."""
    monkeypatch.setattr(native_library, "COMPILED_DIR", tmp_path / "compiled")
    monkeypatch.setenv("PDSERVE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def write_compiler(directory: Path, script: str) -> None:
    """A stand-in for the compiler, first on the path; ``$out`` is the file it shall write."""
    directory.mkdir()
    compiler = directory / "c++"
    compiler.write_text(f"#!/bin/sh\nfor out; do :; done\n{script}\n")
    compiler.chmod(0o755)


@needs_compiler
@pytest.mark.parametrize("variant", get_variants(), ids=lambda variant: variant.name)
def test_sources_compile_without_a_warning(variant: native_build.Variant, tmp_path: Path) -> None:
    compile_variant(variant, tmp_path / "library.so", ("-O1", "-Wall", "-Wextra", "-Werror"))
    assert [path.name for path in tmp_path.iterdir()] == ["library.so"]


def test_without_a_compiler_auto_computes_with_torch_and_says_so(
    nothing_compiled: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(nothing_compiled))
    with caplog.at_level(logging.WARNING):
        assert get_backend("auto", torch.bfloat16).name in ("onednn", "reference")
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith(
        "computing with torch, which is slower: the C++ kernels are not compiled: no C++ compiler (c++"
    )
    with pytest.raises(ConfigError, match="not compiled: no C"):
        get_backend("cpp", torch.bfloat16)


def test_what_the_compiler_says_is_passed_on(nothing_compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_compiler(nothing_compiled / "bin", "echo 'simd.h:1: error: no such thing' >&2; exit 1")
    monkeypatch.setenv("PATH", str(nothing_compiled / "bin"), prepend=os.pathsep)
    with pytest.raises(ConfigError, match=r"failed for portable: simd\.h:1: error: no such thing"):
        find_library(PORTABLE)
    assert not list(nothing_compiled.rglob("*.so"))


def test_an_unwritable_cache_is_a_plain_error(nothing_compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (nothing_compiled / "cache").write_text("a file where a directory should be")
    with pytest.raises(ConfigError, match=r"cannot be written.*PDSERVE_CACHE_DIR"):
        find_library(PORTABLE)


def test_a_library_that_does_not_load_is_a_plain_error(nothing_compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_compiler(nothing_compiled / "bin", 'echo garbage > "$out"')
    monkeypatch.setenv("PATH", str(nothing_compiled / "bin"), prepend=os.pathsep)
    with pytest.raises(ConfigError, match="cannot be loaded"):
        native_library.load_library(PORTABLE)


def test_processes_that_start_together_compile_once(nothing_compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = nothing_compiled / "log"
    write_compiler(nothing_compiled / "bin", f'echo run >> {log}; echo library > "$out"')
    monkeypatch.setenv("PATH", str(nothing_compiled / "bin"), prepend=os.pathsep)
    program = (
        "from pdserve.kernels import native_library as n; from pathlib import Path\n"
        f"n.COMPILED_DIR = Path({str(nothing_compiled / 'compiled')!r})\n"
        "print(n.find_library(n.get_variants()[-1]))"
    )
    processes = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    paths = {process.communicate(timeout=60)[0].strip() for process in processes}
    assert log.read_text() == "run\n"
    assert paths == {str(find_library(PORTABLE))}


def test_installed_libraries_come_first_and_stale_ones_are_not_found(
    nothing_compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(nothing_compiled))
    installed = nothing_compiled / "compiled" / PORTABLE.library_name
    installed.parent.mkdir()
    installed.write_bytes(b"")
    assert find_library(PORTABLE) == installed
    sources = nothing_compiled / "csrc"
    shutil.copytree(native_build.SOURCE_DIR, sources)
    with (sources / "simd.h").open("a") as file:
        file.write("// changed\n")
    monkeypatch.setattr(native_build, "SOURCE_DIR", sources)
    with pytest.raises(ConfigError, match="not compiled"):
        find_library(PORTABLE)


@pytest.mark.parametrize(
    ("flags", "best"),
    [
        ("fpu avx2 fma avx512f avx512bw avx512vl avx512dq avx512_bf16 avx512_vnni", "avx512_bf16"),
        ("fpu avx2 fma avx512f avx512bw avx512vl avx512dq avx512_bf16", "avx512"),
        ("fpu avx2 fma avx512f avx512bw avx512vl avx512dq", "avx512"),
        ("fpu avx2 fma avx512f", "avx2"),
        ("fpu sse2", "portable"),
    ],
)
def test_the_variant_is_chosen_by_what_the_processor_has(
    flags: str, best: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if len(get_variants()) == 1:
        pytest.skip("this kind of processor has one variant")
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    monkeypatch.setattr(native_library, "_CPUINFO", cpuinfo)
    supported = [variant.name for variant in get_supported_variants()]
    assert supported[0] == best
    assert supported[-1] == "portable"
    monkeypatch.setattr(native_library, "_CPUINFO", tmp_path / "missing")
    assert [variant.name for variant in get_supported_variants()] == ["portable"]
