"""``pdserve bench``: the subcommands that measure. Each lives in a module of its own under `pdserve.bench`."""

from __future__ import annotations

import difflib
import importlib
import signal
import sys
from collections.abc import Sequence

from pdserve.errors import ConfigError

BENCHMARKS = {
    "latency": "one batch in this process: first token, decode steps, share of the floor",
    "throughput": "many requests in this process",
    "serve": "requests to a running server: latencies, throughput, goodput",
    "sweep": "rates, prefill:decode splits and hand-off thresholds, to the best goodput",
    "handoff": "each connector's hand-off of KV, beside one memcpy of the same bytes",
    "compare": "the same work on the same cores for pdserve, vLLM, llama.cpp and transformers",
    "perplexity": "how well a model predicts a text, and what quantised weights cost it",
    "floors": "what this machine's memory and arithmetic allow for a model",
}
"""Name and purpose; the module `pdserve.bench.<name>` has a ``run(argv) -> exit status``."""

_INTERRUPTED_STATUS = 130


def run(argv: Sequence[str]) -> int:
    """Run a benchmark; returns the exit status.

    Raises:
        ConfigError: there is no such benchmark, or what it raises itself.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(_help_text())
        return 0 if argv else 2
    name, *rest = argv
    if name not in BENCHMARKS:
        nearest = difflib.get_close_matches(name, BENCHMARKS, n=1, cutoff=0.0)[0]
        raise ConfigError(f"unknown benchmark {name}; the nearest known one is {nearest} (pdserve bench --help)")
    # Whoever limits a run's time ends it so; what was made for it, gigabytes in shared memory maybe, goes first.
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        status: int = importlib.import_module(f"pdserve.bench.{name}").run(rest)
    except KeyboardInterrupt:
        print("interrupted; nothing was measured to its end", file=sys.stderr)
        return _INTERRUPTED_STATUS
    finally:
        signal.signal(signal.SIGTERM, previous)
    return status


def _help_text() -> str:
    width = max(map(len, BENCHMARKS))
    lines = [f"  {name:<{width}}  {purpose}" for name, purpose in BENCHMARKS.items()]
    return "\n".join(
        [
            "usage: pdserve bench NAME [--option value ...]",
            "",
            "Measure a service, an engine or this machine. Exit status 1: some requests were lost.",
            "",
            "benchmarks:",
            *lines,
            "",
            "pdserve bench NAME --help tells more; docs/benchmarks.md says what each figure means.",
        ]
    )
