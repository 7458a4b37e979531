"""Finds connectors by name: entry points of the group ``pdserve.connectors``, or ``module:Class``.

Nothing is imported until a connector is asked for, so a connector whose dependencies are missing harms nobody.
"""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import cast

from pdserve.connectors.base import KVConnector
from pdserve.connectors.messages import ServesRanks
from pdserve.errors import ConfigError
from pdserve.kv_layout import Rank

ENTRY_POINT_GROUP = "pdserve.connectors"
_REQUIRED_ATTRIBUTES = ("features", "build_scheduler", "build_worker")


def connector_names() -> tuple[str, ...]:
    """Names of all connectors that installed packages register, in alphabetical order."""
    return tuple(sorted({entry.name for entry in metadata.entry_points(group=ENTRY_POINT_GROUP)}))


def load_connector(name: str) -> type[KVConnector]:
    """Import a connector's class.

    Args:
        name: a registered name, or ``module:Class``.

    Raises:
        ConfigError: the name is unknown or stands for several classes, the import fails, or what is found is no
            connector. The message says which, and what to do.
    """
    if ":" in name:
        return _import_class(name, name)
    entries = {entry.value: entry for entry in metadata.entry_points(group=ENTRY_POINT_GROUP, name=name)}
    if not entries:
        known = ", ".join(connector_names()) or "none"
        raise ConfigError(f"connector {name!r} is unknown; registered: {known}. Or give it as module:Class")
    if len(entries) > 1:
        choices = " or ".join(sorted(entries))
        raise ConfigError(f"connector {name!r} is registered more than once; choose {choices}")
    (entry,) = entries.values()
    return _import_class(name, f"{entry.module}:{entry.attr}", _how_to_install(entry))


def require_ranks(name: str, connector: type[KVConnector], rank: Rank) -> None:
    """Refuse an engine of several ranks unless the connector serves them.

    Args:
        name: the connector's, for people.
        connector: its class.
        rank: any of the engine's.

    Raises:
        ConfigError: it does not declare `ConnectorFeatures.ranks`, or not what its halves say to each other.
    """
    if rank.size == 1:
        return
    sizes = f"tensor_parallel_size {rank.tensor_parallel_size}, pipeline_parallel_size {rank.pipeline_parallel_size}"
    if not connector.features.ranks:
        raise ConfigError(f"connector {name} serves one rank only, not {sizes}: set both to 1 or choose another one")
    if not isinstance(connector, ServesRanks):
        raise ConfigError(f"connector {name} declares ranks, but has no message_types")


def _how_to_install(entry: metadata.EntryPoint) -> str:
    if not entry.extras or entry.dist is None:
        return ""
    return f"; install it with: pip install '{entry.dist.name}[{','.join(entry.extras)}]'"


def _import_class(name: str, target: str, remedy: str = "") -> type[KVConnector]:
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"connector {name!r} is not of the form module:Class")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, OSError) as error:  # OSError: a shared library that does not load
        is_absent = isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0]
        hint = "; is its package installed, or its folder in PYTHONPATH?" if is_absent and not remedy else remedy
        raise ConfigError(f"connector {name!r} cannot be imported: {error}{hint}") from error
    found = getattr(module, attribute, None)
    if found is None:
        raise ConfigError(f"connector {name!r}: module {module_name} has no {attribute}")
    missing = [wanted for wanted in _REQUIRED_ATTRIBUTES if not hasattr(found, wanted)]
    if missing:
        raise ConfigError(f"connector {name!r}: {target} is no connector, it lacks {', '.join(missing)}")
    return cast("type[KVConnector]", found)
