"""Reading a GGUF file: metadata and the place of each tensor, with every length checked against the file.

Knows the container (versions 2 and 3, little endian), not what models or tokenizers make of it. The format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np
import numpy.typing as npt
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from pdserve.errors import ConfigError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_CHUNK_BYTES = 32 * 1024 * 1024

T = TypeVar("T")


class GGUFFormatError(Exception):
    """The file's bytes do not follow the format; `open_gguf` turns it into a ConfigError with the path."""


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where a tensor lies.

    Attributes:
        name: as the file spells it.
        shape: row-major, the way numpy and torch say it (the file stores it reversed).
        type: GGML's quantisation type.
        offset: bytes from the file's start.
        num_bytes: of the quantised data.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class GGUFFile:
    """A parsed GGUF file; tensors are read when asked for.

    Attributes:
        path: the file.
        metadata: its key-value pairs; arrays are lists.
        tensors: by name, in the file's order.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    @overload
    def get(self, key: str, kind: type[T]) -> T | None: ...
    @overload
    def get(self, key: str, kind: type[T], default: T) -> T: ...
    def get(self, key: str, kind: type[T], default: T | None = None) -> T | None:
        """The metadata value of ``key``, or ``default`` where it is absent.

        Raises:
            ConfigError: the value has another type than ``kind``.
        """
        value = self.metadata.get(key)
        if value is None:
            return default
        if kind is float and type(value) is int:
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ConfigError(
                f"{self.path}: {key} is {type(value).__name__}, expected {kind.__name__}; the file is damaged"
            )
        return value

    def require(self, key: str, kind: type[T]) -> T:
        """The metadata value of ``key``.

        Raises:
            ConfigError: it is absent or has another type.
        """
        value = self.get(key, kind)
        if value is None:
            raise ConfigError(f"{self.path}: the metadata has no {key}; the file is incomplete")
        return value

    def read_rows(
        self, tensor: GGUFTensor, row_order: npt.NDArray[np.intp] | None = None
    ) -> Iterator[npt.NDArray[np.float32]]:
        """Dequantise ``tensor`` in groups of rows, so that memory stays at some tens of megabytes.

        Args:
            tensor: one of ``self.tensors``.
            row_order: the rows to read, in order; default: all of them as they lie in the file.

        Yields:
            float32 ``[rows, last dimension]``; together all rows.

        Raises:
            ConfigError: the ``gguf`` package cannot dequantise this type, or the file became shorter.
        """
        row_bytes = tensor.num_bytes // max(1, int(np.prod(tensor.shape[:-1])))
        try:
            raw = np.memmap(self.path, np.uint8, "r", tensor.offset, (tensor.num_bytes,)).reshape(-1, row_bytes)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.path}: cannot read tensor {tensor.name}: {error}") from error
        step = max(1, _CHUNK_BYTES // (4 * tensor.shape[-1]))
        for start in range(0, raw.shape[0], step):
            rows = raw[start : start + step] if row_order is None else raw[row_order[start : start + step]]
            try:
                yield quants.dequantize(np.ascontiguousarray(rows), tensor.type).astype(np.float32, copy=False)
            except NotImplementedError as error:
                raise ConfigError(
                    f"{self.path}: tensor {tensor.name} has type {tensor.type.name}, which the gguf package"
                    " cannot dequantise; use a file quantised another way (Q4_K_M, Q8_0, F16, ...)"
                ) from error

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """The whole tensor ``name``, dequantised to float32 in its own shape."""
        tensor = self.tensors[name]
        return np.concatenate(list(self.read_rows(tensor))).reshape(tensor.shape)


def open_gguf(path: Path) -> GGUFFile:
    """Parse ``path``.

    Raises:
        ConfigError: the file is missing, not GGUF, truncated or damaged, or one part of a split model.
    """
    try:
        with path.open("rb") as file:
            if path.stat().st_size < len(_MAGIC):
                raise GGUFFormatError("it is too short")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
                metadata, tensors = _Parser(view).parse()
    except FileNotFoundError as error:
        raise ConfigError(f"model file {path} does not exist") from error
    except OSError as error:
        raise ConfigError(f"model file {path} cannot be read: {error.strerror or error}") from error
    except GGUFFormatError as error:
        raise ConfigError(
            f"model file {path} is not a usable GGUF file: {error}; download it again or check its source"
        ) from error
    gguf = GGUFFile(path, metadata, tensors)
    if gguf.get("split.count", int, 1) > 1:
        raise ConfigError(f"{path} is one part of a split GGUF; merge the parts into one file first")
    return gguf


class _Parser:
    """A cursor over the file's bytes that never reads past their end."""

    def __init__(self, view: mmap.mmap) -> None:
        self._view = view
        self._size = len(view)
        self._at = 0

    def parse(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        """Metadata and tensors."""
        if self._take(4) != _MAGIC:
            raise GGUFFormatError("it does not begin with the GGUF magic")
        version = self._scalar("I")
        if version not in _VERSIONS:
            swapped = int.from_bytes(int(version).to_bytes(4, "little"), "big")
            reason = "it is big endian" if swapped in _VERSIONS else f"its version is {version}"
            raise GGUFFormatError(f"{reason}, and little-endian versions 2 and 3 are supported")
        num_tensors, num_pairs = self._scalar("Q"), self._scalar("Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._string()
            metadata[key] = self._value(self._scalar("I"))
        infos = [self._tensor_info() for _ in range(num_tensors)]
        return metadata, self._place(infos, metadata.get("general.alignment", _DEFAULT_ALIGNMENT))

    def _place(self, infos: list[tuple[str, tuple[int, ...], int, int]], alignment: object) -> dict[str, GGUFTensor]:
        if not isinstance(alignment, int) or alignment <= 0:
            raise GGUFFormatError(f"its alignment is {alignment!r}")
        base = -(-self._at // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, type_id, offset in infos:
            tensor = _locate(name, shape, type_id, base + offset)
            if tensor.offset + tensor.num_bytes > self._size:
                missing = tensor.offset + tensor.num_bytes - self._size
                raise GGUFFormatError(f"it is truncated: tensor {name} ends {missing} bytes past the file's end")
            if name in tensors:
                raise GGUFFormatError(f"tensor {name} appears twice")
            tensors[name] = tensor
        return tensors

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dims = self._scalar("I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise GGUFFormatError(f"tensor {name} has {num_dims} dimensions")
        shape = tuple(self._scalar("Q") for _ in range(num_dims))[::-1]
        return name, shape, self._scalar("I"), self._scalar("Q")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise GGUFFormatError(f"unknown value type {kind} at byte {self._at}")
        return self._scalar(_SCALARS[kind])

    def _array(self) -> list[Any]:
        kind, length = self._scalar("I"), self._scalar("Q")
        if kind in _SCALARS:
            code = _SCALARS[kind]
            span = self._take(length * struct.calcsize(code))
            return list(struct.unpack(f"<{length}{code}", span))
        if kind == _ARRAY:
            raise GGUFFormatError(f"an array of arrays at byte {self._at}, which no model has")
        if length > self._size:
            raise GGUFFormatError(f"an array of {length} elements at byte {self._at} does not fit the file")
        return [self._value(kind) for _ in range(length)]

    def _scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize(code)))[0]

    def _string(self) -> str:
        span = self._take(self._scalar("Q"))
        try:
            return span.decode("utf-8")
        except UnicodeDecodeError as error:
            raise GGUFFormatError(f"text near byte {self._at} is not UTF-8") from error

    def _take(self, num_bytes: int) -> bytes:
        end = self._at + num_bytes
        if end > self._size:
            raise GGUFFormatError(f"it is truncated: byte {end} is wanted, it has {self._size}")
        span = self._view[self._at : end]
        self._at = end
        return span


def _locate(name: str, shape: tuple[int, ...], type_id: int, offset: int) -> GGUFTensor:
    """The tensor's entry, with the bytes that ``shape`` takes in its quantisation type."""
    try:
        kind = GGMLQuantizationType(type_id)
    except ValueError as error:
        raise GGUFFormatError(f"tensor {name} has unknown type {type_id}; a newer gguf package may know it") from error
    block_len, block_bytes = GGML_QUANT_SIZES[kind]
    num_elements = math.prod(shape)
    if num_elements == 0 or shape[-1] % block_len:
        raise GGUFFormatError(f"tensor {name} has shape {list(shape)}, which type {kind.name} cannot store")
    return GGUFTensor(name, shape, kind, offset, num_elements // block_len * block_bytes)
