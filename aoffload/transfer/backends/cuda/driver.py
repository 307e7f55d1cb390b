"""What is asked of a CUDA device: one small protocol, so that a test can put a device of its own in its place."""

from __future__ import annotations

import enum
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from ....errors import AoffloadError
from ...fence import Fence
from ..base import LostDevice

__all__ = ["LOST_CODES", "CudaDriver", "CudaError", "DeviceLost", "Handle", "Pieces", "SourceOrder", "StreamCaptured"]

Handle: TypeAlias = Any
"""What a driver calls a stream or an event. Only the driver that made it looks inside."""


LOST_CODES = frozenset(
    {
        4,  # deinitialized: the process is about to end
        46,  # device unavailable
        100,  # no device
        101,  # invalid device
        201,  # invalid context: somebody has reset the device
        214,  # uncorrectable memory error
        220,  # uncorrectable NVLink error
        226,  # an error that was contained in this context
        700,  # illegal address
        702,  # launch timeout
        709,  # context destroyed
        710,  # assertion in a kernel
        714,  # hardware stack error
        715,  # illegal instruction
        716,  # misaligned address
        717,  # invalid address space
        718,  # invalid program counter
        719,  # launch failed
        721,  # tensor memory leak
        806,  # the server that shares the device (MPS) answers no more
        810,  # that server has ended this process's use of the device
        911,  # external device
        999,  # unknown
    }
)
"""What a context answers to every call from then on; the numbers are the same in the driver and in the runtime."""


class CudaError(AoffloadError):
    """A call that the driver refused: which call, and by what name."""

    def __init__(self, call: str, name: str) -> None:
        super().__init__(f"{call}: {name}")
        self.call = call
        self.name = name


class DeviceLost(CudaError, LostDevice):  # noqa: N818
    """The device, or its context, answers no call any more: an illegal access, an uncorrectable error, a removal.

    What had been started on it may still write, as far as anybody knows.
    """


class StreamCaptured(CudaError):  # noqa: N818
    """The caller's stream is being captured into a graph, where a fence would mean a point in the graph, not in time.

    Nothing was recorded, and the capture goes on. Commit, load and wait for fences before or after it.
    """

    def __init__(self, call: str) -> None:
        super().__init__(call, "the stream is being captured into a graph; commit and load outside of the capture")


class SourceOrder(enum.Enum):
    """When a copy may read its source. Its destination is always written in stream order."""

    STREAM = "stream"
    """Behind everything the stream was given: for what the compute writes."""
    ANY = "any"
    """From the moment of the call on: for memory that stays as it is until the copy is over."""


@attrs.frozen(eq=False)
class Pieces:
    """What one batch copies, piece by piece: `uint64 [num_pieces]` each, addresses and bytes.

    No two pieces may depend on each other: within a batch there is no order.
    """

    sources: NDArray[np.uint64]
    destinations: NDArray[np.uint64]
    sizes: NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def num_bytes(self) -> int:
        return int(self.sizes.sum())

    def where(self, chosen: NDArray[np.bool_]) -> Pieces:
        """Those that a mask `[num_pieces]` names."""
        return Pieces(self.sources[chosen], self.destinations[chosen], self.sizes[chosen])


class CudaDriver(Protocol):
    """One device. Every call may raise `CudaError`, and `DeviceLost` when there will be no other answer.

    A thread may make them only inside of `bound()`; apart from that, any thread may make any of them.
    """

    @property
    def maps_host_memory(self) -> bool:
        """Whether a kernel may use addresses of registered host memory as they are."""
        ...

    def bound(self) -> AbstractContextManager[object]:
        """The device is current in this thread until it is left; the one before is then current again.

        A graph that the engine captures meanwhile, in whatever thread, is not harmed by what is called inside.
        """
        ...

    def register(self, address: int, num_bytes: int) -> None:
        """Pin host memory where it is, so that the device can copy from and to it on its own."""
        ...

    def unregister(self, address: int) -> None:
        """Undo `register` of what begins at `address`."""
        ...

    def learn(self, memory: NDArray[np.uint8]) -> None:
        """Host memory that copies will name, pinned or not: for a driver that has to know more than an address."""
        ...

    def create_stream(self) -> Handle:
        """A stream of the lowest priority, that nobody else has, and that waits for no other by itself."""
        ...

    def destroy_stream(self, stream: Handle) -> None: ...

    def current_stream(self) -> Handle:
        """The stream that the caller's compute goes to. `StreamCaptured` while a graph is made of it."""
        ...

    def stream_of(self, stream: torch.cuda.Stream) -> Handle:
        """What this driver calls a stream of torch's. `StreamCaptured` while a graph is made of it."""
        ...

    def on_stream(self, stream: Handle) -> AbstractContextManager[object]:
        """What torch is asked to do goes to `stream` until it is left."""
        ...

    def create_event(self) -> Handle:
        """An event whose `synchronize_event` sleeps instead of spinning."""
        ...

    def record_event(self, event: Handle, stream: Handle) -> None: ...
    def query_event(self, event: Handle) -> bool: ...

    def synchronize_event(self, event: Handle) -> None:
        """Block this thread until the event has passed, without keeping the interpreter's lock."""
        ...

    def wait_event(self, stream: Handle, event: Handle) -> None:
        """What `stream` is given from here on starts only when `event`, as it is recorded now, has passed."""
        ...

    def destroy_event(self, event: Handle) -> None: ...

    def event_of(self, fence: Fence) -> Handle | None:
        """The event inside a fence that somebody else recorded; None where a stream cannot wait for it."""
        ...

    def copy_batch(self, pieces: Pieces, order: SourceOrder, stream: Handle) -> None:
        """Start copying between pinned memory and the device. The arrays may be used again after the call."""
        ...

    def copy_each(self, pieces: Pieces, stream: Handle) -> None:
        """The same one by one, in stream order: for memory that is not pinned."""
        ...
