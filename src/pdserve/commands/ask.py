"""Asks one question of a running service, and shows the answer as it streams and the way it took."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pdserve import env
from pdserve.commands.screen import Screen
from pdserve.errors import PdserveError

_TIMEOUT_S = 120.0
_TIMELINE_TIMEOUT_S = 2.0
_MAX_TOKENS = 128


class AskError(PdserveError):
    """The service did not answer the question."""


@dataclass(frozen=True)
class Service:
    """A running service. An API key comes from ``PDSERVE_API_KEY``.

    Attributes:
        url: of its router.
        certificate: PEM file with the certificate that it shows, whatever name stands there; None = one that this
            machine trusts.
    """

    url: str
    certificate: str | None = None

    def get_json(self, path: str) -> dict[str, Any]:
        """The answer to a GET.

        Raises:
            AskError: its status is not 200.
            OSError: the service cannot be reached.
        """
        connection = self.connect()
        try:
            connection.request("GET", path, headers=build_headers())
            response = connection.getresponse()
            if response.status != 200:
                raise _error(response)
            found: dict[str, Any] = json.loads(response.read())
            return found
        finally:
            connection.close()

    def connect(self) -> http.client.HTTPConnection:
        """A connection, made when it is used."""
        parts = urllib.parse.urlsplit(self.url)
        host = parts.hostname or ""
        if parts.scheme == "https":
            return http.client.HTTPSConnection(host, parts.port, timeout=_TIMEOUT_S, context=self._build_context())
        return http.client.HTTPConnection(host, parts.port, timeout=_TIMEOUT_S)

    def _build_context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.certificate)
        if self.certificate is not None:
            context.check_hostname = False
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        return context


def build_headers() -> dict[str, str]:
    """Headers of every request."""
    api_key = env.get_api_key()
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


def start_asking(service: Service, prompt: str, screen: Screen) -> None:
    """Ask in a thread of its own, so that the caller goes on watching."""
    threading.Thread(target=_ask_and_tell, args=(service, prompt, screen), name="ask", daemon=True).start()


def _ask_and_tell(service: Service, prompt: str, screen: Screen) -> None:
    try:
        ask(service, prompt, screen)
    except (OSError, http.client.HTTPException, ValueError, AskError) as error:
        screen.say(f"\nthe question could not be answered: {error}")


def ask(service: Service, prompt: str, screen: Screen) -> None:
    """Send ``prompt`` as a chat (as a plain completion to a model without a chat template) and show what comes.

    Raises:
        AskError: the service refused or failed; holds its message.
        OSError: the service cannot be reached.
    """
    model = service.get_json("/v1/models")["data"][0]["id"]
    body = {"model": model, "max_tokens": _MAX_TOKENS, "temperature": 0, "stream": True}
    screen.say(f"\n> {prompt}")
    try:
        request_id = _show_stream(_stream(service, "/v1/chat/completions", {**body, "messages": _user(prompt)}), screen)
    except AskError as error:
        if error.http_status != 400:
            raise
        request_id = _show_stream(_stream(service, "/v1/completions", {**body, "prompt": prompt}), screen)
    path = f"/v1/requests/{urllib.parse.quote(request_id)}/timeline"
    screen.say(f"{describe_way(_get_finished(service, path))}\n(each event: curl {service.url}{path})\n")


def describe_way(timeline: Mapping[str, Any]) -> str:
    """Which instances a request went through, what moved between them and how long each stage took.

    Args:
        timeline: the router's answer about a finished request.
    """
    stages = timeline["stages_ms"]
    names = {leg["role"]: leg["instance_id"] for leg in timeline["instances"]}
    prompt, output = timeline["prompt_tokens"], timeline["completion_tokens"]
    decoder = names.get("decode")
    first = names.get("prefill", decoder)
    lines = [f"\nits way: {first} prefilled {prompt} tokens in {_ms(stages.get('prefill'))}"]
    if decoder is not None and "prefill" in names:
        lines.append(
            f"  {timeline['kv_bytes_moved']:,} bytes of KV went to {decoder}: "
            f"saved in {_ms(stages.get('kv_save'))}, loaded in {_ms(stages.get('kv_load'))}"
        )
        lines.append(f"  hand-off, first token to {decoder}'s first step: {_ms(stages.get('handoff'))}")
    if output > 1:
        lines.append(f"  {decoder or first} decoded {output - 1} tokens in {_ms(stages.get('decode'))}")
    lines.append(f"  first token after {_ms(timeline['ttft_ms'])}, all {output} after {_ms(stages.get('total'))}")
    return "\n".join(lines)


def _ms(duration_ms: float | None) -> str:
    return "an unknown time" if duration_ms is None else f"{duration_ms:.1f} ms"


def _get_finished(service: Service, path: str) -> dict[str, Any]:
    """A request's timeline; the stream's end may come a moment before the router has written it up."""
    deadline_s = time.monotonic() + _TIMELINE_TIMEOUT_S
    while True:
        timeline = service.get_json(path)
        if timeline["status"] == "finished":
            return timeline
        if time.monotonic() >= deadline_s:
            raise AskError(f"its timeline is not complete after {_TIMELINE_TIMEOUT_S:.0f} s")
        time.sleep(0.02)


def _user(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def _show_stream(events: Iterator[dict[str, Any]], screen: Screen) -> str:
    """Show the answer's text as it comes; returns the request's id."""
    request_id = ""
    for event in events:
        if "error" in event:
            raise AskError(event["error"]["message"])
        request_id = event["id"]
        for choice in event["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content")
            screen.write(text or "")
    return request_id


def _stream(service: Service, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    connection = service.connect()
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json", **build_headers()})
        response = connection.getresponse()
        if response.status != 200:
            raise _error(response)
        for line in response:
            data = line.decode().strip().removeprefix("data:").strip()
            if data == "[DONE]":
                return
            if data:
                yield json.loads(data)
    finally:
        connection.close()


def _error(response: http.client.HTTPResponse) -> AskError:
    body = json.loads(response.read())
    error = AskError(body["error"]["message"] if "error" in body else f"status {response.status}")
    error.http_status = response.status
    return error
