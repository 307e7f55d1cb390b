"""A fence for each region of one load: the compute of a layer can start while later layers are still loading."""

from __future__ import annotations

import threading
from typing import Protocol, runtime_checkable

import torch

from ...core.plan import Completion, Outcome
from ...errors import AoffloadError
from ..fence import PASSED, Fence

__all__ = ["RegionFence", "RegionFences", "RegionNotLoaded", "RegionWatch", "WatchesRegions"]


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


@runtime_checkable
class WatchesRegions(Protocol):
    """A backend that copies a watched load region after region. Others copy it as any other."""

    def watch(self, job_id: int) -> RegionFences:
        """To be called before the load `job_id` is launched."""
        ...

    def forget(self, job_id: int) -> None:
        """The job is over, or was never launched. Twice does no harm."""
        ...


class RegionWatch:
    """Which loads of a transport are watched: from before their launch until their completion is delivered."""

    def __init__(self, backend: object, num_regions: int) -> None:
        self._backend = backend if isinstance(backend, WatchesRegions) else None
        self._num_regions = num_regions
        self._fences: dict[int, RegionFences] = {}

    def begin(self, job_id: int) -> RegionFences:
        """Before the launch. Whoever shares the load later gets the same fences."""
        if job_id not in self._fences:
            backend = self._backend
            self._fences[job_id] = RegionFences(self._num_regions) if backend is None else backend.watch(job_id)
        return self._fences[job_id]

    def end(self, completion: Completion) -> None:
        """However it ended, nobody waits for it any more. In any thread, for jobs that nobody watches, too."""
        fences = self._fences.pop(completion.job_id, None)
        if fences is None:
            return
        if self._backend is not None:
            self._backend.forget(completion.job_id)
        has_landed = completion.outcome is Outcome.LANDED
        fences.end("" if has_landed else f"{completion.outcome.value}: {completion.error}")
