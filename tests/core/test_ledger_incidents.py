"""The founding incidents, told to the ledger. tests/shell/test_incidents.py tells them to the runtime."""

from __future__ import annotations

import pytest
from driving import Driven, prompt

from aoffload._common.tiers import Tier
from aoffload._kernel.records import LedgerRequest
from aoffload._kernel.states import Direction, Outcome, RequestState
from aoffload.errors import OutOfBlocks

A, B, C, D = (prompt(name, 9) for name in (1, 2, 3, 4))
"""Two full blocks each, and one token that is left to compute."""


def references(request: LedgerRequest, tier: Tier) -> list[int]:
    return [run.parts[tier].num_references for run in request.leases[tier].run.path()]


# -- I1: the hit that was gone ------------------------------------------------------------------------------------


def test_i1_a_host_hit_stays_until_it_is_loaded() -> None:
    """Between the match and the load, other requests store as much as they like: the blocks found are still there."""
    driven = Driven(num_device=12, num_host=4)
    driven.on_host_only(A)
    held = driven.ledger.cache.tiers[Tier.HOST].order.oldest()
    assert held is not None
    stored = list(held.blocks)
    b = driven.admit(A)
    assert b.match.num_host_tokens == 8
    for other in (C, D):
        driven.serve(other)
    assert driven.hit(A) == (0, 8)
    driven.ledger.allocate_nowait(b)
    (plan,) = driven.ledger.plan_load(b)
    assert list(plan.source_ids) == stored
    driven.land([plan])
    assert b.state is RequestState.RUNNING
    assert b.num_computed_tokens == 8


@pytest.mark.parametrize("stage", ["pinned", "waiting", "allocated", "loading, queued", "loading, launched", "running"])
def test_i1_whoever_never_loads_lets_go(stage: str) -> None:
    """A request that leaves at any point after its match leaves no pin behind, on either tier."""
    driven = Driven(num_device=4, num_host=4)
    driven.on_host_only(A)
    blocker = driven.allocated(prompt(5, 16)) if stage == "waiting" else None
    b = driven.admit(A)
    if stage == "waiting":
        driven.ledger.queue_allocation(b, None, lambda: None)
    elif stage != "pinned":
        driven.ledger.allocate_nowait(b)
    plans = driven.ledger.plan_load(b) if stage.startswith(("loading", "running")) else ()
    if stage == "loading, launched":
        driven.launch(plans)
    if stage == "running":
        driven.land(plans)
    driven.release(b, "cancelled")
    if blocker is not None:
        driven.release(blocker, "done")
    if stage == "loading, launched":
        driven.end(plans[0])  # it could not be recalled, and it may be published
        assert driven.hit(A) == (8, 0)
    assert driven.num_pinned() == (0, 0)


# -- I2: the stolen prefix ----------------------------------------------------------------------------------------


def test_i2_a_device_hit_is_pinned_by_the_match() -> None:
    """The count is 1 right after the match, and nobody's allocation takes the block any more."""
    driven = Driven(num_device=4)
    driven.serve(A)
    a = driven.admit(A)
    assert references(a, Tier.DEVICE) == [1]
    blocks = driven.ledger.cache.index.runs.values()
    (mine,) = [list(run.parts[Tier.DEVICE].blocks) for run in blocks]
    thief = driven.allocated(B[:8])
    assert not set(thief.table) & set(mine)
    driven.ledger.allocate_nowait(a, 8)
    assert list(a.table) == mine


def test_i2_a_failed_allocation_leaves_every_count_as_it_was() -> None:
    """With N of the free blocks being its own hits, a refusal changes nothing, however often it is tried."""
    driven = Driven(num_device=4)
    driven.serve(A)
    driven.allocated(prompt(5, 8))
    a = driven.admit(prompt(1, 16))
    before = driven.picture()
    for _ in range(2):
        with pytest.raises(OutOfBlocks):
            driven.ledger.allocate_nowait(a)
        assert driven.picture() == before
    assert references(a, Tier.DEVICE) == [1]


def test_i2_an_abort_between_match_and_allocation_leaks_nothing() -> None:
    """What the match pinned is evictable again, at once and in its old order: the tail goes first."""
    driven = Driven(num_device=4, num_host=0)
    driven.serve(A)
    driven.release(driven.admit(A), "cancelled")
    assert driven.num_pinned() == (0, 0)
    driven.allocated(prompt(5, 12))
    assert driven.hit(A) == (4, 0)


# -- I3: the block stored twice -----------------------------------------------------------------------------------


def test_i3_what_is_being_stored_is_not_stored_again() -> None:
    """A second request on the same blocks, while their store is in flight, starts no job and takes no host block."""
    driven = Driven(num_device=12)
    first = driven.running(A)
    stores = driven.commit(first)
    host = driven.ledger.statistics().host
    second = driven.running(A)
    assert second.match.num_device_tokens == 8
    assert driven.commit(second) == []
    assert driven.ledger.statistics().host == host
    driven.land(stores)
    assert all(run.parts[Tier.HOST].incoming is None for run in driven.ledger.cache.index.runs.values())
    assert driven.commit(second) == [] == driven.release(second)


def test_i3_a_private_duplicate_is_never_stored() -> None:
    """Another device block with the same tokens is a block of its own: never findable, never stored."""
    driven = Driven(num_device=12)
    first, second = driven.running(A), driven.running(A)
    stores = driven.commit(first)
    assert driven.commit(second) == []
    assert list(second.table[:2]) != list(first.table[:2])
    driven.land(stores)
    assert driven.commit(second) == []
    assert [plan.direction for plan in stores] == [Direction.STORE]
    assert driven.ledger.statistics().host.num_cached == 2


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.UNPROVEN])
def test_i3_a_store_that_failed_is_offered_again_and_happens(outcome: Outcome) -> None:
    """A failure unmarks what was in flight: the offload that was wanted is not lost."""
    driven = Driven(num_device=12)
    request = driven.running(A)
    (store,) = driven.commit(request)
    driven.launch([store])
    driven.end(store, outcome)
    (again,) = driven.commit(request)
    assert list(again.source_ids) == list(store.source_ids)
    driven.land([again])
    driven.release(request)
    driven.evict_device()
    assert driven.hit(A) == (0, 8)


# -- I5: the exact-fit prompt -------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_host", [False, True])
def test_i5_a_prompt_cached_to_its_last_block_hits_one_less(on_host: bool) -> None:
    """One token has to be computed to have logits: 32 tokens in blocks of 16, both cached, hit 16."""
    driven = Driven(num_device=8)
    tokens = prompt(1, 8)
    driven.serve(tokens)
    if on_host:
        driven.evict_device()
    assert driven.hit(tokens) == ((0, 4) if on_host else (4, 0))
    request = driven.running(tokens)
    assert request.match.num_tokens == request.num_computed_tokens == 4
    assert request.published == 1
