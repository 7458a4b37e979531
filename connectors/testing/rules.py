"""The rules of the connector contract, as data. docs/connectors.md has a section for each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule.

    Attributes:
        id: ``R1`` … ``R23``.
        title: a few words.
        what: what must hold, in one sentence.
    """

    id: str
    title: str
    what: str


RULES: tuple[Rule, ...] = (
    Rule("R1", "Counts are beyond local", "A lookup counts only tokens beyond those the engine has itself."),
    Rule("R2", "Whole-prompt hits work", "A prompt that is there as a whole loads as a whole, or all but one token."),
    Rule("R3", "Lookups are pure", "A lookup may be asked any number of times and changes nothing."),
    Rule(
        "R4",
        "Promises are kept or reported",
        "A lookup promises only what can be loaded; what vanishes before the load is a reported failure.",
    ),
    Rule("R5", "Partial blocks never over-claim", "A partial block counts its own tokens, for its own prompt only."),
    Rule("R6", "Every chunk is saved", "A prompt computed in chunks is saved whole; claims cover what was saved."),
    Rule("R7", "Nothing uncomputed is saved", "Blocks of a step whose forward pass failed never reach a consumer."),
    Rule(
        "R8",
        "Preemption is fenced",
        "A step's blocks may be reused when it ends; a one-shot transfer is not asked for twice.",
    ),
    Rule(
        "R9",
        "One completion for each load",
        "Every load ends in one report, also when its request was aborted; unknown and duplicate ids do no harm.",
    ),
    Rule(
        "R10",
        "One completion for each send",
        "A send is reported exactly once when one was registered, also when every key was stored already.",
    ),
    Rule("R11", "Failures wait for all parts", "A load that fails is reported when no part of it writes any more."),
    Rule("R12", "Ranks take the minimum", "Ranks report for themselves, as prefixes, so that their minimum is right."),
    Rule("R13", "Shapes match or are refused", "Other shapes at the two ends give exact KV or none."),
    Rule("R14", "Identity is complete", "Models, dtypes, block sizes, adapters and salts never meet."),
    Rule("R15", "Only the prompt travels", "Tokens behind the prompt, sampled or drafted, never leave the engine."),
    Rule("R16", "Transfer ids are unique", "Equal request ids never collide, and a transfer id is good for one load."),
    Rule("R17", "Composition counts once", "Connectors side by side in one engine complete once for the engine."),
    Rule(
        "R18",
        "Leases are honoured",
        "A late read fails, an expired hold is freed, a cancelled one earlier; the wall clock has no say.",
    ),
    Rule("R19", "Restarts are new generations", "References to a dead peer fail in time; a restarted peer just works."),
    Rule("R20", "Transfers progress when idle", "Steps without tokens are enough for every transfer to end."),
    Rule("R21", "Stored blocks are whole", "Writes are atomic and verified: truncated, torn or flipped is a miss."),
    Rule(
        "R22",
        "Wires carry plain, bounded data",
        "No pickle, small plain messages; parameters from outside are checked, never believed.",
    ),
    Rule(
        "R23", "Counters add up", "What a connector counts as moved has moved, once; what it lost is counted by kind."
    ),
)

RULE_IDS: tuple[str, ...] = tuple(rule.id for rule in RULES)
