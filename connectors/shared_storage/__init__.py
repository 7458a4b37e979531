"""KV through files in a directory that prefill and decode engines share (also ``/dev/shm``).

A store: blocks are addressed by identity, outlive the engine that wrote them, and serve every engine of the same
model, so a prompt's prefix computed anywhere is reused everywhere.

    scheduler.py     what the store holds, what each step loads and saves
    worker.py        composes, beside the model runner:
      loads.py         files → KV memory, on reader threads
      saves.py         KV memory → staging → files, on writer threads
      block_writer.py  one block's write, with room made and failures named
    directory.py     names, presence, atomic publication
    block_file.py    the format and its verification
    capacity.py      limit and eviction
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pdserve.connectors.base import ConnectorContext, ConnectorFeatures
from pdserve.connectors.shared_storage.block_file import BlockFormat
from pdserve.connectors.shared_storage.directory import BlockDirectory
from pdserve.connectors.shared_storage.options import StorageOptions, parse_options
from pdserve.connectors.shared_storage.scheduler import SharedStorageScheduler
from pdserve.protocol import Role

if TYPE_CHECKING:
    from pdserve.connectors.shared_storage.worker import SharedStorageWorker

__all__ = ["SharedStorageConnector"]


class SharedStorageConnector:
    """Builds the two halves."""

    features: ClassVar[ConnectorFeatures] = ConnectorFeatures(can_save=True, can_load=True, is_store=True)

    @classmethod
    def build_scheduler(cls, context: ConnectorContext) -> SharedStorageScheduler:
        """The scheduler half.

        Raises:
            ConfigError: an option is unknown or wrong.
        """
        options = parse_options(context)
        saves = options.save == "always" or (options.save == "auto" and context.role is Role.PREFILL)
        return SharedStorageScheduler(context, _build_directory(context, options), saves=saves)

    @classmethod
    def build_worker(cls, context: ConnectorContext) -> SharedStorageWorker:
        """The worker half; makes the directory.

        Raises:
            ConfigError: an option is unknown or wrong, or the directory cannot be used.
        """
        # Imported here: the scheduler half may live in a process without torch.
        from pdserve.connectors.shared_storage.worker import SharedStorageWorker

        options = parse_options(context)
        directory = _build_directory(context, options)
        directory.create_root(must_be_ours="path" not in context.options)
        return SharedStorageWorker(context, options, directory)


def _build_directory(context: ConnectorContext, options: StorageOptions) -> BlockDirectory:
    return BlockDirectory(options.path, BlockFormat(context.identity, context.spec).file_bytes)
