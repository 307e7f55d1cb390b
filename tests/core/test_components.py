"""Sliding-window and chunked components: allocation, frees, matches, loads and stores."""

from __future__ import annotations

import pytest
from driving import Driven, prompt

from aoffload._common.tiers import Tier
from aoffload._config.groups import ChunkedLocal, FullAttention, KVCacheGroup, SlidingWindow
from aoffload._kernel.plans import Completion
from aoffload._kernel.states import Outcome, RequestState
from aoffload.errors import OutOfBlocks, WrongState

BOTH = [KVCacheGroup("full", FullAttention(), 4), KVCacheGroup("window", SlidingWindow(8), 4)]
WINDOW = BOTH[1:]
A = prompt(1, 25)
"""Six whole blocks; of the window, a hit of 24 tokens needs two."""


def test_what_has_left_a_window_is_room_for_others() -> None:
    """A commit makes positions before the window null; `extend` says which, once; their blocks can be had."""
    driven = Driven(12, groups=BOTH)
    request = driven.running(A[:20])
    driven.commit(request, 20)
    assert driven.ledger.block_ids(request)[1][:3] == [0, 0, 0]
    assert all(driven.ledger.block_ids(request)[1][3:]) and all(driven.ledger.block_ids(request)[0])
    extension = driven.ledger.extend_nowait(request, 24)
    assert extension.nulled == [[], [0, 1, 2]] and [len(added) for added in extension.added] == [1, 1]
    assert driven.ledger.extend_nowait(request, 24).nulled == [[], []]
    driven.ledger.check_integrity()


def test_a_prompt_larger_than_the_pool_fits_slice_by_slice() -> None:
    """Of a window alone a request needs the window and one slice, however long its prompt is."""
    driven = Driven(4, groups=WINDOW)
    with pytest.raises(OutOfBlocks) as refusal:
        driven.ledger.allocate_nowait(driven.admit(prompt(2, 400)))
    assert not refusal.value.retryable
    tokens = prompt(1, 400)
    request = driven.admit(tokens)
    driven.ledger.allocate_nowait(request, 8)
    for stop in range(8, 401, 8):
        driven.ledger.extend_nowait(request, stop)
        driven.commit(request, stop)
    assert request.num_computed_tokens == 400


def test_blocks_stay_while_a_step_reads_them() -> None:
    """A commit in the middle of a step gives nothing back before the step has ended."""
    driven = Driven(12, groups=BOTH)
    request = driven.running(A[:20])
    with driven.ledger.step([request]):
        driven.commit(request, 20)
        assert all(driven.ledger.block_ids(request)[1])
    assert driven.ledger.block_ids(request)[1][:3] == [0, 0, 0]
    driven.ledger.check_integrity()


def test_a_hit_brings_back_only_the_window() -> None:
    """Of a host hit, full attention loads everything and a window its last blocks; before those its table is null, and
    has no block of its own."""
    driven = Driven(16, 16, groups=BOTH)
    driven.on_host_only(A)
    request = driven.admit(A)
    assert request.match.num_host_tokens == 24
    driven.ledger.allocate_nowait(request)
    assert driven.ledger.block_ids(request)[1][:4] == [0] * 4
    plans = driven.ledger.plan_load(request)
    assert sorted(plan.num_blocks for plan in plans) == [2, 6]
    driven.land(plans)
    assert request.num_computed_tokens == 24 and driven.ledger.block_ids(request)[1][:4] == [0] * 4
    assert 0 not in driven.ledger.block_ids(request)[1][4:]


def test_a_host_hit_is_loaded_or_declined_before_anything_is_computed() -> None:
    """Where the place of a host hit is null, nothing is computed into it: the call is refused and says what to do."""
    driven = Driven(16, 16, groups=BOTH)
    driven.on_host_only(A)
    request = driven.admit(A)
    driven.ledger.allocate_nowait(request)
    for call in (lambda: driven.ledger.commit(request, 4), lambda: driven.ledger.step([request]).__enter__()):
        with pytest.raises(WrongState, match=r"load\(max_tokens=0\)"):
            call()
    assert driven.ledger.plan_load(request, 0) == ()
    assert request.state is RequestState.RUNNING and 0 not in driven.ledger.block_ids(request)[1]
    driven.commit(request, 25)


def test_a_failed_load_is_computed_in_blocks_of_its_own() -> None:
    """When a window does not come, the request has blocks for everything that it computes instead."""
    driven = Driven(16, 16, groups=BOTH)
    driven.on_host_only(A)
    request = driven.admit(A)
    driven.ledger.allocate_nowait(request)
    plans = driven.launch(driven.ledger.plan_load(request))
    for plan in plans:
        driven.ledger.settle(Completion(plan.job_id, Outcome.FAILED if plan.num_blocks == 2 else Outcome.LANDED, 0))
    assert request.state is RequestState.RUNNING and request.num_computed_tokens == 0
    assert 0 not in driven.ledger.block_ids(request)[0] + driven.ledger.block_ids(request)[1]
    driven.commit(request, 25)


def test_a_refusal_keeps_what_the_load_would_adopt() -> None:
    """A request that is refused because too few blocks are free still has its match, and pins what lies on the device
    after its device hit."""
    driven = Driven(16, 24, groups=BOTH)
    driven.on_host_only(A)
    driven.release(driven.running(A))  # on the device, too; then its window goes, which was let go of first
    driven.release(driven.allocated(prompt(7, 20)), "filler")
    request = driven.admit(A)
    assert request.reserve is not None and request.match.num_host_tokens > 0
    driven.allocated(prompt(8, 16))
    before, match = driven.ledger.statistics(), request.match
    with pytest.raises(OutOfBlocks):
        driven.ledger.allocate_nowait(request)
    assert request.reserve is not None and request.match == match and driven.ledger.statistics() == before


def test_a_refused_extension_keeps_what_the_load_would_adopt() -> None:
    """A request that has blocks and has not loaded yet is refused more: its leases and its blocks stay."""
    driven = Driven(20, 24, groups=BOTH)
    driven.on_host_only(A)
    driven.release(driven.running(A))
    driven.release(driven.allocated(prompt(7, 28)), "filler")
    request = driven.allocated(A)
    leases, blocks = request.all_leases(), driven.ledger.block_ids(request)
    assert request.reserve is not None
    driven.allocated(prompt(8, 8))
    with pytest.raises(OutOfBlocks):
        driven.ledger.extend_nowait(request, 36)
    assert request.all_leases() == leases and request.reserve in leases
    assert driven.ledger.block_ids(request) == blocks


def test_what_a_load_would_adopt_stays() -> None:
    """A hit may need what only the device holds and what only the host holds: neither goes before the load."""
    driven = Driven(20, 24, groups=BOTH)
    driven.serve(A)
    driven.release(driven.allocated(prompt(7, 25)), "filler")  # the window goes, which was let go of first
    for run in driven.ledger.cache.index.runs.values():
        driven.ledger.cache.withdraw_part(run.part(Tier.HOST, 0))
    request = driven.admit(A)
    assert (request.match.num_device_tokens, request.match.num_host_tokens) == (0, 24)
    driven.evict_device()
    driven.ledger.allocate_nowait(request)
    driven.land(driven.ledger.plan_load(request))
    assert request.num_computed_tokens == 24


def test_of_a_window_its_end_is_stored() -> None:
    """What no hit near the end of a prompt needs of a window is not copied to the host; what one needs is."""
    driven = Driven(12, 12, groups=WINDOW)
    driven.on_host_only(A)
    run = next(iter(driven.ledger.cache.index.runs.values()))
    part = run.part(Tier.HOST, 1)
    assert part.first > 0, "the window was stored, and what lies before it was not"
    request = driven.running(A)
    driven.ledger.check_integrity()
    assert request.num_computed_tokens == 24


@pytest.mark.parametrize("chunk", [4, 8, 12, 16])
def test_a_chunk_needs_nothing_at_its_beginning(chunk: int) -> None:
    """A hit may end where a chunk begins although nothing of the chunk before is cached."""
    groups = [KVCacheGroup("full", FullAttention(), 4), KVCacheGroup("local", ChunkedLocal(chunk), 4)]
    driven = Driven(24, 24, groups=groups)
    driven.on_host_only(A)
    assert driven.admit(A).match.num_tokens == 24


def test_going_back_behind_the_window_ends_a_request() -> None:
    """What attention would read before the place that `invalidate` goes back to has left the window: the request is
    among those that have to be aborted, and what it had published is found no more."""
    driven = Driven(16, groups=BOTH)
    request = driven.running(A)
    driven.commit(request, 24)
    assert driven.ledger.invalidation.invalidate(request, 12) == (request,)
    driven.release(request, "prefix_invalidated")
    assert driven.hit(A)[0] <= 12
    again = driven.running(A)
    driven.commit(again, 24)
    assert driven.ledger.invalidation.invalidate(again, 24) == ()
