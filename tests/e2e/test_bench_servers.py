"""Servers that a benchmark starts: they end with it, and what goes wrong is said in their own words."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from processes import wait_until

from pdserve.bench.client.client import BenchClient
from pdserve.bench.client.load import LoadPlan, run_load
from pdserve.bench.client.settings import TargetSettings
from pdserve.bench.servers.gguf_copy import prepare_gguf
from pdserve.bench.servers.peers import PeerSettings, plan_transformers
from pdserve.bench.servers.server import ServerPlan, running
from pdserve.bench.workload.requests import BenchRequest
from pdserve.checkpoint import prepare_weights, resolve_model
from pdserve.checkpoint.gguf_file import open_gguf
from pdserve.errors import ConfigError
from pdserve.supervisor.placement import available_cores
from pdserve.text import Tokenizer

MODEL = "smollm2-135m-instruct"
SERVER = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
        self.wfile.write(f"{os.getpid()} {sorted(os.sched_getaffinity(0))}".encode())
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(f"here: http://127.0.0.1:{server.server_port} is it", flush=True)
server.serve_forever()
"""


def plan(code: str, **fields: object) -> ServerPlan:
    fields = {"url_pattern": r"^here: (http://\S+) ", **fields}
    return ServerPlan("mine", [sys.executable, "-c", code], **fields)  # type: ignore[arg-type]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_server_is_pinned_found_by_its_own_words_and_ended() -> None:
    core = available_cores()[-1]
    with running(plan(SERVER), [core]) as server:
        text = httpx.get(server.url).text
        assert text.endswith(f" [{core}]")
        assert server.start_s is not None
    assert not is_alive(int(text.split()[0]))


def test_a_server_that_runs_already_is_left_alone() -> None:
    with running(ServerPlan("theirs", (), "http://127.0.0.1:9"), None) as server:
        assert (server.url, server.start_s) == ("http://127.0.0.1:9", None)


def test_a_server_that_ends_is_quoted() -> None:
    code = "import sys; print('loading'); sys.exit('no such model')"
    with (
        pytest.raises(ConfigError, match="mine ended with status 1 before it answered:\n  loading\n  no such model"),
        running(plan(code), None),
    ):
        pass


def test_a_server_that_never_answers_is_ended() -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(1000)"
    with (
        pytest.raises(ConfigError, match=r"mine did not answer within 1 s:\n  (\d+)") as caught,
        running(plan(code, start_timeout_s=1.0), None),
    ):
        pass
    assert not is_alive(int(caught.value.message.split()[-1]))


def test_a_server_ends_with_a_benchmark_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; import httpx\n"
        "from pdserve.bench.servers.server import ServerPlan, running\n"
        f"plan = ServerPlan('mine', [sys.executable, '-c', {SERVER!r}], url_pattern=r'^here: (http://\\S+) ')\n"
        "with running(plan, None) as server:\n"
        "    print(httpx.get(server.url).text.split()[0], flush=True)\n"
        "    sys.stdin.read()\n"
    )
    benchmark = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with benchmark:
        assert benchmark.stdout is not None
        pid = int(benchmark.stdout.readline())
        assert is_alive(pid)
        benchmark.send_signal(signal.SIGKILL)
    wait_until(lambda: not is_alive(pid), "the server's end")


def test_transformers_answers_static_batches_in_full(tokenizer: Tokenizer) -> None:
    settings = PeerSettings(
        directory=prepare_weights(resolve_model(MODEL), "bfloat16"),
        model_name="m",
        dtype="bfloat16",
        max_model_len=512,
        max_num_seqs=4,
        cores=(available_cores()[0],),
        prefix_caching=False,
    )
    prompts = ["The capital of France is", "One", "a b c d e f g h i j"]
    requests = [BenchRequest(max_tokens=5 + i, prompt=prompt) for i, prompt in enumerate(prompts)]
    target = TargetSettings()
    with running(plan_transformers(sys.prefix, settings), None) as server:
        samples = run_load(
            lambda: BenchClient(server.url, "m", target), LoadPlan(requests, [0.0] * 3), label="t", progress=False
        )
        refused = httpx.post(f"{server.url}/v1/chat/completions", json={})
    assert [sample.failure for sample in samples] == [None] * 3
    assert [sample.num_output_tokens for sample in samples] == [5, 6, 7]
    assert [sample.num_prompt_tokens for sample in samples] == [len(tokenizer.encode(prompt)) for prompt in prompts]
    assert refused.status_code == 400


def test_the_copy_for_llama_cpp_holds_the_very_weights() -> None:
    source = resolve_model(MODEL)
    original, copy = open_gguf(source.path), open_gguf(prepare_gguf(source, "bfloat16"))
    assert set(original.tensors) == set(copy.tensors)
    assert {copy.tensors[name].type.name for name in copy.tensors} == {"BF16", "F32"}
    tokens = "tokenizer.ggml.tokens"
    assert copy.metadata[tokens] == original.metadata[tokens]
    for key in ("general.architecture", "llama.rope.freq_base", "tokenizer.chat_template"):
        assert copy.metadata[key] == original.metadata[key]
    for name in ("blk.0.attn_q.weight", "output_norm.weight"):
        want, got = original.read(name), copy.read(name)
        exact = copy.tensors[name].type.name == "F32"
        assert (want == got).all() if exact else abs(want - got).max() <= abs(want).max() / 256
