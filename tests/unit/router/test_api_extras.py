"""best_of, tools, timeouts, sessions and limits of keys, through the whole application."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import api_bench
import httpx
import pytest
from api_bench import SETTINGS, with_client
from fake_instances import FakeInstance, Fault, make_tokens

from pdserve.protocol import Role, TokenLogprobs
from pdserve.router.config import AdmissionSettings
from pdserve.text import ChatTemplate

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = [5, 6, 7]
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
TEMPLATE = (
    "{% for tool in tools or [] %}<tool>{{ tool.function.name }}</tool>{% endfor %}"
    "{% for message in messages %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<call>{{ call.function.arguments.city }}</call>{% endfor %}"
    "{% endfor %}"
)


def post(path: str, body: dict[str, Any], decode: FakeInstance | None = None, **options: Any) -> httpx.Response:
    headers = options.pop("headers", {})

    async def test(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post(path, json=body, headers=headers)

    answer: httpx.Response = with_client(test, decode=[decode or FakeInstance(Role.DECODE, "d0")], **options)
    return answer


def test_best_of_shows_the_likeliest_and_counts_all() -> None:
    class Likely(FakeInstance):
        def _outputs(self, message: Any, fault: Fault) -> Any:
            outputs = super()._outputs(message, fault)
            logprob = {3: -2.0, 4: -0.1, 5: -3.0, 6: -0.5}[message.sampling.seed]
            for index, output in enumerate(outputs):
                entries = [TokenLogprobs(token, logprob, 1, [], []) for token in output.new_token_ids]
                outputs[index] = type(output)(
                    request_id=output.request_id,
                    new_token_ids=output.new_token_ids,
                    logprobs=entries if message.sampling.logprobs is not None else None,
                    finish_reason=output.finish_reason,
                )
            return outputs

    body = {"prompt": PROMPT, "n": 2, "best_of": 4, "seed": 3, "max_tokens": 5}
    answer = post(COMPLETIONS, body, Likely(Role.DECODE, "d0")).json()
    tokenizer, _ = api_bench.load_text()
    expected = [tokenizer.decode(make_tokens(PROMPT, seed, 5)) for seed in (4, 6)]
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert [(choice["index"], choice["logprobs"]) for choice in answer["choices"]] == [(0, None), (1, None)]
    assert answer["usage"]["completion_tokens"] == 20
    assert answer["usage"]["prompt_tokens"] == 3


@pytest.fixture
def tools_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ChatTemplate:
    tokenizer, _ = api_bench.load_text()
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    template = ChatTemplate(tmp_path, tokenizer)
    monkeypatch.setattr(api_bench, "load_text", lambda: (tokenizer, template))
    return template


def rendered(decode: FakeInstance) -> str:
    tokenizer, _ = api_bench.load_text()
    return tokenizer.decode(decode.messages[0].prompt_token_ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"tools": [TOOL]}, True),
        ({"tools": [TOOL], "tool_choice": "auto"}, True),
        ({"tools": [TOOL], "tool_choice": "none"}, False),
        ({"tools": []}, False),
        ({}, False),
    ],
)
def test_tools_are_shown_where_the_template_has_a_place(
    tools_template: ChatTemplate, fields: dict[str, Any], shown: bool
) -> None:
    assert tools_template.takes_tools
    decode = FakeInstance(Role.DECODE, "d0")
    answer = post(CHAT, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, **fields}, decode)
    assert answer.status_code == 200, answer.text
    assert rendered(decode) == ("<tool>get_weather</tool>" if shown else "") + "Hi"


def test_tool_calls_of_earlier_turns_are_shown(tools_template: ChatTemplate) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    decode = FakeInstance(Role.DECODE, "d0")
    assert post(CHAT, {"messages": messages, "max_tokens": 2}, decode).status_code == 200
    assert "<call>Oslo</call>" in rendered(decode)


@pytest.mark.parametrize(
    ("fields", "headers"),
    [({"timeout": 0.05}, {}), ({}, {"X-Request-Timeout": "0.05"}), ({"timeout": 9}, {"X-Request-Timeout": "0.05"})],
)
def test_deadline_of_the_clients_own_is_504(fields: dict[str, Any], headers: dict[str, str]) -> None:
    decode = FakeInstance(Role.DECODE, "d0", faults=[Fault(silent=True)])
    answer = post(COMPLETIONS, {"prompt": PROMPT, **fields}, decode, headers=headers)
    assert answer.status_code == 504
    assert answer.json()["error"]["type"] == "timeout_error"
    assert len(decode.aborted) == 1


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan"])
def test_timeout_header_that_is_none_is_named(value: str) -> None:
    answer = post(COMPLETIONS, {"prompt": PROMPT}, headers={"X-Request-Timeout": value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "X-Request-Timeout"


def test_clients_timeout_never_exceeds_the_routers() -> None:
    decode = FakeInstance(Role.DECODE, "d0")
    post(COMPLETIONS, {"prompt": PROMPT, "timeout": 10**6}, decode, headers={"X-Request-Timeout": "inf"})
    assert 0 < decode.messages[0].timeout_s <= SETTINGS.admission.request_timeout_s


def test_key_beyond_its_limit_is_429_with_the_time_to_come_again() -> None:
    settings = dataclasses.replace(SETTINGS, admission=AdmissionSettings(key_tokens_per_minute=60))

    async def test(client: httpx.AsyncClient) -> list[httpx.Response]:
        return [await client.post(COMPLETIONS, json={"prompt": [5] * 55, "max_tokens": 8}) for _ in range(2)]

    first, second = with_client(test, decode=[FakeInstance(Role.DECODE, "d0")], settings=settings)
    assert first.status_code == 200
    assert second.status_code == 429
    assert 1 <= int(second.headers["retry-after"]) <= 4


def test_session_header_reaches_the_policy_and_no_instance() -> None:
    decode = FakeInstance(Role.DECODE, "d0")
    assert post(COMPLETIONS, {"prompt": PROMPT}, decode, headers={"X-Session-Id": "abc"}).status_code == 200
    assert "abc" not in repr(decode.messages)
    assert post(COMPLETIONS, {"prompt": PROMPT}, headers={"X-Session-Id": "x" * 300}).status_code == 400


def test_drain_is_taken_from_this_machine_only() -> None:
    async def test(client: httpx.AsyncClient) -> list[int]:
        transport: Any = client._transport
        statuses = []
        for host in ("10.0.0.9", "127.0.0.1"):
            transport.client = (host, 1)
            statuses.append((await client.post("/drain")).status_code)
            statuses.append((await client.post(COMPLETIONS, json={"prompt": PROMPT})).status_code)
        return statuses

    assert with_client(test, decode=[FakeInstance(Role.DECODE, "d0")]) == [403, 200, 202, 503]
