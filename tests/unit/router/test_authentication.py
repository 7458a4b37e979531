"""API keys through the whole application."""

from __future__ import annotations

import dataclasses
from typing import Any

import httpx
import openai
import pytest
from api_bench import SETTINGS, with_client
from fake_instances import FakeInstance

from pdserve.protocol import Role
from pdserve.router.config import AccessSettings, AdmissionSettings, RouterSettings
from pdserve.router.keys.api_key import ApiKey, digest_of
from pdserve.router.keys.key_ring import KeyRing

COMPLETIONS = "/v1/completions"
BODY = {"prompt": [5, 6, 7], "max_tokens": 2}
RING = KeyRing([ApiKey("alice", digest_of(b"key-a")), ApiKey("ops", digest_of(b"key-o"), is_admin=True)])
PROTECTED = [
    ("POST", COMPLETIONS),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/any"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/status"),
    ("GET", "/v1/requests/any/timeline"),
    ("GET", "/metrics"),
    ("POST", "/drain"),
    ("GET", "/openapi.json"),
    ("GET", "/nothing/here"),
    ("GET", "/health/"),
    ("GET", "//health"),
]


def ask(
    method: str,
    path: str,
    authorization: str | None = None,
    settings: RouterSettings = SETTINGS,
    body: Any = None,
) -> httpx.Response:
    async def test(client: httpx.AsyncClient) -> httpx.Response:
        headers = {} if authorization is None else {"Authorization": authorization}
        return await client.request(method, f"http://router{path}", json=body, headers=headers)

    answer: httpx.Response = with_client(
        test, decode=[FakeInstance(Role.DECODE, "d0")], settings=settings, key_ring=RING
    )
    return answer


@pytest.mark.parametrize(("method", "path"), PROTECTED)
def test_everything_that_tells_or_does_something_needs_a_key(method: str, path: str) -> None:
    answer = ask(method, path)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == 'Bearer realm="pdserve"'
    assert answer.headers["x-request-id"]
    assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
    assert answer.json()["error"]["code"] == "missing_api_key"
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", ["/", "/health", "/ready"])
def test_what_probes_ask_for_needs_none(path: str) -> None:
    assert ask("GET", path).status_code == 200


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        ("Bearer key-a", 200),
        ("bearer  key-a ", 200),
        ("Bearer key-o", 200),
        ("Bearer key-b", 401),
        ("Bearer key-a x", 401),
        ("Bearer", 401),
        ("Bearer ", 401),
        ("Basic key-a", 401),
        ("key-a", 401),
        ("Bearer " + digest_of(b"key-a").hex(), 401),
        ("Bearer " + "k" * 5000, 401),
    ],
)
def test_only_valid_keys_are_taken(authorization: str, status: int) -> None:
    answer = ask("POST", COMPLETIONS, authorization, body=BODY)
    assert answer.status_code == status
    assert "key-" not in answer.text


def test_wrong_key_says_so_and_the_openai_client_understands() -> None:
    answer = ask("POST", COMPLETIONS, "Bearer key-b", body=BODY)
    assert answer.headers["www-authenticate"] == 'Bearer realm="pdserve", error="invalid_token"'
    assert answer.json()["error"]["code"] == "invalid_api_key"

    async def test(client: httpx.AsyncClient) -> None:
        sdk = openai.AsyncOpenAI(base_url="http://router/v1", api_key="key-b", http_client=client, max_retries=0)
        with pytest.raises(openai.AuthenticationError, match="not valid here"):
            await sdk.models.list()

    with_client(test, decode=[FakeInstance(Role.DECODE, "d0")], key_ring=RING)


def test_bytes_that_are_no_text_are_no_key() -> None:
    async def test(client: httpx.AsyncClient) -> int:
        headers = [(b"authorization", b"Bearer \xff\xfe")]
        return (await client.get("http://router/v1/models", headers=headers)).status_code

    assert with_client(test, decode=[FakeInstance(Role.DECODE, "d0")], key_ring=RING) == 401


def test_metrics_may_be_public() -> None:
    settings = dataclasses.replace(SETTINGS, access=AccessSettings(public_metrics=True))
    assert ask("GET", "/metrics", settings=settings).status_code == 200
    assert ask("GET", "/v1/status", settings=settings).status_code == 401


def test_each_key_has_limits_of_its_own() -> None:
    settings = dataclasses.replace(SETTINGS, admission=AdmissionSettings(key_tokens_per_minute=60))
    body = {"prompt": [5] * 55, "max_tokens": 8}

    async def test(client: httpx.AsyncClient) -> list[int]:
        statuses = []
        for key in ("key-a", "key-a", "key-o", "key-a"):
            answer = await client.post(COMPLETIONS, json=body, headers={"Authorization": f"Bearer {key}"})
            statuses.append(answer.status_code)
        return statuses

    instances = [FakeInstance(Role.DECODE, "d0")]
    assert with_client(test, decode=instances, settings=settings, key_ring=RING) == [200, 429, 200, 429]


def test_drain_needs_an_administrators_key_even_on_this_machine() -> None:
    async def test(client: httpx.AsyncClient) -> list[int]:
        transport: Any = client._transport
        statuses = []
        for host, key in (("127.0.0.1", "key-a"), ("10.0.0.9", "key-o")):
            transport.client = (host, 1)
            answer = await client.post("/drain", headers={"Authorization": f"Bearer {key}"})
            statuses.append(answer.status_code)
        return statuses

    assert with_client(test, decode=[FakeInstance(Role.DECODE, "d0")], key_ring=RING) == [403, 202]


def test_refused_requests_are_counted() -> None:
    async def test(client: httpx.AsyncClient) -> str:
        for key in ("key-a", "key-b", "key-c"):
            await client.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
        return (await client.get("/metrics", headers={"Authorization": "Bearer key-a"})).text

    text = with_client(test, decode=[FakeInstance(Role.DECODE, "d0")], key_ring=RING)
    assert "pdserve_router_unauthorized_requests_total 2.0" in text


def test_key_taken_back_is_refused_at_once() -> None:
    ring = KeyRing([ApiKey("alice", digest_of(b"key-a"))])

    async def test(client: httpx.AsyncClient) -> list[int]:
        headers = {"Authorization": "Bearer key-a"}
        before = (await client.get("/v1/models", headers=headers)).status_code
        ring.replace([ApiKey("alice", digest_of(b"key-b"))])
        return [before, (await client.get("/v1/models", headers=headers)).status_code]

    assert with_client(test, decode=[FakeInstance(Role.DECODE, "d0")], key_ring=ring) == [200, 401]
