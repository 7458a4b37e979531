"""Several connectors in one engine, in order: for example NIXL for the hand-off and a store for reuse.

Tokens are read from the first child that has them all, else from the one that has most; every child saves. For the
engine it is one connector: each transfer ends once, blocks are held while any child needs them, and one child's
failure is not the others'.

    children.py   which connectors, from the options
    params.py     hand-off parameters: one parcel with a part for each child
    scheduler.py  asks children in order, tells each its own part
    worker.py     runs all children, joins their reports
    messages.py   between the two halves
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pdserve.connectors.base import ConnectorContext, ConnectorFeatures
from pdserve.connectors.messages import MessageTypes
from pdserve.connectors.multi.children import build_halves, get_child_types, parse_children
from pdserve.connectors.multi.messages import compose_types
from pdserve.connectors.multi.scheduler import MultiScheduler

if TYPE_CHECKING:
    from pdserve.connectors.multi.worker import MultiWorker

__all__ = ["MultiConnector"]


class MultiConnector:
    """Builds the two halves.

    The features are what the halves pass on to children that have it, and what a composition of connectors that save
    and load has; `compose_features` tells those of given children.
    """

    features: ClassVar[ConnectorFeatures] = ConnectorFeatures(
        can_save=True,
        can_load=True,
        layerwise=True,
        cancels_sends=True,
        hears_of_queue=True,
        wakes_engine=True,
        ranks=True,
    )

    @classmethod
    def build_scheduler(cls, context: ConnectorContext) -> MultiScheduler:
        """The scheduler half.

        Raises:
            ConfigError: option ``children`` is wrong, or a child refuses its own.
        """
        children = parse_children(context.options)
        halves = build_halves(context, children, lambda child, own: child.connector.build_scheduler(own))
        return MultiScheduler(context, children, halves)

    @classmethod
    def build_worker(cls, context: ConnectorContext) -> MultiWorker:
        """The worker half.

        Raises:
            ConfigError: option ``children`` is wrong, or a child refuses its own.
        """
        # Imported here: the scheduler half may live in a process without torch.
        from pdserve.connectors.multi.worker import MultiWorker

        children = parse_children(context.options)
        halves = build_halves(context, children, lambda child, own: child.connector.build_worker(own))
        layerwise = [half for child, half in zip(children, halves, strict=True) if child.connector.features.layerwise]
        return MultiWorker(halves, layerwise, [child.name for child in children], context.rank)

    @classmethod
    def message_types(cls, options: Mapping[str, Any]) -> MessageTypes:
        """The children's, put together.

        Raises:
            ConfigError: option ``children`` is wrong, or a child does not serve ranks.
        """
        return compose_types(get_child_types(parse_children(options)))
