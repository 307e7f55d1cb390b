"""Calls of a store. An exception, or an answer that makes no sense, counts as a failure of the node. Each node has a
breaker for each use: after several failures it is not called for a while.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import attrs

from ..._config.tiers import ObjectStore
from ..._kernel.states import Tier
from ..._transfer.breaker import MAX_MOVES, BreakerMove, LeftAlone, StorageMove, Use
from ..._common.env import Env
from ...errors import StoreError
from .cells import Cells
from .nodes import Nodes
from .plans import CellLabel
from .threads import Steps

ASK_THREADS = 2
LOAD_THREADS = 4
STORE_THREADS = 2
LATE_S = 0.01
"""Seconds that a question may take beyond its time-out, because the caller waits that much longer."""

Found = TypeVar("Found")


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
    view = memoryview(found)  # type: ignore[arg-type]  # a TypeError for what has no bytes
    return view.tobytes() if view.nbytes == num_bytes else b""


def _answers(found: Sequence[bool], num_wanted: int) -> list[bool]:
    answers = [bool(one) for one in found]
    if len(answers) != num_wanted:
        raise StoreError(f"{len(answers)} answers about {num_wanted} keys")
    return answers
