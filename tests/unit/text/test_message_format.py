from __future__ import annotations

import pytest

from pdserve.errors import ConfigError
from pdserve.text.message import ContentReader
from pdserve.text.message_format import MessageFormat, find_message_format
from pdserve.text.reasoning import ReasoningReader
from pdserve.text.tokenizer import Tokenizer
from pdserve.text.tool_calls import ToolCallReader

NAMES = frozenset(("f",))
HERMES = find_message_format("hermes", "none", "")


def test_a_reader_is_no_more_than_what_the_request_and_the_model_need(smollm2: Tokenizer) -> None:
    assert isinstance(MessageFormat().build_reader(NAMES, [5], smollm2), ContentReader)
    assert isinstance(HERMES.build_reader(frozenset(), [5], smollm2), ContentReader)
    assert isinstance(HERMES.build_reader(NAMES, [5], smollm2), ToolCallReader)
    both = find_message_format("hermes", "think", "")
    assert isinstance(both.build_reader(NAMES, [5], smollm2), ReasoningReader)


@pytest.mark.parametrize(("end", "reasoning"), [("<think>", "a"), ("<think>\n\n", "a"), ("</think>", ""), ("x", "")])
def test_the_prompts_end_tells_whether_reasoning_is_open(smollm2: Tokenizer, end: str, reasoning: str) -> None:
    prompt = smollm2.encode("A long prompt in front of it all, longer than what is looked at. " + end)
    reader = find_message_format("none", "think", "").build_reader(frozenset(), prompt, smollm2)
    delta = reader.push("a")
    assert (delta.reasoning, delta.content) == (reasoning, "" if reasoning else "a")


def test_tags_that_are_tokens_are_read(smollm2: Tokenizer) -> None:
    token_id = smollm2.token_to_id("<|im_start|>")
    form = MessageFormat(reasoning=("<|im_start|>", "no token"))
    assert form.get_tag_ids(smollm2, has_tools=False) == {token_id}
    assert HERMES.get_tag_ids(smollm2, has_tools=True) == frozenset()


def test_unknown_reasoning_parser_is_a_plain_error() -> None:
    with pytest.raises(ConfigError, match="--reasoning-parser is 'deep'; it may be none, think"):
        find_message_format("none", "deep", "")
