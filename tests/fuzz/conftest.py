"""Lets the fuzzers import what they share, with one another and with other tests."""

import sys
from pathlib import Path

_TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(_TESTS / "fuzz"), str(_TESTS / "unit" / "router"), str(_TESTS / "e2e"), str(_TESTS)]
