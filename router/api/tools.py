"""Tool definitions: for the chat template, for whoever looks for calls in the answer, and calls that must come."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdserve.errors import RequestError
from pdserve.protocol import GrammarKind, GrammarSpec
from pdserve.router.api.structured import AskedGrammar
from pdserve.text.message_format import MessageFormat
from pdserve.text.tokenizer import Tokenizer
from pdserve.text.tool_calls import build_call_grammar

ToolChoice = str | dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class AskedTools:
    """What a client says of tools, checked.

    Attributes:
        definitions: what the chat template shows; None for none.
        names: functions that the answer may call.
        must_call: the answer is nothing but calls.
        is_single: the calls that must come are one.
    """

    definitions: list[Mapping[str, Any]] | None = None
    names: frozenset[str] = frozenset()
    must_call: bool = False
    is_single: bool = False

    def with_one_call(self) -> AskedTools:
        """The same, of which no answer has a second call.

        Raises:
            RequestError: without a grammar nobody can see to that.
        """
        if self.names and not self.must_call:
            raise RequestError(
                "parallel_tool_calls may be false only where tool_choice forces a call",
                param="parallel_tool_calls",
                code="unsupported_parameter",
            )
        return dataclasses.replace(self, is_single=True)

    def build_grammar(
        self, message_format: MessageFormat, tokenizer: Tokenizer, content: AskedGrammar | None
    ) -> AskedGrammar | None:
        """The answer's grammar, where calls must come or may stand for a content that has one.

        Args:
            message_format: how the model writes calls.
            tokenizer: the model's.
            content: what the content must look like where the answer is no call.

        Raises:
            RequestError: a function's parameters are no schema of an object, or both cannot be had.
        """
        call_format = message_format.get_call_format(must_call=self.must_call)
        if not self.names or call_format is None or not (self.must_call or content is not None):
            return content
        schemas = {
            tool["function"]["name"]: _read_parameters(index, tool["function"])
            for index, tool in enumerate(self.definitions or ())
            if tool["function"]["name"] in self.names
        }
        content_schema = None if self.must_call or content is None else content.schema
        if not self.must_call and content_schema is None:
            raise RequestError("structured_outputs beside tools may be json only", param="structured_outputs")
        try:
            text = build_call_grammar(
                call_format, schemas, tokenizer, is_single=self.is_single, content_schema=content_schema
            )
        except RecursionError:
            raise RequestError("tools nest too deep", param="tools") from None
        return AskedGrammar(GrammarSpec(GrammarKind.LARK, text), "tools")


def read_tools(tools: list[Any] | None, choice: ToolChoice, *, has_place: bool) -> AskedTools:
    """What the template gets and the answer may call.

    Args:
        tools: as the client sent them.
        choice: ``auto`` shows them to the model, ``none`` does not, ``required`` and a function's name force a call.
        has_place: whether the model's template shows tools. Where it does not, a forced call's grammar is all that
            the model is told of them.

    Raises:
        RequestError: a definition is wrong, or what is asked for cannot be done.
    """
    forced_name = _read_choice(choice)
    must_call = forced_name is not None or choice == "required"
    if not tools:
        if must_call or choice == "auto":
            raise RequestError("tool_choice needs tools", param="tool_choice")
        return AskedTools()
    for index, tool in enumerate(tools):
        if not _is_definition(tool):
            raise RequestError(
                f"tools[{index}] must be of the form {{'type': 'function', 'function': {{'name': …}}}}", param="tools"
            )
    _check_names([tool["function"]["name"] for tool in tools])
    if choice == "none":
        return AskedTools()
    names = frozenset(tool["function"]["name"] for tool in tools)
    if forced_name is not None:
        if forced_name not in names:
            raise RequestError(f"tool_choice names {forced_name[:200]!r}, which is none of tools", param="tool_choice")
        names = frozenset((forced_name,))
    if not has_place and not must_call:
        raise RequestError(
            "this model's chat template has no place for tools; only a forced call can be had",
            param="tools",
            code="unsupported_parameter",
        )
    return AskedTools(tools, names, must_call=must_call, is_single=forced_name is not None)


def _check_names(names: list[str]) -> None:
    """A call names its function, so no two may have one name."""
    first: dict[str, int] = {}
    for index, name in enumerate(names):
        if first.setdefault(name, index) != index:
            raise RequestError(
                f"tools[{index}] is called {name[:200]!r}, as tools[{first[name]}] is; each needs a name of its own",
                param="tools",
            )


def _read_choice(choice: ToolChoice) -> str | None:
    """The function that a choice names; None where it names none."""
    if choice is None or choice in ("auto", "none", "required"):
        return None
    if isinstance(choice, Mapping) and _is_definition(choice):
        return str(choice["function"]["name"])
    raise RequestError(
        "tool_choice may be 'auto', 'none', 'required' or {'type': 'function', 'function': {'name': …}}",
        param="tool_choice",
    )


def _read_parameters(index: int, function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments, which are an object."""
    parameters = function.get("parameters")
    if parameters is None:
        return {"type": "object"}
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise RequestError(f"tools[{index}].function.parameters must be a JSON schema of type object", param="tools")
    return {**parameters, "type": "object"}


def _is_definition(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return (
        isinstance(function, Mapping)
        and tool.get("type") == "function"
        and isinstance(function.get("name"), str)
        and bool(function["name"])
    )
