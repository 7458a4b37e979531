"""Reading a JSON object's fields with their types checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdserve.errors import ConfigError


class TypedFields:
    """A JSON object whose fields are read as what they must be; None counts as missing.

    Every method raises `ConfigError`, naming ``where`` and the field, if it is missing without a default or has
    the wrong type or sign.

    Args:
        content: the object.
        where: the file, for messages.
    """

    def __init__(self, content: Mapping[str, Any], where: str) -> None:
        self.content = content
        self._where = where

    def positive_int(self, name: str, default: int | None = None) -> int:
        """A whole number above 0."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self._wrong(name, value, "a positive whole number")
        return value

    def positive_float(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise self._wrong(name, value, "a positive number")
        return float(value)

    def boolean(self, name: str, default: bool | None = None) -> bool:
        """True or false."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def _get(self, name: str, default: Any) -> Any:
        value = self.content.get(name)
        if value is not None:
            return value
        if default is None:
            raise ConfigError(f"{self._where}: {name} is missing")
        return default

    def _wrong(self, name: str, value: object, expected: str) -> ConfigError:
        return ConfigError(f"{self._where}: {name} is {value!r}; it must be {expected}")
