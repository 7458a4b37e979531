"""Plain-text tables and numbers as people read them."""

from __future__ import annotations

from collections.abc import Sequence

MISSING = "-"


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows in columns: the first column to the left, the others to the right; the first row is the heading."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        first, *others = row
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def format_number(value: float | None) -> str:
    """Three or more digits that count, with thousands separated; a dash for None."""
    if value is None:
        return MISSING
    size = abs(value)
    if size >= 100 or value == int(value):
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 1 else f"{value:.3f}"


def format_ms(seconds: float | None) -> str:
    """Seconds as milliseconds, without the unit."""
    return MISSING if seconds is None else f"{seconds * 1000:,.1f}"


def format_share(share: float | None) -> str:
    """A share as per cent."""
    return MISSING if share is None else f"{share:.1%}"
