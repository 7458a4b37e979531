from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from pdserve.engine.server.listening import build_gate, warn_of_open_door
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


def test_an_open_door_to_other_machines_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_open_door(InstanceSettings())
    warn_of_open_door(InstanceSettings(host="0.0.0.0", curve_secret_key="some.secret"))
    assert warnings_of(caplog) == []
    warn_of_open_door(InstanceSettings(host="0.0.0.0"))
    assert len(warnings_of(caplog)) == 1
    assert "whoever reaches 0.0.0.0 may use this instance" in warnings_of(caplog)[0]


def test_gate_is_there_only_where_something_is_asked_for(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path
) -> None:
    assert build_gate(context, InstanceSettings(host="0.0.0.0")) is None
    secret, public = make_key_pair("a", tmp_path)
    assert build_gate(context, InstanceSettings(curve_secret_key=str(secret), curve_peer_keys=str(public))) is not None


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
