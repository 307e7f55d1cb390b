"""Pins, prefetches and demotions through the synchronous API."""

from __future__ import annotations

import math
from typing import Any

import pytest
from driving import ROOT, Driven, prompt
from hypothesis import given, settings
from hypothesis import strategies as st

from aoffload._common.prefix import Prefix, Root
from aoffload._common.tiers import Tier
from aoffload._config.groups import ChunkedLocal, FullAttention, KVCacheGroup, SlidingWindow
from aoffload._extensions.pins import Pin, PinState
from aoffload._extensions.prefetch import Demotion, Prefetch
from aoffload._extensions.transfers import CacheTransferState
from aoffload._kernel.states import Direction, Outcome
from aoffload.errors import IllegalTransition, InvalidArgument, OutOfBlocks
from proof.programs.fingerprint import changes, fingerprint

A, B, C, D = (prompt(name, 9) for name in range(1, 5))
GROUPS = {
    "full": [KVCacheGroup("full", block_size=4)],
    "full and sliding": [
        KVCacheGroup("full", block_size=4),
        KVCacheGroup("sliding", attention=SlidingWindow(6), block_size=4),
    ],
    "two sizes": [KVCacheGroup("large", block_size=4), KVCacheGroup("small", block_size=2)],
    "sliding alone": [KVCacheGroup("sliding", attention=SlidingWindow(6), block_size=4)],
}
each_layout = pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS.keys())


def prefix(tokens: list[int]) -> Prefix:
    return Prefix.of(ROOT, tokens)


def pin(driven: Driven, tokens: list[int], expires_at: float = math.inf) -> Pin:
    found = driven.ledger.pins.hold(prefix(tokens), expires_at=expires_at)
    driven.ledger.check_integrity()
    return found


def unpin(driven: Driven, handle: Pin) -> None:
    driven.ledger.pins.release(handle)
    driven.ledger.check_integrity()


def prefetch(driven: Driven, tokens: list[int]) -> Prefetch:
    found = driven.ledger.transfers.prefetch(prefix(tokens))
    driven.ledger.check_integrity()
    return found


def demote(driven: Driven, tokens: list[int]) -> Demotion:
    found = driven.ledger.transfers.demote(prefix(tokens))
    driven.ledger.check_integrity()
    return found


def storm(driven: Driven, num_prompts: int = 12) -> None:
    """Others come and go, more of them than both tiers can keep."""
    for name in range(100, 100 + num_prompts):
        driven.serve(prompt(name, 9))


# -- pins ---------------------------------------------------------------------------------------------------------


@each_layout
def test_a_pin_outlives_a_storm(groups: Any) -> None:
    """What was cached stays cached whatever comes and goes; once the pin has ended it is evictable at once."""
    driven = Driven(16, 16, groups=groups)
    driven.serve(A)
    handle = pin(driven, A)
    assert (handle.state, handle.match.num_tokens) == (PinState.HELD, 8)
    storm(driven)
    driven.evict_device()
    assert driven.hit(A) == (8, 0)
    pinned, cached = driven.num_pinned(), driven.ledger.statistics().device.num_cached
    assert min(pinned) > 0
    unpin(driven, handle)
    assert handle.state is PinState.RELEASED
    assert driven.num_pinned() == (0, 0)
    assert driven.ledger.statistics().device.num_cached == cached + pinned[0]
    driven.evict_device()
    assert driven.hit(A)[0] == 0


@each_layout
def test_a_pin_keeps_what_only_the_host_holds(groups: Any) -> None:
    """A prompt that is in host memory alone is kept there, and costs the device nothing."""
    driven = Driven(16, 16, groups=groups)
    driven.on_host_only(A)
    handle = pin(driven, A)
    assert driven.num_pinned()[0] == 0
    storm(driven)
    assert driven.hit(A) == (0, 8)
    loading = driven.running(A)
    assert loading.num_computed_tokens == 8
    driven.release(loading)
    unpin(driven, handle)
    storm(driven)
    assert driven.hit(A) == (0, 0)


def test_a_pin_keeps_the_last_whole_block() -> None:
    """Of a system prompt of exactly two blocks both are kept: longer prompts hit both, the same prompt one."""
    driven = Driven(16, 8, store_policy="off")
    longer = [*A[:8], 7, 7, 7]
    driven.serve(A)
    handle = pin(driven, A[:8])
    assert handle.match.num_device_tokens == 8
    storm(driven)
    driven.evict_device()
    assert driven.hit(longer) == (8, 0)
    assert driven.hit(A[:8]) == (4, 0)
    unpin(driven, handle)


def test_a_pin_of_a_window_serves_the_same_prompt_and_longer_ones() -> None:
    """A window is kept from where the shorter of the two hits needs it."""
    driven = Driven(32, 0, groups=GROUPS["full and sliding"])
    tokens = prompt(1, 17)
    driven.serve(tokens)
    handle = pin(driven, tokens[:16])
    driven.evict_device()
    assert driven.hit(tokens) == (16, 0)
    assert driven.hit(tokens[:16]) == (12, 0)
    unpin(driven, handle)


def test_nothing_cached_is_a_pin_of_nothing() -> None:
    """A miss is no error: the pin is held, keeps nothing, and ends like any other."""
    driven = Driven(8)
    handle = pin(driven, A)
    assert (handle.state, handle.match.num_tokens, driven.num_pinned()) == (PinState.HELD, 0, (0, 0))
    driven.serve(A)
    driven.evict_device()
    assert driven.hit(A) == (0, 8)  # what came later is not its
    unpin(driven, handle)


def test_a_pin_lapses_when_it_is_told_the_time() -> None:
    """Pins end in the order of their deadlines, and not before; `next_lapse` says when to look again."""
    driven = Driven(16)
    for tokens in (A, B, C):
        driven.serve(tokens)
    late, soon, never = pin(driven, A, 20.0), pin(driven, B, 10.0), pin(driven, C)
    assert driven.ledger.next_lapse == 10.0
    driven.ledger.lapse(9.9)
    assert soon.state is PinState.HELD
    driven.ledger.lapse(10.0)
    assert soon.has_lapsed and late.state is PinState.HELD
    assert driven.ledger.next_lapse == 20.0
    driven.ledger.lapse(1e9)
    assert late.has_lapsed and never.state is PinState.HELD
    driven.ledger.check_integrity()
    assert driven.num_pinned() == (2, 2)
    unpin(driven, late)  # its owner leaves, and need not know
    assert late.has_lapsed
    unpin(driven, never)
    assert driven.ledger.next_lapse == math.inf
    assert driven.num_pinned() == (0, 0)


def test_a_pin_is_released_once() -> None:
    """Released twice is refused by both names, and changes nothing."""
    driven = Driven(8)
    driven.serve(A)
    handle, other = pin(driven, A), pin(driven, A)
    unpin(driven, handle)
    before = fingerprint(driven.ledger)
    with pytest.raises(IllegalTransition, match="pin 1: cannot change from RELEASED to RELEASED"):
        driven.ledger.pins.release(handle)
    assert not changes(before, fingerprint(driven.ledger))
    unpin(driven, other)
    assert driven.num_pinned() == (0, 0)


def test_all_pins_together_keep_a_share_of_each_tier() -> None:
    """Beyond `max_pinned_share`, a pin is refused with the numbers, and nothing is changed. What two pins share counts
    once; what another has released counts no more."""
    driven = Driven(8, max_pinned_share=0.5)
    for tokens in (A, B, C):
        driven.serve(tokens)
    first, second = pin(driven, A), pin(driven, B)
    before = fingerprint(driven.ledger)
    with pytest.raises(OutOfBlocks, match="2 blocks needed, 0 available") as refused:
        driven.ledger.pins.hold(prefix(C))
    assert refused.value.retryable
    assert not changes(before, fingerprint(driven.ledger))
    again = pin(driven, A)
    unpin(driven, second)
    with_room = pin(driven, C)
    for handle in (first, again, with_room):
        unpin(driven, handle)
    assert driven.num_pinned() == (0, 0)


def test_a_pin_above_the_share_can_never_be_had() -> None:
    """It says so: no retry will help."""
    driven = Driven(8, max_pinned_share=0.2)
    driven.serve(A)
    with pytest.raises(OutOfBlocks, match="never fit") as refused:
        driven.ledger.pins.hold(prefix(A))
    assert not refused.value.retryable


def test_a_pin_yields_to_a_request_that_nobody_else_could_make_room_for() -> None:
    """A request that fits into the pool is served: the pins that keep the room end, the soonest first, no more of them
    than it takes, and say so."""
    driven = Driven(8, max_pinned_share=1.0)
    for tokens in (A, B, C):
        driven.serve(tokens)
    handle = [pin(driven, tokens, expires_at) for tokens, expires_at in ((A, 30.0), (B, 10.0), (C, 20.0))]
    request = driven.admit(prompt(9, 17))
    with pytest.raises(OutOfBlocks):
        driven.ledger.allocate_nowait(request)  # what does not wait ends nobody's pin
    assert [one.state for one in handle] == [PinState.HELD] * 3
    waiter = driven.ledger.queue_allocation(request)
    driven.ledger.check_integrity()
    assert waiter.granted is not None
    assert [one.state for one in handle] == [PinState.HELD, PinState.YIELDED, PinState.YIELDED]
    driven.ledger.accept(waiter)
    driven.release(request)
    unpin(driven, handle[0])
    assert driven.num_pinned() == (0, 0)


def test_no_pin_yields_while_somebody_else_will_let_go() -> None:
    """A request that runs makes room when it ends: the head of the wait queue waits for that, and the pin stays."""
    driven = Driven(8, max_pinned_share=1.0)
    driven.serve(A)
    handle, running = pin(driven, A), driven.running(prompt(8, 20))
    request = driven.admit(prompt(9, 20))
    waiter = driven.ledger.queue_allocation(request)
    assert not waiter.is_over and handle.state is PinState.HELD
    driven.release(running)
    assert waiter.granted is not None and handle.state is PinState.HELD
    driven.ledger.accept(waiter)
    driven.release(request)
    unpin(driven, handle)


@pytest.mark.parametrize("ends", ["unpin", "lapse", "drop"])
def test_whoever_waits_is_served_when_a_pin_ends(ends: str) -> None:
    """The end of a pin changes room like the end of a request: the first in the wait queue is granted in the same
    step."""
    driven = Driven(8, max_pinned_share=1.0)
    driven.serve(A)
    handle, running = pin(driven, A, 10.0), driven.running(prompt(8, 8))
    request = driven.admit(prompt(9, 24))
    waiter = driven.ledger.queue_allocation(request)
    assert not waiter.is_over
    if ends == "unpin":
        driven.ledger.pins.release(handle)
    elif ends == "lapse":
        driven.ledger.lapse(10.0)
    else:
        driven.ledger.pins.drop()
    driven.ledger.check_integrity()
    assert waiter.granted is not None
    driven.release(running)


def test_a_pin_yields_before_an_extension_fails() -> None:
    """When only waiters and pins hold room, the pins go first; what a pin shares with a request is no room, so that pin
    stays."""
    driven = Driven(8, max_pinned_share=1.0)
    for tokens in (A, B):
        driven.serve(tokens)
    shared, other = pin(driven, A), pin(driven, B)
    running = driven.running([*A[:8], *range(8)])
    waiter = driven.ledger.queue_extension(running, 28)
    driven.ledger.check_integrity()
    assert waiter.granted is not None
    assert (shared.state, other.state) == (PinState.HELD, PinState.YIELDED)
    driven.ledger.accept(waiter)
    driven.release(running)
    unpin(driven, shared)


def test_two_pins_of_one_prompt_yield_together() -> None:
    """Each alone would make no room."""
    driven = Driven(4, max_pinned_share=1.0)
    driven.serve(A)
    handle = [pin(driven, A), pin(driven, A), pin(driven, A[:4])]
    request = driven.admit(prompt(9, 16))
    waiter = driven.ledger.queue_allocation(request)
    driven.ledger.check_integrity()
    assert waiter.granted is not None
    assert [one.state for one in handle] == [PinState.YIELDED] * 3


def test_a_reset_drops_pins() -> None:
    """Nothing cached is kept by a reset, so nothing is pinned by what kept it."""
    driven = Driven(8)
    driven.serve(A)
    handle = pin(driven, A)
    driven.ledger.reset()
    driven.ledger.check_integrity()
    assert handle.state is PinState.DROPPED
    assert driven.num_pinned() == (0, 0)
    unpin(driven, handle)
    assert driven.hit(A) == (0, 0)


def test_a_pin_does_not_keep_what_turned_out_to_be_wrong() -> None:
    """A failed forward takes back what it committed: the pin keeps what is right, and no room for the rest."""
    driven = Driven(8)
    running = driven.running(A)
    driven.land(driven.commit(running))
    handle = pin(driven, A)
    driven.ledger.invalidation.invalidate(running, 4)
    driven.ledger.check_integrity()
    assert handle.match.num_tokens == 4
    driven.release(running, "failed")
    assert driven.num_pinned() == (1, 1)
    unpin(driven, handle)
    assert driven.num_pinned() == (0, 0)


def test_a_pin_does_not_keep_a_corrupt_block() -> None:
    """A block that failed its checksum is forgotten, and free at once, pinned or not."""
    driven = Driven(8)
    driven.on_host_only(A)
    handle = pin(driven, A)
    request = driven.allocated(A)
    (plan,) = driven.launch(driven.ledger.plan_load(request))
    driven.end(plan, Outcome.CORRUPT, 1, (1,))
    driven.release(request)
    assert driven.num_pinned()[1] == 1
    assert driven.ledger.statistics().host.num_free == 15
    unpin(driven, handle)
    assert driven.num_pinned() == (0, 0)


BAD_TIMES: list[object] = [None, "60", math.nan, True, [1.0], 1j]


@pytest.mark.parametrize("bad", BAD_TIMES, ids=repr)
def test_a_time_that_is_none(bad: Any) -> None:
    """Refused by name, with nothing changed."""
    driven = Driven(8)
    driven.serve(A)
    handle = pin(driven, A)
    before = fingerprint(driven.ledger)
    with pytest.raises(InvalidArgument, match="expires_at"):
        driven.ledger.pins.hold(prefix(A), expires_at=bad)
    with pytest.raises(InvalidArgument, match="now"):
        driven.ledger.lapse(bad)
    assert not changes(before, fingerprint(driven.ledger))
    unpin(driven, handle)


def test_what_another_ledger_made_is_refused() -> None:
    """Its blocks are not ours."""
    driven, other = Driven(8), Driven(8)
    driven.on_host_only(A)
    handle, transfer = pin(driven, A), prefetch(driven, A)
    for bad in (handle, None, 7):
        with pytest.raises(InvalidArgument, match="pin"):
            other.ledger.pins.release(bad)  # type: ignore[arg-type]
    for bad in (transfer, None, handle):
        with pytest.raises(InvalidArgument, match="transfer"):
            other.ledger.transfers.cancel(bad)  # type: ignore[arg-type]
    assert handle.state is PinState.HELD and not transfer.is_over


# -- prefetches ---------------------------------------------------------------------------------------------------


@each_layout
def test_a_prefetch_brings_what_a_request_would_load(groups: Any) -> None:
    """Afterwards the prompt hits on the device, nothing is pinned, and nothing has to be loaded."""
    driven = Driven(16, 16, groups=groups, max_prefetch_share=1.0)
    driven.on_host_only(A)
    transfer = prefetch(driven, A)
    assert transfer.state is CacheTransferState.MOVING
    assert transfer.num_blocks == sum(plan.num_blocks for plan in transfer.plans) > 0
    driven.land(transfer.plans)
    assert (transfer.state, transfer.num_tokens) == (CacheTransferState.DONE, 8)
    assert driven.num_pinned() == (0, 0)
    assert driven.hit(A) == (8, 0)
    request = driven.allocated(A)
    assert driven.ledger.plan_load(request) == ()
    assert request.num_computed_tokens == 8
    driven.release(request)


def test_what_was_prefetched_is_the_last_to_be_evicted() -> None:
    """It was used last: others lose their blocks before it does."""
    driven = Driven(8, max_prefetch_share=1.0)
    driven.on_host_only(A)
    for tokens in (B, C):
        driven.serve(tokens)
    driven.land(prefetch(driven, A).plans)
    driven.serve(prompt(9, 16))
    assert [driven.hit(tokens)[0] for tokens in (A, B)] == [8, 0]


@each_layout
def test_a_prefetch_under_a_full_device_changes_nothing(groups: Any) -> None:
    """No room that is not pinned: no blocks, no jobs, no counts; it is over at once."""
    driven = Driven(12, 16, groups=groups, max_prefetch_share=1.0)
    driven.on_host_only(A)
    num_unpinned = driven.ledger.statistics().device.num_free + driven.ledger.statistics().device.num_cached
    hog = driven.allocated(prompt(8, num_unpinned // driven.ledger.layout.width * 4))
    before = driven.ledger.statistics()
    transfer = prefetch(driven, A)
    assert (transfer.state, transfer.plans, transfer.num_tokens) == (CacheTransferState.DONE, (), 0)
    assert driven.ledger.statistics() == before
    driven.release(hog)


def test_a_prefetch_evicts_only_what_is_unpinned() -> None:
    """It takes free blocks and what could be evicted, never what a request or a pin keeps."""
    driven = Driven(6, max_prefetch_share=1.0)
    driven.on_host_only(A)
    driven.serve(B)
    driven.serve(C)
    handle, reading = pin(driven, B), driven.running(C)
    assert driven.ledger.statistics().device.num_free == 1
    transfer = prefetch(driven, A)
    driven.land(transfer.plans)
    assert transfer.num_tokens == 4  # as much as there was room for
    assert driven.hit(B) == (8, 0) and driven.hit(C) == (8, 0)
    driven.release(reading)
    unpin(driven, handle)


def test_a_prefetch_takes_nothing_while_somebody_waits_for_room() -> None:
    """Requests in the wait queue come first, even if blocks are free."""
    driven = Driven(8, max_prefetch_share=1.0)
    driven.on_host_only(A)
    hog, waits = driven.allocated(prompt(8, 20)), driven.admit(prompt(9, 20))
    waiter = driven.ledger.queue_allocation(waits)
    transfer = prefetch(driven, A)
    assert transfer.is_over and not transfer.plans
    driven.release(hog)
    assert waiter.granted is not None


def test_prefetches_share_a_budget() -> None:
    """All that are under way take no more than their share; it is back when one is over."""
    driven = Driven(16, max_prefetch_share=0.25)
    for tokens in (A, B, C):
        driven.serve(tokens)
    driven.evict_device()
    long = prompt(7, 33)
    driven.serve(long)
    driven.evict_device()
    part = prefetch(driven, long)
    assert part.num_blocks == 4
    none = prefetch(driven, A)
    assert none.is_over and not none.plans
    driven.land(part.plans)
    assert part.num_tokens == 16
    first, second = prefetch(driven, A), prefetch(driven, B)
    assert (first.num_blocks, second.num_blocks) == (2, 2)
    assert prefetch(driven, C).is_over
    driven.ledger.transfers.cancel(first)
    driven.ledger.check_integrity()
    third = prefetch(driven, C)
    assert third.num_blocks == 2
    driven.land([*second.plans, *third.plans])
    assert driven.num_pinned() == (0, 0)


@pytest.mark.parametrize("end", ["cancel", "discard", "fail", "corrupt", "unproven", "reset", "close"])
def test_the_budget_is_back_however_a_prefetch_ends(end: str) -> None:
    """Given up, failed, lost, reset, closed: its blocks, its pins and its share go back, once."""
    driven = Driven(8, max_prefetch_share=0.25)
    driven.on_host_only(A)
    transfer = prefetch(driven, A)
    (plan,) = transfer.plans
    assert driven.ledger.transfers.prefetch(prefix(B)).is_over
    if end == "discard":
        driven.ledger.discard(plan.job_id)
    elif end in ("cancel", "close"):
        (driven.ledger.transfers.cancel_all if end == "close" else lambda: driven.ledger.transfers.cancel(transfer))()
        assert not driven.ledger.launch(plan.job_id)  # nobody else wants it
    else:
        driven.launch([plan])
        if end == "reset":
            driven.ledger.reset()
        outcomes = {"fail": Outcome.FAILED, "corrupt": Outcome.CORRUPT, "unproven": Outcome.UNPROVEN}
        driven.end(plan, outcomes.get(end, Outcome.LANDED), 0, (0,) if end == "corrupt" else ())
    driven.ledger.check_integrity()
    assert transfer.state is (CacheTransferState.CANCELLED if end in ("cancel", "close") else CacheTransferState.DONE)
    assert transfer.num_tokens == 0
    assert driven.num_pinned() == (0, 0)
    if end == "unproven":
        assert driven.ledger.statistics().device.num_quarantined == 2
        driven.end(plan)
    driven.on_host_only(B)
    again = prefetch(driven, B)
    assert again.num_blocks == 2
    driven.land(again.plans)
    assert again.num_tokens == 8


def test_a_cancelled_prefetch_leaves_a_launched_copy_alone() -> None:
    """It can't be recalled: it lands in blocks of its own, and what it brought is cached."""
    driven = Driven(8, max_prefetch_share=1.0)
    driven.on_host_only(A)
    transfer = prefetch(driven, A)
    plans = driven.launch(transfer.plans)
    driven.ledger.transfers.cancel(transfer)
    driven.ledger.transfers.cancel(transfer)  # over is over
    driven.ledger.check_integrity()
    assert transfer.state is CacheTransferState.CANCELLED
    driven.end(plans[0])
    assert driven.hit(A) == (8, 0)
    assert driven.num_pinned() == (0, 0)


@each_layout
def test_two_prefetches_of_one_prompt_share_a_load(groups: Any) -> None:
    """The second launches nothing, evicts nothing, and is over when the first is; so does a request."""
    driven = Driven(24, 24, groups=groups, max_prefetch_share=1.0)
    driven.on_host_only(A)
    first = prefetch(driven, A)
    second = prefetch(driven, A)
    assert second.plans == () and not second.is_over
    assert second.num_blocks == 0
    request = driven.allocated(A)
    assert driven.ledger.plan_load(request) == ()
    driven.ledger.transfers.cancel(first)
    driven.land(first.plans)  # wanted by the others
    assert (second.state, second.num_tokens) == (CacheTransferState.DONE, 8)
    assert request.num_computed_tokens == 8
    driven.release(request)
    assert driven.num_pinned() == (0, 0)


def test_a_failed_prefetch_keeps_what_landed() -> None:
    """What is proven is cached; the rest is a miss for the device and still in the host."""
    driven = Driven(8, max_prefetch_share=1.0)
    driven.on_host_only(A)
    transfer = prefetch(driven, A)
    driven.end(driven.launch(transfer.plans)[0], Outcome.FAILED, 1)
    assert (transfer.state, transfer.num_tokens) == (CacheTransferState.DONE, 4)
    assert driven.hit(A) == (4, 4)


# -- demotions ----------------------------------------------------------------------------------------------------


@each_layout
def test_a_demotion_stores_and_frees(groups: Any) -> None:
    """What the host lacks is stored, then the device blocks are free; the prompt hits in the host as far as before."""
    driven = Driven(16, 16, groups=groups)
    request = driven.running(A)
    for plan in (*driven.commit(request), *driven.release(request)):
        driven.ledger.discard(plan.job_id)  # the host knows nothing of it
    cached = driven.ledger.statistics().device.num_cached
    transfer = demote(driven, A)
    assert transfer.state is CacheTransferState.MOVING
    assert {plan.direction for plan in transfer.plans} == {Direction.STORE}
    assert driven.hit(A) == (8, 0)
    driven.land(transfer.plans)
    assert (transfer.state, transfer.num_blocks) == (CacheTransferState.DONE, cached)
    assert driven.hit(A) == (0, 8)
    statistics = driven.ledger.statistics().device
    assert (statistics.num_free, statistics.num_cached) == (statistics.num_blocks, 0)


def test_what_is_in_the_host_already_is_freed_at_once() -> None:
    """Nothing has to be copied, so nothing has to be waited for."""
    driven = Driven(8)
    driven.serve(A)
    transfer = demote(driven, A)
    assert (transfer.state, transfer.plans, transfer.num_blocks) == (CacheTransferState.DONE, (), 2)
    assert driven.hit(A) == (0, 8)
    assert demote(driven, A).num_blocks == 0
    assert demote(driven, B).num_blocks == 0


def test_a_demotion_waits_for_stores_of_others() -> None:
    """What is on its way to the host is not stored again; the blocks go when it has landed."""
    driven = Driven(8)
    request = driven.running(A)
    stores = [*driven.commit(request), *driven.release(request)]
    transfer = demote(driven, A)
    assert not transfer.is_over and not transfer.plans
    driven.land(stores)
    assert transfer.is_over and transfer.num_blocks == 2


@pytest.mark.parametrize("keeper", ["request", "pin", "step"])
def test_what_somebody_reads_stays(keeper: str) -> None:
    """A request, a pin or a running forward that holds the blocks keeps them on the device."""
    driven = Driven(8)
    driven.serve(A)
    request = driven.running(A) if keeper != "pin" else None
    handle = pin(driven, A) if keeper == "pin" else None
    step = driven.ledger.step([request]) if keeper == "step" and request is not None else None
    if step is not None and request is not None:
        step.__enter__()
        driven.release(request, "cancelled")
    assert demote(driven, A).num_blocks == 0
    assert driven.hit(A) == (8, 0)
    if step is not None:
        step.__exit__(None, None, None)
    elif request is not None:
        driven.release(request)
    elif handle is not None:
        unpin(driven, handle)
    assert demote(driven, A).num_blocks == 2


def test_who_comes_while_it_is_stored_keeps_the_blocks() -> None:
    """What is pinned when the store lands stays, whoever has asked for the demotion."""
    driven = Driven(8)
    driven.on_host_only(B)
    request = driven.running(A)
    for plan in (*driven.commit(request), *driven.release(request)):
        driven.ledger.discard(plan.job_id)
    transfer = demote(driven, A)
    reading = driven.running(A)
    driven.land(transfer.plans)
    assert (transfer.state, transfer.num_blocks) == (CacheTransferState.DONE, 0)
    assert driven.hit(A) == (8, 0)
    driven.release(reading)


def test_the_prefix_of_another_cached_prompt_stays() -> None:
    """Two prompts share a block: demoting one frees what is its alone, then the other can take the rest along."""
    driven = Driven(8)
    one, other = [*A[:4], 1, 2, 3, 4, 9], [*A[:4], 5, 6, 7, 8, 9]
    driven.serve(one)
    driven.serve(other)
    assert demote(driven, A[:4]).num_blocks == 0
    assert demote(driven, one).num_blocks == 1
    assert driven.hit(one) == (4, 4) and driven.hit(other) == (8, 0)
    assert demote(driven, [*A[:4], 7]).num_blocks == 0
    assert demote(driven, other).num_blocks == 1  # what hangs on the shared block in the host still needs no device


def test_what_the_host_has_no_room_for_stays() -> None:
    """A demotion never loses what is cached."""
    driven = Driven(8, 2)
    driven.serve(B)
    handle = pin_all_of_the_host(driven)
    request = driven.running(A)
    driven.commit(request)
    driven.release(request)
    transfer = demote(driven, A)
    assert (transfer.state, transfer.plans, transfer.num_blocks) == (CacheTransferState.DONE, (), 0)
    assert driven.hit(A) == (8, 0)
    unpin(driven, handle)
    driven.land(demote(driven, A).plans)
    assert driven.hit(A) == (0, 8)


def pin_all_of_the_host(driven: Driven) -> Pin:
    driven.ledger.pins.max_share = 1.0
    return pin(driven, B)


def test_what_hits_without_a_byte_in_the_host_stays() -> None:
    """Where a prompt ends at the end of a chunk nothing before it is read again, so nothing is stored: what says that
    it hits is on the device alone, and stays there."""
    driven = Driven(16, 16, groups=[KVCacheGroup("chunks", ChunkedLocal(8), 4)])
    tokens = prompt(1, 17)
    driven.serve(tokens)
    before = driven.hit(tokens)
    demotion = demote(driven, tokens)
    driven.land(demotion.plans)
    assert sum(before) == 16 and sum(driven.hit(tokens)) == 16


@pytest.mark.parametrize("end", ["cancel", "fail", "discard", "unproven", "reset", "close"])
def test_a_demotion_that_does_not_come_off_frees_nothing(end: str) -> None:
    """Given up, failed, lost, reset or closed: what was on the device is where it was, unless a reset forgot it."""
    driven = Driven(8)
    request = driven.running(A)
    for plan in (*driven.commit(request), *driven.release(request)):
        driven.ledger.discard(plan.job_id)
    transfer = demote(driven, A)
    (plan,) = transfer.plans
    if end in ("cancel", "close"):
        (driven.ledger.transfers.cancel_all if end == "close" else lambda: driven.ledger.transfers.cancel(transfer))()
        assert transfer.state is CacheTransferState.CANCELLED
        driven.land([plan])  # a store belongs to nobody: it goes on
        assert driven.hit(A) == (8, 0)
        assert driven.ledger.statistics().host.num_cached == 2
    elif end == "discard":
        driven.ledger.discard(plan.job_id)
    else:
        driven.launch([plan])
        if end == "reset":
            driven.ledger.reset()
        outcomes = {"fail": Outcome.FAILED, "unproven": Outcome.UNPROVEN}
        driven.end(plan, outcomes.get(end, Outcome.LANDED))
    driven.ledger.check_integrity()
    assert transfer.is_over and transfer.num_blocks == 0
    assert driven.hit(A) == ((0, 0) if end == "reset" else (8, 0))
    assert driven.num_pinned() == (0, 0)


def test_a_demotion_from_before_a_reset_frees_nothing_after_it() -> None:
    """Who has cached the prompt again since then keeps it where it is."""
    driven = Driven(12)
    request = driven.running(A)
    for plan in (*driven.commit(request), *driven.release(request)):
        driven.ledger.discard(plan.job_id)
    transfer = demote(driven, A)
    driven.launch(transfer.plans)
    driven.ledger.reset()
    driven.serve(A)
    driven.end(transfer.plans[0])
    assert (transfer.state, transfer.num_blocks) == (CacheTransferState.DONE, 0)
    assert driven.hit(A) == (8, 0)


def test_a_demotion_does_not_evict_what_is_hit_in_the_host() -> None:
    """What a demotion stores has no room where the host is full of what the same prompt would hit: of windows, too."""
    groups = [KVCacheGroup("full", block_size=4), KVCacheGroup("window", attention=SlidingWindow(6), block_size=4)]
    driven = Driven(15, 4, groups=groups, max_pinned_share=1.0)
    short, long = TEXTS[:2]
    spine, window = driven.commit(request := driven.running(short))
    driven.land([spine])
    driven.launch([window])
    driven.release(request)
    driven.end(window, Outcome.FAILED)
    handle = pin(driven, short)
    driven.land([*driven.commit(request := driven.running(long)), *driven.release(request)])
    driven.evict_device()
    before = num_hit(driven, long)
    transfer = demote(driven, long)
    assert (before, num_hit(driven, long)) == (12, 12)
    driven.land(transfer.plans)
    assert num_hit(driven, long) == 12
    unpin(driven, handle)


# -- everything at once -------------------------------------------------------------------------------------------

LAYOUTS = st.sampled_from(
    [
        [KVCacheGroup("full", block_size=4)],
        [KVCacheGroup("full", block_size=4), KVCacheGroup("window", attention=SlidingWindow(6), block_size=4)],
        [KVCacheGroup("window", attention=SlidingWindow(9), block_size=2), KVCacheGroup("full", block_size=4)],
        [KVCacheGroup("chunks", attention=ChunkedLocal(8), block_size=4), KVCacheGroup("full", FullAttention(), 4)],
        [KVCacheGroup("window", attention=SlidingWindow(5), block_size=4)],
    ]
)
TEXTS = [[*prompt(1, 8), *prompt(branch, 4 * length), 9] for branch in (2, 3) for length in (0, 1, 2)]


@settings(max_examples=120)
@given(LAYOUTS, st.randoms(use_true_random=False), st.integers(12, 40), st.integers(0, 40))
def test_whatever_is_asked_for_in_whatever_order_nothing_is_lost(
    groups: Any, seed: Any, num_device: int, num_host: int
) -> None:
    """Pins, prefetches, demotions and requests in any order, copies landing, failing or given up in any order: after
    every call each block is in one hand, what is pinned hits as far as it did, and at rest nothing is pinned."""
    ask_for_anything(groups, seed, num_device, num_host)


def ask_for_anything(groups: Any, seed: Any, num_device: int, num_host: int) -> None:
    share = seed.choice((0.3, 1.0))
    driven = Driven(num_device, num_host, groups=groups, max_pinned_share=share, max_prefetch_share=share)
    ledger = driven.ledger
    pins: list[tuple[Pin, list[int]]] = []
    transfers: list[Any] = []
    queued: list[Any] = []
    for step in range(30):
        text = seed.choice(TEXTS)
        call = seed.choice(("serve", "pin", "unpin", "prefetch", "demote", "end", "end", "cancel", "evict", "lapse"))
        if call == "serve":
            request = driven.admit(text)
            try:
                ledger.allocate_nowait(request)
                queued += ledger.plan_load(request)
                if request.state.name == "LOADING":
                    ledger.abandon_load(request)
                if request.state.name == "RUNNING":
                    queued += driven.commit(request)
            except OutOfBlocks:
                pass
            queued += driven.release(request)
        elif call == "pin":
            try:
                pins.append((pin(driven, text, step + seed.choice((3, 100))), text))
            except OutOfBlocks:
                continue
        elif call == "unpin" and pins:
            unpin(driven, pins.pop(seed.randrange(len(pins)))[0])
        elif call in ("prefetch", "demote"):
            before = num_hit(driven, text)
            transfers.append((prefetch if call == "prefetch" else demote)(driven, text))
            queued += transfers[-1].plans
            assert call == "prefetch" or num_hit(driven, text) == before  # all that a demotion changes is where
        elif call == "end" and queued:
            end_one(driven, queued.pop(seed.randrange(len(queued))), seed)
        elif call == "cancel" and transfers:
            ledger.transfers.cancel(seed.choice(transfers))
        elif call == "evict":
            driven.evict_device()
        elif call == "lapse":
            ledger.lapse(step)
        ledger.check_integrity()
        for handle, kept in pins:
            if handle.state is PinState.HELD:
                assert sum(driven.hit([*kept, 0])) >= handle.match.num_tokens, (call, handle)
    while queued:
        end_one(driven, queued.pop(0), seed)
    assert all(transfer.is_over for transfer in transfers)
    ledger.pins.drop()
    ledger.check_integrity()
    statistics = ledger.statistics()
    assert driven.num_pinned() == (0, 0)
    assert (statistics.num_jobs, statistics.num_requests, statistics.num_pins) == (0, 0, 0)


def num_hit(driven: Driven, text: list[int]) -> int:
    """To the last whole block, as a longer prompt would."""
    return sum(driven.hit([*text[: len(text) // 4 * 4], 0]))


def end_one(driven: Driven, plan: Any, seed: Any) -> None:
    if not driven.launch([plan]):
        return
    outcome = seed.choice((Outcome.LANDED, Outcome.LANDED, Outcome.LANDED, Outcome.FAILED))
    driven.end(plan, outcome, 0 if outcome is Outcome.LANDED else seed.randint(0, plan.num_blocks - 1))


def test_another_root_is_another_prompt() -> None:
    """A tenant pins, fetches and demotes nothing of another."""
    driven = Driven(8)
    driven.serve(A)
    other = Prefix.of(Root("test", cache_salt="other"), A)
    assert driven.ledger.pins.hold(other).match.num_tokens == 0
    assert driven.ledger.transfers.demote(other).num_blocks == 0
    driven.evict_device()
    assert not driven.ledger.transfers.prefetch(other).plans
    assert driven.ledger.cache.tiers[Tier.HOST].num_cached == 2
