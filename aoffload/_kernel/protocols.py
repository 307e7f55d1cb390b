"""Protocols for programs: pools of device blocks, engines that own the device blocks, watchers of cached blocks,
eviction orders.

Objects of any class will do. This file is never compiled, so classes may also derive from the protocols here.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Protocol

from .records import Part


class DevicePool(Protocol):
    """The free ids of the device blocks. By default a `FreeList`."""

    @property
    def num_blocks(self) -> int:
        """All usable blocks, without the null block."""
        ...

    @property
    def num_free(self) -> int: ...

    def take(self, num_blocks: int) -> array[int]:
        """Take exactly `num_blocks` ids. The caller has checked that there are enough."""
        ...

    def give(self, block_ids: array[int]) -> None: ...

    def free_ids(self) -> Iterable[int]: ...


class EngineBlocks(Protocol):
    """An engine's pool of device blocks, as the ledger calls it.

    Both methods are called in the middle of ledger calls, also of calls about other requests. They must neither raise
    nor call the ledger: they only count references of each block. A block may be held several times, and is given back
    as often.
    """

    def hold(self, block_ids: array[int]) -> object:
        """A copy touches these blocks from now on: keep their contents, and do not reuse them, until `give`. vLLM:
        `touch`."""
        ...

    def give(self, block_ids: array[int]) -> object:
        """The copy does not touch them any more. vLLM: `free_blocks`."""
        ...


class FindsBlocks(EngineBlocks, Protocol):
    """For an engine that can find, in its prefix cache, blocks that a request's table no longer names."""

    def find(self, request_id: str, group: int, start: int, stop: int) -> Sequence[int]:
        """The engine's ids of blocks `[start, stop)` of a request, in group number `group`. 0 for a block that the
        engine does not have, or that a forward will write which is not submitted yet. The request may be over: of
        several requests with this id, the last one is meant."""
        ...


class BlockWatcher(Protocol):
    """Receives each change of the set of cached blocks, right after the change and in the middle of a call. It must not
    call the ledger. Its exceptions are dropped. Blocks that move from one run to another stay cached and are not
    reported."""

    def part_changed(self, part: Part, first: int, stop: int) -> object:
        """`part` held units `[first, stop)` of its run, and holds `[part.first, part.stop)` now."""

    def all_cleared(self, epoch: int) -> object:
        """Nothing is cached any more. What is cached later belongs to `epoch`."""


class Shielded:
    """A watcher whose exceptions are dropped, because the change that it reports has to be completed."""

    def __init__(self, watcher: BlockWatcher) -> None:
        self._watcher = watcher

    def part_changed(self, part: Part, first: int, stop: int) -> None:
        with suppress(BaseException):
            self._watcher.part_changed(part, first, stop)

    def all_cleared(self, epoch: int) -> None:
        with suppress(BaseException):
            self._watcher.all_cleared(epoch)


class EvictionOrder(Protocol):
    """The eviction order of one tier. It has every unpinned part with blocks; the oldest one loses its tail first.

    The methods must not raise: they are called in the middle of changes. After an error the blocks of the tier may be
    lost, and the runtime turns the cache off."""

    def add(self, part: Part) -> None:
        """`part` was just unpinned."""
        ...

    def add_newer(self, part: Part, than: Part) -> None:
        """Insert `part` right after `than`, to be evicted after it. `part` is the head of a split and `than` its tail:
        the tail is evicted first, because it could not be found without its head."""
        ...

    def add_back(self, part: Part) -> None:
        """Reinsert `part` at its old place, by `last_use`: it was pinned, but not used."""
        ...

    def remove(self, part: Part) -> None: ...

    def oldest(self) -> Part | None: ...

    def __iter__(self) -> Iterator[Part]: ...
