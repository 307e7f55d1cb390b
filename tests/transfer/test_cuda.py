"""The CUDA backend: what it asks of the device, in which order, on a fake one; and the bytes, on a real one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from copies import Copies

from aoffload.core.plan import Direction, Outcome, TransferPlan
from aoffload.transfer.backends.cuda import CudaBackend
from aoffload.transfer.fence import PASSED, Fence
from aoffload.transfer.region import KVRegion

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
SLEEP_CYCLES = 200_000_000
"""About 0.1 s of a busy compute stream: long enough for an unfenced copy to overtake what follows."""


class FakeCuda:
    """Records what `torch.cuda` is asked for. Copies happen at once, since the tensors are on the CPU."""

    def __init__(self) -> None:
        self.log: list[tuple[object, ...]] = []
        self.compute = FakeStream("compute", self)
        self.current = self.compute
        self.num_streams = 0

    def make_stream(self, device: torch.device, priority: int) -> FakeStream:
        self.num_streams += 1
        self.log.append(("stream", priority))
        return FakeStream(f"copy{self.num_streams}", self)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.log.append(("device", device.type))
        yield


class FakeStream:
    def __init__(self, name: str, cuda: FakeCuda) -> None:
        self.name = name
        self.cuda = cuda

    def wait_event(self, event: FakeEvent) -> None:
        self.cuda.log.append((self.name, "waits for", event.recorded_on))

    def synchronize(self) -> None:
        self.cuda.log.append((self.name, "synchronized"))


class FakeEvent:
    def __init__(self, blocking: bool) -> None:
        assert blocking, "the copy thread must sleep, not spin"
        self.recorded_on = ""

    def record(self, stream: FakeStream) -> None:
        assert not self.recorded_on, "an event is recorded once"
        self.recorded_on = stream.name
        stream.cuda.log.append((stream.name, "records"))

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        assert self.recorded_on


class LoggingBackend(CudaBackend):
    """Says when a copy is given to which stream."""

    log: list[tuple[object, ...]]
    cuda: FakeCuda

    def _parts(self, plan: TransferPlan) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for parts in super()._parts(plan):
            assert all(part.is_contiguous() for part in parts)
            self.cuda.log.append((self.cuda.current.name, "copies", plan.direction.value, parts[0].numel()))
            yield parts


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch.cuda, "Stream", fake.make_stream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "stream", fake.stream)
    monkeypatch.setattr(torch.cuda, "device", fake.device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: fake.current)
    # What torch does without a GPU is to refuse pinning; the fallback has a test of its own.
    monkeypatch.setattr(
        "aoffload.transfer.backends.cuda._pinned_memory",
        lambda num_blocks, block_bytes: torch.zeros((num_blocks, block_bytes), dtype=torch.uint8),
    )
    monkeypatch.setattr(LoggingBackend, "cuda", fake, raising=False)
    return fake


def test_each_copy_waits_records_and_stays_on_its_stream(cuda: FakeCuda, open_copies: Callable[..., Copies]) -> None:
    """Wait for the compute, copy, record: a store behind its own fence, a load behind the compute at launch."""
    pool = torch.arange(8, dtype=torch.int32)[:, None].repeat(1, 4)
    copies = open_copies(pool, 6, LoggingBackend)
    after = copies.transport.record_fence()
    copies.launch_store([2, 3, 5], [0, 1, 2], after=after)
    assert copies.next().outcome is Outcome.LANDED
    assert copies.load([1, 2], [6, 7]).outcome is Outcome.LANDED
    assert pool[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 3, 5]
    calls = [entry for entry in cuda.log if entry[0] not in ("stream", "device")]
    load, store = "copy1", "copy2"
    assert calls == [
        ("compute", "records"),
        (store, "waits for", "compute"),
        (store, "copies", "store", 32),
        (store, "copies", "store", 16),
        (store, "records"),
        ("compute", "records"),
        (load, "waits for", "compute"),
        (load, "copies", "load", 32),
        (load, "records"),
    ]
    assert [entry for entry in cuda.log if entry[0] == "stream"] == [("stream", 0)] * 2
    assert [entry for entry in cuda.log if entry[0] == "device"] == [("device", "cpu")] * 2


def test_regions_of_a_block_are_copied_piece_by_piece(cuda: FakeCuda, open_copies: Callable[..., Copies]) -> None:
    """Strided regions never become one strided copy, which torch would do by way of a temporary."""
    pool = torch.arange(5 * 3 * 2, dtype=torch.int16).reshape(5, 3, 2)
    wanted = pool[4].clone()
    copies = open_copies([pool[:, 0], pool[:, 2]], 3, LoggingBackend, verify=True)
    copies.store([4, 1], [2, 0])
    pool[4] = 0
    assert copies.load([2], [4]).outcome is Outcome.LANDED
    assert torch.equal(pool[4, ::2], wanted[::2])
    assert not pool[4, 1].any()


def test_foreign_fences_are_waited_for_on_the_host(cuda: FakeCuda, open_copies: Callable[..., Copies]) -> None:
    """A fence that is no CUDA event cannot be waited for by a stream."""
    waited: list[str] = []

    class HostFence:
        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            waited.append("host")

    copies = open_copies(torch.zeros(4, 2), 3, LoggingBackend)
    copies.launch_store([1], [0], after=HostFence())
    assert copies.next().outcome is Outcome.LANDED
    assert waited == ["host"]


def test_a_named_compute_stream_is_the_one_that_is_fenced(cuda: FakeCuda, open_copies: Callable[..., Copies]) -> None:
    """An engine whose forward runs on a stream of its own says which."""

    def backend(regions: tuple[KVRegion, ...]) -> CudaBackend:
        return LoggingBackend(regions, compute_stream=FakeStream("forward", cuda))  # type: ignore[arg-type]

    copies = open_copies(torch.zeros(4, 2), 3, backend)
    copies.store([1], [0])
    assert ("copy2", "waits for", "forward") in cuda.log


@pytest.mark.skipif(torch.cuda.is_available(), reason="pinning works here")
def test_memory_that_cannot_be_pinned_is_used_with_a_warning() -> None:
    """Pageable memory is slow and correct."""
    from aoffload.transfer.backends.cuda import _pinned_memory

    with pytest.warns(RuntimeWarning, match="could not be pinned"):
        memory = _pinned_memory(3, 8)
    assert memory.shape == (3, 8)


class UnfencedBackend(CudaBackend):
    """The mutant: copies start whenever the device likes."""

    def wait_for(self, direction: Direction, fences: tuple[Fence, ...]) -> None:
        return None


def device_pool() -> torch.Tensor:
    pool = torch.arange(64, dtype=torch.int32, device="cuda")[:, None].repeat(1, 1 << 16)
    torch.cuda.synchronize()
    return pool


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("verify", [False, True])
def test_gpu_round_trip(open_copies: Callable[..., Copies], verify: bool) -> None:
    """Scattered blocks of strided regions come back byte for byte, through memory that is pinned."""
    pool = torch.randint(0, 255, (32, 3, 4096), dtype=torch.uint8, device="cuda")
    wanted = pool.clone()
    copies = open_copies([pool[:, 0], pool[:, 2]], 40, verify=verify)
    assert copies.store([3, 4, 9, 31], [7, 8, 0, 39]).outcome is Outcome.LANDED
    pool[3:].zero_()
    landed = copies.load([7, 8, 0, 39], [3, 4, 9, 31])
    assert (landed.outcome, landed.num_landed) == (Outcome.LANDED, 4)
    for block_id in (3, 4, 9, 31):
        assert torch.equal(pool[block_id, ::2], wanted[block_id, ::2])
        assert not pool[block_id, 1].any()
    backend = copies.transport.backend
    assert isinstance(backend, CudaBackend)
    assert backend._host.is_pinned()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("backend", "is_right"), [(CudaBackend, True), (UnfencedBackend, False)])
def test_gpu_store_waits_for_the_forward(
    open_copies: Callable[..., Copies], backend: type[CudaBackend], is_right: bool
) -> None:
    """The store copies what the forward wrote before the fence; the mutant without fences copies what was there."""
    pool = device_pool()
    copies = open_copies(pool, 8, backend)
    torch.cuda._sleep(SLEEP_CYCLES)
    pool[5] = 99
    copies.launch_store([5], [0], after=copies.transport.record_fence())
    assert copies.next().outcome is Outcome.LANDED
    torch.cuda.synchronize()
    copies.launch_load([0], [6])
    assert copies.next().outcome is Outcome.LANDED
    torch.cuda.synchronize()
    assert bool((pool[6] == 99).all()) is is_right


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("backend", "is_right"), [(CudaBackend, True), (UnfencedBackend, False)])
def test_gpu_load_waits_for_the_reader(
    open_copies: Callable[..., Copies], backend: type[CudaBackend], is_right: bool
) -> None:
    """A load leaves its destination alone while the forward reads it; the mutant overwrites it too early."""
    pool = device_pool()
    copies = open_copies(pool, 8, backend)
    copies.launch_store([7], [0], after=PASSED)
    assert copies.next().outcome is Outcome.LANDED
    torch.cuda._sleep(SLEEP_CYCLES)
    seen = pool[5].clone()
    copies.launch_load([0], [5])
    assert copies.next().outcome is Outcome.LANDED
    torch.cuda.synchronize()
    assert bool((seen == 5).all()) is is_right
    assert bool((pool[5] == 7).all())


@pytest.mark.gpu
@needs_gpu
def test_gpu_a_load_does_not_wait_behind_a_held_store(open_copies: Callable[..., Copies]) -> None:
    """Directions have a stream and a thread each: a store behind a long forward holds nothing else up."""
    pool = device_pool()
    copies = open_copies(pool, 8)
    assert copies.store([1], [0]).outcome is Outcome.LANDED
    forward = torch.cuda.Stream()
    with torch.cuda.stream(forward):
        torch.cuda._sleep(SLEEP_CYCLES)
        held = copies.launch_store([2], [1], after=forward.record_event(torch.cuda.Event(blocking=True)))
    loaded = copies.launch_load([0], [3])
    assert [copies.next().job_id, copies.next().job_id] == [loaded, held]
