"""The connector that does nothing: an engine without one needs no ``if connector`` anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pdserve.connectors.base import (
    ConnectorContext,
    ConnectorFeatures,
    ConnectorMetadata,
    ConnectorOutput,
    FinishDecision,
    KVRequest,
    MatchResult,
    StepPlan,
)
from pdserve.connectors.messages import MessageTypes
from pdserve.errors import ConfigError
from pdserve.kv_layout import KVCacheSpec

if TYPE_CHECKING:
    import torch


class NullScheduler:
    """Never matches, never saves."""

    def get_num_new_matched_tokens(self, request: KVRequest, num_computed_tokens: int) -> MatchResult:
        """Nothing can be loaded."""
        return MatchResult(0)

    def update_state_after_alloc(
        self,
        request: KVRequest,
        block_ids: Sequence[int],
        num_computed_tokens: int,
        num_external_tokens: int,
    ) -> None:
        """Nothing to load."""

    def build_connector_metadata(self, plan: StepPlan) -> ConnectorMetadata:
        """No message."""
        return None

    def update_from_output(self, output: ConnectorOutput) -> None:
        """Nothing to learn."""

    def request_finished(
        self, request: KVRequest, block_ids: Sequence[int], num_computed_tokens: int, *, handoff: bool
    ) -> FinishDecision:
        """The blocks are free at once and nobody fetches them."""
        return FinishDecision()

    def close(self) -> None:
        """Nothing to release."""


class NullWorker:
    """Moves nothing, reports nothing."""

    def register_kv_caches(self, kv_cache: torch.Tensor, spec: KVCacheSpec) -> None:
        """The memory is of no interest."""

    def start_load_kv(self, metadata: ConnectorMetadata) -> None:
        """Nothing to load."""

    def wait_for_layer_load(self, layer: int) -> None:
        """Nothing to wait for."""

    def save_kv_layer(self, layer: int) -> None:
        """Nothing to save."""

    def wait_for_save(self) -> None:
        """Nothing to wait for."""

    def get_finished(self, finished_request_ids: Sequence[str]) -> ConnectorOutput:
        """Nothing ever ends, for nothing begins."""
        return ConnectorOutput()

    def close(self) -> None:
        """Nothing to release."""


class NullConnector:
    """Builds the two halves that do nothing; it takes no options."""

    features: ClassVar[ConnectorFeatures] = ConnectorFeatures(ranks=True)

    @classmethod
    def build_scheduler(cls, context: ConnectorContext) -> NullScheduler:
        """The scheduler half.

        Raises:
            ConfigError: an option was given.
        """
        _refuse_options(context)
        return NullScheduler()

    @classmethod
    def build_worker(cls, context: ConnectorContext) -> NullWorker:
        """The worker half.

        Raises:
            ConfigError: an option was given.
        """
        _refuse_options(context)
        return NullWorker()

    @classmethod
    def message_types(cls, options: Mapping[str, Any]) -> MessageTypes:
        """The halves have nothing to say to each other."""
        return MessageTypes()


def _refuse_options(context: ConnectorContext) -> None:
    if context.options:
        raise ConfigError(f"connector null takes no options, got {', '.join(sorted(context.options))}")
