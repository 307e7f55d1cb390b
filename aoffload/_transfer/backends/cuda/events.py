"""Events as fences: an event is recorded once per fence, and reused when the fence is garbage-collected."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import attrs
import torch

from ...._common.arguments import check_callable, number_of, shown
from ...._config.config import MAX_SECONDS
from ....errors import ConfigError
from .driver import CudaDriver, Handle

# -- waiting ---------------------------------------------------------------------------------------------------------
#
# How a copy thread waits for an event: blocked in the driver, or polling with ever longer sleeps.


class WaitPolicy(Protocol):
    """How to wait for an event. One object may serve several threads at once."""

    def wait(self, has_passed: Callable[[], bool], block: Callable[[], None]) -> None:
        """Return once the event has passed. `block` sleeps until then; `has_passed` asks without waiting."""
        ...


@attrs.frozen
class BlockingWait:
    """Blocks in the driver: the thread sleeps until the device interrupts it."""

    def wait(self, has_passed: Callable[[], bool], block: Callable[[], None]) -> None:
        block()


@attrs.frozen
class AdaptivePolling:
    """Polls the device. Each sleep between two polls is a share of the time waited so far, so the thread is never busy.

    A wait of `t` seconds ends at most `max(shortest_s, share * t)` late, plus the delay that the system adds to each
    sleep, and polls about `log(t / shortest_s) / share` times. A sleep is never longer than `longest_s`.
    """

    shortest_s: float = 20e-6
    longest_s: float = 1e-3
    share: float = 0.1
    clock: Callable[[], float] = time.perf_counter
    nap: Callable[[float], None] = time.sleep

    def __attrs_post_init__(self) -> None:
        for name in ("shortest_s", "longest_s", "share"):
            value = number_of(getattr(self, name))
            if value is None or not 0 < value <= MAX_SECONDS:
                raise ConfigError(name, f"must be a positive number, got {shown(getattr(self, name))}")
        check_callable("clock", self.clock, ConfigError)
        check_callable("nap", self.nap, ConfigError)

    def wait(self, has_passed: Callable[[], bool], block: Callable[[], None]) -> None:
        began_s = self.clock()
        while not has_passed():
            waited_s = self.clock() - began_s
            self.nap(min(self.longest_s, max(self.shortest_s, self.share * waited_s)))


# -- events ----------------------------------------------------------------------------------------------------------


class CudaFence:
    """A point in the work of a stream. Immutable: while this object lives, its event is not recorded again.

    `torch.cuda.Stream.wait_event` accepts it like a torch event.
    """

    __slots__ = ("_pool", "event")

    def __init__(self, pool: EventPool, event: Handle) -> None:
        self._pool = pool
        self.event = event
        """Valid for as long as the fence lives."""

    @property
    def driver(self) -> CudaDriver:
        return self._pool.driver

    def query(self) -> bool:
        with self.driver.bound():
            return self.driver.query_event(self.event)

    def synchronize(self) -> None:
        with self.driver.bound():
            self._pool.policy.wait(self.query, lambda: self.driver.synchronize_event(self.event))

    def wait(self, stream: torch.cuda.Stream | None = None) -> None:
        """Make later work on `stream` (None: the current one) wait for this point, on the device."""
        with self.driver.bound():
            waiting = self.driver.current_stream() if stream is None else self.driver.stream_of(stream)
            self.driver.wait_event(waiting, self.event)

    def __del__(self) -> None:
        # No reference is left. Streams that already wait for the event keep the point that was recorded then.
        self._pool.take_back(self.event)


class EventPool:
    """Makes fences from events. Creating an event costs more than recording one, so events are reused.

    Any thread may record and drop fences: a deque needs no lock, which a finaliser must not take.
    """

    def __init__(self, driver: CudaDriver, policy: WaitPolicy) -> None:
        self.driver = driver
        self.policy = policy
        self._idle: deque[Handle] = deque()
        self._is_over = False

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def record(self, stream: Handle) -> CudaFence:
        """A fence after all work on `stream` so far. Call it in a bound thread."""
        try:
            event = self._idle.popleft()
        except IndexError:
            event = self.driver.create_event()
        fence = CudaFence(self, event)  # from here on, dropping it returns the event, also if recording fails
        self.driver.record_event(event, stream)
        return fence

    def take_back(self, event: Handle) -> None:
        self._idle.append(event)
        if self._is_over:
            with suppress(Exception), self.driver.bound():  # a finaliser must not raise: the device may be gone
                self.clear()

    def clear(self) -> None:
        """Destroy the events that no fence uses. The events of other fences are destroyed when the fences are dropped.
        Call it in a bound thread, after the last `record`."""
        self._is_over = True
        with suppress(IndexError):  # two threads may drop their fences at once
            while True:
                self.driver.destroy_event(self._idle.popleft())
