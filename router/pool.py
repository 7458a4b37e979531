"""A pool: the instances of one role, and the policy that chooses among them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pdserve.protocol import Role
from pdserve.router.instance import Instance
from pdserve.router.policies import Policy, choose


class Pool:
    """The instances of one role.

    Args:
        role: what they are for.
        instances: all that are configured, up or not.
        policy: chooses among the usable ones.
    """

    def __init__(self, role: Role, instances: Sequence[Instance], policy: Policy) -> None:
        self.role = role
        self.instances = tuple(instances)
        self._policy = policy

    @property
    def usable(self) -> list[Instance]:
        """Those that take new work."""
        return [instance for instance in self.instances if instance.is_usable]

    @property
    def members(self) -> list[Instance]:
        """Those that are connected and admitted, draining ones included."""
        return [i for i in self.instances if i.ready is not None and i.refusal is None]

    def choose(self, excluded: Collection[str] = ()) -> Instance | None:
        """The policy's choice among usable instances whose incarnation is not ``excluded``; None if there is none."""
        return choose(self._policy, [i for i in self.usable if i.incarnation not in excluded])
