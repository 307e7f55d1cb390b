"""The end of a copy: failed, dead, hanging, late or lost, and reported exactly once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
from copies import GUARD_S, Copies
from faulty import DyingBackend, FailingBackend, GateFence, HangingBackend, LateFenceBackend, numbered_pool

from aoffload._kernel.states import Outcome
from aoffload.errors import TransferRefused


def test_a_broken_fence_fails_its_job_only(open_copies: Callable[..., Copies]) -> None:
    """Nothing was written for a job whose fence raised; the next one lands."""
    copies = open_copies(numbered_pool(), 4)
    fence = GateFence(error=RuntimeError("no such event"))
    fence.gate.set()
    copies.launch_store([2], [1], after=fence)
    failed = copies.next()
    assert (failed.outcome, failed.num_landed, failed.error) == (Outcome.FAILED, 0, "RuntimeError('no such event')")
    assert copies.store([2], [1]).outcome is Outcome.LANDED


def test_a_copy_that_fails_half_way_keeps_what_arrived(open_copies: Callable[..., Copies]) -> None:
    """The leading blocks are proven, also by checksum; those after are not, and the thread goes on."""
    pool = numbered_pool()
    copies = open_copies(pool, 6, FailingBackend, verify=True)
    failed = copies.store([1, 2, 3, 4, 5], [0, 1, 2, 4, 5])
    assert (failed.outcome, failed.num_landed, failed.num_bytes) == (Outcome.FAILED, 2, 48)
    assert failed.error == "OSError('the cable fell out')"
    assert copies.load([0, 1], [6, 7]).outcome is Outcome.LANDED
    assert pool[6:, 0].tolist() == [1, 2]
    # A block that the failed store never reached has no checksum that fits.
    unstored = copies.load([1, 2, 0], [3, 4, 5])
    assert (unstored.outcome, unstored.num_landed, unstored.corrupt) == (Outcome.CORRUPT, 1, (1,))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_thread_leaves_no_job_without_an_end(open_copies: Callable[..., Copies]) -> None:
    """Started jobs are unproven, queued ones failed, later ones refused; the other direction goes on."""
    copies = open_copies(numbered_pool(), 6, DyingBackend)
    fence = GateFence()
    copies.launch_store([1], [0], after=fence)
    copies.launch_store([2], [4])
    copies.launch_store([3], [5])
    fence.gate.set()
    ended = [copies.next() for _ in range(3)]
    assert [(end.job_id, end.outcome) for end in ended] == [
        (1, Outcome.LANDED),
        (2, Outcome.UNPROVEN),
        (3, Outcome.FAILED),
    ]
    with pytest.raises(TransferRefused, match="store thread"):
        copies.launch_store([3], [5])
    assert copies.load([0], [3]).outcome is Outcome.LANDED
    assert copies.transport.close(GUARD_S)


def test_close_lets_what_was_launched_end(open_copies: Callable[..., Copies]) -> None:
    """Closing is no cancellation: launched jobs land, later ones are refused, closing twice is fine."""
    copies = open_copies(numbered_pool(), 4)
    for index in range(4):
        copies.launch_store([index + 1], [index])
    assert copies.transport.close(GUARD_S)
    assert [copies.next().outcome for _ in range(4)] == [Outcome.LANDED] * 4
    with pytest.raises(TransferRefused, match="closed"):
        copies.launch_store([1], [0])
    assert copies.transport.close(0)


def test_close_does_not_wait_for_a_copy_that_hangs(open_copies: Callable[..., Copies]) -> None:
    """It returns False within its bound; what comes late is told, and what never started fails."""
    pool = numbered_pool()
    copies = open_copies(pool, 4, HangingBackend)
    backend = copies.transport.backend
    assert isinstance(backend, HangingBackend)
    copies.launch_store([1], [0])
    copies.launch_store([2], [1])
    assert backend.entered.wait(GUARD_S)
    assert not copies.transport.close(0.01)
    assert copies.completions.empty()
    with pytest.raises(TransferRefused):
        copies.launch_store([3], [2])
    backend.resume.set()
    assert copies.next().outcome is Outcome.LANDED
    assert copies.next().outcome is Outcome.FAILED
    assert copies.transport.close(GUARD_S)


def test_a_hanging_copy_keeps_both_memories_alive() -> None:
    """Closed, forgotten and collected: a late copy still writes into memory that is there."""
    pool = numbered_pool()
    copies = Copies(pool, 4, HangingBackend)
    backend = copies.transport.backend
    assert isinstance(backend, HangingBackend)
    entered, resume = backend.entered, backend.resume
    copies.launch_store([1], [0])
    assert entered.wait(GUARD_S)
    assert not copies.transport.close(0)
    host_alive = weakref.ref(backend._host)
    completions = copies.completions
    del copies, backend, pool
    gc.collect()
    assert host_alive() is not None
    resume.set()
    assert completions.get(timeout=GUARD_S).outcome is Outcome.LANDED


def test_several_jobs_run_at_once_and_end_in_order(open_copies: Callable[..., Copies]) -> None:
    """The second copy is started while the first runs. Each completion waits for the fence of its own copy, and never
    overtakes an older one."""
    copies = open_copies(numbered_pool(), 4, LateFenceBackend)
    backend = copies.transport.backend
    assert isinstance(backend, LateFenceBackend)
    hold = GateFence()
    copies.launch_store([1], [0], after=hold)
    copies.launch_store([2], [1])
    hold.gate.set()
    assert backend.started[2].wait(GUARD_S)
    backend.fences[2].gate.set()
    assert copies.completions.empty()
    backend.fences[1].gate.set()
    assert [copies.next().job_id, copies.next().job_id] == [1, 2]
    assert all(backend.fences[job_id].is_waited_for.is_set() for job_id in (1, 2)), "proven by its own fence"


def test_a_lost_device_is_unproven(open_copies: Callable[..., Copies]) -> None:
    """If waiting for the fence raises, nobody knows whether the copy still writes."""
    copies = open_copies(numbered_pool(), 4, LateFenceBackend)
    backend = copies.transport.backend
    assert isinstance(backend, LateFenceBackend)
    backend.fences[1].error = RuntimeError("device lost")
    backend.fences[1].gate.set()
    lost = copies.store([1], [0])
    assert (lost.outcome, lost.error) == (Outcome.UNPROVEN, "RuntimeError('device lost')")


@pytest.mark.parametrize("doubt", [None, RuntimeError("device lost")])
def test_a_failed_launch_is_over_only_if_the_device_says_so(
    open_copies: Callable[..., Copies], doubt: Exception | None
) -> None:
    """A copy that raised may have started something: it failed if that is over for certain, else it is unproven."""
    copies = open_copies(numbered_pool(), 4, LateFenceBackend)
    backend = copies.transport.backend
    assert isinstance(backend, LateFenceBackend)
    backend.settle_error = doubt
    hold = GateFence()
    for block_id in (1, 2, 3):
        copies.launch_store([block_id], [block_id - 1], after=hold)
    hold.gate.set()
    assert backend.started[3].wait(GUARD_S)
    for fence in backend.fences.values():
        fence.gate.set()
    ended = [copies.next() for _ in range(3)]
    assert [end.job_id for end in ended] == [1, 2, 3]
    assert [end.outcome for end in ended[:2]] == [Outcome.LANDED] * 2
    assert ended[2].outcome is (Outcome.FAILED if doubt is None else Outcome.UNPROVEN)
