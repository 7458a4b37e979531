"""Thousands of requests through real processes, with clients that leave and instances that are killed.

    python tests/soak/soak.py --connector shared_storage --requests 10000 --prefill 2 --decode 2 --kills 4

Every client that stays must get the tokens one engine gives alone, or a plain error; afterwards no block may be
held, no instance may have died by anything but the script's own kills, and the last line says what was counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from processes import Deployment
from tiny_model import build_tiny_model

from pdserve.engine import LLM, SamplingParams


@dataclass
class Visit:
    """One request, and what came of it."""

    index: int
    prompt: list[int]
    max_tokens: int
    temperature: float
    leaves_after: int | None
    text: str = ""
    num_events: int = 0
    outcome: str = "unfinished"

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(temperature=self.temperature, seed=self.index, max_tokens=self.max_tokens)


def plan_visits(count: int) -> list[Visit]:
    rng = random.Random(11)
    shared = [[rng.randrange(100, 40000) for _ in range(400)] for _ in range(8)]
    visits = []
    for index in range(count):
        prompt = [rng.randrange(100, 40000) for _ in range(rng.choice((1, 7, 15, 16, 17, 32, 40, 90)))]
        if rng.random() < 0.4:
            prompt = rng.choice(shared)[: rng.randrange(1, 400)] + prompt
        leaves_after = rng.randrange(0, 8) if rng.random() < 0.2 else None
        visits.append(Visit(index, prompt, rng.choice((1, 2, 4, 8, 16)), rng.choice((0.0, 1.0)), leaves_after))
    return visits


async def pay_visit(client: httpx.AsyncClient, visit: Visit) -> None:
    body = {
        "prompt": visit.prompt,
        "max_tokens": visit.max_tokens,
        "temperature": visit.temperature,
        "seed": visit.index,
        "stream": True,
    }
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                error = json.loads(await response.aread())["error"]
                visit.outcome = f"error {response.status_code} {error['code']}"
                return
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    visit.outcome = f"error in stream {event['error']['code']}"
                    return
                for choice in event["choices"]:
                    visit.text += choice["text"]
                    visit.num_events += 1
                    if choice["finish_reason"]:
                        visit.outcome = choice["finish_reason"]
                if visit.leaves_after is not None and visit.num_events > visit.leaves_after:
                    visit.outcome = "left"
                    return
    except httpx.HTTPError as error:
        visit.outcome = f"transport {type(error).__name__}"


async def run_clients(url: str, visits: list[Visit], num_clients: int, started: list[int]) -> None:
    queue = iter(visits)
    limits = httpx.Limits(max_connections=num_clients)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:

        async def work() -> None:
            for visit in queue:
                started[0] += 1
                await pay_visit(client, visit)
                while visit.outcome.startswith("error 503"):  # what a client does: nothing was lost, ask again
                    await asyncio.sleep(0.25)
                    await pay_visit(client, visit)

        await asyncio.gather(*(work() for _ in range(num_clients)))


async def kill_at_times(deployment: Deployment, count: int, total: int, started: list[int]) -> None:
    rng = random.Random(5)
    for i in range(count):
        while started[0] < total * (i + 1) / (count + 2):
            await asyncio.sleep(0.1)
        victim = rng.choice(deployment.instances)
        print(f"{started[0]} requests begun: killing {victim.name}", flush=True)
        victim.kill()
        await asyncio.sleep(0.5)
        victim.start()
        await asyncio.to_thread(victim.wait_ready)


def check(visits: list[Visit], model: Path) -> Counter[str]:
    """Compare with one engine; counts of outcomes and of wrong answers."""
    engine = LLM(str(model), max_num_seqs=64, num_blocks=8192, max_num_batched_tokens=4096)
    counts: Counter[str] = Counter()
    for start in range(0, len(visits), 500):
        chunk = visits[start : start + 500]
        expected = engine.generate([v.prompt for v in chunk], [v.params for v in chunk], use_tqdm=False)
        for visit, answer in zip(chunk, expected, strict=True):
            whole = visit.outcome in ("stop", "length")
            is_right = visit.text == answer.text if whole else answer.text.startswith(visit.text)
            counts[visit.outcome] += 1
            counts["WRONG"] += not is_right or (whole and visit.outcome != answer.finish_reason)
    engine.close()
    return counts


async def soak(args: argparse.Namespace, directory: Path) -> int:
    model = build_tiny_model(directory / "model")
    visits = plan_visits(args.requests)
    options = [f"--connector-option={option}" for option in args.connector_option]
    engine_options = ["--model", str(model), "--connector", args.connector, *options, "--watchdog-interval-s", "1"]
    with Deployment(
        directory,
        num_prefill=args.prefill,
        num_decode=args.decode,
        engine_options=engine_options,
        router_options=["--model", str(model)],
        store_option=args.connector == "shared_storage",
    ) as deployment:
        began, started = time.monotonic(), [0]
        killing = asyncio.create_task(kill_at_times(deployment, args.kills, args.requests, started))
        await run_clients(deployment.url, visits, args.clients, started)
        await killing
        seconds = time.monotonic() - began
        await asyncio.to_thread(deployment.wait_idle, 60.0)
        unexplained = [i.get_metric("pdserve_kv_blocks_unexplained") for i in deployment.instances]
        external = sum(i.get_metric("pdserve_external_cache_hits_total") for i in deployment.decode)
        deaths = sum(i.num_starts - 1 for i in deployment.instances) - args.kills
        dead = [p.name for p in (*deployment.instances, deployment.router) if not p.is_alive]
        statuses = deployment.stop()
    counts = check(visits, model)
    failed = bool(
        counts["WRONG"] or counts["unfinished"] or any(unexplained) or deaths or dead or any(statuses.values())
    )
    print(json.dumps({"connector": args.connector, "topology": f"{args.prefill}P{args.decode}D", **counts}))
    print(
        f"{args.requests} requests in {seconds:.0f} s, {counts['WRONG']} wrong, tokens loaded by decode "
        f"{external:.0f}, unexplained blocks {unexplained}, dead {dead}, statuses {statuses}"
    )
    return int(failed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connector", default="shared_storage")
    parser.add_argument("--connector-option", action="append", default=[])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=1)
    parser.add_argument("--kills", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pdserve-soak-") as directory:
        return asyncio.run(soak(args, Path(directory)))


if __name__ == "__main__":
    sys.exit(main())
