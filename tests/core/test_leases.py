"""Leases, all-or-nothing allocation, and blocks that a request may not read or write."""

from __future__ import annotations

import pytest
from driving import Driven, Tier, prompt

from aoffload._kernel.plans import TransferPlan
from aoffload._kernel.states import RequestState
from aoffload.errors import DuplicateRequest, IntegrityError, LeaseError, OutOfBlocks, WrongState

A = prompt(1, 9)


def test_a_lease_released_twice_raises() -> None:
    """A lease is single-use: the second release raises and takes nobody else's reference away."""
    driven = Driven(8)
    driven.serve(A)
    first, second = driven.admit(A), driven.admit(A)
    lease = first.leases[Tier.DEVICE]
    driven.release(first)
    with pytest.raises(LeaseError, match="released twice"):
        driven.ledger.cache.release(lease)
    assert [run.parts[Tier.DEVICE].num_references for run in second.leases[Tier.DEVICE].run.path()] == [1]
    driven.ledger.check_integrity()


def test_a_request_is_released_once() -> None:
    """Leaving twice is refused by name and gives nothing back twice."""
    driven = Driven(8)
    request = driven.allocated(A)
    driven.release(request)
    with pytest.raises(WrongState, match="ABORTED"):
        driven.ledger.release(request)
    assert driven.ledger.statistics().device.num_free == 8


def test_leaving_without_a_commit_is_an_abort() -> None:
    """`closed_early` is a reason like any other; only a commit makes it DONE."""
    driven = Driven(12)
    early, done, failed = driven.running(A), driven.running(prompt(2, 9)), driven.running(prompt(3, 9))
    driven.commit(done)
    driven.commit(failed)
    for request, reason in ((early, "closed_early"), (done, "closed_early"), (failed, "error: X")):
        driven.release(request, reason)
    assert (early.state, early.reason) == (RequestState.ABORTED, "closed_early")
    assert (done.state, done.reason) == (RequestState.DONE, "")
    assert (failed.state, failed.reason) == (RequestState.ABORTED, "error: X")


@pytest.mark.parametrize("num_tokens", [None, 20, 24])
def test_a_refused_allocation_changes_nothing(num_tokens: int | None) -> None:
    """All or nothing: no block, no count and no place in the eviction order changes when there is too little room."""
    driven = Driven(6)
    driven.serve(prompt(2, 9))
    driven.allocated(prompt(3, 12))
    request = driven.admit(prompt(1, 17))
    before = driven.picture()
    with pytest.raises(OutOfBlocks) as refusal:
        driven.ledger.allocate_nowait(request, num_tokens)
    assert refusal.value.retryable
    assert refusal.value.num_available == 3
    assert driven.picture() == before
    assert request.state is RequestState.PINNED


def test_what_can_never_fit_says_so() -> None:
    """A prompt larger than the pool is refused for good, at every call that asks for room."""
    driven = Driven(4)
    request = driven.admit(prompt(1, 17))
    for ask in (
        lambda: driven.ledger.allocate_nowait(request),
        lambda: driven.ledger.queue_allocation(request, None, lambda: None),
    ):
        with pytest.raises(OutOfBlocks, match="can never fit") as refusal:
            ask()
        assert not refusal.value.retryable
    driven.ledger.allocate_nowait(request, 16)
    with pytest.raises(OutOfBlocks, match="can never fit"):
        driven.ledger.extend_nowait(request, 17)


def test_a_live_request_id_is_taken() -> None:
    """A second live request of one name is refused; a name is free again once its request is over."""
    driven = Driven(8)
    first = driven.admit(A, request_id="r")
    with pytest.raises(DuplicateRequest, match="request_id"):
        driven.admit(A, request_id="r")
    driven.release(first)
    driven.admit(A, request_id="r")


def test_what_is_recomputed_is_private() -> None:
    """From `num_ready` on a request writes into blocks that nobody else can read: never into a cached one."""
    driven = Driven(8)
    tokens = prompt(1, 12)
    driven.serve(tokens)
    request = driven.running(tokens)
    assert request.num_computed_tokens == 8
    cached = {block for run in driven.ledger.cache.index.runs.values() for block in run.parts[Tier.DEVICE].blocks}
    assert not set(request.table[2:]) & cached
    assert set(request.table[:2]) <= cached


def test_a_duplicate_stays_private_until_it_closes() -> None:
    """Committing what somebody cached meanwhile keeps the own copy; the cached path is pinned for what hangs on it."""
    driven = Driven(12, num_host=0)
    first, second = driven.running(A), driven.running(A)
    driven.commit(first)
    own = list(second.table)
    driven.commit(second)
    assert list(second.table) == own
    driven.land(driven.release(first))
    assert driven.num_pinned()[0] == 5  # the cached path of two, its own copy of two, and its last block
    driven.release(second)
    assert driven.ledger.statistics().device.num_cached == 2


def test_one_copy_is_enough_of_what_nobody_uses() -> None:
    """What is computed again although it is cached takes the place of the older copy, and leaves the room to others."""
    driven = Driven(8, num_host=0)
    driven.serve(A)
    (before,) = driven.ledger.cache.index.runs.values()
    older = list(before.parts[Tier.DEVICE].blocks)
    second = driven.running(A, max_hit_tokens=0)
    driven.commit(second)
    assert driven.num_pinned()[0] == 3  # two published blocks of its own and its last one
    assert not set(second.table) & set(older)
    assert driven.hit([*A, 5]) == (8, 0)
    driven.ledger.check_integrity()
    driven.release(second)
    assert driven.ledger.statistics().device.num_cached == 2


def test_hit_caps_leave_a_request_the_whole_device() -> None:
    """What a request had to compute again keeps no second copy alive that its own growth would wait for."""
    driven = Driven(5, num_host=0)
    driven.serve(prompt(1, 16))
    again = driven.running(prompt(1, 16), max_hit_tokens=4)
    driven.commit(again)
    driven.ledger.extend_nowait(again, 20)
    driven.ledger.check_integrity()


def test_a_prefix_loses_its_tail_first() -> None:
    """Eviction shortens a prefix from its end, whatever was split and shared on the way."""
    driven = Driven(6, num_host=0)
    driven.serve(prompt(1, 17))
    driven.release(driven.admit(prompt(1, 9)))
    for room, hit in ((8, 16), (12, 12), (16, 8)):
        driven.release(driven.allocated(prompt(2, room)))
        assert driven.hit(prompt(1, 17)) == (hit, 0)


def test_a_touched_prefix_survives() -> None:
    """The least recently released prefix goes first."""
    driven = Driven(6, num_host=0)
    for name in (1, 2, 3):
        driven.serve(prompt(name, 8))
    driven.release(driven.admit([*prompt(1, 8), 5]))
    driven.release(driven.allocated(prompt(9, 8)))
    assert [driven.hit([*prompt(name, 8), 5])[0] for name in (1, 2, 3)] == [8, 0, 8]


def test_a_prompt_pins_no_more_than_it_uses() -> None:
    """What others publish after a hit is not pinned by it: nobody is short of free blocks because of their own pins."""
    driven = Driven(4, num_host=0)
    long = prompt(1, 17)
    driven.serve(prompt(1, 8))
    short = driven.admit(long)
    assert short.match.num_device_tokens == 8
    other = driven.running(prompt(1, 16))
    driven.commit(other)
    driven.release(other)
    assert driven.num_pinned()[0] == 2
    driven.ledger.allocate_nowait(short, 16)


def test_a_device_hit_pins_no_more_than_it_has() -> None:
    """The same where the hit goes on in host memory: what others bring after its device part is theirs to pin."""
    driven = Driven(10)
    long = prompt(1, 17)
    driven.serve(long)
    driven.release(driven.allocated(prompt(2, 32)), "filler")
    pinned = driven.admit(long)
    assert (pinned.match.num_device_tokens, pinned.match.num_host_tokens) == (8, 8)
    other = driven.running(long)
    assert other.num_computed_tokens == 16
    driven.release(other, "cancelled")
    assert driven.num_pinned()[0] == 2


def test_a_merge_changes_no_order() -> None:
    """Runs are joined only where they follow each other in the order of every tier: a head that was touched since
    outlives what came between it and its tail."""
    driven = Driven(16, num_host=6)
    tokens, between = prompt(1, 17), prompt(2, 9)
    driven.serve(tokens)
    driven.serve(between)
    driven.evict_device()
    driven.release(driven.admit(tokens[:9]))  # on the host, the head is now the newest and the tail the oldest
    again = driven.running(tokens, max_hit_tokens=0)
    assert driven.commit(again) == []
    driven.release(again)
    driven.serve(prompt(3, 17))  # needs four host blocks: the tail, then what came between
    driven.evict_device()
    assert driven.hit(tokens) == (0, 8)
    assert driven.hit(between) == (0, 0)


def test_integrity_names_what_is_broken() -> None:
    """`check_integrity` notices a block in two hands, a lost one and a reference too many, and says which."""
    driven = Driven(8)
    driven.serve(A)
    request = driven.admit(A)
    part = request.leases[Tier.DEVICE].run.parts[Tier.DEVICE]
    part.num_references += 1
    with pytest.raises(IntegrityError, match="references"):
        driven.ledger.check_integrity()
    part.num_references -= 1
    block = driven.ledger.cache.tiers[Tier.DEVICE].pool.take(1)
    with pytest.raises(IntegrityError, match="without an owner"):
        driven.ledger.check_integrity()
    driven.ledger.cache.give(Tier.DEVICE, block + block)
    with pytest.raises(IntegrityError, match="have two owners"):
        driven.ledger.check_integrity()


def test_no_plan_names_the_null_block() -> None:
    """Device block 0 is nobody's: no plan reads or writes it, and ids are distinct on each side."""
    driven = Driven(8, num_host=8)
    plans: list[TransferPlan] = []
    for name in (1, 2, 1, 3, 2, 1):
        request = driven.allocated(prompt(name, 13))
        loads = driven.ledger.plan_load(request)
        driven.land(loads)
        stores = [*driven.commit(request), *driven.release(request)]
        driven.land(stores)
        plans += [*loads, *stores]
    assert {plan.direction.value for plan in plans} == {"load", "store"}
    for plan in plans:
        ids = (plan.source_ids, plan.destination_ids)
        assert all(len(set(side)) == len(side) == plan.num_blocks for side in ids)
        assert 0 not in ids[plan.source is not Tier.DEVICE]


def test_what_follows_a_long_run_does_not_copy_it() -> None:
    """Decoding costs the same however long the prompt is: the tokens of a long run stay where they are while blocks are
    added after it, and are joined with those once nobody needs the border any more."""
    driven = Driven(2_000, 0)
    request = driven.running([token % 1000 for token in range(6_000)])
    driven.ledger.extend_nowait(request, 6_040)
    driven.commit(request)
    long = request.device_run
    assert long is not None
    before = long.tokens
    for _ in range(5):
        driven.commit(request, request.num_computed_tokens + 4, [7] * 4)
    assert long.tokens is before
    last = request.device_run
    assert last is not None and (last.before, last.start, last.stop) == (long, 1_500, 1_505)
    driven.release(request)
    assert [(run.start, run.stop) for run in driven.ledger.cache.index.runs.values()] == [(0, 1_505)]
