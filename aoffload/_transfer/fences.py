"""Fences: points in device work, and the only evidence that work is over.

- `Fence` is the protocol; `torch.cuda.Event` satisfies it. `OnlyAfter` names the only fences that a copy waits for.
- `StepFences` keeps the fences of ended steps, so that a load waits only for the steps that used its destinations.
  `LastUses` in the kernel says which step that was.
- `RegionFences` has one fence per region of a load, for layer-wise overlap: a layer computes while later layers are
  still loading.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import attrs

from .._common.arguments import as_tuple, check_has, check_int
from .._kernel.plans import Completion
from .._kernel.states import LANDED
from ..errors import RegionNotLoaded


@runtime_checkable
class Fence(Protocol):
    """A point in device work. `torch.cuda.Event` satisfies it."""

    def query(self) -> bool:
        """Whether the work before this point is over, without waiting."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread (never the event loop's) until the work before this point is over."""
        ...


@attrs.frozen
class PassedFence:
    """A fence after work that was already over when the fence was recorded. On a CPU, all work is over by then."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


def is_known_to_have_passed(fence: Fence) -> bool:
    """Whether the work before `fence` is known to be over. False if the driver raises: the copies that wait for the
    fence report the error."""
    try:
        return fence.query()
    except Exception:  # noqa: BLE001
        return False


def _as_fences(fences: Iterable[Fence]) -> tuple[Fence, ...]:
    found = as_tuple("fences", fences, "Fence")
    for fence in found:
        check_has("fences", fence, "Fence", "query synchronize")
    return found


@attrs.frozen
class OnlyAfter:
    """A value for `after=`: the copy waits for `fences` and for nothing else. Use it if all work that touches the
    copy's blocks is over once these fences have passed. `LocalTransport` then records no fence of its own. Other
    transports may wait for more."""

    fences: tuple[Fence, ...] = attrs.field(default=(), converter=_as_fences)

    def query(self) -> bool:
        return all(fence.query() for fence in self.fences)

    def synchronize(self) -> None:
        for fence in self.fences:
            fence.synchronize()


PASSED = PassedFence()
ORDERED = OnlyAfter()
"""Your own streams run the copy after all work that touches its blocks. Use it only if a block is freed after that work
in stream order, and is not handed out earlier."""


@attrs.define(eq=False)
class StepFences:
    """The fences of ended steps, for a program that drives a `Ledger`. Call `ended` before a step ends, and pass the
    result of `Ledger.last_step` for a load to `before_load`. Call both in the ledger's thread."""

    _pending: deque[tuple[int, Fence | None]] = attrs.field(init=False, factory=deque)
    """Ended steps whose fences may not have passed yet, by number, the oldest first. A fence is None if none could be
    recorded. The next fence that is recorded is later, and replaces it."""
    _last: int = attrs.field(init=False, default=0)
    """The number of the last step that has ended."""

    def ended(self, number: int, fence: Fence | None) -> None:
        """Record the end of step `number`, which is `Ledger.num_steps_ended + 1`. `fence` is after all compute so far.
        None: no fence could be recorded."""
        if type(number) is not int:
            check_int("number", number, 0)
        if number > self._last + 1:
            self._pending.append((self._last + 1, None))  # steps whose ends were not reported
        self._last = max(self._last, number)
        if fence is not None:
            while self._pending and self._pending[-1][1] is None:
                number = self._pending.pop()[0]  # the fence also covers the earlier steps that have none
        if fence is not PASSED:
            self._pending.append((number, fence))
        self._forget_passed()

    def before_load(self, number: int) -> OnlyAfter | None:
        """The fences for a load whose destinations were used by steps up to `number`. None if the load has to wait for
        all compute so far, because the steps are unknown (0), or one of them has no fence."""
        if type(number) is not int:
            check_int("number", number, 0)
        self._forget_passed()
        if not 0 < number <= self._last:
            return None
        fences: list[Fence] = []
        for step, fence in self._pending:
            if step <= number:
                if fence is None:
                    return None
                fences.append(fence)
        return OnlyAfter(fences) if fences else ORDERED

    def _forget_passed(self) -> None:
        """Forget the oldest fences that have passed. The next fence replaces a fence that raises."""
        pending = self._pending
        while pending:
            number, fence = pending[0]
            if fence is None:
                if len(pending) == 1:
                    return
                pending.popleft()
                pending[0] = number, pending[0][1]
                continue
            try:
                has_passed = fence.query()
            except Exception:  # noqa: BLE001 - a driver error: nothing can be learned from this fence any more
                pending[0] = number, None
                continue
            if not has_passed:
                return
            pending.popleft()


if TYPE_CHECKING:
    from torch.cuda import Stream


class RegionFence:
    """Passes when one job has copied one region. It exists before the copy is submitted to the device.

    There is a point in device work only once the copy thread has submitted the copy. `wait` sleeps until then, so call
    it in the thread of the forward, not in the event loop.
    """

    def __init__(self) -> None:
        self._is_given = threading.Event()
        self._ending = threading.Lock()
        self._fence: Fence | None = None
        self._error = ""

    @property
    def is_given(self) -> bool:
        """Whether the copy was submitted, or is known never to be: `wait` does not sleep for the copy thread then."""
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
        with self._ending:  # the copy thread may give while a waiter gives up
            if not self._is_given.is_set():
                self._fence, self._error = fence, error
                self._is_given.set()


class RegionFences:
    """The fences of one job; `fences[i]` belongs to region `i`.

    The copy thread sets them with `give`, in order. When the job has ended, `end` sets the remaining ones, so that
    every wait ends.
    """

    def __init__(self, num_regions: int) -> None:
        self.fences = tuple(RegionFence() for _ in range(num_regions))
        self._forks: list[RegionFences] = []

    def __len__(self) -> int:
        return len(self.fences)

    def __getitem__(self, index: int) -> RegionFence:
        return self.fences[index]

    def fork(self) -> RegionFences:
        """Separate fences of the same regions for one waiter: giving them up does not affect other waiters."""
        forked = RegionFences(len(self))
        self._forks.append(forked)  # first: fences given from here on reach it, too
        for fence, own in zip(self.fences, forked.fences, strict=True):
            if fence.is_given:
                own._end(fence._fence, fence._error)
        return forked

    def give(self, index: int, fence: Fence) -> None:
        """The copy of region `index` was submitted to the device. `fence` comes after it."""
        self._end(index, fence, "")

    def end(self, error: str = "") -> None:
        """The job is over. Without `error`, all regions are loaded; with it, regions not given before never will be."""
        for index in range(len(self)):
            self._end(index, None if error else PASSED, error)

    def _end(self, index: int, fence: Fence | None, error: str) -> None:
        self.fences[index]._end(fence, error)
        for forked in tuple(self._forks):
            forked.fences[index]._end(fence, error)


@attrs.frozen
class LoadedRegion:
    """A fence that passes when every job of a load has copied one region. Without jobs, the fence has passed.

    `torch.cuda.Stream.wait_event` accepts it like a torch event.
    """

    jobs: tuple[RegionFence, ...]

    @property
    def is_given(self) -> bool:
        """Whether all copies of the region were submitted to the device, or are known never to be submitted. While this
        is False, `wait` and `synchronize` sleep."""
        return all(fence.is_given for fence in self.jobs)

    def query(self) -> bool:
        """Whether the region is loaded, without waiting. Raises `RegionNotLoaded` if it never will be loaded."""
        return all(fence.query() for fence in self.jobs)

    def synchronize(self) -> None:
        """Block the calling thread (never the event loop's) until the region is loaded. Raises `RegionNotLoaded` if it
        never will be."""
        for fence in self.jobs:
            fence.synchronize()

    def wait(self, stream: Stream | None = None) -> None:
        """Make later work on `stream` (None: the current one) wait for the region, on the device.

        Call it in the thread of the forward. The thread sleeps until the copy was submitted to the device, or, on a
        CPU, until the region is loaded. Raises `RegionNotLoaded` if it never will be.
        """
        for fence in self.jobs:
            fence.wait(stream)

    def give_up(self, error: str) -> None:
        """Make waits for the copy thread raise `RegionNotLoaded` now. Copies that were already submitted, the load, and
        other waiters for the same jobs are not affected. Callable in any thread."""
        for fence in self.jobs:
            fence.give_up(error)


@runtime_checkable
class WatchesRegions(Protocol):
    """A transport or a backend that copies a watched load region by region. With any other, the regions are loaded only
    when the whole load is."""

    @property
    def num_regions(self) -> int: ...

    def watch(self, job_id: int, fences: RegionFences) -> None:
        """Copy the load `job_id`, which is launched next, region by region, and `give` each fence once it is
        recorded."""
        ...

    def forget(self, job_id: int) -> None:
        """The job is over, or was never launched. Callable in any thread, and twice."""
        ...


class RegionWatch:
    """The watched loads, from the first `fences_of` until they are settled. For the event loop's thread."""

    def __init__(self, transport: object) -> None:
        self._transport = transport if isinstance(transport, WatchesRegions) else None
        self._fences: dict[int, RegionFences] = {}

    @property
    def num_regions(self) -> int | None:
        """None if the transport does not tell regions apart."""
        return None if self._transport is None else self._transport.num_regions

    @property
    def num_watched(self) -> int:
        return len(self._fences)

    def fences_of(self, job_id: int, completion: Completion | None = None) -> RegionFences:
        """The fences of a job that is not settled. If its `completion` has already arrived, they have ended with it. A
        job that is already launched is watched as a whole. Requests that share the load later get the same fences."""
        if completion is not None:
            over = RegionFences(1)
            over.end(_error_of(completion))
            return over
        if job_id not in self._fences:
            self._fences[job_id] = RegionFences(self.num_regions or 1)
        return self._fences[job_id]

    def launch(self, job_id: int) -> None:
        """Called before the job is launched."""
        if self._transport is not None and job_id in self._fences:
            self._transport.watch(job_id, self._fences[job_id])

    def settle(self, completion: Completion) -> None:
        """End the fences of the job, however it ended. Does nothing for a job that is not watched."""
        if self._fences:
            self.end(completion.job_id, _error_of(completion))

    def end(self, job_id: int, error: str) -> None:
        fences = self._fences.pop(job_id, None)
        if fences is None:
            return
        if self._transport is not None:
            self._transport.forget(job_id)
        fences.end(error)


def _error_of(completion: Completion) -> str:
    """The error for the fences; empty if everything has landed."""
    return "" if completion.outcome is LANDED else f"{completion.outcome.value}: {completion.error}"
