"""A whole service with every lock on: it serves, it keeps strangers out, and it tells nobody what was said.

Prefill and decode instances with a tiny model, NIXL between them, CURVE on every ZMQ connection, API keys, traces to
a collector, and logs at their most talkative.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from processes import Deployment, wait_until

sys.path.insert(0, str(Path(__file__).parent.parent / "soak"))

from test_tracing import Collector
from tiny_model import build_tiny_model

from pdserve.peers.curve_keys import make_key_pair
from pdserve.router.keys.api_key import ApiKey, digest_of, make_secret
from pdserve.text import Tokenizer

pytest.importorskip("nixl")

MARKER = "Zyxomma petiolatum 4711"
PASSWORD = "correct-horse-battery"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": MARKER}


@dataclass
class LockedService:
    """What the tests need to know of it."""

    directory: Path
    deployment: Deployment
    collector: Collector
    api_key: str
    secrets: list[str]

    def client(self, api_key: str | None = None) -> httpx.Client:
        headers = {"Authorization": f"Bearer {api_key or self.api_key}"}
        return httpx.Client(base_url=self.deployment.url, headers=headers, timeout=60)

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """One of pdserve's commands."""
        return subprocess.run(
            [sys.executable, "-m", "pdserve.cli", *arguments],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=120,
        )

    @property
    def router_keys(self) -> list[str]:
        return [f"--curve-secret-key={self.directory}/router.secret", f"--curve-peer-keys={self.directory}/peers"]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LockedService]:
    directory = tmp_path_factory.mktemp("locked")
    model = build_tiny_model(directory / "tiny")
    for name in ("router", "instances", "stranger"):
        make_key_pair(name, directory)
    # Instances speak with routers and with one another; one file lists both.
    public = [(directory / f"{name}.public").read_text() for name in ("instances", "router")]
    (directory / "peers").write_text(public[0])
    (directory / "allowed").write_text("".join(public))
    api_key = make_secret()
    (directory / "api-keys").write_text(ApiKey("alice", digest_of(api_key.encode())).format())
    collector = Collector()
    engine_options = [
        *("--model", str(model), "--connector", "nixl", "--num-blocks", "256", "--max-model-len", "256"),
        *("--connector-option", f"curve_secret_key={directory}/instances.secret"),
        *("--connector-option", f"curve_peer_keys={directory}/peers"),
        *("--curve-secret-key", f"{directory}/instances.secret", "--curve-peer-keys", f"{directory}/allowed"),
        *("--allowed-peers", "127.0.0.0/8", "--log-level", "debug", "--debug-blocks"),
    ]
    url = collector.url.replace("//", f"//trace:{PASSWORD}@")
    router_options = [
        *("--model", str(model), "--log-level", "debug", "--otlp-endpoint", url),
        *("--api-keys-file", f"{directory}/api-keys"),
        *("--curve-secret-key", f"{directory}/router.secret", "--curve-peer-keys", f"{directory}/peers"),
    ]
    deployment = Deployment(directory, engine_options=engine_options, router_options=router_options, store_option=False)
    secrets = [api_key, PASSWORD]
    secrets += [(directory / f"{name}.secret").read_text().split()[1] for name in ("router", "instances")]
    try:
        with deployment:
            yield LockedService(directory, deployment, collector, api_key, secrets)
    finally:
        collector.close()


def test_a_request_goes_through_both_instances(service: LockedService) -> None:
    body = {"prompt": "One two three four five six seven", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    with service.client() as client:
        answer = client.post(COMPLETIONS, json=body)
        assert answer.status_code == 200, answer.text
        timeline = client.get(f"/v1/requests/{answer.headers['x-request-id']}/timeline").json()
    assert [leg["role"] for leg in timeline["instances"]] == ["prefill", "decode"]
    assert timeline["kv_bytes_moved"] > 0
    assert answer.json()["usage"]["completion_tokens"] == 8


def test_commands_send_their_key_and_speak_encrypted(service: LockedService) -> None:
    doctor = ["doctor", "--router", service.deployment.url]
    good = service.run(*doctor, *service.router_keys, PDSERVE_API_KEY=service.api_key)
    assert good.returncode == 0, good.stdout + good.stderr
    assert "nothing is wrong" in good.stdout
    without_keys = service.run(*doctor)
    assert without_keys.returncode == 1
    assert "401" in without_keys.stdout
    (service.directory / "prompts").write_text("one two three\n")
    bench = ["bench", "serve", "--url", service.deployment.url, "--prompts-file", f"{service.directory}/prompts"]
    measured = service.run(*bench, "--output-tokens", "4", PDSERVE_API_KEY=service.api_key)
    assert measured.returncode == 0, measured.stderr


def test_router_with_a_strange_key_gets_no_instance(service: LockedService) -> None:
    stranger = [
        *("--curve-secret-key", f"{service.directory}/stranger.secret"),
        *("--curve-peer-keys", f"{service.directory}/peers"),
    ]
    with start_router(service, stranger) as url:
        wait_until(lambda: "neither this router's key" in str(get_reasons(url)), "the reason being shown")
        assert httpx.get(f"{url}/ready").status_code == 503
    assert "a connection was refused: 127.0.0.1" in service.deployment.decode[0].log.read_text()


@contextlib.contextmanager
def start_router(service: LockedService, options: list[str]) -> Iterator[str]:
    ready = service.directory / "other-router.json"
    command = [sys.executable, "-m", "pdserve.router.main", "--port", "0", "--ready-file", str(ready), *options]
    command += ["--decode", service.deployment.address_of("decode"), "--log-level", "error"]
    process = subprocess.Popen(command)
    try:
        wait_until(ready.exists, "the router being ready", 90)
        yield json.loads(ready.read_text())["http"]
    finally:
        process.kill()
        process.wait()


def get_reasons(url: str) -> list[str]:
    pools = httpx.get(f"{url}/v1/status").json()["pools"]
    return [instance["reason"] for pool in pools for instance in pool["instances"]]


HOSTILE: list[tuple[str, Any, dict[str, str]]] = [
    (COMPLETIONS, {"prompt": MARKER, "max_tokens": 5}, {}),
    (COMPLETIONS, {"prompt": [MARKER, MARKER], "max_tokens": 5, "echo": True, "logprobs": 2, "n": 2}, {}),
    (COMPLETIONS, {"prompt": MARKER, "max_tokens": 9, "stream": True, "stop": [MARKER]}, {}),
    (COMPLETIONS, {"prompt": MARKER * 300}, {}),
    (COMPLETIONS, {"prompt": MARKER, "suffix": MARKER}, {}),
    (COMPLETIONS, {"prompt": {"text": MARKER}}, {}),
    (COMPLETIONS, {"prompt": MARKER, "model": MARKER}, {}),
    (COMPLETIONS, {"prompt": MARKER, "cache_salt": MARKER, "user": MARKER, "max_tokens": 2}, {}),
    (COMPLETIONS, {"prompt": MARKER, "temperature": MARKER}, {}),
    (COMPLETIONS, {"prompt": MARKER, "logit_bias": {MARKER: 1}}, {}),
    (COMPLETIONS, {"prompt": MARKER, "kv_transfer_params": {"payload": {"path": MARKER}}, "max_tokens": 2}, {}),
    (COMPLETIONS, {"prompt": MARKER, MARKER: MARKER, "max_tokens": 2}, {}),
    (COMPLETIONS, {"prompt": MARKER, "timeout": 0.000001}, {}),
    (COMPLETIONS, {"prompt": MARKER, "max_tokens": 2}, {"X-Session-Id": MARKER, "X-Request-Id": MARKER}),
    (COMPLETIONS, {"prompt": MARKER, "max_tokens": 2}, {"X-Request-Timeout": MARKER, "traceparent": MARKER}),
    (COMPLETIONS, {"prompt": MARKER, "max_tokens": 2}, {"tracestate": f"a={MARKER}", "User-Agent": MARKER}),
    (COMPLETIONS, {"prompt": f"{MARKER} \ud800"}, {}),
    (CHAT, {"messages": [USER], "max_tokens": 5}, {}),
    (CHAT, {"messages": [USER, USER, {"role": MARKER, "content": MARKER}], "max_tokens": 2}, {}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": MARKER, "text": MARKER}]}]}, {}),
    (CHAT, {"messages": [USER], "tools": [{"type": "function", "function": {"name": MARKER}}]}, {}),
    (CHAT, {"messages": [USER], "chat_template_kwargs": {MARKER: MARKER}, "max_tokens": 2}, {}),
    (CHAT, {"messages": MARKER}, {}),
    ("/tokenize", {"prompt": MARKER}, {}),
    ("/tokenize", {"messages": [USER]}, {}),
    ("/detokenize", {"tokens": MARKER}, {}),
]


def send_all(service: LockedService) -> list[int]:
    """Everything of `HOSTILE`, and what a JSON library cannot send; their statuses."""
    statuses = []
    with service.client() as client:
        for path, body, headers in HOSTILE:
            content = json.dumps(body).encode()
            statuses.append(client.post(path, content=content, headers=headers).status_code)
        for content in (f'{{"prompt": "{MARKER}"'.encode(), f'"{MARKER}"'.encode(), MARKER.encode() + b"\xff"):
            statuses.append(client.post(COMPLETIONS, content=content).status_code)
        with client.stream("POST", COMPLETIONS, json={"prompt": MARKER, "stream": True, "max_tokens": 200}) as stream:
            next(stream.iter_raw())  # and leave
    with service.client(MARKER.replace(" ", "-")) as stranger:
        statuses.append(stranger.post(COMPLETIONS, json={"prompt": MARKER}).status_code)
    with socket.create_connection(("127.0.0.1", service.deployment.port)) as raw:
        raw.sendall(MARKER.encode() + b"\r\n\r\n")
        raw.recv(1000)
    return statuses


def read_everything(service: LockedService) -> dict[str, str]:
    """What operators see, by where it stands."""
    seen = {
        process.name: process.log.read_text() for process in (service.deployment.router, *service.deployment.instances)
    }
    with service.client() as client:
        for path in ("/v1/status", "/metrics", "/", "/openapi.json"):
            seen[path] = client.get(path).text
        for request in client.get("/v1/status").json()["recent"]:
            seen[request["id"]] = client.get(f"/v1/requests/{request['id']}/timeline").text
    for instance in service.deployment.instances:
        for path in ("/metrics", "/about", "/debug/blocks"):
            seen[f"{instance.name}{path}"] = httpx.get(f"{instance.ready['http']}{path}").text
    seen["traces"] = "".join(str(request) for request in service.collector.requests)
    return seen


def test_nothing_that_was_said_and_no_secret_is_told_to_operators(service: LockedService, tokenizer: Tokenizer) -> None:
    statuses = send_all(service)
    assert {200, 400, 401, 404, 504} <= set(statuses)
    assert max(status for status in statuses if status != 504) < 500
    wait_until(lambda: service.collector.requests, "traces being sent", 60)
    seen = read_everything(service)
    assert "pdserve_router" in seen["/metrics"]
    assert all("settings" in seen[name] for name in ("router", "prefill-0", "decode-0"))
    assert len(seen["traces"]) > 1000
    token_ids = tokenizer.encode(MARKER, add_special_tokens=False)
    said = [MARKER, MARKER.replace(" ", "-"), "Zyxomma", "petiolatum", str(token_ids)[1:-1]]
    for place, text in seen.items():
        for secret in (*said, *service.secrets):
            assert secret not in text, f"{secret!r} is told by {place}"
    assert "Traceback" not in "".join(seen.values())
