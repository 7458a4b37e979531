"""Tool calls in answers: each format, what is no call, and that no cut of the text changes anything."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import ConfigError
from pdserve.text.message import MessageDelta, MessageReader
from pdserve.text.tool_calls import FORMATS, ToolCallReader, find_format

NAMES = frozenset(("get_weather", "now"))
WEATHER = '{"city": "Paris", "days": [1, -2.5e3, true, null], "note": "a } \\" </tool_call> é\\u00e9"}'


@dataclass
class Read:
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str | None, str]] = field(default_factory=list)

    def take(self, delta: MessageDelta) -> None:
        self.content += delta.content
        self.reasoning += delta.reasoning
        for call in delta.calls:
            if call.name is not None:
                assert call.index == len(self.calls)
                self.calls.append((call.name, ""))
            name, arguments = self.calls[call.index]
            self.calls[call.index] = (name, arguments + call.arguments)


def read_all(reader: MessageReader, pieces: list[str]) -> Read:
    read = Read()
    for piece in pieces:
        read.take(reader.push(piece))
    read.take(reader.finish())
    return read


def read(form: str, text: str) -> tuple[str, list[tuple[str | None, str]]]:
    found = read_all(ToolCallReader(FORMATS[form], NAMES), [text])
    by_character = read_all(ToolCallReader(FORMATS[form], NAMES), list(text))
    assert found == by_character
    return found.content, found.calls


def call(arguments: str = WEATHER, key: str = "arguments") -> str:
    return f'{{"name": "get_weather", "{key}": {arguments}}}'


WHOLE = [
    ("hermes", f"<tool_call>\n{call()}\n</tool_call>", ""),
    ("hermes", f"Let me look.\n<tool_call>{call()}</tool_call>\n", "Let me look."),
    ("hermes", f"<tool_call>{call()}", ""),
    ("hermes", f"<tool_call>{call()}</tool_call> It rains.", " It rains."),
    ("hermes", f'<tool_call>{{"arguments": {WEATHER}, "id": 7, "name": "get_weather"}}</tool_call>', ""),
    ("llama3_json", call(key="parameters"), ""),
    ("llama3_json", f"\n <|python_tag|>{call(key='parameters')}", ""),
    ("llama3_json", f"So: <|python_tag|> {call()}", "So:"),
    ("mistral", f"[TOOL_CALLS] [{call()}]", ""),
    ("mistral", f"[TOOL_CALLS][{call()}]\n", ""),
    ("mistral", f"Yes. [TOOL_CALLS] {call()}", "Yes."),
]


@pytest.mark.parametrize(("form", "text", "content"), WHOLE)
def test_a_call_is_found_in_every_format(form: str, text: str, content: str) -> None:
    assert read(form, text) == (content, [("get_weather", WEATHER)])
    assert json.loads(WEATHER)


SEVERAL = [
    (
        "hermes",
        '<tool_call>{"name": "now"}</tool_call>\n<tool_call>{"name": "get_weather", "arguments": {}}</tool_call>',
    ),
    ("llama3_json", '{"name": "now"}; {"name": "get_weather", "parameters": {}}'),
    ("mistral", '[TOOL_CALLS] [{"name": "now"}, {"name": "get_weather", "arguments": {}}]'),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text"), SEVERAL)
def test_several_calls_and_one_without_arguments(form: str, text: str) -> None:
    assert read(form, text) == ("", [("now", "{}"), ("get_weather", "{}")])


NO_CALLS = [
    ("hermes", "Just text, with { and } and a < sign. \n"),
    ("hermes", ""),
    ("hermes", " <tool_call"),
    ("hermes", "<tool_call></tool_call>"),
    ("hermes", "<tool_call>\n  nothing </tool_call>"),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": "text"}</tool_call>'),
    ("hermes", '<tool_call>{"name": get_weather, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {"city": "Paris"}}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {"a": 01}, "name": "get_weather"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "get_weather",}</tool_call>'),
    ("hermes", '<tool_call>{"name": "get_wea'),
    ("hermes", call()),
    ("llama3_json", '{"answer": 42}'),
    ("llama3_json", f"Text first {call()}"),
    ("llama3_json", "  {"),
    ("llama3_json", "<|python_tag|>print(1)"),
    ("mistral", "[TOOL_CALLS] nothing"),
    ("mistral", '[TOOL_CALLS] [{"nom": "get_weather"}]'),
    ("mistral", '[TOOL_CALLS] [{"x": ' + "[" * 5000),
]


@pytest.mark.parametrize(("form", "text"), NO_CALLS)
def test_what_is_no_call_stays_content_to_the_letter(form: str, text: str) -> None:
    assert read(form, text) == (text, [])


def test_a_malformed_call_does_not_hide_a_good_one() -> None:
    text = f'<tool_call>{{"name": oops}}</tool_call><tool_call>{call()}</tool_call>'
    assert read("hermes", text) == ('<tool_call>{"name": oops}</tool_call>', [("get_weather", WEATHER)])


@pytest.mark.parametrize(
    ("text", "arguments", "content"),
    [
        ('<tool_call>{"name": "now", "arguments": {"city": "Par', '{"city": "Par', ""),
        ('<tool_call>{"name": "now", "arguments": {"a": 1</tool_call> x', '{"a": 1', " x"),
        ('<tool_call>{"name": "now", "arguments": {"a": oops}}</tool_call>', '{"a": ', "oops}}</tool_call>"),
        ('<tool_call>{"name": "now", "arguments": {}, oops', "{}", "oops"),
    ],
)
def test_a_call_that_breaks_off_keeps_its_arguments_so_far(text: str, arguments: str, content: str) -> None:
    found_content, ((_, found),) = read("hermes", text)
    assert (found_content, found) == (content, arguments)


def test_arguments_are_passed_on_as_they_come() -> None:
    reader = ToolCallReader(FORMATS["hermes"], NAMES)
    seen = [reader.push(piece) for piece in ('<tool_call>{"name": "now", "argu', 'ments": {"a"', ": 1", "0}", "}")]
    assert [[(one.name, one.arguments) for one in delta.calls] for delta in seen] == [
        [],
        [("now", ""), (None, '{"a"')],
        [(None, ": 1")],
        [(None, "0}")],
        [],
    ]


PIECES = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", " ", "\n", "{", "}", "[", "]", ",", ";", '"',
        "Hello", "\\", "é", "<", '{"name": "now"}', '"name": "get_weather"', '"arguments": {', '"a": 1', call(),
    ]
)  # fmt: skip


@given(
    form=st.sampled_from(sorted(FORMATS)),
    text=st.lists(PIECES, max_size=12).map("".join),
    cuts=st.lists(st.integers(0, 400), max_size=8),
)
def test_no_cut_changes_anything_and_nothing_fails(form: str, text: str, cuts: list[int]) -> None:
    places = [0, *sorted(cut for cut in cuts if cut <= len(text)), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(places)]
    whole = read_all(ToolCallReader(FORMATS[form], NAMES), [text])
    assert read_all(ToolCallReader(FORMATS[form], NAMES), pieces) == whole
    if not whole.calls:
        assert whole.content == text
    for name, arguments in whole.calls:
        assert name in NAMES
        assert arguments.startswith("{")


@pytest.mark.parametrize(
    ("name", "template", "expected"),
    [
        ("auto", "…<tool_call>…", "hermes"),
        ("auto", "…[TOOL_CALLS]…", "mistral"),
        ("auto", "…<|python_tag|>…", "llama3_json"),
        ("auto", "plain", None),
        ("auto", "<tool_call>\n<function=x>", None),
        ("none", "<tool_call>", None),
        ("hermes", "plain", "hermes"),
    ],
)
def test_format_is_named_or_derived(name: str, template: str, expected: str | None) -> None:
    assert find_format(name, template) is (FORMATS[expected] if expected else None)


def test_unknown_format_is_a_plain_error() -> None:
    with pytest.raises(ConfigError, match="--tool-call-parser is 'xml'; it may be auto, none, hermes"):
        find_format("xml", "")
