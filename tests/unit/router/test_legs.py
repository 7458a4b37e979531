from __future__ import annotations

import pytest

from pdserve.protocol import KVTransferParams, Role, SamplingParams
from pdserve.router.legs import GenerationRequest, Progress, build_leg

SAMPLING = SamplingParams(
    max_tokens=500,
    min_tokens=100,
    temperature=0.5,
    stop=("end",),
    stop_token_ids=(7,),
    seed=9,
    logprobs=3,
    prompt_logprobs=2,
    logit_bias={5: 1.0},
)
REQUEST = GenerationRequest("r", [1, 2, 3], SAMPLING, deadline_s=110.0, priority=4, cache_salt="s")
PARAMS = KVTransferParams(connector="c", transfer_id="t")


def test_prefill_leg_gets_the_clients_parameters_and_asks_for_a_handoff() -> None:
    leg = build_leg(REQUEST, Progress(), role=Role.PREFILL, now_s=100.0)
    assert leg.handoff
    assert leg.sampling == SAMPLING
    assert leg.prompt_token_ids == [1, 2, 3]
    assert leg.output_token_ids == []
    assert leg.kv_transfer_params is None
    assert (leg.priority, leg.cache_salt, leg.timeout_s) == (4, "s", 10.0)


def test_decode_leg_goes_on_behind_the_tokens_and_asks_the_prompts_logprobs_no_more() -> None:
    leg = build_leg(REQUEST, Progress([8, 9], PARAMS, num_legs=1), role=Role.DECODE, now_s=105.0)
    assert not leg.handoff
    assert leg.output_token_ids == [8, 9]
    assert leg.kv_transfer_params == PARAMS
    assert leg.sampling.prompt_logprobs is None
    assert leg.sampling.max_tokens == 500
    assert leg.sampling.seed == 9
    assert leg.timeout_s == 5.0


def test_colocated_leg_gets_everything() -> None:
    leg = build_leg(REQUEST, Progress(), role=Role.DECODE, now_s=100.0)
    assert not leg.handoff
    assert leg.sampling == SAMPLING
    assert leg.kv_transfer_params is None


def test_prefill_leg_never_carries_transfer_parameters() -> None:
    assert build_leg(REQUEST, Progress([], PARAMS), role=Role.PREFILL, now_s=0.0).kv_transfer_params is None


def test_every_leg_has_an_id_of_its_own_and_its_own_list() -> None:
    progress = Progress([8])
    first = build_leg(REQUEST, progress, role=Role.DECODE, now_s=0.0)
    progress.num_legs += 1
    progress.output_token_ids.append(9)
    second = build_leg(REQUEST, progress, role=Role.DECODE, now_s=0.0)
    assert first.request_id != second.request_id
    assert first.output_token_ids == [8]


@pytest.mark.parametrize("now_s", [110.0, 200.0])
def test_timeout_stays_above_zero(now_s: float) -> None:
    leg = build_leg(REQUEST, Progress(), role=Role.DECODE, now_s=now_s)
    assert leg.timeout_s is not None
    assert leg.timeout_s > 0
