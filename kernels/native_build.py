"""Compiling the C++ kernels: which sources, with which flags, for which instruction sets.

One shared library with a plain C interface for each instruction set: no Python and no torch headers, so it outlives
upgrades of both. `setup.py` compiles all of them at installation. `native_library` compiles the one it needs where
none came with the package: a checkout whose sources have changed, or a compiler that was installed later. A library's
name holds the digest of all that went into it, so a stale one is never found.

Standard library only: `setup.py` runs this file where nothing else is installed.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCE_DIR = Path(__file__).parent / "csrc"
COMPILED_DIR = Path(__file__).parent / "compiled"
COMPILERS = ("c++", "g++", "clang++")
UNITS = ("kernels.cpp", "runtime.cpp")
# Without contraction and without -ffast-math a function gives the same bits wherever it is inlined.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-pthread",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
)
_AVX2 = ("-mavx2", "-mfma")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")


class CompileError(Exception):
    """The kernels cannot be compiled here; the message says what is missing or what the compiler said."""


@dataclass(frozen=True)
class Variant:
    """The kernels for one instruction set.

    Attributes:
        name: of the variant.
        level: what csrc/simd.h calls it.
        flags: that let the compiler use it.
        cpu_flags: as Linux calls what the processor must have.
    """

    name: str
    level: int
    flags: tuple[str, ...]
    cpu_flags: frozenset[str]

    @property
    def library_name(self) -> str:
        """File name of its library when compiled from the sources as they are, for this kind of machine."""
        digest = hashlib.sha256()
        for part in (self.name, platform.machine(), *self.command_flags):
            digest.update(part.encode() + b"\0")
        for path in sorted(SOURCE_DIR.iterdir()):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
        return f"pdserve-{self.name}-{digest.hexdigest()[:16]}.so"

    @property
    def command_flags(self) -> tuple[str, ...]:
        """All of the compiler's flags."""
        return (*FLAGS, *self.flags, f"-DPDS_LEVEL={self.level}")


_AVX512_CPU = frozenset({"avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq"})
_X86_VARIANTS = (
    Variant("avx512_bf16", 3, (*_AVX512, "-mavx512bf16", "-mavx512vnni"), _AVX512_CPU | {"avx512_bf16", "avx512_vnni"}),
    Variant("avx512", 2, _AVX512, _AVX512_CPU),
    Variant("avx2", 1, _AVX2, frozenset({"avx2", "fma"})),
)
_PORTABLE = Variant("portable", 0, (), frozenset())


def get_variants() -> tuple[Variant, ...]:
    """What can be compiled for this kind of processor, the fastest first."""
    if platform.machine().lower() in ("x86_64", "amd64"):
        return (*_X86_VARIANTS, _PORTABLE)
    return (_PORTABLE,)


def find_compiler() -> str | None:
    """A C++ compiler on the path, or None."""
    return next((path for name in COMPILERS if (path := shutil.which(name))), None)


def compile_variant(variant: Variant, target: Path, extra_flags: Sequence[str] = ()) -> None:
    """Compile ``variant`` to the file ``target``, which appears whole or not at all.

    Args:
        variant: what to compile.
        target: the shared library; its directory exists.
        extra_flags: behind all others.

    Raises:
        CompileError: there is no compiler, or it failed.
        OSError: ``target`` cannot be written.
    """
    compiler = find_compiler()
    if compiler is None:
        raise CompileError(f"no C++ compiler ({', '.join(COMPILERS)}) is on the path")
    descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    os.close(descriptor)
    try:
        units = [str(SOURCE_DIR / unit) for unit in UNITS]
        command = [compiler, *variant.command_flags, *extra_flags, *units, "-o", temporary]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise CompileError(f"{compiler} failed for {variant.name}: {_first_error(result.stderr)}")
        os.chmod(temporary, 0o755)
        os.replace(temporary, target)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _first_error(output: str) -> str:
    lines = output.strip().splitlines() or ["no message"]
    return next((line for line in lines if "error" in line), lines[-1])
