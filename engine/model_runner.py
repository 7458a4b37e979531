"""One worker's step: inputs from the scheduler's decision, the forward pass, tokens.

Owns the model, the KV memory, the requests' token ids and block tables as tensors need them, and the connector's
worker half. Knows nothing of queues or limits.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.connectors.base import ChoosesLayerSteps, KVConnectorWorker
from pdserve.engine.models import CausalLM
from pdserve.engine.sampling.logprobs import build_token_logprobs
from pdserve.engine.sampling.sampler import Sampler, SamplingRow
from pdserve.engine.scheduler_output import ModelRunnerOutput, NewRequest, ScheduledRequest, SchedulerOutput
from pdserve.kernels.base import AttentionMetadata
from pdserve.protocol import SamplingParams

logger = logging.getLogger(__name__)

# Prompt logprobs need logits of whole chunks; this many rows at a time bound their memory.
_PROMPT_LOGITS_ROWS = 64


@dataclass(slots=True)
class _RunnerRequest:
    """What the runner keeps of a request between steps."""

    token_ids: list[int]
    num_prompt_tokens: int
    block_ids: list[int]
    sampling: SamplingParams
    wants_prompt_logprobs: bool

    @classmethod
    def from_new(cls, new: NewRequest) -> _RunnerRequest:
        return cls(
            list(new.token_ids), new.num_prompt_tokens, list(new.block_ids), new.sampling, new.wants_prompt_logprobs
        )


class LayerTransfers:
    """Calls a layerwise connector around each layer's attention."""

    def __init__(self, connector: KVConnectorWorker) -> None:
        self._connector = connector
        self._chooser = connector if isinstance(connector, ChoosesLayerSteps) else None

    def are_wanted(self) -> bool:
        """Whether the connector has a use for them in this step."""
        return self._chooser is None or self._chooser.wants_layers()

    def before_layer(self, layer: int) -> None:
        """The layer's KV of this step's loads must be in place."""
        self._connector.wait_for_layer_load(layer)

    def after_layer(self, layer: int) -> None:
        """The layer's KV of this step's tokens stands in the cache."""
        self._connector.save_kv_layer(layer)


class ModelRunner:
    """Runs steps of one model on one device.

    Args:
        model: the model, loaded.
        kv_cache: ``[B, L, 2, K, S, H]``.
        sampler: chooses tokens.
        connector: the connector's worker half, with the KV memory registered.
        layerwise: whether the connector wants its layer hooks called.
    """

    def __init__(
        self,
        model: CausalLM,
        kv_cache: Tensor,
        sampler: Sampler,
        connector: KVConnectorWorker,
        *,
        layerwise: bool,
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._block_size = kv_cache.shape[4]
        self._sampler = sampler
        self._connector = connector
        self._layer_hook = LayerTransfers(connector) if layerwise else None
        self._requests: dict[str, _RunnerRequest] = {}

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step; the connector's part of it runs also when there are no tokens."""
        self._update_requests(step)
        output = ModelRunnerOutput()
        self._connector.start_load_kv(step.connector_metadata)
        if self._compute(step, output):
            self._connector.wait_for_save()
        output.connector_output = self._connector.get_finished(step.finished_sending_due)
        return output

    def warm_up(self) -> None:
        """Run a prompt's and an answer's step in the first block, before anybody owns it.

        The first request then does not pay for what happens once: kernels chosen, buffers and pages touched.
        """
        with torch.inference_mode():
            for num_tokens in (self._block_size, 1):
                metadata = AttentionMetadata.build([num_tokens], [num_tokens], [[0]], self._block_size)
                token_ids = torch.zeros(num_tokens, dtype=torch.int64)
                hidden_TD = self._model.forward(token_ids, metadata, self._kv_cache, None)
                self._model.compute_logits(hidden_TD[-1:])

    def close(self) -> None:
        """Close the connector's half; idempotent."""
        self._connector.close()

    def _update_requests(self, step: SchedulerOutput) -> None:
        for request_id in step.dropped_request_ids:
            self._requests.pop(request_id, None)
        for new in step.new_requests:
            self._requests[new.request_id] = _RunnerRequest.from_new(new)
        for item in step.scheduled:
            if item.new_block_ids:
                self._requests[item.request_id].block_ids.extend(item.new_block_ids)

    def _compute(self, step: SchedulerOutput, output: ModelRunnerOutput) -> bool:
        """Forward and sample; False when the forward pass failed, and then nothing of it may be saved.

        A failure (memory, a kernel) ends this step's requests, not the engine.
        """
        if not step.num_tokens:
            return True
        try:
            with torch.inference_mode():
                self._forward_and_sample(step.scheduled, output)
        except (RuntimeError, MemoryError):
            logger.exception("the forward pass of %d requests failed", len(step.scheduled))
            reason = "the engine's forward pass failed"
            output.failed = {item.request_id: reason for item in step.scheduled}
            return False
        return True

    def _forward_and_sample(self, items: tuple[ScheduledRequest, ...], output: ModelRunnerOutput) -> None:
        token_ids, metadata = self._build_inputs(items)
        hidden_TD = self._model.forward(token_ids, metadata, self._kv_cache, self._choose_layer_hook())
        self._make_prompt_logprobs(items, hidden_TD, output)
        last_rows: list[int] = []
        sampling_rows: list[SamplingRow] = []
        row = -1
        for item in items:
            row += item.num_scheduled_tokens
            request = self._requests[item.request_id]
            if item.num_computed_tokens + item.num_scheduled_tokens == len(request.token_ids):
                last_rows.append(row)
                sampling_rows.append(
                    SamplingRow(item.request_id, request.sampling, request.token_ids, request.num_prompt_tokens)
                )
        if not last_rows:
            return
        logits_RV = self._model.compute_logits(hidden_TD[torch.tensor(last_rows)])
        sampled = self._sampler.sample(logits_RV, sampling_rows)
        for request_id, token_id in sampled.token_ids.items():
            self._requests[request_id].token_ids.append(token_id)
        output.sampled_token_ids = sampled.token_ids
        output.logprobs = sampled.logprobs
        output.failed = sampled.failed

    def _choose_layer_hook(self) -> LayerTransfers | None:
        return self._layer_hook if self._layer_hook is not None and self._layer_hook.are_wanted() else None

    def _build_inputs(self, items: tuple[ScheduledRequest, ...]) -> tuple[Tensor, AttentionMetadata]:
        token_ids: list[int] = []
        for item in items:
            start = item.num_computed_tokens
            token_ids += self._requests[item.request_id].token_ids[start : start + item.num_scheduled_tokens]
        metadata = AttentionMetadata.build(
            query_lens=[item.num_scheduled_tokens for item in items],
            seq_lens=[item.num_computed_tokens + item.num_scheduled_tokens for item in items],
            block_ids=[self._requests[item.request_id].block_ids for item in items],
            block_size=self._block_size,
        )
        return torch.tensor(token_ids, dtype=torch.int64), metadata

    def _make_prompt_logprobs(
        self, items: tuple[ScheduledRequest, ...], hidden_TD: Tensor, output: ModelRunnerOutput
    ) -> None:
        """Logprobs of the prompt tokens that follow this chunk's tokens."""
        first_row = 0
        for item in items:
            request = self._requests[item.request_id]
            start = item.num_computed_tokens
            end = min(start + item.num_scheduled_tokens, request.num_prompt_tokens - 1)
            if request.wants_prompt_logprobs and end > start:
                num_top = request.sampling.prompt_logprobs or 0
                entries = output.prompt_logprobs.setdefault(item.request_id, [])
                for chunk in range(start, end, _PROMPT_LOGITS_ROWS):
                    chunk_end = min(chunk + _PROMPT_LOGITS_ROWS, end)
                    rows = slice(first_row + chunk - start, first_row + chunk_end - start)
                    logits_TV = self._model.compute_logits(hidden_TD[rows])
                    targets = request.token_ids[chunk + 1 : chunk_end + 1]
                    entries += [
                        build_token_logprobs(row, t, num_top) for row, t in zip(logits_TV, targets, strict=True)
                    ]
            first_row += item.num_scheduled_tokens
