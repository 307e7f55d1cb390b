"""Threads that take work from one queue: those of one use of a store, so that a use that hangs keeps only its own."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from ..._transfer.turns import started_thread
from ...env import Env
from ...errors import StoreError, TransferRefused

Found = TypeVar("Found")
Steps: TypeAlias = Generator[Callable[[], Any], Any, Found]


def run_steps(steps: Steps[Found]) -> Found:
    """Do the work in this thread, one that no interrupt reaches: whatever a call raises there, its store has failed."""
    try:
        call = next(steps)
        while True:
            try:
                found = call()
            except BaseException as error:  # noqa: BLE001 - somebody's store, and perhaps a panic of its Rust or C++
                call = steps.throw(_store_error(error))
            else:
                call = steps.send(found)
    except StopIteration as over:
        result: Found = over.value
        return result


def _store_error(error: BaseException) -> StoreError:
    try:
        return StoreError(str(error) if isinstance(error, StoreError) else repr(error))
    except BaseException:  # noqa: BLE001 - the words are the store's, too
        return StoreError(f"a {type(error).__name__} that cannot be shown")


Work = TypeVar("Work")
IDLE_S = 10.0
"""How long idle threads may take to end."""


class MakesThreads(Protocol):
    """Called like `Threads`."""

    def __call__(
        self, name: str, num_threads: int, take: Callable[[deque[Any]], Any], do: Callable[[Any], Steps[None]],
        over: Callable[[], None], env: Env,
    ) -> Threads[Any]: ...  # fmt: skip


class Threads(Generic[Work]):
    """`take` removes from the queue what a thread is to do next, or returns None; `do` is its work, done without the
    lock. Both are called in the threads, which are daemons: what hangs keeps its thread and never the process. `over`
    is called when the last thread has ended. `TransferRefused`: one cannot be started, and none is left."""

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
        with self.lock:  # held until the threads are noted: they may end at once
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
        """What `take` depends on has changed."""
        with self.lock:
            self.lock.notify_all()

    def stop(self) -> None:
        """Refuse more work, and end the threads when nothing waits."""
        with self.lock:
            self._refusal = "the transport is closed"
            self.lock.notify_all()

    def join(self, deadline_s: float) -> bool:
        """Whether all threads ended until `deadline_s`, on `time.monotonic`."""
        with self.lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        with self.lock:
            return not self._threads

    def end(self) -> None:
        """End threads that have had no work yet."""
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
                        self.lock.notify()  # one after the other: no thread is woken that finds nothing
                    return found
                self.lock.wait()
