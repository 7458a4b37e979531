"""NIXL whose producers are reached through a link that the soak can damage.

Used as ``linked_nixl:LinkedNixl`` with option ``link_port``: the link listens there and leads to option ``port``.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from pdserve.connectors.base import ConnectorContext, ConnectorOutput
from pdserve.connectors.nixl import NixlConnector
from pdserve.connectors.nixl.messages import Endpoint, Listening
from pdserve.connectors.nixl.scheduler import NixlScheduler

if TYPE_CHECKING:
    from pdserve.connectors.nixl.worker import NixlWorker

LINK_OPTION = "link_port"


class LinkedScheduler:
    """NIXL's scheduler half, told that its worker half listens where the link does."""

    def __init__(self, half: NixlScheduler, link_port: str) -> None:
        self._half = half
        self._address = f"tcp://127.0.0.1:{link_port}"

    def __getattr__(self, name: str) -> object:
        return getattr(self._half, name)

    def update_from_output(self, output: ConnectorOutput) -> None:
        messages = [
            Listening(message.rank, Endpoint(self._address, message.endpoint.generation))
            if isinstance(message, Listening)
            else message
            for message in output.messages
        ]
        self._half.update_from_output(dataclasses.replace(output, messages=messages))


class LinkedNixl:
    """NIXL's halves; an engine without the option is as it always is."""

    features = NixlConnector.features

    @classmethod
    def build_scheduler(cls, context: ConnectorContext) -> LinkedScheduler | NixlScheduler:
        link_port = context.options.get(LINK_OPTION)
        half = NixlConnector.build_scheduler(_without_link(context))
        return half if link_port is None else LinkedScheduler(half, str(link_port))

    @classmethod
    def build_worker(cls, context: ConnectorContext) -> NixlWorker:
        return NixlConnector.build_worker(_without_link(context))


def _without_link(context: ConnectorContext) -> ConnectorContext:
    options = {name: value for name, value in context.options.items() if name != LINK_OPTION}
    return dataclasses.replace(context, options=options)
