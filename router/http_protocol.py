"""One client's connection, with a bound on what comes before a request's body, which Uvicorn lets grow for ever."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024


class BoundedHttpProtocol(HttpToolsProtocol):
    """Gives up a connection whose request line and headers take more than `MAX_HEAD_BYTES`. Lives on the event loop."""

    _num_head_bytes = 0
    _is_in_head = True

    def data_received(self, data: bytes) -> None:
        """Bytes came; called by the event loop."""
        super().data_received(data)
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

    def on_headers_complete(self) -> None:
        """Its body begins, if it has one; called by the parser."""
        super().on_headers_complete()
        self._is_in_head = False
