"""KV through LMCache: its CPU memory and local disk in front, files or a Redis server behind, shared by all engines.

LMCache runs inside the engine's process. Its server would share one memory between the engines of a machine, but
names chunks by hashing token ids itself, each chunk together with all before it; so a block could not be stored or
fetched by its own key, nor under a salt, adapter or partial length of ours. In process the keys are handed in.

What LMCache sees of a block is a value: header and payload in one piece, as `blocks.block_format` seals it. To
LMCache such a value is one token of a model with a single layer, and a prompt is the list of its blocks' digests::

    block key ──> LMCache key     model name = "pdserve-" + fingerprint, chunk hash = digest, worker = rank
    block     ──> one MemoryObj   [2, 1, 1, value_bytes / 2] of uint8

A digest covers tokens, length, adapter, salt and model, so partial blocks and salts need no more than that. LMCache
verifies nothing of what it reads: the header in each value does, before a byte of it reaches KV memory. Each rank
of an engine has an LMCache engine of its own; lookups ask for the first one's shares, and another's that is gone is a
failed load.

A store; the halves are those of `connectors.blocks`. Lookups and promises go by what is shared alone, the tiers in
front make loads quicker. Here is what LMCache adds:

    options.py         settings
    lookup.py          what the scheduler's half asks
    lmcache_store.py   reads and writes of the worker's half, in batches; both halves use:
      opening.py         an LMCache engine from options
      cache_engine.py    the engine, asked and filled
      lmcache_parts.py   what LMCache wants implemented: keys, and copies from and to its memory
      shared_files.py    its back-end for files, quicker
      retrieval.py       one batch from LMCache's memory into KV memory
      deadline_calls.py  calls that may never return
      directories.py     what an engine has to itself on disk
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pdserve import env
from pdserve.connectors.base import ConnectorContext, ConnectorFeatures
from pdserve.connectors.blocks.asked_index import AskedIndex
from pdserve.connectors.blocks.messages import StepMetadata
from pdserve.connectors.blocks.scheduler import StoreScheduler
from pdserve.connectors.lmcache.options import CONNECTOR_NAME, parse_options
from pdserve.connectors.messages import MessageTypes

if TYPE_CHECKING:
    from pdserve.connectors.blocks.worker import StoreWorker

__all__ = ["LMCacheConnector"]

# Told here, by the one who loads connectors; importing it takes seconds and waits until it is used.
if importlib.util.find_spec("lmcache") is None:
    raise ImportError("the package lmcache is not installed")
# Before any module of this package imports it, whoever asks for that.
env.prepare_for_lmcache()


class LMCacheConnector:
    """Builds the two halves, each with an LMCache engine of its own: they may live in different processes."""

    features: ClassVar[ConnectorFeatures] = ConnectorFeatures(can_save=True, can_load=True, is_store=True, ranks=True)

    @classmethod
    def build_scheduler(cls, context: ConnectorContext) -> StoreScheduler:
        """The scheduler half.

        Raises:
            ConfigError: an option is unknown or wrong, or LMCache cannot be started with them.
        """
        from pdserve.connectors.lmcache.lookup import LMCacheLookup

        options = parse_options(context)
        index = AskedIndex(LMCacheLookup(context, options), timeout_s=options.lookup_timeout_s)
        return StoreScheduler(CONNECTOR_NAME, context, index, saves=options.saves_as(context.role))

    @classmethod
    def build_worker(cls, context: ConnectorContext) -> StoreWorker:
        """The worker half.

        Raises:
            ConfigError: an option is unknown or wrong, or LMCache cannot be started with them.
        """
        from pdserve.connectors.blocks.worker import StoreWorker
        from pdserve.connectors.lmcache.lmcache_store import LMCacheStore

        options = parse_options(context)
        return StoreWorker(CONNECTOR_NAME, context, options, LMCacheStore(context, options))

    @classmethod
    def message_types(cls, options: Mapping[str, Any]) -> MessageTypes:
        """The same whatever the options: the worker halves say nothing of their own."""
        return MessageTypes(metadata=StepMetadata)
