"""What the deciding process and a rank tell each other: frozen values, one frame each (`wire.py` has their bytes)."""

from __future__ import annotations

from typing import TypeAlias

import attrs

from ...core.plan import Completion, TransferPlan
from ..transport import TransferStatistics

__all__ = [
    "Close",
    "Closed",
    "Completed",
    "Frame",
    "Launch",
    "Lost",
    "Open",
    "Opened",
    "Ready",
    "RecordFence",
    "Refused",
    "ReleaseFence",
]


# -- to a rank ----------------------------------------------------------------------------------------------------


@attrs.frozen
class Open:
    """Allocate the host memory and answer `Opened` or `Refused`."""

    num_host_blocks: int
    verify: bool


@attrs.frozen
class RecordFence:
    """Record a fence behind all compute given to the device so far, and keep it under this number."""

    number: int


@attrs.frozen
class ReleaseFence:
    """Nobody names this fence any more."""

    number: int


@attrs.frozen
class Launch:
    """Copy, once the fence of that number has passed (0: none was given)."""

    plan: TransferPlan
    after: int


@attrs.frozen
class Close:
    """Launch nothing more, wait up to `timeout_s` seconds for what runs, answer `Closed`, and end."""

    timeout_s: float


# -- from a rank --------------------------------------------------------------------------------------------------


@attrs.frozen
class Ready:
    """The tensors are there: rows of every region, the null block included, and bytes of a block over all regions."""

    num_device_blocks: int
    block_bytes: int


@attrs.frozen
class Opened:
    """The host memory is there."""


@attrs.frozen
class Refused:
    """The tensors or the host memory are not to be had; becomes a `ConfigError` where the decision was made."""

    argument: str
    problem: str


@attrs.frozen
class Completed:
    """One plan is over on this rank, and what it has copied so far."""

    completion: Completion
    statistics: TransferStatistics


@attrs.frozen
class Closed:
    """Whether every copy ended in time."""

    has_ended: bool


@attrs.frozen
class Lost:
    """The rank's device answers no call any more: nothing will be started from now on."""

    reason: str


Frame: TypeAlias = (
    Open | RecordFence | ReleaseFence | Launch | Close | Ready | Opened | Refused | Completed | Closed | Lost
)  # fmt: skip
