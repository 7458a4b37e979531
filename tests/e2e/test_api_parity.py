"""The same request through prefill and decode instances and through a decode instance alone: every field is equal.

Both routers run the same code over the same decode instance; only one has a prefill pool. Each request has a cache
salt for each way, so that neither finds what the other left.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from processes import Deployment, ManagedProcess, find_free_port, wait_until
from prompts import build_long_text

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = build_long_text(1)[:150]
WAYS = ("pd", "colocated")
EOS = 2

COMPLETION_GRID: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "seed": 7},
    "nucleus": {"temperature": 1.2, "seed": 1, "top_p": 0.8, "top_k": 50, "min_p": 0.02},
    "one token": {"max_tokens": 1, "logprobs": 2},
    "two tokens": {"max_tokens": 2, "logprobs": 0},
    "default length": {"max_tokens": None},
    "three choices": {"n": 3, "seed": 5, "logprobs": 3},
    "best of two": {"n": 2, "best_of": 2, "seed": 5},
    "logprobs": {"logprobs": 5, "seed": 3},
    "echo": {"echo": True, "max_tokens": 3},
    "echo with logprobs": {"echo": True, "logprobs": 2, "n": 2, "seed": 4},
    "stop string": {"stop": [" the", ",", "."], "temperature": 0, "max_tokens": 12},
    "stop string shown": {"stop": "e", "include_stop_str_in_output": True, "max_tokens": 12},
    "stop token": {"stop_token_ids": list(range(200, 320)), "seed": 2, "max_tokens": 12},
    "first token ends it": {"logit_bias": {str(EOS): 100}, "logprobs": 1},
    "first token is a stop token": {"logit_bias": {"500": 100}, "stop_token_ids": [500]},
    "ignored end": {"logit_bias": {str(EOS): 100}, "ignore_eos": True, "max_tokens": 3},
    "end held back": {"logit_bias": {str(EOS): 100}, "min_tokens": 4, "logprobs": 1},
    "special tokens shown": {"logit_bias": {str(EOS): 100}, "ignore_eos": True, "skip_special_tokens": False},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.3, "seed": 8},
    "several prompts": {"prompt": [TEXT, "Once upon a time", "1 2 3"], "n": 2, "seed": 6, "logprobs": 1},
    "token ids": {"prompt": [504, 253, 1116, 327, 260, 2101], "seed": 6},
    "lists of token ids": {"prompt": [[504, 253, 1116], [327, 260, 2101, 30]], "echo": True},
    "one token prompt": {"prompt": [504], "seed": 6},
    "whole blocks": {"prompt": list(range(1000, 1032)), "seed": 6},
}
CHAT_GRID: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "completion tokens": {"max_tokens": None, "max_completion_tokens": 5, "seed": 3},
    "logprobs": {"logprobs": True, "top_logprobs": 4, "seed": 3},
    "choices": {"n": 2, "seed": 9, "logprobs": True},
    "first token ends it": {"logit_bias": {str(EOS): 100}, "logprobs": True, "top_logprobs": 1},
    "stop string": {"stop": [" ", "!"], "max_tokens": 12, "seed": 1},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": TEXT}]}], "seed": 1},
    "going on": {
        "messages": [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "1, 2, 3,"}],
        "continue_final_message": True,
        "temperature": 0,
    },
}
NOT_STREAMED: dict[str, dict[str, Any]] = {
    "prompt logprobs": {"prompt_logprobs": 2, "seed": 1},
    "prompt logprobs of several": {"prompt": [TEXT, "Once upon a time"], "prompt_logprobs": 0, "echo": True},
}


class Ways:
    """Two routers: one hands requests off, the other does not."""

    def __init__(self, deployment: Deployment, colocated: ManagedProcess) -> None:
        self.deployment = deployment
        self.urls = {"pd": deployment.url, "colocated": f"http://127.0.0.1:{colocated.command[2]}"}
        self.client = httpx.Client(timeout=60)

    def ask(self, way: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer, put together if it was streamed, without what differs between any two answers."""
        response = self.client.post(self.urls[way] + path, json=body)
        assert response.status_code == 200, response.text
        answer = _join_stream(response.text) if body.get("stream") else response.json()
        assert answer.pop("id")
        assert answer.pop("created")
        return answer

    def ask_both(self, path: str, body: dict[str, Any], salt: str) -> list[dict[str, Any]]:
        return [self.ask(way, path, {**body, "cache_salt": f"{salt}/{way}"}) for way in WAYS]


def _join_stream(text: str) -> dict[str, Any]:
    """A streamed answer as one object: text and logprobs of each choice joined, the last of all else."""
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    answer: dict[str, Any] = {"choices": {}}
    for event in map(json.loads, events):
        for choice in event.pop("choices"):
            joined = answer["choices"].setdefault(choice["index"], {"text": "", "logprobs": [], "roles": []})
            delta = choice.get("delta", {})
            joined["text"] += choice.get("text", delta.get("content") or "")
            joined["roles"] += [delta["role"]] if "role" in delta else []
            joined["logprobs"] += [choice["logprobs"]] if choice["logprobs"] else []
            joined["finish_reason"], joined["stop_reason"] = choice["finish_reason"], choice["stop_reason"]
        answer |= event
    return answer


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ways]:
    directory = tmp_path_factory.mktemp("parity")
    policies = ["--prefill-policy", "prefix_aware", "--decode-policy", "prefix_aware"]
    deployment = Deployment(directory, engine_options=["--max-num-batched-tokens", "32"], router_options=policies)
    with deployment:
        colocated = ManagedProcess(
            "colocated",
            ["pdserve.router.main", "--port", str(find_free_port()), "--decode", deployment.address_of("decode")],
            directory,
        )
        colocated.start()
        try:
            colocated.wait_ready()
            ways = Ways(deployment, colocated)
            wait_until(
                lambda: ways.client.get(f"{ways.urls['colocated']}/ready").status_code == 200, "the second router"
            )
            yield ways
            ways.client.close()
        finally:
            colocated.kill()


def build_bodies() -> dict[str, tuple[str, dict[str, Any]]]:
    bodies = {}
    for name, fields in {**COMPLETION_GRID, **NOT_STREAMED}.items():
        bodies[f"completions: {name}"] = (COMPLETIONS, {"prompt": TEXT, "max_tokens": 6, "seed": 11, **fields})
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}]
    for name, fields in CHAT_GRID.items():
        bodies[f"chat: {name}"] = (CHAT, {"messages": messages, "max_tokens": 6, "seed": 11, **fields})
    return bodies


def find_differences(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """Where two answers differ, as paths with both values."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted({*one, *other}, key=str):
            yield from find_differences(one.get(key), other.get(key), f"{path}.{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, pair in enumerate(zip(one, other, strict=True)):
            yield from find_differences(*pair, f"{path}[{index}]")
    elif one != other:
        yield f"{path}: {one!r} and {other!r}"


@pytest.mark.parametrize("stream", [False, True], ids=["cold", "warm and streamed"])
def test_every_field_equals_the_colocated_answer(ways: Ways, stream: bool) -> None:
    """The second time everything is in the caches; prompt logprobs are not available with stream."""
    bodies = build_bodies()
    for _, body in bodies.values():
        if stream and "prompt_logprobs" not in body:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
    with ThreadPoolExecutor(8) as pool:
        asked = {name: pool.submit(ways.ask_both, path, body, salt=name) for name, (path, body) in bodies.items()}
    differences = {name: list(find_differences(*future.result())) for name, future in asked.items()}
    assert {name: found for name, found in differences.items() if found} == {}
    assert ways.deployment.router.get_metric("pdserve_router_decode_recomputed_prompts_total") == 0


def test_case_34_cached_tokens_are_none_when_cold_and_the_whole_blocks_when_warm(ways: Ways) -> None:
    prompt = list(range(3000, 3050))
    for way in WAYS:
        body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "cache_salt": f"case 34/{way}"}
        usages = [ways.ask(way, COMPLETIONS, body)["usage"] for _ in range(2)]
        cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
        assert cached == [0, 48], way


def test_case_35_first_token_has_logprobs_of_its_own(ways: Ways) -> None:
    body = {"prompt": TEXT, "logprobs": 5, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    (choice,) = ways.ask("pd", COMPLETIONS, body)["choices"]
    logprobs = choice["logprobs"]
    assert {name: len(values) for name, values in logprobs.items()} == dict.fromkeys(logprobs, 8)
    # Greedy: each token is the likeliest of its alternatives.
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert max(top.values()) == logprob == top[token]


def test_case_36_echoed_logprobs_are_those_of_the_prompt(ways: Ways) -> None:
    prompt = [504, 253, 1116, 327, 260, 2101]
    body = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 1, "temperature": 0}
    (choice,) = ways.ask("pd", COMPLETIONS, body)["choices"]
    echoed = choice["logprobs"]["token_logprobs"]
    assert echoed[0] is None
    for length in range(1, len(prompt)):
        forced = {"prompt": prompt[:length], "prompt_logprobs": 0, "logprobs": 5, "max_tokens": 1, "temperature": 0}
        (one,) = ways.ask("pd", COMPLETIONS, forced)["choices"]
        assert [
            entry[str(token)]["logprob"]
            for entry, token in zip(one["prompt_logprobs"][1:], prompt[1:length], strict=True)
        ] == echoed[1:length]


def test_instances_tell_a_prefix_aware_router_what_their_caches_hold(ways: Ways) -> None:
    router = ways.deployment.router
    wait_until(
        lambda: router.get_metric("pdserve_router_instance_prefix_is_exact") == 2, "both instances telling their caches"
    )
    metrics = ways.client.get(f"{ways.urls['colocated']}/metrics").text
    assert "pdserve_router_instance_prefix_is_exact{" not in metrics, "nobody asked"
