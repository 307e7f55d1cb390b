"""Calls of a store: whatever one raises, and an answer that is none, is a failure of its node, and a node that fails is
left alone.
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
from ...env import Env
from ...errors import StoreError
from .cells import Cells
from .nodes import Nodes
from .plans import CellLabel
from .threads import Steps

ASK_THREADS = 2
LOAD_THREADS = 4
STORE_THREADS = 2
LATE_S = 0.01
"""What a question may take beyond its time, as whoever asks waits so much longer."""

Found = TypeVar("Found")


@attrs.define(eq=False)
class Asked:
    """A question that a node has not answered yet."""

    node: str
    late_s: float
    """When it is late."""
    is_late: bool = False
    """It was, and is a failure of its node."""


class StoreCalls:
    """The calls of `store` for cells of one shape, as steps of the work of the lanes' threads."""

    def __init__(self, store: ObjectStore, cells: Cells, env: Env) -> None:
        self.store = store
        self.cells = cells
        self.nodes = {Use.ASK: Nodes(ASK_THREADS), Use.LOAD: Nodes(LOAD_THREADS), Use.STORE: Nodes(STORE_THREADS)}
        self.num_failures = 0
        self.moves: deque[StorageMove] = deque(maxlen=MAX_MOVES)
        """What is left alone from now on, or not any more, until somebody takes it. Threads append."""
        self._env = env
        self._lock = threading.Lock()
        self._asked: dict[Asked, None] = {}
        """At most one in each thread."""

    def name(self, label: CellLabel) -> bytes:
        return self.cells.name(label)

    def node_of(self, name: bytes) -> str:
        """One for all of what the store cannot tell apart. In any thread, also with a lock held."""
        try:
            found = self.store.node_of(name)
        except BaseException as error:  # somebody's store; the call that follows tells what is wrong
            if _is_interrupt(error):
                raise
            return ""
        return found if isinstance(found, str) else ""

    def refuses(self, use: Use, node: str) -> bool:
        return self.nodes[use].refuses(node, self._env.now())

    def exist(self, node: str, names: Sequence[bytes], timeout_s: float) -> Steps[list[bool] | None]:
        """None: it is not known."""
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
        """Whether every thread that asks waits for an answer that is late. Each is a failure of its node, once."""
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
        """An object that nobody changes any more; empty if it is none of ours. `StoreError`."""
        num_bytes = self.cells.object_bytes
        return self.call(Use.LOAD, node, lambda: _object(self.store.get(name, timeout_s), num_bytes))

    def has(self, node: str, name: bytes, timeout_s: float) -> Steps[bool]:
        """Asked before it is stored. `StoreError`. A no is no success: a store that is full says so, and fails then."""
        try:
            found: bool = yield lambda: _answers(self.store.exist([name], timeout_s), 1)[0]
        except StoreError as error:
            self.note_failure(Use.STORE, node, str(error))
            raise
        if found:
            self._note_success(Use.STORE, node)
        return found

    def call(self, use: Use, node: str, function: Callable[[], Found]) -> Steps[Found]:
        """`StoreError` for whatever it raises: what looks at the answer belongs into `function`."""
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
        """Have the store let go of its connections."""
        with suppress(Exception):
            self.store.close()


def _is_interrupt(error: BaseException) -> bool:
    """Whether it is the process's and none of the store's: those reach its main thread, and no other."""
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and isinstance(error, KeyboardInterrupt | SystemExit)


def _object(found: object, num_bytes: int) -> bytes | None:
    """The object of `num_bytes` that a store gives. Its memory may be a buffer that the store uses again: it is copied
    before it is proved. `bytes` stay what they are, and cost nothing."""
    if found is None or type(found) is bytes:
        return found
    view = memoryview(found)  # type: ignore[arg-type]  # a TypeError for what has no bytes
    return view.tobytes() if view.nbytes == num_bytes else b""


def _answers(found: Sequence[bool], num_wanted: int) -> list[bool]:
    answers = [bool(one) for one in found]
    if len(answers) != num_wanted:
        raise StoreError(f"{len(answers)} answers about {num_wanted} keys")
    return answers
