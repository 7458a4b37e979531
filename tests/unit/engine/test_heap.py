"""Memory that is free goes back, where the C library lets one ask for it."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from pdserve.engine.heap import return_free_memory

BLOCK_BYTES, NUM_BLOCKS = 64 << 10, 1024


def get_resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library has no malloc_trim")
def test_what_lies_below_memory_in_use_goes_back() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    libc.free.argtypes = (ctypes.c_void_p,)
    blocks = [libc.malloc(BLOCK_BYTES) for _ in range(NUM_BLOCKS)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK_BYTES)
    for block in blocks[:-1]:
        libc.free(block)
    before = get_resident_bytes()
    return_free_memory()
    assert get_resident_bytes() < before - BLOCK_BYTES * NUM_BLOCKS // 2
    libc.free(blocks[-1])


def test_a_c_library_without_it_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    return_free_memory()
