"""The local transport: what it refuses, how copies end, and that it tells so exactly once."""

from __future__ import annotations

import gc
import threading
import weakref
from array import array
from collections.abc import Callable

import attrs
import numpy as np
import pytest
import torch
from copies import GUARD_S, Copies
from numpy.typing import NDArray

from aoffload.core.plan import Direction, Outcome, Tier, TransferPlan
from aoffload.env import Env
from aoffload.errors import RegionError, TransferRefused, WrongState
from aoffload.transfer.backends.cpu import CpuBackend
from aoffload.transfer.fence import PASSED, Fence
from aoffload.transfer.local import LocalTransport
from aoffload.transfer.transport import Transport


def numbered_pool(num_blocks: int = 8) -> torch.Tensor:
    """Block `b` is full of `b`."""
    return torch.arange(num_blocks, dtype=torch.int32)[:, None].repeat(1, 6)


@attrs.define(eq=False)
class GateFence:
    """A fence that another thread opens; it may break instead."""

    gate: threading.Event = attrs.field(factory=threading.Event)
    error: Exception | None = None

    def query(self) -> bool:
        return self.gate.is_set()

    def synchronize(self) -> None:
        assert self.gate.wait(GUARD_S)
        if self.error is not None:
            raise self.error


class FailingBackend(CpuBackend):
    """Copies two blocks per batch and raises before the batch that holds host block 4."""

    failure: type[BaseException] = OSError

    def open(self, num_host_blocks: int) -> None:
        super().open(num_host_blocks)
        self._blocks_per_batch = 2

    def copy_batch(self, direction: Direction, on_device: NDArray[np.int64], on_host: NDArray[np.int64]) -> None:
        if 4 in on_host:
            raise self.failure("the cable fell out")
        super().copy_batch(direction, on_device, on_host)


class DyingBackend(FailingBackend):
    failure = SystemExit


class HangingBackend(CpuBackend):
    """Every copy waits for `resume`."""

    def open(self, num_host_blocks: int) -> None:
        super().open(num_host_blocks)
        self.entered = threading.Event()
        self.resume = threading.Event()

    def copy_batch(self, direction: Direction, on_device: NDArray[np.int64], on_host: NDArray[np.int64]) -> None:
        self.entered.set()
        assert self.resume.wait(GUARD_S)
        super().copy_batch(direction, on_device, on_host)


class LateFenceBackend(CpuBackend):
    """Copies like a device: `copy` returns at once, and the bytes move when the test opens the plan's fence."""

    def open(self, num_host_blocks: int) -> None:
        super().open(num_host_blocks)
        self.fences: dict[int, GateFence] = {1: GateFence(), 2: GateFence(), 3: GateFence()}
        self.started = {1: threading.Event(), 2: threading.Event(), 3: threading.Event()}
        self.settle_error: Exception | None = None

    def copy(self, plan: TransferPlan) -> Fence:
        self.started[plan.job_id].set()
        if plan.job_id == 3:
            raise RuntimeError("no third copy")
        super().copy(plan)
        return self.fences[plan.job_id]

    def settle(self, direction: Direction) -> None:
        if self.settle_error is not None:
            raise self.settle_error


class ExchangingBackend(CpuBackend):
    """Exchanges the first two loaded blocks at the moment that a test chooses."""

    moment = "after_copy"

    def after_copy(self, plan: TransferPlan) -> None:
        self._exchange(plan, "after_copy")

    def after_verify(self, plan: TransferPlan) -> None:
        self._exchange(plan, "after_verify")

    def _exchange(self, plan: TransferPlan, moment: str) -> None:
        if plan.direction is Direction.LOAD and moment == self.moment:
            one, other = plan.destination_ids[:2]
            blocks = self.device_block(one), self.device_block(other)
            self.write_device_block(one, blocks[1])
            self.write_device_block(other, blocks[0])


class UnreadableBackend(CpuBackend):
    def device_block(self, block_id: int) -> NDArray[np.uint8]:
        raise OSError("cannot be read back")


def test_it_is_a_transport() -> None:
    """The default transport fits the seam."""
    transport: Transport = LocalTransport(numbered_pool())
    assert (transport.num_device_blocks, transport.block_bytes) == (8, 24)
    assert transport.record_fence().query()
    with pytest.raises(RegionError):
        LocalTransport([])


@pytest.mark.parametrize(
    ("source", "destination", "sources", "destinations", "message"),
    [
        (Tier.DEVICE, Tier.HOST, [0], [0], r"source_ids must be in \[1, 8\), got 0"),
        (Tier.DEVICE, Tier.HOST, [8], [0], "source_ids must be in"),
        (Tier.DEVICE, Tier.HOST, [-1, 2], [0, 1], "source_ids must be in"),
        (Tier.DEVICE, Tier.HOST, [1], [4], r"destination_ids must be in \[0, 4\), got 4"),
        (Tier.HOST, Tier.DEVICE, [0], [0], "destination_ids must be in"),
        (Tier.HOST, Tier.DEVICE, [-1], [3], "source_ids must be in"),
        (Tier.HOST, Tier.DEVICE, [1, 1], [3, 4], "source_ids names a block twice"),
        (Tier.HOST, Tier.DEVICE, [1, 2], [3, 3], "destination_ids names a block twice"),
        (Tier.HOST, Tier.DEVICE, [1, 2], [3], "2 source_ids, 1 destination_ids"),
        (Tier.HOST, Tier.HOST, [1], [3], "no way from"),
    ],
)
def test_a_bad_plan_is_refused_before_anything_is_copied(
    open_copies: Callable[..., Copies],
    source: Tier,
    destination: Tier,
    sources: list[int],
    destinations: list[int],
    message: str,
) -> None:
    """Ids that are no blocks, the null block, and ids twice raise `TransferRefused`; nothing is delivered."""
    pool = numbered_pool()
    copies = open_copies(pool, 4)
    plan = TransferPlan(1, source, destination, array("i", sources), array("i", destinations))
    with pytest.raises(TransferRefused, match=message):
        copies.transport.launch(plan, None)
    assert copies.transport.close(GUARD_S)
    assert copies.completions.empty()
    assert torch.equal(pool, numbered_pool())


def test_a_round_trip_is_counted(open_copies: Callable[..., Copies]) -> None:
    """Statistics say how much was copied and verified, and in how much time."""
    copies = open_copies(numbered_pool(), 4, verify=True)
    stored = copies.store([3, 5, 7], [2, 0, 1])
    loaded = copies.load([2, 1], [4, 6])
    assert (stored.num_bytes, loaded.num_bytes) == (72, 48)
    statistics = copies.transport.statistics()
    assert statistics.load_seconds > 0
    assert statistics.store_seconds > 0
    assert attrs.evolve(statistics, load_seconds=0, store_seconds=0) == attrs.evolve(
        type(statistics)(),
        num_loads=1,
        num_stores=1,
        blocks_loaded=2,
        blocks_stored=3,
        blocks_verified=2,
        bytes_loaded=48,
        bytes_stored=72,
    )


def test_a_store_waits_for_the_compute_before_it(open_copies: Callable[..., Copies]) -> None:
    """What the forward writes before its fence passes is what is stored, and loads are not held up meanwhile."""
    pool = numbered_pool()
    copies = open_copies(pool, 4)
    copies.store([1], [0])
    fence = GateFence()
    copies.launch_store([2], [1], after=fence)
    assert copies.load([0], [3]).outcome is Outcome.LANDED
    pool[2] = 99
    fence.gate.set()
    assert copies.next().outcome is Outcome.LANDED
    copies.load([1], [5])
    assert pool[5].tolist() == [99] * 6


def test_a_load_waits_for_the_compute_at_launch() -> None:
    """The destination may still be read by what was under way when the load was launched."""
    fence = GateFence()

    class ComputingBackend(CpuBackend):
        def record_fence(self) -> Fence:
            return fence

    pool = numbered_pool()
    copies = Copies(pool, 4, ComputingBackend)
    copies.launch_load([0], [3], after=PASSED)
    copies.launch_store([1], [1])  # without `after`: all compute so far counts
    assert copies.completions.empty()
    assert pool[3].tolist() == [3] * 6
    fence.gate.set()
    assert {copies.next().outcome, copies.next().outcome} == {Outcome.LANDED}
    assert pool[3].tolist() == [0] * 6
    assert copies.transport.close(GUARD_S)


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
    """The leading blocks are proven, also by checksum; those behind are not, and the thread goes on."""
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
    """The second copy is started while the first runs; a completion never overtakes an older one."""
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


def test_verification_notices_exchanged_blocks(open_copies: Callable[..., Copies]) -> None:
    """Right bytes at the wrong place are corrupt: the device is read back, not the host."""
    copies = open_copies(numbered_pool(), 4, ExchangingBackend, verify=True)
    copies.store([1, 2, 3], [0, 1, 2])
    corrupt = copies.load([2, 0, 1], [4, 5, 6])
    assert (corrupt.outcome, corrupt.num_landed, corrupt.corrupt) == (Outcome.CORRUPT, 0, (0, 1))
    statistics = copies.transport.statistics()
    assert (statistics.blocks_verified, statistics.blocks_corrupt, statistics.blocks_loaded) == (1, 2, 3)


def test_tampering_behind_verification_is_not_noticed(open_copies: Callable[..., Copies]) -> None:
    """The negative control: what happens after the check has to be caught by somebody else."""
    pool = numbered_pool()
    copies = open_copies(pool, 4, ExchangingBackend, verify=True)
    backend = copies.transport.backend
    assert isinstance(backend, ExchangingBackend)
    backend.moment = "after_verify"
    copies.store([1, 2], [0, 1])
    assert copies.load([0, 1], [4, 5]).outcome is Outcome.LANDED
    assert pool[4:6, 0].tolist() == [2, 1]


def test_without_verification_nothing_is_read_back(open_copies: Callable[..., Copies]) -> None:
    """Off means off; and what cannot be read back is not proven when it is on."""
    copies = open_copies(numbered_pool(), 4, UnreadableBackend)
    copies.store([1], [0])
    assert copies.load([0], [2]).outcome is Outcome.LANDED
    verifying = open_copies(numbered_pool(), 4, UnreadableBackend, verify=True)
    verifying.store([1], [0])
    unread = verifying.load([0], [2])
    assert (unread.outcome, unread.num_landed) == (Outcome.FAILED, 0)


def test_a_transport_is_opened_once() -> None:
    """Launching before is refused, opening again is an error, closing unopened is fine."""
    transport = LocalTransport(numbered_pool())
    plan = TransferPlan(1, Tier.DEVICE, Tier.HOST, array("i", [1]), array("i", [0]))
    with pytest.raises(TransferRefused, match="not open"):
        transport.launch(plan, None)
    assert transport.close(0)
    transport.open(1, verify=False, deliver=lambda completion: None, env=Env())
    with pytest.raises(WrongState):
        transport.open(1, verify=False, deliver=lambda completion: None, env=Env())
    assert transport.close(GUARD_S)


def test_a_device_that_records_no_fence_refuses() -> None:
    """An error at launch starts nothing and is typed."""

    class LostBackend(CpuBackend):
        def record_fence(self) -> Fence:
            raise RuntimeError("device lost")

    copies = Copies(numbered_pool(), 4, LostBackend)
    with pytest.raises(TransferRefused, match="device lost"):
        copies.launch_load([0], [1])
    assert copies.transport.close(GUARD_S)
