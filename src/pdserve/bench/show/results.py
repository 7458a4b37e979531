"""The file of ``--output``: JSON with the settings, the machine, and all that was measured."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pdserve.bench.measure.machine import describe_machine
from pdserve.bench.measure.samples import RequestSample
from pdserve.bench.measure.summary import Summary
from pdserve.errors import ConfigError
from pdserve.settings import describe_settings

_DIGITS = 6


def check_writable(path: str | None, flag: str) -> None:
    """Find out before a long measurement whether its results could be written.

    Raises:
        ConfigError: they could not; says why.
    """
    if path is None:
        return
    target = Path(path)
    if target.is_dir():
        raise ConfigError(f"{flag} {path} is a directory; give a file")
    if not target.parent.is_dir():
        raise ConfigError(f"{flag} {path}: the directory {target.parent} is not there")
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        raise ConfigError(f"{flag} {path}: no permission to write there")


def write_results(path: str | None, command: str, config: Any, results: Mapping[str, Any]) -> None:
    """Write a run's results, if a path is given.

    Args:
        path: the file; None = do nothing.
        command: which subcommand.
        config: its settings.
        results: what it measured, as plain values.

    Raises:
        ConfigError: the file cannot be written.
    """
    if path is None:
        return
    content = {
        "command": f"pdserve bench {command}",
        "machine": describe_machine(),
        "settings": describe_settings(config),
        **results,
    }
    try:
        Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {path} cannot be written: {error.strerror}") from None


def describe_summary(summary: Summary) -> dict[str, Any]:
    """A summary as plain values; what follows from its fields is there too."""
    return {
        **dataclasses.asdict(summary),
        "num_lost": summary.num_lost,
        "requests_per_s": summary.requests_per_s,
        "output_tokens_per_s": summary.output_tokens_per_s,
        "total_tokens_per_s": summary.total_tokens_per_s,
        "tokens_per_event": summary.tokens_per_event,
    }


def describe_samples(samples: Sequence[RequestSample]) -> list[dict[str, Any]]:
    """Each request as plain values, its events' times included."""
    return [
        {
            "index": sample.index,
            "due_s": _round(sample.due_s),
            "sent_s": _round(sample.sent_s),
            "end_s": _round(sample.end_s),
            "event_times_s": [_round(time_s) for time_s in sample.event_times_s],
            "num_prompt_tokens": sample.num_prompt_tokens,
            "num_output_tokens": sample.num_output_tokens,
            "failure": None if sample.failure is None else dataclasses.asdict(sample.failure),
        }
        for sample in samples
    ]


def _round(value: float) -> float:
    return round(value, _DIGITS)
