"""Streams: their shape, many at once, and clients that leave: cases 17 and 20."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from target import CHAT, COMPLETIONS, TIMEOUT_S, Target, get_text, join_stream, read_events, unique_text

PROMPT = "The old house stood on a hill above the river. Every evening"
MESSAGES = [{"role": "user", "content": "Tell me about rivers."}]
NUM_STREAMS = 12
NUM_TOKENS = 12


@pytest.mark.parametrize(
    ("path", "fields", "kind"),
    [
        (COMPLETIONS, {"prompt": PROMPT}, "text_completion"),
        (CHAT, {"messages": MESSAGES}, "chat.completion.chunk"),
    ],
)
def test_events_have_one_id_an_end_and_the_usage_last(
    target: Target, path: str, fields: dict[str, Any], kind: str
) -> None:
    body = {**fields, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 6, "ignore_eos": True}
    response = target.post(path, body)
    target.read(response)
    *events, last = read_events(response.text)
    assert {event["object"] for event in events} == {kind}
    assert len({event["id"] for event in [*events, last]}) == 1
    assert all(event.get("usage") is None for event in events if event["choices"][0]["finish_reason"] is None)
    assert [event["choices"][0]["finish_reason"] for event in events if event["choices"]][-1] == "length"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 6
    if path == CHAT:
        assert events[0]["choices"][0]["delta"]["role"] == "assistant"


def test_a_stream_has_no_usage_unless_it_is_asked_for(target: Target) -> None:
    response = target.post(COMPLETIONS, {"prompt": PROMPT, "stream": True, "max_tokens": 3})
    target.read(response)
    assert all(event.get("usage") is None for event in read_events(response.text))


def test_streams_at_once_give_what_each_gives_alone(target: Target) -> None:
    bodies = [
        {"model": target.model, "prompt": f"{number} {PROMPT}", "max_tokens": NUM_TOKENS, "temperature": 0}
        for number in range(NUM_STREAMS)
    ]

    async def ask_all() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=NUM_STREAMS)
        async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits, headers=target.client.headers) as client:
            return await asyncio.gather(
                *(client.post(target.url + COMPLETIONS, json={**body, "stream": True}) for body in bodies)
            )

    streamed = [join_stream(response.text)["choices"][0] for response in asyncio.run(ask_all())]
    alone = [target.ask(COMPLETIONS, body)["choices"][0] for body in bodies]
    assert [get_text(choice) for choice in streamed] == [get_text(choice) for choice in alone]
    assert [choice["finish_reason"] for choice in streamed] == [choice["finish_reason"] for choice in alone]


@pytest.mark.parametrize("num_lines", [0, 1, 4], ids=["before any", "after the first", "in mid-stream"])
def test_case_20_clients_that_leave_free_what_they_had(target: Target, num_lines: int) -> None:
    body = {"model": target.model, "prompt": unique_text(), "stream": True, "max_tokens": 300, "ignore_eos": True}
    for _ in range(5):
        with target.client.stream("POST", target.url + COMPLETIONS, json=body) as response:
            if response.status_code != 200:
                response.read()
                target.read(response)
            lines = response.iter_lines()
            for _ in range(num_lines):
                next(lines)
    answer = target.ask(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 3, "temperature": 0})
    assert answer["usage"]["completion_tokens"] >= 1
    target.wait_idle()
