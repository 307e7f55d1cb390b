"""Calls of a store. An exception, or an answer of the wrong form, counts as a failure of the node. Each node has a
breaker for each use: after several failures, it is not called for a while.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import attrs

from ..._common.env import Env
from ..._common.tiers import Tier
from ..._config.tiers import ObjectStore
from ..._transfer.breaker import MAX_MOVES, Breaker, BreakerMove, LeftAlone, StorageMove, Use
from ..._transfer.turns import started_thread
from ...errors import StoreError, TransferRefused
from .cells import Cells
from .plans import CellLabel

# -- threads ---------------------------------------------------------------------------------------------------------
#
# Threads that take work from one queue. Each use of a store has threads of its own, so a call that hangs blocks only
# its use.

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


# -- nodes -----------------------------------------------------------------------------------------------------------
#
# The nodes of a store: the breaker of each node, and the number of its running calls.

MAX_NODES = 4096


@attrs.define(eq=False)
class Node:
    breaker: Breaker = attrs.field(factory=Breaker)
    num_running: int = 0


class Nodes:
    """The nodes for one use, with at most `most` calls at a time. A node whose breaker is on trial gets one call at a
    time. If there are several nodes, no node gets all calls, because a node that hangs would block the others. Called
    by any thread."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._nodes: dict[str, Node] = {}

    def refuses(self, name: str, now: float) -> bool:
        """Whether the node must not be called now, because its calls have failed."""
        with self._lock:
            return self._refuses(self._nodes.get(name), now)

    def refuse_all(self, now: float) -> bool:
        """Whether every node that was ever called must not be called now."""
        with self._lock:
            return bool(self._nodes) and all(self._refuses(node, now) for node in self._nodes.values())

    def has_room(self, name: str) -> bool:
        """Whether one more call may begin now. If not, it may once another call has ended."""
        with self._lock:
            return len(self._nodes) < 2 or self._node(name).num_running < self._most - 1

    def begin(self, name: str) -> None:
        with self._lock:
            self._node(name).num_running += 1

    def end(self, name: str) -> None:
        with self._lock:
            self._node(name).num_running -= 1

    def refused(self, name: str) -> None:
        """Count a refused job of this node."""
        with self._lock:
            self._node(name).breaker.refused()

    def succeeded(self, name: str, now: float) -> BreakerMove | None:
        with self._lock:
            return self._node(name).breaker.succeeded(now)

    def failed(self, name: str, now: float, error: str) -> BreakerMove | None:
        with self._lock:
            return self._node(name).breaker.failed(now, error)

    def left_alone(self, use: Use) -> list[LeftAlone]:
        """The nodes whose breaker has tripped. `use`: the use that these nodes serve."""
        with self._lock:
            found = [(name, node.breaker) for name, node in self._nodes.items()]
            return [breaker.left_alone(use, name) for name, breaker in found if breaker.is_on_trial]

    def _refuses(self, node: Node | None, now: float) -> bool:
        if node is None or not node.breaker.is_on_trial:
            return False
        return node.breaker.is_open(now) or node.num_running > 0

    def _node(self, name: str) -> Node:
        found = self._nodes.get(name)
        if found is None:
            idle = (old for old, node in self._nodes.items() if not node.num_running)
            if len(self._nodes) >= MAX_NODES and (oldest := next(idle, None)) is not None:
                del self._nodes[oldest]
            found = self._nodes[name] = Node()
        return found


# -- calls -----------------------------------------------------------------------------------------------------------

ASK_THREADS = 2
LOAD_THREADS = 4
STORE_THREADS = 2
LATE_S = 0.01
"""Seconds that a question may take beyond its time-out, because the caller waits that much longer."""


@attrs.define(eq=False)
class Asked:
    """A question that a node has not answered yet."""

    node: str
    late_s: float
    """The time from which on the answer is late."""
    is_late: bool = False
    """It was found to be late, and counted as a failure of its node."""


class StoreCalls:
    """The calls of `store` for cells of one shape, as `Steps` for the threads of the lanes."""

    def __init__(self, store: ObjectStore, cells: Cells, env: Env) -> None:
        self.store = store
        self.cells = cells
        self.nodes = {Use.ASK: Nodes(ASK_THREADS), Use.LOAD: Nodes(LOAD_THREADS), Use.STORE: Nodes(STORE_THREADS)}
        self.num_failures = 0
        self.moves: deque[StorageMove] = deque(maxlen=MAX_MOVES)
        """Changes of the breakers, until `take_moves`. Threads append."""
        self._env = env
        self._lock = threading.Lock()
        self._asked: dict[Asked, None] = {}
        """At most one in each thread."""

    def name(self, label: CellLabel) -> bytes:
        return self.cells.name(label)

    def node_of(self, name: bytes) -> str:
        """The node that has the object `name`. Empty if the store cannot tell. Called in any thread, also with a lock
        held."""
        try:
            found = self.store.node_of(name)
        except BaseException as error:  # the store is third-party code; the call that follows reports its error
            if _is_interrupt(error):
                raise
            return ""
        return found if isinstance(found, str) else ""

    def refuses(self, use: Use, node: str) -> bool:
        return self.nodes[use].refuses(node, self._env.now())

    def exist(self, node: str, names: Sequence[bytes], timeout_s: float) -> Steps[list[bool] | None]:
        """Which of the objects exist. None: the node has not answered in time."""
        if self.refuses(Use.ASK, node):
            return None
        answers: list[bool] | None = None
        problem = "no answer in time"
        asked = self._begin_to_ask(node, timeout_s)
        try:
            answers = yield lambda: _answers(self.store.exist(names, timeout_s), len(names))
        except StoreError as error:
            problem = str(error)
        finally:
            self._end_to_ask(asked)
        if answers is not None and self._env.now() <= asked.late_s:
            self._note_success(Use.ASK, node)
        elif not asked.is_late:
            self.note_failure(Use.ASK, node, problem)
        return answers

    def _begin_to_ask(self, node: str, timeout_s: float) -> Asked:
        asked = Asked(node, self._env.now() + timeout_s + LATE_S)
        self.nodes[Use.ASK].begin(node)
        with self._lock:
            self._asked[asked] = None
        return asked

    def _end_to_ask(self, asked: Asked) -> None:
        with self._lock:
            del self._asked[asked]
        self.nodes[Use.ASK].end(asked.node)

    def all_are_late(self) -> bool:
        """Whether every thread for questions waits for a late answer. Each late answer counts once as a failure of its
        node."""
        now = self._env.now()
        with self._lock:
            found = [asked for asked in self._asked if not asked.is_late and asked.late_s < now]
            for asked in found:
                asked.is_late = True
            num_late = sum(asked.is_late for asked in self._asked)
        for asked in found:
            self.note_failure(Use.ASK, asked.node, "no answer in time")
        return num_late >= ASK_THREADS

    def get(self, node: str, name: bytes, timeout_s: float) -> Steps[bytes | None]:
        """The object `name`, in memory that no other code changes; empty if it has the wrong length; None if the store
        does not have it. Raises `StoreError`."""
        num_bytes = self.cells.object_bytes
        return self.call(Use.LOAD, node, lambda: _object(self.store.get(name, timeout_s), num_bytes))

    def has(self, node: str, name: bytes, timeout_s: float) -> Steps[bool]:
        """Whether the object exists, before it is stored. Raises `StoreError`. The answer no does not count as a
        success of the node, because a full store gives it and fails afterwards."""
        try:
            found: bool = yield lambda: _answers(self.store.exist([name], timeout_s), 1)[0]
        except StoreError as error:
            self.note_failure(Use.STORE, node, str(error))
            raise
        if found:
            self._note_success(Use.STORE, node)
        return found

    def call(self, use: Use, node: str, function: Callable[[], Found]) -> Steps[Found]:
        """Call `function`. Any exception counts as a failure of the node and becomes a `StoreError`, so `function`
        should also check the answer."""
        try:
            found: Found = yield function
        except StoreError as error:
            self.note_failure(use, node, str(error))
            raise
        self._note_success(use, node)
        return found

    def note_failure(self, use: Use, node: str, error: str) -> None:
        with self._lock:
            self.num_failures += 1
        self._moved(use, node, self.nodes[use].failed(node, self._env.now(), error))

    def _note_success(self, use: Use, node: str) -> None:
        self._moved(use, node, self.nodes[use].succeeded(node, self._env.now()))

    def _moved(self, use: Use, node: str, move: BreakerMove | None) -> None:
        if move is not None:
            self.moves.append(StorageMove(Tier.REMOTE, use, node, move))

    def left_alone(self) -> tuple[LeftAlone, ...]:
        return tuple(one for use, nodes in self.nodes.items() for one in nodes.left_alone(use))

    def close(self) -> None:
        """Let the store close its connections."""
        with suppress(Exception):
            self.store.close()


def _is_interrupt(error: BaseException) -> bool:
    """Whether `error` interrupts the process, and does not come from the store. Interrupts reach only the main
    thread."""
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and isinstance(error, KeyboardInterrupt | SystemExit)


def _object(found: object, num_bytes: int) -> bytes | None:
    """The object that a store has returned, as bytes; empty if it does not have `num_bytes`. It is copied before it is
    proven, because the store may use its buffer again. `bytes` are not copied, because nothing changes them."""
    if found is None or type(found) is bytes:
        return found
    view = memoryview(found)  # type: ignore[arg-type]  # TypeError if it has no bytes
    return view.tobytes() if view.nbytes == num_bytes else b""


def _answers(found: Sequence[bool], num_wanted: int) -> list[bool]:
    answers = [bool(one) for one in found]
    if len(answers) != num_wanted:
        raise StoreError(f"{len(answers)} answers about {num_wanted} keys")
    return answers
