"""How a model's answers are read: whether it calls tools, and how, and whether it reasons in front of its answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.errors import ConfigError
from pdserve.text.message import ContentReader, MessageReader
from pdserve.text.reasoning import REASONING_TAGS, ReasoningReader
from pdserve.text.tokenizer import Tokenizer
from pdserve.text.tool_calls import FORCED_FORMAT, ToolCallFormat, ToolCallReader, find_format

_OPENING_TOKENS = 16
"""A template that opens the reasoning itself does so within so many tokens of the prompt's end."""


@dataclass(frozen=True)
class MessageFormat:
    """The formats of one model; without any, all text is content.

    Attributes:
        tool_calls: how it writes calls; None = calls are not looked for.
        reasoning: the tags around its reasoning; None = reasoning is not looked for.
    """

    tool_calls: ToolCallFormat | None = None
    reasoning: tuple[str, str] | None = None

    def get_call_format(self, *, must_call: bool) -> ToolCallFormat | None:
        """How calls are written; an answer that must be one is made to have calls of some format."""
        return FORCED_FORMAT if self.tool_calls is None and must_call else self.tool_calls

    def build_reader(
        self,
        tool_names: frozenset[str],
        prompt_token_ids: Sequence[int],
        tokenizer: Tokenizer,
        *,
        must_call: bool = False,
        has_grammar: bool = False,
    ) -> MessageReader:
        """A reader for one answer.

        Args:
            tool_names: the functions that the request offers.
            prompt_token_ids: what the answer continues: its end tells whether it begins within the reasoning.
            tokenizer: the model's.
            must_call: the answer is a call.
            has_grammar: the answer follows a grammar from its first token on: it has no reasoning.
        """
        reader: MessageReader = ContentReader()
        call_format = self.get_call_format(must_call=must_call)
        if call_format is not None and tool_names:
            reader = ToolCallReader(call_format, tool_names)
        if self.reasoning is not None and not has_grammar:
            end = tokenizer.decode(prompt_token_ids[-_OPENING_TOKENS:], skip_special_tokens=False)
            is_open = end.rstrip().endswith(self.reasoning[0])
            reader = ReasoningReader(self.reasoning, is_open=is_open, behind=reader)
        return reader

    def get_tag_ids(self, tokenizer: Tokenizer, *, has_tools: bool, must_call: bool = False) -> frozenset[int]:
        """Tokens that spell a tag whole: they are read also where special tokens are left out."""
        tags = list(self.reasoning or ())
        call_format = self.get_call_format(must_call=must_call)
        if call_format is not None and has_tools:
            tags += [call_format.opening, call_format.closing]
        return frozenset(i for i in map(tokenizer.token_to_id, tags) if i is not None)


def find_message_format(tool_call_parser: str, reasoning_parser: str, template: str) -> MessageFormat:
    """The formats that settings name, or that a chat template shows.

    Raises:
        ConfigError: there is no format of that name.
    """
    if reasoning_parser != "none" and reasoning_parser not in REASONING_TAGS:
        raise ConfigError(f"--reasoning-parser is {reasoning_parser!r}; it may be none, {', '.join(REASONING_TAGS)}")
    return MessageFormat(find_format(tool_call_parser, template), REASONING_TAGS.get(reasoning_parser))
