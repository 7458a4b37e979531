"""Bytes that no honest client sends, to a real router: each is refused, and the next client is served."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from replay_service import PROMPT, Service

MODEL_LINE = b"GET /v1/models HTTP/1.1\r\nHost: router\r\n"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    made = Service(tmp_path_factory.mktemp("hostile"))
    made.add("decode")
    try:
        yield made.start("--max-body-bytes", "20000", "--log-level", "debug").wait_for(0, 1)
    finally:
        made.close()


@pytest.fixture(autouse=True)
def serves_afterwards(service: Service) -> Iterator[None]:
    yield
    assert service.complete(max_tokens=3).choices[0].finish_reason == "length"


def exchange(service: Service, *parts: bytes) -> bytes:
    """Everything that the router answers until it closes the connection or has nothing to say for a while."""
    with socket.create_connection(("127.0.0.1", service.port), timeout=30) as connection:
        for part in parts:
            try:
                connection.sendall(part)
            except (BrokenPipeError, ConnectionResetError):
                break
        answer = b""
        try:
            while part := connection.recv(65536):
                answer += part
                if b"\r\n\r\n" in answer and b"onnection: close" not in answer:
                    break
        except ConnectionResetError:
            pass
        return answer


@pytest.mark.parametrize(
    "parts",
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",),
        (b"\x00" * 1000,),
        (b"GET /v1/models HTTP/9.9\r\n\r\n",),
        (b"GET \xff\xfe HTTP/1.1\r\n\r\n",),
        (MODEL_LINE + b"X: a\r\n b: c\x00\r\n\r\n",),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: -1\r\n\r\n",),
        (b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",),
        (MODEL_LINE, *([b"X-Filler: " + b"x" * 10_000 + b"\r\n"] * 20)),
        (MODEL_LINE + b"X-Endless: ", *([b"x" * 10_000] * 20)),
        (b"GET /", *([b"x" * 10_000] * 20)),
    ],
)
def test_what_is_no_request_is_400_and_the_connection_ends(service: Service, parts: tuple[bytes, ...]) -> None:
    # A router that closes while bytes still come resets the connection, which may eat its answer.
    assert exchange(service, *parts).partition(b"\r\n")[0] in (b"HTTP/1.1 400 Bad Request", b"")


def test_bodies_end_at_their_bound_announced_or_not(service: Service) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: router\r\n"
    announced = exchange(service, head + b"Content-Length: 20001\r\n\r\n")
    assert announced.startswith(b"HTTP/1.1 413 ")
    chunk = b"2710\r\n" + b"x" * 10_000 + b"\r\n"
    assert exchange(service, head + b"Transfer-Encoding: chunked\r\n\r\n", chunk, chunk, chunk).startswith(
        b"HTTP/1.1 413 "
    )


@pytest.mark.parametrize(
    "name",
    [b"../../etc/passwd", b"a b", b"x" * 129, b"%0aforged", b"\xc3\xa9", b"<script>", b"a\tforged"],
)
def test_odd_request_ids_are_replaced_and_never_logged(service: Service, name: bytes) -> None:
    answer = exchange(service, MODEL_LINE + b"X-Request-Id: " + name + b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert name not in answer
    assert name not in service.log.read_bytes()


def test_line_breaks_cannot_get_into_a_request_id(service: Service) -> None:
    answer = exchange(service, MODEL_LINE + b"X-Request-Id: a\rforged: yes\r\n\r\n")
    assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 200 "))
    assert b"forged" not in answer
    assert b"forged" not in service.log.read_bytes()


def test_transfer_parameters_of_a_client_never_reach_an_instance(service: Service, tmp_path: Path) -> None:
    before = service.instances[0].stats["added"]
    forged = {"kv_transfer_params": {"connector": "shared_storage", "transfer_id": "x", "payload": {"path": "/etc"}}}
    answer = service.complete(prompt=PROMPT, max_tokens=3, extra_body=forged)
    assert answer.choices[0].finish_reason == "length"
    stats = service.instances[0].stats
    assert stats["added"] > before
    assert stats["with_kv"] == 0
