"""One client's connection, with what Uvicorn lacks: two bounds, and bodies of requests that offer another protocol."""

from __future__ import annotations

import asyncio
import logging
import re

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 * 1024
_OFFER = re.compile(rb"(?<=\r\n)upgrade(?=:)", re.IGNORECASE)


class BoundedHttpProtocol(HttpToolsProtocol):
    """Gives up a connection whose client asks too much or takes too little. Lives on the event loop.

    Too much: request line and headers of more than `MAX_HEAD_BYTES`. Too little: unread bytes fill the kernel's buffers
    and the transport's own 64 KiB, or are left over from a whole answer, and stay there. The connection is then
    dropped, and a request that runs ends as that of a client that left.

    Attributes:
        stall_timeout_s: how long a client may take too little; see `build_http_protocol`.
    """

    stall_timeout_s = 30.0
    _num_head_bytes = 0
    _is_in_head = True
    _is_in_body = False
    _stall: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        """Bytes came; called by the event loop."""
        super().data_received(data if self._is_in_body else _without_offer(data))
        if not self._is_in_head:
            self._num_head_bytes = 0
            return
        self._num_head_bytes += len(data)
        if self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The request line and headers are too large.")

    def on_message_begin(self) -> None:
        """A request begins; called by the parser."""
        super().on_message_begin()
        self._is_in_head = True
        if not self.flow.write_paused:
            self._end_stall()

    def on_headers_complete(self) -> None:
        """Its body begins, if it has one; called by the parser."""
        super().on_headers_complete()
        self._is_in_head = False
        self._is_in_body = True

    def on_message_complete(self) -> None:
        """The request is whole; called by the parser."""
        super().on_message_complete()
        self._is_in_body = False

    def pause_writing(self) -> None:
        """The client is behind; called by the transport."""
        super().pause_writing()
        self._begin_stall()

    def resume_writing(self) -> None:
        """The client has caught up; called by the transport."""
        super().resume_writing()
        self._end_stall()

    def on_response_complete(self) -> None:
        """The answer is written, as far as the client took it; called at its end."""
        super().on_response_complete()
        if self.transport.get_write_buffer_size() and self._stall is None:
            self._begin_stall()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is over; called by the event loop."""
        self._end_stall()
        super().connection_lost(exc)

    def _begin_stall(self) -> None:
        self._end_stall()
        self._stall = self.loop.call_later(self.stall_timeout_s, self._drop_connection)

    def _end_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _drop_connection(self) -> None:
        self._stall = None
        if not self.transport.get_write_buffer_size():
            return  # the rest of an answer has been taken meanwhile
        logger.warning("a client took nothing of its answer for %g s: its connection is dropped", self.stall_timeout_s)
        # Closing would wait for the client to read the rest.
        self.transport.abort()


def _without_offer(data: bytes) -> bytes:
    """A request's head, and what stands behind it, without its offer to go on in another protocol.

    Java's client offers HTTP/2 with every request. A server may ignore that (RFC 9110, 7.8), but Uvicorn's parser takes
    such a request for one without a body.
    """
    found = data.find(b"\r\n\r\n")
    end = len(data) if found < 0 else found
    if _OFFER.search(data, 0, end) is None:
        return data
    return _OFFER.sub(b"x-offered", data[:end]) + data[end:]


def build_http_protocol(stall_timeout_s: float) -> type[BoundedHttpProtocol]:
    """The class of connections whose clients may take too little for so long; Uvicorn makes the objects itself."""
    return type("HttpProtocol", (BoundedHttpProtocol,), {"stall_timeout_s": stall_timeout_s})
