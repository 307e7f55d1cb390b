"""`invalidate` on KV that a failed forward committed, also with preempted requests and after the reset of a tier."""

from __future__ import annotations

import pytest
from driving import Driven, prompt

from aoffload import (
    ChunkedLocal,
    CommitError,
    FullAttention,
    InvalidArgument,
    KVCacheGroup,
    OutOfBlocks,
    SlidingWindow,
    WrongState,
)
from aoffload._common.tiers import Tier
from aoffload._kernel.records import LedgerRequest
from aoffload._kernel.states import RequestState

S = RequestState
A = prompt(1, 20)
PROMPT = prompt(1, 17)
GROUPS = {
    "full": [KVCacheGroup("full", block_size=4)],
    "chunks": [KVCacheGroup("chunks", ChunkedLocal(64), 4)],
    "window": [KVCacheGroup("full", FullAttention(), 4), KVCacheGroup("window", SlidingWindow(24), 4)],
}


def blocks_of(driven: Driven, request: LedgerRequest) -> set[int]:
    return {block_id for table in driven.ledger.block_ids(request) for block_id in table if block_id}


@pytest.mark.parametrize("groups", GROUPS.values(), ids=list(GROUPS))
@pytest.mark.parametrize("froms", [(17,), (13,), (17, 13), (5, 0)])
def test_who_runs_keeps_its_blocks_whatever_it_takes_back_after_a_reset(
    groups: list[KVCacheGroup], froms: tuple[int, ...]
) -> None:
    """The device is reset, then a part of what a request computed turns out to be wrong, twice: no block in its table
    is anybody else's until it is left."""
    driven = Driven(24, 0, groups=groups)
    request = driven.running(A)
    driven.commit(request)
    driven.ledger.reset(Tier.DEVICE)
    before = blocks_of(driven, request)
    for from_token in froms:
        driven.ledger.invalidation.invalidate(request, from_token)
        driven.ledger.check_integrity()
    assert blocks_of(driven, request) == before
    num_available = driven.ledger.admission.num_available
    other = driven.admit(prompt(2, 4 * (num_available // driven.ledger.layout.width)))
    driven.ledger.allocate_nowait(other)
    assert blocks_of(driven, other).isdisjoint(before)
    driven.release(other)
    driven.release(request)
    assert driven.ledger.statistics().device.num_free == 24


def test_what_two_have_computed_is_taken_back_by_the_first_after_a_reset() -> None:
    """Another request computes the same prompt after the reset: taking back what the first one had published loses no
    block of either, though nobody can tell them apart any more."""
    driven = Driven(24, 0, groups=[KVCacheGroup("window", SlidingWindow(5), 4)])
    first = driven.running(A)
    driven.commit(first)
    driven.ledger.reset(Tier.DEVICE)
    second = driven.running([*A, *prompt(2, 8)])
    driven.commit(second, 20)
    driven.commit(second, 28)  # its window has left what the first one still reads
    tainted = driven.ledger.invalidation.invalidate(first, 17)
    driven.ledger.check_integrity()
    for request in {first, second, *tainted}:
        driven.release(request)
    assert driven.ledger.statistics().device.num_pinned == 0


def test_a_reset_does_not_clear_who_has_read_what_was_wrong() -> None:
    """A request that has to be aborted stays so: it can't be forked after a reset of the device either."""
    driven = Driven(24, 0)
    request = driven.running(A)
    driven.commit(request)
    reader = driven.running([*A, 1])
    assert driven.ledger.invalidation.invalidate(request, 0) == (reader,)
    driven.ledger.reset(Tier.DEVICE)
    driven.commit(reader)
    with pytest.raises(WrongState, match="invalidated"):
        driven.ledger.forks.fork(reader)


def resumed_on_anothers_blocks() -> tuple[Driven, LedgerRequest, LedgerRequest]:
    """A request that was preempted, lost everything and matches what another one has computed since."""
    driven = Driven(8, 0)
    resumed = driven.running(A[:13])
    driven.commit(resumed, 13)
    driven.ledger.preemption.preempt(resumed)
    driven.evict_device()
    other = driven.running(A[:13])
    driven.commit(other, 13)
    driven.ledger.preemption.resume(resumed)
    return driven, resumed, other


@pytest.mark.parametrize("is_granted", [False, True])
def test_who_was_resumed_has_all_its_room_when_its_match_is_taken_back(is_granted: bool) -> None:
    """It has to be aborted, for nobody knows what it had read before; until then its tables are whole and its own."""
    driven, resumed, other = resumed_on_anothers_blocks()
    waiter = driven.ledger.queue_allocation(resumed) if is_granted else None
    assert driven.ledger.invalidation.invalidate(other, 5) == (resumed,)
    driven.ledger.check_integrity()
    if waiter is None:
        driven.ledger.allocate_nowait(resumed)
    else:
        driven.ledger.accept(waiter)
    driven.ledger.check_integrity()
    assert len(blocks_of(driven, resumed)) == 4 and blocks_of(driven, resumed).isdisjoint(blocks_of(driven, other))
    driven.release(resumed)
    driven.release(other)
    assert driven.ledger.statistics().device.num_pinned == 0


@pytest.mark.parametrize("state", ["preempted", "resumed", "in line"])
def test_what_was_read_before_a_preemption_is_not_forgotten(state: str) -> None:
    """A request reads what another has computed, and is preempted: whatever it pins when that turns out to be wrong,
    what it has sampled from it is wrong, and it has to be aborted."""
    driven = Driven(16, 0)
    ahead = driven.admit(prompt(4, 60))
    author = driven.running(A[:13])
    driven.commit(author, 13)
    reader = driven.running([*A[:12], 7])
    assert reader.match.num_device_tokens == 12
    driven.commit(reader, 13)
    driven.ledger.preemption.preempt(reader)
    if state != "preempted":
        driven.ledger.preemption.resume(reader)
    if state == "in line":
        driven.ledger.queue_allocation(ahead)
        driven.ledger.queue_allocation(reader)
        assert not reader.all_leases()
    assert driven.ledger.invalidation.invalidate(author, 4) == (reader,)
    driven.ledger.check_integrity()


def test_its_own_progress_is_not_more_than_it_may_read() -> None:
    """Who may use no hit, or fewer tokens, gets back what it has computed itself, and no more."""
    for limit, computed, expected in ((0, 0, 0), (4, 0, 4), (0, 9, 8), (4, 9, 8), (None, 9, 16)):
        driven = Driven(24, 24)
        driven.serve(A)
        request = driven.running(A, max_hit_tokens=limit)
        if computed > request.num_computed_tokens:
            driven.commit(request, computed)
        driven.land(driven.ledger.preemption.preempt(request).plans)
        driven.ledger.preemption.resume(request)
        assert request.match.num_tokens == expected, (limit, computed)


@pytest.mark.parametrize("num_tokens", [0, -1, True, 1.5, "x", 10**9])
def test_a_refused_resume_changes_nothing(num_tokens: object) -> None:
    """What can never fit, or is no number of tokens, is refused by name, and the request can still be resumed."""
    driven = Driven(24, 24)
    request = driven.running(A)
    driven.commit(request)
    driven.ledger.preemption.preempt(request)
    before = driven.picture()
    with pytest.raises((InvalidArgument, OutOfBlocks), match=r"num_tokens|blocks"):
        driven.ledger.preemption.resume(request, num_tokens)  # type: ignore[arg-type]
    assert driven.picture() == before and request.state is S.PREEMPTED
    driven.ledger.preemption.resume(request, 24)
    assert request.state is S.PINNED


def test_invalidate_takes_back_what_a_failed_forward_committed() -> None:
    """Its own blocks are private again, on every tier nothing of it is found; computing and committing again works."""
    driven = Driven(16)
    request = driven.running(PROMPT)
    driven.land(driven.commit(request, 8))
    driven.land(driven.commit(request, 17))
    table = list(request.table)
    assert driven.ledger.invalidation.invalidate(request, 8) == ()
    driven.ledger.check_integrity()
    assert request.num_computed_tokens == 8
    assert driven.hit(PROMPT) == (8, 0)
    assert driven.ledger.statistics().host.num_free == 14, "host copies go too"
    stores = driven.commit(request, 17)
    assert list(request.table) == table
    assert driven.hit(PROMPT) == (16, 0)
    driven.land([*stores, *driven.release(request)])
    driven.evict_device()
    assert driven.hit(PROMPT) == (0, 16)


def test_invalidate_in_the_middle_of_a_block_takes_the_whole_block() -> None:
    """A block is right or it is not: no partial block stays findable."""
    driven = Driven(16)
    request = driven.running(PROMPT)
    driven.commit(request)
    driven.ledger.invalidation.invalidate(request, 6)
    assert driven.hit(PROMPT) == (4, 0)
    assert request.num_computed_tokens == 6


def test_who_matched_the_wrong_bytes_is_named() -> None:
    """Holders of a tainted prefix, and of what they computed on it, are returned; requests that matched less are
    not."""
    driven = Driven(32)
    wrong = driven.running(PROMPT)
    driven.commit(wrong, 8)
    fine = driven.running(prompt(1, 9))
    driven.commit(wrong, 17)
    tainted = driven.running([*PROMPT, *prompt(2, 12)])
    driven.commit(tainted, 24)
    grandchild = driven.running([*PROMPT, *prompt(2, 12)])
    assert grandchild.match.num_device_tokens == 24
    assert set(driven.ledger.invalidation.invalidate(wrong, 8)) == {tainted, grandchild}
    driven.ledger.check_integrity()
    assert driven.hit([*PROMPT, *prompt(2, 12)]) == (8, 0)
    assert driven.commit(tainted) == [], "it publishes and stores nothing any more"
    assert driven.hit([*PROMPT, *prompt(2, 12), 5]) == (8, 0)
    for request in (tainted, grandchild):
        driven.release(request, "prefix_invalidated")
    driven.commit(fine)
    driven.commit(wrong)
    assert driven.hit([*PROMPT, *prompt(2, 12)]) == (16, 0)
    for request in (fine, wrong):
        driven.release(request)


@pytest.mark.parametrize("turn", ["pinned", "first in line", "granted"])
def test_who_has_only_matched_wrong_bytes_matches_again(turn: str) -> None:
    """Nothing was read yet, so nobody is aborted: the wrong blocks are computed instead, and no count is lost."""
    driven = Driven(16)
    wrong = driven.running(PROMPT)
    driven.commit(wrong, 16)
    matched = driven.admit(PROMPT)
    filler = driven.allocated(prompt(6, 44))
    waiter = None if turn == "pinned" else driven.ledger.queue_allocation(matched)
    if turn == "granted":
        driven.release(filler)
        assert waiter is not None and waiter.granted is not None
    assert driven.ledger.invalidation.invalidate(wrong, 8) == ()
    driven.ledger.check_integrity()
    if turn != "granted":
        driven.release(filler)
    if waiter is None:
        driven.ledger.allocate_nowait(matched)
    else:
        driven.ledger.accept(waiter)
    assert driven.ledger.plan_load(matched) == ()
    assert (matched.num_computed_tokens, len(matched.table)) == (8, 5)
    assert not set(matched.table[2:]) & set(wrong.table)
    driven.ledger.check_integrity()


def test_what_somebody_gone_computed_on_wrong_bytes_is_taken_back() -> None:
    """Blocks that a finished request computed on a wrong prefix are not found once the prefix is right again."""
    driven = Driven(32)
    wrong = driven.running(PROMPT)
    driven.commit(wrong)
    driven.serve([*PROMPT[:16], *prompt(2, 9)])
    assert driven.hit([*PROMPT[:16], *prompt(2, 9)]) == (24, 0)
    driven.ledger.invalidation.invalidate(wrong, 0)
    driven.ledger.check_integrity()
    driven.commit(wrong)
    assert driven.hit([*PROMPT[:16], *prompt(2, 9)]) == (16, 0)
    driven.release(wrong)
    driven.evict_device()
    assert driven.hit([*PROMPT[:16], *prompt(2, 9)])[1] <= 16


def test_what_is_in_flight_from_a_failed_forward_publishes_nothing() -> None:
    """A store of wrong bytes may land: nobody finds it."""
    driven = Driven(16)
    request = driven.running(PROMPT)
    (store,) = driven.launch(driven.commit(request))
    driven.ledger.invalidation.invalidate(request, 0)
    driven.end(store)
    driven.release(request, "cancelled")
    assert driven.hit(PROMPT) == (0, 0)
    assert driven.ledger.statistics().host.num_free == 16


def test_tokens_sampled_by_a_failed_forward_are_forgotten() -> None:
    """The token it was given stays, the ones sampled from it go: what is generated instead has a digest of its own."""
    driven = Driven(16)
    request = driven.running(prompt(1, 6))
    driven.commit(request, 6, [900])
    driven.commit(request, 7, [901])
    driven.commit(request, 8, [902])
    driven.ledger.invalidation.invalidate(request, 7)
    assert request.sequence.num_tokens == 8  # six, 900, and 901, which was sampled from what is right
    driven.ledger.invalidation.invalidate(request, 6)
    assert request.sequence.num_tokens == 7
    driven.commit(request, 7, [801])
    driven.commit(request, 8, [802])
    assert driven.hit([*prompt(1, 6), 900, 801, 5]) == (8, 0)
    assert driven.hit([*prompt(1, 6), 900, 901, 5]) == (4, 0)


def test_nothing_of_others_is_taken_back() -> None:
    """What was a hit can't be invalidated, nor what was never computed."""
    driven = Driven(16)
    driven.serve(prompt(1, 8))
    request = driven.running(PROMPT)
    driven.commit(request, 12)
    for from_token in (7, 13):
        with pytest.raises(CommitError, match="from_token"):
            driven.ledger.invalidation.invalidate(request, from_token)
    driven.ledger.invalidation.invalidate(request, 8)
    assert driven.hit(PROMPT) == (8, 0)
