"""What a connector brings along to be tested: its options, and ways to do damage behind its back.

`ConformanceTarget` itself is enough for a connector that needs nothing but options. A connector's author derives
from it to start what it needs (a server, a directory) and to offer what checks with faults ask for; whatever is not
offered is skipped, with the reason in the report.
"""

from __future__ import annotations

import importlib
import importlib.util
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, Protocol

from pdserve.connectors.base import ConnectorFeatures, KVConnector
from pdserve.connectors.registry import load_connector
from pdserve.connectors.testing.faults.link import Damage
from pdserve.connectors.testing.violations import NotOfferedError
from pdserve.errors import ConfigError
from pdserve.kv_layout import BlockKey, Rank
from pdserve.protocol import Role

_TARGETS = "pdserve.connectors.testing.targets"
_DIRECTORY = "{directory}"


class StoredBlocks(Protocol):
    """A store as a vandal sees it: entries as raw bytes, past the connector."""

    def read(self, key: BlockKey) -> bytes | None:
        """The stored entry, with whatever the connector puts around the KV; None when there is none."""
        ...

    def write(self, key: BlockKey, data: bytes) -> None:
        """Put ``data`` in the entry's place."""
        ...

    def delete(self, key: BlockKey) -> None:
        """Remove the entry, which is there."""
        ...


class ConformanceTarget:
    """One connector under test with its surroundings; lives as long as a run of the kit.

    Args:
        connector: the class under test.
        options: for every engine; ``{directory}`` in a text stands for ``directory``.
        directory: an empty directory of this run's own.

    Attributes:
        crosses_processes: engines in two processes can exchange KV.
        composes: the connector consists of others (rule R17 applies).
        parts: the targets of those others, where each can be looked at and harmed alone.
        lease_option: the option that says how many seconds a producer holds blocks for a consumer; None = there
            is none, and the rules about leases are skipped.
        blocks: the store behind the connector; None = no check can damage it.
    """

    crosses_processes: bool = True
    composes: ClassVar[bool] = False
    parts: Sequence[ConformanceTarget] = ()
    lease_option: ClassVar[str | None] = None
    blocks: StoredBlocks | None = None

    def __init__(self, connector: type[KVConnector], options: Mapping[str, Any], directory: Path) -> None:
        self.connector = connector
        self.options = {name: _fill_in(value, directory) for name, value in options.items()}
        self.directory = directory

    @property
    def features(self) -> ConnectorFeatures:
        """What the connector declares."""
        return self.connector.features

    def build_options(self, engine_name: str, role: Role) -> dict[str, Any]:
        """The connector's options for one engine.

        Args:
            engine_name: the same again when the engine is restarted.
            role: of the engine.
        """
        return dict(self.options)

    def set_lease(self, options: Mapping[str, Any], lease_s: float) -> dict[str, Any]:
        """An engine's options with a lease of this length.

        Raises:
            NotOfferedError: no option says how long a lease is.
        """
        if self.lease_option is None:
            raise NotOfferedError("the target names no option for the length of a lease")
        return {**options, self.lease_option: lease_s}

    def get_share(self, rank: Rank) -> StoredBlocks:
        """The store as far as it holds one rank's shares of blocks.

        Raises:
            NotOfferedError: checks cannot get at it.
        """
        if rank.size > 1:
            raise NotOfferedError("the target does not let checks at one rank's shares of the stored blocks")
        if self.blocks is None:
            raise NotOfferedError("the target does not let checks at its stored blocks")
        return self.blocks

    def is_saved(self, key: BlockKey) -> bool:
        """Whether a block that is being saved has come to rest, in every place that it goes to."""
        return self.blocks is not None and self.blocks.read(key) is not None

    def outage(self) -> AbstractContextManager[None]:
        """Nothing can be reached while inside: the store is gone, the link is cut."""
        raise NotOfferedError("the target has no way to cut the connector off")

    def full_medium(self) -> AbstractContextManager[None]:
        """The store takes nothing more while inside."""
        raise NotOfferedError("the target has no way to fill the store")

    def held_loads(self) -> AbstractContextManager[None]:
        """Loads that begin inside do not end before it is left; a part that fails does once another one is held."""
        raise NotOfferedError("the target has no way to hold loads back")

    def bad_link(self, damage: Damage) -> AbstractContextManager[None]:
        """What travels inside suffers ``damage``; see `faults.link.FaultyLink`, which does that to sockets.

        Raises:
            NotOfferedError: it cannot do this kind.
        """
        raise NotOfferedError("the target has no link to damage")

    def other_version(self) -> AbstractContextManager[object]:
        """What producers save or say inside is of a version of the connector that this one is not."""
        raise NotOfferedError("the target has no other version of the connector")

    def close(self) -> None:
        """End what was started; idempotent."""


def open_target(
    connector: str,
    directory: Path,
    *,
    options: Mapping[str, Any] | None = None,
    target: str | None = None,
) -> ConformanceTarget:
    """The target of a connector.

    Args:
        connector: a registered name, or ``module:Class``.
        directory: an empty directory of this run's own.
        options: the connector's options.
        target: ``module:Class`` of a `ConformanceTarget`; default: the one that comes with the kit for this name,
            else the plain one.

    Raises:
        ConfigError: the connector or the target cannot be imported, or is none.
    """
    connector_type = load_connector(connector)
    target_type = _import_target(target) if target else _find_known_target(connector)
    return target_type(connector_type, options or {}, directory)


def read_options(path: Path) -> dict[str, Any]:
    """Connector options from a TOML file.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"connector options {path}: {error}") from error


def _fill_in(value: Any, directory: Path) -> Any:
    return value.replace(_DIRECTORY, str(directory)) if isinstance(value, str) else value


def _find_known_target(connector: str) -> type[ConformanceTarget]:
    """The kit's own target for a registered connector: class ``Target`` in a module of the connector's name."""
    module = f"{_TARGETS}.{connector}"
    if not connector.isidentifier() or importlib.util.find_spec(module) is None:
        return ConformanceTarget
    return _import_target(f"{module}:Target")


def _import_target(name: str) -> type[ConformanceTarget]:
    module_name, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"conformance target {name!r} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, ConformanceTarget)):
        raise ConfigError(f"conformance target {name!r} is no subclass of ConformanceTarget")
    return found
