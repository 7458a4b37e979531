"""A consumer's connections, and what comes over them. Lives on the transfer thread."""

from __future__ import annotations

from pdserve.connectors.nixl.consumer import Consumer
from pdserve.connectors.nixl.messages import Endpoint
from pdserve.connectors.nixl.side_channel import InvalidMessageError, ProducerChannel, Sockets
from pdserve.peers.addresses import AllowedPeers
from pdserve.peers.curve import Curve


class ProducerChannels:
    """The open ones.

    Args:
        sockets: of the transfer thread.
        allowed: addresses that may be connected to.
        curve: keys; None = connections are not encrypted.
    """

    def __init__(self, sockets: Sockets, allowed: AllowedPeers, curve: Curve | None = None) -> None:
        self._sockets = sockets
        self._allowed = allowed
        self._curve = curve
        self._channels: dict[Endpoint, ProducerChannel] = {}

    def open(self, producer: Endpoint) -> ProducerChannel:
        """Connect to a producer.

        Raises:
            ValueError: the address is not one to connect to.
        """
        channel = ProducerChannel(self._sockets, producer.address, self._allowed, self._curve)
        self._channels[producer] = channel
        return channel

    def receive_into(self, consumer: Consumer) -> None:
        """Give the consumer what has come, and then tell it which connections broke."""
        for producer, channel in list(self._channels.items()):
            try:
                for message in channel.receive():
                    consumer.receive(producer, message)
            except InvalidMessageError as error:
                consumer.lose(producer, f"the producer sends what is no message: {error}")
            if channel.poll_lost():
                consumer.lose(producer, "the producer cannot be reached")
            if channel.is_closed and self._channels.get(producer) is channel:
                del self._channels[producer]
