"""Copies under way when their KV is invalidated or its tier reset: none of them publishes it."""

from __future__ import annotations

import pytest
from driving import BLOCK, Driven, Tier

from aoffload import KVCacheGroup, SlidingWindow
from aoffload._kernel.plans import TransferPlan
from aoffload._kernel.records import LedgerRequest
from aoffload._kernel.states import Outcome


def loads_twice_after_a_failure(driven: Driven, tokens: list[int]) -> tuple[LedgerRequest, list[TransferPlan]]:
    """Two loads of `tokens` under way: the first job of the first load has failed, and the second load copies all of
    them again. Returns the request that has computed the tokens, and the unsettled plans."""
    computed = driven.running(tokens)
    driven.land(driven.commit(computed))
    driven.ledger.reset(Tier.DEVICE)
    failed, *rest = driven.launch(driven.ledger.plan_load(driven.allocated(tokens), max_job_bytes=2))
    driven.end(failed, Outcome.FAILED)
    again = driven.launch(driven.ledger.plan_load(driven.allocated(tokens)))
    assert len(rest) > 1 and sum(plan.num_blocks for plan in again) == (len(tokens) - 1) // BLOCK
    return computed, [*rest, *again]


@pytest.mark.parametrize("by_reset", [False, True])
def test_no_copy_under_way_publishes_what_was_invalidated(by_reset: bool) -> None:
    """An invalidation, or a reset of both tiers, reaches every copy under way, those of an earlier load as well."""
    driven, tokens = Driven(100, 100), list(range(53))
    computed, plans = loads_twice_after_a_failure(driven, tokens)
    if by_reset:
        driven.ledger.reset(Tier.HOST)
        driven.ledger.reset(Tier.DEVICE)
    else:
        for reader in driven.ledger.invalidation.invalidate(computed, 2 * BLOCK):
            driven.release(reader, "tainted")
    right = driven.running([*tokens[: 2 * BLOCK], 99], max_hit_tokens=0)
    driven.commit(right)
    for plan in plans:
        driven.end(plan)
    assert driven.hit(tokens) == (2 * BLOCK, 0)


def windows_under_way(driven: Driven, tokens: list[int]) -> tuple[LedgerRequest, list[TransferPlan]]:
    """Two loads under way into the same window: the second one brings units before those of the first. Returns the
    request that has computed the tokens, and the plans."""

    def prompt_of(num_units: int) -> list[int]:
        return [*tokens[: BLOCK * num_units], 9000 + num_units]

    computed = driven.running(tokens)
    driven.land(driven.commit(computed))
    for num_units in (20, 16):
        driven.serve(prompt_of(num_units))  # stores its window
    driven.evict_device()
    plans = driven.launch(driven.ledger.plan_load(driven.allocated(prompt_of(20)), 18 * BLOCK, max_job_bytes=1))
    plans += driven.launch(driven.ledger.plan_load(driven.allocated(prompt_of(16)), max_job_bytes=1))
    return computed, plans


@pytest.mark.parametrize("at", [13, 14])
def test_no_copy_into_a_window_publishes_what_was_invalidated(at: int) -> None:
    """The same for windows, whose copies are not planned in the order of their units, and after a split of the run."""
    driven = Driven(200, 200, groups=[KVCacheGroup("w", SlidingWindow(16), BLOCK)])
    tokens = list(range(101))
    computed, plans = windows_under_way(driven, tokens)
    leaves = driven.running([*tokens[: BLOCK * at], *[7] * 9])
    driven.commit(leaves)
    for reader in driven.ledger.invalidation.invalidate(computed, BLOCK * at):
        driven.release(reader, "tainted")
    for plan in plans:
        driven.end(plan)
    if at == 13:  # computes the first wrong unit anew
        right = driven.running([*tokens[: BLOCK * 14], 3])
        driven.commit(right)
        driven.release(right)
    assert sum(driven.hit([*tokens[: BLOCK * 15], 9015])) <= BLOCK * 14
