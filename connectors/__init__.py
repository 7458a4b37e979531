"""KV connectors: the contract, the registry and the connectors that come with pdserve.

A third party's connector imports from here, and, where it wants ready-made parts, from `pdserve.connectors.blocks`.
Importing this package loads no torch.
"""

if not __name__.startswith("pdserve."):
    raise ImportError(f"import pdserve.connectors, not the bare name {__name__}")

from pdserve.connectors.base import (
    CancelsSends,
    ConnectorContext,
    ConnectorFeatures,
    ConnectorMetadata,
    ConnectorOutput,
    ConnectorStats,
    FinishDecision,
    HearsOfQueue,
    KVConnector,
    KVConnectorScheduler,
    KVConnectorWorker,
    KVRequest,
    MatchResult,
    ScheduledTokens,
    StepPlan,
    WakesEngine,
)
from pdserve.connectors.messages import MessageTypes, ServesRanks
from pdserve.connectors.registry import ENTRY_POINT_GROUP, connector_names, load_connector
from pdserve.errors import ConfigError, ConnectorError
from pdserve.kv_layout import BlockHasher, BlockKey, KVCacheSpec, ModelIdentity, Rank
from pdserve.protocol import KVTransferParams, Role

__all__ = [
    "ENTRY_POINT_GROUP",
    "BlockHasher",
    "BlockKey",
    "CancelsSends",
    "ConfigError",
    "ConnectorContext",
    "ConnectorError",
    "ConnectorFeatures",
    "ConnectorMetadata",
    "ConnectorOutput",
    "ConnectorStats",
    "FinishDecision",
    "HearsOfQueue",
    "KVCacheSpec",
    "KVConnector",
    "KVConnectorScheduler",
    "KVConnectorWorker",
    "KVRequest",
    "KVTransferParams",
    "MatchResult",
    "MessageTypes",
    "ModelIdentity",
    "Rank",
    "Role",
    "ScheduledTokens",
    "ServesRanks",
    "StepPlan",
    "WakesEngine",
    "connector_names",
    "load_connector",
]
