"""How models write tool calls: the formats by name, and which one a chat template teaches.

Sources: the model cards and chat templates of Hermes 2 Pro, Qwen 2.5 and 3, Llama 3.1 to 3.3, Mistral 7B v0.3.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from pdserve.errors import ConfigError


@dataclass(frozen=True)
class ToolCallFormat:
    """One way to write calls as JSON objects with a name and arguments.

    Attributes:
        opening: stands in front of calls.
        closing: stands behind each call; empty where nothing does, and then several may follow each other.
        between: characters that may stand around calls besides whitespace.
        may_be_bare: a message that is a call from its first character on needs no ``opening``.
        around_calls: what a model writes before its first call and behind its last one.
        around_call: what it writes before and behind each.
        separator: what it writes from one to the next.
        arguments_name: what it calls the arguments.
    """

    opening: str
    closing: str = ""
    between: str = ""
    may_be_bare: bool = False
    around_calls: tuple[str, str] = ("", "")
    around_call: tuple[str, str] = ("", "")
    separator: str = "\n"
    arguments_name: str = "arguments"

    def begin_call(self, name: str) -> str:
        """A call's object up to its arguments; a brace closes it behind them."""
        return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{self.arguments_name}": '

    def write_calls(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls as a model writes them, each given as a function's name and its arguments in JSON."""
        first, last = self.around_calls
        before, behind = self.around_call
        written = (f"{before}{self.begin_call(name)}{arguments}}}{behind}" for name, arguments in calls)
        return f"{first}{self.separator.join(written)}{last}"


FORMATS: Mapping[str, ToolCallFormat] = MappingProxyType(
    {
        "hermes": ToolCallFormat("<tool_call>", "</tool_call>", around_call=("<tool_call>\n", "\n</tool_call>")),
        "llama3_json": ToolCallFormat(
            "<|python_tag|>", between=";", may_be_bare=True, separator="; ", arguments_name="parameters"
        ),
        "mistral": ToolCallFormat("[TOOL_CALLS]", between="[,]", around_calls=("[TOOL_CALLS] [", "]"), separator=", "),
    }
)

FORCED_FORMAT = FORMATS["hermes"]
"""How a model is made to write calls whose own way is not known."""

_FOREIGN_MARKS = ("<function=", "[ARGS]", "<arg_key>")
"""Templates that show these teach another way of writing calls, between tags that look alike."""


def find_format(name: str, template: str) -> ToolCallFormat | None:
    """The format of this name; ``auto`` is the one whose opening a chat template shows, ``none`` is none.

    Raises:
        ConfigError: there is no such format.
    """
    if name == "none":
        return None
    if name == "auto":
        if any(mark in template for mark in _FOREIGN_MARKS):
            return None
        return next((one for one in FORMATS.values() if one.opening in template), None)
    if name not in FORMATS:
        raise ConfigError(f"--tool-call-parser is {name!r}; it may be auto, none, {', '.join(sorted(FORMATS))}")
    return FORMATS[name]
