"""How a breach of the contract and a test that cannot run are told apart from everything else."""

from __future__ import annotations

from dataclasses import dataclass


class RuleViolationError(AssertionError):
    """The connector broke a rule of the contract.

    Args:
        rule: the rule's id.
        message: what happened.
    """

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"{rule}: {message}")
        self.rule = rule
        self.message = message


class UndeclaredAbilityError(Exception):
    """The connector does what it does not declare; a warning, not a failure."""


class NotDeclaredError(Exception):
    """The connector does not claim what a check is about; a run showed it, not its features."""


class NotOfferedError(Exception):
    """The target has no way to do what a check needs; the check is skipped with this reason."""


@dataclass(frozen=True, slots=True)
class Blame:
    """The rule that wrong bytes break when they could break several.

    Attributes:
        rule: its id.
        covers_garbage: also when it shows where the bytes come from (memory not computed, or free already).
    """

    rule: str
    covers_garbage: bool = False
