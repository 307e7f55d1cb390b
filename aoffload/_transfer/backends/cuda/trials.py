"""Measures the link, and the break-even between copy engine and kernel, with a backend that is being opened.

The host pool is still empty, and is written to. The device memory is temporary. If the device is full, nothing is
measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import attrs
import numpy as np
import torch

from ...._common.arguments import check_int
from ...._kernel.states import Direction
from ....errors import ConfigError
from ...fences import Fence
from .driver import Pieces
from .layout import WIDEST_BYTES
from .page_locked import HostMemory

# -- method ----------------------------------------------------------------------------------------------------------
#
# The piece size that decides between copy engine and kernel, measured once on the machine.

SIZES = tuple(kib * 1024 for kib in (4, 8, 16, 24, 32, 48, 64, 128))
"""Sizes tried in turn. From the last one on, the copy engine is faster in all published measurements."""
NUM_ROUNDS = 5
MARGIN = 1.5
"""How many times faster the kernel has to be. It takes multiprocessors from the forward, which an idle device does not
show when it is measured; the copy engine takes none."""


@attrs.frozen
class BreakEven:
    """The kernel copies pieces below these sizes, the copy engine copies all others. 0: the kernel copies no pieces.

    A measured value has `store_bytes=0`, because no request waits for a store, and the forward should keep its
    multiprocessors.
    """

    load_bytes: int
    store_bytes: int

    def __attrs_post_init__(self) -> None:
        check_int("load_bytes", self.load_bytes, 0, error=ConfigError)
        check_int("store_bytes", self.store_bytes, 0, error=ConfigError)

    def of(self, direction: Direction) -> int:
        return self.load_bytes if direction is Direction.LOAD else self.store_bytes


PUBLISHED = BreakEven(28 * 1024, 28 * 1024)
"""A published measurement on an H100, where both took the same time."""

Trial = Callable[[Pieces], object]
"""Copies pieces and returns when they have arrived."""


def measure_break_even(
    by_engine: Trial,
    by_kernel: Trial,
    pieces_of: Callable[[int], Pieces],
    clock: Callable[[], float] = time.perf_counter,
) -> BreakEven:
    """The size up to which the kernel loads pieces `MARGIN` times faster, measured with the pieces of
    `pieces_of(size)`. Engine and kernel take turns, so that other load on the machine slows both."""
    load_bytes = 0
    for size in SIZES:
        pieces = pieces_of(size)
        times: dict[Trial, list[float]] = {by_engine: [], by_kernel: []}
        for number in range(NUM_ROUNDS + 1):
            for trial in (by_engine, by_kernel):
                began_s = clock()
                trial(pieces)
                if number:  # the first one compiles and warms up
                    times[trial].append(clock() - began_s)
        if MARGIN * np.median(times[by_kernel]) > np.median(times[by_engine]):
            break
        load_bytes = size + 1  # this size is the kernel's, too
    return BreakEven(load_bytes, 0)


# -- trials ----------------------------------------------------------------------------------------------------------

LINK_BYTES = 32 * 2**20
"""Bytes of the copy that measures the link: 0.6 ms each way, against some 20 us to start a copy and to wait for it."""
BATCH_BYTES = 16 * 2**20
"""Bytes per trial: enough to hide the cost of a launch, few enough to repeat it a hundred times."""
MIN_BYTES = 2**20
"""A smaller host pool is not measured: the result would say nothing about the machine."""


class Tried(Protocol):
    """The part of a backend that the trials use."""

    @property
    def host(self) -> HostMemory: ...
    @property
    def device(self) -> torch.device: ...
    def copy_by_engine(self, pieces: Pieces, direction: Direction) -> Fence: ...
    def copy_by_kernel(self, pieces: Pieces, direction: Direction) -> Fence: ...
    def on_stream(self, direction: Direction) -> AbstractContextManager[object]: ...
    def record_fence(self) -> Fence: ...
    def wait_for(self, direction: Direction, fences: tuple[Fence, ...]) -> None: ...
    def settle(self, direction: Direction) -> None: ...


def measured_rate(backend: Tried) -> float:
    """Bytes per second of one large copy, in the slower direction; 0.0 if it could not be measured."""
    most = backend.host.pieces[0].num_bytes if backend.host.is_page_locked else backend.host.rows.nbytes
    if most < MIN_BYTES:
        return 0.0
    host = torch.from_numpy(backend.host.rows).view(-1)[: min(LINK_BYTES, most)]
    try:
        device = _temporary(backend, host.numel(), *Direction)
        return host.numel() / max(_large_copy_s(backend, direction, device, host) for direction in Direction)
    except Exception:  # noqa: BLE001 - such as no memory: the rate only bounds the queued bytes, and has a default
        for direction in Direction:
            backend.settle(direction)  # a lost device raises here
        return 0.0


def _large_copy_s(backend: Tried, direction: Direction, device: torch.Tensor, host: torch.Tensor) -> float:
    source, destination = (host, device) if direction is Direction.LOAD else (device, host)
    took_s = []
    for _ in range(3):
        began_s = time.perf_counter()
        with backend.on_stream(direction):  # by torch, since a driver over torch alone reaches no other memory
            destination.copy_(source, non_blocking=True)
        backend.settle(direction)
        took_s.append(time.perf_counter() - began_s)
    return min(took_s)  # the first one may touch the memory for the first time


def measured_on(backend: Tried) -> BreakEven:
    """Measure with loads, into scattered pieces of temporary device memory."""
    num_bytes = min(BATCH_BYTES, backend.host.pieces[0].num_bytes)
    if num_bytes < MIN_BYTES:
        return BreakEven(0, 0)
    memory = _temporary(backend, num_bytes, Direction.LOAD)

    def settled(copy: Callable[[Pieces, Direction], object]) -> Trial:
        def trial(pieces: Pieces) -> None:
            copy(pieces, Direction.LOAD)
            backend.settle(Direction.LOAD)

        return trial

    def pieces_of(size: int) -> Pieces:
        return scattered(Direction.LOAD, memory.data_ptr(), backend.host.address, num_bytes, size)

    return measure_break_even(settled(backend.copy_by_engine), settled(backend.copy_by_kernel), pieces_of)


def build_kernels(backend: Tried, break_even: BreakEven) -> None:
    """Copy a piece by each kernel that `break_even` uses: compiled here, it does not stop the first request."""
    memory = _temporary(backend, WIDEST_BYTES, *Direction)
    for direction in Direction:
        if break_even.of(direction) and backend.host.rows.nbytes >= WIDEST_BYTES:
            pieces = scattered(direction, memory.data_ptr(), backend.host.address, WIDEST_BYTES, WIDEST_BYTES)
            backend.copy_by_kernel(pieces, direction)
            backend.settle(direction)


def _temporary(backend: Tried, num_bytes: int, *directions: Direction) -> torch.Tensor:
    memory = torch.empty(num_bytes, dtype=torch.uint8, device=backend.device)
    for direction in directions:  # earlier work on torch's stream may still use the new memory
        backend.wait_for(direction, (backend.record_fence(),))
    return memory


def scattered(direction: Direction, on_device: int, on_host: int, num_bytes: int, size: int) -> Pieces:
    """Pieces of `size` bytes that are consecutive on the host and in random order on the device."""
    num_pieces = num_bytes // size
    starts = np.arange(num_pieces, dtype=np.uint64) * np.uint64(size)
    device = np.random.default_rng(0).permutation(starts) + np.uint64(on_device)
    host = starts + np.uint64(on_host)
    sizes = np.full(num_pieces, size, dtype=np.uint64)
    return Pieces(host, device, sizes) if direction is Direction.LOAD else Pieces(device, host, sizes)
