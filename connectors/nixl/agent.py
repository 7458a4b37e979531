"""NIXL, wrapped: one agent with one registered pool, that reads blocks of other agents' pools.

The agent has no progress thread (NIXL's would spin on a core of its own): things move only while `start_read`,
`poll` or `progress` run. One thread at a time may use it.

A read between processes of one machine is a copy inside `start_read`, without the interpreter's lock; over a network
it goes on in the background. A peer that dies makes either raise within milliseconds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from pdserve import env
from pdserve.connectors.nixl.descriptors import (
    MemoryRegion,
    build_descriptors,
    build_indices,
    build_registration,
)
from pdserve.connectors.nixl.options import CONNECTOR_NAME
from pdserve.errors import ConfigError

_BACKEND = "UCX"
# With error handling "none" a read from a dead peer would hang for ever.
_BACKEND_PARAMS = {"ucx_error_handling_mode": "peer", "num_workers": "1"}
_LOCAL = ""


class TransportError(Exception):
    """NIXL could not do it; the peer is to be connected to anew.

    Args:
        kind: ``disconnected`` or ``transport``.
        reason: for people.
    """

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason


class RemotePool:
    """Another agent's blocks; valid until `TransferAgent.disconnect`.

    Attributes:
        name: the agent's.
        descriptors: of its blocks.
        is_one_sided: the last read needed nothing from the other agent, as between processes of one machine.
    """

    def __init__(self, name: str, descriptors: Any) -> None:
        self.name = name
        self.descriptors = descriptors
        self.is_one_sided = False


class TransferAgent:
    """See the module.

    Args:
        name: never used before by any agent, in any process: a peer that knew an older one would mix them up.
        region: the pool, which lives longer than the agent.
        ucx_devices: network devices that UCX may use; None = as the environment says.

    Raises:
        ConfigError: NIXL cannot start here.
    """

    def __init__(self, name: str, region: MemoryRegion, ucx_devices: str | None) -> None:
        env.prepare_for_nixl(ucx_devices)
        # Imported here, after the environment is set: UCX reads it when it is loaded.
        import nixl._api as api
        import nixl._bindings as bindings

        self._errors: tuple[type[Exception], ...] = _find_error_types(bindings)
        self._disconnected: type[Exception] = bindings.nixlRemoteDisconnectError
        self.region = region
        try:
            self._agent: Any = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
            self._agent.create_backend(_BACKEND, dict(_BACKEND_PARAMS))
            self._registration = self._agent.register_memory(build_registration(region), region.memory)
            self._local = self._agent.prep_xfer_dlist(_LOCAL, build_descriptors(region), region.memory)
        except self._errors as error:
            raise ConfigError(
                f"connector {CONNECTOR_NAME}: NIXL cannot start: {error}; look at UCX_NET_DEVICES and UCX_TLS "
                f"(network devices {ucx_devices or 'as UCX finds them'})"
            ) from error

    def get_metadata(self) -> bytes:
        """What another agent needs to connect."""
        return bytes(self._agent.get_agent_metadata())

    def connect(self, metadata: bytes, region: MemoryRegion) -> RemotePool:
        """Learn of another agent and its pool. Messages go out with the first read.

        Raises:
            TransportError: the metadata is broken, or does not cover the pool.
        """
        with self._translated_errors():
            name = self._agent.add_remote_agent(metadata)
            name = name.decode() if isinstance(name, bytes) else str(name)
            try:
                descriptors = self._agent.prep_xfer_dlist(name, build_descriptors(region), region.memory)
            except self._errors:
                self._agent.remove_remote_agent(name)
                raise
        return RemotePool(name, descriptors)

    def disconnect(self, remote: RemotePool) -> None:
        """Forget another agent; reads from it that go on are given up."""
        with contextlib.suppress(*self._errors):
            self._agent.release_dlist_handle(remote.descriptors)
        with contextlib.suppress(*self._errors):
            self._agent.remove_remote_agent(remote.name)

    def start_read(self, local_block_ids: Sequence[int], remote: RemotePool, remote_block_ids: Sequence[int]) -> Any:
        """Begin to copy another agent's blocks over one's own.

        Args:
            local_block_ids: where they go, in order.
            remote: where they come from.
            remote_block_ids: as many.

        Returns:
            What `poll` takes; None when the read is done already.

        Raises:
            TransportError: the peer is gone, or the block ids are not of its pool.
        """
        with self._translated_errors():
            read = self._agent.make_prepped_xfer(
                "READ", self._local, build_indices(local_block_ids), remote.descriptors, build_indices(remote_block_ids)
            )
            try:
                state = self._agent.transfer(read)
            except self._errors:
                self.release(read)
                raise
        remote.is_one_sided = self._is_done(read, state)
        return None if remote.is_one_sided else read

    def poll(self, read: Any) -> bool:
        """Go on with a read; whether it is done.

        Raises:
            TransportError: it failed; nothing more is written.
        """
        with self._translated_errors():
            try:
                state = self._agent.check_xfer_state(read)
            except self._errors:
                self.release(read)
                raise
        return self._is_done(read, state)

    def release(self, read: Any) -> None:
        """Give up a read."""
        with contextlib.suppress(*self._errors):
            self._agent.release_xfer_handle(read)

    def progress(self) -> None:
        """Serve peers that connect, or that read over a network."""
        with contextlib.suppress(*self._errors):
            self._agent.get_new_notifs()

    def close(self) -> None:
        """Let go of the pool. Called once, last."""
        with contextlib.suppress(*self._errors):
            self._agent.release_dlist_handle(self._local)
        with contextlib.suppress(*self._errors):
            self._agent.deregister_memory(self._registration)
        del self._agent, self._local, self._registration

    def _is_done(self, read: Any, state: str) -> bool:
        if state == "PROC":
            return False
        self.release(read)
        if state != "DONE":
            raise TransportError("transport", f"NIXL reports state {state}")
        return True

    @contextlib.contextmanager
    def _translated_errors(self) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            kind = "disconnected" if isinstance(error, self._disconnected) else "transport"
            raise TransportError(kind, str(error) or type(error).__name__) from error


def _find_error_types(bindings: Any) -> tuple[type[Exception], ...]:
    """NIXL's exceptions, which have no base class of their own."""
    found = (getattr(bindings, name) for name in dir(bindings) if name.endswith("Error"))
    return tuple(kind for kind in found if isinstance(kind, type) and issubclass(kind, Exception))
