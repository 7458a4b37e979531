"""The router's own cost, with instances that only replay tokens: ``python benchmarks/router all``.

Each part prints a table of docs/router.md. Leave the machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import os

import memory
import slow_client
import streams
import ttft
from replayed import OTHER_CORES

_PARTS = ("ttft", "streams", "thousand", "memory", "slow-client")
_CASES = ((64, 10.0), (256, 40.0), (64, 0.0), (256, 0.0))
"""6,400 tokens/s twice, then as fast as the instance goes."""
_THOUSAND = ((1000, 200.0),)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("all", *_PARTS), help="what to measure")
    parser.add_argument("--rounds", type=int, default=1000, help="requests of each kind for ttft")
    parser.add_argument("--tokens", type=int, default=400, help="of each stream; a quarter with a thousand")
    parser.add_argument("--requests", type=int, default=100_000, help="for memory")
    parser.add_argument("--joins", type=int, default=100, help="for memory; at most 250")
    options = parser.parse_args()
    os.sched_setaffinity(0, OTHER_CORES)
    tables = {
        "ttft": lambda: ttft.run(options.rounds),
        "streams": lambda: streams.run(_CASES, options.tokens),
        "thousand": lambda: streams.run(_THOUSAND, options.tokens // 4),
        "memory": lambda: memory.run(options.requests, options.joins),
        "slow-client": lambda: slow_client.run(options.tokens),
    }
    for name in _PARTS if options.part == "all" else (options.part,):
        print(f"{name}\n\n{tables[name]()}\n", flush=True)


if __name__ == "__main__":
    main()
