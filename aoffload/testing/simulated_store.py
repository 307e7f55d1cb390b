"""A store of objects whose nodes are slow, hang, fail, forget, return wrong bytes and are written to by others.

Several runtimes may share one. It represents the remote machines, so it outlives the runtimes.
"""

from __future__ import annotations

import enum
import random
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import attrs

from .._common.arguments import check_int
from ..errors import StoreError

__all__ = ["SimulatedStore", "StoreCall", "StoreFault"]

Result = TypeVar("Result")


class StoreFault(enum.Enum):
    """How a call of a `SimulatedStore` fails. The value of each fault describes it."""

    ERROR = "the call fails, and nothing was done"
    LATE_ERROR = "the call fails, and was done"
    LATER = "the call fails, and is done later"
    SLOW = "the call waits, and is done then"
    HANG = "the call waits, and fails then; a write may have been done"
    GONE = "the object was evicted just now"
    LOST = "a write that is told as done, and is not"
    POISONED = "a byte that is read is another one"
    SHORT = "only a part is read"
    FOREIGN = "another object is read"


WAITS = frozenset({StoreFault.SLOW, StoreFault.HANG})
FAILS = frozenset({StoreFault.ERROR, StoreFault.HANG, StoreFault.LATE_ERROR})


@attrs.frozen
class StoreCall:
    """One call: number, kind (`exist`, `get`, `put`, `remove`), its first key, its node, and its time-out."""

    number: int
    kind: str
    key: bytes
    node: str
    timeout_s: float


class SimulatedStore:
    """An `ObjectStore` in memory, spread over `num_nodes` nodes.

    The store calls `fault` before every call to learn which fault to simulate. If a call has to wait, the store calls
    `wait`, outside its lock. It passes each delayed write to `later`. By default, `arrive` applies delayed writes. With
    `keeps_first`, a second put of a key changes nothing and raises nothing. `capacity` is a number of objects; above
    it, the oldest object is evicted.
    """

    def __init__(
        self, rng: random.Random | None = None, *, num_nodes: int = 1, capacity: int = 2**20, keeps_first: bool = False
    ) -> None:
        self.objects: dict[bytes, bytes] = {}
        self.fault: Callable[[StoreCall], StoreFault | None] = lambda call: None
        self.wait: Callable[[StoreCall], None] = lambda call: None
        self.later: Callable[[Callable[[], object]], object] = lambda write: self._on_their_way.append(write)
        self.num_calls = 0
        self.num_puts = 0
        """Objects written. An overwritten one counts again."""
        self.is_closed = False
        self._nodes = check_int("num_nodes", num_nodes, 1)
        self._capacity = check_int("capacity", capacity, 1)
        self._keeps_first = keeps_first
        self._rng = random.Random(0) if rng is None else rng
        self._lock = threading.Lock()
        self._on_their_way: list[Callable[[], object]] = []

    def __repr__(self) -> str:
        return f"<SimulatedStore {len(self.objects)} objects on {self._nodes} nodes>"

    def node_of(self, key: bytes) -> str:
        return f"node-{zlib.crc32(key) % self._nodes}"

    def exist(self, keys: Sequence[bytes], timeout_s: float) -> list[bool]:
        if not keys:
            return []
        found, fault = self._call("exist", keys[0], timeout_s, lambda: [key in self.objects for key in keys])
        if fault is StoreFault.GONE:
            self.evict(keys)
        return found or []

    def get(self, key: bytes, timeout_s: float) -> bytes | None:
        found, fault = self._call("get", key, timeout_s, lambda: self.objects.get(key))
        if fault is StoreFault.GONE:
            self.evict([key])
            return None
        return None if found is None else self._misread(found, key, fault)

    def put(self, key: bytes, value: memoryview, timeout_s: float) -> None:
        made = bytes(value)  # a copy, because the caller may reuse `value` before a delayed write

        def write() -> None:
            if not (self._keeps_first and key in self.objects):
                self.objects.pop(key, None)  # the newest is evicted last
                self.objects[key] = made
                self.num_puts += 1
            while len(self.objects) > self._capacity:
                del self.objects[next(iter(self.objects))]

        _, fault = self._call("put", key, timeout_s, write)
        if fault is StoreFault.GONE:
            self.evict([key])

    def remove(self, key: bytes, timeout_s: float) -> None:
        self._call("remove", key, timeout_s, lambda: self.objects.pop(key, None))

    def close(self) -> None:
        self.is_closed = True

    # -- changes by others --------------------------------------------------------------------------------------------

    def evict(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in keys:
                self.objects.pop(key, None)

    def arrive(self) -> None:
        """Apply the delayed writes."""
        with self._lock:
            while self._on_their_way:
                self._on_their_way.pop(0)()

    def poison(self, key: bytes, at: int, flip: int = 1) -> None:
        """Change the byte `at` of a stored object."""
        with self._lock:
            self.objects[key] = _flipped(self.objects[key], at, flip)

    # -- calls --------------------------------------------------------------------------------------------------------

    def _call(
        self, kind: str, key: bytes, timeout_s: float, do: Callable[[], Result]
    ) -> tuple[Result | None, StoreFault | None]:
        with self._lock:
            call = StoreCall(self.num_calls, kind, key, self.node_of(key), timeout_s)
            self.num_calls += 1
            fault = self.fault(call)
        if fault in WAITS:
            self.wait(call)
        if fault is StoreFault.ERROR:
            raise StoreError(f"{kind} failed on {call.node}")
        if fault is StoreFault.LATER:
            self.later(do)
            raise StoreError(f"{kind} took longer than {timeout_s} s on {call.node}")
        if fault is StoreFault.LOST and kind in ("put", "remove"):
            return None, fault
        with self._lock:
            if fault is StoreFault.HANG and self._rng.random() < 0.5:
                raise StoreError(f"{kind} took longer than {timeout_s} s on {call.node}")
            found = do()
        if fault in FAILS:
            raise StoreError(f"{kind} took longer than {timeout_s} s on {call.node}")
        return found, fault

    def _misread(self, found: bytes, key: bytes, fault: StoreFault | None) -> bytes:
        with self._lock:
            if fault is StoreFault.POISONED:
                return _flipped(found, self._rng.randrange(len(found)), self._rng.randrange(1, 256))
            if fault is StoreFault.SHORT:
                return found[: self._rng.randrange(len(found))]
            if fault is StoreFault.FOREIGN:
                others = [value for other, value in self.objects.items() if other != key]
                return self._rng.choice(others) if others else b"another object"
        return found


def _flipped(value: bytes, at: int, flip: int) -> bytes:
    changed = bytearray(value)
    changed[at] ^= flip
    return bytes(changed)
