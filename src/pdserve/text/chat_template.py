"""A conversation as token ids, by the model's own chat template.

Contents that spell a special token stay text; see `pdserve.text.special_marks`.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from pdserve.errors import RequestError
from pdserve.text.template_source import compile_template, read_templates
from pdserve.text.tokenizer import Tokenizer
from pdserve.text.tool_calls.formats import FORCED_FORMAT, ToolCallFormat

_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")
_TOOLS_VARIABLE = re.compile(r"\btools\b")
_CALLS_VARIABLE = re.compile(r"\btool_calls\b")
_OWN_NAMES = frozenset(("messages", "tools", "add_generation_prompt", *_SPECIAL_NAMES))
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""What a template raises when a conversation is not what it expects: its own errors, or Python's about values."""

Message = Mapping[str, Any]


class ChatTemplate:
    """Renders conversations; safe to use from several threads.

    Args:
        directory: of the model's files.
        tokenizer: its tokenizer.

    Attributes:
        takes_tools: whether it has a place for tool definitions.
        source: all of its templates as they are written.

    Raises:
        ConfigError: the template cannot be read or compiled. A model without one is no error until `render`.
    """

    def __init__(self, directory: Path, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._marks = tokenizer.marks
        sources = read_templates(directory, tokenizer.config)
        self._templates = {
            name: compile_template(source, self._marks)
            for name, source in sources.items()
            if name in ("default", "tool_use")
        }
        self.takes_tools = "tool_use" in sources or bool(_TOOLS_VARIABLE.search(sources.get("default", "")))
        self._shows_calls = "tool_use" in sources or bool(_CALLS_VARIABLE.search(sources.get("default", "")))
        self.source = "\n".join(sources.values())
        self._knows_developer = "developer" in self.source
        self._special_tokens = self._read_special_tokens(tokenizer.config)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        call_format: ToolCallFormat = FORCED_FORMAT,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids of the conversation.

        Args:
            messages: in OpenAI's form; the text parts of a content are joined with newlines.
            tools: in OpenAI's form.
            add_generation_prompt: end with the opening of the assistant's turn.
            continue_final_message: end inside the last message, so that the answer goes on with it.
            call_format: how the model writes calls: earlier ones stand so in the contents of a conversation whose
                template has no place for them.
            kwargs: the template's own variables (``enable_thinking``, ...).

        Raises:
            RequestError: the model has no template, or the conversation is one that it refuses.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message needs add_generation_prompt to be false", param="continue_final_message"
            )
        if taken := _OWN_NAMES & kwargs.keys():
            raise RequestError(
                f"chat_template_kwargs may not set {', '.join(sorted(taken))}", param="chat_template_kwargs"
            )
        written_as = None if self._shows_calls else call_format
        try:
            prepared = [_prepare_message(message, index, written_as) for index, message in enumerate(messages)]
        except RecursionError:
            raise RequestError("messages nest too deep", param="messages") from None
        for message in prepared:
            # OpenAI's later name of the same role, which most models have not been taught.
            if message["role"] == "developer" and not self._knows_developer:
                message["role"] = "system"
        if not prepared:
            raise RequestError("messages is empty; it needs at least one message", param="messages")
        ending = _append_ending(prepared[-1]) if continue_final_message else None
        variables = {
            **kwargs,
            **self._special_tokens,
            "messages": prepared,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._render(variables)
        return self._tokenizer.encode_marked(text if ending is None else _cut_at_ending(text, ending))

    def _render(self, variables: dict[str, Any]) -> str:
        template = self._templates.get("tool_use") if variables["tools"] else None
        template = template or self._templates.get("default")
        if template is None:
            raise RequestError(
                "this model has no chat template: use /v1/completions, or a model that is tuned for chat",
                param="messages",
            )
        try:
            return template.render(variables)
        except _TEMPLATE_ERRORS as error:
            reason = self._marks.remove(str(error)) or type(error).__name__
            raise RequestError(
                f"the model's chat template refuses the conversation: {reason}", param="messages"
            ) from error

    def _read_special_tokens(self, config: Mapping[str, Any]) -> dict[str, str]:
        """``bos_token`` and the like as a template's variables, marked."""
        tokens = {}
        for name in _SPECIAL_NAMES:
            value = config.get(name)
            token = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(token, str):
                tokens[name] = self._marks.wrap(token)
        return tokens


def _prepare_message(message: Message, index: int, written_as: ToolCallFormat | None) -> dict[str, Any]:
    """The message as templates want it: content a string, tool arguments an object, or calls within the content."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"messages[{index}] needs a role", param=f"messages[{index}].role")
    prepared = dict(message)
    calls, param = message.get("tool_calls"), f"messages[{index}].tool_calls"
    if calls is not None and not isinstance(calls, list):
        raise RequestError(f"{param} must be a list", param=param, code="invalid_type")
    if message.get("content") is None and not calls:
        raise RequestError(f"messages[{index}] needs a content", param=f"messages[{index}].content")
    prepared["content"] = _join_content(message.get("content"), index)
    if calls:
        prepared["tool_calls"] = [_prepare_call(call, param) for call in calls]
        if written_as is not None:
            written = written_as.write_calls([_spell_call(call) for call in calls])
            prepared["content"] = "\n".join(filter(None, (prepared["content"], written)))
    elif prepared["content"] is None:
        # Only a message that calls tools has a reason to be without content, and templates test for that.
        prepared["content"] = ""
    return prepared


def _join_content(content: Any, index: int) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise RequestError("content is a string or a list of parts", param=f"messages[{index}].content")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(text, str):
            what = "without a text" if kind == "text" else f"of type {kind!r}"
            raise RequestError(
                f"a content part {what} is not supported; this model takes parts of type 'text'",
                param=f"messages[{index}].content",
            )
        texts.append(text)
    return "\n".join(texts)


def _prepare_call(call: Any, param: str) -> dict[str, Any]:
    """A tool call with its arguments parsed: OpenAI sends them as JSON text, templates want the object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(
            f"{param} must hold calls of the form {{'type': 'function', 'function': {{'name': …, 'arguments': …}}}}",
            param=param,
        )
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise RequestError("the arguments of a tool call are not valid JSON", param=param) from error
    return {**call, "function": {**function, "arguments": arguments}}


def _spell_call(call: Mapping[str, Any]) -> tuple[str, str]:
    """A call's name and arguments, in the very characters that the model wrote where they came as text."""
    name, arguments = call["function"]["name"], call["function"].get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return name, text if text.strip() else "{}"


def _append_ending(message: dict[str, Any]) -> str:
    """Put a random ending behind the message's content and return it: it shows where the content went."""
    if not message["content"]:
        raise RequestError("continue_final_message needs a last message with content", param="messages")
    ending = f"{secrets.randbits(128):039}"
    # The space behind it tells whether the template trims the content.
    message["content"] += ending + " "
    return ending


def _cut_at_ending(text: str, ending: str) -> str:
    before, found, behind = text.rpartition(ending)
    if not found:
        raise RequestError(
            "continue_final_message cannot be done: the model's chat template leaves out the last message",
            param="continue_final_message",
        )
    return before if behind.startswith(" ") else before.rstrip()
