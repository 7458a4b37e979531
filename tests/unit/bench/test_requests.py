from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.bench.workload.requests import Workload, build_workload
from pdserve.bench.workload.settings import WorkloadSettings
from pdserve.bench.workload.tokenizers import find_tokenizer
from pdserve.errors import ConfigError
from pdserve.text import Tokenizer


def build(tokenizer: Tokenizer | None = None, num_warmups: int = 0, **settings: Any) -> Workload:
    return build_workload(WorkloadSettings(**settings), tokenizer, num_warmups=num_warmups)


def test_synthetic_prompts_have_exactly_the_length_that_was_asked_for(tokenizer: Tokenizer) -> None:
    workload = build(tokenizer, num_requests=40, prompt_tokens="1-300", output_tokens="5-9")
    lengths = [len(tokenizer.encode(request.prompt or "")) for request in workload.requests]
    assert min(lengths) < 50 < 250 < max(lengths)
    same = build(tokenizer, num_requests=40, prompt_tokens="1-300", output_tokens="5-9")
    assert workload.requests == same.requests
    assert {request.max_tokens for request in workload.requests} == set(range(5, 10))
    assert workload.notes == ()
    for length in (1, 2, 17, 500):
        one = build(tokenizer, num_requests=1, prompt_tokens=str(length))
        assert len(tokenizer.encode(one.requests[0].prompt or "")) == length


def test_no_two_prompts_share_a_block_unless_that_is_wanted(tokenizer: Tokenizer) -> None:
    workload = build(tokenizer, num_warmups=2, num_requests=30, prompt_tokens="64")
    starts = [tuple(tokenizer.encode(r.prompt or "")[:16]) for r in (*workload.requests, *workload.warmups)]
    assert len(set(starts)) == 32


def test_shared_prefixes_are_shared_in_turn_by_all_seeds(tokenizer: Tokenizer) -> None:
    settings = WorkloadSettings(num_requests=6, prompt_tokens="60", shared_prefix_tokens=40, num_prefixes=2)
    first = build_workload(settings, tokenizer, num_warmups=1, seed=0)
    second = build_workload(settings, tokenizer, num_warmups=1, seed=1)
    ids = [tokenizer.encode(request.prompt or "") for request in (*first.requests, *second.requests)]
    assert {len(i) for i in ids} == {60}
    assert len({tuple(i[:40]) for i in ids}) == 2
    assert ids[0][:40] == ids[2][:40] == ids[6][:40] != ids[1][:40]
    assert len({tuple(i[40:]) for i in ids}) == 12


def test_without_a_tokenizer_lengths_are_estimates_and_said_to_be() -> None:
    workload = build(num_requests=3, prompt_tokens="20")
    assert [len((request.prompt or "").split()) for request in workload.requests] == [20, 20, 20]
    assert "estimates" in workload.notes[0]


def write_sharegpt(path: Path, turns: list[tuple[str, str]], end: str = "]") -> str:
    items = [{"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]} for q, a in turns]
    path.write_text(json.dumps(items)[:-1] + end, encoding="utf-8")
    return str(path)


def test_sharegpt_gives_questions_and_the_length_of_replies(tmp_path: Path, tokenizer: Tokenizer) -> None:
    turns = [(f"question {i}", "word " * (i + 1)) for i in range(8)] + [("long " * 50, "short")]
    path = write_sharegpt(tmp_path / "s.json", turns, end=', {"conv')
    workload = build(tokenizer, sharegpt=path, num_requests=8, max_prompt_tokens=20, output_tokens="reply")
    replies = dict(turns)
    assert len({request.prompt for request in workload.requests}) == 8
    for request in workload.requests:
        assert request.max_tokens == len(tokenizer.encode(replies[request.prompt or ""]))
    assert workload.notes == ("The file is cut off; its 9 whole conversations are used.",)


def test_prompts_that_are_sent_again_are_said_to_be(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("one\ntwo\n", encoding="utf-8")
    assert [request.prompt for request in build(prompts_file=str(path)).requests] == ["one", "two"]
    again = build(prompts_file=str(path), num_requests=5)
    assert [request.prompt for request in again.requests] == ["one", "two", "one", "two", "one"]
    assert "2 prompts are sent 5 times" in again.notes[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompts_file": "a", "sharegpt": "b"}, "both given"),
        ({"output_tokens": "reply"}, "needs --sharegpt"),
        ({"prompts_file": "a", "shared_prefix_tokens": 5}, "for synthetic prompts"),
        ({"prompt_tokens": "50-90", "shared_prefix_tokens": 50}, "leaves nothing of the shortest prompt"),
        ({"prompt_tokens": "many"}, "--prompt-tokens: 'many' is no mix"),
        ({"output_tokens": "0"}, "--output-tokens: '0' is no range"),
        ({"prompts_file": "/none/there.txt"}, "cannot be read"),
    ],
)
def test_settings_that_are_wrong(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(**settings)


def test_conversations_that_are_all_too_long(tmp_path: Path) -> None:
    path = write_sharegpt(tmp_path / "s.json", [("many words " * 50, "a")])
    with pytest.raises(ConfigError, match="no conversation of at most 5"):
        build(sharegpt=path, max_prompt_tokens=5)


def test_a_served_name_never_starts_a_download() -> None:
    assert find_tokenizer(None, "some-owner/some-model") is None
    assert find_tokenizer(None, "no-such-model") is None
    assert find_tokenizer(None, "smollm2-135m-instruct") is not None
    with pytest.raises(ConfigError, match="no-such-model"):
        find_tokenizer("no-such-model", "smollm2-135m-instruct")
