"""A fence for each region of one load: the compute of a layer can start while later layers are still loading."""

from __future__ import annotations

import threading

import torch

from ...errors import AoffloadError
from ..fence import PASSED, Fence

__all__ = ["RegionFence", "RegionFences", "RegionNotLoaded"]


class RegionNotLoaded(AoffloadError):  # noqa: N818
    """The load ended before this region was copied: what its destination holds is anybody's guess."""


class RegionFence:
    """Passes when the bytes of one region are at their destination. Made before anybody knows when they are copied.

    A point in device work exists once the copy thread has given the copy to the device; `wait` sleeps until then, so it
    belongs into the thread of the forward, not into the event loop.
    """

    def __init__(self) -> None:
        self._is_given = threading.Event()
        self._fence: Fence | None = None
        self._error = ""

    @property
    def is_given(self) -> bool:
        """Whether `wait` and `synchronize` find a point on the device to wait for, or learn that there is none."""
        return self._is_given.is_set()

    def query(self) -> bool:
        return self._is_given.is_set() and self._inner().query()

    def synchronize(self) -> None:
        self._is_given.wait()
        self._inner().synchronize()

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """Have what `stream` (the current one, if None) is given from here on wait for the bytes, on the device.

        `RegionNotLoaded` where they never come. On a CPU, the calling thread waits for them.
        """
        self._is_given.wait()
        inner = self._inner()
        on_device = getattr(inner, "wait", None)
        if on_device is None:
            inner.synchronize()
        else:
            on_device(stream)

    def _inner(self) -> Fence:
        if self._fence is None:
            raise RegionNotLoaded(self._error)
        return self._fence

    def _end(self, fence: Fence | None, error: str) -> None:
        if not self._is_given.is_set():
            self._fence, self._error = fence, error
            self._is_given.set()


class RegionFences:
    """What `watch` of a backend returns for one job: `fences[i]` is the fence of region `i`, in the order of regions.

    The copy thread gives them, in order. Whoever learns how the job ended calls `end`, and nobody waits for ever.
    """

    def __init__(self, num_regions: int) -> None:
        self.fences = tuple(RegionFence() for _ in range(num_regions))

    def __len__(self) -> int:
        return len(self.fences)

    def __getitem__(self, index: int) -> RegionFence:
        return self.fences[index]

    def give(self, index: int, fence: Fence) -> None:
        """Region `index` was given to the device; `fence` is behind it."""
        self.fences[index]._end(fence, "")

    def end(self, error: str = "") -> None:
        """The job is over: without an `error` every region is there, with one none that was not given before."""
        for fence in self.fences:
            fence._end(None if error else PASSED, error)
