"""How plans reach the tensors and completions come back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import attrs

from ..core.plan import Completion, TransferPlan
from ..env import Env
from .fence import Fence

__all__ = ["TRANSPORTS", "PinProgress", "ReportsPinning", "SlowToOpen", "TransferStatistics", "Transport"]


TRANSPORTS = "num_device_blocks block_bytes open record_fence launch close statistics"
"""What a `Transport` has."""


@attrs.frozen
class TransferStatistics:
    """What a transport copied since it was opened. `blocks_loaded` counts what reached the device, good or bad."""

    num_loads: int = 0
    num_stores: int = 0
    blocks_loaded: int = 0
    blocks_stored: int = 0
    blocks_verified: int = 0
    """Loaded blocks whose checksum was compared and was right. With `verify`, the rest of them is `blocks_corrupt`."""
    blocks_corrupt: int = 0
    bytes_loaded: int = 0
    bytes_stored: int = 0
    load_seconds: float = 0.0
    """Time spent copying, without waiting for fences and without verifying."""
    store_seconds: float = 0.0


@attrs.frozen
class PinProgress:
    """Host memory is pinned in pieces, several at a time; this is told after each of them."""

    num_bytes: int
    """Pinned so far."""
    total_bytes: int
    piece_bytes: int
    """Of the piece that has just been pinned."""
    num_pieces: int
    """How many there are in all."""


@runtime_checkable
class ReportsPinning(Protocol):
    """A transport, or a part of one, that says how far it is while it opens."""

    def report_pinning(self, hear: Callable[[PinProgress], None]) -> None:
        """Have `open` call `hear` after each piece of host memory, in whatever thread it runs."""
        ...


@runtime_checkable
class SlowToOpen(Protocol):
    """A transport that says whether `open` may take minutes: the runtime calls it in a worker thread then. Whatever it
    raises, nothing may be left open."""

    @property
    def opens_slowly(self) -> bool: ...


class Transport(Protocol):
    """One side of the seam between plans and tensors.

    `launch` and `record_fence` are called in the event loop's thread and never block. Every launched plan is delivered
    exactly once, from any thread, unless the transport dies or hangs; the ledger survives both. Once one of the two has
    raised `DeviceGone`, nothing is asked of the transport any more but to close.
    """

    @property
    def num_device_blocks(self) -> int:
        """Rows of every KV region, the null block 0 included."""
        ...

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all regions."""
        ...

    def open(self, num_host_blocks: int, *, verify: bool, deliver: Callable[[Completion], None], env: Env) -> None:
        """Allocate `num_host_blocks` of host memory and be ready to launch; host block ids start at 0.

        In the event loop's thread, unless the transport is one of `SlowToOpen`. Whatever it raises, nothing is left
        open.
        """
        ...

    def record_fence(self) -> Fence:
        """A fence behind all compute that the caller's stream was given so far. `TransferRefused`: none can be had."""
        ...

    def launch(self, plan: TransferPlan, after: Fence | None) -> None:
        """Start copying once `after` has passed; a load, and a store without `after`, also wait for all compute given
        to the caller's stream so far, which may still read the one's destination and write the other's source.
        `TransferRefused`: nothing was started, nothing will be delivered."""
        ...

    def close(self, timeout_s: float) -> bool:
        """Launch nothing more, let what runs end within `timeout_s`; whether all of it did.

        May block: call it off the loop.
        """
        ...

    def statistics(self) -> TransferStatistics:
        """What was copied so far."""
        ...
