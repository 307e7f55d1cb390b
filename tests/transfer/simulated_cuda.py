"""A CUDA device in ordinary memory: its streams run in an order of chance, as early and as late as the rules allow."""

from __future__ import annotations

import ctypes
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import numpy as np
from copies import GUARD_S
from numpy.typing import NDArray

from aoffload._transfer.backends.cuda.backend import CudaOptions
from aoffload._transfer.backends.cuda.driver import (
    MAX_BATCH,
    CudaError,
    DeviceLost,
    Handle,
    Pieces,
    SourceOrder,
    StreamCaptured,
)
from aoffload._transfer.backends.cuda.events import CudaFence
from aoffload._transfer.fences import Fence

PAUSE_STEPS = 12

Step = Callable[[], bool]
"""Work at the head of a stream: does it, or says that it cannot yet."""


@attrs.define(eq=False)
class Recorded:
    """What one `record_event` captured. A stream waits for this, whatever becomes of the event."""

    stream: str
    has_passed: bool = False


@attrs.define(eq=False)
class Event:
    number: int
    recorded: Recorded | None = None
    is_destroyed: bool = False


@attrs.define(eq=False)
class Stream:
    name: str
    steps: deque[Step] = attrs.field(factory=deque)
    is_captured: bool = False
    """A graph is being made of what it is given."""

    @property
    def cuda_stream(self) -> int:
        return id(self)


class SimulatedCuda:
    """Implements `CudaDriver`. Work is done when somebody asks or waits, one step of a stream of chance after another.

    A copy whose source may be read at any time reads half of its pieces when it is given, the others when its turn
    comes. Calls from a thread in which the device is not current fail, and so does what a real driver would not take.
    """

    def __init__(self, seed: int = 0, *, pinnable_bytes: int = 2**40) -> None:
        self.random = random.Random(seed)
        self.log: list[tuple[object, ...]] = []
        self.compute = Stream("compute")
        self.current = self.compute
        self.streams = [self.compute]
        self.registered: dict[int, int] = {}
        self.num_events = 0
        self.is_lost = False
        self.num_asked_in_vain = 0
        self.most_batches = 0
        """Most batches that any stream has had at once."""
        self._num_batches = Counter[str]()
        self.maps_host_memory = True
        self.pci_bus_id = ""
        self._pinnable_bytes = pinnable_bytes
        self._lock = threading.Condition()  # told of whatever is given, by those who wait
        self._local = threading.local()

    # -- who asks -------------------------------------------------------------------------------------------------

    @contextmanager
    def bound(self) -> Iterator[None]:
        self._local.depth = getattr(self._local, "depth", 0) + 1
        try:
            yield
        finally:
            self._local.depth -= 1

    @contextmanager
    def _asked(self, call: str) -> Iterator[None]:
        assert getattr(self._local, "depth", 0), f"{call} in a thread in which no device is current"
        with self._lock:
            if self.is_lost:
                self.num_asked_in_vain += 1
                raise DeviceLost(call, "CUDA_ERROR_ILLEGAL_ADDRESS")
            yield

    def lose(self) -> None:
        """Answer no call from now on, nor those who wait."""
        with self._lock:
            self.is_lost = True
            self._lock.notify_all()

    def wait_given(self, what: str, number: int = 1) -> None:
        """Block until as many calls of that kind were made, by the words of the log."""
        with self._lock:
            was_logged = self._lock.wait_for(lambda: sum(entry[1] == what for entry in self.log) >= number, GUARD_S)
            assert was_logged, f"nobody {what}"

    # -- memory ---------------------------------------------------------------------------------------------------

    def register(self, address: int, num_bytes: int) -> None:
        with self._asked("cuMemHostRegister"):
            if sum(self.registered.values()) + num_bytes > self._pinnable_bytes:
                raise CudaError("cuMemHostRegister", "CUDA_ERROR_OUT_OF_MEMORY")
            self.registered[address] = num_bytes

    def unregister(self, address: int) -> None:
        with self._asked("cuMemHostUnregister"):
            del self.registered[address]

    def learn(self, memory: NDArray[np.uint8]) -> None:
        self.log.append(("learns", memory.nbytes))

    # -- streams and events ---------------------------------------------------------------------------------------

    def create_stream(self) -> Stream:
        with self._asked("cuStreamCreateWithPriority"):
            stream = Stream(f"copy{len(self.streams)}")
            self.streams.append(stream)
            return stream

    def destroy_stream(self, stream: Stream) -> None:
        with self._asked("cuStreamDestroy"):
            self.streams.remove(stream)

    def current_stream(self) -> Stream:
        return self.stream_of(self.current)

    def stream_of(self, stream: Any) -> Stream:
        assert isinstance(stream, Stream)
        if stream.is_captured:
            raise StreamCaptured("cuStreamIsCapturing")
        return stream

    @contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        self._local.stream = stream
        yield
        self._local.stream = None

    def create_event(self) -> Event:
        with self._asked("cuEventCreate"):
            self.num_events += 1
            return Event(self.num_events)

    def record_event(self, event: Event, stream: Stream) -> None:
        with self._asked("cuEventRecord"):
            assert not event.is_destroyed
            assert not stream.is_captured, "an event in a graph"
            recorded = Recorded(stream.name)
            event.recorded = recorded
            self.log.append((stream.name, "records", event.number))
            self._give(stream, lambda: self._pass(recorded))

    def query_event(self, event: Event) -> bool:
        with self._asked("cuEventQuery"):
            self._run(self.random.randrange(3))
            return self._recorded(event).has_passed

    def synchronize_event(self, event: Event) -> None:
        with self._asked("cuEventSynchronize"):
            recorded = self._recorded(event)
            while not recorded.has_passed:
                # What can't go on now may when somebody else has given the device more to do.
                assert self._run(1) or self._lock.wait(GUARD_S), "the streams wait for each other"
                if self.is_lost:
                    raise DeviceLost("cuEventSynchronize", "CUDA_ERROR_ILLEGAL_ADDRESS")

    def wait_event(self, stream: Stream, event: Event) -> None:
        with self._asked("cuStreamWaitEvent"):
            recorded = self._recorded(event)
            self.log.append((stream.name, "waits for", recorded.stream))
            self._give(stream, lambda: recorded.has_passed)

    def destroy_event(self, event: Event) -> None:
        with self._asked("cuEventDestroy"):
            assert not event.is_destroyed
            event.is_destroyed = True

    def event_of(self, fence: Fence) -> Handle | None:
        return fence.event if isinstance(fence, CudaFence) else None

    # -- work -----------------------------------------------------------------------------------------------------

    def compute_on(self, stream: Stream, work: Callable[[], object]) -> None:
        """What a forward gives to a stream."""
        with self._lock:
            self._give(stream, lambda: (work(), True)[1])

    def pause(self, stream: Stream) -> None:
        """A forward on `stream` that takes a while: others have done a lot before its turn is over."""
        with self._lock:
            stream.steps.extend([lambda: True] * PAUSE_STEPS)

    def hold(self, stream: Stream) -> Callable[[], None]:
        """A forward on `stream` that goes on until the function that this returns is called."""
        is_over: list[bool] = []

        def release() -> None:
            with self._lock:
                is_over.append(True)
                self._lock.notify_all()

        with self._lock:
            self._give(stream, lambda: bool(is_over))
        return release

    def copy_batch(self, pieces: Pieces, order: SourceOrder, stream: Stream) -> None:
        with self._asked("cuMemcpyBatchAsync"):
            assert 0 < len(pieces) <= MAX_BATCH
            self._check(pieces)
            self.log.append((stream.name, "copies", order, len(pieces), pieces.num_bytes))
            columns = zip(pieces.sources.tolist(), pieces.destinations.tolist(), pieces.sizes.tolist(), strict=True)
            copies = [self._copied(*piece, order) for piece in columns]
            self.random.shuffle(copies)
            self._num_batches[stream.name] += 1
            self.most_batches = max(self.most_batches, self._num_batches[stream.name])
            self._give(stream, lambda: self._run_batch(stream, copies))

    def _run_batch(self, stream: Stream, copies: list[Step]) -> bool:
        self._num_batches[stream.name] -= 1
        return all(copy() for copy in copies)

    def copy_each(self, pieces: Pieces, stream: Stream) -> None:
        with self._asked("cuMemcpyAsync"):
            self.log.append((stream.name, "copies one by one", len(pieces), pieces.num_bytes))
            for piece in zip(pieces.sources.tolist(), pieces.destinations.tolist(), pieces.sizes.tolist(), strict=True):
                self._give(stream, self._copied(*piece, SourceOrder.STREAM))

    def kernel_copy(self, pieces: Pieces) -> None:
        """What a kernel on the stream that is current in this thread does: reads and writes when its turn comes."""
        with self._asked("cuLaunchKernel"):
            stream = self._local.stream
            self.log.append((stream.name, "kernel copies", len(pieces), pieces.num_bytes))
            for piece in zip(pieces.sources.tolist(), pieces.destinations.tolist(), pieces.sizes.tolist(), strict=True):
                self._give(stream, self._copied(*piece, SourceOrder.STREAM))

    def finish(self) -> None:
        """Run everything that was given."""
        with self._lock:
            while self._run(1):
                pass
            assert not any(stream.steps for stream in self.streams)

    def _copied(self, source: int, destination: int, num_bytes: int, order: SourceOrder) -> Step:
        early = order is SourceOrder.ANY and self.random.random() < 0.5
        taken = ctypes.string_at(source, num_bytes) if early else b""

        def copy() -> bool:
            ctypes.memmove(destination, taken or ctypes.string_at(source, num_bytes), num_bytes)
            return True

        return copy

    def _check(self, pieces: Pieces) -> None:
        """One side of each piece lies in one registration, and no two pieces write to the same bytes."""
        starts = np.sort(pieces.destinations)
        ends = starts + pieces.sizes[np.argsort(pieces.destinations)]
        assert (ends[:-1] <= starts[1:]).all(), "pieces of a batch overlap"
        for source, destination, size in zip(pieces.sources, pieces.destinations, pieces.sizes, strict=True):
            assert size > 0
            assert self._is_pinned(int(source), int(size)) != self._is_pinned(int(destination), int(size))

    def _is_pinned(self, address: int, num_bytes: int) -> bool:
        inside = ((start, start + size) for start, size in self.registered.items())
        return any(start <= address and address + num_bytes <= end for start, end in inside)

    def _give(self, stream: Stream, step: Step) -> None:
        stream.steps.append(step)
        self._run(self.random.randrange(2))
        self._lock.notify_all()

    def _run(self, num_steps: int) -> bool:
        """Whether as many steps as asked for could be done."""
        for _ in range(num_steps):
            ready = [stream for stream in self.streams if stream.steps]
            self.random.shuffle(ready)
            for stream in ready:
                if stream.steps[0]():
                    stream.steps.popleft()
                    break
            else:
                return False
        return True

    def _recorded(self, event: Event) -> Recorded:
        assert not event.is_destroyed
        assert event.recorded is not None, "an event that was never recorded"
        return event.recorded

    @staticmethod
    def _pass(recorded: Recorded) -> bool:
        recorded.has_passed = True
        return True


class SimulatedKernel:
    """A `CopyKernel` on a simulated device."""

    def __init__(self, cuda: SimulatedCuda) -> None:
        self._cuda = cuda

    def copy(self, pieces: Pieces, alignment: int, record: Callable[[], Fence]) -> None:
        self._cuda.kernel_copy(pieces)


def on(cuda: SimulatedCuda, **options: Any) -> CudaOptions:
    """Options of a backend that works on `cuda`, without a kernel if none is given."""
    options.setdefault("kernel", lambda device: None)
    return CudaOptions(driver=lambda regions: cuda, **options)
