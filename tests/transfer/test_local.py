"""The local transport: refused arguments, fences, and counts."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable

import attrs
import pytest
import torch
from copies import GUARD_S, Copies
from faulty import GateFence, numbered_pool

from aoffload._common.tiers import Tier
from aoffload._kernel.plans import TransferPlan
from aoffload._kernel.states import Outcome
from aoffload._transfer.backends.cpu import CpuBackend
from aoffload._transfer.fences import ORDERED, PASSED, Fence
from aoffload._transfer.local import LocalTransport
from aoffload._transfer.transport import Transport
from aoffload.errors import RegionError, TransferRefused, WrongState
from aoffload.transport import Env


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
        (Tier.HOST, Tier.HOST, [1], [3], "has no link from"),
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
    assert fence.is_waited_for.wait(GUARD_S)
    assert pool[3].tolist() == [3] * 6
    fence.gate.set()
    assert copies.next().outcome is Outcome.LANDED
    assert pool[3].tolist() == [0] * 6
    assert copies.transport.close(GUARD_S)


def test_a_store_without_a_fence_waits_for_all_compute_so_far() -> None:
    """The default of `after` is the safe one."""
    fence = GateFence()

    class ComputingBackend(CpuBackend):
        def record_fence(self) -> Fence:
            return fence

    pool = numbered_pool()
    copies = Copies(pool, 4, ComputingBackend)
    copies.launch_store([3], [0])
    assert fence.is_waited_for.wait(GUARD_S)
    pool[3] = 99
    fence.gate.set()
    assert copies.next().outcome is Outcome.LANDED
    copies.launch_load([0], [1])
    assert copies.next().outcome is Outcome.LANDED
    assert (pool[1] == 99).all()
    assert copies.transport.close(GUARD_S)


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


def test_what_cannot_be_opened_leaves_nothing_open() -> None:
    """The first thread runs already when the second one cannot be started: it ends, and the memory goes."""

    class OneThread(Env):
        def start_thread(self, target: Callable[[], None], name: str) -> threading.Thread:
            if threads:
                raise RuntimeError("can't start new thread")
            threads.append(super().start_thread(target, name))
            return threads[0]

    class Remembers(CpuBackend):
        is_closed = False

        def close(self) -> None:
            super().close()
            self.is_closed = True

    threads: list[threading.Thread] = []
    transport = LocalTransport(torch.zeros(4, 8), Remembers)
    with pytest.raises(TransferRefused, match="can't start"):
        transport.open(4, verify=False, deliver=lambda completion: None, env=OneThread())
    assert not threads[0].is_alive()
    assert isinstance(transport.backend, Remembers) and transport.backend.is_closed


class RecordingBackend(CpuBackend):
    """Counts the fences that it records."""

    num_fences = 0

    def record_fence(self) -> Fence:
        self.num_fences += 1
        return super().record_fence()


def test_what_the_engine_orders_itself_is_not_ordered_again(open_copies: Callable[..., Copies]) -> None:
    """`ORDERED` launches without a fence of ours; without it a load records one, whatever it is given beside."""
    copies = open_copies(numbered_pool(), 4, RecordingBackend)
    backend = copies.transport.backend
    assert isinstance(backend, RecordingBackend)
    copies.launch_store([1], [0], after=ORDERED)
    copies.launch_load([0], [2], after=ORDERED)
    assert [copies.next().outcome, copies.next().outcome] == [Outcome.LANDED] * 2
    assert backend.num_fences == 0
    copies.launch_load([0], [2], after=PASSED)
    copies.launch_store([1], [0])
    assert [copies.next().outcome, copies.next().outcome] == [Outcome.LANDED] * 2
    assert backend.num_fences == 2
