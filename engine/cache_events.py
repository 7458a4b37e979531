"""What happened to the prefix index since somebody last asked: which contents came, which went.

The block pool notes, the instance's server takes. Nothing is kept while nobody listens. The log is bounded: one
that ran full is worth nothing any more, and the next one to ask gets the whole index instead.
"""

from __future__ import annotations

from collections.abc import Iterable

from pdserve.protocol import CacheEvents


class CacheEventLog:
    """Comings and goings of block contents, in order of time. Lives on the engine's thread.

    Args:
        max_events: that are kept until they are taken.
    """

    def __init__(self, max_events: int) -> None:
        self.is_listening = False
        self._max_events = max_events
        self._net: dict[bytes, bool] = {}
        """Digest to whether it is there now; a content that came and went again is told as gone."""
        self._lost_track = False

    def note_stored(self, digest: bytes) -> None:
        """A block with this content can be hit from now on."""
        self._note(digest, True)

    def note_evicted(self, digest: bytes) -> None:
        """No block has this content any more."""
        self._note(digest, False)

    def note_cleared(self) -> None:
        """All contents are forgotten."""
        self._net.clear()
        self._lost_track = self.is_listening

    def forget(self) -> None:
        """Drop what nobody took."""
        self._net.clear()
        self._lost_track = False

    def _note(self, digest: bytes, is_there: bool) -> None:
        if not self.is_listening or self._lost_track:
            return
        self._net[digest] = is_there
        if len(self._net) > self._max_events:
            self.note_cleared()

    def take(self, contents: Iterable[bytes]) -> CacheEvents | None:
        """What happened since the last call, or None.

        Args:
            contents: digests of all blocks that can be hit now; read only where the log has lost track.
        """
        if self._lost_track:
            self._lost_track = False
            return build_snapshot(contents)
        if not self._net:
            return None
        net, self._net = self._net, {}
        return CacheEvents(
            stored=[digest for digest, is_there in net.items() if is_there],
            evicted=[digest for digest, is_there in net.items() if not is_there],
        )


def build_snapshot(contents: Iterable[bytes]) -> CacheEvents:
    """The whole index, for a listener who knows nothing or nothing right."""
    return CacheEvents(stored=list(contents), replaces_all=True)
