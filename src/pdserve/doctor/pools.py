"""Checks of processes and models: do they live, do they fit together, do they take work."""

from __future__ import annotations

from pdserve.doctor.facts import Deployment, Reach
from pdserve.doctor.findings import Finding
from pdserve.protocol import Role

_SILENCE_S = 5.0


def check_router(deployment: Deployment) -> list[Finding]:
    """The router answers and can serve."""
    router = deployment.router
    if router is None:
        return []
    if router.status is None:
        return [
            Finding(
                router.url,
                f"the router does not answer: {router.problem}",
                "start run-router, or give the URL that its log names; with API keys on, set PDSERVE_API_KEY",
            )
        ]
    if not router.status.is_serving:
        return [
            Finding(router.url, "no decode instance is usable, so no request can be served",
                    "see what is said of the decode instances")
        ]  # fmt: skip
    return []


def check_ports(deployment: Deployment) -> list[Finding]:
    """Every instance listens where it is said to, and answers in the protocol."""
    findings = []
    for instance in deployment.instances:
        if instance.reach is Reach.CLOSED:
            command = f"run-{instance.role} --port {instance.address.rpartition(':')[2]}"
            findings.append(
                Finding(instance.name, f"nobody listens there ({instance.reason})",
                        f"start it ({command}; --host 0.0.0.0 when it is on another machine), or correct the address")
            )  # fmt: skip
        elif instance.reach is Reach.SILENT:
            findings.append(
                Finding(instance.name, f"what listens there does not answer as an instance ({instance.reason})",
                        "it may still be loading, hang, want CURVE keys, or be another service's port; see its log")
            )  # fmt: skip
        elif instance.reach is Reach.REFUSED:
            findings.append(
                Finding(
                    instance.name, f"it refuses to talk: {instance.reason}", "run one version of pdserve everywhere"
                )
            )
    if not deployment.pool(Role.DECODE) and (deployment.router is None or deployment.status is not None):
        findings.append(
            Finding("decode pool", "no decode instance is configured", "name at least one with --decode HOST:PORT")
        )
    return findings


def check_roles(deployment: Deployment) -> list[Finding]:
    """Every instance was started for the pool that it is in."""
    return [
        Finding(instance.name, f"it was started as a {instance.ready.role} instance",
                f"give it as --{instance.ready.role}, or start it with run-{instance.role}")
        for instance in deployment.instances
        if instance.ready is not None and instance.ready.role is not instance.role
    ]  # fmt: skip


def check_identity(deployment: Deployment) -> list[Finding]:
    """All instances have the same weights, dtypes, numerics and KV layout."""
    known = [(instance, instance.ready.identity) for instance in deployment.instances if instance.ready is not None]
    identities = [identity for _, identity in known]
    if not identities:
        return []
    usual = max(identities, key=identities.count)
    fellow = next(i.name for i, identity in known if identity == usual)
    return [
        Finding(instance.name, f"its model or layout is not that of {fellow}: {usual.explain_difference(identity)}",
                "start both with equal --model, --dtype, --quantization, --kv-dtype, --block-size, --device and "
                "--kernel-backend")
        for instance, identity in known
        if identity != usual
    ]  # fmt: skip


def check_versions(deployment: Deployment) -> list[Finding]:
    """All processes run this version of pdserve."""
    found = [(i.name, i.about.version) for i in deployment.instances if i.about is not None]
    if deployment.router is not None and deployment.status is not None:
        found.append((deployment.router.url, deployment.status.version))
    return [
        Finding(subject, f"it runs pdserve {version}, this is {deployment.version}",
                "run one version everywhere: results are compared between equal versions only")
        for subject, version in found
        if version != deployment.version
    ]  # fmt: skip


def check_draining(deployment: Deployment) -> list[Finding]:
    """No instance is on its way out."""
    return [
        Finding(instance.name, "it drains: it finishes what runs and takes nothing new",
                "start it again when it has ended, or take it out of the pool")
        for instance in deployment.instances
        if instance.ready is not None and instance.ready.load.draining
    ]  # fmt: skip


def check_router_view(deployment: Deployment) -> list[Finding]:
    """The router uses every instance that answers."""
    findings = []
    for instance in deployment.instances:
        seen = deployment.seen_by_router(instance)
        if seen is None or instance.ready is None:
            continue
        if seen.state == "refused":
            findings.append(
                Finding(instance.name, f"the router refuses it: {seen.reason}",
                        "make it agree with the others, and restart it")
            )  # fmt: skip
        elif seen.state == "absent":
            why = f" ({seen.reason})" if seen.reason else ""
            findings.append(
                Finding(instance.name, f"it answers here, but the router has no connection to it{why}",
                        "look for a firewall, another network or an address that means another machine there")
            )  # fmt: skip
        elif seen.state == "resting":
            findings.append(
                Finding(instance.name, "the router passes it over, because it failed several requests in a row",
                        "see its log for the errors; it gets work again once it answers one")
            )  # fmt: skip
        elif seen.silence_s is not None and seen.silence_s > _SILENCE_S:
            findings.append(
                Finding(instance.name, f"the router has heard nothing from it for {seen.silence_s:.0f} s",
                        "its engine may hang or its machine be overloaded; see its log and its --heartbeat-interval-s")
            )  # fmt: skip
    return findings


def check_queues(deployment: Deployment) -> list[Finding]:
    """No instance's queue is nearly full."""
    findings = []
    for instance in deployment.instances:
        if instance.ready is None:
            continue
        waiting, limit = instance.ready.load.num_waiting, instance.ready.limits.max_queue_len
        if limit and waiting >= 0.8 * limit:
            findings.append(
                Finding(instance.name, f"{waiting} of at most {limit} requests wait in its queue",
                        "add instances to this pool, or let the router admit fewer with --max-concurrent")
            )  # fmt: skip
    return findings
