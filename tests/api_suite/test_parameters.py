"""No parameter is lost between the legs, and what is counted is true: cases 30 to 39."""

from __future__ import annotations

from typing import Any

import pytest
from target import CHAT, COMPLETIONS, Target, find_differences, get_text, unique_text

PROMPT = "The old house stood on a hill above the river. Every evening"
MESSAGES = [{"role": "user", "content": "Tell me about rivers."}]
BOTH = pytest.mark.parametrize(
    ("path", "fields"), [(COMPLETIONS, {"prompt": PROMPT}), (CHAT, {"messages": MESSAGES})], ids=["completions", "chat"]
)


@BOTH
@pytest.mark.parametrize("max_tokens", [1, 2, 9])
def test_max_tokens_are_made_and_counted(target: Target, path: str, fields: dict[str, Any], max_tokens: int) -> None:
    answer = target.ask(path, {**fields, "max_tokens": max_tokens, "ignore_eos": True})
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == max_tokens


@BOTH
def test_case_30_min_tokens_reach_decode_and_do_not_offend_prefill(
    target: Target, path: str, fields: dict[str, Any]
) -> None:
    answer = target.ask(path, {**fields, "max_tokens": 24, "min_tokens": 20})
    assert 20 <= answer["usage"]["completion_tokens"] <= 24


def test_case_31_max_completion_tokens_alone(target: Target) -> None:
    answer = target.ask(CHAT, {"messages": MESSAGES, "max_completion_tokens": 5})
    assert 1 <= answer["usage"]["completion_tokens"] <= 5


@BOTH
def test_case_34_cached_tokens_are_never_above_the_prompt(target: Target, path: str, fields: dict[str, Any]) -> None:
    text = unique_text()
    fields = {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
    usages = [target.ask(path, {**fields, "max_tokens": 3})["usage"] for _ in range(2)]
    assert usages[0]["prompt_tokens"] == usages[1]["prompt_tokens"]
    for usage in usages:
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    details = [usage.get("prompt_tokens_details") for usage in usages]
    if not all(details):
        pytest.skip("prompt_tokens_details are not offered")
    cold, warm = ((one or {}).get("cached_tokens") or 0 for one in details)
    # A chat template's beginning is the same for all.
    assert cold <= usages[0]["prompt_tokens"] // 2
    assert cold <= warm <= usages[1]["prompt_tokens"]


def test_case_35_logprobs_have_one_entry_for_each_token_the_first_too(target: Target) -> None:
    body = {"prompt": PROMPT, "logprobs": 5, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    (choice,) = target.ask(COMPLETIONS, body)["choices"]
    logprobs = choice["logprobs"]
    assert {name: len(values) for name, values in logprobs.items()} == dict.fromkeys(logprobs, 8)
    # Greedy: each token is the likeliest of its alternatives.
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert max(top.values()) == logprob == top[token]


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs_have_one_entry_for_each_token(target: Target, stream: bool) -> None:
    body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 3, "max_tokens": 6, "ignore_eos": True}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    answer = target.ask(CHAT, body)
    (choice,) = answer["choices"].values() if stream else answer["choices"]
    parts = choice["logprobs"] if stream else [choice["logprobs"]]
    entries = [entry for part in parts for entry in part["content"]]
    assert len(entries) == answer["usage"]["completion_tokens"] == 6
    assert all(len(entry["top_logprobs"]) == 3 for entry in entries)
    text = bytes(byte for entry in entries for byte in entry["bytes"]).decode("utf-8", "replace")
    assert text == choice["text"] if stream else text == choice["message"]["content"]


def test_case_36_echo_with_logprobs_covers_prompt_and_answer(target: Target) -> None:
    body = {"prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    answer = target.ask(COMPLETIONS, body)
    (choice,) = answer["choices"]
    assert choice["text"].startswith(PROMPT)
    logprobs, usage = choice["logprobs"], answer["usage"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == usage["prompt_tokens"] + 3
    assert logprobs["token_logprobs"][0] is None
    assert all(value is not None for value in logprobs["token_logprobs"][1:])


def test_case_36_echoed_logprobs_are_those_that_the_prompts_beginning_gives(target: Target) -> None:
    prompt = [504, 253, 1116, 327, 260, 2101]
    body = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 1, "temperature": 0}
    (choice,) = target.ask(COMPLETIONS, body)["choices"]
    echoed = choice["logprobs"]["token_logprobs"]
    for length in range(1, len(prompt)):
        forced = {"prompt": prompt[:length], "prompt_logprobs": 0, "logprobs": 5, "max_tokens": 1, "temperature": 0}
        (one,) = target.ask(COMPLETIONS, forced)["choices"]
        entries = zip(one["prompt_logprobs"][1:], prompt[1:length], strict=True)
        assert [entry[str(token)]["logprob"] for entry, token in entries] == echoed[1:length]


@BOTH
def test_case_21_choices_are_as_many_as_asked_for_and_differ(target: Target, path: str, fields: dict[str, Any]) -> None:
    body = {**fields, "n": 4, "max_tokens": 12, "temperature": 1.0, "seed": 3}
    answer = target.ask(path, body)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert len({get_text(choice) for choice in answer["choices"]}) > 1
    streamed = target.ask(path, {**body, "stream": True, "stream_options": {"include_usage": True}})
    assert sorted(streamed["choices"]) == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == streamed["usage"]["prompt_tokens"]


def test_prompt_lists_are_answered_in_order_and_counted_together(target: Target) -> None:
    prompts = ["One, two,", "The capital of France is", "Red, green and"]
    body = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}
    single = [target.ask(COMPLETIONS, {**body, "prompt": prompt}) for prompt in prompts]
    together = target.ask(COMPLETIONS, {**body, "prompt": prompts})
    assert [choice["text"] for choice in together["choices"]] == [one["choices"][0]["text"] for one in single]
    assert together["usage"]["prompt_tokens"] == sum(one["usage"]["prompt_tokens"] for one in single)
    assert together["usage"]["completion_tokens"] == 12


@BOTH
def test_a_stop_string_ends_the_answer_in_front_of_it(target: Target, path: str, fields: dict[str, Any]) -> None:
    body = {**fields, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    whole = get_text(target.ask(path, body)["choices"][0])
    stop = whole[len(whole) // 2 :][:3]
    for stream in (False, True):
        answer = target.ask(path, {**body, "stop": ["\u2603 never", stop], "stream": stream})
        (choice,) = answer["choices"].values() if stream else answer["choices"]
        assert choice["finish_reason"] == "stop"
        assert get_text(choice) == whole[: whole.index(stop)]


@BOTH
def test_equal_seeds_give_equal_answers(target: Target, path: str, fields: dict[str, Any]) -> None:
    body = {**fields, "max_tokens": 10, "temperature": 1.0, "seed": 7}
    first, second = (target.ask(path, body) for _ in range(2))
    for answer in (first, second):
        del answer["usage"]
    assert list(find_differences(first, second)) == []


def test_logit_bias_reaches_both_legs(target: Target) -> None:
    body = {"prompt": PROMPT, "logit_bias": {"500": 100}, "logprobs": 0, "max_tokens": 4, "ignore_eos": True}
    (choice,) = target.ask(COMPLETIONS, body)["choices"]
    assert len(set(choice["logprobs"]["tokens"])) == 1


def test_case_39_made_up_transfer_parameters_change_nothing(target: Target) -> None:
    body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0}
    expected = target.ask(COMPLETIONS, body)
    made_up = {"do_remote_prefill": True, "remote_block_ids": [0, 1, 2], "transfer_id": "x", "connector": "x"}
    answer = target.ask(COMPLETIONS, {**body, "kv_transfer_params": made_up})
    assert answer["choices"] == expected["choices"]
