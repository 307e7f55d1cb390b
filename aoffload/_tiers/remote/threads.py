"""Threads that take work from one queue. Each use of a store has threads of its own, so a call that hangs blocks only
its use."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from ..._transfer.turns import started_thread
from ..._common.env import Env
from ...errors import StoreError, TransferRefused

Found = TypeVar("Found")
Steps: TypeAlias = Generator[Callable[[], Any], Any, Found]


def run_steps(steps: Steps[Found]) -> Found:
    """Do the work in this thread, which must not be the main thread. No interrupt reaches it, so each exception of a
    call comes from the store."""
    try:
        call = next(steps)
        while True:
            try:
                found = call()
            except BaseException as error:  # noqa: BLE001 - third-party code, which may panic in Rust or C++
                call = steps.throw(_store_error(error))
            else:
                call = steps.send(found)
    except StopIteration as over:
        result: Found = over.value
        return result


def _store_error(error: BaseException) -> StoreError:
    try:
        return StoreError(str(error) if isinstance(error, StoreError) else repr(error))
    except BaseException:  # noqa: BLE001 - the text comes from the store, too
        return StoreError(f"a {type(error).__name__} that cannot be shown")


Work = TypeVar("Work")
IDLE_S = 10.0
"""Seconds that idle threads may take to end."""


class MakesThreads(Protocol):
    """Has the signature of `Threads`."""

    def __call__(
        self, name: str, num_threads: int, take: Callable[[deque[Any]], Any], do: Callable[[Any], Steps[None]],
        over: Callable[[], None], env: Env,
    ) -> Threads[Any]: ...  # fmt: skip


class Threads(Generic[Work]):
    """`take` removes the next work from the queue, or returns None; `do` does the work, without the lock. Both are
    called in the threads, which are daemons: a call that hangs keeps its thread, but never the process. `over` is
    called when the last thread has ended. `TransferRefused` if a thread cannot be started: then the others have ended,
    too."""

    def __init__(
        self, name: str, num_threads: int, take: Callable[[deque[Work]], Work | None],
        do: Callable[[Work], Steps[None]], over: Callable[[], None], env: Env,
    ) -> None:  # fmt: skip
        self.lock = threading.Condition()
        self._take, self._do, self._over = take, do, over
        self._waiting: deque[Work] = deque()
        self._refusal = ""
        self._threads: dict[threading.Thread, None] = {}
        try:
            self._start(name, num_threads, env)
        except BaseException:
            self.end()
            raise

    def _start(self, name: str, num_threads: int, env: Env) -> None:
        with self.lock:  # held until the threads are recorded, because they may end at once
            for number in range(num_threads):
                self._threads[started_thread(env, self._run, f"aoffload-remote-{name}-{number}")] = None

    def submit(self, work: Work) -> None:
        """`TransferRefused` after `stop`."""
        with self.lock:
            if self._refusal:
                raise TransferRefused(self._refusal)
            self._waiting.append(work)
            self.lock.notify()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def look_again(self) -> None:
        """Let the threads call `take` again, because its conditions have changed."""
        with self.lock:
            self.lock.notify_all()

    def stop(self) -> None:
        """Refuse new work, and end the threads once the queue is empty."""
        with self.lock:
            self._refusal = "the transport is closed"
            self.lock.notify_all()

    def join(self, deadline_s: float) -> bool:
        """Whether all threads ended before `deadline_s`, in seconds of `time.monotonic`."""
        with self.lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        with self.lock:
            return not self._threads

    def end(self) -> None:
        """Stop threads that have had no work, and wait for their end."""
        self.stop()
        self.join(time.monotonic() + IDLE_S)

    def _run(self) -> None:
        try:
            while (work := self._next()) is not None:
                run_steps(self._do(work))
        finally:
            with self.lock:
                self._threads.pop(threading.current_thread(), None)
                is_last = not self._threads
            if is_last:
                self._over()

    def _next(self) -> Work | None:
        with self.lock:
            while True:
                found = self._take(self._waiting)
                if found is not None or (self._refusal and not self._waiting):
                    if found is None or self._waiting:
                        self.lock.notify()  # each thread wakes the next, so none is woken for nothing
                    return found
                self.lock.wait()
