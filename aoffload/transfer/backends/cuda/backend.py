"""The backend of one GPU: chooses the pieces of a plan, how they are copied, and behind which fences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from ....arguments import check_callable, check_has, check_int, check_type
from ....core.hops import Direction
from ....core.plan import TransferPlan
from ....errors import ConfigError, TransferRefused
from ...fence import Fence
from ...region import KVRegion, byte_rows
from ...region_fences import RegionFences
from ...transport import PinProgress
from ..base import RegionBackend, anonymous_memory, device_ids, host_ids
from .driver import CudaDriver, CudaError, Handle, Pieces, SourceOrder
from .events import EventPool
from .kernel import CopyKernel, triton_kernel
from .layout import Layout, Scratch
from .method import BreakEven
from .nvidia import NvidiaDriver
from .page_locked import MAX_PIECE_BYTES, HostMemory, page_locked_memory
from .plain import TorchDriver
from .trials import measured_on
from .waiting import BlockingWait, WaitPolicy

__all__ = ["CudaBackend", "CudaOptions", "best_driver"]

SOURCE_ORDERS = {
    # The live KV cache: a copy must see all earlier writes and no later ones.
    Direction.STORE: SourceOrder.STREAM,
    # Host blocks are published when they are complete, and leased until the job is over.
    Direction.LOAD: SourceOrder.ANY,
}


def best_driver(regions: tuple[KVRegion, ...]) -> CudaDriver:
    """A driver over NVIDIA's bindings if they are installed and find the device; otherwise over torch alone."""
    try:
        return NvidiaDriver(regions[0].device.index)
    except (ImportError, CudaError):
        return TorchDriver(regions)


@attrs.frozen(kw_only=True)
class CudaOptions:
    """The options of a `CudaBackend`."""

    driver: Callable[[tuple[KVRegion, ...]], CudaDriver] = best_driver
    kernel: Callable[[torch.device], CopyKernel | None] = triton_kernel
    """Makes the kernel that copies small pieces, or returns None."""
    break_even: BreakEven | None = None
    """Which pieces are small. None: measured when the backend is opened, in a few hundred milliseconds."""
    waiting: WaitPolicy = attrs.field(factory=BlockingWait)
    """How the copy threads wait for the device."""
    progress: Callable[[PinProgress], None] = lambda _: None
    """Called after each page-locked piece of host memory, in the thread that opens. The log has these pieces anyway."""
    max_piece_bytes: int = MAX_PIECE_BYTES
    """Maximum bytes of a page-locked piece of host memory."""

    def __attrs_post_init__(self) -> None:
        for name in ("driver", "kernel", "progress"):
            check_callable(name, getattr(self, name), ConfigError)
        if self.break_even is not None:
            check_type("break_even", self.break_even, BreakEven, ConfigError)
        check_has("waiting", self.waiting, "WaitPolicy", "wait", ConfigError)
        check_int("max_piece_bytes", self.max_piece_bytes, 1, error=ConfigError)


@attrs.define(eq=False)
class Lane:
    """The stream of one direction, and arrays that only its thread uses."""

    stream: Handle
    scratch: Scratch = attrs.field(factory=Scratch)


class CudaBackend(RegionBackend):
    """One stream of the lowest priority per direction; each copy waits, on the device, for the fences it was given.

    Compute is assumed to run on `compute_stream`, by default on the current stream of the thread that records a fence.
    An engine whose forward runs on another stream than the current one of its event loop has to name it.

    Needs no `record_stream`: the backend keeps the tensors alive, and a block is reused only after every copy of it has
    ended.
    """

    def __init__(
        self,
        regions: tuple[KVRegion, ...],
        compute_stream: torch.cuda.Stream | None = None,
        options: CudaOptions | None = None,
    ) -> None:
        if options is not None:
            check_type("options", options, CudaOptions, ConfigError)
        super().__init__(regions)
        self.device = regions[0].device
        self.options = CudaOptions() if options is None else options
        self.driver = self.options.driver(regions)
        self.break_even = self.options.break_even or BreakEven(0, 0)
        self.host = HostMemory(anonymous_memory(0, self.block_bytes))
        self._compute_stream = compute_stream
        self._rows = [byte_rows(region) for region in regions]
        self._events = EventPool(self.driver, self.options.waiting)
        self._kernel: CopyKernel | None = None
        self._lanes: dict[Direction, Lane] = {}
        self._watched: dict[int, RegionFences] = {}
        self._listeners = [self.options.progress]

    def __repr__(self) -> str:
        memory = "pinned" if self.host.is_page_locked else "pageable"
        return f"<CudaBackend {self.device} {self.driver!r} host={self.host.rows.nbytes} {memory}>"

    @property
    def has_kernel(self) -> bool:
        """Whether small pieces can be copied by a kernel: one is installed, and the device maps the host memory."""
        return self._kernel is not None

    @property
    def host_rows(self) -> NDArray[np.uint8]:
        return self.host.rows

    # -- opening and closing --------------------------------------------------------------------------------------

    def report_pinning(self, hear: Callable[[PinProgress], None]) -> None:
        self._listeners.append(hear)

    def _hear(self, progress: PinProgress) -> None:
        for hear in self._listeners:
            hear(progress)

    def open(self, num_host_blocks: int) -> None:
        with self.driver.bound():
            self._lanes = {direction: Lane(self.driver.create_stream()) for direction in Direction}
        self.host = page_locked_memory(
            self.driver, num_host_blocks, self.block_bytes, self._hear, self.options.max_piece_bytes
        )
        self.driver.learn(self.host.rows)
        self._blocks = Layout.of_block(self.regions, self.host.address, self.host.borders)
        self._each_region = Layout.of_each_region(self.regions, self.host.address, self.host.borders)
        if self.host.is_page_locked and self.driver.maps_host_memory:  # otherwise no kernel can read it
            self._choose_method()
        else:
            self.break_even = BreakEven(0, 0)

    def _choose_method(self) -> None:
        self._kernel = self.options.kernel(self.device)
        if self._kernel is None:
            self.break_even = BreakEven(0, 0)
        elif self.options.break_even is None:
            with self.driver.bound():
                self.break_even = measured_on(self)

    def close(self) -> None:
        host, self.host = self.host, HostMemory(anonymous_memory(0, self.block_bytes))
        lanes, self._lanes = self._lanes, {}
        # A lost device may refuse to unregister: these pages stay page-locked until the process ends.
        with suppress(CudaError):
            host.unregister(self.driver)
        with suppress(CudaError), self.driver.bound():
            for lane in lanes.values():
                self.driver.destroy_stream(lane.stream)
            self._events.clear()

    # -- fences ---------------------------------------------------------------------------------------------------

    def record_fence(self) -> Fence:
        with self.driver.bound():
            given = self._compute_stream
            stream = self.driver.current_stream() if given is None else self.driver.stream_of(given)
            return self._events.record(stream)

    @contextmanager
    def thread_scope(self, direction: Direction) -> Iterator[None]:
        with self.driver.bound():
            yield

    def wait_for(self, direction: Direction, fences: tuple[Fence, ...]) -> None:
        for fence in fences:
            event = self.driver.event_of(fence)
            if event is None:
                fence.synchronize()
            else:
                self.driver.wait_event(self._lanes[direction].stream, event)

    def watch(self, job_id: int, fences: RegionFences) -> None:
        """Copy the load `job_id` region by region, each with its own fence. Call it before the launch. When the job is
        over, the caller calls `fences.end` and `forget`."""
        self._watched[job_id] = fences

    def forget(self, job_id: int) -> None:
        """A watched job is over, or was never launched."""
        self._watched.pop(job_id, None)

    def settle(self, direction: Direction) -> None:
        # By an event, because waiting for a stream would spin.
        self._events.record(self._lanes[direction].stream).synchronize()

    # -- copies ---------------------------------------------------------------------------------------------------

    def copy(self, plan: TransferPlan) -> Fence:
        watched = self._watched.pop(plan.job_id, None)
        if watched is None:
            return self._copy_blocks(plan, self._blocks)
        return self._copy_by_region(plan, watched)

    def _copy_by_region(self, plan: TransferPlan, watched: RegionFences) -> Fence:
        """Copy the regions in the order in which a forward needs them."""
        try:
            for index, layout in enumerate(self._each_region):
                fence = self._copy_blocks(plan, layout)
                watched.give(index, fence)
        except Exception as error:  # any error: a forward that waits for a region has to raise
            watched.end(repr(error))
            raise
        return fence

    def _copy_blocks(self, plan: TransferPlan, layout: Layout) -> Fence:
        lane, direction = self._lanes[plan.direction], plan.direction
        pieces = layout.pieces(direction, device_ids(plan), host_ids(plan), lane.scratch)
        self.copy_pieces(pieces, direction)
        return self._events.record(lane.stream)

    def copy_pieces(self, pieces: Pieces, direction: Direction) -> None:
        """Submit `pieces` to the stream of `direction`, small ones through the kernel. Call it in a bound thread."""
        if not self.host.is_page_locked:
            self.driver.copy_each(pieces, self._lanes[direction].stream)
            return
        is_small = pieces.sizes < np.uint64(self.break_even.of(direction))
        if not is_small.any():
            self.copy_by_engine(pieces, direction)
        elif is_small.all():
            self.copy_by_kernel(pieces, direction)
        else:
            self.copy_by_engine(pieces.where(~is_small), direction)
            self.copy_by_kernel(pieces.where(is_small), direction)

    def copy_by_engine(self, pieces: Pieces, direction: Direction) -> None:
        self.driver.copy_batch(pieces, SOURCE_ORDERS[direction], self._lanes[direction].stream)

    def copy_by_kernel(self, pieces: Pieces, direction: Direction) -> None:
        if self._kernel is None:
            raise TransferRefused("no kernel copies small pieces here")
        try:
            with self.driver.on_stream(self._lanes[direction].stream):
                self._kernel.copy(pieces)
        except torch.OutOfMemoryError:  # no room on a full device for its table of addresses; nothing was started
            self.copy_by_engine(pieces, direction)

    # -- single blocks --------------------------------------------------------------------------------------------

    def device_block(self, block_id: int) -> NDArray[np.uint8]:
        with self.driver.on_stream(self._lanes[Direction.LOAD].stream):
            block: NDArray[np.uint8] = torch.cat([rows[block_id] for rows in self._rows]).cpu().numpy()
        return block

    def write_device_block(self, block_id: int, block: NDArray[np.uint8]) -> None:
        offset = 0
        with self.driver.on_stream(self._lanes[Direction.LOAD].stream):
            for rows in self._rows:
                rows[block_id].copy_(torch.from_numpy(block[offset : offset + rows.shape[1]]))
                offset += rows.shape[1]
