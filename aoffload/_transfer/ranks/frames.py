"""The messages between the deciding process and a rank, one frame each (`wire.py` encodes them)."""

from __future__ import annotations

from typing import TypeAlias

import attrs

from ..._kernel.plans import Completion, TransferPlan
from ..transport import TransferStatistics

# -- to a rank ----------------------------------------------------------------------------------------------------


@attrs.frozen
class Open:
    """Allocate the host memory and answer `Opened` or `Refused`."""

    num_host_blocks: int
    verify: bool


@attrs.frozen
class RecordFence:
    """Record a fence behind all compute on the device so far, and keep it under this number."""

    number: int


@attrs.frozen
class ReleaseFence:
    """Drop this fence: no later frame names it."""

    number: int


@attrs.frozen
class Launch:
    """Start `plan` once fence number `after` has passed (0: no fence was given)."""

    plan: TransferPlan
    after: int


@attrs.frozen
class Close:
    """Launch nothing more, wait up to `timeout_s` seconds for running copies, answer `Closed`, and end."""

    timeout_s: float


# -- from a rank --------------------------------------------------------------------------------------------------


@attrs.frozen
class Ready:
    """The tensors are built: blocks per region, including the null block, and bytes of a block over all regions."""

    num_device_blocks: int
    block_bytes: int


@attrs.frozen
class Opened:
    """The host memory is allocated."""


@attrs.frozen
class Refused:
    """The tensors or the host memory could not be made. Becomes a `ConfigError` in the deciding process."""

    argument: str
    problem: str


@attrs.frozen
class Completed:
    """One plan is over on this rank. Carries the rank's statistics so far."""

    completion: Completion
    statistics: TransferStatistics


@attrs.frozen
class Closed:
    """Whether every copy ended in time."""

    has_ended: bool


@attrs.frozen
class Lost:
    """The rank's device is lost: nothing will be started from now on."""

    reason: str


Frame: TypeAlias = (
    Open | RecordFence | ReleaseFence | Launch | Close | Ready | Opened | Refused | Completed | Closed | Lost
)  # fmt: skip
