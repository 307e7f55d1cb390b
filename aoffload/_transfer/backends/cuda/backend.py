"""The backend of one GPU: it chooses the pieces of a plan, how they are copied, and which fences the copies wait
for."""

from __future__ import annotations

import os
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from ...._common.arguments import check_callable, check_has, check_int, check_type
from ...._kernel.plans import TransferPlan
from ...._kernel.states import Direction
from ....errors import ConfigError, TransferRefused
from ...fences import Fence, RegionFences
from ...region import KVRegion, byte_rows
from ...transport import PinProgress
from ..base import RegionBackend, anonymous_memory, device_ids, host_ids
from .driver import MAX_BATCH, CudaDriver, CudaError, Handle, Pieces, SourceOrder
from .events import BlockingWait, CudaFence, EventPool, WaitPolicy
from .kernel import CopyKernel, triton_kernel
from .layout import Layout, Scratch
from .nvidia import NvidiaDriver
from .page_locked import MAX_PIECE_BYTES, HostMemory, page_locked_memory
from .plain import TorchDriver
from .trials import BreakEven, build_kernels, measured_on, measured_rate

SOURCE_ORDERS = {
    # The live KV cache: a copy must see all earlier writes and no later ones.
    Direction.STORE: SourceOrder.STREAM,
    # Host blocks are published when they are complete, and leased until the job is over.
    Direction.LOAD: SourceOrder.ANY,
}


def best_driver(regions: tuple[KVRegion, ...]) -> CudaDriver:
    """A driver over NVIDIA's bindings if they are installed and can be used; otherwise over torch alone."""
    try:
        return NvidiaDriver(regions[0].device.index)
    except ImportError:
        return TorchDriver(regions)
    except CudaError as error:
        warnings.warn(f"copies will be slow, because torch makes them: {error}", RuntimeWarning, stacklevel=2)
        return TorchDriver(regions)


@attrs.frozen(kw_only=True)
class CudaOptions:
    """The options of a `CudaBackend`."""

    driver: Callable[[tuple[KVRegion, ...]], CudaDriver] = best_driver
    kernel: Callable[[torch.device], CopyKernel | None] = triton_kernel
    """Makes the kernel that copies small pieces, or returns None."""
    break_even: BreakEven | None = None
    """The sizes below which the kernel copies pieces. None: measured when the backend is opened, in a few hundred
    milliseconds. The kernel then copies those pieces of loads for which it is much faster, and nothing of a store."""
    batched: bool = True
    """Whether the driver gets many pieces in one call. False: one call per piece, for drivers whose batches hang or
    crash."""
    max_batches: int = 4
    """Maximum batches under way per direction. The copy thread waits before it submits more, because some drivers hang
    when many batches are queued."""
    waiting: WaitPolicy = attrs.field(factory=BlockingWait)
    """How the copy threads wait for the device."""
    progress: Callable[[PinProgress], None] = lambda _: None
    """Called after each page-locked piece of host memory, in the thread that opens the backend. The log always has
    these pieces."""
    max_piece_bytes: int = MAX_PIECE_BYTES
    """Maximum bytes of a page-locked piece of host memory."""

    def __attrs_post_init__(self) -> None:
        for name in ("driver", "kernel", "progress"):
            check_callable(name, getattr(self, name), ConfigError)
        if self.break_even is not None:
            check_type("break_even", self.break_even, BreakEven, ConfigError)
        check_has("waiting", self.waiting, "WaitPolicy", "wait", ConfigError)
        check_int("max_piece_bytes", self.max_piece_bytes, 1, error=ConfigError)
        check_type("batched", self.batched, bool, ConfigError)
        check_int("max_batches", self.max_batches, 1, error=ConfigError)


@attrs.define(eq=False)
class Lane:
    """The stream of one direction, and the state of the thread that submits to it."""

    stream: Handle
    scratch: Scratch = attrs.field(factory=Scratch)
    batches: deque[CudaFence] = attrs.field(factory=deque)
    """Fences of the last batches, the oldest first."""
    kernel: CopyKernel | None = None


class CudaBackend(RegionBackend):
    """A backend with one stream of the lowest priority per direction. Each copy waits, on the device, for its fences.

    Compute is assumed to run on `compute_stream`, by default on the current stream of the thread that records a fence.
    If the forward of an engine runs on another stream than the current one of its event loop, name that stream.

    The submitting thread of a direction calls `wait_for` and `copy`. Any thread may call `settle`, wait for fences and
    verify, because single blocks are read and written on a stream of their own, which never waits for copies.

    The backend needs no `record_stream`: it keeps the tensors alive, and a block is reused only after every copy of it
    has ended.
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
        self._lanes: dict[Direction, Lane] = {}
        self._single_blocks: Handle | None = None
        """The stream of `device_block` and `write_device_block`."""
        self.bytes_per_s = 0.0
        """Rate of one large copy, in the slower direction, measured when the backend is opened; 0.0 if unknown."""
        self._listeners = [self.options.progress]

    def __repr__(self) -> str:
        memory = "pinned" if self.host.is_page_locked else "pageable"
        return f"<CudaBackend {self.device} {self.driver!r} host={self.host.rows.nbytes} {memory}>"

    @property
    def has_kernel(self) -> bool:
        """Whether a kernel can copy small pieces: a kernel is installed, and the device maps the host memory."""
        return any(lane.kernel is not None for lane in self._lanes.values())

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
        if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
            problem = (
                "CUDA_DEVICE_MAX_CONNECTIONS=1 puts copies and compute into one queue, so they wait for each other"
            )
            warnings.warn(f"copies will be slow: {problem}", RuntimeWarning, stacklevel=2)
        with self.driver.bound():
            self._lanes = {direction: Lane(self.driver.create_stream()) for direction in Direction}
            self._single_blocks = self.driver.create_stream()
        self.host = page_locked_memory(
            self.driver, num_host_blocks, self.block_bytes, self._hear, self.options.max_piece_bytes, self.shared_path
        )
        self.driver.learn(self.host.rows)
        self._blocks = Layout.of_block(self.regions, self.host.address, self.host.borders)
        self._each_region = Layout.of_each_region(self.regions, self.host.address, self.host.borders)
        self._alignment = min(layout.alignment for layout in (self._blocks, *self._each_region))
        with self.driver.bound():
            self.bytes_per_s = measured_rate(self)
            self.break_even = self._chosen_break_even()

    def _chosen_break_even(self) -> BreakEven:
        """Make the kernels and decide which pieces they copy. Nothing is compiled or allocated for them after this."""
        if not (self.host.is_page_locked and self.driver.maps_host_memory):  # no kernel can read the host memory
            return BreakEven(0, 0)
        lanes = self._lanes.values()
        try:
            for lane in lanes:
                with self.driver.on_stream(lane.stream):
                    lane.kernel = self.options.kernel(self.device)
            if not self.has_kernel:
                return BreakEven(0, 0)
            if self.options.break_even is None:
                return measured_on(self)
            build_kernels(self, self.options.break_even)
        except Exception as error:  # noqa: BLE001 - any error: the copy engine suffices
            for lane in lanes:
                lane.kernel = None
            for direction in Direction:
                self.settle(direction)
            problem = f"the copy engine also copies small pieces, because their kernel cannot be used: {error!r}"
            warnings.warn(f"copies will be slow: {problem}", RuntimeWarning, stacklevel=3)
            return BreakEven(0, 0)
        return self.options.break_even

    def close(self) -> None:
        host, self.host = self.host, HostMemory(anonymous_memory(0, self.block_bytes))
        streams = [lane.stream for lane in self._lanes.values()]
        streams += [] if self._single_blocks is None else [self._single_blocks]
        self._lanes, self._single_blocks = {}, None
        # A lost device may refuse to unregister: these pages stay page-locked until the process ends.
        with suppress(CudaError):
            host.unregister(self.driver)
        with suppress(CudaError), self.driver.bound():
            for stream in streams:
                self.driver.destroy_stream(stream)
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
        return self.copy_pieces(pieces, direction)

    def copy_pieces(self, pieces: Pieces, direction: Direction) -> Fence:
        """Submit `pieces` to the stream of `direction`, small ones through the kernel, and return a fence after them.
        Call it, and the methods below, in a bound thread."""
        is_small = pieces.sizes < np.uint64(self.break_even.of(direction))
        if not is_small.any():
            return self.copy_by_engine(pieces, direction)
        if not is_small.all():
            self.copy_by_engine(pieces.where(~is_small), direction)
            pieces = pieces.where(is_small)
        return self.copy_by_kernel(pieces, direction)

    def copy_by_engine(self, pieces: Pieces, direction: Direction) -> Fence:
        """Submit `pieces` to the copy engine, and return a fence after them. If batched, first wait until fewer than
        `max_batches` batches are under way in this direction."""
        lane, options = self._lanes[direction], self.options
        if not (options.batched and self.host.is_page_locked):
            self.driver.copy_each(pieces, lane.stream)
            return self._events.record(lane.stream)
        for start in range(0, len(pieces), MAX_BATCH):
            while len(lane.batches) >= options.max_batches:
                oldest = lane.batches.popleft()  # referenced, so that its event is not recorded again meanwhile
                self.driver.synchronize_event(oldest.event)
            batch = pieces.where(slice(start, start + MAX_BATCH))
            self.driver.copy_batch(batch, SOURCE_ORDERS[direction], lane.stream)
            lane.batches.append(self._events.record(lane.stream))
        return lane.batches[-1] if len(pieces) else self._events.record(lane.stream)

    def copy_by_kernel(self, pieces: Pieces, direction: Direction) -> Fence:
        """Submit `pieces` to the kernel, and return a fence after them. Addresses and sizes must be aligned like those
        of blocks. `TransferRefused` without a kernel."""
        lane = self._lanes[direction]
        if lane.kernel is None:
            raise TransferRefused("no kernel copies small pieces here")
        with self.driver.on_stream(lane.stream):
            lane.kernel.copy(pieces, self._alignment, lambda: self._events.record(lane.stream))
        return self._events.record(lane.stream)

    def on_stream(self, direction: Direction) -> AbstractContextManager[object]:
        """Make the stream of `direction` torch's current stream inside the block."""
        return self.driver.on_stream(self._lanes[direction].stream)

    # -- single blocks --------------------------------------------------------------------------------------------

    def device_block(self, block_id: int) -> NDArray[np.uint8]:
        with self.driver.bound(), self.driver.on_stream(self._single_blocks):
            block: NDArray[np.uint8] = torch.cat([rows[block_id] for rows in self._rows]).cpu().numpy()
        return block

    def write_device_block(self, block_id: int, block: NDArray[np.uint8]) -> None:
        offset = 0
        with self.driver.bound(), self.driver.on_stream(self._single_blocks):
            for rows in self._rows:
                rows[block_id].copy_(torch.from_numpy(block[offset : offset + rows.shape[1]]))
                offset += rows.shape[1]
