"""The pytest plugin: which connector ``pytest --pyargs pdserve.connectors.testing`` is about.

It is imported in every environment that has pdserve and pytest, so it imports nothing else.
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Called by pytest, once."""
    group = parser.getgroup("pdserve-connectors", "conformance of KV connectors")
    group.addoption("--connector", metavar="NAME", help="connector under test: a registered name, or module:Class")
    group.addoption("--connector-options", metavar="FILE", help="its options, as a TOML file")
    group.addoption("--connector-target", metavar="module:Class", help="its ConformanceTarget, where it has one")
