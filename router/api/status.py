"""``GET /v1/status``: the pools, the load and the last requests, for the page, for the doctor and for scripts.

Plain numbers and names, of a bounded size; never any text of prompts or answers.
"""

from __future__ import annotations

import time
from typing import Any

from starlette.responses import Response

import pdserve
from pdserve.protocol import PROTOCOL_VERSION, Role
from pdserve.router.api.errors import json_response
from pdserve.router.api.service import RouterService
from pdserve.router.instance import Instance
from pdserve.router.pool import Pool, describe_state
from pdserve.router.timeline import RequestTimeline

MAX_RECENT_REQUESTS = 50
MAX_INSTANCES = 512
"""Of each pool."""


def show_status(service: RouterService) -> Response:
    """``GET /v1/status``."""
    return json_response(build_status(service), headers={"cache-control": "no-store"})


def build_status(service: RouterService) -> dict[str, Any]:
    """The answer: what it holds is listed in docs/status.md."""
    settings = service.settings
    gauges = service.metrics.read_values("gauge")
    return {
        "time_ns": time.time_ns(),
        "started_s": service.created_s,
        "version": pdserve.__version__,
        "protocol_version": PROTOCOL_VERSION,
        "model": service.model_name,
        "system_fingerprint": service.system_fingerprint,
        "is_serving": service.fleet.is_serving,
        "limits": {
            "max_concurrent": settings.admission.max_concurrent,
            "max_queue": settings.admission.max_queue,
            "request_timeout_s": settings.admission.request_timeout_s,
            "disaggregation_threshold_tokens": settings.handoff.disaggregation_threshold_tokens,
        },
        "requests": {
            "num_running": int(gauges["num_requests_running"]),
            "num_waiting": int(gauges["num_requests_waiting"]),
            "oldest_waiting_s": round(gauges["oldest_waiting_seconds"], 3),
        },
        "counters": service.metrics.read_values("counter"),
        "pools": [
            describe_pool(service.fleet.prefill, settings.pools.prefill_policy, service.fleet.decode),
            describe_pool(service.fleet.decode, settings.pools.decode_policy, service.fleet.decode),
        ],
        "recent": [_describe_request(timeline) for timeline in service.timelines.latest(MAX_RECENT_REQUESTS)],
    }


def describe_pool(pool: Pool, policy: str, decode: Pool) -> dict[str, Any]:
    """A pool with its instances, as far as they are listed; ``decode`` is whom prefill instances hand over to."""
    return {
        "role": pool.role,
        "policy": policy,
        "num_instances": len(pool.instances),
        "num_usable": len(pool.usable),
        "instances": [_describe_instance(instance, decode) for instance in pool.instances[:MAX_INSTANCES]],
    }


def _find_remark(instance: Instance, decode: Pool) -> str:
    """What makes a prefill instance's work worthless; empty where nothing does."""
    connectors = {member.ready.connector for member in decode.members if member.ready is not None}
    if instance.ready is None or instance.role is not Role.PREFILL or not connectors:
        return ""
    if instance.ready.connector in connectors:
        return ""
    return (
        f"its connector is {instance.ready.connector}, decode's is {', '.join(sorted(connectors))}: decode computes "
        "all prompts again; start both with the same --connector"
    )


def _describe_instance(instance: Instance, decode: Pool) -> dict[str, Any]:
    ready, load, tally = instance.ready, instance.load, instance.tally
    state, reason = describe_state(instance)
    return {
        "address": instance.address,
        "name": instance.name,
        "state": state,
        "reason": reason or _find_remark(instance, decode),
        "silence_s": None if instance.silence_s is None else round(instance.silence_s, 3),
        "generation": ready.generation if ready else None,
        "model": ready.model if ready else None,
        "connector": ready.connector if ready else None,
        "http_port": ready.http_port if ready else None,
        "max_num_seqs": ready.limits.max_num_seqs if ready else None,
        "max_queue_len": ready.limits.max_queue_len if ready else None,
        "max_model_len": ready.limits.max_model_len if ready else None,
        "load": {
            "num_running": load.num_running,
            "num_waiting": load.num_waiting,
            "num_used_blocks": load.num_used_blocks,
            "num_blocks": load.num_blocks,
        },
        "tally": {
            "num_running_legs": instance.num_legs,
            "num_legs": tally.num_legs,
            "num_tokens": tally.num_tokens,
            "num_hittable_tokens": tally.num_hittable_tokens,
            "num_cached_tokens": tally.num_cached_tokens,
            "num_external_tokens": tally.num_external_tokens,
            "least_event_age_ms": tally.least_event_age_ms,
        },
    }


def _describe_request(timeline: RequestTimeline) -> dict[str, Any]:
    started_ns = timeline.entries[0].time_ns if timeline.entries else None
    names = dict.fromkeys(leg["instance_id"] for leg in timeline.instances)
    return {
        "id": timeline.response_id,
        "request_id": timeline.request_id,
        "started_ns": started_ns,
        "instances": list(names)[:8],
        **timeline.summary,
    }
