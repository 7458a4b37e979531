"""Thousands of requests through real processes, with clients that leave, instances that are killed, and harm done
to what KV goes through.

    python tests/soak/soak.py --connector nixl --requests 10000 --prefill 2 --decode 2 --kills 6 --harms 24

Every client that stays must get the tokens one engine gives alone, or a plain error, and no connection may break;
afterwards no block may be held, no instance may have died by anything but the script's own kills, and none may have
logged a traceback. The last lines say what was counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from media import Medium, build_medium, freeze_one
from processes import Deployment, ManagedProcess
from tiny_model import build_tiny_model
from visits import Visit, check, plan_visits, run_clients


@dataclass(frozen=True)
class Counts:
    """What was seen besides the answers; token and transfer counts are of the instances that lived to the end."""

    num_loaded_tokens: int
    failures: Counter[str]
    leaks: list[str]
    dead: list[str]
    tracebacks: list[str]


async def wait_for_share(share: float, total: int, started: list[int]) -> None:
    while started[0] < total * share:
        await asyncio.sleep(0.1)


async def kill_at_times(deployment: Deployment, count: int, total: int, started: list[int]) -> list[str]:
    """Kill and restart instances, spread over the run; names of those that were found dead before."""
    rng, found_dead = random.Random(5), []
    for i in range(count):
        await wait_for_share((i + 1) / (count + 2), total, started)
        victim = rng.choice(deployment.instances)
        print(f"{started[0]} requests begun: killing {victim.name}", flush=True)
        if not victim.is_alive:
            found_dead.append(victim.name)
        victim.kill()
        await asyncio.sleep(0.5)
        victim.start()
        await asyncio.to_thread(victim.wait_ready)
    return found_dead


async def harm_at_times(medium: Medium, count: int, total: int, started: list[int]) -> None:
    """Do every kind of harm in turn, spread over the run."""
    for i in range(count):
        await wait_for_share((i + 1) / (count + 2), total, started)
        harm = medium.harms[i % len(medium.harms)]
        print(f"{started[0]} requests begun: {harm.name}", flush=True)
        await asyncio.to_thread(harm.inflict)


def find_leaks(instance: ManagedProcess) -> list[str]:
    """What an idle instance still holds, or cannot explain."""
    report = httpx.get(f"{instance.ready['http']}/debug/blocks", timeout=10).json()
    return [f"{instance.name}: {what}" for what in (*report["holdings"], *report["mistakes"])]


def count_failures(instance: ManagedProcess) -> Counter[str]:
    """Transfers that failed, by kind."""
    failures: Counter[str] = Counter()
    for line in httpx.get(f"{instance.ready['http']}/metrics", timeout=10).text.splitlines():
        found = re.match(r'pdserve_kv_transfer_failures_total\{.*kind="(\w+)".*\} (\S+)', line)
        if found:
            failures[found[1]] += int(float(found[2]))
    return failures


async def run_service(args: argparse.Namespace, deployment: Deployment, medium: Medium, visits: list[Visit]) -> Counts:
    """Clients, kills and harm at once; then everything is looked at and stopped."""
    started = [0]
    killing = asyncio.create_task(kill_at_times(deployment, args.kills, args.requests, started))
    harming = asyncio.create_task(harm_at_times(medium, args.harms, args.requests, started))
    await run_clients(deployment.url, visits, args.clients, started)
    dead = await killing
    await harming
    await asyncio.to_thread(deployment.wait_idle, 90.0)
    loaded = sum(i.get_metric("pdserve_external_cache_hits_total") for i in deployment.decode)
    failures = sum((count_failures(instance) for instance in deployment.instances), Counter[str]())
    leaks = [leak for instance in deployment.instances for leak in find_leaks(instance)]
    dead += [p.name for p in (*deployment.instances, deployment.router) if not p.is_alive]
    statuses = await asyncio.to_thread(deployment.stop)
    dead += [f"{name} ended with {status}" for name, status in statuses.items() if status]
    logs = [process.log.read_text(errors="replace") for process in (*deployment.instances, deployment.router)]
    tracebacks = [log[log.index("Traceback") :][:2000] for log in logs if "Traceback" in log]
    return Counts(int(loaded), failures, leaks, dead, tracebacks)


async def soak(args: argparse.Namespace, directory: Path) -> int:
    model = build_tiny_model(directory / "model")
    visits = plan_visits(args.requests)
    medium = build_medium(args.connector, directory, args.prefill)
    options = [f"--connector-option={option}" for option in args.connector_option]
    engine_options = ["--model", str(model), "--connector", medium.connector, *options, "--debug-blocks"]
    deployment = Deployment(
        directory,
        num_prefill=args.prefill,
        num_decode=args.decode,
        engine_options=engine_options,
        router_options=["--model", str(model)],
        store_option=False,
    )
    medium.equip(deployment)
    medium.harms.append(freeze_one(deployment))
    try:
        with deployment:
            counts = await run_service(args, deployment, medium, visits)
    finally:
        medium.close()
    outcomes = check(visits, model)
    print(json.dumps({"connector": args.connector, "topology": f"{args.prefill}P{args.decode}D", **outcomes}))
    print(
        f"{args.requests} requests, {args.kills} kills, {args.harms} harms: {outcomes['WRONG']} wrong, "
        f"{len(counts.leaks)} leaks, dead {counts.dead}, {len(counts.tracebacks)} tracebacks; tokens loaded by decode "
        f"{counts.num_loaded_tokens}, failed transfers {dict(counts.failures)}"
    )
    errors = sorted({visit.error for visit in visits if visit.error})
    for what in (*errors[:5], *counts.leaks[:5], *counts.tracebacks[:3]):
        print(what)
    num_broken_off = sum(count for name, count in outcomes.items() if name.startswith("transport"))
    return int(bool(outcomes["WRONG"] or num_broken_off or counts.leaks or counts.dead or counts.tracebacks))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connector", default="shared_storage")
    parser.add_argument("--connector-option", action="append", default=[])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=1)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--harms", type=int, default=0, help="how often what KV goes through is harmed")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pdserve-soak-") as directory:
        return asyncio.run(soak(args, Path(directory)))


if __name__ == "__main__":
    sys.exit(main())
