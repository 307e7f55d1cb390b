"""The CUDA backend on a simulated device: the bytes, the ways to copy them, and devices that are lost."""

from __future__ import annotations

import queue
import random
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from copies import GUARD_S, Copies
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import Pool, separate_sizes, stacked
from simulated_cuda import SimulatedCuda, SimulatedKernel, Stream, on

from aoffload._common.tiers import Tier
from aoffload._kernel.plans import TransferPlan
from aoffload._kernel.states import Direction, Outcome
from aoffload._transfer.backends.cuda import backend
from aoffload._transfer.backends.cuda.backend import CudaBackend, CudaOptions, best_driver
from aoffload._transfer.backends.cuda.driver import CudaError, DeviceLost, Pieces
from aoffload._transfer.backends.cuda.plain import TorchDriver
from aoffload._transfer.backends.cuda.trials import SIZES, BreakEven, measure_break_even, measured_on, scattered
from aoffload._transfer.fences import PASSED, Fence
from aoffload._transfer.region import regions_of
from aoffload.errors import DeviceGone

MIB = 2**20
EVERYTHING_SMALL = BreakEven(2**40, 2**40)
layouts = st.sampled_from((separate_sizes, stacked))


def backend_of(copies: Copies) -> CudaBackend:
    assert isinstance(copies.transport.backend, CudaBackend)
    return copies.transport.backend


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), layout=layouts, small=st.sampled_from((0, 7, 2**40)), pinned=st.booleans())
@pytest.mark.filterwarnings("ignore:copies will be slow")
def test_any_layout_comes_back_byte_for_byte(
    seed: int, layout: Callable[[random.Random], Pool], small: int, pinned: bool
) -> None:
    """By the copy engine, by the kernel, by both at once, and from memory that could not be pinned."""
    rng, cuda = random.Random(seed), SimulatedCuda(seed, pinnable_bytes=2**40 if pinned else 0)
    pool = layout(rng)
    num_blocks = pool.regions[0].num_blocks
    options = on(cuda, kernel=lambda device: SimulatedKernel(cuda), break_even=BreakEven(small, small))
    copies = Copies(pool.regions, num_blocks + 3, partial(CudaBackend, options=options), verify=True)
    count = rng.randint(1, num_blocks - 1)
    sources, targets = (rng.sample(range(1, num_blocks), count) for _ in range(2))
    hosts = rng.sample(range(num_blocks + 3), count)
    expected = [pool.block(block_id) for block_id in sources]
    assert copies.store(sources, hosts).outcome is Outcome.LANDED
    pool.memory.zero_()
    before = [pool.block(block_id) for block_id in range(num_blocks)]
    assert copies.load(hosts, targets).outcome is Outcome.LANDED
    for block_id in range(num_blocks):
        wanted = expected[targets.index(block_id)] if block_id in targets else before[block_id]
        assert pool.block(block_id) == wanted
    assert copies.transport.close(20)
    assert cuda.registered == {}


def test_pieces_that_cross_a_registration_are_cut(open_copies: Callable[..., Copies]) -> None:
    """Neighbouring blocks of 3 MiB in a pool that was pinned in pieces of 2 MiB: the device takes every piece."""
    pool = torch.randint(0, 255, (7, 3 * MIB), dtype=torch.uint8)
    wanted = pool.clone()
    cuda = SimulatedCuda()
    copies = open_copies(pool, 6, partial(CudaBackend, options=on(cuda, max_piece_bytes=2 * MIB)))
    assert copies.store([1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5]).outcome is Outcome.LANDED
    pool.zero_()
    assert copies.load([0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]).outcome is Outcome.LANDED
    assert torch.equal(pool[1:], wanted[1:])
    assert {entry[3] for entry in cuda.log if entry[1] == "copies"} == {len(backend_of(copies).host.pieces)}


def test_a_plan_without_blocks_lands(open_copies: Callable[..., Copies]) -> None:
    """Nothing to copy is no special case, in any way of copying."""
    for small in (0, 2**40):
        cuda = SimulatedCuda()
        options = on(cuda, kernel=lambda device: SimulatedKernel(cuda), break_even=BreakEven(small, small))  # noqa: B023
        copies = open_copies(torch.zeros(3, 2), 2, partial(CudaBackend, options=options))
        assert copies.store([], []).outcome is Outcome.LANDED


def test_single_blocks_are_read_and_overwritten(open_copies: Callable[..., Copies]) -> None:
    """For checksums, and for those who tamper on purpose."""
    layers = [torch.arange(8, dtype=torch.int32)[:, None].repeat(1, 2) + 100 * layer for layer in range(2)]
    backend = backend_of(open_copies(layers, 2, partial(CudaBackend, options=on(SimulatedCuda()))))
    assert backend.device_block(3).view(np.int32).tolist() == [3, 3, 103, 103]
    backend.write_device_block(5, backend.device_block(3))
    assert [int(layer[5, 0]) for layer in layers] == [3, 103]


@pytest.mark.parametrize("max_batches", [1, 2, 4, None])
def test_batches_under_way_are_few(open_copies: Callable[..., Copies], max_batches: int | None) -> None:
    """Some drivers hang when many are queued. Of a dozen stores that wait for a long forward the device has four, or as
    many as the option says; the others follow as these end."""
    all_are_launched = threading.Event()

    class Waits(CudaBackend):
        def wait_for(self, direction: Direction, fences: tuple[Fence, ...]) -> None:
            assert all_are_launched.wait(GUARD_S)
            super().wait_for(direction, fences)

    cuda = SimulatedCuda()
    options = on(cuda) if max_batches is None else on(cuda, max_batches=max_batches)
    copies = open_copies(torch.arange(16)[:, None].repeat(1, 4), 16, partial(Waits, options=options))
    release = cuda.hold(cuda.compute)
    after = copies.transport.record_fence()
    for block_id in range(1, 13):
        copies.launch_store([block_id], [block_id], after=after)
    all_are_launched.set()
    cuda.wait_given("copies", max_batches or 4)
    release()
    assert [copies.next().outcome for _ in range(12)] == [Outcome.LANDED] * 12
    assert cuda.most_batches == (max_batches or 4)


def test_single_blocks_do_not_wait_for_copies(open_copies: Callable[..., Copies]) -> None:
    """They are read and written on a stream of their own, so verification of a load goes on while later ones are held,
    and in a thread that has not made the device current."""
    used: list[str] = []

    class Told(SimulatedCuda):
        @contextmanager
        def on_stream(self, stream: Stream) -> Iterator[None]:
            with self._asked("cuStreamQuery"), super().on_stream(stream):
                used.append(stream.name)
                yield

    cuda = Told()
    backend = backend_of(open_copies(torch.zeros(4, 8), 2, partial(CudaBackend, options=on(cuda))))
    used.clear()
    backend.write_device_block(2, backend.device_block(1))
    assert used == ["copy3"] * 2
    assert {lane.stream.name for lane in backend._lanes.values()} == {"copy1", "copy2"}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("small", [0, 17], ids=["engine", "kernel"])
def test_one_thread_submits_while_another_verifies(seed: int, small: int) -> None:
    """The first waits for fences, copies and settles; the second, in which no device is current, waits for the copies'
    fences and reads what arrived. Every block is right as soon as its fence has passed, whatever is submitted then."""
    cuda = SimulatedCuda(seed)
    pool = torch.zeros(129, 3, 4, dtype=torch.int32)
    options = on(cuda, kernel=lambda device: SimulatedKernel(cuda), break_even=BreakEven(small, 0), max_batches=2)
    backend = CudaBackend(regions_of([pool[:, 0], pool[:, 2]]), options=options)
    backend.open(64)
    backend.host.rows[:] = np.arange(64, dtype=np.uint8)[:, None]
    copied: queue.SimpleQueue[tuple[TransferPlan, Fence]] = queue.SimpleQueue()

    def submit() -> None:
        with backend.thread_scope(Direction.LOAD):
            for first in range(1, 129, 8):
                hosts = array("i", random.Random(seed + first).sample(range(64), 8))
                plan = TransferPlan(first, Tier.HOST, Tier.DEVICE, hosts, array("i", range(first, first + 8)))
                backend.wait_for(Direction.LOAD, (backend.record_fence(),))
                copied.put((plan, backend.copy(plan)))
                if first % 5 == 0:
                    backend.settle(Direction.LOAD)

    thread = threading.Thread(target=submit)
    thread.start()
    for _ in range(16):
        plan, fence = copied.get(timeout=GUARD_S)
        fence.synchronize()
        found = [int(backend.device_block(block_id)[0]) for block_id in plan.destination_ids]
        assert found == plan.source_ids.tolist()
    thread.join(GUARD_S)
    del fence
    backend.close()


# -- engine or kernel -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("break_even", "ways"),
    [
        (BreakEven(0, 0), {"copies": (2, 4608)}),
        (BreakEven(4096, 4096), {"copies": (1, 4096), "kernel copies": (1, 512)}),
        (BreakEven(4097, 4097), {"kernel copies": (2, 4608)}),
        (BreakEven(9, 4097), {"kernel copies": (2, 4608)}),
    ],
)
def test_small_pieces_go_to_the_kernel(
    open_copies: Callable[..., Copies], break_even: BreakEven, ways: dict[str, tuple[int, int]]
) -> None:
    """On both sides of the break-even, by the size of a piece, each way by its own figure."""
    cuda = SimulatedCuda()
    options = on(cuda, kernel=lambda device: SimulatedKernel(cuda), break_even=break_even)
    regions = [torch.zeros(4, 4096, dtype=torch.uint8), torch.zeros(4, 512, dtype=torch.uint8)]
    copies = open_copies(regions, 2, partial(CudaBackend, options=options))
    assert copies.store([2], [0]).outcome is Outcome.LANDED
    found = {entry[1]: entry[-2:] for entry in cuda.log if "copies" in str(entry[1])}
    assert found == ways


def times_of(engine: Callable[[int], float], kernel: Callable[[int], float]) -> BreakEven:
    """What is found where copying pieces of a size takes so long."""
    now = [0.0]

    def trial(takes: Callable[[int], float]) -> Callable[[Pieces], None]:
        def run(pieces: Pieces) -> None:
            now[0] += takes(int(pieces.sizes[0]))

        return run

    return measure_break_even(
        trial(engine), trial(kernel), lambda size: scattered(Direction.LOAD, 0, 2**40, MIB, size), lambda: now[0]
    )


def test_the_kernel_loads_pieces_for_which_it_is_much_faster() -> None:
    """An engine that pays 0.3 µs for each piece and moves 50 GB/s, a kernel that moves 34: they are equal at about 28
    KiB, and the kernel is 1.5 times as fast at 8 KiB. It takes no stores, for which no request waits."""
    found = times_of(lambda size: MIB / size * 0.3e-6 + MIB / 50e9, lambda size: MIB / 34e9)
    assert found == BreakEven(8 * 1024 + 1, 0)


@pytest.mark.parametrize(("times", "most"), [(0.9, 0), (1.49, 0), (1.51, SIZES[-1] + 1)])
def test_a_small_lead_is_not_enough_for_the_kernel(times: float, most: int) -> None:
    """It takes multiprocessors from the forward, which an idle device does not show."""
    assert times_of(lambda size: times, lambda size: 1.0) == BreakEven(most, 0)


def test_the_choice_is_measured_when_the_backend_opens_and_can_be_overridden() -> None:
    """With memory of its own: the cache is left alone, and every trial is over when it ends."""
    pool = torch.arange(8, dtype=torch.int32)[:, None].repeat(1, 1024)
    wanted = pool.clone()
    for given_one, tries in ((None, True), (EVERYTHING_SMALL, False)):
        cuda = SimulatedCuda()
        options = on(cuda, kernel=lambda device: SimulatedKernel(cuda), break_even=given_one)  # noqa: B023
        backend = CudaBackend(regions_of(pool), options=options)
        backend.open(512)
        assert any(entry[1] == "copies" for entry in cuda.log) is tries
        assert given_one is None or backend.break_even == given_one
        assert not any(stream.steps for stream in cuda.streams if stream.name != "compute")
        backend.close()
    assert torch.equal(pool, wanted)


def test_trials_wait_for_what_torch_gave_to_its_stream_before() -> None:
    """Memory that torch hands out again may still be in use there."""
    cuda = SimulatedCuda()
    backend = CudaBackend(
        regions_of(torch.zeros(8, MIB)), options=on(cuda, kernel=lambda device: SimulatedKernel(cuda))
    )
    backend.open(2)
    kinds = [(entry[0], entry[1]) for entry in cuda.log]
    for stream, does in (("copy1", "copies"), ("copy1", "kernel copies"), ("copy1", "records"), ("copy2", "records")):
        assert kinds.index((stream, "waits for")) < kinds.index((stream, does))
    backend.close()


class Broken:
    def copy(self, *_: object) -> None:
        raise OSError("no compiler")


def full(device: torch.device) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("kernel", "why"), [(lambda device: Broken(), "no compiler"), (full, "out of memory")], ids=["compiler", "memory"]
)
@pytest.mark.parametrize("break_even", [None, EVERYTHING_SMALL])
def test_a_kernel_that_cannot_be_used_is_named_once_and_not_chosen(
    kernel: Any, why: str, break_even: BreakEven | None
) -> None:
    """A machine without a compiler, and a device without memory for tables, copy everything by the engine, whatever was
    asked for. One warning says why."""
    cuda = SimulatedCuda()
    options = on(cuda, kernel=kernel, break_even=break_even)
    backend = CudaBackend(regions_of(torch.zeros(8, MIB)), options=options)
    with pytest.warns(RuntimeWarning, match=rf"kernel cannot be used: .*{why}") as given:
        backend.open(2)
    assert len(given) == 1
    assert backend.break_even == BreakEven(0, 0) and not backend.has_kernel
    assert backend.host.is_page_locked
    backend.close()


def test_a_kernel_is_built_before_the_first_request() -> None:
    """Also where nothing is measured: each kernel that is going to be used copies a piece when the backend opens, with
    the one alignment that all its batches have."""
    alignments: list[int] = []

    class Told(SimulatedKernel):
        def copy(self, pieces: Pieces, alignment: int, record: Callable[[], Fence]) -> None:
            alignments.append(alignment)
            super().copy(pieces, alignment, record)

    for break_even, number in ((BreakEven(0, 0), 0), (BreakEven(9, 0), 1), (BreakEven(9, 9), 2)):
        cuda = SimulatedCuda()
        options = on(cuda, kernel=lambda device: Told(cuda), break_even=break_even)  # noqa: B023
        backend = CudaBackend(regions_of(torch.zeros(8, 12, dtype=torch.uint8)), options=options)
        backend.open(4)
        assert alignments == [4] * number
        backend.close()
        alignments.clear()


def test_a_device_without_memory_for_trials_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine may have taken all of it: the rate of the link is unknown then, and the engine copies everything."""
    empty = torch.empty

    def full(size: Any, *given: Any, **named: Any) -> torch.Tensor:
        if isinstance(size, int) and size >= MIB:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return empty(size, *given, **named)

    cuda = SimulatedCuda()
    options = on(cuda, kernel=lambda device: SimulatedKernel(cuda))
    backend = CudaBackend(regions_of(torch.zeros(8, MIB)), options=options)
    monkeypatch.setattr(torch, "empty", full)
    with pytest.warns(RuntimeWarning, match="out of memory"):
        backend.open(2)
    assert (backend.bytes_per_s, backend.break_even) == (0.0, BreakEven(0, 0))
    backend.close()


def test_the_rate_of_the_link_is_known_when_the_backend_is_open() -> None:
    """Of one large copy each way, which writes to the host pool and to memory of its own; unknown before, and for a
    pool below 1 MiB."""
    pool = torch.arange(8, dtype=torch.int32)[:, None].repeat(1, 1024)
    wanted = pool.clone()
    for num_blocks, is_known in ((512, True), (100, False)):
        backend = CudaBackend(regions_of(pool), options=on(SimulatedCuda()))
        assert backend.bytes_per_s == 0.0
        backend.open(num_blocks)
        assert (backend.bytes_per_s > 0) is is_known
        backend.close()
    assert torch.equal(pool, wanted)


def test_copies_that_would_share_a_queue_with_compute_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some engines set it for their own overlap; nobody would find it in a profile of the copies."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    backend = CudaBackend(regions_of(torch.zeros(8, 4)), options=on(SimulatedCuda()))
    with pytest.warns(RuntimeWarning, match="CUDA_DEVICE_MAX_CONNECTIONS=1"):
        backend.open(2)
    backend.close()


def test_a_device_that_does_not_map_host_memory_has_no_kernel(open_copies: Callable[..., Copies]) -> None:
    """Whatever was asked for, all pieces are the engine's."""
    cuda = SimulatedCuda()
    cuda.maps_host_memory = False
    options = on(cuda, kernel=lambda device: SimulatedKernel(cuda), break_even=EVERYTHING_SMALL)
    copies = open_copies(torch.zeros(8, 4), 2, partial(CudaBackend, options=options))
    assert copies.store([1], [0]).outcome is Outcome.LANDED
    assert "copies" in {entry[1] for entry in cuda.log} and backend_of(copies).break_even == BreakEven(0, 0)


def test_a_pool_too_small_to_measure_with_is_left_to_the_engine() -> None:
    """Below 1 MiB a trial says nothing."""
    cuda = SimulatedCuda()
    backend = CudaBackend(regions_of(torch.zeros(8, 4)), options=on(cuda, kernel=lambda device: SimulatedKernel(cuda)))
    backend.open(4)
    assert backend.break_even == BreakEven(0, 0) == measured_on(backend)
    backend.close()


# -- devices ----------------------------------------------------------------------------------------------------------


def test_two_devices_in_one_process_keep_apart() -> None:
    """Each backend asks its own driver, in threads where that device is current."""
    devices = [SimulatedCuda(seed) for seed in range(2)]
    pools = [torch.arange(8, dtype=torch.int32)[:, None].repeat(1, 4) * 10**number for number in range(2)]
    both = [Copies(pool, 4, partial(CudaBackend, options=on(cuda))) for pool, cuda in zip(pools, devices, strict=True)]
    for copies in both:
        copies.launch_store([2, 3], [0, 1])
    assert all(copies.next().outcome is Outcome.LANDED for copies in both)
    for copies in both:
        copies.launch_load([0, 1], [6, 7])
    assert all(copies.next().outcome is Outcome.LANDED for copies in both)
    assert [pool[6:, 0].tolist() for pool in pools] == [[2, 3], [20, 30]]
    assert all(copies.transport.close(20) for copies in both)


def test_a_device_that_is_lost_under_a_copy_leaves_it_unproven(open_copies: Callable[..., Copies]) -> None:
    """Nobody knows whether it still writes. What comes after it is refused for good, after whatever fence."""
    cuda = SimulatedCuda()
    copies = open_copies(torch.zeros(8, 4), 4, partial(CudaBackend, options=on(cuda)))
    after = copies.transport.record_fence()
    cuda.hold(cuda.compute)
    copies.launch_store([1], [0])
    cuda.wait_given("copies")
    cuda.lose()
    lost = copies.next()
    assert lost.outcome is Outcome.UNPROVEN and "ILLEGAL_ADDRESS" in lost.error
    num_asked = cuda.num_asked_in_vain
    for launch in (copies.launch_load, copies.launch_store, partial(copies.launch_store, after=after)):
        with pytest.raises(DeviceGone, match=r"device lost: .*ILLEGAL_ADDRESS"):
            launch([1], [1])
    with pytest.raises(DeviceGone):
        copies.transport.record_fence()
    assert cuda.num_asked_in_vain == num_asked


def test_a_fence_that_a_lost_device_does_not_record_is_the_last_one_asked_for(
    open_copies: Callable[..., Copies],
) -> None:
    """The loop may be the first to notice. One question, and a refusal that is final."""
    cuda = SimulatedCuda()
    copies = open_copies(torch.zeros(8, 4), 4, partial(CudaBackend, options=on(cuda)))
    cuda.lose()
    for _ in range(3):
        with pytest.raises(DeviceGone, match="ILLEGAL_ADDRESS"):
            copies.transport.record_fence()
    assert cuda.num_asked_in_vain == 1


def test_a_store_behind_a_fence_from_before_the_loss_is_not_begun(open_copies: Callable[..., Copies]) -> None:
    """It has its fence already, so it is given to the device, which does not take it: over, with nothing in doubt."""
    cuda = SimulatedCuda()
    copies = open_copies(torch.zeros(8, 4), 4, partial(CudaBackend, options=on(cuda)))
    after = copies.transport.record_fence()
    cuda.lose()
    copies.launch_store([1], [0], after=after)
    lost = copies.next()
    assert (lost.outcome, lost.num_landed) == (Outcome.FAILED, 0)
    assert "DeviceLost" in lost.error
    with pytest.raises(DeviceGone):
        copies.launch_store([1], [0], after=after)


def test_what_is_queued_when_the_device_is_lost_is_not_begun(open_copies: Callable[..., Copies]) -> None:
    """Only the copy that was under way is in doubt; those after it ask the device nothing any more."""
    has_begun, may_copy = threading.Event(), threading.Event()

    class Waits(CudaBackend):
        def copy(self, plan: TransferPlan) -> Fence:
            has_begun.set()
            assert may_copy.wait(GUARD_S)
            return super().copy(plan)

    cuda = SimulatedCuda()
    copies = open_copies(torch.zeros(8, 4), 4, partial(Waits, options=on(cuda)))
    first, *others = (copies.launch_store([block], [block], after=PASSED) for block in range(1, 4))
    assert has_begun.wait(GUARD_S)
    cuda.lose()
    may_copy.set()
    ends = [copies.next() for _ in range(3)]
    assert [found.job_id for found in ends] == [first, *others]
    assert [found.outcome for found in ends] == [Outcome.UNPROVEN, Outcome.FAILED, Outcome.FAILED]


def test_threads_that_a_lost_device_does_not_let_go_of_end_in_silence(open_copies: Callable[..., Copies]) -> None:
    """A context that is gone can't be left either. Nothing is printed, and closing is quick."""

    class Unleavable(SimulatedCuda):
        @contextmanager
        def bound(self) -> Iterator[None]:
            with super().bound():
                yield
            if self.is_lost:
                raise DeviceLost("cuCtxPopCurrent", "CUDA_ERROR_CONTEXT_IS_DESTROYED")

    raised: list[object] = []
    cuda = Unleavable()
    copies = open_copies(torch.zeros(8, 4), 4, partial(CudaBackend, options=on(cuda)))
    assert copies.store([1], [0]).outcome is Outcome.LANDED
    cuda.lose()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", raised.append)
        assert copies.transport.close(GUARD_S)
    assert raised == []


def test_closing_after_a_loss_raises_nothing() -> None:
    """What the device does not take back goes with the process."""
    cuda = SimulatedCuda()
    backend = CudaBackend(regions_of(torch.zeros(4, 8)), options=on(cuda))
    backend.open(4)
    fence = backend.record_fence()
    cuda.lose()
    backend.close()
    del fence


def test_a_call_that_the_driver_refuses_fails_its_job_alone(open_copies: Callable[..., Copies]) -> None:
    """The stream is still there to say that nothing is being written: failed, not unproven. The next one lands."""

    class RefusesOnce(CudaBackend):
        calls: list[str]

        def copy_by_engine(self, pieces: Pieces, direction: Direction) -> Fence:
            if not hasattr(self, "calls"):
                self.calls = ["first"]
                raise OSError("not this one")
            return super().copy_by_engine(pieces, direction)

    copies = open_copies(torch.zeros(8, 4), 4, partial(RefusesOnce, options=on(SimulatedCuda())))
    assert copies.store([1], [0]).outcome is Outcome.FAILED
    assert copies.store([1], [0]).outcome is Outcome.LANDED


# -- torch alone ------------------------------------------------------------------------------------------------------


def test_without_bindings_or_driver_torch_alone_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """No bindings installed; or installed, and no driver on the machine, which is said."""

    def missing(ordinal: int) -> Any:
        raise ImportError("no cuda.bindings")

    def no_driver(ordinal: int) -> Any:
        raise CudaError("cuInit", "no driver library")

    regions = regions_of(torch.zeros(3, 2))
    monkeypatch.setattr(backend, "NvidiaDriver", missing)
    assert isinstance(best_driver(regions), TorchDriver)
    monkeypatch.setattr(backend, "NvidiaDriver", no_driver)
    with pytest.warns(RuntimeWarning, match="because torch makes them: cuInit: no driver library"):
        assert isinstance(best_driver(regions), TorchDriver)


class TorchOnCpu(TorchDriver):
    """Torch's copies, which work on CPU tensors, behind streams and events that are simulated."""

    def __init__(self, regions: Any) -> None:
        super().__init__(regions)
        self.cuda = SimulatedCuda()
        for name in [
            "bound",
            "register",
            "unregister",
            "create_stream",
            "destroy_stream",
            "current_stream",
            "stream_of",
            "on_stream",
            "create_event",
            "record_event",
            "query_event",
            "synchronize_event",
            "wait_event",
            "destroy_event",
            "event_of",
        ]:
            setattr(self, name, getattr(self.cuda, name))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), layout=layouts)
def test_torch_copies_the_same_pieces(seed: int, layout: Callable[[random.Random], Pool]) -> None:
    """Addresses are found again in the tensors that they came from."""
    rng = random.Random(seed)
    pool = layout(rng)
    num_blocks = pool.regions[0].num_blocks
    backend = CudaBackend(tuple(pool.regions), options=torch_options())
    copies = Copies(pool.regions, num_blocks, lambda regions: backend)
    blocks = rng.sample(range(1, num_blocks), rng.randint(1, num_blocks - 1))
    expected = [pool.block(block_id) for block_id in blocks]
    copies.launch_store(blocks, list(range(len(blocks))), after=PASSED)
    assert copies.next().outcome is Outcome.LANDED
    pool.memory.zero_()
    assert copies.load(list(range(len(blocks))), blocks).outcome is Outcome.LANDED
    assert [pool.block(block_id) for block_id in blocks] == expected
    assert copies.transport.close(20)


def torch_options() -> CudaOptions:
    return CudaOptions(driver=TorchOnCpu, kernel=lambda device: None)
