"""The two threads of a lane: submission waits for no copy, completions keep their order, and a thread that is missing
or dies leaves no job without an end."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable

import pytest
import torch
from copies import GUARD_S, Copies
from faulty import FailingBackend, GateFence, LateFenceBackend, numbered_pool

from aoffload._common.tiers import Tier
from aoffload._kernel.plans import Completion, TransferPlan
from aoffload._kernel.states import Outcome
from aoffload._transfer.fences import ORDERED, PASSED, OnlyAfter
from aoffload._transfer.local import LocalTransport
from aoffload.errors import TransferRefused
from aoffload.transport import Env


def late(copies: Copies) -> LateFenceBackend:
    backend = copies.transport.backend
    assert isinstance(backend, LateFenceBackend)
    return backend


def test_a_job_is_submitted_while_the_one_before_is_waited_for(open_copies: Callable[..., Copies]) -> None:
    """The device has its next copy before the last one is over: it is never idle because a thread waits."""
    copies = open_copies(numbered_pool(), 4, LateFenceBackend)
    backend = late(copies)
    copies.launch_store([1], [0])
    assert backend.fences[1].is_waited_for.wait(GUARD_S)
    copies.launch_store([2], [1])
    assert backend.started[2].wait(GUARD_S)
    assert copies.completions.empty()
    for number in (1, 2):
        backend.fences[number].gate.set()
    assert [copies.next().job_id, copies.next().job_id] == [1, 2]


def test_a_burst_is_delivered_in_launch_order(open_copies: Callable[..., Copies]) -> None:
    """A copy that is over when it is submitted does not overtake one that is waited for, nor does a failed one."""
    copies = open_copies(numbered_pool(), 6, LateFenceBackend)
    backend = late(copies)
    backend.fences[2].gate.set()
    for number in (1, 2, 3):
        copies.launch_store([number], [number - 1])
        assert backend.started[number].wait(GUARD_S)
    assert backend.fences[1].is_waited_for.wait(GUARD_S)
    assert copies.completions.empty()
    backend.fences[1].gate.set()
    ended = [copies.next() for _ in range(3)]
    assert [(end.job_id, end.outcome) for end in ended] == [
        (1, Outcome.LANDED), (2, Outcome.LANDED), (3, Outcome.FAILED)
    ]  # fmt: skip


def test_without_a_second_thread_the_first_one_waits() -> None:
    """A system without threads left makes copies late, and none of them wrong."""

    class Few(Env):
        def start_thread(self, target: Callable[[], None], name: str) -> threading.Thread:
            if name.endswith("-ends"):
                raise RuntimeError("can't start new thread")
            return super().start_thread(target, name)

    transport = LocalTransport(numbered_pool(), LateFenceBackend)
    copies = Copies.__new__(Copies)
    copies.transport = transport
    done: list[Completion] = []
    arrived = threading.Semaphore(0)

    def deliver(completion: Completion) -> None:
        done.append(completion)
        arrived.release()

    transport.open(4, verify=False, deliver=deliver, env=Few())
    backend = late(copies)
    for number in (1, 2):
        backend.fences[number].gate.set()
        transport.launch(
            TransferPlan(number, Tier.DEVICE, Tier.HOST, array("i", [number]), array("i", [number - 1])), None
        )
    for _ in range(2):
        assert arrived.acquire(timeout=GUARD_S)
    assert [(end.job_id, end.outcome) for end in done] == [(1, Outcome.LANDED), (2, Outcome.LANDED)]
    assert transport.close(GUARD_S)


class DiesCompleting(LateFenceBackend):
    """Its completing thread dies of the first copy."""

    def after_copy(self, plan: TransferPlan) -> None:
        raise SystemExit


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_completing_thread_that_dies_leaves_no_job_without_an_end(open_copies: Callable[..., Copies]) -> None:
    """What it had in hand is unproven, as is what was submitted; later jobs are refused; closing does not hang."""
    copies = open_copies(numbered_pool(), 6, DiesCompleting)
    backend = late(copies)
    for number in (1, 2):
        copies.launch_store([number], [number - 1])
        assert backend.started[number].wait(GUARD_S)
    for number in (1, 2):
        backend.fences[number].gate.set()
    ended = sorted((copies.next(), copies.next()), key=lambda end: end.job_id)  # each thread ends its own
    assert [(end.job_id, end.outcome) for end in ended] == [(1, Outcome.UNPROVEN), (2, Outcome.UNPROVEN)]
    with pytest.raises(TransferRefused, match="store thread"):
        copies.launch_store([3], [3])
    assert copies.transport.close(GUARD_S)


def test_a_load_behind_given_fences_waits_for_nothing_else(open_copies: Callable[..., Copies]) -> None:
    """A forward that touches other blocks does not hold it up; a fence that is named does."""
    pool = numbered_pool()
    copies = open_copies(pool, 4, LateFenceBackend)
    backend = late(copies)
    running = GateFence()
    backend.record_fence = lambda: running  # type: ignore[method-assign]
    backend.fences[1].gate.set()
    copies.launch_load([0], [3], after=ORDERED)
    assert copies.next().outcome is Outcome.LANDED
    mine = GateFence()
    copies.launch_load([0], [4], after=OnlyAfter((mine, PASSED)))
    assert mine.is_waited_for.wait(GUARD_S)
    assert not backend.started[2].is_set() and not running.is_waited_for.is_set()
    backend.fences[2].gate.set()
    mine.gate.set()
    assert copies.next().outcome is Outcome.LANDED


# -- copies that are made at once -------------------------------------------------------------------------------------


class Small:
    """A transport with `CpuBackend` itself, and its completions with the thread that delivered each."""

    def __init__(self, block_bytes: int = 64, num_blocks: int = 8) -> None:
        self.pool = torch.arange(num_blocks, dtype=torch.uint8)[:, None].repeat(1, block_bytes)
        self.transport = LocalTransport(self.pool)
        self.done: list[tuple[int, Outcome, int]] = []
        self.arrived = threading.Semaphore(0)
        self.number = 0
        self.transport.open(num_blocks, verify=False, deliver=self.deliver, env=Env())

    def deliver(self, completion: Completion) -> None:
        self.done.append((completion.job_id, completion.outcome, threading.get_ident()))
        self.arrived.release()

    def store(self, block: int, host: int, after: object = None) -> None:
        self.number += 1
        plan = TransferPlan(self.number, Tier.DEVICE, Tier.HOST, array("i", [block]), array("i", [host]))
        self.transport.launch(plan, after)  # type: ignore[arg-type]

    def is_at_once(self) -> bool:
        """Whether the last launch has delivered its own completion."""
        assert self.arrived.acquire(timeout=GUARD_S)
        return self.done[-1][0] == self.number and self.done[-1][2] == threading.get_ident()


def test_nothing_is_copied_at_once_before_a_turn_begins() -> None:
    """`begin_turn` enables copies at once. A caller that settles inside `deliver` never calls it."""
    small = Small()
    small.store(1, 0)
    assert not small.is_at_once()
    assert small.transport.close(GUARD_S)


def test_small_copies_are_made_at_once_within_the_bounds_of_a_turn() -> None:
    """Their bytes are there, and their completion is delivered, when `launch` returns; beyond the bounds a thread makes
    them; another turn begins anew."""
    small = Small(block_bytes=48 * 1024, num_blocks=16)
    small.transport._most_bytes_at_once = 64 * 1024  # whatever this machine's threads cost
    small.transport.begin_turn()
    at_once = []
    for number in range(12):
        small.store(number + 1, number)
        at_once.append(small.is_at_once())
    assert at_once == [True] * 10 + [False] * 2, "512 KiB in a turn"
    small.transport._lanes[Tier.DEVICE, Tier.HOST].hand_over()  # its thread delivers before it counts the job as over
    small.transport.begin_turn()
    small.store(13, 12)
    assert small.is_at_once()
    assert bytes(small.transport.backend.host_rows[9]) == bytes(small.pool[10])  # type: ignore[attr-defined]
    assert small.transport.close(GUARD_S)


def test_a_large_copy_is_made_by_a_thread() -> None:
    """A copy above 64 KiB goes to a thread, so that it does not block the event loop."""
    small = Small(block_bytes=65 * 1024)
    small.transport.begin_turn()
    small.store(1, 0)
    assert not small.is_at_once()
    assert small.transport.close(GUARD_S)


def test_a_small_copy_waits_for_its_fence_and_its_turn() -> None:
    """One whose fence has not passed goes to the thread, and so does all that follows it in its direction."""
    small = Small()
    small.transport.begin_turn()
    fence = GateFence()
    small.store(1, 0, after=fence)
    assert fence.is_waited_for.wait(GUARD_S)
    small.pool[1] = 99
    small.store(2, 1)
    assert not small.done
    fence.gate.set()
    for _ in range(2):
        assert small.arrived.acquire(timeout=GUARD_S)
    assert [job_id for job_id, _, _ in small.done] == [1, 2]
    assert set(small.transport.backend.host_rows[0]) == {99}  # type: ignore[attr-defined]
    assert small.transport.close(GUARD_S)


def test_a_small_copy_that_is_interrupted_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal's handler may raise in the middle of it: nothing is proven, and the transport goes on."""

    def interrupted(plan: TransferPlan) -> None:
        raise KeyboardInterrupt

    small = Small()
    small.transport.begin_turn()
    with monkeypatch.context() as patch:
        patch.setattr(small.transport.backend, "copy", interrupted)
        with pytest.raises(KeyboardInterrupt):
            small.store(1, 0)
    assert small.done[0][:2] == (1, Outcome.FAILED)
    small.store(1, 0)
    assert small.done[1][:2] == (2, Outcome.LANDED)
    assert small.transport.close(GUARD_S)
    with pytest.raises(TransferRefused, match="closed"):
        small.store(1, 0)


def test_a_backend_of_the_program_copies_in_threads(open_copies: Callable[..., Copies]) -> None:
    """It may wait in `copy`, which would stop the event loop."""
    copies = open_copies(numbered_pool(), 4, FailingBackend)
    copies.transport.begin_turn()
    assert copies.transport._most_bytes_at_once == 0
