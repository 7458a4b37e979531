from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdserve.bench.workload.dataset_files import read_prompts, read_sharegpt
from pdserve.errors import ConfigError


def conversation(question: str, answer: str, **fields: object) -> dict[str, object]:
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    return {"id": "x", "conversations": [*turns, {"from": "human", "value": "more"}], **fields}


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


CONVERSATIONS = [conversation(f'Q{i} "quoted" \\ {{[', f"A{i} ]}}") for i in range(5)]


def test_first_turns_of_a_whole_file(tmp_path: Path) -> None:
    records, is_cut_off = read_sharegpt(write(tmp_path / "s.json", json.dumps(CONVERSATIONS)))
    assert [(record.prompt, record.reply) for record in records] == [
        (f'Q{i} "quoted" \\ {{[', f"A{i} ]}}") for i in range(5)
    ]
    assert not is_cut_off


@pytest.mark.parametrize("indent", [None, 2])
def test_a_file_cut_off_anywhere_gives_the_conversations_before_it(tmp_path: Path, indent: int | None) -> None:
    text = json.dumps(CONVERSATIONS, indent=indent)
    path = tmp_path / "s.json"
    ends = []
    decoder, position = json.JSONDecoder(), text.index("{")
    for _ in CONVERSATIONS:
        _, end = decoder.raw_decode(text, position)
        ends.append(end)
        position = text.find("{", end)
    for cut in range(ends[0], len(text.rstrip("]\n "))):
        records, is_cut_off = read_sharegpt(write(path, text[:cut]))
        assert len(records) == sum(end <= cut for end in ends)
        assert is_cut_off


def test_conversations_without_a_question_and_an_answer_are_passed_over(tmp_path: Path) -> None:
    items: list[object] = [
        {"id": "empty", "conversations": []},
        {"id": "none"},
        "text",
        conversation("", "answer"),
        conversation("question", " "),
        {"conversations": [{"from": "gpt", "value": "a"}, {"from": "human", "value": "q"}]},
        {"conversations": [{"from": "human", "value": 3}, {"from": "gpt", "value": "a"}]},
        {"conversations": [{"from": "user", "value": "good"}, {"from": "assistant", "value": "one"}]},
    ]
    records, _ = read_sharegpt(write(tmp_path / "s.json", json.dumps(items)))
    assert [(record.prompt, record.reply) for record in records] == [("good", "one")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "does not begin with"),
        ('{"a": 1}', "does not begin with"),
        ("[]", "holds no conversation"),
        ("[nonsense", "is not JSON"),
        ('[{"a": }, {"b": 1}]', "is not JSON"),
        ('[{"a": 1} {"b": 1}]', "expected , or ]"),
        ('[{"conv', "holds no conversation"),
    ],
)
def test_a_file_that_is_wrong_is_said_to_be(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_sharegpt(write(tmp_path / "s.json", text))


def test_prompts_one_a_line(tmp_path: Path) -> None:
    records = read_prompts(write(tmp_path / "p.txt", "one\n\n  \ntwo words\n"))
    assert [record.prompt for record in records] == ["one", "two words"]


def test_prompts_of_json_lines(tmp_path: Path) -> None:
    lines = [{"prompt": "one", "max_tokens": 5}, {"messages": [{"role": "user", "content": "two"}]}]
    text = "\n".join(map(json.dumps, lines)) + "\n"
    first, second = read_prompts(write(tmp_path / "p.jsonl", text))
    assert (first.prompt, first.max_tokens, first.messages) == ("one", 5, None)
    assert (second.prompt, second.messages) == (None, ({"role": "user", "content": "two"},))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.txt", "", "holds no prompts"),
        ("p.jsonl", "\n \n", "holds no prompts"),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": ', "line 2, is not JSON"),
        ("p.jsonl", "[1]", "line 1, is not a JSON object"),
        ("p.jsonl", "{}", "line 1, needs either"),
        ("p.jsonl", '{"prompt": ""}', "line 1, needs either"),
        ("p.jsonl", '{"prompt": "a", "messages": [{}]}', "line 1, needs either"),
        ("p.jsonl", '{"prompt": "a", "max_tokens": 0}', "line 1: max_tokens is 0"),
        ("p.jsonl", '{"prompt": "a", "max_tokens": true}', "line 1: max_tokens is True"),
    ],
)
def test_a_prompts_file_that_is_wrong_is_said_to_be(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_prompts(write(tmp_path / name, text))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_prompts(tmp_path / "none.txt")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe[")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        read_sharegpt(tmp_path / "binary.json")
