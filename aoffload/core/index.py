"""The index by runs: which tokens are cached, and in which blocks of which tier.

A run is a stretch of blocks that were always used together. `before` links it to the run that its prefix ends with, so
a path is found without the index. The index is one dict: digest of the prefix up to a run's first unit -> run.

What a run holds in one tier is one part for each band:

    run      [start ............................. stop)
    full     [blocks, from the start on )
    window           [blocks, anywhere    )
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..prefix import TOKEN_BYTES
from .groups import Layout
from .hops import Tier
from .records import Part, Run
from .tokens import TokenSequence, hash_run

__all__ = ["RunIndex"]


class RunIndex:
    """All findable runs of one epoch."""

    def __init__(self, layout: Layout, epoch: int, tiers: Sequence[Tier]) -> None:
        self.epoch = epoch
        self.tiers = tiers
        self.runs: dict[bytes, Run] = {}
        self._places = [(tier, band.number, band.width) for band in layout.bands for tier in tiers]
        self._unit_bytes = layout.unit_tokens * TOKEN_BYTES

    def __repr__(self) -> str:
        return f"<RunIndex epoch={self.epoch} {len(self.runs)} runs>"

    def find(self, sequence: TokenSequence, before: Run | None, position: int) -> Run | None:
        """The run behind `before`, which ends at `position`, whose first unit has the tokens of `sequence`."""
        hasher = sequence.root.hasher if before is None else before.hash_after
        return self.runs.get(sequence.key_at(hasher, position))

    def walk(self, sequence: TokenSequence, limit: int) -> Iterator[tuple[Run, int]]:
        """Each run on the path of `sequence` up to unit `limit`, with the unit up to which both agree."""
        position = 0
        before: Run | None = None
        while position < limit:
            run = self.find(sequence, before, position)
            if run is None:
                return
            stop = sequence.common_stop(run, limit)
            if stop == run.start:
                return
            yield run, stop
            if stop < run.stop:
                return
            position, before = stop, run

    def insert(self, sequence: TokenSequence, before: Run | None, start: int, stop: int, key: bytes = b"") -> Run:
        """Insert a run behind `before`. The caller has checked that there is none yet; `key`: its key, if known."""
        hasher = sequence.root.hasher if before is None else before.hash_after
        key = key or sequence.key_at(hasher, start)
        tokens, spans, root = sequence.shared_stretch(start, stop), sequence.spans_at(start), sequence.root
        run = Run(key, before, start, stop, tokens, spans, hasher, self.epoch, root, len(self.tiers))
        run._hash_after = sequence.hasher_at(stop)
        run.parts = tuple([Part(*place, run, start, start) for place in self._places])
        if before is not None:
            before.num_after += 1
        self.runs[key] = run
        return run

    def grow(self, run: Run, sequence: TokenSequence, stop: int) -> None:
        """Extend `run` in place up to unit `stop`."""
        added = sequence.stretch(run.stop, stop)
        run._hash_after = hash_run(run.hash_after, added, run.spans, self._unit_bytes)
        run.tokens = b"".join((run.tokens, added))
        run.stop = stop

    def split_head(self, run: Run, at: int) -> Run:
        """Split `run` at unit `at`: the head is a new run, the tail stays the same object, which leases refer to.

        Divides the tokens only; `PrefixCache` divides the parts.
        """
        cut = (at - run.start) * self._unit_bytes
        front = bytes(run.tokens[:cut])
        head = Run(
            run.key, run.before, run.start, at, front, run.spans, run.hash_before, run.epoch, run.root, run.num_tiers
        )
        head.num_after, head.offered_stop = 1, min(at, run.offered_stop)
        run.before = head
        self._begin_at(run, head, at)
        if run.epoch == self.epoch:
            self.runs[head.key] = head
            self.runs[run.key] = run
        return head

    @staticmethod
    def enter_parts(run: Run, parts: list[Part]) -> None:
        """Set the parts of a new run."""
        run.parts = tuple(parts)

    def shift_boundary(self, head: Run, run: Run, at: int) -> None:
        """Move the boundary between `head` and `run`, its only child, to unit `at`. Moves the tokens only;
        `PrefixCache` moves the blocks."""
        moved = bytes(run.tokens[: (at - run.start) * self._unit_bytes])
        head._hash_after = hash_run(head.hash_after, moved, head.spans, self._unit_bytes)
        head.tokens = b"".join((head.tokens, moved))
        head.stop = at
        head.offered_stop = max(head.offered_stop, min(at, run.offered_stop))
        was_findable = self.runs.get(run.key) is run
        if was_findable:
            del self.runs[run.key]
        self._begin_at(run, head, at)
        if was_findable:
            self.runs[run.key] = run

    def _begin_at(self, run: Run, head: Run, at: int) -> None:
        """Let `run` begin at unit `at`, where `head` ends."""
        run.hash_before = head.hash_after
        run.tokens = bytes(run.tokens[(at - run.start) * self._unit_bytes :])
        run.start = at
        probe = run.hash_before.copy()
        probe.update(run.tokens[: self._unit_bytes])
        if run.spans:
            probe.update(b"".join([span.record() for span in run.spans]))
        run.key = probe.digest()

    def absorb(self, run: Run, heads: list[Run]) -> None:
        """Merge `heads` (the runs right before `run`, nearest first) into `run`: the opposite of a split."""
        first = heads[-1]
        for head in heads:
            del self.runs[head.key]
            head.parts = ()  # see `remove`
        del self.runs[run.key]
        run.offered_stop = max(run.offered_stop, *(head.offered_stop for head in heads))
        run.tokens = b"".join([head.tokens for head in reversed(heads)] + [run.tokens])
        run.key, run.before, run.start, run.hash_before = first.key, first.before, first.start, first.hash_before
        self.runs[run.key] = run
        for head in heads:
            head.before = run  # whoever still knows a head finds its units there

    def shorten(self, run: Run, stop: int) -> None:
        """Drop the tokens from unit `stop` on, which no tier holds: a short run must not keep a long buffer alive."""
        run.tokens = bytes(run.tokens[: (stop - run.start) * self._unit_bytes])
        run.stop, run.offered_stop = stop, min(stop, run.offered_stop)
        run._hash_after = None

    def remove(self, run: Run) -> None:
        """Remove a run that holds nothing, and the runs before it that were kept for it only."""
        current: Run | None = run
        # The loop skips runs that are not in the index any more: an earlier removal may have included them.
        while current is not None and current.holds_nothing() and self.runs.get(current.key) is current:
            del self.runs[current.key]
            current.parts = ()  # parts refer back to the run: its tokens would stay until a full garbage collection
            current = current.before
            if current is not None:
                current.num_after -= 1
