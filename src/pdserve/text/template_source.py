"""Chat templates as source: reading them from a model's files, marking them and compiling them in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pdserve.errors import ConfigError
from pdserve.text.special_marks import SpecialMarks

_OUTPUT_FILTERS = ("join", "default", "d")
"""Filters whose arguments become text; those of others only steer."""


def read_templates(directory: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """A model's chat templates by name; ``default`` is the usual one. Empty where it has none.

    Looks at chat_template.jinja, chat_template.json and the ``chat_template`` of tokenizer_config.json.

    Raises:
        ConfigError: one of the files cannot be read.
    """
    path = directory / "chat_template.jinja"
    try:
        if path.is_file():
            return {"default": path.read_text(encoding="utf-8")}
        path = directory / "chat_template.json"
        if path.is_file():
            return _by_name(json.loads(path.read_text(encoding="utf-8"))["chat_template"])
        path = directory / "tokenizer_config.json"
        return _by_name(tokenizer_config.get("chat_template"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"the chat template in {path} cannot be read: {error!r}") from error


def compile_template(source: str, marks: SpecialMarks) -> jinja2.Template:
    """The template, sandboxed, with the special tokens in its own strings marked.

    Raises:
        ConfigError: it is not a valid template.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _format_now
    try:
        tree = environment.parse(source)
        for node in _output_strings(tree):
            if isinstance(node, nodes.TemplateData):
                node.data = marks.mark(node.data)
            else:
                node.value = marks.mark(node.value)
        return environment.from_string(tree)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"the model's chat template is not valid: line {error.lineno}: {error.message}") from error


def _by_name(templates: Any) -> dict[str, str]:
    if templates is None:
        return {}
    if isinstance(templates, str):
        return {"default": templates}
    if isinstance(templates, Mapping):
        return {str(name): str(text) for name, text in templates.items()}
    return {str(entry["name"]): str(entry["template"]) for entry in templates}


def _output_strings(node: nodes.Node) -> Iterator[nodes.TemplateData | nodes.Const]:
    """The template's strings that can become part of its text, not those it compares or looks up with."""
    if isinstance(node, nodes.TemplateData) or (isinstance(node, nodes.Const) and isinstance(node.value, str)):
        yield node
        return
    for child in _output_children(node):
        yield from _output_strings(child)


def _output_children(node: nodes.Node) -> Iterator[nodes.Node]:
    if isinstance(node, (nodes.Compare, nodes.Test)):
        return
    if isinstance(node, (nodes.Getitem, nodes.Getattr)):
        yield node.node
    elif isinstance(node, nodes.Pair):
        yield node.value
    elif isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr):
        # A method's arguments (split, replace, startswith, ...) are looked for in text, a macro's become text.
        yield node.node.node
    elif isinstance(node, nodes.Filter) and node.name not in _OUTPUT_FILTERS:
        if node.node is not None:
            yield node.node
    else:
        skipped = ("test",) if isinstance(node, (nodes.If, nodes.CondExpr, nodes.For)) else ()
        yield from node.iter_child_nodes(exclude=skipped)


class _GenerationTag(Extension):
    """``{% generation %} ... {% endgeneration %}`` marks the assistant's part for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, as chat templates expect it."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _format_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
