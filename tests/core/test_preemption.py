"""Preemption on the bare ledger: blocks go, progress stays, and comes back."""

from __future__ import annotations

import pytest
from driving import Driven, prompt

from aoffload._config.groups import FullAttention, KVCacheGroup, SlidingWindow
from aoffload._kernel.states import Outcome, RequestState
from aoffload.errors import WrongState

A = prompt(1, 17)
S = RequestState
GROUPS = {
    "full": [KVCacheGroup("full", block_size=4)],
    "windows": [KVCacheGroup("full", FullAttention(), 4), KVCacheGroup("window", SlidingWindow(8), 4)],
}


@pytest.fixture(params=list(GROUPS))
def driven(request: pytest.FixtureRequest) -> Driven:
    return Driven(24, 24, groups=GROUPS[request.param])


def test_progress_comes_back_from_the_host(driven: Driven) -> None:
    """What was computed before a preemption is loaded afterwards, answers included; the rest is computed again."""
    record = driven.running(A)
    driven.land(driven.commit(record, 17))
    driven.ledger.extend_nowait(record, 24)
    driven.land(driven.commit(record, 21, [1, 2, 3, 4]))
    found = driven.ledger.preemption.preempt(record)
    assert record.state is S.PREEMPTED and driven.ledger.block_ids(record) == [[] for _ in driven.ledger.layout.groups]
    driven.land(found.plans)
    driven.evict_device()
    driven.ledger.preemption.resume(record)
    assert record.state is S.PINNED and record.match.num_host_tokens == 20
    driven.ledger.allocate_nowait(record)
    driven.land(driven.ledger.plan_load(record))
    assert record.state is S.RUNNING and record.num_computed_tokens == 20
    driven.commit(record, 21)
    driven.release(record)
    assert driven.ledger.statistics().device.num_pinned == 0


def test_it_says_what_is_free_now_and_what_frees_the_rest(driven: Driven) -> None:
    """Blocks that a store still reads are pending, by its job; when that is over they can be had."""
    record = driven.running(A)
    plans = driven.ledger.commit(record, 17)
    driven.launch(plans)
    held = sum(block_id > 0 for table in driven.ledger.block_ids(record) for block_id in table)
    found = driven.ledger.preemption.preempt(record)
    assert found.num_freed + found.num_pending == held and found.num_pending > 0
    assert set(found.job_ids) >= {plan.job_id for plan in plans}
    for plan in plans:
        driven.end(plan)
    driven.land(found.plans)
    assert driven.ledger.statistics().device.num_pinned == 0


def test_progress_is_pinned_in_host_memory(driven: Driven) -> None:
    """Nobody's store evicts what a preempted request has to come back to; when it leaves, it is as evictable as any."""
    record = driven.running(A)
    driven.land(driven.ledger.commit(record, 17))
    driven.land(driven.ledger.preemption.preempt(record).plans)
    for name in range(20, 26):
        driven.on_host_only(prompt(name, 17))
    driven.ledger.preemption.resume(record)
    assert record.match.num_tokens == 16
    driven.release(record, "cancelled")
    assert driven.ledger.statistics().host.num_pinned == 0


def test_a_full_host_loses_progress_and_nothing_else(driven: Driven) -> None:
    """Without room in the host the request computes again what it had."""
    driven = Driven(24, 0, groups=list(driven.ledger.layout.groups))
    record = driven.running(A)
    driven.commit(record, 17)
    assert driven.ledger.preemption.preempt(record).plans == ()
    driven.evict_device()
    driven.ledger.preemption.resume(record)
    assert record.match.num_tokens == 0
    driven.ledger.allocate_nowait(record)
    assert driven.ledger.plan_load(record) == () and record.num_computed_tokens == 0
    driven.commit(record, 17)


def test_a_request_that_loads_is_preempted_at_once(driven: Driven) -> None:
    """Its queued copies are discarded, its launched ones land without it, and what they bring is cached."""
    driven.on_host_only(A)
    record = driven.admit(A)
    driven.ledger.allocate_nowait(record)
    plans = driven.launch(driven.ledger.plan_load(record))
    driven.ledger.preemption.preempt(record)
    assert record.state is S.PREEMPTED and record.load is None
    for plan in plans:
        driven.end(plan, Outcome.LANDED)
    driven.ledger.preemption.resume(record)
    assert record.match.num_tokens == 16


def test_whoever_waits_for_room_gets_it(driven: Driven) -> None:
    """Preemption serves the line."""
    record = driven.running(A)
    driven.land(driven.commit(record, 17))
    waiting = driven.admit(prompt(3, 16))
    num_available, layout = driven.ledger.admission.num_available, driven.ledger.layout
    driven.running(prompt(4, num_available // layout.width * layout.unit_tokens))
    waiter = driven.ledger.queue_allocation(waiting)
    assert not waiter.is_over
    driven.land(driven.ledger.preemption.preempt(record).plans)
    assert waiter.granted is not None


@pytest.mark.parametrize("what", ["step", "release", "preempt", "extend"])
def test_a_wake_finds_the_preemption_done(driven: Driven, what: str) -> None:
    """A preemption that ends a load wakes when all is decided: what the wake calls is refused, or served like any later
    call. It ran in the middle of the call before, and a step that it began lost its blocks."""
    driven.on_host_only(A)
    record, ledger, seen = driven.allocated(A), driven.ledger, list[RequestState]()
    calls = {
        "step": lambda: ledger.step([record]).__enter__(),
        "release": lambda: ledger.release(record),
        "preempt": lambda: ledger.preemption.preempt(record),
        "extend": lambda: ledger.queue_extension(record, 20),
    }

    def wake() -> None:
        seen.append(record.state)
        if what == "release":
            calls[what]()
            return
        with pytest.raises(WrongState, match="PREEMPTED"):
            calls[what]()

    assert ledger.plan_load(record, wake=wake)
    ledger.preemption.preempt(record)
    assert seen == [S.PREEMPTED] and not record.num_steps
    ledger.check_integrity()
