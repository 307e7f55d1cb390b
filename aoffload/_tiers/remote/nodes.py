"""The nodes of a store: the breaker of each node, and the number of its running calls."""

from __future__ import annotations

import threading

import attrs

from ..._transfer.breaker import Breaker, BreakerMove, LeftAlone, Use

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
