"""Everything that only a GPU can show, in one go: ``python tests/gpu/check_gpu.py``; minutes, and no download.

1. kernels: the conformance suite and the graphs' tests, compiled and on the GPU.
2. exactness: answers of a request alone, among others in small chunks, and through prefill and decode engines that
   hand over GPU memory by NIXL (where it is installed).
3. latency: a decode step of a 135-million-parameter model, launched kernel by kernel and replayed as a graph.

``--only NAME`` runs one of them. The last lines say what held; the exit status is 0 if all did.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
KERNEL_TESTS = (
    "tests/conformance/test_kernel_backends.py",
    "tests/unit/kernels/gpu",
    "tests/unit/engine/models/test_triton_model.py",
)
NUM_LAYERS, HIDDEN, INNER, CONTEXT, BLOCK_SIZE = 30, 576, 1536, 512, 16
WARM_UP_STEPS, STEPS = 5, 50


def check_kernels(_: str) -> str:
    """The tests of everything in `pdserve.kernels.gpu`."""
    command = [sys.executable, "-m", "pytest", "-q", "-k", "triton or gpu", *KERNEL_TESTS]
    done = subprocess.run(command, cwd=ROOT, timeout=480, capture_output=True, text=True)
    print(done.stdout[-4000:], done.stderr[-2000:])
    assert done.returncode == 0, "tests failed"
    return done.stdout.strip().splitlines()[-1]


def check_exactness(device: str) -> str:
    """The same tokens in every company."""
    for folder in ("tests/e2e", "tests/unit/engine/models"):
        sys.path.insert(0, str(ROOT / folder))
    from pd_pair import Alone, PDPair
    from tiny_models import build_reference, save

    from pdserve.protocol import SamplingParams

    generator = torch.Generator().manual_seed(0)
    lengths = [1, 15, 16, 17, 64, 100, 129, 200, 300, 300]
    prompts = [torch.randint(3, 131, (length,), generator=generator).tolist() for length in lengths]
    greedy = SamplingParams(max_tokens=40, temperature=0.0)
    seeded = SamplingParams(max_tokens=40, temperature=1.0, seed=7)
    params = [greedy if i % 2 else seeded for i in range(len(prompts))]
    ways = ["alone", "together in chunks of 64 tokens"]
    with tempfile.TemporaryDirectory() as directory:
        model = save(build_reference("llama-gqa3"), Path(directory))
        settings: dict[str, Any] = {"model": str(model), "device": device, "num_blocks": 512}
        alone = Alone(**settings)
        expected = [alone.generate([prompt], one)[0].token_ids for prompt, one in zip(prompts, params, strict=True)]
        alone.close()
        together = Alone(**settings, max_num_batched_tokens=64)
        answers = [together.generate(prompts, params)]
        together.close()
        if importlib.util.find_spec("nixl") is not None:
            pair = PDPair(**settings, connector="nixl")
            answers.append(pair.generate(prompts, params))
            ways.append("through prefill and decode by NIXL")
            assert all(answer.num_external_tokens for answer in answers[-1]), "no KV was handed over"
            pair.close()
    for way, some in zip(ways[1:], answers, strict=True):
        assert [answer.token_ids for answer in some] == expected, f"{way}: other tokens than alone"
    return f"{len(prompts)} requests equal, {', '.join(ways)}"


def measure_latency(device: str) -> str:
    """Milliseconds of a decode step's layers, without and with graphs."""
    if device == "cpu":
        return "nothing to measure on a CPU"
    from pdserve.kernels.gpu.graph_decoder import CudaCapture
    from pdserve.kernels.gpu.triton_backend import TritonBackend

    gpu = torch.device(device)
    lines = ["requests, ms a step by kernels, ms by graph"]
    for batch in (1, 8, 32, 128):
        plain = _measure_steps(TritonBackend(torch.bfloat16, gpu), batch)
        graph = _measure_steps(TritonBackend(torch.bfloat16, gpu, capture=CudaCapture()), batch)
        lines.append(f"{batch:4d} {plain:8.3f} {graph:8.3f}")
    return "\n".join(lines)


def _measure_steps(backend: Any, batch: int) -> float:
    from pdserve.kernels.base import AttentionMetadata, Rotation
    from pdserve.kernels.decoder import DecoderShape, LayerWeights

    shape = DecoderShape(num_heads=9, num_kv_heads=3, head_dim=64, rms_norm_eps=1e-5)

    def tensor(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=torch.bfloat16, device=backend.device).mul(size[-1] ** -0.5)

    def linear(out_features: int, in_features: int) -> Any:
        return backend.prepare_linear(tensor(out_features, in_features), None)

    layers = [
        LayerWeights(
            input_norm=tensor(HIDDEN),
            qkv=linear((9 + 2 * 3) * 64, HIDDEN),
            q_norm=None,
            k_norm=None,
            output=linear(HIDDEN, 9 * 64),
            post_attention_norm=tensor(HIDDEN),
            gate_up=linear(2 * INNER, HIDDEN),
            down=linear(HIDDEN, INNER),
        )
        for _ in range(NUM_LAYERS)
    ]
    decoder = backend.build_decoder(layers, tensor(HIDDEN), shape)
    blocks = CONTEXT // BLOCK_SIZE
    kv_cache = tensor(batch * blocks, NUM_LAYERS, 2, 3, BLOCK_SIZE, 64)
    tables = [list(range(r * blocks, (r + 1) * blocks)) for r in range(batch)]
    metadata = AttentionMetadata.build([1] * batch, [CONTEXT] * batch, tables, BLOCK_SIZE)
    angles = torch.zeros(batch, 64, device=backend.device)
    rotation = Rotation(angles.cos(), angles.sin())
    times_ms = []
    for _ in range(WARM_UP_STEPS + STEPS):
        residual = tensor(batch, HIDDEN)
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        decoder.forward(residual, metadata, rotation, kv_cache, None)
        torch.cuda.synchronize()
        times_ms.append((time.perf_counter() - started_s) * 1000)
    return statistics.median(times_ms[WARM_UP_STEPS:])


CHECKS: dict[str, Callable[[str], str]] = {
    "kernels": check_kernels,
    "exactness": check_exactness,
    "latency": measure_latency,
}


def main() -> int:
    """Run the checks; what fails does not keep the others from running."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CHECKS)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu tries the script itself")
    options = parser.parse_args()
    verdicts = []
    for name in [options.only] if options.only else CHECKS:
        started_s = time.monotonic()
        try:
            verdict, found = "ok", CHECKS[name](options.device)
        except (AssertionError, RuntimeError, subprocess.TimeoutExpired) as error:
            verdict, found = "FAILED", str(error)
        verdicts.append(verdict)
        print(f"{name}: {verdict} in {time.monotonic() - started_s:.0f} s: {found}", flush=True)
    return int("FAILED" in verdicts)


if __name__ == "__main__":
    sys.exit(main())
