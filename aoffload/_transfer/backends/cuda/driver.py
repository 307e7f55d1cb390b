"""The protocol of a CUDA device, small enough to be replaced by a simulated device in tests."""

from __future__ import annotations

import enum
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from ....errors import AoffloadError
from ...fences import Fence
from ..base import LostDevice

Handle: TypeAlias = Any
"""A stream or an event of a driver. Only the driver that made it interprets it."""


LOST_CODES = frozenset(
    {
        4,  # deinitialized: the process is about to end
        46,  # device unavailable
        100,  # no device
        101,  # invalid device
        201,  # invalid context: the device was reset
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
        806,  # the server that shares the device (MPS) does not answer
        810,  # that server has ended this process's use of the device
        911,  # external device
        999,  # unknown
    }
)
"""Errors that a context returns for every later call. Driver and runtime API use the same numbers."""


IMPLICIT_CAPTURE = 906
"""The default stream was used while a blocking stream, with which it synchronizes both ways, is being captured."""

MAX_BATCH = 4096
"""Maximum pieces of a batch. Drivers take more, but 580.159.04 is reported to crash the process on fifty thousand. The
cost of more calls is small against the half microsecond per piece."""


class CudaError(AoffloadError):
    """A call that the driver refused: the call, and the name of the error."""

    def __init__(self, call: str, name: str) -> None:
        super().__init__(f"{call}: {name}")
        self.call = call
        self.name = name


class DeviceLost(CudaError, LostDevice):  # noqa: N818
    """The device, or its context, fails every further call: an illegal access, an uncorrectable error, a removal.

    Copies that were started on it may still be writing.
    """


class StreamCaptured(CudaError):  # noqa: N818
    """The caller's stream is being captured into a graph, so a fence would be a point in the graph, and no point in
    time.

    Nothing was recorded, and the capture goes on. Commit, load and wait for fences before or after the capture.
    """

    def __init__(self, call: str) -> None:
        super().__init__(call, "the stream is being captured into a graph; commit and load outside of the capture")


def refusal(call: str, status: int, name: str) -> CudaError:
    """The error for a status that is not success."""
    if status == IMPLICIT_CAPTURE:
        return StreamCaptured(call)
    return (DeviceLost if status in LOST_CODES else CudaError)(call, name)


class SourceOrder(enum.Enum):
    """When a copy may read its source. Its destination is always written in stream order."""

    STREAM = "stream"
    """After all earlier work on the stream: for memory that compute writes."""
    ANY = "any"
    """From the call on: for memory that does not change until the copy is over."""


@attrs.frozen(eq=False)
class Pieces:
    """The pieces of one batch: addresses and bytes, `uint64 [num_pieces]` each.

    Pieces must not depend on each other: within a batch there is no order.
    """

    sources: NDArray[np.uint64]
    destinations: NDArray[np.uint64]
    sizes: NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def num_bytes(self) -> int:
        return int(self.sizes.sum())

    def where(self, chosen: NDArray[np.bool_] | slice) -> Pieces:
        """The pieces that a mask `[num_pieces]` or a slice selects."""
        return Pieces(self.sources[chosen], self.destinations[chosen], self.sizes[chosen])


class CudaDriver(Protocol):
    """One device. Every call may raise `CudaError`, and `DeviceLost` if all further calls will fail, too.

    Any thread may make any call, but only inside `bound()`.
    """

    @property
    def maps_host_memory(self) -> bool:
        """Whether a kernel may use host addresses of page-locked memory directly."""
        ...

    @property
    def pci_bus_id(self) -> str:
        """The device's place on the PCI bus, such as `0000:1b:00.0`; empty if it is unknown."""
        ...

    def bound(self) -> AbstractContextManager[object]:
        """Make the device current in this thread; the end of the block restores the previous one.

        Calls inside do not disturb a graph that the engine captures meanwhile, in any thread.
        """
        ...

    def register(self, address: int, num_bytes: int) -> None:
        """Page-lock existing host memory, so that the device can copy from and to it directly."""
        ...

    def unregister(self, address: int) -> None:
        """Undo `register` of the memory that begins at `address`."""
        ...

    def learn(self, memory: NDArray[np.uint8]) -> None:
        """Announce host memory that copies will use, page-locked or not: some drivers need more than an address."""
        ...

    def create_stream(self) -> Handle:
        """A stream of the lowest priority, not shared, and without implicit synchronization with other streams."""
        ...

    def destroy_stream(self, stream: Handle) -> None: ...

    def current_stream(self) -> Handle:
        """The current stream of the calling thread. `StreamCaptured` while it is captured into a graph."""
        ...

    def stream_of(self, stream: torch.cuda.Stream) -> Handle:
        """The driver's handle of a torch stream. `StreamCaptured` while it is captured into a graph."""
        ...

    def on_stream(self, stream: Handle) -> AbstractContextManager[object]:
        """Make `stream` torch's current stream inside the block."""
        ...

    def create_event(self) -> Handle:
        """An event whose `synchronize_event` sleeps instead of spinning."""
        ...

    def record_event(self, event: Handle, stream: Handle) -> None: ...
    def query_event(self, event: Handle) -> bool: ...

    def synchronize_event(self, event: Handle) -> None:
        """Block this thread until the event has passed, without holding the GIL."""
        ...

    def wait_event(self, stream: Handle, event: Handle) -> None:
        """Make later work on `stream` start only when `event`, as recorded now, has passed."""
        ...

    def destroy_event(self, event: Handle) -> None: ...

    def event_of(self, fence: Fence) -> Handle | None:
        """The event inside any `fence`; None if a stream of this driver cannot wait for it."""
        ...

    def copy_batch(self, pieces: Pieces, order: SourceOrder, stream: Handle) -> None:
        """Start at most `MAX_BATCH` copies between page-locked memory and the device, in one call if the driver can.

        The arrays may be reused after the call."""
        ...

    def copy_each(self, pieces: Pieces, stream: Handle) -> None:
        """Start any number of copies, one by one and in stream order. The memory may be pageable."""
        ...
