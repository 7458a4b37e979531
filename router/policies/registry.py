"""Finds policies by name: the built-in ones, entry points of the group ``pdserve.policies``, or ``module:Class``."""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import cast

from pdserve.errors import ConfigError
from pdserve.router.policies.base import Policy

ENTRY_POINT_GROUP = "pdserve.policies"
_HERE = "pdserve.router.policies"
_BUILT_IN = {
    "least_loaded": f"{_HERE}.least_loaded:LeastLoaded",
    "power_of_two": f"{_HERE}.power_of_two:PowerOfTwo",
    "prefix_aware": f"{_HERE}.prefix_aware:PrefixAware",
    "round_robin": f"{_HERE}.round_robin:RoundRobin",
    "session_affinity": f"{_HERE}.session_affinity:SessionAffinity",
}


def policy_names() -> tuple[str, ...]:
    """All names that `build_policy` knows, in alphabetical order."""
    return tuple(sorted({*_BUILT_IN, *(entry.name for entry in metadata.entry_points(group=ENTRY_POINT_GROUP))}))


def build_policy(name: str) -> Policy:
    """A fresh policy for one pool.

    Args:
        name: one of `policy_names`, or ``module:Class``; the class is called without arguments.

    Raises:
        ConfigError: there is none of this name, or it cannot be imported.
    """
    target = name if ":" in name else _BUILT_IN.get(name) or _find_entry_point(name)
    module_name, _, attribute = target.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"policy {name!r} cannot be imported: {error}") from error
    missing = [wanted for wanted in ("uses_prefixes", "filter", "score", "note_choice") if not hasattr(found, wanted)]
    if missing:
        raise ConfigError(f"policy {name!r}: {target} is no policy, it lacks {', '.join(missing)}")
    return cast("Policy", found())


def _find_entry_point(name: str) -> str:
    values = {entry.value for entry in metadata.entry_points(group=ENTRY_POINT_GROUP, name=name)}
    if not values:
        known = ", ".join(policy_names())
        raise ConfigError(f"policy {name!r} is unknown; there are {known}. Or give it as module:Class")
    if len(values) > 1:
        raise ConfigError(f"policy {name!r} is registered more than once; choose {' or '.join(sorted(values))}")
    return values.pop()
