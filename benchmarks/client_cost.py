"""How much processor time the benchmark client itself takes for a token: ``python benchmarks/client_cost.py``.

A server in a process of its own writes ready-made events as fast as they are taken; the client reads them exactly as
in ``pdserve bench serve``. What it prints is the client's own processor time, so the server's does not count.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import time
from multiprocessing.connection import Connection

from pdserve.bench.client.client import BenchClient
from pdserve.bench.client.load import LoadPlan, run_load
from pdserve.bench.client.settings import TargetSettings
from pdserve.bench.measure.summary import summarise
from pdserve.bench.workload.requests import BenchRequest

_PAUSE_S = 0.001


def build_event(body: str) -> bytes:
    """One chunk of a chunked response with one event."""
    data = b"data: " + body.encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


def build_answer(num_tokens: int) -> list[bytes]:
    """The pieces of an answer, one a token, each of the size that servers send."""
    head = '{"id":"cmpl-0","object":"text_completion","created":1,"model":"m","choices":'
    token = build_event(head + '[{"index":0,"text":" word","logprobs":null,"finish_reason":null}],"usage":null}')
    last = build_event(head + '[{"index":0,"text":" word","logprobs":null,"finish_reason":"length"}],"usage":null}')
    counts = json.dumps({"prompt_tokens": 1, "completion_tokens": num_tokens})
    usage = build_event(f'{head}[],"usage":{counts}}}')
    return [token] * (num_tokens - 1) + [last + usage + build_event("[DONE]") + b"0\r\n\r\n"]


async def serve(connection: Connection, num_tokens: int) -> None:
    """Answer every request with ``num_tokens`` events, a step each millisecond."""
    pieces = build_answer(num_tokens)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                return
            (length,) = (line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(length.partition(b":")[2]))
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(_PAUSE_S)

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    connection.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()


def run_server(connection: Connection, num_tokens: int) -> None:
    """The server's process."""
    asyncio.run(serve(connection, num_tokens))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--concurrency", type=int, default=32)
    options = parser.parse_args()
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.Process(target=run_server, args=(theirs, options.tokens), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{ours.recv()}"
    requests = [BenchRequest(max_tokens=options.tokens, prompt="word")] * options.requests
    plan = LoadPlan(requests, [0.0] * len(requests), max_concurrency=options.concurrency)
    before_s = time.process_time()
    samples = run_load(lambda: BenchClient(url, "m", TargetSettings()), plan, label="client", progress=False)
    used_s = time.process_time() - before_s
    server.terminate()
    summary = summarise(samples)
    print(f"{summary.num_ok} of {summary.num_requests} requests, {summary.num_output_tokens:,} tokens")
    print(f"{summary.num_output_tokens / used_s:,.0f} tokens a second of the client's processor time")
    print(f"{summary.output_tokens_per_s:,.0f} tokens/s with the server beside it")


if __name__ == "__main__":
    main()
