"""A pool: the instances of one role, and the policy that chooses among them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pdserve.protocol import Role
from pdserve.router.instance import Instance
from pdserve.router.policies import Policy, RoutedRequest, choose

_MAX_EXPLAINED = 3
"""Instances that an error tells of; the status lists all."""


def describe_state(instance: Instance) -> tuple[str, str]:
    """``ready``, ``draining``, ``leaving``, ``resting``, ``refused`` or ``absent``, and why where that is known."""
    if instance.ready is None:
        return "absent", instance.last_problem
    if instance.refusal is not None:
        return "refused", instance.refusal
    if instance.health.is_ejected:
        return "resting", "it failed several requests in a row by its own fault; it gets one as a probe before others"
    if instance.is_leaving:
        return "leaving", "it was taken out of the pool and finishes what runs"
    return ("draining" if instance.load.draining else "ready"), ""


class Pool:
    """The instances of one role; they may come and go.

    Args:
        role: what they are for.
        instances: those that are known now, up or not.
        policy: chooses among the usable ones.
    """

    def __init__(self, role: Role, instances: Sequence[Instance], policy: Policy) -> None:
        self.role = role
        self.instances = tuple(instances)
        self._policy = policy

    def add(self, instance: Instance) -> None:
        """An instance joins."""
        self.instances = (*self.instances, instance)

    def remove(self, instance: Instance) -> None:
        """An instance leaves."""
        self.instances = tuple(other for other in self.instances if other is not instance)

    @property
    def usable(self) -> list[Instance]:
        """Those that take new work."""
        return [instance for instance in self.instances if instance.is_usable]

    @property
    def members(self) -> list[Instance]:
        """Those that are connected and admitted, draining ones included."""
        return [i for i in self.instances if i.ready is not None and i.refusal is None]

    def explain_absence(self) -> str:
        """Why nobody here takes new work, for clients and operators."""
        found = [
            f"{instance.name} is {state}" + (f" ({reason})" if reason else "")
            for instance in self.instances[:_MAX_EXPLAINED]
            for state, reason in [describe_state(instance)]
        ]
        if len(self.instances) > _MAX_EXPLAINED:
            found.append(f"{len(self.instances) - _MAX_EXPLAINED} more")
        return f"no {self.role} instance takes work: {'; '.join(found) or 'none is known'}; try again later"

    def choose(self, request: RoutedRequest, excluded: Collection[str] = ()) -> Instance | None:
        """The policy's choice for a request; None if there is none.

        Instances that are not trusted with more work now are passed over, unless there is no other.

        Args:
            request: what the policy may know of it.
            excluded: incarnations that are out of the question.
        """
        candidates = [i for i in self.usable if i.incarnation not in excluded]
        return choose(self._policy, [i for i in candidates if i.is_trusted] or candidates, request)
