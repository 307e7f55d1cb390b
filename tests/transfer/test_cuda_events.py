"""Events as fences: never recorded twice for one holder; how they are waited for; fences for each region of a load."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from copies import GUARD_S, Copies
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_cuda import SimulatedCuda, Stream, on

from aoffload._kernel.plans import Completion
from aoffload._kernel.states import Direction, Outcome
from aoffload._transfer.backends.cuda.backend import CudaBackend
from aoffload._transfer.backends.cuda.driver import Pieces
from aoffload._transfer.backends.cuda.events import AdaptivePolling, BlockingWait, CudaFence, EventPool
from aoffload._transfer.fences import PASSED, Fence, RegionFences, RegionWatch
from aoffload._transfer.region import regions_of
from aoffload.errors import RegionNotLoaded


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_no_event_is_recorded_while_somebody_holds_a_fence_of_it(seed: int) -> None:
    """Fences are made and released in an order of chance; those that are held have an event each."""
    rng, cuda = random.Random(seed), SimulatedCuda(seed)
    pool = EventPool(cuda, BlockingWait())
    held: list[CudaFence] = []
    with cuda.bound():
        most = 0
        for _ in range(40):
            if held and rng.random() < 0.5:
                held.pop(rng.randrange(len(held)))
            else:
                held.append(pool.record(cuda.compute))
            most = max(most, len(held))
            assert len({fence.event.number for fence in held}) == len(held)
    assert cuda.num_events == most, "an event that nobody holds is used before another one is made"


def test_events_that_nobody_uses_are_destroyed_with_the_pool() -> None:
    """One whose fence a caller has kept is destroyed when that fence is dropped; on a device that is lost by then, it
    does no harm."""
    cuda = SimulatedCuda()
    pool = EventPool(cuda, BlockingWait())
    with cuda.bound():
        kept, other = pool.record(cuda.compute), pool.record(cuda.compute)
        event = other.event
        del other
        pool.clear()
        assert event.is_destroyed and not kept.event.is_destroyed
        kept.synchronize()
        event, last = kept.event, pool.record(cuda.compute)
    del kept
    assert event.is_destroyed and pool.num_idle == 0
    cuda.lose()
    del last


def test_a_fence_that_could_not_be_recorded_gives_its_event_back() -> None:
    """A refusal costs nothing."""

    class Refusing(SimulatedCuda):
        def record_event(self, event: Any, stream: Any) -> None:
            raise RuntimeError("not now")

    cuda = Refusing()
    pool = EventPool(cuda, BlockingWait())
    with cuda.bound():
        for _ in range(3):
            with pytest.raises(RuntimeError, match="not now"):
                pool.record(cuda.compute)
    assert cuda.num_events == 1


def test_a_stream_of_the_engine_waits_for_a_fence_on_the_device() -> None:
    """As for an event of torch's: nothing blocks, and what the stream is given later comes later."""
    cuda = SimulatedCuda()
    pool = EventPool(cuda, BlockingWait())
    seen: list[str] = []
    release = cuda.hold(cuda.compute)
    cuda.compute_on(cuda.compute, lambda: seen.append("before"))
    with cuda.bound():
        fence = pool.record(cuda.compute)
    other = Stream("engine")
    cuda.streams.append(other)
    fence.wait(other)  # type: ignore[arg-type]
    cuda.compute_on(other, lambda: seen.append("behind"))
    assert not fence.query()
    release()
    cuda.finish()
    assert seen == ["before", "behind"]


# -- how to wait ------------------------------------------------------------------------------------------------------


class Clock:
    """Time that passes only in naps."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.naps: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    def nap(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.now_s += seconds


@pytest.mark.parametrize("takes_s", [0.0, 15e-6, 0.2e-3, 3e-3, 0.1])
def test_polling_is_late_by_a_share_and_looks_seldom(takes_s: float) -> None:
    """At most a tenth late, or 20 µs, or 1 ms for long waits; and it never spins."""
    clock = Clock()
    policy = AdaptivePolling(clock=clock, nap=clock.nap)
    policy.wait(lambda: clock.now_s >= takes_s, lambda: pytest.fail("it does not block"))
    assert clock.now_s - takes_s <= min(1e-3, max(20e-6, 0.1 * takes_s)) * 1.001
    assert len(clock.naps) <= 50 + takes_s / 1e-3
    assert all(nap >= 20e-6 for nap in clock.naps)


def test_blocking_never_asks() -> None:
    """One call into the driver, which sleeps."""
    calls: list[str] = []
    BlockingWait().wait(lambda: pytest.fail("it does not ask"), lambda: calls.append("block"))
    assert calls == ["block"]


@pytest.mark.parametrize("policy", [BlockingWait(), AdaptivePolling()])
def test_either_way_of_waiting_serves_a_backend(open_copies: Callable[..., Copies], policy: Any) -> None:
    """The same completions, whichever is chosen."""
    pool = torch.arange(8, dtype=torch.int32)[:, None].repeat(1, 4)
    copies = open_copies(pool, 6, partial(CudaBackend, options=on(SimulatedCuda(3), waiting=policy)))
    assert copies.store([2, 5], [0, 1]).outcome is Outcome.LANDED
    assert copies.load([0, 1], [6, 7]).outcome is Outcome.LANDED
    assert pool[6:, 0].tolist() == [2, 5]


# -- region after region ----------------------------------------------------------------------------------------------


class Watched:
    """Three layers of a pool, of which blocks 1 and 2 were stored, and a load of them into 5 and 6."""

    def __init__(self, open_copies: Callable[..., Copies], cuda: SimulatedCuda, **options: Any) -> None:
        self.cuda = cuda
        self.layers = [torch.arange(8, dtype=torch.int32)[:, None].repeat(1, 4) + 100 * layer for layer in range(3)]
        self.copies = open_copies(self.layers, 6, partial(self.backend_type, options=on(cuda, **options)))
        assert self.copies.store([1, 2], [4, 0]).outcome is Outcome.LANDED
        backend = self.copies.transport.backend
        assert isinstance(backend, CudaBackend)
        self.backend = backend

    backend_type: type[CudaBackend] = CudaBackend

    def load(self) -> RegionFences:
        fences = RegionFences(len(self.layers))
        self.copies.transport.watch(2, fences)
        assert self.copies.launch_load([4, 0], [5, 6]) == 2
        return fences

    def is_there(self, layer: int) -> bool:
        return self.layers[layer][5:7, 0].tolist() == [100 * layer + 1, 100 * layer + 2]


@pytest.mark.parametrize("seed", range(4))
def test_a_layer_can_start_when_its_region_is_there(open_copies: Callable[..., Copies], seed: int) -> None:
    """Behind the fence of a region its bytes are there, whatever becomes of the regions after it."""
    watched = Watched(open_copies, SimulatedCuda(seed))
    fences = watched.load()
    for layer, fence in enumerate(fences.fences):
        assert fence._is_given.wait(GUARD_S)
        fence.synchronize()
        assert watched.is_there(layer)
        assert fence.query() and fence.is_given
    assert watched.copies.next().outcome is Outcome.LANDED


def test_layers_wait_on_the_device_while_later_ones_are_loading(open_copies: Callable[..., Copies]) -> None:
    """A forward is given to the device layer by layer before the load is over, and reads what was loaded."""
    cuda = SimulatedCuda(5)
    watched = Watched(open_copies, cuda)
    cuda.current = Stream("forward")
    cuda.streams.append(cuda.current)
    release = cuda.hold(cuda.compute)  # the load waits for the compute at launch
    cuda.current, forward = cuda.compute, cuda.current
    fences = watched.load()
    seen: list[bool] = []
    for layer, fence in enumerate(fences.fences):
        assert fence._is_given.wait(GUARD_S)
        fence.wait(forward)  # type: ignore[arg-type]
        cuda.compute_on(forward, lambda layer=layer: seen.append(watched.is_there(layer)))
    assert seen == []
    release()
    assert watched.copies.next().outcome is Outcome.LANDED
    cuda.finish()
    assert seen == [True] * 3


class ThirdRegionFails(CudaBackend):
    """Says no to the third batch of a load."""

    num_batches = 0

    def copy_by_engine(self, pieces: Pieces, direction: Direction) -> Fence:
        self.num_batches += direction is Direction.LOAD
        if self.num_batches == 3:
            raise OSError("no third region")
        return super().copy_by_engine(pieces, direction)


def test_a_region_that_never_comes_ends_the_wait(open_copies: Callable[..., Copies]) -> None:
    """What was given before stays good; for the rest there is a typed error instead of a wait without end."""
    watched = type("Failing", (Watched,), {"backend_type": ThirdRegionFails})(open_copies, SimulatedCuda())
    fences = watched.load()
    failed = watched.copies.next()
    assert (failed.outcome, failed.num_landed) == (Outcome.FAILED, 0)
    fences[1].synchronize()
    assert watched.is_there(0) and watched.is_there(1)
    assert fences[2].is_given, "or the next line would wait for ever"
    for call in (fences[2].synchronize, fences[2].query, fences[2].wait):
        with pytest.raises(RegionNotLoaded, match="no third region"):
            call()


def test_fences_of_a_load_that_never_started_end_with_it() -> None:
    """Each waiter is notified, and they cannot end twice."""
    fences = RegionFences(2)
    notes: list[str] = []

    def wait() -> None:
        with pytest.raises(RegionNotLoaded, match="discarded"):
            fences[1].synchronize()
        notes.append("so")

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert not fences[0].query()
    fences.end("discarded")
    waiting.join(GUARD_S)
    fences.end()
    fences.give(0, PASSED)
    with pytest.raises(RegionNotLoaded):
        fences[0].query()
    assert notes == ["so"] and len(fences) == 2


def test_a_transport_without_regions_gives_all_fences_at_the_end() -> None:
    """Where nobody tells regions apart, each is there when the whole load is."""
    watch = RegionWatch(object())
    fences = watch.fences_of(7)
    watch.launch(7)
    assert watch.fences_of(7) is fences and not fences[0].is_given and watch.num_regions is None
    watch.settle(Completion(8, Outcome.LANDED, 1))
    watch.settle(Completion(7, Outcome.LANDED, 1))
    for fence in fences.fences:
        assert fence.query()
        fence.wait()


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.UNPROVEN, Outcome.CORRUPT])
def test_a_load_that_did_not_land_ends_the_wait_for_its_regions(outcome: Outcome) -> None:
    """Refused, discarded, lost: the reason is in the error, and the backend keeps nothing of it."""
    backend = CudaBackend(regions_of(torch.zeros(4, 2)), options=on(SimulatedCuda()))
    watch = RegionWatch(backend)
    fences = watch.fences_of(7)
    watch.launch(7)
    watch.settle(Completion(7, outcome, error="the cable fell out"))
    with pytest.raises(RegionNotLoaded, match=f"{outcome.value}: the cable fell out"):
        fences[0].synchronize()
    assert backend._watched == {} and watch.num_regions == 1


def test_a_load_that_nobody_watches_is_one_batch(open_copies: Callable[..., Copies]) -> None:
    """Fences for each region cost batches; only loads that ask for them pay."""
    cuda = SimulatedCuda()
    watched = Watched(open_copies, cuda)
    watched.copies.transport.watch(2, RegionFences(3))
    watched.copies.transport.forget(2)
    assert watched.copies.load([4, 0], [5, 6]).outcome is Outcome.LANDED
    assert len([entry for entry in cuda.log if entry[1] == "copies"]) == 2
