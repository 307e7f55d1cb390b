"""The slow link of `--host-gbs`: copy backends whose loads wait until a link of that speed would be done.

Stores do not: they would hold blocks of the small pool, which is another matter.
"""

from __future__ import annotations

import time

import attrs

from .._kernel.plans import TransferPlan
from .._kernel.states import Direction
from .._transfer.backends.base import CopyBackend
from .._transfer.backends.cpu import CpuBackend
from .._transfer.backends.cuda import CudaBackend
from .._transfer.fences import Fence
from .._transfer.region import KVRegion

__all__ = ["Throttle"]


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
