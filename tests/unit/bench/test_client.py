from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from events import ScriptedServer, answer, streamed, token

from pdserve.bench.client.client import BenchClient
from pdserve.bench.client.discovery import find_model
from pdserve.bench.client.load import LoadPlan, run_load
from pdserve.bench.client.settings import TargetSettings, base_url
from pdserve.bench.measure.samples import RequestSample
from pdserve.bench.workload.requests import BenchRequest
from pdserve.errors import ConfigError

Respond = Callable[[dict[str, Any]], httpx.Response]


def send(respond: Respond, *requests: BenchRequest, **settings: Any) -> tuple[list[RequestSample], ScriptedServer]:
    server = ScriptedServer(respond)
    target = TargetSettings(**settings)
    plan = LoadPlan(requests or [BenchRequest(3, "word")], [0.0] * max(len(requests), 1))
    samples = run_load(lambda: BenchClient("http://s", "m", target, server), plan, label="t", progress=False)
    return samples, server


def whole(body: dict[str, Any]) -> httpx.Response:
    return streamed(*answer(body["max_tokens"]))


def raises(error: Exception) -> Respond:
    def respond(body: dict[str, Any]) -> httpx.Response:
        raise error

    return respond


def test_what_is_sent_and_what_comes_back() -> None:
    (sample,), server = send(whole, BenchRequest(5, "two words"))
    assert sample.failure is None
    assert (sample.num_prompt_tokens, sample.num_output_tokens, len(sample.event_times_s)) == (7, 5, 5)
    assert sample.sent_s <= sample.event_times_s[0] <= sample.end_s
    assert server.paths == ["/v1/completions"]
    assert server.bodies == [
        {
            "model": "m",
            "prompt": "two words",
            "max_tokens": 5,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
    ]


def test_chat_wraps_prompts_and_leaves_conversations() -> None:
    messages = ({"role": "system", "content": "s"}, {"role": "user", "content": "u"})
    requests = (BenchRequest(3, "word"), BenchRequest(3, messages=messages))
    _, server = send(whole, *requests, endpoint="chat", ignore_eos=False, extra_body={"temperature": 1.0, "top_k": 5})
    assert server.paths == ["/v1/chat/completions"] * 2
    by_content = {str(body["messages"][0]["role"]): body for body in server.bodies}
    assert by_content["user"]["messages"] == [{"role": "user", "content": "word"}]
    assert by_content["system"]["messages"] == list(messages)
    assert "ignore_eos" not in by_content["user"]
    assert (by_content["user"]["temperature"], by_content["user"]["top_k"]) == (1.0, 5)


@pytest.mark.parametrize(
    ("respond", "kind", "message"),
    [
        (raises(httpx.ConnectError("refused")), "connect", "refused"),
        (raises(httpx.ConnectTimeout("slow")), "connect", "no connection within 10 s: slow"),
        (raises(httpx.ReadError("")), "disconnected", "broke after 0 tokens: ReadError"),
        (lambda body: streamed(token(), httpx.ReadError("reset")), "disconnected", "broke after 1 tokens: reset"),
        (lambda body: streamed(token(), httpx.RemoteProtocolError("cut")), "disconnected", "broke after 1 tokens: cut"),
        (lambda body: streamed(token()), "cut_short", "without a finish reason"),
        (lambda body: streamed(*answer(2)), "cut_short", "2 of 3 tokens"),
        (lambda body: httpx.Response(503, json={"error": {"message": "no instance"}}), "http_503", "no instance"),
        (lambda body: httpx.Response(200, json={}), "not_a_stream", "application/json"),
    ],
)
def test_every_way_of_losing_a_request_has_a_name(respond: Respond, kind: str, message: str) -> None:
    (sample,), _ = send(respond)
    assert sample.failure is not None
    assert sample.failure.kind == kind
    assert message in sample.failure.message
    assert sample.end_s >= sample.sent_s


def test_one_that_takes_too_long_is_lost() -> None:
    class Endless(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            await asyncio.Event().wait()
            raise AssertionError

    target = TargetSettings(request_timeout_s=0.1)
    plan = LoadPlan([BenchRequest(3, "word")], [0.0])
    (sample,) = run_load(lambda: BenchClient("http://s", "m", target, Endless()), plan, label="t", progress=False)
    assert sample.failure is not None
    assert (sample.failure.kind, sample.failure.message) == ("timeout", "no whole answer within 0.1 s")


def test_a_lost_request_takes_no_other_with_it() -> None:
    requests = [BenchRequest(length, "word") for length in (3, 4, 5, 6)]
    samples, _ = send(lambda body: httpx.Response(500) if body["max_tokens"] == 4 else whole(body), *requests)
    assert [sample.failure.kind if sample.failure else None for sample in samples] == [None, "http_500", None, None]
    assert [sample.num_output_tokens for sample in samples] == [3, 0, 5, 6]


def test_the_key_is_sent_and_nothing_is_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_API_KEY", "secret")
    headers: list[httpx.Headers] = []

    class Listening(ScriptedServer):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            headers.append(request.headers)
            return await super().handle_async_request(request)

    client = lambda: BenchClient("http://s", "m", TargetSettings(), Listening(whole))  # noqa: E731
    run_load(client, LoadPlan([BenchRequest(3, "word")], [0.0]), label="t", progress=False)
    assert headers[0]["authorization"] == "Bearer secret"
    assert headers[0]["accept-encoding"] == "identity"


# --- before the run -------------------------------------------------------------------------------------


def models(content: Any, status: int = 200) -> httpx.MockTransport:
    return httpx.MockTransport(lambda request: httpx.Response(status, json=content))


def test_the_first_model_is_taken_unless_one_is_named() -> None:
    transport = models({"data": [{"id": "a"}, {"id": "b"}]})
    assert find_model("http://s", None, transport=transport) == "a"
    assert find_model("http://s", "b", transport=transport) == "b"
    with pytest.raises(ConfigError, match="--model: http://s does not serve 'c'; it serves a, b"):
        find_model("http://s", "c", transport=transport)


@pytest.mark.parametrize(
    ("transport", "message"),
    [
        (models({}, 404), "answers with status 404"),
        (models([]), "does not list models"),
        (models({"data": [1]}), "does not list models"),
        (models({"data": []}), "serves no model"),
        (httpx.MockTransport(lambda request: httpx.Response(200, text="<html>")), "does not list models"),
    ],
)
def test_a_server_that_is_none(transport: httpx.MockTransport, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_model("http://s", None, transport=transport)


def test_a_server_that_is_not_there() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("Connection refused")

    with pytest.raises(ConfigError, match="cannot be reached: Connection refused; is the server up"):
        find_model("http://s", None, transport=httpx.MockTransport(refuse))


@pytest.mark.parametrize("url", ["http://a:1", "http://a:1/", "http://a:1/v1", "http://a:1/v1/"])
def test_addresses_are_taken_with_and_without_v1(url: str) -> None:
    assert base_url(url) == "http://a:1"


@pytest.mark.parametrize(
    "url", ["", "a:1", "ftp://a", "http://", "http://a:0", "http://a:99999", "http://a?b", "http://a:x"]
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ConfigError, match="is no address of a server"):
        base_url(url)
