"""A fence for each region of a load: the compute of a layer can start while later layers are still loading."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import attrs

from ..core.plan import Completion, Outcome
from ..errors import RegionNotLoaded
from .fence import PASSED, Fence

if TYPE_CHECKING:
    from torch.cuda import Stream

__all__ = ["LoadedRegion", "RegionFence", "RegionFences", "RegionWatch", "WatchesRegions"]


class RegionFence:
    """Passes when one job has brought the bytes of one region. Made before anybody knows when they are copied.

    A point in device work exists once the copy thread has given the copy to the device; `wait` sleeps until then, so it
    belongs into the thread of the forward, not into the event loop.
    """

    def __init__(self) -> None:
        self._is_given = threading.Event()
        self._ending = threading.Lock()
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

    def wait(self, stream: Stream | None = None) -> None:
        """See `LoadedRegion.wait`."""
        self._is_given.wait()
        inner = self._inner()
        on_device = getattr(inner, "wait", None)
        if on_device is None:
            inner.synchronize()
        else:
            on_device(stream)

    def give_up(self, error: str) -> None:
        """See `LoadedRegion.give_up`."""
        self._end(None, error)

    def _inner(self) -> Fence:
        if self._fence is None:
            raise RegionNotLoaded(self._error)
        return self._fence

    def _end(self, fence: Fence | None, error: str) -> None:
        with self._ending:  # the copy thread gives, while somebody gives up
            if not self._is_given.is_set():
                self._fence, self._error = fence, error
                self._is_given.set()


class RegionFences:
    """The fences of one job: `fences[i]` is that of region `i`, in the order of regions.

    The copy thread gives them, in order. Whoever learns how the job ended calls `end`, and nobody waits for ever.
    """

    def __init__(self, num_regions: int) -> None:
        self.fences = tuple(RegionFence() for _ in range(num_regions))
        self._forks: list[RegionFences] = []

    def __len__(self) -> int:
        return len(self.fences)

    def __getitem__(self, index: int) -> RegionFence:
        return self.fences[index]

    def fork(self) -> RegionFences:
        """Fences of the same regions for one of those who wait: whoever gives them up does so for nobody else."""
        forked = RegionFences(len(self))
        self._forks.append(forked)  # first: what is given from here on is given to it, too
        for fence, own in zip(self.fences, forked.fences, strict=True):
            if fence.is_given:
                own._end(fence._fence, fence._error)
        return forked

    def give(self, index: int, fence: Fence) -> None:
        """Region `index` was given to the device; `fence` is behind it."""
        self._end(index, fence, "")

    def end(self, error: str = "") -> None:
        """The job is over: without an `error` every region is there, with one none that was not given before."""
        for index in range(len(self)):
            self._end(index, None if error else PASSED, error)

    def _end(self, index: int, fence: Fence | None, error: str) -> None:
        self.fences[index]._end(fence, error)
        for forked in tuple(self._forks):
            forked.fences[index]._end(fence, error)


@attrs.frozen
class LoadedRegion:
    """A fence: passes when every job of a load has brought the bytes of one region. There may be none, and it has.

    `torch.cuda.Stream.wait_event` takes it like an event of torch's own.
    """

    jobs: tuple[RegionFence, ...]

    @property
    def is_given(self) -> bool:
        """Whether `wait` and `synchronize` find points on the device to wait for, or learn that there are none. Only
        then do they return without sleeping for the copy thread."""
        return all(fence.is_given for fence in self.jobs)

    def query(self) -> bool:
        """Whether the bytes are there, without waiting. `RegionNotLoaded` if they never will be."""
        return all(fence.query() for fence in self.jobs)

    def synchronize(self) -> None:
        """Block the calling thread (never the event loop's) until they are. `RegionNotLoaded` if they never will be."""
        for fence in self.jobs:
            fence.synchronize()

    def wait(self, stream: Stream | None = None) -> None:
        """Have what `stream` (the current one, if None) is given from here on wait for the bytes, on the device.

        For the thread of the forward: it sleeps until the copy was given to the device, and on a CPU until the bytes
        are there. `RegionNotLoaded` where they never come.
        """
        for fence in self.jobs:
            fence.wait(stream)

    def give_up(self, error: str) -> None:
        """Have whoever waits here for the copy thread raise `RegionNotLoaded` now. What was given to the device already
        is unharmed; so are the load, and others who wait for the same jobs. In any thread."""
        for fence in self.jobs:
            fence.give_up(error)


@runtime_checkable
class WatchesRegions(Protocol):
    """A transport or a backend that copies a watched load region after region. Others copy it as any other, and its
    regions are there when all of it is."""

    @property
    def num_regions(self) -> int: ...

    def watch(self, job_id: int, fences: RegionFences) -> None:
        """Copy the load `job_id`, which is launched next, region after region, and give each fence when it is known."""
        ...

    def forget(self, job_id: int) -> None:
        """The job is over, or was never launched. In any thread; twice does no harm."""
        ...


class RegionWatch:
    """Which loads are watched: from being asked for until they are settled. In the event loop's thread."""

    def __init__(self, transport: object) -> None:
        self._transport = transport if isinstance(transport, WatchesRegions) else None
        self._fences: dict[int, RegionFences] = {}

    @property
    def num_regions(self) -> int | None:
        """None: the transport does not tell them apart."""
        return None if self._transport is None else self._transport.num_regions

    @property
    def num_watched(self) -> int:
        return len(self._fences)

    def fences_of(self, job_id: int, completion: Completion | None = None) -> RegionFences:
        """The fences of a job that is not settled: a `completion` of it has come, or will. What is launched already is
        watched as a whole. Whoever shares the load later gets the same fences."""
        if completion is not None:
            over = RegionFences(1)
            over.end(_error_of(completion))
            return over
        if job_id not in self._fences:
            self._fences[job_id] = RegionFences(self.num_regions or 1)
        return self._fences[job_id]

    def launch(self, job_id: int) -> None:
        """Before the launch."""
        if self._transport is not None and job_id in self._fences:
            self._transport.watch(job_id, self._fences[job_id])

    def settle(self, completion: Completion) -> None:
        """However it ended, nobody waits for it any more. Of jobs that nobody watches, too."""
        self.end(completion.job_id, _error_of(completion))

    def end(self, job_id: int, error: str) -> None:
        fences = self._fences.pop(job_id, None)
        if fences is None:
            return
        if self._transport is not None:
            self._transport.forget(job_id)
        fences.end(error)


def _error_of(completion: Completion) -> str:
    """Empty: all of it is there."""
    return "" if completion.outcome is Outcome.LANDED else f"{completion.outcome.value}: {completion.error}"
