"""Steps of the default model with each quantisation of its weights, in turn: ``python benchmarks/quantized_steps.py``.

Ratios that other load on the machine disturbs least: times are the processor's, the least of many tries.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import torch

from pdserve.bench.show.tables import format_ms, format_table
from pdserve.checkpoint import prepare_weights, resolve_model
from pdserve.engine.config import ModelSettings
from pdserve.engine.kv_memory import allocate_kv_cache
from pdserve.engine.models import CausalLM, load_model
from pdserve.kernels.base import AttentionMetadata
from pdserve.kernels.linear_format import LINEAR_FORMATS
from pdserve.kernels.registry import CPP, get_backend
from pdserve.kv_layout import KVCacheSpec

BLOCK_SIZE = 16
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Step:
    """``batch`` requests that compute ``query_len`` tokens each, the last of ``seq_len``."""

    name: str
    batch: int
    query_len: int
    seq_len: int

    @property
    def num_blocks(self) -> int:
        """Blocks of each request."""
        return -(-self.seq_len // BLOCK_SIZE)


STEPS = (
    Step("decode, batch 1, 232 tokens of context", 1, 1, 232),
    Step("decode, batch 32, 232 tokens of context", 32, 1, 232),
    Step("prefill of 512 tokens", 1, 512, 512),
)


def measure_s(model: CausalLM, step: Step, kv_cache: torch.Tensor) -> float:
    """Seconds of processor time for one step, logits of each request's last token included."""
    tables = [list(range(r * step.num_blocks, (r + 1) * step.num_blocks)) for r in range(step.batch)]
    metadata = AttentionMetadata.build([step.query_len] * step.batch, [step.seq_len] * step.batch, tables, BLOCK_SIZE)
    tokens = torch.arange(step.batch * step.query_len)
    started_s = time.process_time()
    hidden = model.forward(tokens, metadata, kv_cache)
    model.compute_logits(hidden[step.query_len - 1 :: step.query_len])
    return time.process_time() - started_s


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=12)
    tries = parser.parse_args().tries
    torch.set_num_threads(1)
    directory = prepare_weights(resolve_model(ModelSettings.model), "bfloat16")
    models = {name: load_model(directory, DTYPE, get_backend(CPP, DTYPE, name)) for name in LINEAR_FORMATS}
    config = next(iter(models.values())).config
    spec = KVCacheSpec(config.num_layers, config.num_kv_heads, config.head_dim, BLOCK_SIZE, "bfloat16")
    kv_cache = allocate_kv_cache(spec, max(step.batch * step.num_blocks for step in STEPS))
    kv_cache.normal_(generator=torch.Generator().manual_seed(0))
    rows = [["ms", *models]]
    for step in STEPS:
        times = {name: [measure_s(model, step, kv_cache)] for name, model in models.items()}
        for _ in range(tries - 1):
            for name, model in models.items():
                times[name].append(measure_s(model, step, kv_cache))
        least = {name: min(values) for name, values in times.items()}
        plain = next(iter(least.values()))
        rows.append([step.name, *(f"{format_ms(value)} ({plain / value:.2f} x)" for value in least.values())])
    print(format_table(rows))


if __name__ == "__main__":
    main()
