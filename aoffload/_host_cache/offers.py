"""Offers: stores from an engine's blocks, which the engine names in its tables.

An offer never waits. If host memory has no free blocks for some of the offered blocks, the offer skips these. The
ledger reports them to the observer, and the next offer of the request tries them again.

Copies hold the blocks that they read, so the blocks that stores in flight hold are bounded. If `max_bytes_in_flight` is
configured, it is the bound. Otherwise the bound is the most blocks that one step of the engine has computed, up to a
share of the engine's blocks, and the default of `max_bytes_in_flight` at least. An offer defers the blocks beyond the
bound. `offer_deferred` stores deferred blocks later, even if their request has ended by then: the engine's prefix cache
(`FindsBlocks.find`) tells which block holds their KV now. If the engine no longer has a block, the ledger gives it up
and reports that to the observer.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from .._common.tiers import BELOW, DEVICE
from .._config.config import MAX_BLOCKS
from .._kernel.cache import PrefixCache
from .._kernel.events import StoreSkipped
from .._kernel.hooks import Hooks
from .._kernel.index import covered, stretches
from .._kernel.jobs import JobBook, Stores, first_stored, needed_at
from .._kernel.layout import Component, without
from .._kernel.moves import Moves
from .._kernel.records import NO_LIMIT, Job, Run
from .._kernel.tokens import TokenSequence
from ..errors import InvalidArgument
from .ids import EngineIds, has_null, named_rows
from .matches import EngineTier
from .requests import HostCacheRequest

MOST_DEFERRED = 128
"""Maximum requests with deferred blocks, because each keeps its tokens. One more gives up the blocks of the oldest."""
MOST_OF_POOL = 4
"""The blocks that a step computes raise the bound to at most a quarter of the engine's blocks."""

Path: TypeAlias = Sequence[tuple[Run, int]]
"""Runs of the index, each with the unit up to which its tokens are those of a request."""


@dataclass(slots=True, eq=False)
class Offer:
    """Engine blocks for units `[start, stop)` of `component`."""

    component: Component
    start: int
    stop: int
    blocks: array[int]


@dataclass(slots=True, eq=False)
class End:
    """The end of the path of a request in the index. `run` ends before unit `position`, and the index has no run after
    it on this path."""

    run: Run | None
    position: int
    key: bytes = b""
    """The digest of the path up to and including the unit at `position`, if it is known."""


@dataclass(slots=True, eq=False)
class Wanted:
    """The blocks that an offer stores, and the numbers of blocks that it leaves out."""

    offers: list[Offer]
    end: End | None = None
    """The end of the request's path, at which the offers begin. None: it is not known, or the index has more of the
    path."""
    stop: int = 0
    """The unit up to which blocks were searched."""
    num_evicted: int = 0
    """Blocks that are not offered, because the host has evicted blocks before them."""
    num_left: int = 0
    """Blocks after the offers that were not searched for."""
    num_missing: int = 0
    """Blocks after the offers that the engine does not have."""


@dataclass(slots=True, eq=False)
class Deferred:
    """The blocks of a request that offers have deferred, because too many blocks were in flight."""

    request: HostCacheRequest
    stop: int
    """The unit up to which the host is to hold the blocks. It is kept here, because a request that is over forgets
    it."""
    unwritten: Mapping[int, range]
    """For each component, tokens whose KV was never written."""
    num_blocks: int
    """The number of deferred blocks at the last attempt."""
    num_evicted: int
    """`TierBlocks.num_evicted` of the host after that attempt."""


class Nulls(Sequence[int]):
    """A block table of null blocks, longer than any request."""

    def __len__(self) -> int:
        return MAX_BLOCKS

    def __getitem__(self, at: Any) -> Any:
        return [0] * (at.stop - at.start) if isinstance(at, slice) else 0


@dataclass(slots=True, eq=False)
class EngineOffers:
    cache: PrefixCache
    jobs: JobBook
    stores: Stores
    moves: Moves
    hooks: Hooks
    device: EngineTier
    max_blocks_in_flight: int
    max_step_blocks: int
    """If a step computes up to this many blocks, all of them may be in flight. 0: `max_blocks_in_flight` is
    configured."""
    num_rows: int
    unit_blocks: int = field(init=False)
    """Blocks of a unit over all components."""
    deferred: dict[str, Deferred] = field(default_factory=dict)
    """By request id, the oldest first."""
    _step_blocks: int = 0
    """The most blocks that one step has computed, `max_step_blocks` at most."""
    _computed_blocks: int = 0
    """Blocks that this step has computed and offered so far."""
    _knows_steps: bool = False
    """Whether the engine calls `offer_deferred` at the beginning of a step. Until it does, each offer counts as a
    step."""
    _planned: list[Job] = field(default_factory=list)
    """Jobs that `offer_deferred` has planned but not returned, because `find` raised for a later request."""
    _ends: dict[HostCacheRequest, End] = field(default_factory=dict)
    """The end of each request's path at the last offer. The next offer usually begins there."""

    def __post_init__(self) -> None:
        self.unit_blocks = self.cache.layout.width

    def reached(self, request: HostCacheRequest, run: Run) -> None:
        """Record that the index has the tokens of `request` up to the end of `run`."""
        self._ends[request] = End(run, run.stop)

    def forget(self, request: HostCacheRequest) -> None:
        """Forget the end of the request's path, because the request is over or its tokens were dropped."""
        self._ends.pop(request, None)

    # -- the blocks of an offer -----------------------------------------------------------------------------------

    def wanted(
        self,
        request: HostCacheRequest,
        first: int,
        ids: EngineIds,
        unwritten: Mapping[int, range],
        checkpoints: Mapping[int, array[int]],
        *,
        is_last: bool,
    ) -> Wanted:
        """Blocks that the policy wants, the host lacks and the engine has. Changes nothing, except that the last offer
        reports the generated tokens to the extensions, once all `ids` are checked. `first`: the unit at which the
        previous offer ended. `unwritten`: for each component, tokens whose KV was never written. `checkpoints`: blocks
        by unit, see `HostCache.offer`."""
        if request.epoch != self.cache.epoch or not request.store_limit:
            return Wanted([])
        if is_last:
            ids.check(request.published)
            for hook in self.hooks.on_finishing:
                hook(request)
        wanted = min(request.published, request.store_limit)
        for ask in self.hooks.ask_store_stop:
            wanted = min(wanted, ask(request))
        found = self._lacking(request, wanted, ids, unwritten, first, is_last=is_last)
        if checkpoints:
            found.offers += self._checkpoints(request, wanted, checkpoints)
        return found

    def _checkpoints(
        self, request: HostCacheRequest, stop: int, checkpoints: Mapping[int, array[int]]
    ) -> Iterator[Offer]:
        """The checkpoints up to unit `stop` that the host lacks."""
        recurrent = self.cache.layout.recurrent
        assert recurrent is not None
        path = list(self.cache.index.walk(request.sequence, stop))
        for position, ids in checkpoints.items():
            if position <= stop and _lacking_of(path, recurrent, position - 1, position):
                yield Offer(recurrent, position - 1, position, ids)

    def _lacking(
        self,
        request: HostCacheRequest,
        stop: int,
        ids: EngineIds,
        unwritten: Mapping[int, range],
        first: int,
        *,
        is_last: bool = False,
        most: int = NO_LIMIT,
    ) -> Wanted:
        """The blocks of the first `stop` units that the host lacks. For full attention, only those of the first `most`
        missing units. For windows, only blocks before a unit at which a later hit may end (see `commits`). Branch
        points before unit `first` are ignored."""
        if not stop or not self.cache.tiers[BELOW].pool.num_blocks:
            return Wanted([])
        layout, full, limit = self.cache.layout, self.cache.layout.full, stop
        if layout.windows:  # the next tokens of the prompt tell whether it diverges at `stop`
            limit = min(stop + 1, request.sequence.num_tokens // layout.unit_tokens)
        end = self._stored_end(request, stop, self._ends.get(request))
        if end is None:
            path = list(self.cache.index.walk(request.sequence, limit))
            run, agreed = path[-1] if path else (None, 0)
            if run is None or run.stop == agreed:
                end = self._stored_end(request, stop, End(run, agreed))
        lacking: list[range] = []
        if end is not None:
            lacking = [range(end.position, stop)]
        elif full.width:
            lacking = _lacking_of(path, full, 0, stop)
        if lacking and lacking[0].start < request.stored_stop and not is_last and self._evicts(request):
            return Wanted([], num_evicted=max(0, stop - request.stored_stop) * full.width)
        lacking, num_left = _first(lacking, most)
        found = list(self._of_full(request, lacking, ids))
        num_missing = sum(map(len, lacking)) - sum(offer.stop - offer.start for offer in found)
        wanted = Wanted(found, end, stop, num_left=num_left * full.width, num_missing=num_missing * full.width)
        if end is not None:
            return wanted
        is_end = is_last or request.is_over or request.is_at_end or stop == request.store_limit
        ends = _branch_points(path, first, limit)
        if first <= stop < request.published:
            ends.append(stop)
        ends += self.stores.checkpoints(first, stop)
        for component in layout.windows:
            ranges = needed_at(component, [end - end % request.hit_alignment for end in ends])
            if is_end:
                ranges.append(range(first_stored(component, self.stores.last_end(request, stop)), stop))
            tokens, unit = unwritten.get(component.number, range(0)), self.cache.layout.unit_tokens
            excluded = [range(tokens.start // unit, tokens.stop // unit)]
            for each in ranges:
                for units in _lacking_of(path, component, each.start, each.stop):
                    named = without(excluded, units.start, units.stop)
                    wanted.offers += self._of_window(request, component, named, ids)
                excluded.append(each)
        return wanted

    def _stored_end(self, request: HostCacheRequest, stop: int, end: End | None) -> End | None:
        """`end`, with its key, if the host has all units before it, or will get them, and the index has no run after it
        before unit `stop`. None: walk the path to find the missing units. The result is always None if there are
        windows."""
        if end is None or self.cache.layout.windows or not self._is_there(end):
            return None
        if end.run is not None and not _is_covered(end.run):
            return None
        if end.position >= stop:
            return end
        hasher = request.sequence.root.hasher if end.run is None else end.run.hash_after
        key = request.sequence.key_at(hasher, end.position)
        return None if key in self.cache.index.runs else End(end.run, end.position, key)

    def _evicts(self, request: HostCacheRequest) -> bool:
        """Whether the host has evicted blocks since `request` was admitted. If it has, only the last offer of the
        request stores evicted blocks again. If every offer did so in a host that is too small for all live requests,
        each offer would evict the blocks of other requests."""
        return self.cache.tiers[BELOW].num_evicted != request.evictions_before

    def _is_there(self, end: End) -> bool:
        """Whether the index still has a run that ends there."""
        run = end.run
        return run is None or (run.stop == end.position and self.cache.index.runs.get(run.key) is run)

    def check_sources(self, found: Sequence[Offer]) -> None:
        """Refuse a block that is named twice, or that a load may still write to."""
        if not found:
            return
        named = named_rows(self.num_rows, [offer.blocks for offer in found])
        if not named.are_distinct:
            raise InvalidArgument("block_ids", "names a block twice")
        if wrong := named.shared_with(self.jobs.ids_being_written(DEVICE)):
            raise InvalidArgument("block_ids", f"names block {wrong}, which a copy may still write to")

    def _of_full(self, request: HostCacheRequest, lacking: Iterable[range], ids: EngineIds) -> Iterator[Offer]:
        """Full attention, up to the first null block: a hit never finds the blocks after a gap."""
        full = self.cache.layout.full
        for units in lacking if full.width else ():
            num_units, blocks = len(units), ids.of_component(full, units.start, units.stop)
            if has_null(blocks):
                blocks = self._with_found(request, full, units.start, units.stop, blocks, ids)
                if has_null(blocks):
                    num_units = blocks.index(0) // full.width
                    blocks = blocks[: num_units * full.width]
            if blocks:
                yield Offer(full, units.start, units.start + num_units, blocks)
            if num_units < len(units):
                return

    def _with_found(
        self, request: HostCacheRequest, component: Component, start: int, stop: int, named: array[int], ids: EngineIds
    ) -> array[int]:
        """The blocks `named`. In place of null blocks, the blocks that the engine finds in its prefix cache."""
        return ids.with_found(component, start, stop, named, partial(self.device.find, request.request_id))

    def _of_window(
        self, request: HostCacheRequest, component: Component, lacking: Iterable[range], ids: EngineIds
    ) -> Iterator[Offer]:
        """A window component, without units that have a null block."""
        for units in lacking:
            blocks = ids.of_component(component, units.start, units.stop)
            if has_null(blocks):
                blocks = self._with_found(request, component, units.start, units.stop, blocks, ids)
            nulls = [units.start + at // component.width for at, block_id in enumerate(blocks) if not block_id]
            for named in without([range(unit, unit + 1) for unit in nulls], units.start, units.stop):
                first = (named.start - units.start) * component.width
                yield Offer(component, named.start, named.stop, blocks[first : first + len(named) * component.width])

    # -- stores ---------------------------------------------------------------------------------------------------

    def computed(self, num_units: int) -> None:
        """Count `num_units` units that were computed since the previous offer and are offered now for the first
        time."""
        num_blocks = num_units * self.unit_blocks
        self._computed_blocks = num_blocks + (self._computed_blocks if self._knows_steps else 0)
        self._step_blocks = max(self._step_blocks, min(self._computed_blocks, self.max_step_blocks))

    def store(self, request: HostCacheRequest, wanted: Wanted, unwritten: Mapping[int, range]) -> list[Job]:
        """Plan stores for the blocks of `wanted` that may be in flight, and defer the others."""
        self.deferred.pop(request.request_id, None)  # `wanted` includes these blocks
        jobs, num_left = self._store(request, wanted)
        if num_left and self.device.finds:
            num_evicted = self.cache.tiers[BELOW].num_evicted
            self.deferred[request.request_id] = Deferred(request, wanted.stop, dict(unwritten), num_left, num_evicted)
            if len(self.deferred) > MOST_DEFERRED:
                oldest = self.deferred.pop(next(iter(self.deferred)))
                self.moves.note(StoreSkipped(oldest.request, oldest.num_blocks, "in_flight"))
        elif num_left:
            self.moves.note(StoreSkipped(request, num_left, "in_flight"))
        return jobs

    def _store(self, request: HostCacheRequest, wanted: Wanted) -> tuple[list[Job], int]:
        """The jobs, and the number of blocks above the bound."""
        jobs, found, num_left = list[Job](), wanted.offers, wanted.num_left
        if wanted.num_evicted:
            self.moves.note(StoreSkipped(request, wanted.num_evicted, "evicted"))
        if not found:
            if wanted.end is not None:
                self._ends[request] = wanted.end
            return jobs, num_left
        stop = found[0].stop if len(found) == 1 else max([offer.stop for offer in found])
        run = self._path(request, wanted.end, stop)
        pin = None
        if len(found) > 1:  # one offer pins its path itself
            layout = self.cache.layout
            pin = self.cache.lease(BELOW, run, layout.starts_of(layout.full, 0, run.stop), is_use=False)
        is_full = False
        for offer in found:
            taken = self._bounded(offer)
            num_left += len(offer.blocks) - len(taken.blocks)
            if taken.blocks:
                over = stretches(run if pin is None else pin.run, taken.start, taken.stop)
                planned = self.stores.store(request, taken.component, over, taken.blocks)
                if planned and not taken.component.number:
                    request.stored_stop = max(request.stored_stop, planned[-1].stop)
                is_full |= sum(job.plan.num_blocks for job in planned) < len(taken.blocks)
                jobs += planned
        if is_full and num_left:  # the host has no free blocks for later units, either
            self.moves.note(StoreSkipped(request, num_left, "host_full"))
            num_left = 0
        if pin is not None:
            self.cache.release(pin)
        elif not jobs or jobs[-1].run is not run:
            self.cache.tidy(run)  # no job stores its last unit
        return jobs, num_left

    def _bounded(self, offer: Offer) -> Offer:
        """The leading blocks of `offer` that may be in flight. For a window, all or nothing, because a part of a window
        is useless. A checkpoint is always stored at once, because the engine names it only once."""
        if offer.component is self.cache.layout.recurrent:
            return offer
        in_flight = self.jobs.num_stored_now(DEVICE)
        num_units = max(0, self._num_free_blocks) // offer.component.width
        if offer.start + num_units >= offer.stop or (offer.component.number and not in_flight):
            return offer
        num_units = 0 if offer.component.number else max(num_units, 0 if in_flight else 1)
        return Offer(
            offer.component, offer.start, offer.start + num_units, offer.blocks[: num_units * offer.component.width]
        )

    @property
    def _num_free_blocks(self) -> int:
        """The number of blocks that further stores may hold now."""
        return max(self.max_blocks_in_flight, self._step_blocks) - self.jobs.num_stored_now(DEVICE)

    # -- deferred blocks ------------------------------------------------------------------------------------------

    def offer_deferred(self) -> list[Job]:
        """Store deferred blocks, up to the bound, those of the oldest request first. Called at the beginning of a
        step."""
        self._knows_steps, self._computed_blocks = True, 0
        while self.deferred and (room := self._num_free_blocks) > 0:
            request_id, old = next(iter(self.deferred.items()))
            try:
                wanted = self._found_of(old, room)
            except InvalidArgument:
                self.moves.note(StoreSkipped(old.request, old.num_blocks, "in_flight"))
                del self.deferred[request_id]
                raise
            self._planned += self.store(old.request, wanted, old.unwritten)
            if old.request.is_over:
                self.forget(old.request)
            left = self.deferred.pop(request_id, None)
            if left is not None and left.num_blocks >= old.num_blocks and left.num_evicted != old.num_evicted:
                # The host evicts as many blocks of the request as it stores: it would go on for ever.
                self.moves.note(StoreSkipped(old.request, left.num_blocks, "evicted"))
            elif left is not None:  # the request stays first
                self.deferred = {request_id: left, **self.deferred}
                break
        jobs, self._planned = self._planned, []
        return jobs

    def _found_of(self, old: Deferred, room: int) -> Wanted:
        """At most `room` deferred blocks that the engine still has, but at least one missing unit of full attention."""
        request, layout = old.request, self.cache.layout
        if request.epoch != self.cache.epoch:
            return Wanted([])
        ids = EngineIds(layout, self.num_rows, "find", (Nulls(),) * len(layout.groups))
        most = max(1, room // layout.full.width) if layout.full.width else 0
        wanted = self._lacking(request, old.stop, ids, old.unwritten, 0, most=most)
        named = named_rows(self.num_rows, [offer.blocks for offer in wanted.offers])
        if not named.are_distinct or named.shared_with(self.jobs.ids_being_written(DEVICE)):
            wanted = Wanted([], num_missing=old.num_blocks)
        if wanted.num_missing:  # a lookup never finds blocks after a gap
            self.moves.note(StoreSkipped(request, wanted.num_missing + wanted.num_left, "in_flight"))
            wanted.num_left = 0
        return wanted

    def invalidated(self, wrong: TokenSequence, num_tokens: int) -> None:
        """Drop the deferred blocks of requests that share the first `num_tokens` of `wrong`, because the last of these
        tokens has wrong KV."""
        for request_id, old in tuple(self.deferred.items()):
            if old.request.sequence.begins_alike(wrong, num_tokens):
                del self.deferred[request_id]

    def _path(self, request: HostCacheRequest, end: End | None, stop: int) -> Run:
        """The run of the index that ends at unit `stop` of the request's tokens. Inserts missing runs, after `end` if
        it is known."""
        if end is not None and self._is_there(end):
            last = self.cache.insert_after(end.run, request.sequence, end.position, stop, end.key)
        else:
            last = self.cache.path_to(request.sequence, stop)
        self.reached(request, last)
        return last


def _is_covered(run: Run) -> bool:
    """Whether the host has full attention of the whole path of `run`, or will get it from jobs under way."""
    current: Run | None = run
    while current is not None:
        part = current.parts[BELOW]
        if part.stop != current.stop and covered(part)[1] != current.stop:
            return False
        current = current.before
    return True


def _first(lacking: list[range], most: int) -> tuple[list[range], int]:
    """The first `most` units of `lacking`, and the number of the other units."""
    found: list[range] = []
    for units in lacking:
        taken = units[: max(0, most)]
        most -= len(taken)
        if taken:
            found.append(taken)
    return found, sum(map(len, lacking)) - sum(map(len, found))


def _branch_points(path: Path, first: int, stop: int) -> list[int]:
    """Like `index.branch_points`, for a request that has no run in the index yet. Tokens after the end of `path` will
    become a run of their own."""
    found: list[int] = []
    for run, agreed in path:
        num_others = run.num_after - (agreed == run.stop and run is not path[-1][0])
        if first <= agreed < stop and (num_others or agreed < run.stop):
            found.append(agreed)
    return found


def _lacking_of(path: Path, component: Component, start: int, stop: int) -> list[range]:
    """Units `[start, stop)` of `component` that the host does not hold and will not get from jobs under way."""
    held: list[range] = []
    for run, agreed in path:
        first, last = covered(run.part(BELOW, component.number))
        held.append(range(first, min(last, agreed)))
    return without(held, start, stop)
