"""A healthy deployment has no findings; each way of being wrong has one, from the check that is meant."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdserve.doctor.checks import CHECKS, run_checks
from pdserve.doctor.facts import Deployment, InstanceFacts, Reach, RouterFacts, RouterInstance, RouterPool, RouterStatus
from pdserve.engine.server.about import About, Directory, Server
from pdserve.kv_layout import KVCacheSpec, ModelIdentity
from pdserve.protocol import InstanceLimits, InstanceLoad, Ready, Role

GIB = 1 << 30
ADDRESSES = {Role.PREFILL: "10.0.0.5:8100", Role.DECODE: "10.0.0.6:8200"}
QUEUE = "pdserve_queue_time_seconds_bucket"


def build_ready(role: Role) -> Ready:
    kv = KVCacheSpec(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="bfloat16")
    return Ready(
        session="s",
        instance_id=str(role),
        generation="g",
        role=role,
        model="m",
        identity=ModelIdentity("w0", "a0", "bfloat16", "n0", kv),
        limits=InstanceLimits(
            max_model_len=8192, max_num_seqs=64, max_queue_len=100, num_blocks=1000, vocab_size=10, max_logprobs=20
        ),
        connector="shared_storage",
        load=InstanceLoad(num_waiting=3, num_blocks=1000),
        http_port=9100,
    )


def build_about(role: Role) -> About:
    return About(
        instance_id=str(role),
        generation="g",
        role=role,
        version="1.0",
        protocol_version=1,
        time_ns=0,
        host="a",
        connector="shared_storage",
        connector_options={},
        store=Directory(path="/dev/shm/kv", is_usable=True, free_bytes=5 * GIB, total_bytes=10 * GIB),
        server=None,
        shared_memory=Directory(path="/dev/shm", is_usable=True, free_bytes=5 * GIB, total_bytes=10 * GIB),
    )


def build_instance(role: Role) -> InstanceFacts:
    metrics = {
        f'{QUEUE}{{le="0.1"}}': 500.0,
        f'{QUEUE}{{le="60.0"}}': 1000.0,
        f'{QUEUE}{{le="+Inf"}}': 1000.0,
        "pdserve_kv_transfer_blocks_total": 10000.0,
    }
    if role is Role.DECODE:
        metrics[f'{QUEUE}{{le="1.0"}}'] = 995.0
    return InstanceFacts(
        role,
        ADDRESSES[role],
        ready=build_ready(role),
        about=build_about(role),
        clock_offset_s=(-0.4, 0.5),
        metrics=metrics,
    )


def build_router() -> RouterFacts:
    pools = [
        RouterPool(
            role=role,
            instances=[
                RouterInstance(
                    address=f"tcp://{ADDRESSES[role]}",
                    name=str(role),
                    state="ready",
                    reason="",
                    silence_s=0.5,
                    generation="g",
                    http_port=9100,
                    load={},
                    tally={"least_event_age_ms": 0.4},
                )
            ],
        )
        for role in Role
    ]
    status = RouterStatus(
        time_ns=0,
        version="1.0",
        protocol_version=1,
        model="m",
        is_serving=True,
        limits={"disaggregation_threshold_tokens": 64},
        requests={},
        counters={"requests": 1000.0, "handoffs": 900.0, "decode_recomputed_prompts": 3.0, "colocated_fallbacks": 0.0},
        pools=pools,
    )
    return RouterFacts("http://r", status, clock_offset_s=(-0.01, 0.01))


def healthy() -> Deployment:
    return Deployment("1.0", build_router(), tuple(build_instance(role) for role in Role))


def with_instance(role: Role, **changes: Any) -> Deployment:
    """A healthy deployment but for fields of one instance; ``ready_x`` and ``about_x`` mean fields of those."""
    deployment = healthy()

    def change(instance: InstanceFacts) -> InstanceFacts:
        if instance.role is not role:
            return instance
        own = {name: value for name, value in changes.items() if not name.startswith(("ready_", "about_"))}
        instance = replace(instance, **own)
        for part in ("ready", "about"):
            inner = {n.removeprefix(f"{part}_"): v for n, v in changes.items() if n.startswith(f"{part}_")}
            if inner:
                instance = replace(instance, **{part: msgspec.structs.replace(getattr(instance, part), **inner)})
        return instance

    return replace(deployment, instances=tuple(map(change, deployment.instances)))


def with_status(**changes: Any) -> Deployment:
    router = build_router()
    return replace(healthy(), router=replace(router, status=msgspec.structs.replace(router.status, **changes)))


def with_view(**changes: Any) -> Deployment:
    pools = build_router().status.pools
    seen = msgspec.structs.replace(pools[1].instances[0], **changes)
    return with_status(pools=[pools[0], msgspec.structs.replace(pools[1], instances=[seen])])


def counters(**changes: float) -> dict[str, float]:
    return {**build_router().status.counters, **changes}


def other_identity() -> ModelIdentity:
    return msgspec.structs.replace(build_ready(Role.DECODE).identity, weights="w1")


def store(**changes: Any) -> Directory:
    return msgspec.structs.replace(build_about(Role.PREFILL).store, **changes)


def with_server(**changes: Any) -> Deployment:
    """Both sides keep KV in a server; the decode side's view of it is changed."""
    server = Server(url="redis://r:6379/0", is_reachable=True)
    views = {Role.PREFILL: server, Role.DECODE: msgspec.structs.replace(server, **changes)}
    return replace(
        healthy(),
        instances=tuple(
            replace(i, about=msgspec.structs.replace(i.about, connector="redis", store=None, server=views[i.role]))
            for i in healthy().instances
        ),
    )


WRONG = [
    (
        "router",
        lambda: replace(healthy(), router=RouterFacts("http://r", problem="refused")),
        "does not answer: refused",
    ),
    ("router", lambda: with_status(is_serving=False), "no decode instance is usable"),
    ("ports", lambda: with_instance(Role.DECODE, reach=Reach.CLOSED, ready=None, about=None), "nobody listens there"),
    ("ports", lambda: with_instance(Role.DECODE, reach=Reach.SILENT, ready=None, about=None), "does not answer as an"),
    (
        "ports",
        lambda: with_instance(Role.DECODE, reach=Reach.REFUSED, ready=None, about=None, reason="v9"),
        "to talk: v9",
    ),
    ("ports", lambda: replace(healthy(), instances=healthy().instances[:1]), "no decode instance is configured"),
    ("roles", lambda: with_instance(Role.DECODE, ready_role=Role.PREFILL), "was started as a prefill instance"),
    ("model", lambda: with_instance(Role.DECODE, ready_identity=other_identity()), "weights w0 here, w1 there"),
    ("versions", lambda: with_instance(Role.DECODE, about_version="0.9"), "runs pdserve 0.9, this is 1.0"),
    ("versions", lambda: with_status(version="0.9"), "runs pdserve 0.9"),
    ("draining", lambda: with_instance(Role.DECODE, ready_load=InstanceLoad(draining=True)), "it drains"),
    ("router-view", lambda: with_view(state="refused", reason="weights"), "the router refuses it: weights"),
    ("router-view", lambda: with_view(state="absent", reason="no connection"), "no connection to it (no connection)"),
    ("router-view", lambda: with_view(state="resting"), "passes it over"),
    ("router-view", lambda: with_view(silence_s=9.0), "has heard nothing from it for 9 s"),
    (
        "queues",
        lambda: with_instance(Role.DECODE, ready_load=InstanceLoad(num_waiting=80)),
        "80 of at most 100 requests",
    ),
    (
        "connectors",
        lambda: with_instance(Role.DECODE, ready_connector="redis"),
        "is redis, the prefill pool's is shared",
    ),
    ("connectors", lambda: with_instance(Role.DECODE, ready_connector="null"), "its connector is null"),
    ("store-places", lambda: with_instance(Role.DECODE, about_store=store(is_usable=False)), "cannot read and write"),
    (
        "store-places",
        lambda: with_instance(Role.DECODE, about_store=store(path="/mnt/kv")),
        "/mnt/kv here, /dev/shm/kv",
    ),
    ("store-places", lambda: with_server(is_reachable=False), "cannot reach its KV server redis://r:6379/0"),
    ("store-places", lambda: with_server(url="redis://s:6379/0"), "redis://s:6379/0 here, redis://r:6379/0 there"),
    ("recomputed", lambda: with_status(counters=counters(decode_recomputed_prompts=90.0)), "after 90 of 900 hand-offs"),
    (
        "prefill-used",
        lambda: with_status(counters=counters(colocated_fallbacks=200.0)),
        "did 200 of 1000 requests whole",
    ),
    (
        "prefill-used",
        lambda: with_status(counters=counters(handoffs=0.0, decode_recomputed_prompts=0.0)),
        "none went through the prefill pool",
    ),
    (
        "transfers",
        lambda: with_instance(
            Role.DECODE,
            metrics={
                "pdserve_kv_transfer_failures_total": 7.0,
                'pdserve_kv_transfer_failures_total{connector="nixl",kind="corrupt"}': 7.0,
                "pdserve_kv_transfer_blocks_total": 100.0,
            },
        ),
        "7 transfers failed (corrupt)",
    ),
    (
        "leases",
        lambda: with_instance(Role.PREFILL, about_connector="nixl", about_connector_options={"lease_s": "0.5"}),
        "keeps KV for 0.5 s",
    ),
    ("clocks", lambda: with_instance(Role.DECODE, clock_offset_s=(-3.2, -3.01)), "3.0 s behind the router's"),
    (
        "clocks",
        lambda: replace(
            with_view(tally={"least_event_age_ms": -2000.0}),
            instances=with_instance(Role.DECODE, clock_offset_s=None).instances,
        ),
        "2.0 s ahead of the router's",
    ),
    (
        "shared-memory",
        lambda: with_instance(Role.PREFILL, about_store=store(total_bytes=GIB // 16)),
        "memory of 64 MiB",
    ),
    ("store-room", lambda: with_instance(Role.PREFILL, about_store=store(free_bytes=GIB // 4)), "/dev/shm/kv is full"),
    ("instance-http", lambda: with_instance(Role.DECODE, about=None), "its HTTP port 9100 cannot be read"),
]


def test_nothing_is_wrong_with_a_healthy_deployment() -> None:
    assert run_checks(healthy()) == []
    assert run_checks(replace(healthy(), router=None)) == []
    assert run_checks(with_server()) == []


def test_loopback_is_another_server_on_another_machine() -> None:
    deployment = with_server()
    prefill, decode = (
        replace(
            i, about=msgspec.structs.replace(i.about, server=Server(url="redis://127.0.0.1:1/0", is_reachable=True))
        )
        for i in deployment.instances
    )
    assert run_checks(replace(deployment, instances=(prefill, decode))) == []
    elsewhere = replace(decode, about=msgspec.structs.replace(decode.about, host="b"))
    ((name, finding),) = run_checks(replace(deployment, instances=(prefill, elsewhere)))
    assert name == "store-places"
    assert "is another one on b than on a" in finding.problem


@pytest.mark.parametrize(("name", "build", "text"), WRONG, ids=[f"{name}-{i}" for i, (name, *_) in enumerate(WRONG)])
def test_each_fault_has_one_finding_from_its_check(name: str, build: Any, text: str) -> None:
    (finding,) = CHECKS[name](build())
    assert text in finding.problem
    assert finding.remedy
    # Nobody else raises a false alarm, but for what follows from the fault itself.
    others = {other for other, _ in run_checks(build())} - {name}
    assert others <= {"router-view"}


def test_every_check_can_find_something() -> None:
    assert {name for name, *_ in WRONG} == set(CHECKS)


def test_the_table_in_the_docs_lists_every_check() -> None:
    text = (Path(__file__).parents[3] / "docs" / "doctor.md").read_text()
    listed = [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")]
    assert listed == list(CHECKS)
