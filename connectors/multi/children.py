"""Option ``children``: a list of tables, each with a connector, its options and, where two are alike, a name."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from pdserve.connectors.base import ConnectorContext, ConnectorFeatures, KVConnector
from pdserve.connectors.messages import MessageTypes, ServesRanks
from pdserve.connectors.registry import load_connector, require_ranks
from pdserve.errors import ConfigError


class _ChildTable(msgspec.Struct, forbid_unknown_fields=True):
    """What the user writes for one child."""

    connector: str
    options: dict[str, Any] = {}
    name: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Child:
    """One connector of the composition.

    Attributes:
        name: unique among the children; the same in every engine that exchanges KV.
        connector_name: as registered, or ``module:Class``.
        connector: the class.
        options: its own.
        is_first_of_its_kind: no child before it is of the same connector.
    """

    name: str
    connector_name: str
    connector: type[KVConnector]
    options: Mapping[str, Any]
    is_first_of_its_kind: bool


def parse_children(options: Mapping[str, Any]) -> list[Child]:
    """The children, in order of preference.

    Args:
        options: of the composition.

    Raises:
        ConfigError: the option is missing or ill-formed, a connector is unknown, or two children have one name.
    """
    unknown = [name for name in options if name != "children"]
    if unknown:
        raise _error(f"option {unknown[0]!r} is unknown; known: children")
    tables = _read_tables(options.get("children"))
    names = [table.name or table.connector for table in tables]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise _error(f"two children are called {twice!r}; give each a name of its own")
    kinds = [table.connector for table in tables]
    return [
        Child(name, kind, load_connector(kind), table.options, is_first_of_its_kind=kind not in kinds[:index])
        for index, (name, kind, table) in enumerate(zip(names, kinds, tables, strict=True))
    ]


def compose_features(children: Sequence[Child]) -> ConnectorFeatures:
    """What a composition of these children declares.

    What others may rely on is what all children have; what the engine is asked to call is passed on to whoever has it.
    """
    each = [child.connector.features for child in children]
    return ConnectorFeatures(
        can_save=all(features.can_save for features in each),
        can_load=all(features.can_load for features in each),
        is_store=all(features.is_store for features in each),
        layerwise=any(features.layerwise for features in each),
        cancels_sends=any(features.cancels_sends for features in each),
        hears_of_queue=any(features.hears_of_queue for features in each),
        wakes_engine=all(features.wakes_engine for features in each),
        ranks=all(features.ranks for features in each),
    )


def get_child_types(children: Sequence[Child]) -> list[MessageTypes]:
    """What each child's halves say to each other.

    Raises:
        ConfigError: a child does not serve ranks.
    """
    types: list[MessageTypes] = []
    for child in children:
        if not isinstance(child.connector, ServesRanks):
            raise _error(f"child {child.name} serves one rank only")
        types.append(child.connector.message_types(child.options))
    return types


class _Closable(Protocol):
    def close(self) -> None: ...


Half = TypeVar("Half", bound=_Closable)


def build_halves(
    context: ConnectorContext, children: Sequence[Child], build: Callable[[Child, ConnectorContext], Half]
) -> list[Half]:
    """Build one half of each child with its own options; when one refuses, those before it are closed.

    Raises:
        ConfigError: a child refuses its options, or serves one rank only and the engine has several.
    """
    with contextlib.ExitStack() as built:
        halves = []
        for child in children:
            require_ranks(child.name, child.connector, context.rank)
            half = build(child, dataclasses.replace(context, options=child.options))
            built.callback(half.close)
            halves.append(half)
        built.pop_all()
    return halves


def _read_tables(raw: object) -> list[_ChildTable]:
    try:
        if isinstance(raw, str):
            tables = msgspec.json.decode(raw, type=list[_ChildTable])
        else:
            tables = msgspec.convert(raw, type=list[_ChildTable])
    except msgspec.MsgspecError as error:
        raise _error(
            f"option children: {error}; give a list of tables like "
            '{connector = "shared_storage", options = {path = "/mnt/kv"}}, or the same as JSON'
        ) from None
    if not tables:
        raise _error("option children is empty")
    return tables


def _error(message: str) -> ConfigError:
    return ConfigError(f"connector multi: {message}")
