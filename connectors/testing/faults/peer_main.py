"""The process behind `PeerProcess`: steps an engine and obeys.

Standard output is for replies alone: what libraries print there goes to standard error.
"""

from __future__ import annotations

import os
import select
import sys
from typing import BinaryIO

from pdserve.connectors.registry import load_connector
from pdserve.connectors.testing.faults.peer_process import PeerCommand, PeerReply, PeerStart, decode_line, encode_line
from pdserve.connectors.testing.harness import EngineHarness

_PAUSE_S = 0.0005


def main() -> None:
    """Serve until standard input ends."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    start = decode_line(sys.stdin.buffer.readline(), PeerStart)
    engine = EngineHarness(load_connector(start.connector), start.build_context(), num_blocks=start.num_blocks)
    _reply(replies, PeerReply())
    num_requests = 0
    while True:
        engine.step()
        ready, _, _ = select.select([sys.stdin.buffer], [], [], _PAUSE_S)
        if not ready:
            continue
        line = sys.stdin.buffer.readline()
        if not line:
            break
        num_requests += 1
        _reply(replies, _hand_over(engine, f"r{num_requests}", decode_line(line, PeerCommand)))
    engine.close()


def _hand_over(engine: EngineHarness, request_id: str, command: PeerCommand) -> PeerReply:
    decision = engine.prefill(request_id, command.token_ids)
    if command.waits and decision.announce_when_sent and not decision.hold_blocks:
        engine.step_until(lambda: request_id in engine.sent)
    return PeerReply(decision.kv_transfer_params)


def _reply(replies: BinaryIO, reply: PeerReply) -> None:
    replies.write(encode_line(reply))
    replies.flush()


if __name__ == "__main__":
    main()
