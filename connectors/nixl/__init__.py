"""KV moved by NIXL, straight from the prefill engine's blocks into the decode engine's.

Direct: blocks are not copied anywhere on the way, and exist for one consumer, which fetches them under a lease. One
machine: copies between processes over shared memory; several: TCP or what UCX finds better; GPUs: device memory.

    scheduler.py        which requests' blocks are offered, which references are redeemed
      filled_blocks.py    which blocks of prompts under way are filled
    worker.py           the half beside the model runner; composes:
      transfer_thread.py  the loop on which all of the following lives
      producer.py         offers, and answers to consumers
      checksums.py        checksums of what is offered, taken before anybody asks
      leases.py           who may read what, until when
      consumer.py         from a reference to verified blocks
      loads.py            one load under way
      reads.py            the order of reads
      queued_transfers.py  transfers that wait for their turn to be loaded
      agent.py            NIXL, wrapped
      descriptors.py      blocks as NIXL addresses them
      pool_memory.py      blocks as bytes: checksums, wiping
      side_channel.py     sockets; channels.py: a consumer's connections
      wire.py             messages between producer and consumer
      report.py           what ended, for the forward thread
    messages.py         messages between the two halves of one engine
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pdserve.connectors.base import ConnectorContext, ConnectorFeatures
from pdserve.connectors.messages import MessageTypes
from pdserve.connectors.nixl.messages import Listening, StepMetadata
from pdserve.connectors.nixl.options import parse_options
from pdserve.connectors.nixl.scheduler import NixlScheduler

if TYPE_CHECKING:
    from pdserve.connectors.nixl.worker import NixlWorker

__all__ = ["NixlConnector"]

# NIXL itself is imported when the worker half starts: it loads torch, which the scheduler half does without.
if importlib.util.find_spec("nixl") is None:
    raise ImportError("the package nixl is not installed")


class NixlConnector:
    """Builds the two halves."""

    features: ClassVar[ConnectorFeatures] = ConnectorFeatures(
        can_save=True, can_load=True, cancels_sends=True, hears_of_queue=True, wakes_engine=True, ranks=True
    )

    @classmethod
    def build_scheduler(cls, context: ConnectorContext) -> NixlScheduler:
        """The scheduler half.

        Raises:
            ConfigError: an option is unknown or wrong.
        """
        return NixlScheduler(context, parse_options(context).lease_s)

    @classmethod
    def build_worker(cls, context: ConnectorContext) -> NixlWorker:
        """The worker half.

        Raises:
            ConfigError: an option is unknown or wrong.
        """
        from pdserve.connectors.nixl.worker import NixlWorker

        return NixlWorker(context, parse_options(context))

    @classmethod
    def message_types(cls, options: Mapping[str, Any]) -> MessageTypes:
        """The same whatever the options."""
        return MessageTypes(metadata=StepMetadata, report=Listening)
