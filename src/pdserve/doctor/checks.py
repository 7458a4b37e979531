"""All checks, by the name under which the report and docs/doctor.md list them."""

from __future__ import annotations

from collections.abc import Callable

from pdserve.doctor import hand_offs, machines, pools
from pdserve.doctor.facts import Deployment
from pdserve.doctor.findings import Finding

Check = Callable[[Deployment], list[Finding]]

CHECKS: dict[str, Check] = {
    "router": pools.check_router,
    "ports": pools.check_ports,
    "roles": pools.check_roles,
    "model": pools.check_identity,
    "versions": pools.check_versions,
    "draining": pools.check_draining,
    "router-view": pools.check_router_view,
    "queues": pools.check_queues,
    "connectors": hand_offs.check_connectors,
    "store-places": hand_offs.check_store_places,
    "recomputed": hand_offs.check_recomputed,
    "prefill-used": hand_offs.check_prefill_used,
    "transfers": hand_offs.check_transfer_failures,
    "leases": hand_offs.check_leases,
    "clocks": machines.check_clocks,
    "shared-memory": machines.check_shared_memory,
    "store-room": machines.check_store_room,
    "instance-http": machines.check_instance_http,
}


def run_checks(deployment: Deployment) -> list[tuple[str, Finding]]:
    """Everything that is wrong, with the name of the check that says so."""
    return [(name, finding) for name, check in CHECKS.items() for finding in check(deployment)]
