"""The eviction order of layouts with a recurrent state: which checkpoint goes first, and which KV goes with it.

A hit needs a checkpoint, and the KV before it. So KV after the last checkpoint of its path is of no use, and KV before
a checkpoint has to stay as long as the checkpoint does:

    [===========c1=======c2]       c: checkpoints. KV up to c2 stays
                  [====c3----]     the KV after c3 is a *tail*: it brings no hit

The order, first to last:

1. Checkpoints whose KV is gone in every tier.
2. Tails, the oldest first. A path without a checkpoint is a tail from its end back to the next branch.
3. Checkpoints, those first that save little, for many bytes, and that no request has used for a long time:

       worth = saved / freed / age

   `saved`   the units that the checkpoint saves: those after the next checkpoint before it
   `freed`   the blocks that its eviction frees: its own and, if it is the last of its path, the KV that becomes a tail
   `age`     since its last use

   A checkpoint inside a path counts little (`INNER`), because most prompts go on from the end of the path or from a
   branch.
4. All else, the oldest first. There is nothing else unless leases or other tiers hold parts of a path.

A path needs no limit of its number of checkpoints: those inside a path go before others of their age.

**Cost.** The worth of all checkpoints changes all the time, because they age. But of those with equal `saved / freed`
the oldest is worth least. So checkpoints are put into buckets by their quotient, half an octave wide, and only the
oldest of each bucket are compared. A quotient is computed when the checkpoint is added, when a request has used the
path or the next checkpoint has gone, and again before the checkpoint is evicted. In between, it may be out of date.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from functools import partial
from heapq import heapify, heappop, heappush

from .._kernel.extension import Build, LedgerExtension
from .._kernel.pools import LeastRecentlyUsed
from .._kernel.records import Part, Run

INNER = 0.02
"""What a checkpoint inside a path counts, compared with one at the end of a path or at a branch."""
BUCKETS_PER_OCTAVE = 2
USELESS = -(10**9)
"""The bucket of checkpoints whose KV is gone."""
MIN_TO_SWEEP = 256

Tail = tuple[int, int, Part]
"""The last use of a part, a number that no other entry has, and the part."""
Kept = tuple[int, int, Part]
"""A checkpoint in its bucket: as `Tail`."""


class Uses:
    """Counts the uses of a tier. Its accounts (`AccountOrder`) share it, so that their ages compare."""

    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0


class CheckpointOrder:
    """The eviction order of one tier."""

    def __init__(self, recurrent: int, uses: Uses | None = None) -> None:
        """`recurrent`: the number of the component that holds the checkpoints."""
        self._recurrent = recurrent
        self._uses = Uses() if uses is None else uses
        self._kv = LeastRecentlyUsed()
        """All parts but checkpoints."""
        self._parents: dict[Part, Run | None] = {}
        """Of each part in the order but checkpoints, the run before it; None for those of windows."""
        self._children: dict[Run, dict[Part, None]] = {}
        """Of each run that has any, the parts of full attention after it that are in the order. If a run is not pinned,
        no run after it is, so these are all that the tier holds."""
        self._tails: list[Tail] = []
        """A heap of parts that may be tails: each is checked before it is evicted. Has every part that is a tail."""
        self._num_entries = 0
        self._checkpoints: dict[Part, tuple[int, int, int]] = {}
        """Of each part with checkpoints its bucket, its last use and its number, as in `_buckets`."""
        self._buckets: dict[int, list[Kept]] = {}
        """By bucket that has any, its checkpoints, the oldest first."""
        self._changed: dict[Part, None] = {}
        """Parts with checkpoints whose bucket has to be computed."""
        self._split: list[Part] = []
        """Parts of runs that were being split when they were added, and had no parts yet. They may be tails."""

    # -- changes --------------------------------------------------------------------------------------------------

    def add(self, part: Part) -> None:
        self._uses.number = part.last_use = self._uses.number + 1
        self.add_back(part)

    def add_newer(self, part: Part, than: Part) -> None:
        part.last_use = than.last_use
        if part.component == self._recurrent:
            self._keep(part)
            return
        if than.component == self._recurrent:  # the disk restores a part as the oldest one
            self._kv.add_back(part)
        else:
            self._kv.add_newer(part, than)
        if part.component:
            self._parents[part] = None
        else:
            self._enter(part)
            if than.run.before is part.run and than in self._parents:  # the head of a split: it comes between the two
                self._leave(than)
                self._enter(than)
        self._may_be_tail(part)

    def add_back(self, part: Part) -> None:
        if part.component == self._recurrent:
            self._keep(part)
            return
        self._kv.add_back(part)
        if part.component:
            self._parents[part] = None
        else:
            self._enter(part)
            checkpoints = part.run.parts[self._place(part)]
            if checkpoints in self._checkpoints:
                self._changed[checkpoints] = None
        self._may_be_tail(part)

    def remove(self, part: Part) -> None:
        is_lost = not part.blocks
        if part.component == self._recurrent:
            self._drop(part)
            if is_lost:
                self._lost_checkpoint(part)
            return
        self._kv.remove(part)
        if part.component:
            del self._parents[part]
            return
        if not is_lost and not part.num_references:  # it is merged into the run after it, which follows its parent now
            parent = self._parents[part]
            for child in (*self._children.get(part.run, ()),):
                self._leave(child)
                self._enter_after(child, parent)
        parent = self._leave(part)
        if is_lost:
            self._lost_kv(part, parent)

    def _place(self, part: Part) -> int:
        """Index into `Run.parts` of the checkpoints of the run, in the same tier."""
        return self._recurrent * part.run.num_tiers + part.tier

    def _enter(self, part: Part) -> None:
        self._enter_after(part, part.run.before)

    def _enter_after(self, part: Part, parent: Run | None) -> None:
        self._parents[part] = parent
        if parent is not None:
            children = self._children.get(parent)
            if children is None:
                self._children[parent] = {part: None}
            else:
                children[part] = None

    def _leave(self, part: Part) -> Run | None:
        """Returns the run before it."""
        parent = self._parents.pop(part)
        if parent is not None:
            children = self._children[parent]
            del children[part]
            if not children:
                del self._children[parent]
        return parent

    def _lost_checkpoint(self, part: Part) -> None:
        """A checkpoint is gone: the KV before it may be a tail, and the next checkpoint may be the last of its path."""
        for other in part.run.parts_in(part.tier):
            self._may_be_tail(other)
        place, run = self._place(part), part.run.before
        if run is not None:
            for other in run.parts_in(part.tier)[1:]:  # its windows may reach back into that run
                self._may_be_tail(other)
        while run is not None and run.parts:  # else the run is being split, and its head has the checkpoint
            checkpoints = run.parts[place]
            if checkpoints.blocks:
                if checkpoints in self._checkpoints:
                    self._changed[checkpoints] = None
                return
            run = run.before

    def _lost_kv(self, part: Part, parent: Run | None) -> None:
        """The KV of a run is gone: its checkpoint is useless, and the KV before it may be a tail."""
        checkpoints = part.run.parts[self._place(part)]
        if checkpoints in self._checkpoints:
            self._changed[checkpoints] = None
        if parent is not None and parent.parts:
            self._may_be_tail(parent.parts[part.tier])

    # -- tails ----------------------------------------------------------------------------------------------------

    def _may_be_tail(self, part: Part) -> None:
        if not part.run.parts:
            self._split.append(part)
            return
        if not self._is_tail(part):
            return
        self._num_entries += 1
        heappush(self._tails, (part.last_use, self._num_entries, part))
        if len(self._tails) > MIN_TO_SWEEP + 4 * len(self._parents):
            parts = {each: None for _, _, each in self._tails if self._is_tail(each)}
            self._tails = [(each.last_use, number, each) for number, each in enumerate(parts)]
            heapify(self._tails)

    def _is_tail(self, part: Part) -> bool:
        """Whether `part` is in the order and brings no hit, because no checkpoint of the tier follows it."""
        run = part.run
        if part not in self._parents or not part.blocks or not run.parts or run.parts[self._place(part)].blocks:
            return False
        children = self._children.get(run)
        if not part.component:
            return children is None
        place = self._place(part)
        return children is None or not any(child.run.parts[place].blocks for child in children)

    def _oldest_tail(self) -> Part | None:
        tails = self._tails
        while tails:
            last_use, number, part = tails[0]
            if not self._is_tail(part):
                heappop(tails)
            elif part.last_use != last_use:
                heappop(tails)
                heappush(tails, (part.last_use, number, part))
            else:
                return part
        return None

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def _keep(self, part: Part) -> None:
        """Its bucket is computed later: a run that is being split has no parts yet."""
        self._num_entries += 1
        self._put(part, 0, self._num_entries)
        self._changed[part] = None

    def _put(self, part: Part, bucket: int, number: int) -> None:
        self._checkpoints[part] = bucket, part.last_use, number
        insort(self._buckets.setdefault(bucket, []), (part.last_use, number, part))

    def _drop(self, part: Part) -> int:
        """Returns its number."""
        bucket, last_use, number = self._checkpoints.pop(part)
        self._changed.pop(part, None)
        kept = self._buckets[bucket]
        del kept[bisect_left(kept, (last_use, number))]
        if not kept:
            del self._buckets[bucket]
        return number

    def _compute(self, part: Part) -> bool:
        """Put a checkpoint into its bucket. Returns whether it was in another one."""
        bucket = self._bucket_of(part)
        if bucket == self._checkpoints[part][0]:
            return False
        self._put(part, bucket, self._drop(part))
        return True

    def _bucket_of(self, part: Part) -> int:
        """The bucket of a checkpoint's quotient `saved / freed`."""
        run, stop, place = part.run, part.stop, self._place(part)
        full = run.parts[part.tier]
        if full.width and all(kv.stop < stop or not kv.blocks for kv in run.parts[: run.num_tiers]):
            return USELESS
        before, branch = self._before(run, place)
        if part.stop - part.first > 1:
            before = stop - 1
        freed, share, num_after = part.width, 1.0, self._num_after(run, full)
        if not num_after:
            own = max(full.stop, stop) - max(before, branch)
            freed += own * full.width
        elif num_after == 1 or stop < run.stop:
            share = INNER
        return math.floor(BUCKETS_PER_OCTAVE * math.log2(share * (stop - before) * max(1, full.width) / freed))

    def _num_after(self, run: Run, full: Part) -> int:
        """The number of runs after `run` of which the tier holds KV."""
        if full.num_references or not full.blocks:  # the order does not have all of them
            return run.num_after
        return len(self._children.get(run, ()))

    @staticmethod
    def _before(run: Run, place: int) -> tuple[int, int]:
        """The unit of the next checkpoint before `run`, or 0, and of the last branch after it, or 0."""
        branch = 0
        current = run.before
        while current is not None:
            if current.parts[place].blocks:
                return current.parts[place].stop, branch
            if not branch and current.num_after > 1:
                branch = current.stop
            current = current.before
        return 0, branch

    def _score(self, bucket: int, last_use: int) -> float:
        """The worth of a checkpoint."""
        if bucket == USELESS:
            return -1.0
        return math.exp2(bucket / BUCKETS_PER_OCTAVE) / (self._uses.number - last_use + 1)

    def _least(self) -> Part | None:
        """The checkpoint that is worth least."""
        while self._buckets:
            _, bucket = min([(self._score(bucket, kept[0][0]), bucket) for bucket, kept in self._buckets.items()])
            part = self._buckets[bucket][0][2]
            if not self._compute(part):
                return part
        return None

    def _settle(self) -> None:
        """Make up for what was put off while the cache was changing."""
        if self._split:
            parts, self._split = self._split, []
            for part in parts:
                if part.run.parts:
                    self._may_be_tail(part)
        if self._changed:
            changed, self._changed = self._changed, {}
            for part in changed:
                self._compute(part)

    # -- questions ------------------------------------------------------------------------------------------------

    def oldest(self) -> Part | None:
        self._settle()
        if USELESS in self._buckets:
            return self._buckets[USELESS][0][2]
        return self._oldest_tail() or self._least() or self._kv.oldest()

    def parts(self) -> Iterable[Part]:
        yield from self._checkpoints
        yield from self._kv

    def key(self, part: Part) -> tuple[int, float]:
        """Compares the first parts of several orders of the same tier."""
        if part.component == self._recurrent:
            self._settle()
            bucket, last_use, _ = self._checkpoints[part]
            return (0 if bucket == USELESS else 2), self._score(bucket, last_use)
        return (1 if self._is_tail(part) else 3), float(part.last_use)

    def are_adjacent(self, older: Part, newer: Part) -> bool:
        """A run ends at its checkpoint, so that the KV after it can be evicted for itself."""
        if newer.component == self._recurrent or newer.run.parts[self._place(newer)].blocks:
            return False
        return self._kv.are_adjacent(older, newer)

    def __iter__(self) -> Iterator[Part]:
        """The parts in the order in which they would be evicted if no checkpoint changed its worth."""
        self._settle()
        yield from _Preview(self).parts()


class _Preview:
    """What the order would evict, without evicting it."""

    def __init__(self, order: CheckpointOrder) -> None:
        self._order = order
        self._gone: set[Part] = set()
        self._num_left: dict[Run, int] = {}
        """Of runs that have lost some, the number of the parts after them that are left."""
        self._number = order._num_entries
        self._tails = [(part.last_use, number, part) for _, number, part in order._tails]
        heapify(self._tails)

    def parts(self) -> Iterator[Part]:
        order = self._order
        heads = [(order._score(bucket, kept[0][0]), bucket, 0) for bucket, kept in order._buckets.items()]
        heapify(heads)
        while heads and heads[0][1] == USELESS:
            yield from self._next_checkpoint(heads)
        yield from self._drain()
        while heads:
            yield from self._next_checkpoint(heads)
            yield from self._drain()
        yield from [part for part in order._kv if part not in self._gone]

    def _next_checkpoint(self, heads: list[tuple[float, int, int]]) -> Iterator[Part]:
        order = self._order
        _, bucket, at = heappop(heads)
        kept = order._buckets[bucket]
        if at + 1 < len(kept):
            heappush(heads, (order._score(bucket, kept[at + 1][0]), bucket, at + 1))
        part = kept[at][2]
        self._gone.add(part)
        self._push(part.run, part)
        yield part

    def _push(self, run: Run, part: Part) -> None:
        """The KV of `run` may have become a tail, in the tier of `part`."""
        for other in run.parts_in(part.tier):
            self._number += 1
            heappush(self._tails, (other.last_use, self._number, other))

    def _drain(self) -> Iterator[Part]:
        while self._tails:
            part = heappop(self._tails)[2]
            if part in self._gone or not self._is_tail(part):
                continue
            self._gone.add(part)
            parent = self._order._parents.get(part)
            if parent is not None:
                self._num_left[parent] = self._left(parent) - 1
                self._push(parent, part)
            yield part

    def _left(self, run: Run) -> int:
        found = self._num_left.get(run)
        return len(self._order._children.get(run, ())) if found is None else found

    def _is_tail(self, part: Part) -> bool:
        order, run = self._order, part.run
        if part.component or part not in order._parents:
            return order._is_tail(part)
        checkpoints = run.parts[order._place(part)]
        return not self._left(run) and (not checkpoints.blocks or checkpoints in self._gone)


class CheckpointEviction(LedgerExtension):
    """Evicts by `CheckpointOrder` in every tier that has no other order, if the layout has a recurrent state."""

    def on_build(self, build: Build) -> None:
        build.when_sized(partial(self._set_orders, build))

    @staticmethod
    def _set_orders(build: Build) -> None:
        recurrent = build.layout.recurrent
        if recurrent is None:
            return
        for tier in build.sizes.keys() - build.orders.keys():  # a program's extension may have set one
            build.set_order(tier, partial(CheckpointOrder, recurrent.number, Uses()))
