"""The answers' shapes, streamed and whole, field by field."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from api_bench import MODEL, load_text, read_events, with_client
from fake_instances import ENGINE_ERROR, FakeInstance, Fault, make_tokens

from pdserve.protocol import Role

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = [5, 6, 7]
MESSAGES = [{"role": "user", "content": "Hi"}]


def pools(**fields: Any) -> dict[str, list[FakeInstance]]:
    return {
        "prefill": [FakeInstance(Role.PREFILL, "p0", cached_tokens=2, **fields)],
        "decode": [FakeInstance(Role.DECODE, "d0")],
    }


def post(path: str, body: dict[str, Any], **instances: list[FakeInstance]) -> httpx.Response:
    async def test(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post(path, json=body)

    answer: httpx.Response = with_client(test, **(instances or pools()))
    assert answer.status_code == 200, answer.text
    return answer


def complete(**body: Any) -> Any:
    return post(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 5, "seed": 3, **body}).json()


def stream(path: str, **body: Any) -> list[Any]:
    answer = post(path, {"stream": True, "max_tokens": 5, "seed": 3, **body})
    assert answer.headers["content-type"].startswith("text/event-stream")
    return read_events(answer.text)


def decode_text(token_ids: list[int]) -> str:
    return load_text()[0].decode(token_ids)


EXPECTED = make_tokens(PROMPT, 3, 5)


def test_completion_has_text_usage_and_finish_reason() -> None:
    answer = complete()
    (choice,) = answer["choices"]
    assert choice["text"] == decode_text(EXPECTED)
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    assert answer["object"] == "text_completion"
    assert answer["model"] == MODEL
    assert answer["id"].startswith("cmpl-")
    assert answer["system_fingerprint"].startswith("fp_")
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def test_streamed_completion_equals_the_whole_one() -> None:
    chunks = stream(COMPLETIONS, prompt=PROMPT, stream_options={"include_usage": True})
    *parts, last = chunks
    assert "".join(part["choices"][0]["text"] for part in parts) == decode_text(EXPECTED)
    assert [part["choices"][0]["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]
    assert all(part["usage"] is None for part in parts)
    assert last["choices"] == []
    assert last["usage"] == complete()["usage"]
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_stream_has_no_usage_unless_asked() -> None:
    assert all("usage" not in chunk for chunk in stream(COMPLETIONS, prompt=PROMPT))


def test_default_is_sixteen_tokens_or_what_fits() -> None:
    assert post(COMPLETIONS, {"prompt": PROMPT}).json()["usage"]["completion_tokens"] == 16
    assert post(COMPLETIONS, {"prompt": [5] * 60}).json()["usage"]["completion_tokens"] == 4


def test_choices_are_in_order_and_differ_and_each_can_be_had_by_its_seed() -> None:
    answer = complete(prompt=[PROMPT, [8, 9]], n=2)
    expected = [
        decode_text(make_tokens(prompt, seed, 5))
        for prompt, seed in ((PROMPT, 3), (PROMPT, 4), ([8, 9], 3), ([8, 9], 4))
    ]
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert len(set(expected)) == 4
    assert answer["usage"]["prompt_tokens"] == 5
    assert answer["usage"]["completion_tokens"] == 20
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    streamed = ["", "", "", ""]
    for chunk in stream(COMPLETIONS, prompt=[PROMPT, [8, 9]], n=2):
        (choice,) = chunk["choices"]
        streamed[choice["index"]] += choice["text"]
    assert streamed == expected


def test_absent_seed_is_drawn_afresh() -> None:
    texts = {complete(seed=None)["choices"][0]["text"] for _ in range(8)}
    assert len(texts) > 1


def test_completion_logprobs_have_one_entry_a_token() -> None:
    logprobs = complete(logprobs=1)["choices"][0]["logprobs"]
    tokenizer = load_text()[0]
    assert logprobs["tokens"] == [tokenizer.token_text(token_id) for token_id in EXPECTED]
    assert logprobs["token_logprobs"] == [-1.0] * 5
    assert [list(top.values()) for top in logprobs["top_logprobs"]] == [[-1.0]] * 5
    text = decode_text(EXPECTED)
    for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
        assert text[offset:].startswith(token)


def test_streamed_logprobs_equal_the_whole_ones() -> None:
    whole = complete(logprobs=1)["choices"][0]["logprobs"]
    streamed: dict[str, list[Any]] = {name: [] for name in whole}
    for chunk in stream(COMPLETIONS, prompt=PROMPT, logprobs=1):
        for name, items in chunk["choices"][0]["logprobs"].items():
            streamed[name] += items
    assert streamed == whole


@pytest.mark.parametrize("prompt", [PROMPT, "Hello, world"])
def test_echo_puts_the_prompt_in_front(prompt: Any) -> None:
    tokenizer = load_text()[0]
    text = tokenizer.decode(prompt, skip_special_tokens=False) if isinstance(prompt, list) else prompt
    answer = complete(prompt=prompt, echo=True)["choices"][0]["text"]
    assert answer.startswith(text)
    assert answer != text
    streamed = stream(COMPLETIONS, prompt=prompt, echo=True)
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == answer


def test_chat_has_message_logprobs_and_usage() -> None:
    answer = post(
        CHAT, {"messages": MESSAGES, "max_completion_tokens": 3, "seed": 3, "logprobs": True, "top_logprobs": 1}
    ).json()
    (choice,) = answer["choices"]
    prompt = load_text()[1].render(MESSAGES)
    expected = make_tokens(prompt, 3, 3)
    assert choice["message"] == {"role": "assistant", "content": decode_text(expected), "refusal": None}
    assert choice["finish_reason"] == "length"
    tokenizer = load_text()[0]
    assert [entry["bytes"] for entry in choice["logprobs"]["content"]] == [
        list(tokenizer.token_bytes(token_id)) for token_id in expected
    ]
    assert all(len(entry["top_logprobs"]) == 1 for entry in choice["logprobs"]["content"])
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")


def test_streamed_chat_begins_with_the_role_and_ends_with_the_reason() -> None:
    chunks = stream(CHAT, messages=MESSAGES)
    first, *rest = [chunk["choices"][0] for chunk in chunks]
    assert first["delta"] == {"role": "assistant", "content": ""}
    content = "".join(choice["delta"].get("content", "") for choice in rest)
    assert content == decode_text(make_tokens(load_text()[1].render(MESSAGES), 3, 5))
    assert [choice["finish_reason"] for choice in rest][-1] == "length"


def test_chat_without_a_limit_goes_up_to_the_context() -> None:
    usage = post(CHAT, {"messages": MESSAGES, "seed": 3}, decode=[LimitedInstance(Role.DECODE, "d0")]).json()["usage"]
    assert usage["total_tokens"] == 64


class LimitedInstance(FakeInstance):
    """Ends at the context limit, as an engine does."""

    def start_leg(self, message: Any) -> Any:
        assert message.sampling.max_tokens is None
        fields = {name: getattr(message.sampling, name) for name in message.sampling.__struct_fields__}
        sampling = type(message.sampling)(**{**fields, "max_tokens": 64 - len(message.prompt_token_ids)})
        return super().start_leg(
            type(message)(request_id=message.request_id, prompt_token_ids=message.prompt_token_ids, sampling=sampling)
        )


def test_stop_string_ends_the_answer_and_aborts_the_leg() -> None:
    stop = decode_text(EXPECTED[2:3])
    instances = pools()
    answer = post(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 5, "seed": 3, "stop": stop}, **instances).json()
    (choice,) = answer["choices"]
    assert choice["text"] == decode_text(EXPECTED[:2])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert answer["usage"]["completion_tokens"] == 3
    (decode,) = instances["decode"]
    assert decode.aborted == [decode.messages[0].request_id]


def test_stop_string_in_the_first_token_never_reaches_decode() -> None:
    instances = pools()
    stop = decode_text(EXPECTED[:1])
    answer = post(COMPLETIONS, {"prompt": PROMPT, "seed": 3, "stop": [stop]}, **instances).json()
    assert answer["choices"][0]["text"] == ""
    assert instances["decode"][0].messages == []


@pytest.mark.parametrize(("include", "num_shown"), [(False, 2), (True, 3)])
def test_stop_token_counts_and_is_shown_only_on_request(include: bool, num_shown: int) -> None:
    answer = complete(stop_token_ids=[EXPECTED[2]], include_stop_str_in_output=include)
    (choice,) = answer["choices"]
    assert choice["text"] == decode_text(EXPECTED[:num_shown])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", EXPECTED[2])
    assert answer["usage"]["completion_tokens"] == 3


def test_error_after_the_stream_began_is_an_event_in_it() -> None:
    decode = FakeInstance(Role.DECODE, "d0", [Fault(error=ENGINE_ERROR, error_after_tokens=1)] * 3)
    body = {"prompt": PROMPT, "max_tokens": 9, "seed": 3, "stream": True}
    *parts, last = read_events(post(COMPLETIONS, body, decode=[decode]).text)
    assert len(parts) == 3
    assert last["error"]["type"] == "server_error"


def test_one_failed_choice_fails_the_request() -> None:
    async def test(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post(COMPLETIONS, json={"prompt": PROMPT, "n": 3})

    faults = [None, *[Fault(error=ENGINE_ERROR)] * 9]
    answer = with_client(test, decode=[FakeInstance(Role.DECODE, "d0", faults)])
    assert answer.status_code == 500


def test_models_tokens_health_ready_and_metrics() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        (model,) = (await client.get("/v1/models")).json()["data"]
        assert (model["id"], model["object"], model["max_model_len"]) == (MODEL, "model", 64)
        assert (await client.get(f"/v1/models/{MODEL}")).json() == model
        tokens = (await client.post("/tokenize", json={"prompt": "Hello <|im_end|>"})).json()
        assert tokens["count"] == len(tokens["tokens"])
        text = (await client.post("/detokenize", json={"tokens": tokens["tokens"]})).json()
        assert text == {"prompt": "Hello <|im_end|>"}
        chat = (await client.post("/tokenize", json={"messages": MESSAGES})).json()
        assert chat["tokens"] == load_text()[1].render(MESSAGES)
        assert (await client.post("/tokenize", json={})).status_code == 400
        assert (await client.post("/detokenize", json={"tokens": [-1]})).status_code == 400
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 200
        await client.post(COMPLETIONS, json={"prompt": PROMPT})
        metrics = (await client.get("/metrics")).text
        assert 'pdserve_router_requests_total{endpoint="completions",outcome="length"} 1.0' in metrics
        assert "pdserve_router_handoffs_total 1.0" in metrics
        assert "pdserve_router_num_requests_running 0.0" in metrics

    with_client(test, **pools())


def test_ready_says_no_without_a_decode_instance() -> None:
    async def test(client: httpx.AsyncClient) -> httpx.Response:
        return await client.get("/ready")

    answer = with_client(test, prefill=pools()["prefill"])
    assert answer.status_code == 503
    assert answer.json()["pools"]["prefill"] == {"configured": 1, "usable": 1}


def test_timeline_by_both_ids_and_request_id_in_every_answer() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        body = {"prompt": PROMPT, "seed": 3}
        answer = await client.post(COMPLETIONS, json=body, headers={"x-request-id": "mine-1"})
        assert answer.headers["x-request-id"] == "mine-1"
        by_id = (await client.get(f"/v1/requests/{answer.json()['id']}/timeline")).json()
        assert (await client.get("/v1/requests/mine-1/timeline")).json() == by_id
        assert [leg["role"] for leg in by_id["instances"]] == ["prefill", "decode"]
        assert by_id["status"] == "finished"
        assert by_id["outcome"] == "length"
        names = [event["name"] for event in by_id["events"]]
        assert names == ["arrived", "tokenized", "prefill_sent", "decode_sent", "finished"]
        answer = await client.post(COMPLETIONS, json={}, headers={"x-request-id": "bad id\x7f"})
        assert answer.status_code == 400
        assert len(answer.headers["x-request-id"]) == 32

    with_client(test, **pools())


def test_clients_request_id_never_reaches_an_instance() -> None:
    instances = pools()

    async def test(client: httpx.AsyncClient) -> None:
        await client.post(COMPLETIONS, json={"prompt": PROMPT}, headers={"x-request-id": "mine-1"})

    with_client(test, **instances)
    for instance in (*instances["prefill"], *instances["decode"]):
        assert all("mine-1" not in message.request_id for message in instance.messages)


def test_prompt_logprobs_are_a_field_of_their_own() -> None:
    async def test(client: httpx.AsyncClient) -> Any:
        return (await client.post(COMPLETIONS, json={"prompt": PROMPT, "prompt_logprobs": 1})).json()

    answer = with_client(test, **pools())
    assert "prompt_logprobs" in answer["choices"][0]
