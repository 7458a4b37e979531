"""Logging set-up shared by every process: stdlib logging, one line a record, role and instance in front.

A line carries keys given through ``extra={"kv": {...}}`` as ``key=value`` at its end. Prompt text and
secrets are never logged; the callers see to that. Control characters are written as escapes, so that what others
chose (a name, a frame) cannot make a line of its own.
"""

from __future__ import annotations

import logging
import re
import sys

from pdserve import env
from pdserve.errors import ConfigError

_CONTROL_CHARACTER = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class _LineFormatter(logging.Formatter):
    """``time level process logger message key=value …``."""

    def __init__(self, process_name: str) -> None:
        super().__init__(
            f"%(asctime)s.%(msecs)03d %(levelname)-7s [{process_name}] %(name)s: %(message)s",
            datefmt="%H:%M:%S",
        )

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line of ``record``, with the pairs of its ``kv`` extra behind the message; a traceback follows it."""
        line = super().formatMessage(record)
        pairs = getattr(record, "kv", None)
        if pairs:
            line += " " + " ".join(f"{key}={value}" for key, value in pairs.items())
        return _CONTROL_CHARACTER.sub(_escape, line)


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


def configure_logging(process_name: str, level: str | None = None) -> None:
    """Send all of pdserve's records to stderr; call once at a process's start.

    Args:
        process_name: what stands in brackets, for example ``prefill-0``.
        level: overrides ``PDSERVE_LOG_LEVEL``.

    Raises:
        ConfigError: the level is not one that logging knows.
    """
    chosen = (level or env.get_log_level()).upper()
    if chosen not in logging.getLevelNamesMapping():
        known = ", ".join(("DEBUG", "INFO", "WARNING", "ERROR"))
        raise ConfigError(f"log level {chosen!r} is unknown; use one of {known}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_LineFormatter(process_name))
    root = logging.getLogger("pdserve")
    root.handlers[:] = [handler]
    root.setLevel(chosen)
    root.propagate = False
