from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from pdserve.engine.server.listening import build_gate
from pdserve.engine.server.settings import InstanceSettings
from pdserve.errors import ConfigError
from pdserve.peers.curve_keys import make_key_pair


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.term()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_an_open_door_to_other_machines_is_one_warning(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secret, public = make_key_pair("a", tmp_path)
    logging.getLogger("pdserve").propagate = True
    assert build_gate(context, InstanceSettings()) is None
    assert warnings_of(caplog) == []
    assert build_gate(context, InstanceSettings(host="0.0.0.0", port=8100)) is None
    assert len(warnings_of(caplog)) == 1
    assert "port 8100 of 0.0.0.0" in warnings_of(caplog)[0]
    settings = InstanceSettings(host="0.0.0.0", curve_secret_key=str(secret), curve_peer_keys=str(public))
    assert build_gate(context, settings) is not None
    assert len(warnings_of(caplog)) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (InstanceSettings(allowed_peers=["10.0.0.0/24", "elsewhere"]), "--allowed-peers: 'elsewhere'"),
        (InstanceSettings(curve_secret_key="/none"), "belong together"),
        (InstanceSettings(curve_secret_key="/none", curve_peer_keys="/none"), "--curve-secret-key /none: No such file"),
    ],
)
def test_wrong_settings_are_told(
    settings: InstanceSettings, message: str, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_gate(context, settings)
