"""From the command line and a TOML file to a settings dataclass, and back to a command line."""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import pdserve
from pdserve.errors import ConfigError
from pdserve.settings.fields import Option, ValueKind, list_options, list_sections, replace_values
from pdserve.settings.toml_file import describe_unknown, read_toml

T = TypeVar("T")

_METAVARS = {ValueKind.INT: "N", ValueKind.FLOAT: "X", ValueKind.STRING: "TEXT", ValueKind.STRINGS: "TEXT"}


def load_settings(
    root: type[T],
    *,
    prog: str,
    description: str,
    examples: Sequence[str] = (),
    argv: Sequence[str] | None = None,
) -> T:
    """The settings of one process: defaults, then the file of ``--config``, then the command line.

    ``--help`` and ``--version`` print and exit with status 0.

    Args:
        root: dataclass that composes the process's sections; it can be made without arguments.
        prog: the command, as people type it.
        description: what the command does, for ``--help``.
        examples: whole command lines that ``--help`` shows at its end.
        argv: arguments without the command's name; None = those of this process.

    Raises:
        ConfigError: an option, section or key is unknown, ill-typed or out of range; the file cannot be read.
    """
    defaults = root()
    options = list_options(defaults)
    parser = build_parser(root, prog=prog, description=description, examples=examples)
    arguments = list(sys.argv[1:] if argv is None else argv)
    namespace, unknown = parser.parse_known_args(arguments)
    if unknown:
        known = [flag for action in parser._actions for flag in action.option_strings]
        raise ConfigError(describe_unknown("argument", unknown[0].partition("=")[0], known))
    given = vars(namespace)
    values: dict[tuple[str, str], Any] = {}
    if "config" in given:
        values.update(read_toml(Path(given["config"]), options, list_sections(defaults), prog))
    for option in options:
        if _dest(option) in given:
            values[option.key] = _checked(option, given[_dest(option)], values.get(option.key))
    return replace_values(defaults, values)


def build_parser(
    root: type[Any], *, prog: str, description: str, examples: Sequence[str] = ()
) -> argparse.ArgumentParser:
    """The parser behind `load_settings`; arguments that were not given are absent from its namespace."""
    defaults = root()
    parser = _Parser(
        prog=prog,
        usage="%(prog)s [--option value ...]",
        description=description,
        epilog="examples:\n" + "\n".join(f"  {line}" for line in examples) if examples else None,
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--version", action="version", version=f"pdserve {pdserve.__version__}")
    parser.add_argument(
        "--config",
        metavar="FILE.toml",
        help="TOML file with any of these settings, in tables named as the groups below",
    )
    groups = {name: parser.add_argument_group(name, text) for name, text in list_sections(defaults).items()}
    for option in list_options(defaults):
        _add_argument(groups[option.section], option)
    return parser


def option_flags(root: type[Any]) -> list[str]:
    """Every long option of a root's command line, sorted; ``--no-x`` forms are left out."""
    return sorted([option.flag for option in list_options(root())] + ["--config", "--help", "--version"])


def to_arguments(config: Any) -> list[str]:
    """A command line that makes `load_settings` on ``config``'s type return ``config``.

    Only what differs from the defaults is there.
    """
    defaults = {option.key: option.default for option in list_options(type(config)())}
    arguments: list[str] = []
    for option in list_options(config):
        value = option.default
        if value == defaults[option.key] or value is None:
            continue
        match option.kind:
            case ValueKind.BOOL:
                arguments.append(option.flag if value else "--no-" + option.flag.removeprefix("--"))
            case ValueKind.STRINGS:
                arguments += [f"{option.flag}={item}" for item in value]
            case ValueKind.TABLE:
                arguments += [f"{option.flag}={key}={_to_toml(item)}" for key, item in value.items()]
            case _:
                arguments.append(f"{option.flag}={value}")
    return arguments


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36)


class _Parser(argparse.ArgumentParser):
    """Raises where argparse prints its usage and exits."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument ") + f" ({self.prog} --help lists the settings)")


def _add_argument(group: argparse._ArgumentGroup, option: Option) -> None:
    text = _help_text(option)
    metavar = option.metavar or _METAVARS.get(option.kind)
    match option.kind:
        case ValueKind.BOOL:
            group.add_argument(option.flag, dest=_dest(option), action=argparse.BooleanOptionalAction, help=text)
        case ValueKind.INT:
            group.add_argument(option.flag, dest=_dest(option), type=_integer, metavar=metavar, help=text)
        case ValueKind.FLOAT:
            group.add_argument(option.flag, dest=_dest(option), type=_number, metavar=metavar, help=text)
        case ValueKind.STRING:
            choices = "{" + ",".join(option.choices) + "}" if option.choices else metavar
            group.add_argument(option.flag, dest=_dest(option), metavar=choices, help=text)
        case ValueKind.STRINGS:
            group.add_argument(option.flag, dest=_dest(option), action="extend", nargs="+", metavar=metavar, help=text)
        case ValueKind.TABLE:
            group.add_argument(
                option.flag,
                dest=_dest(option),
                action="append",
                type=_key_value,
                metavar=metavar or "KEY=VALUE",
                help=text,
            )


def _dest(option: Option) -> str:
    return f"{option.section}.{option.name}"


def _help_text(option: Option) -> str:
    text = option.help.replace("%", "%%")
    if option.default is None or option.default in ("", [], (), {}):
        return text
    shown = str(option.default).lower() if option.kind is ValueKind.BOOL else option.default
    return f"{text} (default: {shown})"


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _key_value(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form key=value")
    return key, _from_toml(value)


def _from_toml(text: str) -> Any:
    """``text`` as a TOML value; what is none, and dates, are taken as the string itself."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return value if isinstance(value, (bool, int, float, str, list, dict)) else text


def _to_toml(value: Any) -> str:
    """``value`` in the form that `_from_toml` reads back as the same."""
    match value:
        case dict():
            return "{" + ", ".join(f"{_to_toml(key)} = {_to_toml(item)}" for key, item in value.items()) + "}"
        case list():
            return "[" + ", ".join(_to_toml(item) for item in value) + "]"
        case float() if value != value or value in (float("inf"), float("-inf")):
            return str(value)
        case _:
            # TOML's strings, numbers and booleans are written as JSON's, but for DEL, which TOML escapes.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _checked(option: Option, value: Any, from_file: Any) -> Any:
    if option.kind is ValueKind.TABLE:
        value = {**(from_file or {}), **dict(value)}
    try:
        return option.check(value)
    except ConfigError as error:
        raise ConfigError(f"{option.flag}: {error.message}") from None
