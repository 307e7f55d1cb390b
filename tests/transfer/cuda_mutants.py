"""CUDA backends with one rule of order taken out each: shown on a simulated device, and on a real one."""

from __future__ import annotations

from aoffload._kernel.plans import TransferPlan
from aoffload._kernel.states import Direction
from aoffload._transfer.backends.cuda.backend import CudaBackend
from aoffload._transfer.backends.cuda.driver import Pieces, SourceOrder
from aoffload._transfer.backends.cuda.events import CudaFence, EventPool
from aoffload._transfer.fences import PASSED, Fence


class Unfenced(CudaBackend):
    """Copies start whenever the device likes."""

    def wait_for(self, direction: Direction, fences: tuple[Fence, ...]) -> None:
        return None


class Unordered(CudaBackend):
    """Stores read their source as early as loads may."""

    def copy_by_engine(self, pieces: Pieces, direction: Direction) -> Fence:
        stream = self._lanes[direction].stream
        self.driver.copy_batch(pieces, SourceOrder.ANY, stream)
        return self._events.record(stream)


class Unproven(CudaBackend):
    """A copy is said to be over when it was given to the device."""

    def copy(self, plan: TransferPlan) -> Fence:
        super().copy(plan)
        return PASSED


class OneEvent(CudaBackend):
    """The same event is recorded over and over."""

    def open(self, num_host_blocks: int) -> None:
        super().open(num_host_blocks)
        self._events = Recycled(self.driver, self.options.waiting)


class Recycled(EventPool):
    def record(self, stream: object) -> CudaFence:
        fence = super().record(stream)
        self._idle.append(fence.event)  # while somebody holds the fence
        return fence

    def take_back(self, event: object) -> None:
        """It is there already, and a driver destroys each event once."""
