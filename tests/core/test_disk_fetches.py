"""Fetches: what only the disk has comes back into the host, shared, bounded, in prefix order, and never wrong."""

from __future__ import annotations

import pytest
from disk_driving import Disk
from driving import BLOCK, prompt

from aoffload import KVCacheGroup, RequestState, SlidingWindow
from aoffload._common.tiers import Tier
from aoffload._extensions.transfers import CacheTransferState
from aoffload._kernel.records import LedgerRequest, Waiter
from aoffload._kernel.states import Outcome
from aoffload.errors import ConfigError, InvalidArgument, WrongState

TOKENS = [*prompt(1, 8 * BLOCK), 7]


def test_what_the_disk_has_is_said_but_is_no_hit() -> None:
    """A match counts what a fetch would add beside the hit; the hit is what is above."""
    disk = Disk()
    disk.on_disk_only(TOKENS)
    match = disk.ledger.lookup(disk.prefix(TOKENS))
    assert (match.num_tokens, match.num_lower_tokens) == (0, 8 * BLOCK)
    request = disk.admit(TOKENS)
    assert (request.match.num_tokens, request.match.num_lower_tokens) == (0, 8 * BLOCK)
    assert disk.admit(TOKENS, max_hit_tokens=3 * BLOCK).match.num_lower_tokens == 3 * BLOCK
    assert disk.admit(TOKENS, hit_alignment=3 * BLOCK).match.num_lower_tokens == 6 * BLOCK
    assert disk.admit(prompt(2, 8)).match.num_lower_tokens == 0


def test_a_fetch_brings_it_into_the_host() -> None:
    """Jobs in prefix order; then a request that waited for it matches and pins what is there, in one step."""
    disk = Disk(max_job_bytes="3B")
    disk.on_disk_only(TOKENS)
    request = disk.admit(TOKENS)
    fetch = disk.ledger.fetches.fetch(disk.prefix(TOKENS))
    assert [(plan.link, plan.num_blocks) for plan in fetch.plans] == [((Tier.DISK, Tier.HOST), n) for n in (3, 3, 2)]
    assert (fetch.state, fetch.num_blocks, all(plan.payload is None for plan in fetch.plans)) == (
        CacheTransferState.MOVING, 8, True,
    )  # fmt: skip
    disk.land(fetch.plans)
    assert (fetch.state, fetch.num_tokens) == (CacheTransferState.DONE, 8 * BLOCK)
    assert request.match.num_tokens == 0, "it is not matched behind its back"
    match = disk.ledger.fetches.match_again(request)
    assert (match.num_host_tokens, match.num_lower_tokens) == (8 * BLOCK, 0)
    assert disk.num_pinned()[1] == 8
    disk.ledger.allocate_nowait(request)
    disk.land(disk.ledger.plan_load(request))
    assert (request.state, request.num_computed_tokens) == (RequestState.RUNNING, 8 * BLOCK)


def test_whoever_is_woken_may_match_at_once() -> None:
    """`wake` is called when the fetch is over, and may call `match_fetched`: nothing is evicted in between."""
    disk = Disk()
    disk.on_disk_only(TOKENS)
    request = disk.admit(TOKENS)
    fetch = disk.ledger.fetches.fetch(disk.prefix(TOKENS), lambda: disk.ledger.fetches.match_again(request))
    disk.land(fetch.plans)
    assert request.match.num_host_tokens == 8 * BLOCK
    assert disk.num_pinned()[1] == 8


def test_there_may_be_nothing_to_fetch() -> None:
    """Not on the disk, or hit anyway: the fetch is over at once, and has copied nothing."""
    disk = Disk()
    disk.on_disk_only(TOKENS)
    assert disk.ledger.fetches.fetch(disk.prefix(prompt(2, 20))).state is CacheTransferState.DONE
    assert disk.fetched(TOKENS) == 8 * BLOCK
    again = disk.ledger.fetches.fetch(disk.prefix(TOKENS))
    assert (again.plans, again.num_tokens, again.is_over) == ((), 8 * BLOCK, True)
    request = disk.running(TOKENS)
    disk.commit(request)
    disk.ledger.reset(Tier.HOST)
    assert disk.ledger.fetches.fetch(disk.prefix(TOKENS)).plans == (), "the device has it"


def test_only_what_the_host_lacks_is_fetched() -> None:
    """What is there stays there, and is pinned while the rest comes."""
    disk = Disk(num_host=8)
    disk.on_disk_only(TOKENS)
    assert disk.fetched(TOKENS[: 3 * BLOCK + 1]) == 3 * BLOCK
    fetch = disk.ledger.fetches.fetch(disk.prefix(TOKENS))
    assert [plan.num_blocks for plan in fetch.plans] == [5]
    assert disk.num_pinned()[1] == 8
    disk.land(fetch.plans)
    assert (fetch.num_tokens, disk.num_pinned()[1]) == (8 * BLOCK, 0)


def test_two_fetches_share_their_copies() -> None:
    """The second one waits for the jobs of the first, and copies only what these do not bring."""
    disk = Disk()
    disk.on_disk_only(TOKENS)
    first = disk.ledger.fetches.fetch(disk.prefix(TOKENS[: 5 * BLOCK + 1]))
    second = disk.ledger.fetches.fetch(disk.prefix(TOKENS))
    third = disk.ledger.fetches.fetch(disk.prefix(TOKENS))
    assert [sum(plan.num_blocks for plan in one.plans) for one in (first, second, third)] == [5, 3, 0]
    disk.land(second.plans)
    assert not (second.is_over or third.is_over), "published in prefix order"
    disk.land(first.plans)
    assert [one.num_tokens for one in (first, second, third)] == [5 * BLOCK, 8 * BLOCK, 8 * BLOCK]


def test_a_store_under_way_into_the_host_is_waited_for() -> None:
    """What comes from the device at the same time counts, and is not copied from the disk, too."""
    disk = Disk()
    disk.on_disk_only(TOKENS[: 5 * BLOCK + 1])
    request = disk.running(TOKENS)
    stores = disk.commit(request)
    fetch = disk.ledger.fetches.fetch(disk.prefix(TOKENS))
    assert (fetch.plans, fetch.is_over) == ((), True), "the device has it"
    disk.land([*stores, *disk.release(request)])


def test_a_cancelled_fetch_leaves_others_alone() -> None:
    """Queued copies that nobody else waits for are discarded; launched ones go on and are published."""
    disk = Disk(max_job_bytes="2B")
    disk.on_disk_only(TOKENS)
    mine = disk.ledger.fetches.fetch(disk.prefix(TOKENS))
    theirs = disk.ledger.fetches.fetch(disk.prefix(TOKENS[: 4 * BLOCK + 1]))
    first, second, third, fourth = mine.plans
    assert disk.launch([third]) == [third]
    disk.ledger.transfers.cancel(mine)
    disk.ledger.check_integrity()
    assert mine.state is CacheTransferState.CANCELLED
    assert not disk.ledger.launch(fourth.job_id)
    disk.land([first, second])
    assert (theirs.state, theirs.num_tokens) == (CacheTransferState.DONE, 4 * BLOCK)
    disk.end(third)
    assert disk.hit(TOKENS) == (0, 6 * BLOCK)
    assert disk.num_pinned()[1] == 0


def test_fetches_take_no_more_than_their_share_of_the_host() -> None:
    """All together; of what exceeds it, the front is fetched."""
    disk = Disk(num_host=16, max_fetch_share=0.5)
    other = [*prompt(2, 6 * BLOCK), 7]
    disk.on_disk_only(TOKENS, other)
    first = disk.ledger.fetches.fetch(disk.prefix(other))
    second = disk.ledger.fetches.fetch(disk.prefix(TOKENS))
    assert (first.num_blocks, second.num_blocks) == (6, 2)
    disk.land([*first.plans, *second.plans])
    assert (first.num_tokens, second.num_tokens) == (6 * BLOCK, 2 * BLOCK)
    third = disk.ledger.fetches.fetch(disk.prefix(TOKENS))
    assert third.num_blocks == 6, "the share is free again"
    none = Disk(max_fetch_share=0.0)
    none.on_disk_only(TOKENS)
    assert none.ledger.fetches.fetch(none.prefix(TOKENS)).plans == ()


def test_a_fetch_takes_what_room_there_is() -> None:
    """Blocks that are in use are not waited for: the front is fetched, or nothing."""
    disk = Disk(num_device=32, num_host=8)
    disk.on_disk_only(TOKENS)
    disk.on_host_only(prompt(2, 5 * BLOCK))
    request = disk.admit([*prompt(2, 5 * BLOCK), 7])
    assert disk.fetched(TOKENS) == 3 * BLOCK
    disk.release(request)
    assert disk.fetched(TOKENS) == 8 * BLOCK


def test_a_fetch_with_windows_has_all_that_a_hit_needs() -> None:
    """Also where only its front fits: the window is that at the end of what is fetched."""
    groups = [KVCacheGroup("full", block_size=BLOCK), KVCacheGroup("near", SlidingWindow(2 * BLOCK), BLOCK)]
    for share, num_units in ((1.0, 8), (0.5, 0), (0.8, 8)):
        disk = Disk(32, 16, groups=groups, max_fetch_share=share)
        disk.on_disk_only(TOKENS)
        assert disk.on_disk(TOKENS) == 8 * BLOCK
        assert disk.fetched(TOKENS) == num_units * BLOCK, share


def test_a_corrupt_block_is_forgotten_on_the_disk() -> None:
    """It is a miss from then on, and what was right before it is there."""
    disk = Disk()
    disk.on_disk_only(TOKENS)
    fetch = disk.ledger.fetches.fetch(disk.prefix(TOKENS))
    (plan,) = disk.launch(fetch.plans)
    disk.end(plan, Outcome.CORRUPT, 3, [3])
    assert (fetch.is_over, fetch.num_tokens, disk.on_disk(TOKENS)) == (True, 3 * BLOCK, 0)
    disk.on_host_only(TOKENS)
    assert sum(plan.num_blocks for plan in disk.flush()) == 1, "what was behind it is still there"
    disk.forget_host()
    assert disk.on_disk(TOKENS) == 8 * BLOCK


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.UNPROVEN])
def test_a_fetch_that_fails_is_a_miss(outcome: Outcome) -> None:
    """What landed before it counts; the disk forgets nothing."""
    disk = Disk(max_job_bytes="4B")
    disk.on_disk_only(TOKENS)
    fetch = disk.ledger.fetches.fetch(disk.prefix(TOKENS))
    first, second = disk.launch(fetch.plans)
    disk.end(first)
    disk.end(second, outcome, 2)
    num_units = 4 if outcome is Outcome.UNPROVEN else 6
    assert (fetch.is_over, fetch.num_tokens) == (True, num_units * BLOCK)
    assert disk.on_disk(TOKENS) == (8 - num_units) * BLOCK
    found = disk.ledger.statistics().host
    assert (found.num_pinned, found.num_quarantined) == (0, 4 if outcome is Outcome.UNPROVEN else 0)


@pytest.mark.parametrize("tier", [None, Tier.HOST, Tier.DISK])
def test_a_reset_meets_a_fetch(tier: Tier | None) -> None:
    """What is forgotten while it is on its way is not found; what the host gets when only the disk is reset, is."""
    disk = Disk()
    disk.on_disk_only(TOKENS)
    fetch = disk.ledger.fetches.fetch(disk.prefix(TOKENS))
    disk.ledger.reset(tier)
    disk.ledger.check_integrity()
    disk.land(fetch.plans)
    assert fetch.is_over
    assert disk.hit(TOKENS) == (0, 8 * BLOCK if tier is Tier.DISK else 0)
    assert disk.on_disk(TOKENS) == (8 * BLOCK if tier is Tier.HOST else 0)


def test_a_request_in_line_is_not_matched_by_a_fetch() -> None:
    """It is matched when its turn comes, and one that has blocks never again."""
    disk = Disk(num_device=9)
    disk.on_disk_only(TOKENS)
    running = disk.running(prompt(2, 8 * BLOCK))
    waits = disk.admit(TOKENS)
    waiter = disk.ledger.queue_allocation(waits)
    disk.fetched(TOKENS)
    for request in (waits, running):
        before = disk.picture()
        with pytest.raises(WrongState, match="match_again"):
            disk.ledger.fetches.match_again(request)
        assert disk.picture() == before
    disk.release(running, "cancelled")
    disk.ledger.accept(waiter)
    assert waits.match.num_host_tokens == 8 * BLOCK


def queued_after(disk: Disk, head: LedgerRequest, tokens: list[int]) -> Waiter:
    """A request that has fetched, and waits for room after `head`."""
    found = disk.admit(tokens)
    fetch = disk.ledger.fetches.fetch(
        disk.prefix(tokens), lambda: disk.ledger.fetches.match_again(found), for_request=found
    )
    disk.land(fetch.plans)
    assert found.match.num_host_tokens == 8 * BLOCK
    waiter = disk.ledger.queue_allocation(found)
    assert disk.ledger.admission.queue.allocating[0].request is head and not found.leases
    disk.ledger.check_integrity()
    return waiter


def full_device_with_queue(disk: Disk) -> tuple[LedgerRequest, LedgerRequest]:
    """A request that has all the room, and the head of the wait queue for it. Neither is cached anywhere."""
    running = disk.running(prompt(2, 8 * BLOCK), store="none")
    head = disk.admit(prompt(3, 8 * BLOCK), store="none")
    disk.ledger.queue_allocation(head)
    return running, head


OTHERS = [[*prompt(name, 8 * BLOCK), 7] for name in (4, 5)]


@pytest.mark.parametrize("windows", [False, True])
def test_what_was_fetched_stays_while_its_request_waits_for_room(windows: bool) -> None:
    """After the head of the wait queue a request gives its match up, but not what the disk was read for: whatever else
    comes into the host meanwhile, it is loaded once there is room."""
    more = [KVCacheGroup("window", attention=SlidingWindow(2 * BLOCK), block_size=BLOCK)] if windows else []
    groups = [KVCacheGroup("full", block_size=BLOCK), *more]
    disk = Disk(num_device=19 if windows else 10, num_host=24 if windows else 16, groups=groups)
    for tokens in (TOKENS, *OTHERS):
        disk.on_disk_only(tokens)
    running, head = full_device_with_queue(disk)
    waiter = queued_after(disk, head, TOKENS)
    for other in OTHERS:
        disk.fetched(other)
    disk.release(head, "cancelled")
    disk.release(running, "cancelled")
    disk.ledger.accept(waiter)
    assert waiter.request.match.num_host_tokens == 8 * BLOCK and waiter.request not in disk.ledger.fetches._kept
    disk.land(disk.ledger.plan_load(waiter.request))
    assert waiter.request.num_computed_tokens == 8 * BLOCK
    disk.release(waiter.request, "cancelled")
    assert disk.ledger.statistics().host.num_pinned == 0


def test_requests_in_line_keep_no_more_than_the_share_of_all_fetches() -> None:
    """The first keeps what it has fetched; what is beyond the share may be evicted, as all that is cached."""
    disk = Disk(num_device=10, max_fetch_share=0.5)
    for tokens in (TOKENS, *OTHERS):
        disk.on_disk_only(tokens)
    running, head = full_device_with_queue(disk)
    waiters = [queued_after(disk, head, each) for each in (TOKENS, OTHERS[0])]
    assert disk.ledger.statistics().host.num_pinned == 8
    disk.fetched(OTHERS[1])
    for request in (head, running):
        disk.release(request, "cancelled")
    disk.ledger.accept(waiters[0])
    assert waiters[0].request.match.num_host_tokens == 8 * BLOCK
    disk.release(waiters[0].request, "cancelled")
    disk.ledger.accept(waiters[1])
    assert waiters[1].request.match.num_host_tokens < 8 * BLOCK


@pytest.mark.parametrize("how", ["release", "reset", "host", "invalidate"])
def test_what_was_fetched_is_let_go_with_its_request_or_its_cache(how: str) -> None:
    """A request that leaves the wait queue leaves nothing pinned, and what is forgotten is kept for nobody."""
    disk = Disk(num_device=10)
    disk.on_disk_only(TOKENS)
    running, head = full_device_with_queue(disk)
    waiter = queued_after(disk, head, TOKENS)
    if how == "release":
        disk.release(waiter.request, "cancelled")
    elif how == "invalidate":
        disk.ledger.invalidation.invalidate(running, 0)
        disk.release(waiter.request, "cancelled")
    else:
        disk.ledger.reset(Tier.HOST if how == "host" else None)
        assert disk.ledger.statistics().host.num_cached == 0
        disk.ledger.check_integrity()
        disk.release(waiter.request, "cancelled")
    found = disk.ledger.statistics().host
    assert (found.num_pinned, len(disk.ledger.fetches._kept)) == (0, 0)


def test_a_ledger_without_a_disk_refuses_to_fetch() -> None:
    """By name; and a fetch of another ledger is not cancelled."""
    disk, other = Disk(), Disk()
    disk.on_disk_only(TOKENS)
    fetch = disk.ledger.fetches.fetch(disk.prefix(TOKENS))
    with pytest.raises(InvalidArgument, match="transfer"):
        other.ledger.transfers.cancel(fetch)
    other.ledger = type(disk.ledger)(type(disk.ledger.config)(groups=disk.ledger.config.groups, num_host_blocks=4), 8)
    with pytest.raises(ConfigError, match=r"^disk: "):
        other.ledger.fetches.fetch(disk.prefix(TOKENS))
    disk.ledger.transfers.cancel_all()
    assert fetch.state is CacheTransferState.CANCELLED


def test_nobody_who_copies_between_host_and_disk_holds_device_blocks() -> None:
    """The table of holders is about the device."""
    disk = Disk()
    disk.on_disk_only(TOKENS)
    fetch = disk.ledger.fetches.fetch(disk.prefix(TOKENS))
    assert fetch.plans and disk.ledger.reports.holders() == ()
    assert "  nothing" in disk.ledger.explain()
