"""Hand-off parameters of a composition: one parcel, with a part for each child that has something to say."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import msgspec

from pdserve.connectors.base import KVRequest
from pdserve.connectors.multi.children import Child
from pdserve.protocol import KVTransferParams

CONNECTOR_NAME = "multi"


def compose_params(transfer_id: str, engine_id: str, parts: Mapping[str, KVTransferParams]) -> KVTransferParams | None:
    """The parcel; None when no child has a part.

    Args:
        transfer_id: unique for this hand-off.
        engine_id: the producer.
        parts: by the child's name.
    """
    if not parts:
        return None
    return KVTransferParams(
        connector=CONNECTOR_NAME,
        transfer_id=transfer_id,
        engine_id=engine_id,
        num_tokens=max(part.num_tokens for part in parts.values()),
        num_bytes=max(part.num_bytes for part in parts.values()),
        payload={name: msgspec.to_builtins(part) for name, part in parts.items()},
    )


def view_for(request: KVRequest, child: Child) -> KVRequest:
    """The request as the child would see it alone: with its own part of the parameters, or none.

    A producer that runs one of the children's connectors by itself is understood too. Of two children of that
    connector the first gets the parameters: they are good for one load, and whoever is told that it will not load
    gives them back.
    """
    params = request.kv_transfer_params
    if params is None:
        return request
    return dataclasses.replace(request, kv_transfer_params=_find_part(params, child))


def _find_part(params: KVTransferParams, child: Child) -> KVTransferParams | None:
    if params.connector != CONNECTOR_NAME:
        is_for_child = child.is_first_of_its_kind and params.connector == child.connector_name
        return params if is_for_child else None
    try:
        return msgspec.convert(params.payload.get(child.name), type=KVTransferParams)
    except msgspec.ValidationError:
        return None
