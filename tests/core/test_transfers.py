"""Loads and stores from the plan to the settlement: shared, late, twice, out of order, failed, corrupt, in doubt."""

from __future__ import annotations

from typing import Any

import pytest
from driving import BLOCK, Direction, Driven, Tier, prompt

from aoffload import Ledger, OffloadConfig
from aoffload._config.groups import KVCacheGroup
from aoffload._extensions.store_policies import EagerStore, NoStore
from aoffload._kernel.events import Event, StoreSkipped
from aoffload._kernel.layout import Layout
from aoffload._kernel.plans import Completion, TransferPlan
from aoffload._kernel.records import Job, LedgerRequest
from aoffload._kernel.states import JobState, Outcome, RequestState
from aoffload.errors import IllegalTransition, OutOfBlocks, WrongState
from aoffload.ledger import Prefix, Root

A = prompt(1, 17)
"""Four full blocks and a token to compute."""
ONE = [KVCacheGroup("full", block_size=BLOCK)]
TWO = [KVCacheGroup("a", block_size=4), KVCacheGroup("b", block_size=8)]


def on_host(num_device: int = 16, num_host: int = 16, **config: object) -> Driven:
    driven = Driven(num_device, num_host, **config)
    driven.on_host_only(A)
    assert driven.hit(A) == (0, 16)
    return driven


def start_load(driven: Driven, tokens: list[int] = A) -> tuple[LedgerRequest, list[TransferPlan]]:
    request = driven.allocated(tokens)
    plans = list(driven.ledger.plan_load(request))
    driven.ledger.check_integrity()
    return request, plans


def job(driven: Driven, plan: TransferPlan) -> Job:
    return driven.ledger.jobs.unsettled[plan.job_id]


# -- a whole trip -------------------------------------------------------------------------------------------------


def test_a_round_trip_brings_every_count_back() -> None:
    """Store, evict, hit, load, leave: references and counts end where they were."""
    driven = on_host()
    before = driven.ledger.statistics()
    request, (plan,) = start_load(driven)
    assert plan.direction is Direction.LOAD and plan.num_blocks == 4
    assert driven.num_pinned() == (5, 4)
    assert list(request.table[:4]) == [0, 0, 0, 0], "the ids of an unfinished load are the job's"
    driven.land([plan])
    assert request.num_computed_tokens == 16
    assert list(request.table[:4]) == list(plan.destination_ids)
    assert driven.num_pinned() == (5, 0), "host pins end when the load settles"
    driven.release(request)
    driven.evict_device()
    assert driven.ledger.statistics() == before


def test_a_device_prefix_goes_on_in_host_memory() -> None:
    """What the device still has is used, and only the rest is loaded, chosen by position."""
    driven = Driven(8)
    driven.serve(A)
    driven.release(driven.allocated(prompt(9, 24)), "filler")
    request = driven.admit(A)
    assert (request.match.num_device_tokens, request.match.num_host_tokens) == (8, 8)
    driven.ledger.allocate_nowait(request)
    (plan,) = driven.ledger.plan_load(request)
    assert plan.num_blocks == 2
    driven.land([plan])
    assert request.num_computed_tokens == 16
    driven.release(request)
    assert driven.hit(A) == (16, 0)


@pytest.mark.parametrize(("max_tokens", "ready"), [(0, 0), (3, 0), (4, 4), (11, 8), (16, 16), (999, 16)])
def test_an_engine_may_take_fewer_tokens(max_tokens: int, ready: int) -> None:
    """`max_tokens` rounds down to a block; the rest is computed into blocks of its own."""
    driven = on_host()
    request = driven.allocated(A)
    driven.land(driven.ledger.plan_load(request, max_tokens))
    assert request.state is RequestState.RUNNING
    assert request.num_computed_tokens == ready
    assert 0 not in request.table
    driven.commit(request)
    driven.release(request)
    assert driven.num_pinned() == (0, 0)


def test_never_below_the_device_hit() -> None:
    """What is on the device already counts, however few tokens the engine wants loaded."""
    driven = Driven(8)
    driven.serve(A)
    driven.release(driven.allocated(prompt(9, 24)), "filler")
    request = driven.allocated(A)
    assert driven.ledger.plan_load(request, 4) == ()
    assert request.num_computed_tokens == 8


@pytest.mark.parametrize(("limit", "alignment", "expected"), [(9, 1, 8), (None, 12, 12), (15, 8, 8), (0, 1, 0)])
def test_limits_narrow_the_match(limit: int | None, alignment: int, expected: int) -> None:
    """`max_hit_tokens` and `hit_alignment` narrow what is matched, and so what is pinned."""
    driven = on_host()
    request = driven.admit(A, max_hit_tokens=limit, hit_alignment=alignment)
    assert request.match.num_tokens == expected
    assert driven.num_pinned()[1] == expected // BLOCK


@pytest.mark.parametrize("block_size", [1, 3, 4, 5])
def test_without_limits_every_whole_block_is_hit(block_size: int) -> None:
    """Whatever the block size, a request without alignment gets every block that is cached."""
    driven = Driven(16, groups=[KVCacheGroup("full", block_size=block_size)])
    tokens = prompt(1, 3 * block_size + 1)
    driven.serve(tokens)
    assert driven.admit(tokens).match.num_tokens == 3 * block_size


# -- splitting ----------------------------------------------------------------------------------------------------


def test_a_large_transfer_is_split() -> None:
    """No job moves more than `max_job_bytes`; a load is over when all of its jobs are."""
    driven = on_host(max_job_bytes=2)
    request, plans = start_load(driven)
    assert [plan.num_blocks for plan in plans] == [2, 2]
    driven.land(plans[:1])
    assert request.state is RequestState.LOADING
    driven.land(plans[1:])
    assert request.num_computed_tokens == 16
    stores = driven.commit(driven.running(prompt(2, 21)))
    assert [plan.num_blocks for plan in stores] == [2, 2, 1]


def test_completions_out_of_order_wait_for_what_comes_before() -> None:
    """A successor is parked until its predecessor has ended: a prefix is published from its front."""
    driven = on_host(max_job_bytes=1)
    request, plans = start_load(driven)
    jobs = [job(driven, plan) for plan in plans]
    driven.launch(plans)
    for plan in reversed(plans[1:]):
        driven.end(plan)
        assert driven.hit(A) == (0, 16)
        assert request.state is RequestState.LOADING
    assert [job.state for job in jobs[1:]] == [JobState.LAUNCHED] * 3
    driven.end(plans[0])
    assert {job.state for job in jobs} == {JobState.COMPLETED}
    assert driven.hit(A) == (16, 0)
    assert request.num_computed_tokens == 16


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.UNPROVEN])
def test_what_lands_behind_a_failure_is_not_published(outcome: Outcome) -> None:
    """A later job whose predecessor failed frees its destinations; the request computes from the gap on."""
    driven = on_host(max_job_bytes=1)
    request, plans = start_load(driven)
    driven.launch(plans)
    driven.end(plans[0])
    driven.end(plans[3])
    driven.end(plans[1], outcome)
    driven.end(plans[2])
    assert request.state is RequestState.RUNNING
    assert request.num_computed_tokens == 4
    assert driven.hit(A) == (4, 12)
    assert 0 not in request.table
    if outcome is Outcome.UNPROVEN:
        assert not set(request.table) & set(plans[1].destination_ids)
    driven.commit(request)
    driven.release(request)


def test_no_island_is_published_behind_a_failure_in_the_run_before() -> None:
    """The same across a border between runs: the successor's blocks are free, not cached where nobody finds them."""
    driven = on_host(max_job_bytes=2)
    driven.serve([*A[:8], *prompt(2, 5)])  # cuts the run where the first job will end
    driven.evict_device()
    _, plans = start_load(driven)
    driven.launch(plans)
    driven.end(plans[0], Outcome.FAILED)
    driven.end(plans[1])
    assert driven.ledger.statistics().device.num_cached == 0


def test_a_load_in_flight_is_shared_though_one_behind_it_is_in_doubt() -> None:
    """Three copies in a row, the middle one given up: what the first still brings is not copied a second time."""
    driven = on_host(max_job_bytes=1)
    _, plans = start_load(driven)
    driven.launch(plans)
    driven.end(plans[1], Outcome.UNPROVEN)
    second, more = start_load(driven)
    assert plans[0].source_ids[0] not in [block_id for plan in more for block_id in plan.source_ids]
    for plan in (plans[0], plans[2], plans[3]):
        driven.end(plan)
    driven.land(more)
    assert second.state is RequestState.RUNNING and second.num_computed_tokens >= 4


def test_nobody_waits_for_copies_of_what_is_there() -> None:
    """Blocks computed meanwhile need no copy: a request that shares the rest goes on when the rest has ended."""
    driven = on_host(max_job_bytes=1)
    _, plans = start_load(driven)
    driven.launch(plans)
    driven.end(plans[1], Outcome.UNPROVEN)
    driven.commit(driven.running(A, max_hit_tokens=0), 8)
    sharer, more = start_load(driven)
    assert more == [] and sharer.state is RequestState.LOADING
    for plan in plans[2:]:
        driven.end(plan, Outcome.UNPROVEN)
    assert sharer.state is RequestState.RUNNING and sharer.num_computed_tokens == 8
    assert plans[0].job_id in driven.ledger.jobs.unsettled


@pytest.mark.parametrize("groups", [ONE, TWO], ids=["one group", "two groups"])
def test_a_copy_that_was_partly_overtaken_brings_the_rest(groups: list[KVCacheGroup]) -> None:
    """Of a late copy, what nobody else has brought meanwhile is a hit as soon as it lands; the rest is free again."""
    width = Layout.of(groups).width
    tokens = prompt(1, 4 * Layout.of(groups).unit_tokens + 1)
    driven = Driven(16 * width, 16 * width, groups=groups, max_job_bytes=2 * width)
    driven.on_host_only(tokens)
    first, (front, back) = start_load(driven, tokens)
    driven.launch([front, back])
    driven.end(front, Outcome.FAILED, num_landed=width)
    second, (middle, end) = start_load(driven, tokens)
    driven.launch([middle, end])
    driven.end(middle)
    driven.end(back)
    assert first.num_computed_tokens == len(tokens) - 1
    assert driven.hit(tokens) == (len(tokens) - 1, 0)
    assert list(first.table[2 * width : 3 * width]) == list(middle.destination_ids[width:])
    assert list(first.table[3 * width : 4 * width]) == list(back.destination_ids[width:])
    driven.end(end, Outcome.FAILED)
    assert second.num_computed_tokens == len(tokens) - 1


# -- late, twice, never -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "num_landed", "corrupt", "brought"),
    [
        (Outcome.LANDED, 0, (), 4),
        (Outcome.LANDED, 3, (), 3),
        (Outcome.LANDED, 4, (), 4),
        (Outcome.LANDED, 5, (), 0),
        (Outcome.LANDED, 4, (2,), 2),
        (Outcome.LANDED, 0, (2,), 0),
        (Outcome.FAILED, 2, (), 2),
        (Outcome.FAILED, 5, (), 0),
        (Outcome.FAILED, 3, (1,), 1),
        (Outcome.CORRUPT, 2, (2,), 2),
        (Outcome.CORRUPT, 3, (3, 1), 1),
        (Outcome.CORRUPT, 9, (3,), 0),
    ],
)
def test_a_transport_that_contradicts_itself_brings_what_it_names(
    outcome: Outcome, num_landed: int, corrupt: tuple[int, ...], brought: int
) -> None:
    """Only blocks that no field of a completion speaks against are published; a count that cannot be right proves
    none."""
    driven = Driven(8, 8)
    request = driven.running(prompt(1, 17))
    (store,) = driven.launch(driven.commit(request))
    driven.end(store, outcome, num_landed, corrupt)
    driven.release(request, "aborted")
    driven.evict_device()
    assert driven.hit(prompt(1, 17)) == (0, brought * BLOCK)


@pytest.mark.parametrize("outcome", [Outcome.LANDED, Outcome.FAILED, Outcome.CORRUPT])
def test_a_corrupt_block_of_the_host_is_forgotten_whatever_the_outcome_says(outcome: Outcome) -> None:
    """A completion of a load that names a corrupt block makes that block a miss."""
    driven = on_host()
    request, plans = start_load(driven)
    driven.launch(plans)
    driven.end(plans[0], outcome, 2, (1,))
    driven.release(request, "aborted")
    driven.evict_device()
    assert driven.hit(A) == (0, BLOCK)


def test_second_and_unknown_completions_are_counted_and_ignored() -> None:
    """A completion that comes twice, or for a job nobody knows, changes nothing but a number."""
    driven = on_host(max_job_bytes=1)
    request, plans = start_load(driven)
    driven.launch(plans)
    driven.end(plans[1])
    driven.end(plans[1], Outcome.FAILED)  # parked: the first one counts
    driven.end(plans[0])
    before = driven.picture()
    for outcome in Outcome:
        driven.end(plans[0], outcome)
    driven.ledger.settle(Completion(12345, Outcome.LANDED))
    assert driven.picture() == before
    assert driven.ledger.statistics().num_late_completions == 2 + len(Outcome)
    driven.release(request)


def test_a_completion_for_a_job_that_was_never_launched_changes_nothing() -> None:
    """Nobody can have copied it: the call is refused by name and nothing is published."""
    driven = on_host()
    _, (plan,) = start_load(driven)
    before = driven.picture()
    with pytest.raises(WrongState, match="QUEUED"):
        driven.ledger.settle(Completion(plan.job_id, Outcome.LANDED))
    assert driven.picture() == before
    driven.land([plan])


def test_a_launched_job_cannot_be_discarded() -> None:
    """A launched copy can't be recalled: the attempt raises and changes nothing."""
    driven = on_host()
    _, (plan,) = start_load(driven)
    driven.launch([plan])
    before = driven.picture()
    with pytest.raises(IllegalTransition, match="LAUNCHED to DISCARDED"):
        driven.ledger.discard(plan.job_id)
    assert driven.picture() == before
    assert not driven.ledger.launch(plan.job_id)


def test_unproven_destinations_are_never_reused_until_proven() -> None:
    """Quarantine: not free, not cached, not granted to anybody; late proof ends it, whatever it says; sources go."""
    driven = on_host(num_device=8)
    request, (plan,) = start_load(driven)
    driven.launch([plan])
    driven.end(plan, Outcome.UNPROVEN)
    statistics = driven.ledger.statistics()
    assert (statistics.device.num_quarantined, statistics.host.num_pinned) == (4, 0)
    driven.release(request, "cancelled")
    other = driven.allocated(prompt(2, 16))
    assert not set(other.table) & set(plan.destination_ids)
    driven.end(plan, Outcome.UNPROVEN)  # still nobody knows
    assert driven.ledger.statistics().device.num_quarantined == 4
    driven.end(plan, Outcome.FAILED)
    assert driven.ledger.statistics().device.num_quarantined == 0
    assert driven.ledger.statistics().device.num_free == 4
    assert driven.hit(A) == (0, 16)


def test_a_store_in_doubt_quarantines_host_blocks() -> None:
    """The same on the way out: the host destination waits for proof, the device source does not."""
    driven = Driven(8, 8)
    request = driven.running(A)
    (store,) = driven.launch(driven.commit(request))
    driven.release(request, "cancelled")
    driven.end(store, Outcome.UNPROVEN)
    statistics = driven.ledger.statistics()
    assert (statistics.host.num_quarantined, statistics.device.num_pinned) == (4, 0)
    driven.end(store)
    assert driven.hit(A) == (16, 0)
    assert driven.ledger.statistics().host.num_free == 8


# -- two requests, one load ---------------------------------------------------------------------------------------


def test_two_requests_share_a_load() -> None:
    """The second needs no job and no blocks for what the first brings, and both go on when it has landed."""
    driven = on_host()
    first, plans = start_load(driven)
    second, more = start_load(driven)
    assert more == []
    assert driven.num_pinned()[0] == 4 + 1 + 1
    driven.land(plans)
    for request in (first, second):
        assert request.state is RequestState.RUNNING and request.num_computed_tokens == 16
    assert list(first.table[:4]) == list(second.table[:4])


def test_the_second_launches_only_the_rest() -> None:
    """A longer prompt waits for what is on its way and brings the part after it."""
    driven = Driven(24)
    long = prompt(1, 25)
    driven.on_host_only(long)
    first, plans = start_load(driven, A)
    second, more = start_load(driven, long)
    assert [plan.num_blocks for plan in (*plans, *more)] == [4, 2]
    assert job(driven, more[0]).predecessor is job(driven, plans[0])
    driven.land([*more, *plans])
    assert (first.num_computed_tokens, second.num_computed_tokens) == (16, 24)


def test_a_load_on_another_branch_brings_only_what_is_common() -> None:
    """A prompt that diverges waits for the common part and launches its own branch, wherever the other load ends."""
    driven = Driven(24)
    other = [*A[:8], *prompt(2, 9)]
    driven.on_host_only(A)
    driven.on_host_only(other)
    first, plans = start_load(driven, A)
    second, more = start_load(driven, other)
    assert [plan.num_blocks for plan in more] == [2]
    driven.land([*plans, *more])
    assert (first.num_computed_tokens, second.num_computed_tokens) == (16, 16)


@pytest.mark.parametrize("launched", [False, True])
def test_the_leader_of_a_shared_load_may_leave(launched: bool) -> None:
    """A load lives as long as one waiter does, whoever started it."""
    driven = on_host()
    leader, plans = start_load(driven)
    follower, _ = start_load(driven)
    if launched:
        driven.launch(plans)
    driven.release(leader, "cancelled")
    assert follower.state is RequestState.LOADING
    if not launched:
        driven.launch(plans)
    driven.end(plans[0])
    assert follower.num_computed_tokens == 16


def test_a_queued_load_without_waiters_is_discarded() -> None:
    """Nobody wants it and nothing has started: its blocks are free at once, and it can't be launched any more."""
    driven = on_host()
    leader, plans = start_load(driven)
    follower, _ = start_load(driven)
    the_job = job(driven, plans[0])
    driven.release(leader, "cancelled")
    assert the_job.state is JobState.QUEUED
    driven.release(follower, "cancelled")
    assert the_job.state is JobState.DISCARDED
    assert driven.num_pinned() == (0, 0)
    assert not driven.ledger.launch(plans[0].job_id)


def test_a_launched_load_without_waiters_goes_on_and_may_publish() -> None:
    """It can't be recalled; what it brought is there for the next one."""
    driven = on_host()
    request, plans = start_load(driven)
    driven.launch(plans)
    driven.release(request, "cancelled")
    assert driven.num_pinned() == (4, 4)
    driven.end(plans[0])
    assert driven.num_pinned() == (0, 0)
    assert driven.hit(A) == (16, 0)


def test_when_a_shared_load_fails_each_takes_blocks_of_its_own() -> None:
    """A failed copy is a miss for everybody who waited for it, and an entry that stays good for the next try."""
    driven = on_host()
    first, plans = start_load(driven)
    second, _ = start_load(driven)
    driven.launch(plans)
    driven.end(plans[0], Outcome.FAILED, num_landed=1)
    for request in (first, second):
        assert request.state is RequestState.RUNNING and request.num_computed_tokens == 4
        assert 0 not in request.table and len(request.table) == 5
    assert not set(first.table[1:]) & set(second.table[1:])
    assert driven.hit(A) == (4, 12)


def test_room_lost_under_a_load_fails_its_request() -> None:
    """A request that can't have its own blocks releases everything; if it can never fit again, all it can do is
    leave."""
    driven = on_host(num_device=6)
    first, plans = start_load(driven)
    woken: list[str] = []
    driven.ledger.plan_load(first, wake=lambda: woken.append("first"))
    (load,) = driven.launch(plans)
    driven.end(load, Outcome.UNPROVEN)  # four of six blocks are gone: what is left is too little, for good
    assert woken == ["first"]
    assert first.state is RequestState.REQUEUED and first.waiter is not None
    with pytest.raises(OutOfBlocks, match="can never fit"):
        driven.ledger.accept(first.waiter)
    assert first.state is RequestState.STRANDED
    with pytest.raises(WrongState, match="STRANDED"):
        driven.ledger.plan_load(first)
    driven.release(first, "cancelled")
    assert driven.num_pinned() == (0, 0)


def test_no_room_after_a_failed_load_means_queueing_at_the_old_place() -> None:
    """A request that can't have its own blocks releases everything and stands before all that came later. Once granted
    it computes: two whose loads fail at once would give each other room for the next try for ever."""
    driven = on_host(num_device=8)
    first, plans = start_load(driven)  # holds 5 of 8: 4 of them its job's
    sharer = driven.admit(A)
    driven.ledger.allocate_nowait(sharer, 12)
    assert driven.ledger.plan_load(sharer) == ()  # gives its three blocks back and waits for the job
    filler = driven.allocated(prompt(9, 12))
    later = driven.admit(prompt(8, 16))
    next_waiter = driven.ledger.queue_allocation(later, None, lambda: None)
    (load,) = driven.launch(plans)
    driven.end(load, Outcome.FAILED)
    assert first.state is RequestState.RUNNING, "the older one takes the blocks that the job has freed"
    assert sharer.state is RequestState.REQUEUED and sharer.waiter is not None
    assert driven.ledger.admission.queue.allocating == [sharer.waiter, next_waiter]
    assert not next_waiter.is_over
    driven.release(filler, "done")
    assert sharer.waiter.granted is not None
    driven.ledger.accept(sharer.waiter)
    assert sharer.state is RequestState.ALLOCATED and sharer.num_lost_tokens == 12


def test_a_grant_after_a_failed_load_is_for_what_is_still_found() -> None:
    """The device is reset before it is accepted: its request gets blocks for all of its tokens, and reads none of what
    the load had brought."""
    driven = on_host(num_device=8)
    first, plans = start_load(driven)
    sharer = driven.admit(A)
    driven.ledger.allocate_nowait(sharer, 12)
    assert driven.ledger.plan_load(sharer) == ()
    filler = driven.allocated(prompt(9, 12))
    driven.end(driven.launch(plans)[0], Outcome.FAILED, num_landed=1)
    waiter = sharer.waiter
    assert sharer.state is RequestState.REQUEUED and waiter is not None
    driven.release(filler, "done")
    assert waiter.granted is not None and (sharer.published, len(waiter.granted)) == (1, 2)
    driven.ledger.reset(Tier.DEVICE)
    assert waiter.granted is not None and (sharer.published, len(waiter.granted)) == (0, 3)
    driven.ledger.accept(waiter)
    driven.ledger.check_integrity()
    assert sharer.num_computed_tokens == 0 and not set(sharer.table) & set(first.table)
    assert driven.ledger.plan_load(sharer) == ()
    assert sharer.state is RequestState.RUNNING and sharer.num_computed_tokens == 0
    assert Tier.HOST not in sharer.leases


def test_whoever_asks_last_is_woken() -> None:
    """A wait for free blocks that was cancelled and begun again, after a failed load, wakes the new one and only
    that."""
    driven = on_host(num_device=9)
    request, plans = start_load(driven)
    filler = driven.allocated(prompt(9, 16))
    driven.launch(plans)
    woken: list[str] = []
    driven.ledger.plan_load(request, None, lambda: woken.append("first"))
    driven.end(plans[0], Outcome.UNPROVEN)
    waiter = request.waiter
    assert waiter is not None and not woken
    assert driven.ledger.plan_load(request, None, lambda: woken.append("second")) == ()
    driven.release(filler)
    assert waiter.granted is not None and woken == ["second"]


def test_an_abandoned_load_is_waited_for_no_longer() -> None:
    """Past its deadline a request computes instead; what has landed counts, what was launched goes on."""
    driven = on_host(max_job_bytes=2)
    request, plans = start_load(driven)
    launched = driven.launch(plans[:1])
    driven.ledger.abandon_load(request)
    assert request.state is RequestState.RUNNING and request.num_computed_tokens == 0
    assert not driven.ledger.launch(plans[1].job_id), "a queued job that nobody waits for is discarded"
    driven.end(launched[0])
    assert driven.hit(A) == (8, 8)
    driven.commit(request)
    driven.release(request)


def test_what_landed_meanwhile_is_adopted() -> None:
    """Between match and load somebody else brought the blocks: no second copy, no second set of blocks."""
    driven = on_host()
    late = driven.allocated(A)
    other = driven.running(A)
    assert driven.ledger.plan_load(late) == ()
    assert late.state is RequestState.RUNNING and late.num_computed_tokens == 16
    assert list(late.table[:4]) == list(other.table[:4])
    assert driven.num_pinned()[0] == 4 + 1 + 1


def on_host_in_runs() -> tuple[Driven, list[int]]:
    """Six blocks on the host, in three runs of two: other prompts hang on the borders."""
    driven, long = Driven(32, 32), prompt(1, 25)
    driven.on_host_only(long)
    for at in (8, 16):
        driven.on_host_only([*long[:at], *prompt(at, 5)])
    assert driven.hit(long) == (0, 24)
    return driven, long


def test_what_is_on_its_way_is_shared_behind_what_came_meanwhile() -> None:
    """Some runs were brought since the match, another is on its way: no copy is made a second time."""
    driven, long = on_host_in_runs()
    late = driven.allocated(long)
    driven.running(long[:17])
    _, (rest,) = start_load(driven, long)
    assert rest.num_blocks == 2
    assert driven.ledger.plan_load(late) == ()
    driven.land([rest])
    assert late.num_computed_tokens == 24


def test_what_an_orphaned_load_has_brought_counts() -> None:
    """Its request has left and it failed on the way: who loads the rest has both in its table, each in its place."""
    driven = on_host()
    late = driven.allocated(A)
    leader, (plan,) = start_load(driven)
    driven.launch([plan])
    driven.release(leader, "cancelled")
    driven.end(plan, Outcome.FAILED, num_landed=2)
    (rest,) = driven.ledger.plan_load(late)
    assert list(rest.source_ids) == list(plan.source_ids[2:])
    driven.land([rest])
    assert late.num_computed_tokens == 16
    assert list(late.table[:4]) == [*plan.destination_ids[:2], *rest.destination_ids]


# -- corrupt ------------------------------------------------------------------------------------------------------


def test_one_corrupt_block_in_the_middle() -> None:
    """What is before it counts, the rest is recomputed, the bad entry is forgotten, and nothing else is; once the gap
    is stored again, the blocks after it are good again."""
    driven = on_host()
    request, (plan,) = start_load(driven)
    driven.launch([plan])
    driven.end(plan, Outcome.CORRUPT, num_landed=1, corrupt=[1])
    assert request.num_computed_tokens == 4
    assert driven.hit(A) == (4, 0)
    assert driven.ledger.statistics().host.num_cached == 3, "one before the gap, two behind it"
    (store,) = driven.commit(request)
    assert store.num_blocks == 1, "only the gap is stored again"
    driven.land([store])
    driven.release(request)
    driven.evict_device()
    assert driven.hit(A) == (0, 16)
    again, plans = start_load(driven)
    driven.land(plans)
    assert again.num_computed_tokens == 16


@pytest.mark.parametrize("groups", [ONE, TWO], ids=["one group", "two groups"])
@pytest.mark.parametrize("bad", range(4))
def test_a_corrupt_block_beside_a_border(bad: int, groups: list[KVCacheGroup]) -> None:
    """Wherever the bad block lies in the runs of a load, and in whichever group: exactly its unit is a miss."""
    layout = Layout.of(groups)
    unit, width = layout.unit_tokens, layout.width
    tokens = prompt(1, 4 * unit + 1)
    driven = Driven(16 * width, 16 * width, groups=groups)
    driven.on_host_only(tokens)
    driven.on_host_only([*tokens[: 2 * unit], *prompt(2, unit + 1)])  # cuts the run in the middle
    request, (plan,) = start_load(driven, tokens)
    driven.launch([plan])
    driven.end(plan, Outcome.CORRUPT, num_landed=bad * width, corrupt=[bad * width])
    assert request.num_computed_tokens == bad * unit
    (store,) = driven.commit(request)
    assert store.num_blocks == width, "only the gap is stored again"
    driven.land([store])
    driven.release(request)
    driven.evict_device()
    again, (load,) = start_load(driven, tokens)
    assert list(load.source_ids) == [
        *plan.source_ids[: bad * width], *store.destination_ids, *plan.source_ids[(bad + 1) * width :]
    ]  # fmt: skip
    driven.land([load])
    assert again.num_computed_tokens == 4 * unit


def test_a_hit_that_was_repaired_in_its_place_is_whole() -> None:
    """Another load found a block corrupt and its request computed it again: who had matched it gets all of it."""
    driven = Driven(16)
    driven.on_host_only(A[:9])
    late = driven.allocated(A[:9])
    first, (plan,) = start_load(driven, A[:9])
    driven.launch([plan])
    driven.end(plan, Outcome.CORRUPT, num_landed=0, corrupt=[1])
    driven.commit(first)
    assert driven.ledger.plan_load(late) == ()
    assert late.num_computed_tokens == 8


def test_a_hit_that_rots_while_it_is_pinned_becomes_shorter() -> None:
    """Another load found a block corrupt that this request has matched: it loads what is still there, in its place."""
    driven = on_host()
    late = driven.allocated(A)
    first, (plan,) = start_load(driven)
    driven.launch([plan])
    driven.end(plan, Outcome.CORRUPT, num_landed=0, corrupt=[2])
    assert first.num_computed_tokens == 0
    (rest,) = driven.ledger.plan_load(late)
    assert list(rest.source_ids) == list(plan.source_ids[:2])
    driven.land([rest])
    assert late.num_computed_tokens == 8 and 0 not in late.table
    driven.release(late)


def test_a_hit_that_rotted_away_is_a_miss() -> None:
    """Nothing of it is left: the request goes on at once and computes."""
    driven = on_host()
    late = driven.allocated(A)
    _, (plan,) = start_load(driven)
    driven.launch([plan])
    driven.end(plan, Outcome.CORRUPT, num_landed=0, corrupt=[0])
    assert driven.ledger.plan_load(late) == ()
    assert late.state is RequestState.RUNNING and late.num_computed_tokens == 0


def test_a_block_still_being_read_is_not_handed_out_when_forgotten() -> None:
    """Somebody else copies from the bad block right now: it is unfindable at once and free only after that."""
    driven = on_host(num_host=4)
    _, (plan,) = start_load(driven)
    driven.launch([plan])
    reader = driven.admit(A)
    driven.end(plan, Outcome.CORRUPT, num_landed=0, corrupt=[3])
    assert driven.ledger.statistics().host.num_free == 0
    driven.release(reader, "cancelled")
    assert driven.ledger.statistics().host.num_free == 1


def test_a_block_that_rots_twice_under_one_reader() -> None:
    """It was stored again and rotted again: neither copy is handed out before the reader of both is gone."""
    driven = on_host(num_host=5)
    reader = driven.admit(A)
    for _ in range(2):
        request, (plan,) = start_load(driven)
        driven.launch([plan])
        driven.end(plan, Outcome.CORRUPT, num_landed=3, corrupt=[3])
        driven.land([*driven.commit(request), *driven.release(request)])
        driven.evict_device()
    host = driven.ledger.statistics().host
    assert (host.num_free, host.num_pinned) == (0, 5)
    driven.release(reader, "cancelled")
    host = driven.ledger.statistics().host
    assert (host.num_free, host.num_cached) == (2, 3)


def test_two_gaps_are_stored_as_two() -> None:
    """What lies between two bad blocks is on the host still, and is not stored again (I3)."""
    driven = on_host()
    request, (plan,) = start_load(driven)
    driven.launch([plan])
    driven.end(plan, Outcome.CORRUPT, num_landed=1, corrupt=[1, 3])
    stores = driven.commit(request)
    assert [list(store.source_ids) for store in stores] == [[request.table[1]], [request.table[3]]]
    driven.land(stores)
    driven.release(request)
    driven.evict_device()
    assert driven.hit(A) == (0, 16)


def test_whoever_matched_a_rotten_block_may_leave() -> None:
    """The hit of a request ends with a block that has rotted since: leaving, it takes along nothing of others."""
    driven = on_host()
    short, longer = driven.admit(A, max_hit_tokens=8), driven.admit(A, max_hit_tokens=12)
    request, (plan,) = start_load(driven)
    driven.launch([plan])
    driven.end(plan, Outcome.CORRUPT, num_landed=0, corrupt=[2])
    for each in (request, short, longer):
        driven.release(each, "cancelled")
    assert driven.hit(A) == (0, 8)
    driven.serve(A)
    assert driven.hit(A) == (16, 0)


# -- stores -------------------------------------------------------------------------------------------------------


class Refusals:
    def __init__(self) -> None:
        self.skipped: list[tuple[int, str]] = []

    def observe(self, event: Event) -> None:
        if isinstance(event, StoreSkipped):
            self.skipped.append((event.num_blocks, event.reason))


def test_a_store_never_waits_for_room_and_is_offered_again() -> None:
    """With the host full of pinned blocks, a store is skipped with a reason; when there is room, it happens."""
    refusals = Refusals()
    driven = Driven(16, 4, observer=refusals)
    driven.on_host_only(A)
    pins = driven.admit(A)
    request = driven.running(prompt(2, 12))
    assert driven.commit(request) == []
    assert refusals.skipped == [(3, "host_full")]
    driven.release(pins, "cancelled")
    (store,) = driven.commit(request)
    assert store.num_blocks == 3
    driven.land([store])
    driven.release(request)


def test_a_store_takes_what_room_there_is_from_the_front() -> None:
    """A part of a prefix is worth storing if it is its front; the rest is offered again when the request is done."""
    refusals = Refusals()
    driven = Driven(16, 6, observer=refusals)
    driven.on_host_only(A)
    pins = driven.admit(A)
    request = driven.running(prompt(2, 12))
    (store,) = driven.commit(request)
    assert store.num_blocks == 2 and refusals.skipped == [(1, "host_full")]
    driven.land([store])
    driven.release(pins, "cancelled")
    (rest,) = driven.release(request)
    assert rest.num_blocks == 1
    driven.land([rest])
    driven.evict_device()
    assert driven.hit([*prompt(2, 12), 1]) == (0, 12)


def test_chunked_prefill_stores_block_by_block() -> None:
    """Each commit stores what is new, nothing twice; a partial block is never cached."""
    driven = Driven(16)
    request = driven.running(A)
    stores: list[TransferPlan] = []
    for upto in (3, 4, 10, 16, 17):
        stores += driven.commit(request, upto)
    assert [plan.num_blocks for plan in stores] == [1, 1, 2]
    assert driven.ledger.statistics().device.num_cached == 0
    driven.land([*stores, *driven.release(request)])
    assert driven.hit([*A, *range(8)]) == (16, 0)


def test_decoded_blocks_are_cached_and_stored() -> None:
    """Generated tokens extend the prefix: the next turn hits them, and the last block of a request is stored too."""
    driven = Driven(16)
    request = driven.running(prompt(1, 6))
    stores = driven.commit(request, 6, [501])
    for step in range(1, 11):
        if 6 + step > len(request.table) * BLOCK:
            driven.ledger.extend_nowait(request, 7 + step)
        stores += driven.commit(request, 6 + step, [501 + step])
    driven.land([*stores, *driven.release(request)])
    turn = [*prompt(1, 6), *range(501, 520)]
    assert driven.hit(turn) == (16, 0)
    driven.evict_device()
    assert driven.hit(turn) == (0, 16)


def test_no_store_policy_stores_nothing() -> None:
    """`store_policy="off"` is a cache on the device alone; a policy is any object that says what it wants."""
    driven = Driven(8, store_policy="off")
    driven.serve(A)
    assert driven.hit(A) == (16, 0)
    assert driven.ledger.statistics().host.num_free == 16

    class LastOnly(EagerStore):
        def wanted_stop(self, request: LedgerRequest) -> int:
            return request.published if request.num_computed_tokens >= 16 else 0

    driven = Driven(8, store_policy=LastOnly())
    request = driven.running(A)
    assert driven.commit(request, 8) == []
    assert [plan.num_blocks for plan in driven.commit(request, 17)] == [4]


class NothingAtAll(NoStore):
    """A program's own policy that stores nothing."""


@pytest.mark.parametrize("policy", ["off", NothingAtAll()], ids=["off", "derived"])
@pytest.mark.parametrize("eviction", ["lru", "learned"])
def test_a_policy_that_stores_nothing_stores_nothing_at_preemption(policy: Any, eviction: Any) -> None:
    """`store_policy="off"` holds for preempted requests, too, whichever features wrap the policy."""
    driven = Driven(8, store_policy=policy, eviction=eviction)
    request = driven.running(A)
    driven.commit(request)
    assert driven.ledger.preemption.preempt(request).plans == ()


def test_what_is_stored_does_not_evict_the_prefix_it_hangs_on() -> None:
    """Room for the new blocks is made elsewhere, or not at all: never by evicting their own front."""
    driven = Driven(16, 6)
    driven.serve(prompt(1, 16))
    request = driven.running(prompt(1, 33))
    (store,) = driven.commit(request)
    assert store.num_blocks == 2
    driven.land([store])
    driven.release(request)
    driven.evict_device()
    assert driven.hit(prompt(1, 33)) == (0, 24)


def test_a_gap_in_front_is_stored_again_with_what_follows() -> None:
    """Host blocks that were evicted at the front of a path are offered again at the next commit after them."""
    driven = Driven(24, 6)
    first = driven.running(prompt(1, 16))
    stores = driven.commit(first)
    driven.launch(stores)
    driven.end(stores[0], Outcome.FAILED, num_landed=1)
    driven.ledger.extend_nowait(first, 24)
    more = driven.commit(first, 24, range(16, 24))
    assert [plan.num_blocks for plan in more] == [5]
    assert list(more[0].source_ids) == list(first.table[1:6])


@pytest.mark.parametrize("at", [4, 8, 12])
def test_a_split_under_transfers_loses_nothing(at: int) -> None:
    """A divergent prompt cuts a run while two jobs fill it, at, before or after the border between them."""
    driven = Driven(24, max_job_bytes=2)
    request = driven.running(A)
    stores = driven.commit(request)
    assert [plan.num_blocks for plan in stores] == [2, 2]
    other = driven.running([*A[:at], *prompt(2, 9)])
    branch = driven.commit(other)
    driven.launch([*stores, *branch])
    driven.end(stores[1])
    driven.end(stores[0])
    driven.end(branch[0])
    for plan in branch[1:]:
        driven.end(plan)
    assert all(run.parts[Tier.HOST].incoming is None for run in driven.ledger.cache.index.runs.values())
    driven.release(request)
    driven.release(other)
    driven.evict_device()
    assert driven.hit(A) == (0, 16)
    assert driven.hit([*A[:at], *prompt(2, 9)]) == (0, at + 8)


def test_a_run_that_is_divided_awaits_no_job_of_another_branch() -> None:
    """A job that brings what two branches begin with goes on along one of them. The other one is divided after the job
    that followed there has failed: it is not told to wait for what the first brings elsewhere."""
    driven = Driven(32, 32)
    a = prompt(1, 17)
    b = [*a[:8], *prompt(2, 13)]
    driven.on_host_only(a)
    driven.on_host_only(b)
    shared = driven.launch(driven.ledger.plan_load(driven.allocated(a)))
    own = driven.launch(driven.ledger.plan_load(driven.allocated(b), max_job_bytes=1))
    driven.end(own[0], Outcome.UNPROVEN)
    driven.admit(b[:13])
    for plan in (*shared, *own[1:]):
        driven.end(plan)


@pytest.mark.parametrize("first", [Outcome.LANDED, Outcome.FAILED])
def test_any_number_of_copies_may_end_last_first(first: Outcome) -> None:
    """They wait for one another, as deep as were launched: all are settled with the first, and nothing stays pinned."""
    num_jobs = 1500
    config = OffloadConfig(groups=[KVCacheGroup("full", block_size=1)], num_host_blocks=num_jobs, max_job_bytes=1)
    ledger = Ledger(config, num_jobs + 1)
    prefix = Prefix.of(Root("m"), list(range(num_jobs)))
    request = ledger.admit(prefix)
    ledger.allocate_nowait(request)
    ledger.plan_load(request)
    plans = ledger.commit(request, num_jobs)
    assert len(plans) == num_jobs and all(ledger.launch(plan.job_id) for plan in plans)
    for plan in plans[:0:-1]:
        ledger.settle(Completion(plan.job_id, Outcome.LANDED, 1))
    assert ledger.statistics().num_jobs == num_jobs
    ledger.settle(Completion(plans[0].job_id, first, int(first is Outcome.LANDED)))
    ledger.release(request, "over")
    ledger.check_integrity()
    ledger.reset(Tier.DEVICE)
    found = ledger.statistics()
    assert (found.num_jobs, found.device.num_pinned, found.host.num_pinned) == (0, 0, 0)
    assert ledger.lookup(prefix).num_host_tokens == (num_jobs - 1 if first is Outcome.LANDED else 0)


def test_a_store_that_arrived_wrong_harms_nobody_who_reads_its_source() -> None:
    """Of a store that ends CORRUPT only the copy is wrong: what others have matched on the device stays, and the store
    is offered again."""
    driven = Driven(8)
    first = driven.running(prompt(1, 9))
    (store,) = driven.commit(first)
    driven.launch([store])
    second = driven.admit(prompt(1, 9))
    driven.end(store, Outcome.CORRUPT, corrupt=(0,))
    assert driven.hit(prompt(1, 9)) == (8, 0)
    driven.ledger.allocate_nowait(second)
    tables = [driven.ledger.block_ids(request)[0] for request in (first, second)]
    assert tables[0][:2] == tables[1][:2]
    (again,) = driven.commit(first)
    assert list(again.source_ids) == tables[0][:2]
