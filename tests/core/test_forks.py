"""Forks: a new request continues from the present token of another. They share the full blocks; the engine copies the
other blocks."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable

import pytest
from driving import BLOCK, Driven, prompt
from test_illegal_calls import refused

from aoffload import ChunkedLocal, KVCacheGroup, RequestState, SlidingWindow
from aoffload.errors import DuplicateRequest, OutOfBlocks, WrongState
from aoffload.ledger import Fork

A = prompt(1, 10)


def table(driven: Driven, fork: Fork) -> list[int]:
    return driven.ledger.block_ids(fork.request)[0]


def test_a_fork_shares_full_blocks_and_copies_the_tail() -> None:
    """Two full blocks are in both tables, the third is copied; both go on, and publish what they compute."""
    driven = Driven(8)
    parent = driven.running(A)
    driven.commit(parent, 10, [7])
    fork = driven.ledger.forks.fork(parent, "twin")
    driven.ledger.check_integrity()
    ids, (mine,) = table(driven, fork), driven.ledger.block_ids(parent)
    assert ids[:2] == mine[:2] and fork.copies == ((mine[2], ids[2]),) and ids[2] not in mine
    assert (fork.request.request_id, fork.request.state) == ("twin", RequestState.RUNNING)
    assert fork.request.num_computed_tokens == 10 and fork.request.match.num_device_tokens == 8
    driven.commit(parent, 12, [8])
    driven.commit(fork.request, 12, [9])
    assert driven.hit([*A, 7, 8, 0]) == driven.hit([*A, 7, 9, 0]) == (12, 0)
    driven.release(parent)
    driven.release(fork.request)
    assert driven.num_pinned()[0] == 0 or driven.ledger.jobs.unsettled


def test_shared_blocks_outlive_the_parent() -> None:
    """The fork has leases of its own."""
    driven = Driven(8, 0)
    parent = driven.running(A)
    driven.commit(parent)
    fork = driven.ledger.forks.fork(parent)
    driven.release(parent)
    assert driven.num_pinned()[0] == 3
    driven.commit(driven.running(prompt(2, 20)))
    assert driven.hit([*A[:8], 0]) == (8, 0), "not evicted under it"
    driven.release(fork.request)


def test_a_fork_of_whole_blocks_copies_nothing() -> None:
    """A request at the end of a block needs a block for what comes next, and no copy."""
    driven = Driven(8)
    parent = driven.running(A[:8])
    driven.commit(parent, 8, [7])
    fork = driven.ledger.forks.fork(parent)
    assert not fork.copies and len(table(driven, fork)) == 3
    assert len(table(driven, driven.ledger.forks.fork(parent, num_tokens=16))) == 4


def test_a_fork_without_room_changes_nothing() -> None:
    """`OutOfBlocks`, retryable if others could let go; nobody overtakes who waits for more already."""
    driven = Driven(4)
    parent = driven.running(A)
    driven.commit(parent)
    with refused(driven.ledger, parent, error=OutOfBlocks, says=("retry",)):
        driven.ledger.forks.fork(parent, num_tokens=16)
    with refused(driven.ledger, parent, error=OutOfBlocks, says=("never fit",)):
        driven.ledger.forks.fork(parent, num_tokens=17)
    other = driven.ledger.forks.fork(parent).request
    driven.ledger.queue_extension(other, 16)
    with refused(driven.ledger, parent, error=OutOfBlocks, says=("retry",)):
        driven.ledger.forks.fork(parent)


def test_a_fork_has_a_name_of_its_own() -> None:
    """Two live requests of one name are refused before anything is taken."""
    driven = Driven(12)
    parent = driven.running(A, request_id="r")
    with refused(driven.ledger, parent, error=DuplicateRequest, says=("request_id",)):
        driven.ledger.forks.fork(parent, "r")
    assert driven.ledger.forks.fork(parent).request.request_id != driven.ledger.forks.fork(parent).request.request_id


def test_windows_fork_as_well() -> None:
    """Only what is in the window is shared, the positions before it are null in both."""
    groups = [KVCacheGroup("full", block_size=BLOCK), KVCacheGroup("window", SlidingWindow(6), BLOCK)]
    driven = Driven(20, 0, groups=[*groups, KVCacheGroup("local", ChunkedLocal(8), 2)])
    parent = driven.running(prompt(1, 18))
    driven.commit(parent)
    fork = driven.ledger.forks.fork(parent)
    driven.ledger.check_integrity()
    mine, ids = driven.ledger.block_ids(parent), driven.ledger.block_ids(fork.request)
    assert [own[:4] for own in ids[:2]] == [own[:4] for own in mine[:2]]
    assert ids[1][:3] == [0, 0, 0] and ids[2][:8] == [0] * 8
    copied = [(mine[0][4], ids[0][4]), (mine[1][4], ids[1][4]), (mine[2][8], ids[2][8])]
    assert list(fork.copies) == copied, "of the last group the second block of the unit is empty"
    driven.commit(fork.request, 20, [5, 6])
    driven.release(parent)
    driven.release(fork.request)
    assert driven.num_pinned() == (0, 0)


def test_after_a_reset_a_fork_copies_what_was_never_published() -> None:
    """What was computed since is in blocks that nobody else can read."""
    driven = Driven(12)
    parent = driven.running(A)
    driven.commit(parent, 4)
    driven.ledger.reset()
    driven.commit(parent, 10)
    fork = driven.ledger.forks.fork(parent)
    driven.ledger.check_integrity()
    (mine,), ids = driven.ledger.block_ids(parent), table(driven, fork)
    assert ids[0] == mine[0] and fork.copies == ((mine[1], ids[1]), (mine[2], ids[2]))
    assert driven.commit(fork.request, 10) == []


def test_who_has_copied_wrong_bytes_is_told() -> None:
    """A forward failed after its tokens were committed and its request forked: the fork, and the fork of the fork, have
    copied what was never right, though no full block of it was published. Who forked before is not concerned."""
    driven = Driven(20)
    parent = driven.running(A)
    driven.commit(parent, 9)
    early = driven.ledger.forks.fork(parent).request
    driven.commit(parent, 10)
    late = driven.ledger.forks.fork(parent).request
    last = driven.ledger.forks.fork(late).request
    driven.release(late)
    assert driven.ledger.invalidation.invalidate(parent, 9) == (last,)
    with refused(driven.ledger, last, error=WrongState, says=("fork", "aborted")):
        driven.ledger.forks.fork(last)
    driven.commit(early)
    driven.ledger.check_integrity()


def num_calls(function: Callable[[], object]) -> int:
    """Calls of Python functions that it takes."""
    found = 0

    def count(_: object, event: str, __: object) -> None:
        nonlocal found
        found += event == "call"

    before = sys.getprofile()
    gc.disable()  # it would run the finalisers of others
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
        gc.enable()
    return found


@pytest.mark.parametrize("num_published", [10, 12])
def test_a_fork_ends_as_soon_whatever_ended_before(num_published: int) -> None:
    """A parent that lives outlives many forks: what it takes to end one does not grow with how many there have been.
    Of those that have published nothing, nothing is kept."""
    driven = Driven(64)
    parent = driven.running(A)
    driven.commit(parent, 10)

    def come_and_go(token: int) -> int:
        fork = driven.ledger.forks.fork(parent, num_tokens=12).request
        driven.commit(fork, num_published, [token, token])
        return num_calls(lambda: driven.release(fork))

    calls = [come_and_go(token) for token in range(100, 400)]
    assert max(calls[200:]) <= max(calls[:100])
    assert len(driven.ledger.forks._over) == (300 if num_published == 12 else 0)
    driven.release(parent)
    assert not driven.ledger.forks._over and not driven.ledger.forks._over_of
