"""The transport protocol: executes plans on the tensors and delivers completions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import attrs

from ..core.plan import Completion, TransferPlan
from ..env import Env
from .fence import Fence

__all__ = ["TRANSPORTS", "PinProgress", "ReportsPinning", "SlowToOpen", "TransferStatistics", "Transport"]


TRANSPORTS = "num_device_blocks block_bytes open record_fence launch close statistics"
"""The attributes of a `Transport`."""


@attrs.frozen
class TransferStatistics:
    """Counts since the transport was opened. `blocks_loaded` counts blocks that reached the device, corrupt or not."""

    num_loads: int = 0
    num_stores: int = 0
    blocks_loaded: int = 0
    blocks_stored: int = 0
    blocks_verified: int = 0
    """Loaded blocks whose checksum matched. With `verify`, the other loaded blocks are `blocks_corrupt`."""
    blocks_corrupt: int = 0
    bytes_loaded: int = 0
    bytes_stored: int = 0
    load_seconds: float = 0.0
    """Time spent copying, without waiting for fences and without verifying."""
    store_seconds: float = 0.0


@attrs.frozen
class PinProgress:
    """Progress of page-locking host memory, reported after each piece. Several pieces are locked at a time."""

    num_bytes: int
    """Page-locked so far."""
    total_bytes: int
    piece_bytes: int
    """Size of the piece that was just page-locked."""
    num_pieces: int
    """Pieces in total."""


@runtime_checkable
class ReportsPinning(Protocol):
    """A transport, or a part of one, that reports the progress of page-locking while it opens."""

    def report_pinning(self, hear: Callable[[PinProgress], None]) -> None:
        """Have `open` call `hear` after each piece of host memory, in the thread that opens."""
        ...


@runtime_checkable
class SlowToOpen(Protocol):
    """A transport that says whether `open` may take minutes: the runtime then calls it in a worker thread. If `open`
    raises, it must leave nothing open."""

    @property
    def opens_slowly(self) -> bool: ...


class Transport(Protocol):
    """Copies blocks between device tensors and host memory, as plans say.

    `launch` and `record_fence` are called in the event loop's thread and must not block. Every launched plan gets
    exactly one completion, from any thread, and after an UNPROVEN one possibly a late proof. The ledger survives a
    transport that dies or hangs instead. Once `launch` or `record_fence` has raised `DeviceGone`, the runtime calls
    neither again; it still closes the transport.
    """

    @property
    def num_device_blocks(self) -> int:
        """Blocks of every KV region, including the null block 0."""
        ...

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all regions."""
        ...

    def open(self, num_host_blocks: int, *, verify: bool, deliver: Callable[[Completion], None], env: Env) -> None:
        """Allocate `num_host_blocks` of host memory and be ready to launch; host block ids start at 0.

        Called in the event loop's thread, or in a worker thread if the transport is `SlowToOpen` and says so. If it
        raises, it leaves nothing open.
        """
        ...

    def record_fence(self) -> Fence:
        """A fence behind all compute on the caller's stream so far. `TransferRefused` if none can be recorded."""
        ...

    def launch(self, plan: TransferPlan, after: Fence | None) -> None:
        """Start copying once `after` has passed. `TransferRefused`: nothing was started, and no completion follows.

        A load, and a store without `after`, also wait for all compute on the caller's stream so far: it may still read
        the load's destination, or write the store's source. `ORDERED` as `after`: the caller's streams see to that.
        """
        ...

    def close(self, timeout_s: float) -> bool:
        """Launch nothing more, and wait up to `timeout_s` seconds for running copies. Returns whether all have ended.

        May block: call it outside of the event loop.
        """
        ...

    def statistics(self) -> TransferStatistics:
        """The counts so far."""
        ...
