"""Tool definitions: for the chat template, and for whoever looks for calls in the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdserve.errors import RequestError


def check_tools(
    tools: list[Any] | None, choice: str | dict[str, Any] | None, *, has_place: bool
) -> list[Mapping[str, Any]] | None:
    """The definitions that the template gets; None for none.

    Args:
        tools: as the client sent them.
        choice: ``auto`` shows them to the model, ``none`` does not; a choice that forces a call is refused.
        has_place: whether the model's template shows tools.

    Raises:
        RequestError: a definition is wrong, or what is asked for cannot be done.
    """
    if choice not in (None, "auto", "none"):
        raise RequestError(
            "tool_choice may be 'auto' or 'none'; calls cannot be forced",
            param="tool_choice",
            code="unsupported_parameter",
        )
    if not tools:
        if choice == "auto":
            raise RequestError("tool_choice 'auto' needs tools", param="tool_choice")
        return None
    for index, tool in enumerate(tools):
        if not _is_definition(tool):
            raise RequestError(
                f"tools[{index}] must be of the form {{'type': 'function', 'function': {{'name': …}}}}", param="tools"
            )
    if choice == "none":
        return None
    if not has_place:
        raise RequestError(
            "this model's chat template has no place for tools", param="tools", code="unsupported_parameter"
        )
    return tools


def get_tool_names(tools: list[Any] | None, choice: str | dict[str, Any] | None) -> frozenset[str]:
    """Names of the functions that an answer may call, of checked definitions."""
    return frozenset() if choice == "none" else frozenset(tool["function"]["name"] for tool in tools or ())


def _is_definition(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return (
        isinstance(function, Mapping)
        and tool.get("type") == "function"
        and isinstance(function.get("name"), str)
        and bool(function["name"])
    )
