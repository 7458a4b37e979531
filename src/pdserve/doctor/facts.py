"""What was found out of a deployment, as plain values. Nothing here asks anybody."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pdserve.engine.server.about import About
from pdserve.protocol import Ready, Role


class Reach(enum.Enum):
    """How far a probe came."""

    ANSWERED = enum.auto()
    CLOSED = enum.auto()
    """Nobody listens at the address."""
    SILENT = enum.auto()
    """Somebody listens and does not answer in the protocol."""
    REFUSED = enum.auto()
    """It answered that it does not talk to us."""


class RouterInstance(msgspec.Struct, frozen=True, kw_only=True):
    """An instance as a router sees it; the fields of ``GET /v1/status`` that checks use."""

    address: str
    name: str
    state: str
    reason: str
    silence_s: float | None
    generation: str | None
    http_port: int | None
    load: dict[str, int]
    tally: dict[str, Any]


class RouterPool(msgspec.Struct, frozen=True, kw_only=True):
    """A pool as a router sees it."""

    role: Role
    instances: list[RouterInstance]


class RouterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of ``GET /v1/status`` that checks use."""

    time_ns: int
    version: str
    protocol_version: int
    model: str
    is_serving: bool
    limits: dict[str, float]
    requests: dict[str, float]
    counters: dict[str, float]
    pools: list[RouterPool]


@dataclass(frozen=True, slots=True)
class RouterFacts:
    """A router.

    Attributes:
        url: where it is.
        status: its answer; None when there was none.
        problem: why there was none.
        clock_offset_s: its clock less this one's, at least and at most; None when unknown.
    """

    url: str
    status: RouterStatus | None = None
    problem: str = ""
    clock_offset_s: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class InstanceFacts:
    """An instance.

    Attributes:
        role: the pool it is configured for.
        address: where it should be, ``host:port``.
        reach: how far the probe came.
        ready: its answer to a Hello.
        reason: why it refused, or did not answer.
        about: its own description; None when its HTTP port was not found or did not answer.
        clock_offset_s: its clock less this one's, at least and at most; None when unknown.
        metrics: its Prometheus samples, by name and labels, summed over labels where the key has none.
    """

    role: Role
    address: str
    reach: Reach = Reach.ANSWERED
    ready: Ready | None = None
    reason: str = ""
    about: About | None = None
    clock_offset_s: tuple[float, float] | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """How people are told of it."""
        return f"{self.role} instance {self.address}"


@dataclass(frozen=True, slots=True)
class Deployment:
    """All of it.

    Attributes:
        version: of this pdserve.
        router: None when only instances are checked.
        instances: in the order given.
    """

    version: str
    router: RouterFacts | None
    instances: tuple[InstanceFacts, ...]

    def pool(self, role: Role) -> tuple[InstanceFacts, ...]:
        """The instances configured for a role."""
        return tuple(instance for instance in self.instances if instance.role is role)

    @property
    def status(self) -> RouterStatus | None:
        """The router's, where there is one."""
        return None if self.router is None else self.router.status

    def seen_by_router(self, instance: InstanceFacts) -> RouterInstance | None:
        """The router's view of an instance; None when it has none."""
        if self.status is None:
            return None
        seen = (i for pool in self.status.pools if pool.role is instance.role for i in pool.instances)
        return next((i for i in seen if i.address.removeprefix("tcp://") == instance.address), None)
