"""The C library's heap: memory that loading a model took and freed goes back to the system."""

from __future__ import annotations

import ctypes


def return_free_memory() -> None:
    """Give freed memory back, which GNU's C library keeps where memory in use lies above it; others need no asking."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # no such library, or one without this function
        return
    trim.argtypes, trim.restype = (ctypes.c_size_t,), ctypes.c_int
    trim(0)
