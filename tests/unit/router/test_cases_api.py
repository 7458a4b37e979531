"""Cases 30 to 40 from rivals' public reports: what each leg is sent, and what the client is told.

Those that need a real engine (34, 35, 36) stand in ``tests/api_suite`` too.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import api_bench
import httpx
import pytest
from api_bench import MODEL, read_events, with_client
from fake_instances import OVERLOADED, FakeInstance, Fault, make_tokens

from pdserve.protocol import AddRequest, Role

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = [5, 6, 7]
MESSAGES = [{"role": "user", "content": "Hi"}]


@dataclass
class Sent:
    """An answer, and what the two instances were sent for it."""

    answer: httpx.Response
    prefill: list[AddRequest]
    decode: list[AddRequest]
    metrics: str

    @property
    def legs(self) -> tuple[AddRequest, AddRequest]:
        assert self.answer.status_code == 200, self.answer.text
        (prefill,), (decode,) = self.prefill, self.decode
        return prefill, decode

    @property
    def usage(self) -> dict[str, Any]:
        usage: dict[str, Any] = self.answer.json()["usage"]
        return usage


def send(path: str, body: dict[str, Any], **instance: Any) -> Sent:
    prefill = FakeInstance(Role.PREFILL, "p0", cached_tokens=instance.pop("cached_tokens", 0))
    decode = FakeInstance(Role.DECODE, "d0", **instance)

    async def test(client: httpx.AsyncClient) -> Sent:
        answer = await client.post(path, json=body)
        metrics = (await client.get("/metrics")).text
        return Sent(answer, prefill.messages, decode.messages, metrics)

    sent: Sent = with_client(test, prefill=[prefill], decode=[decode])
    return sent


def test_case_30_prompt_leg_is_not_refused_for_min_tokens_and_decode_gets_the_originals() -> None:
    prefill, decode = send(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 50, "min_tokens": 10}).legs
    assert prefill.handoff
    assert not decode.handoff
    assert (decode.sampling.max_tokens, decode.sampling.min_tokens) == (50, 10)


def test_case_31_only_max_completion_tokens_is_one_token_of_prefill_and_the_rest_of_decode() -> None:
    sent = send(CHAT, {"messages": MESSAGES, "max_completion_tokens": 9})
    prefill, decode = sent.legs
    assert prefill.handoff
    assert len(decode.output_token_ids) == 1
    assert decode.sampling.max_tokens == 9
    assert sent.usage["completion_tokens"] == 9


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"stop_token_ids": [10**7]}, 400, "stop_token_ids"),
        ({"stop_token_ids": ["a"]}, 400, "stop_token_ids[0]"),
        ({"stop_token_ids": [2**70]}, 400, "stop_token_ids"),
        ({"model": "other"}, 404, "model"),
        ({"max_tokens": [5]}, 400, "max_tokens"),
        ({"temperature": {}}, 400, "temperature"),
    ],
)
def test_case_32_wrong_values_are_refused_with_the_reason_and_reach_no_instance(
    fields: dict[str, Any], status: int, param: str
) -> None:
    sent = send(COMPLETIONS, {"prompt": PROMPT, **fields})
    assert sent.answer.status_code == status
    assert sent.answer.json()["error"]["param"] == param
    assert sent.prefill == sent.decode == []


def test_case_33_no_decode_instance_is_503_and_a_full_pool_429_with_the_time_to_come_again() -> None:
    async def ask(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post(COMPLETIONS, json={"prompt": PROMPT})

    empty = with_client(ask, prefill=[FakeInstance(Role.PREFILL, "p0")])
    full = with_client(ask, decode=[FakeInstance(Role.DECODE, "d0", faults=[Fault(error=OVERLOADED)])])
    assert (empty.status_code, full.status_code) == (503, 429)
    assert int(empty.headers["retry-after"]) >= 1
    assert int(full.headers["retry-after"]) >= 1


@pytest.mark.parametrize(("cached", "shown"), [(0, 0), (2, 2), (3, 2), (99, 2)])
def test_case_34_cached_tokens_are_the_prompt_legs_and_never_above_the_prompt(cached: int, shown: int) -> None:
    usage = send(COMPLETIONS, {"prompt": PROMPT}, cached_tokens=cached).usage
    assert usage["prompt_tokens_details"]["cached_tokens"] == shown < usage["prompt_tokens"]


def test_case_35_every_token_has_its_logprobs_the_first_one_too() -> None:
    choice = send(COMPLETIONS, {"prompt": PROMPT, "logprobs": 5, "max_tokens": 8}).answer.json()["choices"][0]
    assert [len(values) for values in choice["logprobs"].values()] == [8, 8, 8, 8]
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


def test_case_36_echo_with_logprobs_has_one_entry_for_every_token_and_prompt_logprobs_are_refused_in_streams() -> None:
    refused = send(COMPLETIONS, {"prompt": PROMPT, "prompt_logprobs": 1, "stream": True}).answer
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")
    prefill, decode = send(COMPLETIONS, {"prompt": PROMPT, "echo": True, "logprobs": 2}).legs
    assert (prefill.sampling.prompt_logprobs, decode.sampling.prompt_logprobs) == (2, None)


def test_case_37_template_and_tokeniser_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, template = api_bench.load_text()
    calls: list[str] = []

    def counting(name: str, function: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            calls.append(name)
            return function(*arguments, **named)

        return call

    monkeypatch.setattr(template, "render", counting("render", template.render))
    for name in ("encode", "encode_marked"):
        monkeypatch.setattr(tokenizer, name, counting(name, getattr(tokenizer, name)))
    prefill, decode = send(CHAT, {"messages": MESSAGES, "max_tokens": 4}).legs
    assert calls == ["render", "encode_marked"]
    assert prefill.prompt_token_ids == decode.prompt_token_ids


@pytest.mark.parametrize("stream", [False, True])
def test_case_38_handed_over_token_is_counted_and_shown_once(stream: bool) -> None:
    body = {"prompt": PROMPT, "max_tokens": 6, "seed": 3, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    sent = send(COMPLETIONS, body)
    assert sent.legs
    answers = read_events(sent.answer.text) if stream else [sent.answer.json()]
    text = "".join(choice["text"] for answer in answers for choice in answer["choices"])
    tokenizer, _ = api_bench.load_text()
    assert text == tokenizer.decode(make_tokens(PROMPT, 3, 6))
    assert answers[-1]["usage"]["completion_tokens"] == 6
    assert "pdserve_router_generation_tokens_total 6.0" in sent.metrics


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_case_39_clients_transfer_parameters_are_stripped(path: str) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "messages": MESSAGES, "max_tokens": 4}
    made_up = {"connector": "fake", "transfer_id": "stolen", "do_remote_prefill": True}
    prefill, decode = send(path, {**body, "kv_transfer_params": made_up}).legs
    assert prefill.kv_transfer_params is None
    assert decode.kv_transfer_params is not None
    assert "stolen" not in repr((prefill, decode))


def test_case_40_decode_that_computes_all_prompts_again_is_seen(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "pdserve"):
        sent = send(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 4}, finds_kv=False)
    assert sent.answer.status_code == 200
    assert "pdserve_router_decode_recomputed_prompts_total 1.0" in sent.metrics
    assert any("same connector and the same store?" in record.getMessage() for record in caplog.records)
