"""Sequences of calls, each one legal, that once led to wrong bytes, a leak, a false alarm, or a wait without end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from driving import ROOT, prompt
from tagged_memory import Tagged

from aoffload import FullAttention, KVCacheGroup, OutOfBlocks, RequestState, SlidingWindow, Tier
from aoffload.ledger import LedgerRequest, Outcome, PinState, Prefix, TransferPlan
from proof.programs.fingerprint import changes, fingerprint

FULL = KVCacheGroup("full", FullAttention(), 1)
WINDOW = KVCacheGroup("window", SlidingWindow(3), 1)
A = prompt(1, 9)


# -- room asked for before the load is planned ------------------------------------------------------------------------


def allocated_beside_its_twin() -> tuple[Tagged, LedgerRequest, LedgerRequest]:
    """A request whose host hit is not loaded yet. Another has computed the same meanwhile, and holds the room."""
    driven = Tagged(40, groups=[FULL, WINDOW])
    driven.on_host_only(A)
    driven.memory[Tier.DEVICE].clear()
    request = driven.allocated(A)
    assert request.match.num_host_tokens == 8
    twin = driven.running(A, reads_cache=False)
    driven.compute(twin, 9)
    return driven, request, twin


def test_an_extension_refused_before_the_load_changes_nothing() -> None:
    """`extend_nowait` between `allocate` and `load` is refused because too few blocks are free: nothing is matched
    again under the block tables, the load brings what it was to bring, and every block comes back."""
    driven, request, twin = allocated_beside_its_twin()
    before = fingerprint(driven.ledger)
    with pytest.raises(OutOfBlocks) as refused:
        driven.ledger.extend_nowait(request, 19)
    assert refused.value.retryable
    assert not changes(before, fingerprint(driven.ledger))
    driven.ledger.check_integrity()
    driven.land(driven.ledger.plan_load(request))
    assert (request.num_computed_tokens, driven.reads_right(request)) == (8, True)
    driven.compute(request, 9)
    for record in (request, twin):
        driven.land(driven.release(record))
    driven.assert_at_rest()


# -- a failed forward that somebody else has built on -----------------------------------------------------------------


def test_what_was_computed_on_a_failed_forward_is_not_found_in_a_model_of_windows_alone() -> None:
    """Somebody computes on what a failed forward has committed, and is gone before it is invalidated: what it has
    cached is wrong as well, and a miss from then on."""
    driven = Tagged(40, 0, groups=[WINDOW])
    author = driven.running(A)
    driven.compute(author, 3, failed=True)
    reader = driven.running(A)
    driven.compute(reader, 9)
    driven.compute(author, 6)
    driven.release(reader)
    assert driven.ledger.invalidation.invalidate(author, 0) == (author,)  # it can't go back behind its window
    driven.release(author, "prefix_invalidated")
    assert driven.hit([*A, 1]) == (0, 0)
    later = driven.running(A)
    assert driven.reads_right(later)
    driven.release(later)
    driven.assert_at_rest()


@pytest.mark.parametrize("is_preempted", [False, True], ids=["running", "preempted"])
@pytest.mark.parametrize("has_committed", [False, True], ids=["before its first commit", "after a commit"])
def test_a_fork_is_told_of_a_failed_forward_whatever_it_has_done_since(is_preempted: bool, has_committed: bool) -> None:
    """It goes on with the token that the failed forward has sampled: it has to be aborted."""
    driven = Tagged(16, 16, groups=[KVCacheGroup("full", FullAttention(), 2)])
    parent = driven.admit(A[:4])
    driven.ledger.allocate_nowait(parent, 8)
    driven.ledger.plan_load(parent)
    driven.land(driven.commit(parent, 4, [99]))
    fork = driven.ledger.forks.fork(parent, "fork", num_tokens=8).request
    if has_committed:
        driven.land(driven.commit(fork, 5, [7]))
    if is_preempted:
        driven.land(driven.ledger.preemption.preempt(fork).plans)
    assert driven.ledger.invalidation.invalidate(parent, 0) == (fork,)
    driven.ledger.check_integrity()
    for record in (fork, parent):
        driven.land(driven.release(record))
    assert driven.hit([*A[:4], 99, 7]) == (0, 0)
    driven.assert_at_rest()


def test_a_step_holds_what_it_reads_although_that_was_taken_back_and_everybody_has_left() -> None:
    """A forward runs on blocks that turn out to be wrong, and both requests are gone: who takes all the room there is
    gets none of them before the step has ended."""
    driven = Tagged(12, 0, groups=[FULL])
    author = driven.running(A[:4])
    driven.compute(author, 4)
    reader = driven.running(A[:5])
    with driven.ledger.step([reader]):
        read = set(driven.ledger.block_ids(reader)[0][:4])
        assert driven.ledger.invalidation.invalidate(author, 0) == (reader,)
        for record in (author, reader):
            driven.release(record, "prefix_invalidated")
        neighbour = driven.admit(prompt(2, 1))
        driven.ledger.allocate_nowait(neighbour, driven.ledger.admission.num_available)
        driven.ledger.check_integrity()
        assert read.isdisjoint(driven.ledger.block_ids(neighbour)[0])
    driven.ledger.extend_nowait(neighbour, 12)
    driven.release(neighbour)
    driven.assert_at_rest()


# -- granted, and not accepted yet ------------------------------------------------------------------------------------


def granted_after_a_lost_load() -> tuple[Tagged, LedgerRequest, LedgerRequest, TransferPlan]:
    """A load is lost, and its request waits for free blocks to compute; in between another has computed the first
    tokens."""
    driven = Tagged(20, groups=[FULL])
    driven.on_host_only(A[:7])
    driven.memory[Tier.DEVICE].clear()
    request = driven.allocated(A[:7])
    (load,) = driven.launch(driven.ledger.plan_load(request))
    other = driven.running([*A[:3], *prompt(2, 8)], reads_cache=False)
    driven.compute(other, 11)
    driven.end(load, Outcome.UNPROVEN)
    assert request.waiter is not None and not request.waiter.is_over
    return driven, request, other, load


@pytest.mark.parametrize("how", ["reset", "invalidate"])
def test_a_grant_that_is_not_accepted_yet_holds_without_its_hit(how: str) -> None:
    """The hit that was counted on is gone before the request accepts its grant: its table is whole, and nothing in it
    is called ready that nobody has written."""
    driven, request, other, load = granted_after_a_lost_load()
    if how == "reset":
        driven.land(driven.release(other))
        assert request.waiter is not None and request.waiter.is_over
        driven.ledger.reset(Tier.DEVICE)
    else:
        driven.end(load, Outcome.FAILED)  # late proof: room
        assert request.waiter is not None and request.waiter.is_over
        assert driven.ledger.invalidation.invalidate(other, 0) == ()
        driven.release(other)
    driven.ledger.check_integrity()
    assert request.waiter.is_over
    driven.ledger.accept(request.waiter)
    driven.land(driven.ledger.plan_load(request))
    assert request.state is RequestState.RUNNING
    assert (len(driven.ledger.block_ids(request)[0]), request.num_computed_tokens) == (7, 0)
    driven.compute(request, 7)
    driven.land(driven.release(request))
    if how == "reset":
        driven.end(load, Outcome.FAILED)
    driven.assert_at_rest()


# -- who waits for whom -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pressure", range(1, 9))
def test_a_pin_yields_whatever_the_first_in_line_has_matched(pressure: int) -> None:
    """Nobody else holds anything: a request that counts on what a pin keeps gets its room all the same."""
    driven = Tagged(10, groups=[FULL, WINDOW])
    driven.serve(A[:3])
    squeezing = driven.admit(prompt(5, 8))
    try:
        driven.ledger.allocate_nowait(squeezing, pressure)
    except OutOfBlocks:
        assert pressure > 5
    driven.release(squeezing)
    pin = driven.ledger.pins.hold(Prefix.of(ROOT, A[:1]))
    request = driven.admit([*A[:1], *prompt(6, 4)])
    waiter = driven.ledger.queue_allocation(request)
    driven.ledger.check_integrity()
    assert waiter.is_over
    driven.ledger.accept(waiter)
    driven.land(driven.ledger.plan_load(request))
    driven.compute(request, 5)
    driven.land(driven.release(request))
    if pin.state is PinState.HELD:
        driven.ledger.pins.release(pin)
    driven.assert_at_rest()


# -- the law itself ---------------------------------------------------------------------------------------------------


@contextmanager
def early_step_beside_a_twin(driven: Tagged) -> Iterator[LedgerRequest]:
    """A forward that has begun on its load, while another request computes the first tokens, and no room is left."""
    driven.on_host_only(A[:6])
    request = driven.allocated(A[:6])
    driven.launch(driven.ledger.plan_load(request))
    with driven.ledger.overlap.step([], [request]):
        twin = driven.running(A[:6], reads_cache=False)
        driven.compute(twin, 2)
        squeezing = driven.admit([5])
        driven.ledger.allocate_nowait(squeezing, driven.ledger.admission.num_available)
        yield request
    for record in (twin, squeezing):
        driven.land(driven.release(record))


def test_a_load_that_is_given_up_under_a_forward_breaks_no_law() -> None:
    """`load_timeout_s` is over while a step has begun on the load: the law of conservation holds, now and later."""
    driven = Tagged(59, groups=[KVCacheGroup("window", SlidingWindow(2), 1)])
    with early_step_beside_a_twin(driven) as request:
        driven.ledger.abandon_load(request)
        driven.ledger.check_integrity()
    driven.ledger.check_integrity()
    driven.release(request, "timed out")
    driven.ledger.check_integrity()
