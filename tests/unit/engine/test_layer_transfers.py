"""When a layerwise connector's calls are made."""

from __future__ import annotations

from pdserve.connectors.null import NullWorker
from pdserve.engine.model_runner import LayerTransfers


class Recorder(NullWorker):
    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def wait_for_layer_load(self, layer: int) -> None:
        self.calls.append(("load", layer))

    def save_kv_layer(self, layer: int) -> None:
        self.calls.append(("save", layer))


class Chooser(Recorder):
    is_saving = False

    def wants_layers(self) -> bool:
        return self.is_saving


def test_a_connector_that_says_nothing_is_always_called() -> None:
    connector = Recorder()
    transfers = LayerTransfers(connector)
    assert transfers.are_wanted()
    transfers.before_layer(3)
    transfers.after_layer(3)
    assert connector.calls == [("load", 3), ("save", 3)]


def test_one_that_chooses_is_asked_at_each_step() -> None:
    connector = Chooser()
    transfers = LayerTransfers(connector)
    assert not transfers.are_wanted()
    connector.is_saving = True
    assert transfers.are_wanted()
