"""Both pools of one router: who is admitted, what they accept together, and waiting for one to come.

All admitted instances of a router have the same model identity, and one that differs is refused with a line that says
in what. The first decode instance defines it, because without decode instances nothing is served; until it comes, the
first prefill instance does. When no admitted instance is left, the next one defines it anew.
Lives on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import zmq.asyncio

from pdserve.errors import UnavailableError
from pdserve.kv_layout import ModelIdentity
from pdserve.peers.curve import read_curve
from pdserve.protocol import CacheEvents, InstanceLimits, Role
from pdserve.router.config import PoolSettings
from pdserve.router.health import HealthSettings
from pdserve.router.instance import Instance, SessionSettings
from pdserve.router.policies import build_policy
from pdserve.router.pool import Pool
from pdserve.router.prefix_memory import PrefixMemory, PrefixMode

logger = logging.getLogger(__name__)

_RESTART_PAUSE_S = 1.0
_RETIREMENT_POLL_S = 0.05


class FleetMetrics(Protocol):
    """What the fleet counts."""

    def set_instance_up(self, role: Role, address: str, up: bool) -> None:
        """An instance came or went."""
        ...

    def forget_instance(self, role: Role, address: str) -> None:
        """An instance has left for good."""
        ...

    def count_refused_instance(self, role: Role) -> None:
        """An instance was not admitted."""
        ...

    def set_prefix_mode(self, role: Role, address: str, mode: PrefixMode) -> None:
        """How well an instance's prefix cache is known has changed."""
        ...

    def count_wire_error(self, role: Role) -> None:
        """A frame was not understood."""
        ...


class Fleet:
    """The pools of one router.

    Args:
        settings: addresses, policies and heartbeats.
        router_id: this router, unique for each start.
        model_name: the name this router serves.
        metrics: counts.
        uses_prefixes: whether somebody asks what decode instances have in their prefix caches.

    Raises:
        ConfigError: a key file is wrong.

    Attributes:
        prefill: the prefill pool; without instances decode does everything.
        decode: the decode pool.
        prefix_memory: what instances should have in their prefix caches.
    """

    def __init__(
        self,
        settings: PoolSettings,
        *,
        router_id: str,
        model_name: str,
        metrics: FleetMetrics,
        uses_prefixes: bool = False,
    ) -> None:
        self._settings = settings
        self._router_id = router_id
        self._model_name = model_name
        self._metrics = metrics
        self._uses_prefixes = uses_prefixes
        self.prefix_memory = PrefixMemory()
        self._curve = read_curve(settings.curve_secret_key, settings.curve_peer_keys)
        self._context = zmq.asyncio.Context()
        self._changed = asyncio.Event()
        self._has_started = False
        self._tasks: dict[Instance, asyncio.Task[None]] = {}
        self._retiring: dict[tuple[Role, str], tuple[Instance, asyncio.Task[None]]] = {}
        self._is_defined_by_decode = False
        """Whether the identity that all have is a decode instance's; a prefill instance's gives way to that."""
        self._was_prefill_usable = False
        self._prefill_usable_s = 0.0
        self._policies = {
            Role.PREFILL: build_policy(settings.prefill_policy),
            Role.DECODE: build_policy(settings.decode_policy),
        }
        self.prefill = Pool(Role.PREFILL, [], self._policies[Role.PREFILL])
        self.decode = Pool(Role.DECODE, [], self._policies[Role.DECODE])
        self.set_members(Role.PREFILL, settings.prefill)
        self.set_members(Role.DECODE, settings.decode)

    # --- who belongs to it ----------------------------------------------------------------------------

    def set_members(self, role: Role, addresses: Collection[str]) -> None:
        """Make a pool consist of the instances at these addresses.

        One that leaves gets no new work; what runs there still ends there. One that comes back meanwhile stays.
        """
        present = {instance.address: instance for instance in self.pool(role).instances}
        for address in present.keys() - set(addresses):
            self._leave(present[address])
        for address in dict.fromkeys(addresses):
            if address not in present:
                self._join(role, address)

    def apply(self, members: Mapping[Role, Sequence[str]]) -> None:
        """Make both pools consist of these."""
        for role, addresses in members.items():
            self.set_members(role, addresses)

    def _join(self, role: Role, address: str) -> None:
        retiring = self._retiring.pop((role, address), None)
        if retiring is not None:
            instance, retirement = retiring
            retirement.cancel()
            instance.is_leaving = False
        else:
            instance = self._build_instance(role, address)
            self._metrics.set_instance_up(role, address, False)
        self.pool(role).add(instance)
        if self._has_started and retiring is None:
            self._tasks[instance] = asyncio.create_task(self._keep_running(instance))
        self._announce()

    def _leave(self, instance: Instance) -> None:
        logger.info("%s instance %s leaves the pool", instance.role, instance.name)
        instance.is_leaving = True
        self.pool(instance.role).remove(instance)
        self._retiring[instance.role, instance.address] = instance, asyncio.create_task(self._retire(instance))
        self._announce()

    async def _retire(self, instance: Instance) -> None:
        """Let what runs there end, then forget the instance."""
        while instance.num_legs:
            await asyncio.sleep(_RETIREMENT_POLL_S)
        del self._retiring[instance.role, instance.address]
        task = self._tasks.pop(instance, None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self.prefix_memory.forget(instance.address)
        self._metrics.forget_instance(instance.role, instance.address)

    def _build_instance(self, role: Role, address: str) -> Instance:
        settings = self._settings
        asks_for_prefixes = self._policies[role].uses_prefixes or (self._uses_prefixes and role is Role.DECODE)
        return Instance(
            address,
            role,
            router_id=self._router_id,
            context=self._context,
            observer=self,
            settings=SessionSettings(
                settings.heartbeat_interval_s,
                settings.heartbeat_timeout_s,
                wants_cache_events=settings.cache_events and asks_for_prefixes,
                health=HealthSettings(settings.max_faults, settings.ejection_s, settings.slow_start_s),
                curve=self._curve,
            ),
        )

    # --- life -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to connect; call on the event loop."""
        self._prefill_usable_s = asyncio.get_running_loop().time()
        self._has_started = True
        self._tasks = {instance: asyncio.create_task(self._keep_running(instance)) for instance in self.instances}

    async def close(self) -> None:
        """Say goodbye to every instance and release the sockets; idempotent."""
        tasks = [*(task for _, task in self._retiring.values()), *self._tasks.values()]
        self._retiring, self._tasks = {}, {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # Waits for the goodbyes to leave, a tenth of a second at most.
        await asyncio.to_thread(self._context.term)

    @staticmethod
    async def _keep_running(instance: Instance) -> None:
        while True:
            try:
                await instance.run()
            except Exception:
                logger.exception("the session with %s failed; it is opened anew", instance.address)
                await asyncio.sleep(_RESTART_PAUSE_S)

    # --- questions ------------------------------------------------------------------------------------

    @property
    def instances(self) -> tuple[Instance, ...]:
        """All instances that belong to it, up or not."""
        return (*self.prefill.instances, *self.decode.instances)

    @property
    def identity(self) -> ModelIdentity | None:
        """What all admitted instances have in common; None while there is none."""
        members = [*self.decode.members, *self.prefill.members]
        return members[0].ready.identity if members and members[0].ready else None

    @property
    def is_retiring(self) -> bool:
        """Whether instances that left still have work."""
        return bool(self._retiring)

    @property
    def is_serving(self) -> bool:
        """Whether a request could be answered now."""
        return bool(self.decode.usable)

    def get_limits(self) -> InstanceLimits:
        """What every admitted instance accepts: the least of each limit.

        Raises:
            UnavailableError: no decode instance takes work; says why.
        """
        members = [*self.decode.members, *self.prefill.members]
        limits = [member.ready.limits for member in members if member.ready is not None]
        if not self.is_serving or not limits:
            raise UnavailableError(self.decode.explain_absence())
        names = InstanceLimits.__struct_fields__
        return InstanceLimits(**{name: min(getattr(limit, name) for limit in limits) for name in names})

    def pool(self, role: Role) -> Pool:
        """The pool of a role."""
        return self.prefill if role is Role.PREFILL else self.decode

    async def wait_for_usable(self, role: Role, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` until the role's pool has a usable instance; whether it has."""
        pool = self.pool(role)
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while not pool.usable:
            try:
                async with asyncio.timeout_at(deadline_s):
                    await self._changed.wait()
            except TimeoutError:
                return False
        return True

    # --- what instances tell --------------------------------------------------------------------------

    def instance_ready(self, instance: Instance) -> None:
        """Admit the instance, or refuse it and say why."""
        self._admit(instance)
        self._admit_again(self.prefill)
        self._announce()

    def _admit_again(self, pool: Pool) -> None:
        """Look again at those of a pool whose admission may have changed with the identity."""
        for instance in pool.instances:
            if instance.ready is not None and instance.refusal != self._find_refusal(instance):
                self._admit(instance)

    def _admit(self, instance: Instance) -> None:
        instance.refusal = self._find_refusal(instance)
        if instance.refusal is None:
            ready = instance.ready
            assert ready is not None
            logger.info("%s instance %s at %s is ready", instance.role, ready.instance_id, instance.address)
            self._metrics.set_instance_up(instance.role, instance.address, True)
            self._is_defined_by_decode |= instance.role is Role.DECODE
            if ready.model != self._model_name:
                logger.warning(
                    "%s instance %s serves %s, this router %s: tokens fit only if the tokenizers are the same",
                    instance.role, ready.instance_id, ready.model, self._model_name,
                )  # fmt: skip
        else:
            logger.warning(
                "%s instance %s at %s is refused: %s", instance.role, instance.name, instance.address, instance.refusal
            )
            self._metrics.set_instance_up(instance.role, instance.address, False)
            self._metrics.count_refused_instance(instance.role)

    def instance_lost(self, instance: Instance) -> None:
        """It takes no work any more; the refused ones may be the pool now."""
        self.prefix_memory.forget(instance.address)
        self._metrics.set_prefix_mode(instance.role, instance.address, PrefixMode.APPROXIMATE)
        self._metrics.set_instance_up(instance.role, instance.address, False)
        if self.identity is None:
            self._is_defined_by_decode = False
            self._admit_again(self.decode)
            self._admit_again(self.prefill)
        self._announce()

    def instance_load_changed(self, instance: Instance) -> None:
        """It drains, or does no longer."""
        if instance.load.draining:
            logger.info("%s instance %s drains and gets no new work", instance.role, instance.name)
        self._announce()

    def instance_cache_changed(self, instance: Instance, events: CacheEvents) -> None:
        """Its prefix cache is known exactly from now on."""
        before = self.prefix_memory.mode(instance.address)
        self.prefix_memory.apply(instance.address, events)
        if before is not PrefixMode.EXACT:
            logger.info("%s instance %s tells what its prefix cache holds", instance.role, instance.name)
            self._metrics.set_prefix_mode(instance.role, instance.address, PrefixMode.EXACT)

    def wire_error(self, instance: Instance) -> None:
        """It sent a frame that is no message."""
        self._metrics.count_wire_error(instance.role)

    def _find_refusal(self, instance: Instance) -> str | None:
        ready = instance.ready
        assert ready is not None
        if ready.role is not instance.role:
            return f"it was started as a {ready.role} instance and is given as --{instance.role}"
        others = [other for other in self.decode.members if other is not instance]
        if not others and (instance.role is Role.PREFILL or self._is_defined_by_decode):
            others = [other for other in self.prefill.members if other is not instance]
        for other in others:
            assert other.ready is not None
            difference = other.ready.identity.explain_difference(ready.identity)
            if difference:
                return (
                    f"its model or layout differs from {other.name}'s: {difference}; "
                    "start both with the same model and engine settings"
                )
        return None

    def prefill_patience_s(self, wait_s: float) -> float:
        """What is left of ``wait_s`` since the prefill pool was last usable: not every request waits anew."""
        return max(self._prefill_usable_s + wait_s - asyncio.get_running_loop().time(), 0.0)

    def _announce(self) -> None:
        """Wake everyone who waits; the next one waits on a fresh event."""
        if self._was_prefill_usable:
            self._prefill_usable_s = asyncio.get_running_loop().time()
        self._was_prefill_usable = bool(self.prefill.usable)
        self._changed.set()
        self._changed = asyncio.Event()
