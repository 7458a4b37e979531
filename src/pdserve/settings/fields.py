"""How settings are declared, and the list of options that a tree of settings dataclasses amounts to.

Knows nothing of argparse or TOML: it turns dataclasses into `Option` records, and values into dataclasses.
"""

from __future__ import annotations

import dataclasses
import enum
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pdserve.errors import ConfigError

T = TypeVar("T")

_SECRET_WORDS = frozenset(("password", "secret", "token", "credential", "credentials"))

_USER_INFO = re.compile(r"//[^/\s]*@")


class ValueKind(enum.Enum):
    """The kinds of values a setting may have, named as people read them in an error."""

    BOOL = "true or false"
    INT = "an integer"
    FLOAT = "a number"
    STRING = "a string"
    STRINGS = "a list of strings"
    TABLE = "a table of key = value"


_KINDS: dict[Any, ValueKind] = {
    bool: ValueKind.BOOL,
    int: ValueKind.INT,
    float: ValueKind.FLOAT,
    str: ValueKind.STRING,
    list[str]: ValueKind.STRINGS,
    tuple[str, ...]: ValueKind.STRINGS,
    dict[str, Any]: ValueKind.TABLE,
}


@dataclass(frozen=True)
class Option:
    """One setting of one section.

    Attributes:
        section: the section's name: the table in TOML, the group in ``--help``.
        name: the dataclass field's name: the key in TOML.
        kind: what values it takes.
        default: the value when nothing sets it.
        help: one sentence for people.
        choices: the only values allowed, or None.
        metavar: what stands for the value in ``--help``, or None.
        minimum: least number allowed, or None.
        maximum: greatest number allowed, or None.
        is_tuple: whether the dataclass wants a tuple where the outside gives a list.
    """

    section: str
    name: str
    kind: ValueKind
    default: Any
    help: str
    choices: tuple[str, ...] | None
    metavar: str | None
    minimum: float | None
    maximum: float | None
    is_tuple: bool

    @property
    def flag(self) -> str:
        """The option's name on the command line; a table's is singular, for it is given once for each key."""
        name = self.name.removesuffix("s") if self.kind is ValueKind.TABLE else self.name
        return "--" + name.replace("_", "-")

    @property
    def key(self) -> tuple[str, str]:
        """``(section, name)``."""
        return (self.section, self.name)

    def check(self, value: Any) -> Any:
        """``value`` as the dataclass wants it.

        Raises:
            ConfigError: it has another type, is none of the choices or lies outside the range. The message
                starts behind the place where the value was found: the caller puts that in front.
        """
        if not _has_kind(value, self.kind):
            raise ConfigError(f"{value!r} is not {self.kind.value}")
        if self.choices and value not in self.choices:
            raise ConfigError(f"{value!r} is not one of {', '.join(self.choices)}")
        if self.kind is ValueKind.FLOAT:
            value = float(value)
        if self.kind in (ValueKind.INT, ValueKind.FLOAT):
            self._check_range(value)
        return tuple(value) if self.is_tuple else value

    def _check_range(self, value: float) -> None:
        if self.minimum is not None and not value >= self.minimum:
            raise ConfigError(f"{value} is below {self.minimum}, the least that is allowed")
        if self.maximum is not None and not value <= self.maximum:
            raise ConfigError(f"{value} is above {self.maximum}, the most that is allowed")


def setting(
    default: Any,
    *,
    help: str,
    choices: Sequence[str] | None = None,
    metavar: str | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
) -> Any:
    """A dataclass field with the text and the bounds that ``--help`` shows and loading checks.

    Args:
        default: the value when neither the TOML file nor the command line sets it.
        help: one sentence for people.
        choices: the only values allowed.
        metavar: what stands for the value in ``--help``.
        minimum: the least number allowed.
        maximum: the greatest number allowed.
    """
    metadata = {
        "help": help,
        "choices": tuple(choices) if choices else None,
        "metavar": metavar,
        "minimum": minimum,
        "maximum": maximum,
    }
    if isinstance(default, (dict, list)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def section(factory: Callable[[], T], *, exclude: Sequence[str] = ()) -> T:
    """A root's field that holds a section (or a group of sections).

    Args:
        factory: makes the section with the defaults that this process has.
        exclude: settings that this process decides itself: neither the command line nor the file has them.
    """
    field: T = dataclasses.field(default_factory=factory, metadata={"exclude": frozenset(exclude)})
    return field


def list_options(defaults: Any) -> list[Option]:
    """All options of ``defaults``, a root made with its default values, in the order of declaration."""
    options = list(_walk(defaults, None, frozenset()))
    flags = [option.flag for option in options]
    doubled = sorted({flag for flag in flags if flags.count(flag) > 1})
    if doubled:
        raise ValueError(f"{type(defaults).__name__} has several settings called {', '.join(doubled)}")
    return options


def list_sections(defaults: Any) -> dict[str, str]:
    """Name and first line of the docstring of every section with options, in the order of declaration.

    Where two sections share a name, their settings stand in one group, under the first one's text.
    """
    used = {option.section for option in list_options(defaults)}
    found: dict[str, str] = {}
    for name, text in _walk_sections(defaults):
        if name in used:
            found.setdefault(name, text)
    return found


def replace_values(node: T, values: Mapping[tuple[str, str], Any], section_name: str = "") -> T:
    """A copy of ``node`` (a root made with its defaults) in which ``values`` by ``(section, name)`` stand."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(node):  # type: ignore[arg-type]  # T is a dataclass
        current = getattr(node, field.name)
        if dataclasses.is_dataclass(current):
            changes[field.name] = replace_values(current, values, field.name)
        elif (section_name, field.name) in values:
            changes[field.name] = values[section_name, field.name]
    replaced: T = dataclasses.replace(node, **changes)  # type: ignore[type-var]
    return replaced


def describe_settings(config: Any) -> dict[str, Any]:
    """Every setting of ``config`` that has a value as ``section.name`` → value, for the log; secrets are masked."""
    found: dict[str, Any] = {}
    for option in _walk(config, None, frozenset()):
        value = option.default
        if value is None:
            continue
        if option.kind is ValueKind.TABLE:
            value = {key: _mask(key, item) for key, item in value.items()}
        found[f"{option.section}.{option.name}"] = _mask(option.name, value)
    return found


def _walk(node: Any, section_name: str | None, exclude: frozenset[str]) -> Iterator[Option]:
    hints = typing.get_type_hints(type(node))
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        if dataclasses.is_dataclass(value):
            yield from _walk(value, field.name, exclude | field.metadata.get("exclude", frozenset()))
        elif section_name is None:
            raise TypeError(f"{type(node).__name__}.{field.name} is a setting outside of any section")
        elif field.name not in exclude:
            yield _build_option(section_name, field, hints[field.name], value)


def _walk_sections(node: Any) -> Iterator[tuple[str, str]]:
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        if _is_group(value):
            yield from _walk_sections(value)
        elif dataclasses.is_dataclass(value):
            yield field.name, (type(value).__doc__ or "").strip().partition("\n")[0]


def _build_option(section_name: str, field: dataclasses.Field[Any], hint: Any, value: Any) -> Option:
    base = _strip_none(hint)
    return Option(
        section=section_name,
        name=field.name,
        kind=_KINDS[base],
        default=value,
        help=field.metadata["help"],
        choices=field.metadata["choices"],
        metavar=field.metadata["metavar"],
        minimum=field.metadata["minimum"],
        maximum=field.metadata["maximum"],
        is_tuple=typing.get_origin(base) is tuple,
    )


def _strip_none(hint: Any) -> Any:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        (hint,) = (arm for arm in typing.get_args(hint) if arm is not type(None))
    return hint


def _is_group(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and all(
        dataclasses.is_dataclass(getattr(value, field.name)) for field in dataclasses.fields(value)
    )


def _has_kind(value: Any, kind: ValueKind) -> bool:
    match kind:
        case ValueKind.BOOL:
            return isinstance(value, bool)
        case ValueKind.INT:
            return isinstance(value, int) and not isinstance(value, bool)
        case ValueKind.FLOAT:
            return isinstance(value, (int, float)) and not isinstance(value, bool)
        case ValueKind.STRING:
            return isinstance(value, str)
        case ValueKind.STRINGS:
            return isinstance(value, list) and all(isinstance(item, str) for item in value)
        case ValueKind.TABLE:
            return isinstance(value, dict)


def _mask(name: str, value: Any) -> Any:
    """``value`` without what its name says to be secret, and without user and password in a URL."""
    if not _SECRET_WORDS.isdisjoint(re.split(r"[_\W]", name.lower())):
        return "***"
    return _USER_INFO.sub("//***@", value) if isinstance(value, str) else value
