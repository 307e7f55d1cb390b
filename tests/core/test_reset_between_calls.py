"""Resets between any two calls of a request: no request begins to compute with KV from before a reset."""

from __future__ import annotations

import pytest
from driving import Driven, prompt
from engine_driving import EngineDriven

from aoffload import RequestState, Tier
from aoffload._config.groups import FullAttention, KVCacheGroup, SlidingWindow
from aoffload._kernel.records import LedgerRequest

A = prompt(1, 17)
S = RequestState
GROUPS = {
    "full": [KVCacheGroup("full", block_size=4)],
    "windows": [KVCacheGroup("full", FullAttention(), 4), KVCacheGroup("window", SlidingWindow(8), 4)],
}


@pytest.fixture(params=list(GROUPS))
def driven(request: pytest.FixtureRequest) -> Driven:
    return Driven(24, 24, groups=GROUPS[request.param])


def blocks_of(driven: Driven, record: LedgerRequest) -> set[int]:
    return {block_id for table in driven.ledger.block_ids(record) for block_id in table if block_id}


WITHOUT_A_LOAD = ["matched", "waiting", "granted", "allocated"]
CASES = [(when, where) for when in WITHOUT_A_LOAD for where in ("device", "host", "both")]
CASES += [(when, where) for when in ("loading", "launched") for where in ("host", "both")]


@pytest.mark.parametrize(("when", "where"), CASES)
def test_a_request_has_nothing_from_before_a_reset(driven: Driven, when: str, where: str) -> None:
    """Whatever call comes next, the request computes from its first token, into blocks that nobody else reads."""
    driven.serve(A)
    if where != "device":
        driven.evict_device()
    if where == "both":
        driven.serve(A[:9])
    reader = driven.running(A) if where == "device" else None  # keeps the old blocks
    record = driven.admit(A)
    assert record.match.num_tokens == 16
    if when == "waiting":
        crowd = driven.admit(prompt(2, 4))
        free = driven.ledger.statistics().device
        width = driven.ledger.layout.width
        driven.ledger.allocate_nowait(crowd, (free.num_free + free.num_cached) // width * 4)
        driven.ledger.queue_allocation(record)
        driven.ledger.reset()
        driven.release(crowd)
    elif when == "granted":
        driven.ledger.queue_allocation(record)
        assert record.waiter is not None and record.waiter.is_over
    elif when != "matched":
        driven.ledger.allocate_nowait(record)
    if when in ("loading", "launched"):
        plans = driven.ledger.plan_load(record)
        if when == "launched":
            driven.launch(plans)
    if when != "waiting":
        driven.ledger.reset()
    if when in ("matched", "granted"):
        assert record.match.num_tokens == 0, "a match that was dropped is no answer"
    driven.run_on(record)
    assert record.num_computed_tokens == 0
    assert reader is None or blocks_of(driven, reader).isdisjoint(blocks_of(driven, record))
    assert driven.commit(record) == [] and driven.hit(A) == (0, 0), "requests from before publish nothing"
    driven.release(record)
    if reader is not None:
        driven.release(reader)
    assert driven.num_pinned() == (0, 0)


def test_a_load_that_is_over_counts(driven: Driven) -> None:
    """A request that computes already goes on with what it has, a fork of it, too; after a preemption it begins at its
    first token."""
    driven.serve(A)
    record = driven.running(A)
    assert record.num_computed_tokens == 16
    before = driven.ledger.block_ids(record)
    driven.ledger.reset()
    assert driven.ledger.block_ids(record) == before
    driven.commit(record)
    child = driven.ledger.forks.fork(record, num_tokens=24).request
    assert child.num_computed_tokens == 17 and driven.hit(A) == (0, 0)
    driven.land(driven.ledger.preemption.preempt(record).plans)
    driven.ledger.preemption.resume(record)
    assert record.match.num_tokens == 0
    driven.run_on(record)
    assert record.num_computed_tokens == 0
    driven.release(record)
    driven.release(child)
    assert driven.num_pinned() == (0, 0)


def test_a_request_preempted_between_a_reset_and_its_load(driven: Driven) -> None:
    """Its device hit does not come back."""
    driven.serve(A)
    record = driven.allocated(A)
    driven.ledger.reset()
    driven.ledger.preemption.preempt(record)
    driven.ledger.preemption.resume(record)
    driven.run_on(record)
    assert record.num_computed_tokens == 0
    driven.release(record)
    assert driven.num_pinned() == (0, 0)


def test_a_reset_while_a_step_overlaps_the_load() -> None:
    """The device hit, the rest of which is in the host: the forward under way keeps its blocks until it ends, nothing
    of it can be committed, and the request begins again at its first token."""
    driven = Driven(24, 24)
    driven.on_host_only(A)
    driven.serve(A[:9])  # the device has two blocks, the host four
    record = driven.allocated(A)
    assert (record.match.num_device_tokens, record.match.num_host_tokens) == (8, 8)
    plans = driven.ledger.plan_load(record)
    driven.launch(plans)
    with driven.ledger.overlap.step([], [record]):
        read = driven.ledger.overlap.block_ids(record)[0]
        driven.ledger.reset()
        driven.end(plans[0])
        assert record.state is S.DRAINING
        assert not set(read[:2]) & set(driven.ledger.cache.tiers[Tier.DEVICE].pool.free_ids())
    driven.run_on(record)
    assert driven.ledger.overlap.begin_again(record) == 0 and record.num_computed_tokens == 0
    with driven.ledger.step([record]):
        pass
    driven.commit(record)
    driven.release(record)
    assert driven.num_pinned() == (0, 0)


def test_no_room_to_begin_again_makes_the_request_wait() -> None:
    """Blocks of the old hit stay with another request. A request that lost this hit in a reset waits in the line for
    blocks of its own, at its old place."""
    driven = Driven(9, 8)
    driven.serve(A)
    reader = driven.running(A)
    record = driven.allocated(A)
    driven.ledger.reset()
    woken: list[int] = []
    assert driven.ledger.plan_load(record, wake=lambda: woken.append(1)) == ()
    assert record.state is S.REQUEUED and not woken
    driven.release(reader)
    assert woken == [1]
    driven.run_on(record)
    assert record.num_computed_tokens == 0
    driven.release(record)


def test_an_orphan_of_the_device_loads_nothing_old() -> None:
    """The same for a reset of the device alone."""
    driven = Driven(24, 8)
    driven.serve(A)
    record = driven.allocated(A)
    driven.ledger.reset(Tier.DEVICE)
    driven.run_on(record)
    assert record.num_computed_tokens == 0
    driven.release(record)


def test_a_pinned_hit_behind_an_engines_own_is_dropped_at_once() -> None:
    """An engine that owns the device blocks finds nothing in the answer, and the host's blocks are free at once."""
    driven = EngineDriven()
    driven.serve(A)
    record = driven.admit(A, 4)
    assert record.match.num_host_tokens == 12
    driven.reset()
    assert (record.match.num_device_tokens, record.match.num_host_tokens, driven.num_pinned()) == (4, 0, 0)
    driven.release(record)
    driven.assert_at_rest()


def test_what_a_copy_brings_after_a_reset_does_not_count_for_an_engine() -> None:
    """A load into blocks of an engine ends where the engine's own hit ends."""
    driven = EngineDriven()
    driven.serve(A)
    record, tables = driven.admit(A, 4), driven.fresh(17)
    plans = driven.load(record, tables)
    driven.launch(plans)
    driven.reset()
    driven.land(plans)
    assert (record.state, record.num_computed_tokens, record.num_lost_tokens) == (S.RUNNING, 4, 12)
    driven.release(record)
    driven.assert_at_rest()


@pytest.mark.parametrize("tier", [None, Tier.DEVICE])
def test_a_load_that_is_over_and_of_which_nobody_was_told(driven: Driven, tier: Tier | None) -> None:
    """Asked to load again, the request gives its old KV up and begins at its first token, in blocks of its own; in a
    step, or with a commit after it, it keeps what it has."""
    driven.serve(A)
    record, reader = driven.running(A), driven.running(A)
    with driven.ledger.step([reader]):
        driven.ledger.reset(tier)
        assert driven.ledger.lost_to_reset(record) and not driven.ledger.lost_to_reset(reader)
        go_again = driven.ledger.plan_load(record)
        assert go_again == () and record.state is S.REQUEUED
        driven.run_on(record)
        assert record.num_computed_tokens == 0 and not driven.ledger.lost_to_reset(record)
        assert blocks_of(driven, reader).isdisjoint(blocks_of(driven, record))
    assert driven.ledger.plan_load(reader) == () and reader.num_computed_tokens == 16
    driven.commit(reader)
    assert driven.ledger.plan_load(reader) == () and reader.state is S.RUNNING
    driven.release(reader)
    driven.release(record)
    assert driven.num_pinned() == (0, 0)


def test_an_engines_load_that_is_over_and_of_which_nobody_was_told() -> None:
    """Asked again, it ends where the engine's own hit ends."""
    driven = EngineDriven()
    driven.serve(A)
    record = driven.admit(A, 4)
    driven.land(driven.load(record, driven.fresh(17)))
    assert record.num_computed_tokens == 16
    driven.reset()
    assert driven.ledger.lost_to_reset(record) and driven.ledger.plan_load(record) == ()
    assert (record.num_computed_tokens, record.num_lost_tokens, record.retry_max_hit_tokens) == (4, 12, 4)
    assert not driven.ledger.lost_to_reset(record)
    driven.release(record)
    driven.assert_at_rest()
