"""The copy backend: the part of a local transport that differs between a CPU and a GPU."""

from __future__ import annotations

import mmap
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ..._common.tiers import DEVICE, HOST
from ..._kernel.plans import TransferPlan
from ..._kernel.states import Direction
from ...errors import AoffloadError, ConfigError
from ..fences import Fence, RegionFences
from ..region import KVRegion


class LostDevice(AoffloadError):  # noqa: N818
    """Base class of backend errors after which every further call fails, too."""


class CopyStopped(Exception):  # noqa: N818 - a result that has to leave several calls, not an error of the caller
    """A copy certainly ended early: nothing writes any more, and the leading `num_copied` blocks arrived."""

    def __init__(self, num_copied: int) -> None:
        super().__init__(f"stopped after {num_copied} blocks")
        self.num_copied = num_copied


class CopyBackend(Protocol):
    """Moves bytes between the regions of one device and host memory that the backend owns.

    The event loop's thread calls `record_fence`. Any thread calls `open` before all other methods, and `close` after
    them. For each direction, a submitting thread calls `wait_for` and `copy`; it and a completing thread call the rest,
    possibly at the same time. Any call may raise a `LostDevice`; after that, the device is not used any more.
    """

    @property
    def num_device_blocks(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...

    def open(self, num_host_blocks: int) -> None:
        """Allocate the host memory. `ConfigError` with the size if there is not enough."""
        ...

    def close(self) -> None:
        """Release the host memory; called only when no copy can touch it any more."""
        ...

    def record_fence(self) -> Fence:
        """A fence after all compute on the device so far."""
        ...

    def thread_scope(self, direction: Direction) -> AbstractContextManager[object]:
        """The context in which a copy thread runs for as long as it lives."""
        ...

    def wait_for(self, direction: Direction, fences: tuple[Fence, ...]) -> None:
        """Make later copies of `direction` start only when `fences` have passed."""
        ...

    def copy(self, plan: TransferPlan) -> Fence:
        """Copy, or start to; the fence passes when every block is at its destination.

        The ids were checked. `CopyStopped` tells how many blocks arrived; after any other exception, this is unknown.
        """
        ...

    def settle(self, direction: Direction) -> None:
        """Wait until no copy started in `direction` is still writing; raise if that cannot be known."""
        ...

    def device_block(self, block_id: int) -> NDArray[np.uint8]:
        """A copy of the bytes of a device block, read from where compute reads them."""
        ...

    def write_device_block(self, block_id: int, block: NDArray[np.uint8]) -> None:
        """Overwrite a device block, to corrupt data on purpose."""
        ...

    def after_copy(self, plan: TransferPlan) -> None:
        """Called when the blocks of `plan` are at their destination, before they are verified."""
        ...

    def after_verify(self, plan: TransferPlan) -> None:
        """Called after verification (also if it is off), before the completion is delivered."""
        ...


@runtime_checkable
class HasHostRows(Protocol):
    """A backend whose host memory others may read and write, such as a disk. A row holds the bytes of a block as
    `device_block` returns them."""

    @property
    def host_rows(self) -> NDArray[np.uint8]:
        """`uint8 [num_host_blocks, block_bytes]`, contiguous, once the backend is open."""
        ...


class RegionBackend:
    """Base class of backends. Host memory is laid out block by block, with the regions of a block side by side.

    `after_copy` and `after_verify` do nothing here; a subclass may corrupt data there to test verification.
    """

    def __init__(self, regions: tuple[KVRegion, ...]) -> None:
        self.regions = regions
        self.num_device_blocks = regions[0].num_blocks
        self.block_bytes = sum(region.block_bytes for region in regions)
        self._watched: dict[int, RegionFences] = {}
        self.shared_path = ""
        """The path of the host memory that this backend shares with others (`SharedMemory`). Empty: it allocates its
        own. Set before `open`."""

    @property
    def num_regions(self) -> int:
        return len(self.regions)

    def watch(self, job_id: int, fences: RegionFences) -> None:
        """Copy the load `job_id` region by region, each with its own fence. Call it before the launch. When the job is
        over, the caller calls `fences.end` and `forget`."""
        self._watched[job_id] = fences

    def forget(self, job_id: int) -> None:
        """A watched job is over, or was never launched."""
        self._watched.pop(job_id, None)

    def thread_scope(self, direction: Direction) -> AbstractContextManager[object]:
        return nullcontext()

    def after_copy(self, plan: TransferPlan) -> None:
        return None

    def after_verify(self, plan: TransferPlan) -> None:
        return None


def device_ids(plan: TransferPlan) -> NDArray[np.int64]:
    """The device blocks of a plan, in its order."""
    return np.array(plan.source_ids if plan.source is DEVICE else plan.destination_ids, dtype=np.int64)


def host_ids(plan: TransferPlan) -> NDArray[np.int64]:
    """The host blocks of a plan, in its order."""
    return np.array(plan.source_ids if plan.source is HOST else plan.destination_ids, dtype=np.int64)


def anonymous_memory(num_blocks: int, block_bytes: int, *advice: str) -> NDArray[np.uint8]:
    """Page-aligned anonymous memory `uint8 [num_blocks, block_bytes]`. The system frees it when the process is killed.

    The mapping is private, because a shared one counts against `/dev/shm` limits, and forked children would write to
    it. It uses huge pages where the system has them: a killed process ends only when its memory is unmapped, which took
    1.1 s for 3 GiB of small pages and 0.02 s for huge ones. `advice` names more `madvise` flags of `mmap`.
    """
    size = host_size(num_blocks, block_bytes)
    try:
        memory = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, MemoryError) as error:
        problem = f"the system refuses {size / 2**30:.1f} GiB of host memory ({error})"
        raise ConfigError("num_host_blocks", problem) from None
    for name in ("MADV_HUGEPAGE", *advice):
        with suppress(AttributeError, OSError):  # another system, or a kernel without it: only slower
            memory.madvise(getattr(mmap, name))
    return np.frombuffer(memory, dtype=np.uint8, count=size).reshape(num_blocks, block_bytes)


def host_size(num_blocks: int, block_bytes: int) -> int:
    """Bytes of a host pool. `ConfigError` if the size is impossible."""
    if num_blocks < 0 or num_blocks * block_bytes >= 2**60:
        raise ConfigError("num_host_blocks", f"{num_blocks} blocks of {block_bytes} bytes is not a possible size")
    return num_blocks * block_bytes
