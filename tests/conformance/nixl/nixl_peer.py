"""A producer in a process of its own that tests can stop, kill and start again."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from pdserve.connectors.testing import build_context
from pdserve.connectors.testing.faults.peer_process import PeerCommand, PeerReply, PeerStart, decode_line, encode_line
from pdserve.protocol import KVTransferParams, Role

_TIMEOUT_S = 60.0


class Peer:
    """Steps an engine with the NIXL connector.

    Args:
        options: of the connector; ``spec`` is the shape of a block.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        parts = {name: options.pop(name) for name in ("spec",) if name in options}
        identity = build_context(Role.PREFILL, {}, **parts).identity
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pdserve.connectors.testing.faults.peer_main"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._send(PeerStart("pdserve.connectors.nixl:NixlConnector", "peer", identity, options, 64))
        self._receive()

    def hand_over(self, token_ids: Sequence[int]) -> KVTransferParams:
        """Compute a prompt there and hold it."""
        self._send(PeerCommand(list(token_ids), waits=True))
        params = self._receive().params
        assert params is not None
        return params

    def stop(self) -> None:
        """It stands still, all of its threads, when this returns."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def go_on(self) -> None:
        """It goes on."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """It is gone without a word; idempotent."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(encode_line(message))
        self._process.stdin.flush()

    def _receive(self) -> PeerReply:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], _TIMEOUT_S)
        assert ready, "the peer does not answer"
        return decode_line(self._process.stdout.readline(), PeerReply)
