"""All processes of one machine: brought up together, watched, and ended in the order that loses no answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from pdserve.supervisor.member import Member, Plan, State, Surroundings
from pdserve.supervisor.stop_request import StopRequest

_POLL_S = 0.05
_KILL_GRACE_S = 2.0


class Deployment:
    """Members in the order they were started.

    Args:
        surroundings: what members share.
        stop_request: set when the user wants everything to end.
        drain_timeout_s: what a process has to finish its work after it was asked to end.
    """

    def __init__(self, surroundings: Surroundings, stop_request: StopRequest, drain_timeout_s: float) -> None:
        self._surroundings = surroundings
        self._stop_request = stop_request
        self._drain_timeout_s = drain_timeout_s
        self._stages: list[list[Member]] = []

    @property
    def members(self) -> list[Member]:
        """Every member, in the order of starting."""
        return [member for stage in self._stages for member in stage]

    def start(self, plans: Sequence[Plan]) -> list[Member]:
        """Start a stage and wait until all of it is ready, or the user wants to stop.

        Raises:
            ConfigError: a member ended before it was ready; says why.
        """
        stage: list[Member] = []
        self._stages.append(stage)
        for plan in plans:
            stage.append(Member(plan, self._surroundings))
        while not self._stop_request.is_set:
            for member in stage:
                member.poll()
            if all(member.state is State.READY for member in stage):
                break
            time.sleep(_POLL_S)
        return stage

    def watch(self, is_lost: Callable[[], bool]) -> None:
        """Restart what dies until the user wants to stop or ``is_lost`` says that nothing can serve any more."""
        while not self._stop_request.is_set and not is_lost():
            for member in self.members:
                member.poll()
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """End all members, the stage started last first; by force when the user insists or time is up."""
        while self._stages:
            self._stop_stage(self._stages.pop())

    def _stop_stage(self, stage: Sequence[Member]) -> None:
        for member in stage:
            member.process.terminate()
        deadline_s = time.monotonic() + self._drain_timeout_s + _KILL_GRACE_S
        while any(member.process.poll_status() is None for member in stage):
            if self._stop_request.is_urgent or time.monotonic() >= deadline_s:
                break
            time.sleep(_POLL_S)
        for member in stage:
            if member.process.poll_status() is None:
                self._surroundings.announce(f"{member.plan.name} did not end in time and is killed")
            member.process.kill()
