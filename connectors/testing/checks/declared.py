"""Abilities that a connector has and does not declare: a warning, for nobody relies on them."""

from __future__ import annotations

from pdserve.connectors.testing.bench import Bench
from pdserve.connectors.testing.check import check, collect_checks
from pdserve.connectors.testing.violations import UndeclaredAbilityError


@check("R2", needs=())
def what_is_undeclared_is_not_there(bench: Bench) -> None:
    """A connector that does not declare saving offers nothing; one that does not declare loading promises nothing."""
    features = bench.target.features
    producer, consumer = bench.build_producer(), bench.build_consumer()
    prompt = bench.make_prompt(2 * bench.block_size)
    params = bench.hand_over(producer, prompt)
    if params is not None and not features.can_save:
        raise UndeclaredAbilityError("a hand-off's KV is offered, but can_save is not declared")
    found = bench.fetch(consumer, prompt, params)
    if found and not features.can_load:
        raise UndeclaredAbilityError(f"{found} tokens were loaded, but can_load is not declared")
    if bench.fetch(consumer, prompt, None) and not features.is_store and not bench.target.composes:
        raise UndeclaredAbilityError("KV is found without parameters, but is_store is not declared")


CHECKS = collect_checks(globals())
