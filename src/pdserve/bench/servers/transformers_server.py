"""A server around transformers' ``generate``: requests are gathered into static batches, padded on the left.

This file runs as a program in an environment that has torch and transformers and need not have pdserve, so it
imports nothing of it. It speaks as much of ``/v1/completions`` as a benchmark asks for: streams, greedy, full length.
A batch begins with whatever waits, and nobody joins it before its last request has ended: that is what static
batching is.
"""

from __future__ import annotations

import argparse
import json
import queue
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_GATHER_S = 0.02


@dataclass
class Request:
    """A prompt under way; ``tokens`` carries each token id, then None."""

    token_ids: list[int]
    max_tokens: int
    tokens: queue.SimpleQueue[int | None] = field(default_factory=queue.SimpleQueue)


class BatchStreamer:
    """Gets every step's tokens of a batch from ``generate`` and deals them out to their requests."""

    def __init__(self, batch: list[Request]) -> None:
        self._batch = batch
        self._is_prompt = True
        self._num_sent = 0

    def put(self, value: Any) -> None:
        """Called by ``generate``: once with the prompts, then with the tokens of each step."""
        if self._is_prompt:
            self._is_prompt = False
            return
        self._num_sent += 1
        for request, token_id in zip(self._batch, value.reshape(-1).tolist(), strict=True):
            if self._num_sent <= request.max_tokens:
                request.tokens.put(token_id)
            if self._num_sent == request.max_tokens:
                request.tokens.put(None)

    def end(self) -> None:
        """Called by ``generate`` at its end; every request has had its last token by then."""


class Generator:
    """Runs batches on the main thread: torch's threads belong to the thread that first used them."""

    def __init__(self, model: Any, pad_token_id: int, batch_size: int) -> None:
        self._model = model
        self._pad_token_id = pad_token_id
        self._batch_size = batch_size
        self._waiting: queue.SimpleQueue[Request] = queue.SimpleQueue()

    def add(self, request: Request) -> None:
        """Queue a request; from any thread."""
        self._waiting.put(request)

    def run(self) -> None:
        """Serve for ever."""
        while True:
            batch = [self._waiting.get()]
            while len(batch) < self._batch_size:
                try:
                    batch.append(self._waiting.get(timeout=_GATHER_S))
                except queue.Empty:
                    break
            self._generate(batch)

    def _generate(self, batch: list[Request]) -> None:
        import torch

        longest = max(len(request.token_ids) for request in batch)
        ids = [[self._pad_token_id] * (longest - len(r.token_ids)) + r.token_ids for r in batch]
        mask = [[0] * (longest - len(r.token_ids)) + [1] * len(r.token_ids) for r in batch]
        num_tokens = max(request.max_tokens for request in batch)
        with torch.inference_mode():
            self._model.generate(
                input_ids=torch.tensor(ids),
                attention_mask=torch.tensor(mask),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=self._pad_token_id,
                streamer=BatchStreamer(batch),
            )


class Handler(BaseHTTPRequestHandler):
    """One connection; a thread each."""

    protocol_version = "HTTP/1.1"
    generator: Generator
    tokenizer: Any
    model_name: str

    def do_GET(self) -> None:
        """``/v1/models``."""
        self._send_json(200, {"object": "list", "data": [{"id": self.model_name, "object": "model"}]})

    def do_POST(self) -> None:
        """``/v1/completions``, streamed."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path != "/v1/completions" or not body.get("stream") or not isinstance(body.get("prompt"), str):
            self._send_json(400, {"error": {"message": "only streamed /v1/completions of one text are served"}})
            return
        request = Request(self.tokenizer(body["prompt"])["input_ids"], int(body.get("max_tokens", 16)))
        self.generator.add(request)
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        self._stream(request)

    def _stream(self, request: Request) -> None:
        token_ids: list[int] = []
        sent = ""
        while (token_id := request.tokens.get()) is not None:
            token_ids.append(token_id)
            text = self.tokenizer.decode(token_ids)
            # A character whose bytes are not all there yet is held back.
            new = "" if text.endswith("\ufffd") else text[len(sent) :]
            sent += new
            self._send_event({"choices": [{"index": 0, "text": new, "finish_reason": None}]})
        self._send_event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        usage = {"prompt_tokens": len(request.token_ids), "completion_tokens": len(token_ids)}
        self._send_event({"choices": [], "usage": usage})
        self._send_chunk(b"data: [DONE]\n\n")
        self._send_chunk(b"")

    def _send_event(self, event: dict[str, Any]) -> None:
        self._send_chunk(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _send_chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _send_json(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """No line for each request."""


class Server(ThreadingHTTPServer):
    """Takes a burst of connections; its threads end with the process."""

    request_queue_size = 1024
    daemon_threads = True


def main() -> None:
    """Load the model and serve until the process is ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face directory")
    parser.add_argument("--name", required=True, help="name in the API")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()

    import torch
    import transformers

    torch.set_num_threads(options.threads)
    Handler.tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype))
    pad_token_id = Handler.tokenizer.pad_token_id
    if pad_token_id is None:
        pad_token_id = Handler.tokenizer.eos_token_id or 0
    Handler.generator = Generator(model.eval(), pad_token_id, options.batch_size)
    Handler.model_name = options.name
    threading.Thread(target=Server(("127.0.0.1", options.port), Handler).serve_forever, daemon=True).start()
    Handler.generator.run()


if __name__ == "__main__":
    main()
