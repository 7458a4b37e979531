"""What connectors are tested with: an engine without a model that drives a connector step by step."""

from pdserve.connectors.testing.harness import EngineHarness, RuleViolationError
from pdserve.connectors.testing.kv_content import KVContent, build_context

__all__ = ["EngineHarness", "KVContent", "RuleViolationError", "build_context"]
