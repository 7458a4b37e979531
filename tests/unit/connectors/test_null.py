from __future__ import annotations

import pytest

from pdserve.connectors.base import FinishDecision, MatchResult
from pdserve.connectors.null import NullConnector
from pdserve.connectors.testing import EngineHarness, build_context
from pdserve.errors import ConfigError
from pdserve.protocol import Role


def test_it_never_matches_and_never_saves() -> None:
    engine = EngineHarness(NullConnector, build_context(Role.PREFILL, {}))
    engine.submit("a", range(10))
    assert engine.lookup("a") == MatchResult(0, is_async=False)
    engine.admit("a", 0)
    engine.step({"a": 10})
    assert engine.finish("a", handoff=True) == FinishDecision()
    engine.step()
    assert engine.is_idle
    assert engine.num_used_blocks == 0
    engine.close()
    engine.close()


def test_it_takes_no_options() -> None:
    context = build_context(Role.PREFILL, {"path": "/x"})
    with pytest.raises(ConfigError, match="takes no options, got path"):
        NullConnector.build_scheduler(context)
    with pytest.raises(ConfigError, match="takes no options, got path"):
        NullConnector.build_worker(context)
