"""A digest for each block, by which routers know it. The index makes none of these."""

from __future__ import annotations

from collections import OrderedDict

import attrs

from aoffload._kernel.prefix import TOKEN_BYTES, Hasher

from .changes import Change, Kind

__all__ = ["BlockDigests", "Digests"]

MAX_KEPT_RUNS = 8


@attrs.frozen
class BlockDigests:
    parent: bytes | None
    """Digest of all before the first unit. None at the beginning of a prompt, and for removed units."""
    digests: list[bytes]


class Digests:
    """Makes one digest for each unit, of all tokens up to its end, as in the index. If all groups have one block size,
    a unit is a block; else it is the least that a hit can cover, and hits are its multiples.

    Runs lose their tail unit by unit. To avoid hashing them from the start each time, the digests of the last few runs
    that lost units are kept.
    """

    def __init__(self, unit_tokens: int) -> None:
        self._unit_bytes = unit_tokens * TOKEN_BYTES
        self._kept: OrderedDict[tuple[int, int], tuple[Change, list[bytes]]] = OrderedDict()

    def of(self, change: Change) -> BlockDigests:
        """The digests of units `[change.start, change.stop)`."""
        if change.kind is Kind.STORED:
            return self._hash(change, change.start)
        first, last = change.start - change.run_start, change.stop - change.run_start
        return BlockDigests(None, self._whole(change)[first:last])  # removed units need no parent

    def _whole(self, change: Change) -> list[bytes]:
        """The digests of the run's units from its start, at least up to `change.stop`."""
        key = (id(change.tokens), id(change.hash_before))  # the kept change keeps both objects alive
        found = self._kept.pop(key, None)
        if found is None or found[0].stop < change.stop:
            found = (change, self._hash(change, change.run_start).digests)
        self._kept[key] = found
        while len(self._kept) > MAX_KEPT_RUNS:
            self._kept.popitem(last=False)
        return found[1]

    def _hash(self, change: Change, start: int) -> BlockDigests:
        record = b"".join(span.record() for span in change.spans)
        hasher = self._hasher_at(change, start, record)
        parent = hasher.digest() if start else None
        digests: list[bytes] = []
        for unit in range(start, change.stop):
            hasher.update(self._tokens(change, unit, unit + 1) + record)
            digests.append(hasher.digest())
        return BlockDigests(parent, digests)

    def _hasher_at(self, change: Change, start: int, record: bytes) -> Hasher:
        hasher: Hasher = change.hash_before.copy()
        if not record:
            hasher.update(self._tokens(change, change.run_start, start))
            return hasher
        for unit in range(change.run_start, start):
            hasher.update(self._tokens(change, unit, unit + 1) + record)
        return hasher

    def _tokens(self, change: Change, start: int, stop: int) -> bytes:
        at = change.run_start
        return bytes(change.tokens[(start - at) * self._unit_bytes : (stop - at) * self._unit_bytes])
