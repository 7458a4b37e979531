"""The same request through the service and through one engine alone: every field is equal, whole and streamed.

Our own two routers run the same code over the same decode instance; only one has a prefill pool. There each request
has a cache salt for each way, so that neither finds what the other left; caches of other services are their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from grid import build_bodies
from target import COMPLETIONS, Target, find_differences

CELLS = build_bodies()
MODES = ("whole", "streamed")
Answers = dict[tuple[str, str], httpx.Response]
"""By mode and way."""
OF_ONE_SERVICE = ("system_fingerprint", "service_tier", "kv_transfer_params", "usage.prompt_tokens_details")
"""Fields in which two services may differ, though they give the same answer."""


@pytest.fixture(scope="module")
def answers(target: Target) -> Iterator[dict[str, Future[Answers]]]:
    """Every cell's answers, asked for side by side; the second time everything is in the caches."""
    if "reference" not in target.urls:
        pytest.skip("no --reference-url to compare with")

    def ask(name: str) -> Answers:
        path, body = CELLS[name]
        got: Answers = {}
        for mode in MODES:
            if mode == "streamed":
                if "prompt_logprobs" in body:
                    break
                body = {**body, "stream": True, "stream_options": {"include_usage": True}}
            for way in target.urls:
                salt = {} if target.deployment is None else {"cache_salt": f"{name}/{way}"}
                got[mode, way] = target.post(path, {**body, **salt}, way)
        return got

    with ThreadPoolExecutor(8) as pool:
        yield {name: pool.submit(ask, name) for name in CELLS}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CELLS)
def test_every_field_equals_the_answer_of_one_engine(
    target: Target, answers: dict[str, Future[Answers]], name: str, mode: str
) -> None:
    got = answers[name].result()
    if (mode, "service") not in got:
        pytest.skip("prompt_logprobs are not available with stream")
    service, reference = (target.read(got[mode, way]) for way in ("service", "reference"))
    differences = list(find_differences(service, reference))
    if target.deployment is None:
        differences = [one for one in differences if not one.startswith(tuple(f".{name}" for name in OF_ONE_SERVICE))]
    assert differences == []


def test_decode_computed_no_prompt_again(target: Target, answers: dict[str, Future[Answers]]) -> None:
    if target.deployment is None:
        pytest.skip("a metric of ours")
    for future in answers.values():
        future.result()
    assert target.deployment.router.get_metric("pdserve_router_decode_recomputed_prompts_total") == 0


@pytest.mark.parametrize("way", ["service", "reference"])
def test_case_34_cached_tokens_are_none_when_cold_and_the_whole_blocks_when_warm(target: Target, way: str) -> None:
    if target.deployment is None:
        pytest.skip("blocks of another service may have another size")
    body: dict[str, Any] = {"prompt": list(range(3000, 3050)), "max_tokens": 2, "cache_salt": f"case 34/{way}"}
    usages = [target.read(target.post(COMPLETIONS, body, way))["usage"] for _ in range(2)]
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages] == [0, 48]


def test_instances_tell_a_prefix_aware_router_what_their_caches_hold(target: Target) -> None:
    if target.deployment is None:
        pytest.skip("a metric of ours")
    from processes import wait_until

    router = target.deployment.router
    wait_until(
        lambda: router.get_metric("pdserve_router_instance_prefix_is_exact") == 2, "both instances telling their caches"
    )
    metrics = target.client.get(f"{target.urls['reference']}/metrics").text
    assert "pdserve_router_instance_prefix_is_exact{" not in metrics, "nobody asked"
