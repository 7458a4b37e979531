from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.text.message import CallDelta, ContentReader, MessageReader
from pdserve.text.reasoning import REASONING_TAGS, ReasoningReader
from pdserve.text.tool_calls import FORMATS, ToolCallReader


def build(is_open: bool = False, behind: MessageReader | None = None) -> ReasoningReader:
    return ReasoningReader(REASONING_TAGS["think"], is_open=is_open, behind=behind or ContentReader())


def read(reader: ReasoningReader, pieces: list[str]) -> tuple[str, str, list[CallDelta]]:
    deltas = [*(reader.push(piece) for piece in pieces), reader.finish()]
    calls = [call for delta in deltas for call in delta.calls]
    return "".join(delta.reasoning for delta in deltas), "".join(delta.content for delta in deltas), calls


@pytest.mark.parametrize(
    ("is_open", "text", "reasoning", "content"),
    [
        (False, "<think>\nHm.\n</think>\n\nYes.", "Hm.\n", "Yes."),
        (False, " \n<think>Hm.</think>Yes. ", "Hm.", "Yes. "),
        (False, "No reasoning. <think>x</think>", "", "No reasoning. <think>x</think>"),
        (False, " Yes", "", " Yes"),
        (False, "<thin", "", "<thin"),
        (False, "", "", ""),
        (False, "<think>Hm", "Hm", ""),
        (True, "\nHm.</think>Yes", "Hm.", "Yes"),
        (True, "Hm.</thi", "Hm.</thi", ""),
        (True, "</think>Yes", "", "Yes"),
    ],
)
def test_reasoning_and_answer(is_open: bool, text: str, reasoning: str, content: str) -> None:
    assert read(build(is_open), [text]) == (reasoning, content, [])
    assert read(build(is_open), list(text)) == (reasoning, content, [])


def test_calls_behind_reasoning_are_found_and_those_within_are_not() -> None:
    call = '<tool_call>{"name": "now"}</tool_call>'
    tools = ToolCallReader(FORMATS["hermes"], frozenset(("now",)))
    reasoning, content, calls = read(build(behind=tools), [f"<think>{call}</think>\n", call])
    assert (reasoning, content) == (call, "")
    assert calls == [CallDelta(0, "now", ""), CallDelta(0, None, "{}")]


@given(
    is_open=st.booleans(),
    pieces=st.lists(st.sampled_from(["<think>", "</think>", "<", "think", ">", " ", "\n", "a", "/"]), max_size=9),
)
def test_no_cut_changes_anything(is_open: bool, pieces: list[str]) -> None:
    assert read(build(is_open), pieces) == read(build(is_open), ["".join(pieces)])
