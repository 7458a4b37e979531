"""Lets the router's tests import their fakes."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
