"""Checks of the KV's way from prefill to decode instances."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from pdserve.doctor.facts import Deployment, InstanceFacts
from pdserve.doctor.findings import Finding
from pdserve.engine.server.about import About
from pdserve.protocol import Role

_PLACES = ("path", "host", "port", "server_url", "shm_name", "namespace", "key_prefix")
"""Options of connectors that say where KV lies: those that must be the same on both sides."""
_LEASES = {"nixl": ("lease_s", 60.0)}
"""Option and default of the time for which a connector keeps what it handed out."""
_FAILURE = re.compile(r'pdserve_kv_transfer_failures_total\{.*kind="([^"]+)"')
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_MANY = 20
_BAD_SHARE = 0.1
_FAILURE_SHARE = 0.01


def check_connectors(deployment: Deployment) -> list[Finding]:
    """Both pools use the same connector, and one that moves KV."""
    prefill = {i.ready.connector for i in deployment.pool(Role.PREFILL) if i.ready is not None}
    findings = []
    for instance in deployment.instances:
        if instance.ready is None or not prefill:
            continue
        connector, theirs = instance.ready.connector, ", ".join(sorted(prefill))
        if connector == "null":
            findings.append(
                Finding(instance.name, "its connector is null: no KV moves, and decode computes every prompt again",
                        "start both pools with --connector shared_storage (or redis, nixl, …)")
            )  # fmt: skip
        elif instance.role is Role.DECODE and connector not in prefill:
            findings.append(
                Finding(instance.name, f"its connector is {connector}, the prefill pool's is {theirs}",
                        "start both pools with the same --connector")
            )  # fmt: skip
    return findings


def check_store_places(deployment: Deployment) -> list[Finding]:
    """Both sides' connectors look at the same place, and each can use it."""
    findings = []
    for instance in deployment.instances:
        store = instance.about.store if instance.about is not None else None
        if store is not None and not store.is_usable:
            findings.append(
                Finding(instance.name, f"it cannot read and write its store {store.path}",
                        "mount it there and give this user the right to write, or name another with "
                        "--connector-option path=…")
            )  # fmt: skip
        server = instance.about.server if instance.about is not None else None
        if server is not None and not server.is_reachable:
            findings.append(
                Finding(instance.name, f"it cannot reach its KV server {server.url}",
                        "start the server, or name the right one with --connector-option url=…")
            )  # fmt: skip
    for consumer in deployment.pool(Role.DECODE):
        for producer in deployment.pool(Role.PREFILL):
            difference = _explain_places(producer, consumer)
            if difference:
                findings.append(
                    Finding(consumer.name, f"its KV store is not that of {producer.name}: {difference}",
                            "give both the same --connector-option values")
                )  # fmt: skip
                break
    return findings


def _explain_places(producer: InstanceFacts, consumer: InstanceFacts) -> str:
    if producer.about is None or consumer.about is None or producer.about.connector != consumer.about.connector:
        return ""
    theirs, ours = producer.about.store, consumer.about.store
    if theirs is not None and ours is not None:
        return "" if theirs.path == ours.path else f"{ours.path} here, {theirs.path} there"
    if producer.about.server is not None and consumer.about.server is not None:
        return _explain_servers(producer.about, consumer.about)
    here, there = consumer.about.connector_options, producer.about.connector_options
    names = [name for name in _PLACES if here.get(name) != there.get(name)]
    # A direct connector's own listening address differs by nature.
    names = [] if consumer.about.connector == "nixl" else names
    return "; ".join(f"{name} {here.get(name)} here, {there.get(name)} there" for name in names)


def _explain_servers(producer: About, consumer: About) -> str:
    assert producer.server is not None
    assert consumer.server is not None
    here, there = consumer.server.url, producer.server.url
    if here != there:
        return f"{here} here, {there} there"
    is_local = here.startswith("unix:") or urlsplit(here).hostname in _LOOPBACK
    return (
        f"{here} is another one on {consumer.host} than on {producer.host}"
        if (is_local and consumer.host != producer.host)
        else ""
    )


def check_recomputed(deployment: Deployment) -> list[Finding]:
    """What prefill computed is not computed again by decode."""
    status = deployment.status
    if status is None or deployment.router is None:
        return []
    handoffs = int(status.counters.get("handoffs", 0))
    recomputed = int(status.counters.get("decode_recomputed_prompts", 0))
    if not recomputed or recomputed < _BAD_SHARE * handoffs:
        return []
    return [
        Finding(deployment.router.url,
                f"after {recomputed} of {handoffs} hand-offs the decode instance computed most of the prompt again: "
                "the prefill pool's work is lost",
                "see that both pools use one connector and one store, that it has room, and that decode's "
                "pdserve_kv_transfer_failures_total does not grow")
    ]  # fmt: skip


def check_prefill_used(deployment: Deployment) -> list[Finding]:
    """Where there is a prefill pool, requests go through it."""
    status = deployment.status
    if status is None or deployment.router is None or not deployment.pool(Role.PREFILL):
        return []
    counters = status.counters
    findings = []
    ended = int(counters.get("requests", 0))
    fallbacks = int(counters.get("colocated_fallbacks", 0))
    if fallbacks and fallbacks >= _BAD_SHARE * ended:
        findings.append(
            Finding(deployment.router.url,
                    f"decode did {fallbacks} of {ended} requests whole: no prefill instance was usable",
                    "see what is said of the prefill instances; the counts are those since the router's start")
        )  # fmt: skip
    if ended >= _MANY and not counters.get("handoffs") and not fallbacks:
        threshold = int(status.limits.get("disaggregation_threshold_tokens", 0))
        findings.append(
            Finding(deployment.router.url, f"{ended} requests ended and none went through the prefill pool",
                    f"prompts may be shorter than --disaggregation-threshold-tokens ({threshold}); lower it")
        )  # fmt: skip
    return findings


def check_transfer_failures(deployment: Deployment) -> list[Finding]:
    """Few transfers fail."""
    findings = []
    for instance in deployment.instances:
        failures = instance.metrics.get("pdserve_kv_transfer_failures_total", 0.0)
        moved = instance.metrics.get("pdserve_kv_transfer_blocks_total", 0.0)
        if failures and failures >= _FAILURE_SHARE * moved:
            kinds = sorted(
                {match[1] for name, value in instance.metrics.items() if value and (match := _FAILURE.match(name))}
            )
            findings.append(
                Finding(instance.name, f"{failures:.0f} transfers failed ({', '.join(kinds)}), {moved:.0f} moved",
                        "see its log for the first failure of each kind; what failed was computed again")
            )  # fmt: skip
    return findings


def check_leases(deployment: Deployment) -> list[Finding]:
    """What a prefill instance keeps for decode outlasts decode's queue."""
    waits = [wait_s for i in deployment.pool(Role.DECODE) if (wait_s := estimate_queue_wait_s(i)) is not None]
    if not waits:
        return []
    findings = []
    for instance in deployment.pool(Role.PREFILL):
        if instance.about is None or instance.about.connector not in _LEASES:
            continue
        option, default_s = _LEASES[instance.about.connector]
        lease_s = float(instance.about.connector_options.get(option, default_s))
        if lease_s <= max(waits):
            findings.append(
                Finding(instance.name, f"it keeps KV for {lease_s:g} s ({option}), and one request in a hundred waits "
                        f"up to {max(waits):g} s in the decode pool's queue",
                        f"raise --connector-option {option}=…, or add decode instances")
            )  # fmt: skip
    return findings


def estimate_queue_wait_s(instance: InstanceFacts) -> float | None:
    """The bucket's bound that 99 % of this instance's queue times are below; None without any."""
    start = 'pdserve_queue_time_seconds_bucket{le="'
    buckets = sorted(
        (float(name[len(start):-2]), count) for name, count in instance.metrics.items() if name.startswith(start)
    )  # fmt: skip
    if not buckets or not buckets[-1][1]:
        return None
    total = buckets[-1][1]
    return next(bound for bound, count in buckets if count >= 0.99 * total)
