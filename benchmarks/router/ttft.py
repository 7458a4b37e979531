"""What the router adds to the time to first token: the same prompt to an instance directly and through the router.

Directly: one ZMQ message out and its first token's message back. Through the router: a connection that stands, HTTP
and JSON parsed, template and tokenizer where there is text, admission, choice of the instance, the same two messages,
the token made text, and its first event read by the client.
"""

from __future__ import annotations

import socket
import statistics
import time
import uuid
from collections.abc import Callable

import zmq
from replayed import Service, run_service
from stream_clients import build_request

from pdserve.bench.show.tables import format_table
from pdserve.checkpoint import prepare_tokenizer, resolve_model
from pdserve.protocol import AddRequest, Hello, SamplingParams, StepOutputs, decode_instance_message, encode
from pdserve.text import Tokenizer, load_tokenizer

_WORDS = "The house stands on a hill above the river and its windows look to the west. "
_NUM_PROMPT_TOKENS = 128
_NUM_WARMUPS = 100
_DONE = b"0\r\n\r\n"


class DirectClient:
    """Speaks the protocol with one instance."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(f"tcp://{address}")
        self._socket.send(encode(Hello(router_id="bench", session=uuid.uuid4().hex)))
        self._number = 0

    def ask(self, prompt_token_ids: list[int]) -> float:
        """Seconds to the first token."""
        self._number += 1
        request_id = f"direct-{self._number}"
        sampling = SamplingParams(max_tokens=1, seed=1)
        started_s = time.perf_counter()
        self._socket.send(
            encode(AddRequest(request_id=request_id, prompt_token_ids=prompt_token_ids, sampling=sampling))
        )
        while True:
            message = decode_instance_message(self._socket.recv())
            if isinstance(message, StepOutputs) and message.outputs[0].request_id == request_id:
                return time.perf_counter() - started_s

    def close(self) -> None:
        """Leave."""
        self._context.destroy(linger=0)


class HttpClient:
    """One connection to the router, one request at a time."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, request: bytes) -> float:
        """Seconds to the first event."""
        started_s = time.perf_counter()
        self._socket.sendall(request)
        received = b""
        while b"data: " not in received:
            received += self._receive()
        took_s = time.perf_counter() - started_s
        while not received.endswith(_DONE):
            received += self._receive()
        return took_s

    def _receive(self) -> bytes:
        data = self._socket.recv(65536)
        if not data:
            raise RuntimeError("the router closed the connection")
        return data

    def close(self) -> None:
        """Leave."""
        self._socket.close()


def run(num_rounds: int) -> str:
    """The table, from ``num_rounds`` requests of each kind in turn."""
    tokenizer = load_tokenizer(prepare_tokenizer(resolve_model("smollm2-135m-instruct")))
    prompt_ids, text = _build_prompt(tokenizer)
    requests = {
        "token ids": build_request({"prompt": prompt_ids, "max_tokens": 1, "seed": 1}),
        "text": build_request({"prompt": text, "max_tokens": 1, "seed": 1}),
        "chat": build_request(
            {"messages": [{"role": "user", "content": text}], "max_tokens": 1, "seed": 1}, "/v1/chat/completions"
        ),
    }
    with run_service() as service:
        times_s = _measure(service, prompt_ids, requests, num_rounds)
    direct_s = times_s.pop("direct")
    rows = [["ms, p50", "direct", "through the router", "added, p50", "added, p90"]]
    for name, through_s in times_s.items():
        added_s = [through - direct for through, direct in zip(through_s, direct_s, strict=True)]
        p90_s = statistics.quantiles(added_s, n=10)[-1]
        figures = (statistics.median(direct_s), statistics.median(through_s), statistics.median(added_s), p90_s)
        rows.append([f"{name}, {_NUM_PROMPT_TOKENS} tokens", *(f"{1000 * figure:.2f}" for figure in figures)])
    return format_table(rows)


def _build_prompt(tokenizer: Tokenizer) -> tuple[list[int], str]:
    ids = tokenizer.encode(_WORDS * _NUM_PROMPT_TOKENS)[:_NUM_PROMPT_TOKENS]
    return ids, tokenizer.decode(ids)


def _measure(
    service: Service, prompt_ids: list[int], requests: dict[str, bytes], num_rounds: int
) -> dict[str, list[float]]:
    direct = DirectClient(service.instances[0].address)
    through = HttpClient(service.port)
    asks: dict[str, Callable[[], float]] = {"direct": lambda: direct.ask(prompt_ids)}
    for name, request in requests.items():
        asks[name] = lambda request=request: through.ask(request)  # type: ignore[misc]
    times_s: dict[str, list[float]] = {name: [] for name in asks}
    try:
        for number in range(_NUM_WARMUPS + num_rounds):
            for name, ask in asks.items():
                took_s = ask()
                if number >= _NUM_WARMUPS:
                    times_s[name].append(took_s)
    finally:
        direct.close()
        through.close()
    return times_s
