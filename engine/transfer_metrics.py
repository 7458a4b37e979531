"""What an engine's connector moved, found and failed to move, as metrics that name the connector."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from pdserve.connectors.base import ConnectorOutput, ConnectorStats


class TransferMetrics:
    """Counters of one engine's connector; a composition's are those of its parts, each under the part's name.

    Args:
        registry: the engine's.
        connector: its connector's name, or what the user calls it by.
    """

    def __init__(self, registry: CollectorRegistry, connector: str) -> None:
        self._registry = registry
        self._connector = connector
        self.blocks = self._counter("transfer_blocks", "KV blocks moved", "direction")
        self.bytes = self._counter("transfer_bytes", "KV bytes moved", "direction")
        self.seconds = self._counter("transfer_seconds", "Time that the connector's threads spent moving", "direction")
        self.failures = self._counter("transfer_failures", "What went wrong, by kind", "kind")
        self.lookups = self._counter(
            "lookup_blocks", "KV blocks that admitted requests asked for, hit or miss", "result"
        )
        self.running = Gauge(
            "pdserve_kv_transfers_running", "KV transfers under way", ("direction",), registry=registry
        )
        self.leases = Gauge(
            "pdserve_kv_leases", "Hand-offs whose KV blocks are held until a consumer has them", registry=registry
        )

    def count(self, output: ConnectorOutput) -> None:
        """A step's report of the connector."""
        for name, stats in (output.parts or {self._connector: output.stats}).items():
            self._count_moved(name, "save", stats.num_blocks_saved, stats.num_bytes_saved, stats.save_seconds)
            self._count_moved(name, "load", stats.num_blocks_loaded, stats.num_bytes_loaded, stats.load_seconds)
            self._count_failures(name, stats)

    def count_failure(self, kind: str) -> None:
        """One failure that the engine, not the connector, noticed."""
        self.failures.labels(self._connector, kind).inc()

    def count_lookup(self, num_asked_blocks: int, num_found_blocks: int, part: str = "") -> None:
        """An admitted request's lookup: asked once, however often it was repeated before there was room.

        Args:
            num_asked_blocks: that the engine did not have.
            num_found_blocks: of them, that the connector has.
            part: of a composition that has them.
        """
        self.lookups.labels(part or self._connector, "hit").inc(num_found_blocks)
        self.lookups.labels(self._connector, "miss").inc(max(num_asked_blocks - num_found_blocks, 0))

    def set_running(self, *, num_loads: int, num_saves: int, num_leases: int) -> None:
        """What is under way now."""
        self.running.labels("load").set(num_loads)
        self.running.labels("save").set(num_saves)
        self.leases.set(num_leases)

    def _counter(self, name: str, text: str, label: str) -> Counter:
        return Counter(f"pdserve_kv_{name}_total", text, ("connector", label), registry=self._registry)

    def _count_moved(self, name: str, direction: str, num_blocks: int, num_bytes: int, seconds: float) -> None:
        """Nothing at all is not counted, so that a connector that never saves has no such series."""
        if num_blocks or num_bytes or seconds:
            self.blocks.labels(name, direction).inc(num_blocks)
            self.bytes.labels(name, direction).inc(num_bytes)
            self.seconds.labels(name, direction).inc(seconds)

    def _count_failures(self, name: str, stats: ConnectorStats) -> None:
        for kind, count in stats.failures.items():
            self.failures.labels(name, kind).inc(count)
