"""Rare paths that simulated runs seldom take, each tested by name because of a planted defect."""

from __future__ import annotations

import pytest
from driving import Driven, prompt

from aoffload._kernel.states import Outcome, RequestState
from aoffload.errors import OutOfBlocks
from proof.scenarios.sharing import NewestFirst


def test_who_was_refused_has_its_match_again() -> None:
    """A waiter after the head holds no pins; when quarantine makes its wish hopeless, it is matched again and may ask
    for less."""
    driven = Driven(6)
    driven.on_host_only(prompt(1, 9))
    loading = driven.allocated(prompt(1, 9))
    (plan,) = driven.launch(driven.ledger.plan_load(loading))
    head = driven.ledger.queue_allocation(driven.admit(prompt(2, 16)))
    behind = driven.ledger.queue_allocation(driven.admit(prompt(1, 24)), 24)
    driven.end(plan, Outcome.UNPROVEN)
    assert behind.error is not None and not behind.error.retryable
    with pytest.raises(OutOfBlocks):
        driven.ledger.accept(behind)
    assert behind.request.state is RequestState.PINNED and behind.request.leases
    driven.release(head.request)
    driven.release(loading)
    driven.ledger.allocate_nowait(behind.request, 12)


def test_who_can_never_fit_after_its_own_load_hears_so_behind_others() -> None:
    """A load quarantines one of its blocks, and its request begins again after others who wait longer: it is told at
    once that it can never fit, not when its turn comes."""
    driven = Driven(6, 20, max_job_bytes=1)
    driven.on_host_only(prompt(1, 21))
    before = [driven.admit(prompt(2, 20)), driven.admit(prompt(3, 4))]
    loading = driven.allocated(prompt(1, 24))
    plans = driven.launch(driven.ledger.plan_load(loading))
    granted, head = (driven.ledger.queue_allocation(request) for request in before)
    driven.end(plans[0], Outcome.UNPROVEN)
    for plan in plans[1:]:
        driven.end(plan, Outcome.FAILED)
    assert granted.granted is not None and not head.is_over
    assert loading.waiter is not None and isinstance(loading.waiter.error, OutOfBlocks)
    assert not loading.waiter.error.retryable
    driven.ledger.check_integrity()


def test_an_island_on_the_device_is_not_shared() -> None:
    """Whatever order evicts: what the device holds after its first missing block is no hit."""
    driven = Driven(6, 20, eviction=NewestFirst)
    shared, tail = [1] * 4, [2] * 8
    for tokens in ([*shared, *tail, 0], [*shared, *[3] * 4, 0]):
        request = driven.running(tokens)
        driven.land(driven.commit(request, len(tokens) - 1))
        driven.release(request)
    crowd = driven.allocated(prompt(7, 12))
    driven.release(crowd)
    again = driven.allocated([*shared, *tail, 0])
    assert again.match.num_device_tokens + again.match.num_host_tokens == 12
    driven.ledger.check_integrity()


def test_a_store_in_flight_outlives_the_one_behind_it() -> None:
    """Two stores on one run; the second ends in doubt. What the first still brings is not stored again (I3)."""
    driven = Driven(8, 8, max_job_bytes=1)
    request = driven.allocated(prompt(1, 9))
    first, second = driven.launch(driven.commit(request, 8))
    driven.end(second, Outcome.UNPROVEN)
    again = driven.ledger.release(request)
    stored_again = {block_id for plan in again for block_id in plan.source_ids}
    assert stored_again.isdisjoint(first.source_ids)
    assert stored_again == set(second.source_ids)


def test_a_split_where_a_store_stops_leaves_nothing_behind() -> None:
    """A prompt branches off right where the copy in flight ends: when all is over, no token of it stays in memory."""
    driven = Driven(12, 8, max_job_bytes=1)
    request = driven.allocated(prompt(1, 9))
    first, second = driven.launch(driven.commit(request, 8))
    driven.end(second, Outcome.UNPROVEN)
    branch = driven.running([*prompt(1, 4), *prompt(2, 5)])
    driven.end(first)
    driven.release(request, "cancelled")
    driven.release(branch, "cancelled")
    driven.end(second)
    driven.evict_device()
    assert [repr(run) for run in driven.ledger.cache.index.runs.values()] == ["<Run [0,1) device=0/0 host=1/0>"]


def test_no_order_of_eviction_breaks_a_path() -> None:
    """An order may take heads before tails: what was evicted is a miss, and what hangs on it is reached again later."""
    driven = Driven(8, 0, eviction=NewestFirst)
    shared = prompt(1, 8)
    for name in (2, 3):
        driven.serve([*shared, *prompt(name, 5)])
    driven.release(driven.allocated(prompt(7, 20)))  # four blocks are free: one is taken from the head
    assert driven.hit([*shared, *prompt(2, 5)]) == (4, 0)
    driven.serve([*shared, 0])
    assert driven.hit([*shared, *prompt(2, 5)]) == (12, 0)
