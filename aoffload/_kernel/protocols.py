"""Protocols for programs: pools of device blocks, watchers of cached blocks, eviction orders.

Objects of any class will do. This file is never compiled, so classes may also derive from the protocols here.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, Protocol

from .records import Part


class DevicePool(Protocol):
    """The free ids of the device blocks. The default is a `FreeList`.

    The methods are called in the middle of changes, and their results are not checked. So they must not raise. If a
    method raises, blocks may be lost and requests may wait forever: close the runtime, or make a new ledger.
    """

    @property
    def num_blocks(self) -> int:
        """Number of usable blocks, without the null block."""
        ...

    @property
    def num_free(self) -> int: ...

    def take(self, num_blocks: int) -> array[int]:
        """Take exactly `num_blocks` ids. The caller has checked that there are enough."""
        ...

    def give(self, block_ids: array[int]) -> None: ...

    def free_ids(self) -> Iterable[int]: ...


class BlockWatcher(Protocol):
    """Receives each change of the set of cached blocks, right after the change and in the middle of a call. It must not
    call the ledger. Its exceptions are dropped. Blocks that move from one run to another stay cached and are not
    reported."""

    def part_changed(self, part: Part, first: int, stop: int) -> object:
        """`part` held units `[first, stop)` of its run, and holds `[part.first, part.stop)` now."""

    def all_cleared(self, epoch: int) -> object:
        """Nothing is cached any more. What is cached later belongs to `epoch`."""


class Watchers:
    """Several watchers as one. Their exceptions are dropped, because the change that they hear of has to be
    completed."""

    def __init__(self, watchers: tuple[BlockWatcher, ...]) -> None:
        self.watchers = watchers

    def part_changed(self, part: Part, first: int, stop: int) -> None:
        for watcher in self.watchers:
            with suppress(BaseException):
                watcher.part_changed(part, first, stop)

    def all_cleared(self, epoch: int) -> None:
        for watcher in self.watchers:
            with suppress(BaseException):
                watcher.all_cleared(epoch)


class EvictionOrder(Protocol):
    """The eviction order of one tier. It contains every unpinned part that has blocks. The oldest part loses its tail
    first.

    In full attention, the end of a path must be evicted before its start: a block whose prefix was evicted cannot be
    found, and only takes space. When a use ends, the cache adds the last part of the path first, so an order by time
    has this property. Nothing checks it.

    A factory of orders is called once to check its result, once for each tier, and again at each reset. It has to
    return a new order at each call.

    An order may write `Part.rank`, a number that means nothing to the cache: runs whose parts differ in rank are not
    merged, both halves of a split run have its rank, and a run whose rank is not 0 does not grow.

    The methods must neither raise nor call the ledger, because they are called in the middle of changes. If a method
    does, or returns a wrong answer, the tier no longer uses the order: it evicts its parts in the order in which they
    were added. The error is handled like that of a hook: the call is completed, and then raises `ExtensionError`, which
    a runtime reports instead.
    """

    def add(self, part: Part) -> None:
        """Insert `part`, which was just unpinned."""
        ...

    def add_newer(self, part: Part, than: Part) -> None:
        """Insert `part` right after `than`, to be evicted after it. At a split, `part` is the head and `than` the tail:
        the tail is evicted first, because it could not be found without its head. At a merge, a part without blocks
        takes the place of the part `than`, which is removed next."""
        ...

    def add_back(self, part: Part) -> None:
        """Insert `part` again at its old place, by `last_use`, because it was pinned but not used."""
        ...

    def remove(self, part: Part) -> None:
        """Remove `part`. There are three reasons: it was pinned; it has no references and has lost its blocks; or it
        has blocks but no references, and is merged into the part after it."""
        ...

    def oldest(self) -> Part | None:
        """The part to evict from next. None only if the order has no parts."""
        ...

    def are_adjacent(self, older: Part, newer: Part) -> bool:
        """Whether `newer` is evicted right after `older`, so that the cache may merge their runs. An order that always
        returns False is correct, but keeps many short runs."""
        ...

    def __iter__(self) -> Iterator[Part]: ...


class ComparedOrder(EvictionOrder, Protocol):
    """An order whose parts can be compared with those of another order of its kind."""

    def parts(self) -> Iterable[Part]:
        """All parts, in any order."""
        ...

    def key(self, part: Part) -> Any:
        """Of the first parts of several orders of this kind, the part with the smallest key is evicted first."""
        ...
