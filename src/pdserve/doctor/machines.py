"""Checks of clocks, shared memory and disks."""

from __future__ import annotations

from pdserve.doctor.facts import Deployment
from pdserve.doctor.findings import Finding
from pdserve.engine.server.about import SHARED_MEMORY

MAX_CLOCK_OFFSET_S = 0.25
"""Beyond it timelines are misleading: hand-offs take a few hundredths of a second."""
_LEAST_FREE_SHARE = 0.05
_PROMPTS_IN_STORE = 8
"""A store that holds fewer prompts of full length than this loses KV before decode has fetched it."""


def check_clocks(deployment: Deployment) -> list[Finding]:
    """All machines' clocks agree."""
    findings = []
    base = deployment.router.clock_offset_s if deployment.router is not None else None
    router_low_s, router_high_s = base or (0.0, 0.0)
    for instance in deployment.instances:
        offset_s = None
        seen = deployment.seen_by_router(instance)
        if instance.clock_offset_s is not None:
            low_s, high_s = instance.clock_offset_s
            # Only what is sure: a slow answer widens the bounds and never makes an offset.
            offset_s = max(low_s - router_high_s, 0.0) + min(high_s - router_low_s, 0.0)
        elif seen is not None and seen.tally.get("least_event_age_ms") is not None:
            # Events that reach the router before they happened: by this much its clock is ahead, at least.
            offset_s = max(0.0, -float(seen.tally["least_event_age_ms"]) / 1000)
        if offset_s is not None and abs(offset_s) > MAX_CLOCK_OFFSET_S:
            direction = "ahead of" if offset_s > 0 else "behind"
            other = "the router's" if deployment.router is not None else "this machine's"
            findings.append(
                Finding(instance.name, f"its clock is {abs(offset_s):.1f} s {direction} {other}: timelines mislead",
                        "let NTP or chrony set the clocks of all machines")
            )  # fmt: skip
    return findings


def check_shared_memory(deployment: Deployment) -> list[Finding]:
    """Where KV goes through shared memory, there is enough of it for prompts of full length."""
    findings = []
    for instance in deployment.instances:
        if instance.about is None or instance.ready is None or instance.about.store is None:
            continue
        store = instance.about.store
        needed = _PROMPTS_IN_STORE * instance.ready.limits.max_model_len * instance.ready.identity.kv.token_bytes
        if store.path.startswith(f"{SHARED_MEMORY}/") and 0 < store.total_bytes < needed:
            findings.append(
                Finding(instance.name, f"its store is in shared memory of {_size(store.total_bytes)}; "
                        f"{_PROMPTS_IN_STORE} prompts of full length take {_size(needed)}",
                        "give the container more (docker run --shm-size; an emptyDir of medium Memory), or "
                        "name a store on disk")
            )  # fmt: skip
    return findings


def check_store_room(deployment: Deployment) -> list[Finding]:
    """The store's file system has room."""
    findings = []
    told: set[tuple[str, str]] = set()
    for instance in deployment.instances:
        if instance.about is None or instance.about.store is None:
            continue
        store = instance.about.store
        place = (instance.about.host, store.path)
        if store.total_bytes and store.free_bytes < _LEAST_FREE_SHARE * store.total_bytes and place not in told:
            told.add(place)
            findings.append(
                Finding(instance.name, f"its store {store.path} is full: {_size(store.free_bytes)} of "
                        f"{_size(store.total_bytes)} are free, and KV is evicted before decode fetches it",
                        "make room there, or give the store less with --connector-option max_bytes=…")
            )  # fmt: skip
    return findings


def check_instance_http(deployment: Deployment) -> list[Finding]:
    """What an instance tells over HTTP can be read from here; several checks live from it."""
    return [
        Finding(instance.name, f"its HTTP port {instance.ready.http_port} cannot be read from here",
                "let this machine reach it, or Prometheus cannot either; connectors, stores and clocks stay unchecked")
        for instance in deployment.instances
        if instance.ready is not None and instance.ready.http_port is not None and instance.about is None
    ]  # fmt: skip


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"
