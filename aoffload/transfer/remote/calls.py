"""Calls of a store: whatever one raises is a failure of its node, and a node that fails is left alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from ...core.plan import CellLabel
from ...env import Env
from ...errors import StoreError
from ...remote_tier import ObjectStore
from .cells import Cells
from .nodes import Nodes, Use
from .steps import Steps

__all__ = ["LOAD_THREADS", "STORE_THREADS", "StoreCalls"]

LOAD_THREADS = 4
STORE_THREADS = 2

Found = TypeVar("Found")


class StoreCalls:
    """The calls of `store` for cells of one shape, as steps of the work of the lanes' threads."""

    def __init__(self, store: ObjectStore, cells: Cells, env: Env) -> None:
        self.store = store
        self.cells = cells
        self.nodes = {Use.ASK: Nodes(2), Use.LOAD: Nodes(LOAD_THREADS), Use.STORE: Nodes(STORE_THREADS)}
        self.num_failures = 0
        self._env = env
        self._lock = threading.Lock()

    def name(self, label: CellLabel) -> bytes:
        return self.cells.name(label)

    def node_of(self, name: bytes) -> str:
        try:
            return self.store.node_of(name)
        except Exception:  # noqa: BLE001 - somebody's store; the call that follows tells what is wrong
            return ""

    def refuses(self, use: Use, node: str) -> bool:
        return self.nodes[use].refuses(node, self._env.now())

    def exist(self, node: str, names: Sequence[bytes], timeout_s: float) -> Steps[list[bool] | None]:
        """None: it is not known."""
        if self.refuses(Use.ASK, node):
            return None
        nodes = self.nodes[Use.ASK]
        nodes.begin(node)
        try:
            asked = self.call(Use.ASK, node, lambda: _answers(self.store.exist(names, timeout_s), len(names)))
            return (yield from asked)
        except StoreError:
            return None
        finally:
            nodes.end(node)

    def call(self, use: Use, node: str, function: Callable[[], Found]) -> Steps[Found]:
        """`StoreError` for whatever it raises."""
        nodes = self.nodes[use]
        try:
            found: Found = yield function
        except Exception as error:
            self.note_failure(use, node)
            if isinstance(error, StoreError):
                raise
            raise StoreError(repr(error)) from error
        nodes.succeeded(node)
        return found

    def note_failure(self, use: Use, node: str) -> None:
        with self._lock:
            self.num_failures += 1
        self.nodes[use].failed(node, self._env.now())


def _answers(found: Sequence[bool], num_wanted: int) -> list[bool]:
    answers = [bool(one) for one in found]
    if len(answers) != num_wanted:
        raise StoreError(f"{len(answers)} answers about {num_wanted} keys")
    return answers
