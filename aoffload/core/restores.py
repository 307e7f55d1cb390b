"""Restores: what an earlier process has left on the disk enters the index, before anything else is stored there.

Runs come with the digest of the prefix that they follow, a prefix before what follows it. The process has used none of
them, so each is the next that the disk evicts, before those that came earlier: a prefix loses its tail before its head.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from ..arguments import as_tuple, check_type, shown
from ..errors import InvalidArgument
from ..prefix import TOKEN_BYTES, Hasher, Prefix, Root
from .arguments import check_int
from .cache import PrefixCache
from .hops import Tier
from .pools import TakesIds
from .records import Run
from .restored import RestoredRun
from .tokens import TokenSequence, hash_run

__all__ = ["Restores", "check_restored"]


@dataclass(slots=True, eq=False)
class Restores:
    cache: PrefixCache
    pool: TakesIds
    _ends: dict[bytes, Run] = field(default_factory=dict)
    """By the digest of the prefix up to its end: the run that ended there when it was restored."""
    _bare: dict[bytes, RestoredRun] = field(default_factory=dict)
    """Without slots, by the same digest: they enter the index with the first run behind them."""

    def restore(self, found: RestoredRun) -> int:
        """The slots that now belong to `found`: none if what it follows is not there, or its slots are not free."""
        if self.cache.layout.full.width and not found.slots[0]:
            return 0  # no hit could end in it, nor behind it
        if not any(found.slots):
            self._bare[found.digest] = found
            return 0
        if not self.pool.are_free([block_id for slots in found.slots for block_id in slots]):
            return 0
        taken, before = 0, None
        if not found.start:
            taken = self._enter(found, None, Root.of_digest(found.root))
        elif (before := self._end_of(found.before, found.start)) is not None:
            taken = self._enter(found, before, before.root)
        if not taken and before is not None:
            self.cache.tidy(before)  # it may have entered for this one alone
        return taken

    def _end_of(self, digest: bytes, stop: int) -> Run | None:
        """The run with the unit before `stop` of the prefix with `digest`, if the disk holds what has to be there."""
        run = self._known_end(digest, stop)
        bare = self._bare.get(digest)
        if run is not None or bare is None:
            return run
        before = self._end_of(bare.before, bare.start) if bare.start else None
        if before is not None or not bare.start:
            self._enter(bare, before, Root.of_digest(bare.root) if before is None else before.root)
        return self._known_end(digest, stop)

    def _known_end(self, digest: bytes, stop: int) -> Run | None:
        run = self._ends.get(digest)
        # It may have been merged into the run behind it, and that one split again.
        while run is not None and (not run.parts or run.start >= stop):
            run = run.before
        if run is None or run.stop < stop or run.epoch != self.cache.epoch:
            return None
        part = run.parts[Tier.DISK]
        is_there = not part.width or part.stop >= stop
        return run if is_there and _hash_up_to(run, stop).digest() == digest else None

    def _enter(self, found: RestoredRun, before: Run | None, root: Root) -> int:
        """Insert the tokens of `found` behind `before`, and give the disk its slots there."""
        cache, start = self.cache, found.start
        hasher = root.hasher.copy() if before is None else _hash_up_to(before, start)
        hasher.update(found.tokens)
        if root.digest != found.root or hasher.digest() != found.digest:
            return 0
        sequence = _sequence(found, before, root, cache.layout.unit_tokens)
        run = None if before is None else cache.cut(before, start)
        taken = 0
        while start < found.stop:
            following = cache.index.find(sequence, run, start)
            if following is None:
                run = cache.index.insert(sequence, run, start, sequence.run_stop(start, found.stop))
            else:
                run = cache.cut(following, sequence.common_stop(following, found.stop))
            taken += sum([self._fill(run, number, found) for number, slots in enumerate(found.slots) if slots])
            if run.parts[Tier.DISK].width and run.parts[Tier.DISK].stop < run.stop:
                return taken  # found corrupt meanwhile: what is behind it could not be fetched
            start = run.stop
        assert run is not None
        self._ends[found.digest] = run
        return taken

    def _fill(self, run: Run, number: int, found: RestoredRun) -> int:
        """Give `run` its slots in a band; none if the disk holds something there."""
        part, width = run.part(Tier.DISK, number), self.cache.layout.bands[number].width
        if part.blocks or part.incoming is not None:
            return 0
        ids = found.slots[number][(run.start - found.start) * width : (run.stop - found.start) * width]
        self.pool.take_ids(ids)
        self.cache.tiers[Tier.DISK].restore(part, ids)
        return len(ids)


def _hash_up_to(run: Run, stop: int) -> Hasher:
    """The running hash of the prefix before unit `stop` of `run`, which no span touches. The caller's own."""
    unit_bytes = len(run.tokens) // (run.stop - run.start)
    return hash_run(run.hash_before, run.tokens[: (stop - run.start) * unit_bytes], (), unit_bytes)


def _sequence(found: RestoredRun, before: Run | None, root: Root, unit_tokens: int) -> TokenSequence:
    """The tokens up to the end of `found`, which follows `before`."""
    known = () if before is None else before.whole_path()
    tokens = b"".join([run.tokens for run in known])[: found.start * unit_tokens * TOKEN_BYTES]
    return TokenSequence(Prefix(root, tokens + found.tokens), unit_tokens)


def check_restored(found: object, cache: PrefixCache) -> RestoredRun:
    """`InvalidArgument` for anything that no restart can have left here."""
    run = check_type("run", found, RestoredRun)
    check_int("run.start", run.start, 0)
    check_int("run.stop", run.stop, run.start + 1)
    num_units, bands = run.stop - run.start, cache.layout.bands
    for name in ("root", "before", "digest", "tokens"):
        if not isinstance(getattr(run, name), bytes):
            raise InvalidArgument(f"run.{name}", f"must be bytes, got {shown(getattr(run, name))}")
    if len(run.tokens) != num_units * cache.layout.unit_tokens * TOKEN_BYTES:
        raise InvalidArgument("run.tokens", f"must be those of {num_units} units, has {len(run.tokens)} bytes")
    slots = as_tuple("run.slots", run.slots, "arrays")
    if len(slots) != len(bands):
        raise InvalidArgument("run.slots", f"must have an array for each band, {len(bands)}, has {len(slots)}")
    seen: set[int] = set()
    for ids, band in zip(slots, bands, strict=True):
        if not isinstance(ids, array) or ids.typecode != "i" or len(ids) not in (0, num_units * band.width):
            raise InvalidArgument("run.slots", f"must be int arrays for {num_units} units, got {shown(ids)}")
        if len(seen | set(ids)) != len(seen) + len(ids):
            raise InvalidArgument("run.slots", "names a slot twice")
        seen.update(ids)
    if seen and not 0 <= min(seen) <= max(seen) < cache.tiers[Tier.DISK].pool.num_blocks:
        raise InvalidArgument("run.slots", "names a slot that the disk does not have")
    return run
