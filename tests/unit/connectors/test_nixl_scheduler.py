"""The half beside the scheduler: counts and references, no NIXL."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("nixl")

from pdserve.connectors.base import (
    CancelsSends,
    ConnectorOutput,
    FinishDecision,
    HearsOfQueue,
    KVRequest,
    MatchResult,
    ScheduledTokens,
    StepPlan,
)
from pdserve.connectors.nixl import NixlConnector
from pdserve.connectors.nixl.messages import Endpoint, FilledBlocks, Listening, StepMetadata, read_params
from pdserve.connectors.nixl.scheduler import NixlScheduler
from pdserve.connectors.testing import build_context
from pdserve.connectors.testing.kv_content import TINY_SPEC
from pdserve.kv_layout import BlockHasher
from pdserve.protocol import KVTransferParams, Role

S = TINY_SPEC.block_size
IDLE = StepPlan(())
PROMPT = list(range(3 * S + 1))


def make_request(
    request_id: str = "r", token_ids: list[int] | None = None, params: KVTransferParams | None = None
) -> KVRequest:
    tokens = PROMPT if token_ids is None else token_ids
    keys = BlockHasher("fingerprint").block_keys(tokens, S)
    return KVRequest(request_id, len(tokens), tuple(keys), params)


@pytest.fixture
def producer() -> NixlScheduler:
    scheduler = NixlConnector.build_scheduler(build_context(Role.PREFILL, {}))
    scheduler.update_from_output(ConnectorOutput(messages=[Listening(0, Endpoint("tcp://127.0.0.1:4000", "g"))]))
    return scheduler


@pytest.fixture
def consumer() -> NixlScheduler:
    return NixlConnector.build_scheduler(build_context(Role.DECODE, {}))


@pytest.fixture
def params(producer: NixlScheduler) -> KVTransferParams:
    found = producer.request_finished(make_request(), [9, 8, 7, 6], len(PROMPT), handoff=True).kv_transfer_params
    assert found is not None
    return found


def test_a_handed_over_request_is_held_and_offered_once(producer: NixlScheduler) -> None:
    blocks = [9, 8, 7, 6, 5]  # the last one is for the answer
    decision = producer.request_finished(make_request(), blocks, len(PROMPT), handoff=True)
    assert decision.hold_blocks
    assert not decision.announce_when_sent
    params = decision.kv_transfer_params
    assert params is not None
    assert (params.num_tokens, params.num_bytes) == (len(PROMPT), 4 * TINY_SPEC.block_bytes)
    metadata = producer.build_connector_metadata(IDLE)
    (offer,) = metadata.offers
    assert (offer.block_ids, offer.transfer_id, offer.num_tokens) == ([9, 8, 7, 6], params.transfer_id, len(PROMPT))
    assert offer.digest == make_request().block_keys[-1].digest
    assert producer.build_connector_metadata(IDLE).is_empty


def test_no_two_transfers_have_one_name(producer: NixlScheduler) -> None:
    names = set()
    for _ in range(50):
        decision = producer.request_finished(make_request(), [1, 2, 3, 4], len(PROMPT), handoff=True)
        assert decision.kv_transfer_params is not None
        names.add(decision.kv_transfer_params.transfer_id)
    assert len(names) == 50


@pytest.mark.parametrize(
    ("block_ids", "num_computed", "handoff"),
    [
        ([], 0, False),
        ([1, 2, 3, 4], len(PROMPT), False),
        ([1, 2, 3, 4], len(PROMPT) - 1, True),
        ([1], len(PROMPT), True),
    ],
)
def test_nothing_is_held_that_nobody_fetches_or_that_is_not_whole(
    producer: NixlScheduler, block_ids: list[int], num_computed: int, handoff: bool
) -> None:
    decision = producer.request_finished(make_request(), block_ids, num_computed, handoff=handoff)
    assert decision == FinishDecision()
    assert producer.build_connector_metadata(IDLE).is_empty


def test_an_engine_that_nobody_can_reach_offers_nothing(consumer: NixlScheduler) -> None:
    assert consumer.request_finished(make_request(), [1, 2, 3, 4], len(PROMPT), handoff=True) == FinishDecision()


def test_counts_are_beyond_local_and_whole_blocks_only(consumer: NixlScheduler, params: KVTransferParams) -> None:
    request = make_request(params=params)
    counts = {n: consumer.get_num_new_matched_tokens(request, n) for n in (0, 1, S, 2 * S + 1, 3 * S, len(PROMPT), 90)}
    assert {n: match.num_tokens for n, match in counts.items()} == {
        0: len(PROMPT),
        1: 0,
        S: 2 * S + 1,
        2 * S + 1: 0,
        3 * S: 1,
        len(PROMPT): 0,
        90: 0,
    }
    assert all(match.is_async == bool(match.num_tokens) for match in counts.values())
    assert consumer.build_connector_metadata(IDLE).is_empty


def test_a_load_names_the_blocks_beyond_local(consumer: NixlScheduler, params: KVTransferParams) -> None:
    request = make_request("d", params=params)
    consumer.update_state_after_alloc(request, [20, 21, 22, 23], S, 2 * S + 1)
    (load,) = consumer.build_connector_metadata(IDLE).loads
    assert (load.first_block, load.block_ids, load.num_tokens) == (1, [21, 22, 23], 2 * S + 1)
    assert (load.digest, load.num_prompt_tokens) == (request.block_keys[-1].digest, len(PROMPT))
    assert load.reference == read_params(params)


def test_a_load_of_less_than_was_promised_ends_in_the_block_of_its_last_token(
    consumer: NixlScheduler, params: KVTransferParams
) -> None:
    consumer.update_state_after_alloc(make_request("d", params=params), [20, 21, 22, 23], 0, 2 * S)
    (load,) = consumer.build_connector_metadata(IDLE).loads
    assert (load.first_block, load.block_ids, load.num_tokens) == (0, [20, 21], 2 * S)


def test_a_reference_is_good_for_one_load(consumer: NixlScheduler, params: KVTransferParams) -> None:
    request = make_request("d", params=params)
    consumer.update_state_after_alloc(request, [20, 21, 22, 23], 0, len(PROMPT))
    assert consumer.get_num_new_matched_tokens(request, 0) == MatchResult(0)
    consumer.update_state_after_alloc(request, [20, 21, 22, 23], 0, 0)
    metadata = consumer.build_connector_metadata(IDLE)
    assert (len(metadata.loads), metadata.releases) == (1, [])


def test_a_full_local_hit_gives_the_blocks_back(consumer: NixlScheduler, params: KVTransferParams) -> None:
    request = make_request("d", params=params)
    consumer.update_state_after_alloc(request, [20, 21, 22, 23], len(PROMPT), 0)
    consumer.request_finished(request, [20, 21, 22, 23], len(PROMPT), handoff=False)
    assert consumer.build_connector_metadata(IDLE) == StepMetadata(releases=[read_params(params)])


def test_a_request_that_ends_before_it_loads_gives_the_blocks_back(
    consumer: NixlScheduler, params: KVTransferParams
) -> None:
    request = make_request("d", params=params)
    consumer.get_num_new_matched_tokens(request, 0)
    assert consumer.request_finished(request, [], 0, handoff=False) == FinishDecision()
    assert consumer.build_connector_metadata(IDLE) == StepMetadata(releases=[read_params(params)])


@pytest.mark.parametrize("reports", [False, True])
def test_a_request_that_ends_while_it_loads_cancels_the_load(
    consumer: NixlScheduler, params: KVTransferParams, reports: bool
) -> None:
    """The load itself goes out all the same, in the same step's message."""
    request = make_request("d", params=params)
    consumer.update_state_after_alloc(request, [20, 21, 22, 23], 0, len(PROMPT))
    if reports:
        consumer.update_from_output(ConnectorOutput(failed_receiving={"d": 0}))
    # The engine takes the reference out of the request when it has redeemed it.
    consumer.request_finished(dataclasses.replace(request, kv_transfer_params=None), [20], 0, handoff=False)
    metadata = consumer.build_connector_metadata(IDLE)
    assert [load.request_id for load in metadata.loads] == ["d"]
    assert metadata.cancelled_loads == ([] if reports else ["d"])
    assert metadata.releases == []


def test_a_reference_with_other_blocks_than_the_prompts_is_redeemed_so_that_somebody_says_why_it_fails(
    consumer: NixlScheduler, params: KVTransferParams
) -> None:
    longer = make_request("d", list(range(9 * S)), params)
    assert consumer.get_num_new_matched_tokens(longer, 0) == MatchResult(9 * S, is_async=True)
    consumer.update_state_after_alloc(longer, list(range(9)), 0, 9 * S)
    (load,) = consumer.build_connector_metadata(IDLE).loads
    assert len(load.block_ids) != len(load.reference.block_ids)


def test_nothing_is_kept_of_requests_that_have_ended(consumer: NixlScheduler, params: KVTransferParams) -> None:
    for index in range(20):
        request = make_request(f"d{index}", params=params)
        consumer.update_state_after_alloc(request, [20, 21, 22, 23], 0, len(PROMPT) if index % 2 else 0)
        consumer.request_finished(request, [20, 21, 22, 23], 0, handoff=False)
        consumer.build_connector_metadata(IDLE)
    assert (consumer._redeemed, consumer._loading) == (set(), set())


def test_a_request_that_stays_queued_goes_to_the_workers_once(
    consumer: NixlScheduler, params: KVTransferParams
) -> None:
    assert NixlConnector.features.hears_of_queue
    assert isinstance(consumer, HearsOfQueue)
    request = make_request("d", params=params)
    consumer.request_queued(request)
    assert consumer.build_connector_metadata(IDLE) == StepMetadata(queued=[read_params(params)])
    assert consumer.build_connector_metadata(IDLE).is_empty
    consumer.request_finished(request, [], 0, handoff=False)
    assert consumer.build_connector_metadata(IDLE) == StepMetadata(releases=[read_params(params)])


@pytest.mark.parametrize("num_external_tokens", [0, len(PROMPT)])
def test_a_request_whose_turn_comes_at_once_is_not_told_as_queued(
    consumer: NixlScheduler, params: KVTransferParams, num_external_tokens: int
) -> None:
    request = make_request("d", params=params)
    consumer.request_queued(request)
    consumer.update_state_after_alloc(request, [20, 21, 22, 23], 0, num_external_tokens)
    assert consumer.build_connector_metadata(IDLE).queued == []


def test_a_request_that_ends_in_the_step_it_came_in_is_not_told_as_queued(
    consumer: NixlScheduler, params: KVTransferParams
) -> None:
    request = make_request("d", params=params)
    consumer.request_queued(request)
    consumer.request_finished(request, [], 0, handoff=False)
    assert consumer.build_connector_metadata(IDLE) == StepMetadata(releases=[read_params(params)])


def test_a_request_without_a_reference_of_this_connector_is_not_told_as_queued(consumer: NixlScheduler) -> None:
    consumer.request_queued(make_request("d", params=KVTransferParams(connector="other", transfer_id="t")))
    assert consumer.build_connector_metadata(IDLE).is_empty


def test_a_send_that_is_cancelled_goes_to_the_workers_once(producer: NixlScheduler) -> None:
    assert NixlConnector.features.cancels_sends
    assert isinstance(producer, CancelsSends)
    producer.request_finished(make_request(), [9, 8, 7, 6], len(PROMPT), handoff=True)
    producer.cancel_send("r")
    metadata = producer.build_connector_metadata(IDLE)
    assert ([offer.request_id for offer in metadata.offers], metadata.cancelled_offers) == (["r"], ["r"])
    assert producer.build_connector_metadata(IDLE).is_empty


def test_an_engine_of_several_ranks_offers_when_all_of_them_listen() -> None:
    scheduler = NixlConnector.build_scheduler(build_context(Role.PREFILL, {}, parallel=(2, 1)))
    endpoints = [Endpoint("tcp://127.0.0.1:4000", "g"), Endpoint("tcp://127.0.0.1:4001", "h")]
    for rank in (1, 0):
        assert scheduler.request_finished(make_request(), [1, 2, 3, 4], len(PROMPT), handoff=True) == FinishDecision()
        scheduler.update_from_output(ConnectorOutput(messages=[Listening(rank, endpoints[rank])]))
    params = scheduler.request_finished(make_request(), [1, 2, 3, 4], len(PROMPT), handoff=True).kv_transfer_params
    reference = read_params(params)
    assert reference is not None
    assert [reference.in_rank(rank).producer for rank in range(2)] == endpoints
    assert params is not None
    assert params.num_bytes == 4 * TINY_SPEC.block_bytes


def go_on(scheduler: NixlScheduler, num_computed_tokens: int, preempted: tuple[str, ...] = ()) -> StepMetadata:
    """A step that computes the next tokens of the prompt."""
    scheduled = ScheduledTokens(make_request(), [9, 8, 7, 6], num_computed_tokens, S)
    return scheduler.build_connector_metadata(StepPlan(() if preempted else [scheduled], preempted))


@pytest.mark.parametrize(("ending", "is_told"), [("offered", False), ("aborted", True), ("preempted", True)])
def test_filled_blocks_of_a_prompt_are_told_of_and_so_is_that_nobody_will_want_them(
    producer: NixlScheduler, ending: str, is_told: bool
) -> None:
    assert go_on(producer, 0).is_empty
    assert go_on(producer, S).filled == [FilledBlocks("r", 0, [9])]
    if ending == "preempted":
        metadata = go_on(producer, 0, preempted=("r", "another"))
    else:
        producer.request_finished(make_request(), [9, 8, 7, 6], len(PROMPT), handoff=ending == "offered")
        metadata = producer.build_connector_metadata(IDLE)
    assert metadata.forgotten == (["r"] if is_told else [])
    assert producer.build_connector_metadata(IDLE).is_empty


def test_an_engine_that_offers_nothing_tells_of_no_filled_blocks(consumer: NixlScheduler) -> None:
    assert [go_on(consumer, num_tokens).is_empty for num_tokens in (0, S, 2 * S)] == [True] * 3
