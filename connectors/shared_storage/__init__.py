"""KV through files in a directory that prefill and decode engines share (also ``/dev/shm``).

A store: blocks are addressed by identity, outlive the engine that wrote them, and serve every engine of the same
model, so a prompt's prefix computed anywhere is reused everywhere. The halves are those of `connectors.blocks`; here
is what files add:

    index.py        what is stored, for lookups
    file_store.py   reads and writes, failures named
    block_file.py   one file
    directory.py    names, presence, atomic publication
    capacity.py     limit and eviction
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pdserve.connectors.base import ConnectorContext, ConnectorFeatures
from pdserve.connectors.blocks.block_format import BlockFormat
from pdserve.connectors.blocks.messages import StepMetadata
from pdserve.connectors.blocks.scheduler import StoreScheduler
from pdserve.connectors.messages import MessageTypes
from pdserve.connectors.shared_storage.directory import BlockDirectory
from pdserve.connectors.shared_storage.index import DirectoryIndex
from pdserve.connectors.shared_storage.options import CONNECTOR_NAME, get_default_path, parse_options

if TYPE_CHECKING:
    from pdserve.connectors.blocks.worker import StoreWorker

__all__ = ["SharedStorageConnector"]


class SharedStorageConnector:
    """Builds the two halves."""

    features: ClassVar[ConnectorFeatures] = ConnectorFeatures(
        can_save=True, can_load=True, is_store=True, layerwise=True, wakes_engine=True, ranks=True
    )

    @classmethod
    def message_types(cls, options: Mapping[str, Any]) -> MessageTypes:
        """The same whatever the options: the worker halves say nothing of their own."""
        return MessageTypes(metadata=StepMetadata)

    @classmethod
    def get_directory(cls, options: Mapping[str, Any]) -> Path:
        """Where KV lies with these options, for ``pdserve doctor``."""
        return Path(str(options["path"])).expanduser().absolute() if "path" in options else get_default_path()

    @classmethod
    def build_scheduler(cls, context: ConnectorContext) -> StoreScheduler:
        """The scheduler half.

        Raises:
            ConfigError: an option is unknown or wrong.
        """
        options = parse_options(context)
        block_format = BlockFormat(context.identity, context.spec, context.rank)
        directory = BlockDirectory(options.path, block_format.value_bytes, rank=context.rank)
        index = DirectoryIndex(directory, context.rank)
        return StoreScheduler(CONNECTOR_NAME, context, index, saves=options.saves_as(context.role))

    @classmethod
    def build_worker(cls, context: ConnectorContext) -> StoreWorker:
        """The worker half; makes the directory.

        Raises:
            ConfigError: an option is unknown or wrong, or the directory cannot be used.
        """
        # Imported here: the scheduler half may live in a process without torch.
        from pdserve.connectors.blocks.worker import StoreWorker
        from pdserve.connectors.shared_storage.capacity import CapacityKeeper
        from pdserve.connectors.shared_storage.file_store import FileStore

        options = parse_options(context)
        block_format = BlockFormat(context.identity, context.spec, context.rank)
        directory = BlockDirectory(options.path, block_format.value_bytes, rank=context.rank)
        directory.create_root(must_be_ours="path" not in context.options)
        capacity = CapacityKeeper(directory, max_bytes=options.max_bytes, min_age_s=options.min_age_s)
        store = FileStore(directory, block_format, capacity)
        return StoreWorker(CONNECTOR_NAME, context, options, store, layerwise=options.layerwise)
