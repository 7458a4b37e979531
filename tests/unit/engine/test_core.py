from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from scripted import BLOCK_SIZE, ScriptedConnector

from pdserve.connectors.base import ConnectorOutput, FinishDecision
from pdserve.engine.config import build_config
from pdserve.engine.core import EngineCore
from pdserve.engine.scheduler_output import ModelRunnerOutput, SchedulerOutput
from pdserve.errors import EngineError
from pdserve.kv_layout import KVCacheSpec, ModelIdentity
from pdserve.protocol import AddRequest, FinishReason, InstanceLimits, KVTransferParams, RequestOutput, SamplingParams

STEP_S = 0.6
PARAMS = KVTransferParams(connector="scripted", transfer_id="t", num_tokens=6)


@dataclass
class ScriptedExecutor:
    """Takes `STEP_S` for any step with tokens, samples 7 for everyone, reports what the test puts in ``report``."""

    now_s: float = 0.0
    steps: list[SchedulerOutput] = field(default_factory=list)
    report: ConnectorOutput = field(default_factory=ConnectorOutput)
    is_lost: bool = False

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self.steps.append(step)
        self.now_s += STEP_S if step.num_tokens else 0.0
        report, self.report = self.report, ConnectorOutput()
        return ModelRunnerOutput({item.request_id: 7 for item in step.scheduled}, connector_output=report)

    def close(self) -> None:
        pass


class Engine:
    def __init__(self, decision: FinishDecision) -> None:
        spec = KVCacheSpec(num_layers=1, num_kv_heads=1, head_dim=8, block_size=BLOCK_SIZE, dtype="float32")
        self.executor = ScriptedExecutor()
        self.core = EngineCore(
            build_config(block_size=BLOCK_SIZE, enable_prefix_caching=False),
            identity=ModelIdentity("w", "a", "float32", "scripted", spec),
            limits=InstanceLimits(
                max_model_len=100, max_num_seqs=8, max_queue_len=8, num_blocks=64, vocab_size=100, max_logprobs=0
            ),
            eos_token_ids=frozenset(),
            executor=self.executor,
            connector=ScriptedConnector(decisions={"first": decision}),
            clock=lambda: self.executor.now_s,
        )
        self.add("first")
        self.first_outputs = self.core.step()
        self.add("second")

    def add(self, request_id: str) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=10)
        self.core.add_request(
            AddRequest(request_id=request_id, prompt_token_ids=list(range(6)), sampling=sampling, handoff=True)
        )

    def step(self) -> tuple[int, list[RequestOutput]]:
        """How many tokens the step computed, and its outputs."""
        outputs = self.core.step()
        return self.executor.steps[-1].num_tokens, outputs


@pytest.fixture
def saving() -> Engine:
    """The first request's KV is being written, the second one waits to be computed."""
    return Engine(FinishDecision(kv_transfer_params=PARAMS, announce_when_sent=True))


def test_a_hand_off_that_is_saved_soon_is_announced_before_the_next_step_computes(saving: Engine) -> None:
    assert [output.finish_reason for output in saving.first_outputs] == [None]
    assert not saving.core.has_work()
    assert saving.core.has_transfers()
    assert saving.step() == (0, [])
    assert saving.executor.steps[-1].finished_sending_due == ("first",)
    saving.executor.report = ConnectorOutput(finished_sending={"first"})
    num_tokens, (announcement,) = saving.step()
    assert num_tokens == 0
    assert (announcement.finish_reason, announcement.kv_transfer_params) == (FinishReason.HANDOFF, PARAMS)
    assert saving.core.has_work()
    num_tokens, _ = saving.step()
    assert num_tokens == 6


def test_a_store_that_takes_long_delays_a_step_by_a_twentieth(saving: Engine) -> None:
    saving.executor.now_s += 0.0499 * STEP_S
    assert saving.step() == (0, [])
    saving.executor.now_s += 0.0002 * STEP_S
    assert saving.core.has_work()
    saving.executor.report = ConnectorOutput(finished_sending={"first"})
    num_tokens, outputs = saving.step()
    assert num_tokens == 6
    assert [(output.request_id, output.finish_reason) for output in outputs] == [
        ("first", FinishReason.HANDOFF),
        ("second", FinishReason.HANDOFF),
    ]


@pytest.mark.parametrize(
    "decision",
    [FinishDecision(), FinishDecision(kv_transfer_params=PARAMS), FinishDecision(True, PARAMS)],
    ids=["nothing", "saved", "held"],
)
def test_nothing_waits_where_the_hand_off_is_announced_already(decision: FinishDecision) -> None:
    engine = Engine(decision)
    assert [output.finish_reason for output in engine.first_outputs] == [FinishReason.HANDOFF]
    assert engine.core.has_work()
    num_tokens, _ = engine.step()
    assert num_tokens == 6


def test_nobody_waits_for_an_announcement_that_nobody_wants_any_more(saving: Engine) -> None:
    saving.core.abort_requests(["first"])
    assert saving.core.has_work()
    saving.executor.report = ConnectorOutput(finished_sending={"first"})
    num_tokens, outputs = saving.step()
    assert (num_tokens, [output.request_id for output in outputs]) == (6, ["second"])
    saving.step()
    assert not saving.core.has_transfers()


def test_a_name_under_which_kv_still_moves_is_not_given_to_another_request(saving: Engine) -> None:
    with pytest.raises(EngineError, match="request id 'first' is in use"):
        saving.add("first")
    saving.executor.report = ConnectorOutput(finished_sending={"first"})
    saving.step()
    saving.add("first")


def test_an_aborted_request_delays_nothing_when_its_sending_is_over(saving: Engine) -> None:
    saving.core.abort_requests(["second"])
    saving.executor.report = ConnectorOutput(finished_sending={"first"}, failed_sending={"first"})
    num_tokens, (announcement,) = saving.step()
    assert (num_tokens, announcement.finish_reason, announcement.kv_transfer_params) == (0, FinishReason.HANDOFF, None)
    saving.step()  # the runner hears of the request that it knew
    assert not saving.core.has_work()
    assert not saving.core.has_transfers()
