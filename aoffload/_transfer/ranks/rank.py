"""A rank: one set of KV tensors and its host memory, as the deciding process sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ..._common.arguments import check_has
from ..._common.env import Env
from ..._kernel.plans import Completion, TransferPlan
from ...errors import ConfigError, TransferRefused
from ..fences import Fence
from ..transport import TRANSPORTS, PinProgress, ReportsPinning, SharesHostMemory, TransferStatistics, Transport

RANKS = "num_device_blocks block_bytes open wait_open record_fence release_fence launch stop join statistics"
"""The attributes of a `Rank`."""


class Rank(Protocol):
    """One of several devices that each hold a part of every block.

    All methods but `open`, `wait_open` and `join` are called in the event loop's thread (`release_fence` in any thread)
    and must not block. Commands take effect in call order. A rank whose device is lost raises `DeviceGone`.
    """

    @property
    def num_device_blocks(self) -> int:
        """Blocks of every KV region of this rank, including the null block 0."""
        ...

    @property
    def block_bytes(self) -> int:
        """Bytes of this rank's part of a block."""
        ...

    def open(
        self,
        num_host_blocks: int,
        *,
        verify: bool,
        deliver: Callable[[Completion], None],
        lost: Callable[[str], None],
        env: Env,
        memory: str = "",
    ) -> None:
        """Start allocating `num_host_blocks` of this rank's host memory. Called in the thread that opens the transport.
        `memory`: the path of memory that this rank shares with others (`num_replicas`), in place of its own; it is
        passed only then.

        From then on, any thread may call `deliver` with the completion of a plan, and `lost` with a reason once the
        rank has certainly ended: none of its copies is running any more.
        """
        ...

    def wait_open(self, timeout_s: float) -> None:
        """Wait until the host memory is allocated. `ConfigError` with the size if it cannot be allocated. May block."""
        ...

    def record_fence(self, number: int) -> None:
        """Record a fence after all compute on this rank's device so far. Raises `TransferRefused` if it cannot."""
        ...

    def release_fence(self, number: int) -> None:
        """Drop this fence, because no later command names it. Called from finalisers, so it must take no lock."""
        ...

    def launch(self, plan: TransferPlan, after: int | None) -> None:
        """As `Transport.launch`; `after` is the number of a fence."""
        ...

    def stop(self, timeout_s: float) -> None:
        """Launch nothing more; running copies have `timeout_s` seconds to end."""
        ...

    def join(self, timeout_s: float) -> bool:
        """Whether every copy has ended, after waiting up to `timeout_s` seconds. A rank's process is gone afterwards.

        May block.
        """
        ...

    def statistics(self) -> TransferStatistics:
        """The counts of this rank that are known so far."""
        ...


class LocalRank:
    """A rank in this process: a transport, and the fences that were recorded on it.

    For engines that hold several devices in one process, for tests, and for the inside of a rank process.
    """

    def __init__(self, transport: Transport) -> None:
        check_has("transport", transport, "Transport", TRANSPORTS)
        self.transport = transport
        self._fences: dict[int, Fence] = {}

    def __repr__(self) -> str:
        return f"<LocalRank {self.transport!r} fences={len(self._fences)}>"

    @property
    def num_device_blocks(self) -> int:
        return self.transport.num_device_blocks

    @property
    def block_bytes(self) -> int:
        return self.transport.block_bytes

    def open(
        self,
        num_host_blocks: int,
        *,
        verify: bool,
        deliver: Callable[[Completion], None],
        lost: Callable[[str], None],
        env: Env,
        memory: str = "",
    ) -> None:
        """Allocate the host memory. `ConfigError` with the size if there is too little memory. Never calls `lost`,
        because this rank lives in this process."""
        if memory and not isinstance(self.transport, SharesHostMemory):
            raise ConfigError("num_replicas", f"must be 1: {self.transport!r} cannot share host memory")
        try:
            if memory and isinstance(self.transport, SharesHostMemory):
                self.transport.share_host_memory(memory)
            self.transport.open(num_host_blocks, verify=verify, deliver=deliver, env=env)
        except (MemoryError, RuntimeError, OSError) as error:  # errors that allocators raise, in addition to our own
            size = num_host_blocks * self.block_bytes / 2**30
            raise ConfigError("num_host_blocks", f"{size:.1f} GiB of host memory: {error!r}") from error

    def report_pinning(self, hear: Callable[[PinProgress], None]) -> None:
        if isinstance(self.transport, ReportsPinning):
            self.transport.report_pinning(hear)

    def wait_open(self, timeout_s: float) -> None:
        """Does nothing, because `open` has allocated the memory."""

    def record_fence(self, number: int) -> None:
        self._fences[number] = self.transport.record_fence()

    def release_fence(self, number: int) -> None:
        self._fences.pop(number, None)

    def launch(self, plan: TransferPlan, after: int | None) -> None:
        if after is None:
            self.transport.launch(plan, None)
        elif after in self._fences:
            self.transport.launch(plan, self._fences[after])
        else:  # recording it failed here; without it, the copy might read blocks that compute still writes
            raise TransferRefused(f"job {plan.job_id}: there is no fence {after}")

    def stop(self, timeout_s: float) -> None:
        """Does nothing before `join`, because the caller launches nothing more."""

    def join(self, timeout_s: float) -> bool:
        return self.transport.close(timeout_s)

    def statistics(self) -> TransferStatistics:
        return self.transport.statistics()
