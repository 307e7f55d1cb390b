"""The nodes of a store: which of them are left alone for now, and how many calls each of them has."""

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
    """For one use, at most `most` calls at a time. A node on trial has one call at a time, and no node has all of them
    once there are several: one that hangs would keep the others from theirs. Called by any thread."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._nodes: dict[str, Node] = {}

    def refuses(self, name: str, now: float) -> bool:
        """Whether a call is better not made now."""
        with self._lock:
            return self._refuses(self._nodes.get(name), now)

    def refuse_all(self, now: float) -> bool:
        """Whether every node that was ever called is left alone."""
        with self._lock:
            return bool(self._nodes) and all(self._refuses(node, now) for node in self._nodes.values())

    def has_room(self, name: str) -> bool:
        """Whether one more call may begin now. If not, others will end."""
        with self._lock:
            return len(self._nodes) < 2 or self._node(name).num_running < self._most - 1

    def begin(self, name: str) -> None:
        with self._lock:
            self._node(name).num_running += 1

    def end(self, name: str) -> None:
        with self._lock:
            self._node(name).num_running -= 1

    def refused(self, name: str) -> None:
        """A job of this node is refused."""
        with self._lock:
            self._node(name).breaker.refused()

    def succeeded(self, name: str, now: float) -> BreakerMove | None:
        with self._lock:
            return self._node(name).breaker.succeeded(now)

    def failed(self, name: str, now: float, error: str) -> BreakerMove | None:
        with self._lock:
            return self._node(name).breaker.failed(now, error)

    def left_alone(self, use: Use) -> list[LeftAlone]:
        """The nodes that are left alone for `use`, which these are for."""
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
