"""Reading a model's tensors from safetensors files, one at a time, each checked and accounted for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pdserve.errors import ConfigError

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class WeightReader:
    """The tensors of a checkpoint by name; a context manager that holds the files open.

    Args:
        files: its safetensors files; a name may stand in one only.

    Raises:
        ConfigError: a file cannot be read or two hold a tensor of the same name.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._stack = ExitStack()
        self._handles: dict[str, tuple[Path, Any]] = {}
        self._unread: set[str] = set()
        with self._stack:
            for path in files:
                self._open(path)
            self._stack = self._stack.pop_all()

    def __enter__(self) -> WeightReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def read_into(self, name: str, target: Tensor, *, part: int = 0, num_parts: int = 1) -> None:
        """Copy tensor ``name`` into ``target``, converted to its dtype.

        Args:
            name: of the tensor.
            target: takes it, or one part of its rows.
            part: which of the parts, from 0.
            num_parts: equal parts that its rows are cut into; only this one is read.

        Raises:
            ConfigError: it is missing, has another shape, is not of a floating type, or cannot be read.
        """
        if name not in self._handles:
            raise ConfigError(f"model tensor {name} is missing from the safetensors files")
        path, handle = self._handles[name]
        try:
            rows = handle.get_slice(name)
            shape, expected = tuple(rows.get_shape()), (target.shape[0] * num_parts, *target.shape[1:])
            if shape != expected:
                raise ConfigError(f"model tensor {name} has shape {shape}; config.json asks for {expected}")
            first = part * target.shape[0]
            source: Tensor = handle.get_tensor(name) if num_parts == 1 else rows[first : first + target.shape[0]]
        except SafetensorError as error:
            raise ConfigError(f"model tensor {name} cannot be read from {path}: {error}") from error
        if source.dtype not in _FLOATS:
            raise ConfigError(f"model tensor {name} is of type {source.dtype}; only unquantised weights are supported")
        target.copy_(source)
        self._unread.discard(name)

    def ignore(self, prefix: str) -> None:
        """Accept that tensors whose names begin like this may stand in the files unused."""
        self._unread = {name for name in self._unread if not name.startswith(prefix)}

    def require_all_read(self) -> None:
        """Raise if the files hold tensors that nobody asked for.

        Raises:
            ConfigError: there are some; up to five are named.
        """
        if self._unread:
            names = sorted(self._unread)
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise ConfigError(
                f"the safetensors files hold tensors that this architecture does not use: {', '.join(names[:5])}{more}"
            )

    def _open(self, path: Path) -> None:
        try:
            handle = self._stack.enter_context(safe_open(path, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"model file {path} cannot be read: {error}") from error
        for name in handle.keys():  # noqa: SIM118
            if name in self._handles:
                raise ConfigError(f"model tensor {name} stands in both {self._handles[name][0]} and {path}")
            self._handles[name] = (path, handle)
            if not name.endswith(".rotary_emb.inv_freq"):  # derived; old checkpoints carry it
                self._unread.add(name)
