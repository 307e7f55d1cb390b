"""Page-locked host memory: existing memory, registered with the device in pieces, by several threads."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path

import attrs
import numpy as np
from numpy.typing import NDArray

from ....errors import ConfigError
from ...shared_memory import allocated_bytes, map_rows
from ...transport import PinProgress
from ..base import anonymous_memory, host_size
from .driver import CudaDriver, CudaError

# -- cgroup ----------------------------------------------------------------------------------------------------------
#
# The memory that the process's cgroup has left, because Linux kills a process that exceeds the limit.

UNLIMITED_BYTES = 2**60
"""Version 1 of cgroups reports a huge number if there is no limit. Limits from here on count as none."""


@attrs.frozen
class MemoryLimit:
    limit_bytes: int
    used_bytes: int
    """Without the page cache, which Linux drops when memory is needed."""

    @property
    def left_bytes(self) -> int:
        return max(0, self.limit_bytes - self.used_bytes)


@attrs.frozen
class _Names:
    limit: str
    used: str
    cached: tuple[str, ...]


V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
V2 = _Names("memory.max", "memory.current", ("inactive_file", "active_file"))


def memory_limit(root: Path = Path("/")) -> MemoryLimit | None:
    """The tightest limit of the process's cgroup and its ancestors; None if no limit is known."""
    found = [limit for folder, names in _cgroups(root) if (limit := _read(folder, names)) is not None]
    return min(found, key=lambda limit: limit.left_bytes, default=None)


def _cgroups(root: Path) -> Iterator[tuple[Path, _Names]]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount, names = (root / "sys/fs/cgroup/memory", V1) if controllers else (root / "sys/fs/cgroup", V2)
        # In a container, the path may be one of the host: then only the mount point is there.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        yield from ((mount.joinpath(*parts[:depth]), names) for depth in range(len(parts) + 1))


def _read(folder: Path, names: _Names) -> MemoryLimit | None:
    try:
        limit = int((folder / names.limit).read_text())  # no number: "max"
        used = int((folder / names.used).read_text())
        rows = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
        cached = sum(int(number) for name, number in rows if name in names.cached)
    except (OSError, ValueError):
        return None
    return MemoryLimit(limit, max(0, used - cached)) if limit < UNLIMITED_BYTES else None


# -- numa ------------------------------------------------------------------------------------------------------------
#
# Host memory on the GPU's NUMA node, so that copies do not cross the link between two processors.

PCI_DEVICES = Path("/sys/bus/pci/devices")
NODES = Path("/sys/devices/system/node")
MBIND = {"x86_64": 237, "aarch64": 235}
"""The number of the system call `mbind`, which the C library does not wrap."""
PREFERRED = 1
"""`MPOL_PREFERRED`: use memory of another node if this one has none left, instead of failing."""
MAX_NODES = 1024


def node_of(pci_bus_id: str, devices: Path = PCI_DEVICES) -> int | None:
    """The NUMA node of a PCI device; None if Linux does not say, or has one node only."""
    try:
        node = int((devices / pci_bus_id.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if 0 <= node < MAX_NODES else None


def run_near(node: int | None, nodes: Path = NODES) -> None:
    """Run the calling thread on the processors of `node`, so that the pages that it touches first are allocated there.
    Containers often forbid `mbind`, but allow this."""
    with suppress(OSError, ValueError, AttributeError):  # AttributeError: another system than Linux
        ranges = (nodes / f"node{node}" / "cpulist").read_text().split(",")
        ends = [[int(number) for number in part.split("-")] for part in ranges]
        os.sched_setaffinity(0, [number for first, *last in ends for number in range(first, (last or [first])[0] + 1)])


def prefer_node(rows: NDArray[np.uint8], node: int) -> None:
    """Allocate the pages of `rows`, which must not have been touched yet, on `node`. Does nothing if the system does
    not support it: copies work from any memory."""
    if sys.platform != "linux" or not rows.nbytes:
        return
    nodes = (ctypes.c_uint8 * (MAX_NODES // 8))()
    nodes[node // 8] = 1 << node % 8
    with suppress(OSError, AttributeError, KeyError):
        call = ctypes.CDLL(None).syscall
        address, size = ctypes.c_void_p(rows.ctypes.data), ctypes.c_size_t(rows.nbytes)
        call(MBIND[platform.machine()], address, size, PREFERRED, nodes, ctypes.c_size_t(MAX_NODES), ctypes.c_size_t(0))


# -- page locked -----------------------------------------------------------------------------------------------------

MAX_PIECE_BYTES = 64 * 2**30
"""Drivers refuse, or take minutes for, much larger registrations."""
MIN_PIECE_BYTES = 2**30
"""Smaller pieces are registered in a fraction of a second, which is not worth a thread."""
NUM_THREADS = 8
ALIGNMENT = 2 * 2**20
"""Pieces end at the end of huge pages, so that no page belongs to two of them."""

_ADVICE = "a smaller pool (num_host_blocks, host_bytes) may fit; the limit is physical memory, not `ulimit -l`"


class HostMemoryError(ConfigError):
    """Host memory could not be page-locked: its whole size, the piece that failed, and the limits that apply."""

    def __init__(self, size_bytes: int, piece: Piece, num_pieces: int, cause: CudaError, limits: str) -> None:
        place = f"piece {piece.number + 1} of {num_pieces} ({_gib(piece.num_bytes)})"
        super().__init__(
            "num_host_blocks", f"{_gib(size_bytes)} of host memory: {place} could not be pinned: {cause}; {limits}"
        )
        self.size_bytes = size_bytes
        self.piece_bytes = piece.num_bytes
        self.piece_number = piece.number
        self.limits = limits


@attrs.frozen
class Piece:
    """One registration."""

    number: int
    address: int
    num_bytes: int


class _PieceError(Exception):
    """Carries the failed piece out of a thread."""

    def __init__(self, piece: Piece, cause: CudaError) -> None:
        super().__init__(piece, cause)
        self.piece = piece
        self.cause = cause


@attrs.frozen(eq=False)
class HostMemory:
    """The host pool: `rows` is `uint8 [num_blocks, block_bytes]`, anonymous, and private unless ranks share it.

    When the process is killed, the kernel frees the pages, and the driver their registration.
    """

    rows: NDArray[np.uint8]
    pieces: tuple[Piece, ...] = ()
    """The registered pieces; empty for pageable memory."""

    @property
    def address(self) -> int:
        return int(self.rows.ctypes.data)

    @property
    def is_page_locked(self) -> bool:
        return bool(self.pieces)

    @property
    def borders(self) -> tuple[int, ...]:
        """Addresses that no single copy may cross: for a driver, a copy lies in one registration."""
        return tuple(piece.address for piece in self.pieces[1:])

    def unregister(self, driver: CudaDriver) -> None:
        """Unregister every piece. The first error is raised after all pieces were tried."""
        refused = [error for piece in self.pieces for error in _unregistered(driver, piece)]
        if refused:
            raise refused[0]


def page_locked_memory(
    driver: CudaDriver,
    num_blocks: int,
    block_bytes: int,
    progress: Callable[[PinProgress], None],
    max_piece_bytes: int = MAX_PIECE_BYTES,
    shared_path: str = "",
) -> HostMemory:
    """Page-locked host memory, on the NUMA node of the device; with `shared_path`, the memory there, which other
    processes lock, too. If the driver refuses: pageable memory, and exactly one `RuntimeWarning` that says why.
    `ConfigError` if the process would be killed for it."""
    already_allocated = allocated_bytes(shared_path) if shared_path else 0
    _check_cgroup(max(0, host_size(num_blocks, block_bytes) - already_allocated))
    # A forked child would make the pages copy-on-write, and the device would go on writing to those of the child.
    if shared_path:
        rows = map_rows(shared_path, num_blocks, block_bytes, "MADV_DONTFORK")
    else:
        rows = anonymous_memory(num_blocks, block_bytes, "MADV_DONTFORK")
    node = node_of(driver.pci_bus_id)
    if node is not None:
        prefer_node(rows, node)
    try:
        return HostMemory(rows, register_in_pieces(driver, rows, progress, max_piece_bytes, node))
    except HostMemoryError as error:
        warnings.warn(f"copies will be slow: {error}", RuntimeWarning, stacklevel=2)
        return HostMemory(rows)


def register_in_pieces(
    driver: CudaDriver,
    rows: NDArray[np.uint8],
    progress: Callable[[PinProgress], None],
    max_piece_bytes: int = MAX_PIECE_BYTES,
    node: int | None = None,
) -> tuple[Piece, ...]:
    """Register all of `rows` or nothing: after any error, such as `HostMemoryError`, no piece stays registered.

    The threads that do it run on the NUMA node `node`, if one is given.
    """
    pieces = tuple(_cut(int(rows.ctypes.data), rows.nbytes, max_piece_bytes))
    registered: list[Piece] = []  # filled by the threads, also after another one has failed
    try:
        _register_all(driver, pieces, registered, progress, node)
    except BaseException as error:
        for piece in registered:
            _unregistered(driver, piece)
        if isinstance(error, _PieceError):
            limits = f"{_limits()}; {_ADVICE}"
            raise HostMemoryError(rows.nbytes, error.piece, len(pieces), error.cause, limits) from error.cause
        raise
    return pieces


def _register_all(
    driver: CudaDriver,
    pieces: tuple[Piece, ...],
    registered: list[Piece],
    progress: Callable[[PinProgress], None],
    node: int | None,
) -> None:
    if not pieces:
        return
    total_bytes = sum(piece.num_bytes for piece in pieces)
    with ThreadPoolExecutor(min(NUM_THREADS, len(pieces)), "aoffload-pin", run_near, (node,)) as threads:
        pending = [threads.submit(_register, driver, piece, registered) for piece in pieces]
        num_bytes = 0
        try:
            for future in as_completed(pending):
                piece_bytes = future.result()
                num_bytes += piece_bytes
                progress(PinProgress(num_bytes, total_bytes, piece_bytes, len(pieces)))
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise


def _register(driver: CudaDriver, piece: Piece, registered: list[Piece]) -> int:
    try:
        with driver.bound():
            driver.register(piece.address, piece.num_bytes)
    except CudaError as error:
        raise _PieceError(piece, error) from error
    registered.append(piece)
    return piece.num_bytes


def _unregistered(driver: CudaDriver, piece: Piece) -> list[CudaError]:
    try:
        with driver.bound():
            driver.unregister(piece.address)
    except CudaError as error:
        return [error]
    return []


def _cut(address: int, num_bytes: int, max_piece_bytes: int) -> Iterator[Piece]:
    """Equal pieces, so that all threads end at the same time."""
    share = max(min(MIN_PIECE_BYTES, max_piece_bytes), -(-num_bytes // NUM_THREADS))
    step = max(ALIGNMENT, min(max_piece_bytes, share) // ALIGNMENT * ALIGNMENT)
    end, start, number = address + num_bytes, address, 0
    while start < end:
        stop = min(end, (start + step) // ALIGNMENT * ALIGNMENT)
        yield Piece(number, start, stop - start)
        start, number = stop, number + 1


def _check_cgroup(size_bytes: int) -> None:
    limit = memory_limit()
    if limit is not None and size_bytes > limit.left_bytes:
        left = f"{_gib(limit.left_bytes)} left of its cgroup's memory limit of {_gib(limit.limit_bytes)}"
        problem = f"{_gib(size_bytes)} of host memory would be page-locked, but this process has {left}"
        raise ConfigError("num_host_blocks", f"{problem}, and Linux kills it if it takes more")


def _limits() -> str:
    """The free memory and the cgroup's limit, as text."""
    found = []
    with suppress(OSError, ValueError, AttributeError):
        pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        found.append(f"{_gib(pages)} of memory free")
    limit = memory_limit()
    if limit is not None:
        found.append(f"{_gib(limit.left_bytes)} left of the cgroup's memory limit of {_gib(limit.limit_bytes)}")
    return ", ".join(found)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"
