"""One thing that is wrong."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found.

    Attributes:
        subject: what it is about: a router's URL or an instance.
        problem: what is wrong, a plain sentence with the values.
        remedy: what to do, a plain sentence.
    """

    subject: str
    problem: str
    remedy: str
