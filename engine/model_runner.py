"""One worker's step: inputs from the scheduler's decision, the forward pass, tokens.

Owns the model, the KV memory, the requests as arrays, and the connector's worker half. Knows nothing of queues.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from pdserve.connectors.base import ChoosesLayerSteps, KVConnectorWorker
from pdserve.engine.input_batch import InputBatch
from pdserve.engine.models import LayerHook, ModelConfig
from pdserve.engine.sampling.logprobs import build_token_logprobs
from pdserve.engine.sampling.sampler import SamplerOutput, SamplingRow
from pdserve.engine.scheduler_output import ModelRunnerOutput, NewRequest, ScheduledRequest, SchedulerOutput
from pdserve.kernels.base import AttentionMetadata
from pdserve.protocol import TokenLogprobs

logger = logging.getLogger(__name__)

# Prompt logprobs need logits of whole chunks; this many rows at a time bound their memory.
_PROMPT_LOGITS_ROWS = 64


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


class LanguageModel(Protocol):
    """A model as its runner sees it: a `CausalLM`, or a rank's share of one."""

    @property
    def config(self) -> ModelConfig:
        """The whole model's shape."""
        ...

    def forward(
        self,
        token_ids_T: Tensor,
        metadata: AttentionMetadata,
        kv_cache: Tensor,
        on_layer: LayerHook | None = None,
    ) -> Tensor | None:
        """Hidden states [T, D] behind the final norm; None where another stage goes on with them."""
        ...

    def compute_logits(self, hidden_RD: Tensor, out_RV: Tensor | None = None) -> Tensor:
        """See `CausalLM.compute_logits`."""
        ...

    def find_likeliest(self, hidden_RD: Tensor) -> tuple[Tensor, Tensor]:
        """See `CausalLM.find_likeliest`."""
        ...


class TokenSampler(Protocol):
    """Chooses tokens: a `Sampler`, or its stand-in in ranks that leave it to another one."""

    def sample(self, logits_RV: Tensor, rows: Sequence[SamplingRow]) -> SamplerOutput:
        """See `Sampler.sample`."""
        ...

    def take_likeliest(self, token_ids_R: Tensor, logits_R: Tensor, rows: Sequence[SamplingRow]) -> SamplerOutput:
        """See `Sampler.take_likeliest`."""
        ...


class ModelRunner:
    """Runs steps of one model on one device.

    Args:
        model: the model, loaded.
        kv_cache: ``[B, L, 2, K, S, H]``.
        sampler: chooses tokens.
        connector: the connector's worker half, with the KV memory registered.
        max_num_seqs: requests that run at once.
        max_model_len: tokens of the longest sequence.
        layerwise: whether the connector wants its layer hooks called.
        num_ranks: of the engine; all of them run the same steps, this one among them.
    """

    def __init__(
        self,
        model: LanguageModel,
        kv_cache: Tensor,
        sampler: TokenSampler,
        connector: KVConnectorWorker,
        *,
        max_num_seqs: int,
        max_model_len: int,
        layerwise: bool,
        num_ranks: int = 1,
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._block_size = kv_cache.shape[4]
        self._sampler = sampler
        self._connector = connector
        self._num_ranks = num_ranks
        self._layer_hook = LayerTransfers(connector) if layerwise else None
        self._batch = InputBatch(max_num_seqs, max_model_len, self._block_size)
        self._sampling_rows: dict[str, SamplingRow] = {}
        self._want_prompt_logprobs: set[str] = set()
        self._logits = torch.empty(0, model.config.vocab_size, dtype=torch.float32)

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
                if hidden_TD is not None:
                    self._model.find_likeliest(hidden_TD[-1:])

    def append_tokens(self, token_ids: Mapping[str, int]) -> None:
        """The tokens of the last step, where another rank chose them."""
        self._batch.append_tokens(token_ids.keys(), token_ids.values())

    def close(self) -> None:
        """Close the connector's half; idempotent."""
        self._connector.close()

    def _update_requests(self, step: SchedulerOutput) -> None:
        for request_id in step.dropped_request_ids:
            self._sampling_rows.pop(request_id, None)
            self._want_prompt_logprobs.discard(request_id)
            self._batch.drop(request_id)
        for new in step.new_requests:
            self._add_request(new)
        for item in step.scheduled:
            if item.new_block_ids:
                self._batch.append_blocks(item.request_id, item.new_block_ids)

    def _add_request(self, new: NewRequest) -> None:
        self._batch.add(new)
        get_token_ids = partial(self._batch.get_token_ids, new.request_id)
        self._sampling_rows[new.request_id] = SamplingRow(
            new.request_id, new.sampling, get_token_ids, new.num_prompt_tokens
        )
        if new.wants_prompt_logprobs:
            self._want_prompt_logprobs.add(new.request_id)

    def _compute(self, step: SchedulerOutput, output: ModelRunnerOutput) -> bool:
        """Forward and sample; False when the forward pass failed, and then nothing of it may be saved.

        A failure (memory, a kernel) ends this step's requests, not the engine. One of several ranks cannot go on after
        it: the others wait for its part.
        """
        if not step.num_tokens:
            return True
        try:
            with torch.inference_mode():
                self._forward_and_sample(step.scheduled, output)
        except (RuntimeError, MemoryError):
            if self._num_ranks > 1:
                raise
            logger.exception("the forward pass of %d requests failed", len(step.scheduled))
            reason = "the engine's forward pass failed"
            output.failed = {item.request_id: reason for item in step.scheduled}
            return False
        return True

    def _forward_and_sample(self, items: tuple[ScheduledRequest, ...], output: ModelRunnerOutput) -> None:
        inputs = self._batch.build_inputs(items)
        hidden_TD = self._model.forward(inputs.token_ids, inputs.metadata, self._kv_cache, self._choose_layer_hook())
        if hidden_TD is None:
            return
        self._make_prompt_logprobs(items, hidden_TD, output)
        rows = [self._sampling_rows[items[index].request_id] for index in inputs.sampling_indices]
        if not rows:
            return
        hidden_RD = hidden_TD if len(rows) == len(hidden_TD) else hidden_TD[inputs.last_rows]
        sampled = self._sample(hidden_RD, rows)
        self._batch.append_tokens(sampled.token_ids.keys(), sampled.token_ids.values())
        output.sampled_token_ids = sampled.token_ids
        output.logprobs = sampled.logprobs
        output.failed = sampled.failed
        output.refused = sampled.refused

    def _sample(self, hidden_RD: Tensor, rows: Sequence[SamplingRow]) -> SamplerOutput:
        """A token for each row; where all are plain, without their logits in memory."""
        if all(row.is_plain for row in rows):
            return self._sampler.take_likeliest(*self._model.find_likeliest(hidden_RD), rows)
        return self._sampler.sample(self._compute_logits(hidden_RD), rows)

    def _choose_layer_hook(self) -> LayerTransfers | None:
        return self._layer_hook if self._layer_hook is not None and self._layer_hook.are_wanted() else None

    def _compute_logits(self, hidden_RD: Tensor) -> Tensor:
        """[R, V] float32, good until the next call: memory for whole batches would be mapped anew each step."""
        num_rows = hidden_RD.shape[0]
        if num_rows > self._logits.shape[0]:
            self._logits = torch.empty(num_rows, self._logits.shape[1], dtype=torch.float32)
        return self._model.compute_logits(hidden_RD, self._logits[:num_rows])

    def _make_prompt_logprobs(
        self, items: tuple[ScheduledRequest, ...], hidden_TD: Tensor, output: ModelRunnerOutput
    ) -> None:
        """Logprobs of the prompt tokens that follow this chunk's tokens."""
        if not self._want_prompt_logprobs:
            return
        first_row = 0
        for item in items:
            if item.request_id in self._want_prompt_logprobs:
                chunk_TD = hidden_TD[first_row : first_row + item.num_scheduled_tokens]
                entries = output.prompt_logprobs.setdefault(item.request_id, [])
                entries += self._build_prompt_logprobs(item, chunk_TD)
            first_row += item.num_scheduled_tokens

    def _build_prompt_logprobs(self, item: ScheduledRequest, chunk_TD: Tensor) -> Iterator[TokenLogprobs]:
        """One entry for each prompt token that follows one of the chunk."""
        row = self._sampling_rows[item.request_id]
        start = item.num_computed_tokens
        end = min(start + item.num_scheduled_tokens, row.num_prompt_tokens - 1)
        target_ids = row.get_token_ids()[start + 1 : end + 1].tolist()
        for first in range(0, len(target_ids), _PROMPT_LOGITS_ROWS):
            chunk_ids = target_ids[first : first + _PROMPT_LOGITS_ROWS]
            logits_TV = self._compute_logits(chunk_TD[first : first + len(chunk_ids)])
            for logits_V, target_id in zip(logits_TV, chunk_ids, strict=True):
                yield build_token_logprobs(logits_V, target_id, row.params.prompt_logprobs or 0)
