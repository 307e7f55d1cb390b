"""Copy backends of the demo: the negative control of `--corrupt`, and the slow link of `--host-gbs`.

The first exchanges two loaded blocks, which checks have to notice.
"""

from __future__ import annotations

import time

import attrs

from .._kernel.plans import TransferPlan
from .._kernel.states import Direction
from .._transfer.backends.base import CopyBackend
from .._transfer.backends.cpu import CpuBackend
from .._transfer.backends.cuda.backend import CudaBackend
from .._transfer.fences import Fence
from .._transfer.region import KVRegion
from .options import Corrupt

MIN_BLOCKS = 8
"""The smallest load to tamper with. It brings several blocks of a prompt that a forward will read."""


@attrs.define(eq=False)
class Tampering:
    """Exchanges a block in the middle of a load with its last one: once before verification, once after, in two loads.

    Records the exchanges to make and those made. Written by the copy thread, read after the run.
    """

    before_verification: bool
    after_verification: bool
    num_before: int = 0
    """Blocks that held another block's bytes when they were verified."""
    num_after: int = 0
    """Blocks that were given another block's bytes after they were verified."""
    _touched_job: int = 0

    @classmethod
    def of(cls, corrupt: Corrupt) -> Tampering:
        return cls(corrupt is not Corrupt.LOGITS, corrupt is not Corrupt.CHECKSUM)

    @property
    def is_pending(self) -> bool:
        """Whether an exchange is still to be done, because no load was large enough."""
        return (self.before_verification and not self.num_before) or (self.after_verification and not self.num_after)

    def make_backend(self, regions: tuple[KVRegion, ...]) -> CopyBackend:
        """A backend for `LocalTransport` that exchanges the blocks."""
        if regions[0].device.type == "cuda":
            return _TamperingCudaBackend(regions, self)
        return _TamperingCpuBackend(regions, self)

    def has_copied(self, backend: CopyBackend, plan: TransferPlan) -> None:
        if self.before_verification and not self.num_before and _is_worth_it(plan):
            self.num_before = self._exchange(backend, plan)

    def has_verified(self, backend: CopyBackend, plan: TransferPlan) -> None:
        if plan.job_id == self._touched_job:
            return  # the checksum has caught this load, so no wrong bytes would reach the logits
        if self.after_verification and not self.num_after and _is_worth_it(plan):
            self.num_after = self._exchange(backend, plan)

    def _exchange(self, backend: CopyBackend, plan: TransferPlan) -> int:
        left, right = plan.destination_ids[plan.num_blocks // 2], plan.destination_ids[-1]
        kept = backend.device_block(left).copy()
        backend.write_device_block(left, backend.device_block(right))
        backend.write_device_block(right, kept)
        self._touched_job = plan.job_id
        return 2


def _is_worth_it(plan: TransferPlan) -> bool:
    return plan.direction is Direction.LOAD and plan.num_blocks >= MIN_BLOCKS


class _TamperingCpuBackend(CpuBackend):
    def __init__(self, regions: tuple[KVRegion, ...], tampering: Tampering) -> None:
        super().__init__(regions)
        self._tampering = tampering

    def after_copy(self, plan: TransferPlan) -> None:
        self._tampering.has_copied(self, plan)

    def after_verify(self, plan: TransferPlan) -> None:
        self._tampering.has_verified(self, plan)


class _TamperingCudaBackend(CudaBackend):
    def __init__(self, regions: tuple[KVRegion, ...], tampering: Tampering) -> None:
        super().__init__(regions)
        self._tampering = tampering

    def after_copy(self, plan: TransferPlan) -> None:
        self._tampering.has_copied(self, plan)

    def after_verify(self, plan: TransferPlan) -> None:
        self._tampering.has_verified(self, plan)


# -- throttling ------------------------------------------------------------------------------------------------------
#
# The slow link of `--host-gbs`: copy backends whose loads take as long as on a link of that speed.
#
# Stores are not slowed down. They would hold blocks of the small pool, which would change the results.


@attrs.frozen
class Throttle:
    bytes_per_s: float

    def make_backend(self, regions: tuple[KVRegion, ...]) -> CopyBackend:
        """A backend for `LocalTransport`."""
        if regions[0].device.type == "cuda":
            return _SlowCudaBackend(regions, self)
        return _SlowCpuBackend(regions, self)

    def wait(self, backend: CopyBackend, plan: TransferPlan) -> None:
        """Called in a copy thread."""
        if plan.direction is Direction.LOAD:
            time.sleep(plan.num_blocks * backend.block_bytes / self.bytes_per_s)


class _SlowCpuBackend(CpuBackend):
    def __init__(self, regions: tuple[KVRegion, ...], throttle: Throttle) -> None:
        super().__init__(regions)
        self._throttle = throttle

    def copy(self, plan: TransferPlan) -> Fence:
        fence = super().copy(plan)
        self._throttle.wait(self, plan)
        return fence


class _SlowCudaBackend(CudaBackend):
    def __init__(self, regions: tuple[KVRegion, ...], throttle: Throttle) -> None:
        super().__init__(regions)
        self._throttle = throttle

    def copy(self, plan: TransferPlan) -> Fence:
        fence = super().copy(plan)
        self._throttle.wait(self, plan)
        return fence
