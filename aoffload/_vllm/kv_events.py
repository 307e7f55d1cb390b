"""KV events of host memory and the disk, which vLLM publishes together with the events of its own blocks.

At the end of each step, vLLM's scheduler asks its connector for events. It publishes these events in the same batch and
under the same topic as the events of its block pool, right after them. So a router sees one worker with three media.

**Hashes are vLLM's own.** Routers join the media by `block_hashes`. Dynamo walks from the last block that a worker has
on its GPU to the children of that hash in host memory, and then to the children on the disk. llm-d looks up the parent
of a new block by the parent's hash, in any medium. So a block needs the same hash in each medium. The connector takes
the hash that vLLM has computed for the request (`Request.block_hashes`). It never computes a hash, because vLLM may
change its function. A block of a group has the block size of that group. As in vLLM's events, its hash is the hash of
the last hash block in it.

**How a block gets its hash.** The index identifies a block by aoffload's digest of the prompt up to the block's end.
The connector learns vLLM's hash from a request that has the block:

    a store lands    the request that stored the blocks has their hashes
    a match          the request that hits blocks has their hashes, too. A restart may have found the blocks on the
                     disk, or a fetch may have brought them

Until then a block is *unnamed*, and no event names the block. So a router misses blocks that no request has hit since
the restart. An entry for each cached unit (`_Unit`) keeps the unit's hashes while a tier holds the unit. The entry has
some 300 bytes.

**No `AllBlocksCleared`.** Routers take that event for all media of a worker, so it would drop vLLM's GPU blocks. A
reset of the connector removes the named blocks by their hashes. vLLM's own `AllBlocksCleared` drops the connector's
blocks in the router, although host memory still holds them. So when vLLM has cleared its pool, the connector removes
all blocks and names them again. (A router that takes the event for the GPU alone needs the removals.) The connector
does the same if more than `MAX_CHANGES` changes wait.

**Bounds.** A step names or removes about `UNITS_PER_STEP` units. The other units wait for the next step, and the
connector asks vLLM to run that step. All calls come from the thread of vLLM's scheduler.

**Several blocks of one hash.** vLLM's hash contains the name of a LoRA adapter; the index contains the SHA-256 of the
adapter's weights. If the weights change under one name, blocks of the old and the new weights have one hash. With draft
layers, the identity of a block in the index has tokens after the block, too (see `drafts`), so two blocks with the same
tokens have one hash. Such blocks count as one block until the last of them is evicted.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from .. import KeySpan, Tier
from .._kernel.extension import LedgerExtension
from .._kernel.index import stretches
from .._kernel.records import Job, LedgerRequest, Run
from .._observe.kv_events.changes import Change, Changes, Cleared, Kind
from .._observe.kv_events.events import (
    Digests,
    Event,
    EventGroup,
    Owner,
    extra_keys_of,
    removed_event,
    stored_event,
    token_ids_of,
)
from .groups import CachedGroups

_log = logging.getLogger("vllm.aoffload")

UNITS_PER_STEP = 4096
MAX_CHANGES = 100_000
NOBODY = Owner()


class _Unit:
    """A cached unit: its hashes, the hash before the unit, and the places that hold the unit. `hashes` is empty while
    the unit is unnamed. `first`: with draft layers, the unit's first tokens, which the index has in the unit before.
    `spans`: the multi-modal inputs that touch the unit."""

    __slots__ = ("first", "hashes", "owner", "parent", "places", "spans")

    def __init__(self) -> None:
        self.parent: Any = None
        self.hashes: Sequence[Any] = ()
        self.owner = NOBODY
        self.first: tuple[int, ...] = ()
        self.spans: tuple[KeySpan, ...] = ()
        self.places = 0
        """Bit `component * len(Tier) + tier` for each place."""


Named: TypeAlias = tuple[int, bytes, _Unit]
"""A unit of a run, with its number and its digest."""


class RouterEvents(LedgerExtension):
    """An extension of the connector's `HostCache` that makes the events of its tiers.

    `groups`: one for each group of the ledger. `find`: returns vLLM's request by its id, or None. `cleared`: returns
    another object after each reset of vLLM's block pool. `is_off`: whether the cache has turned itself off. `convert`:
    turns vLLM's hash into the hash of an event. `make`: makes vLLM's event of the event's fields. `num_ahead`: see
    `Drafts`.
    """

    def __init__(
        self,
        groups: Sequence[EventGroup],
        media: Mapping[Tier, str],
        hash_block_size: int,
        *,
        find: Callable[[str], Any],
        cleared: Callable[[], object],
        is_off: Callable[[], object],
        convert: Callable[[Any], Any],
        make: Callable[[Event], Any],
        num_ahead: int = 0,
        units_per_step: int = UNITS_PER_STEP,
        max_changes: int = MAX_CHANGES,
    ) -> None:
        self._all_groups, self._media, self._hash_block_size = groups, media, hash_block_size
        self._find, self._cleared, self._is_off, self._convert, self._make = find, cleared, is_off, convert, make
        self._num_ahead = num_ahead
        self._seen = cleared()
        self._units_per_step, self._max_changes = units_per_step, max_changes
        self._units: dict[bytes, _Unit] = {}
        """By digest: the units that a tier holds, according to the changes that were processed."""
        self._num_unnamed = 0
        self._leaving: dict[bytes, _Unit] = {}
        """The units from before a reset. Events have to remove them before any other event."""
        self._learned: dict[bytes, _Unit] = {}
        """Units whose hashes the changes in the queue may need: stored units, and units that no tier holds any more.
        They are kept until the queue is empty."""
        self._twins: Counter[tuple[int, Any]] = Counter()
        """By place and hash, the number of named units. Only for units that may share a hash with another unit."""
        self._settled: list[tuple[list[Change], str]] = []
        self._matched: list[tuple[list[Change], str]] = []
        """Units without hashes, with the id of the request that has the hashes."""
        self._requests: dict[str, Any] = {}
        self._ended: set[str] = set()
        """Requests that have ended. Their stores may still run."""
        self._is_over = False

    # -- called by the ledger -------------------------------------------------------------------------------------

    def on_attach(self, ledger: Any) -> None:
        self._ledger = ledger
        layout = ledger.layout
        self._unit_tokens = layout.unit_tokens
        self._per_unit = layout.unit_tokens // self._hash_block_size
        self._groups: list[list[EventGroup]] = [[] for _ in layout.components]
        for group, (component, _) in zip(self._all_groups, layout.places, strict=True):
            self._groups[component].append(group)
        self._digests = Digests(layout.unit_tokens)
        self._changes = Changes(ledger, self._max_changes, lambda: None)
        self._changes.begin()

    def on_matched(self, request: LedgerRequest) -> None:
        if self._is_over:
            return
        name = request.request_id
        if (found := self._find(name)) is not None:
            self._requests[name] = found
        lease = request.leases.get(Tier.HOST)
        if self._num_unnamed and lease is not None and name in self._requests:
            self._matched.append((_units_of(lease.run, 0, request.hit_stop), name))

    def on_job_settled(self, job: Job) -> None:
        if job.plan.source is Tier.DEVICE and not self._is_over and job.epoch == self._ledger.cache.epoch:
            self._settled.append((_units_of(job.run, job.start, job.stop), job.request_id))

    def on_released(self, request: LedgerRequest) -> None:
        if request.request_id in self._requests:
            self._ended.add(request.request_id)

    # -- called by vLLM -------------------------------------------------------------------------------------------

    @property
    def is_waiting(self) -> bool:
        """Whether more events wait, so that vLLM has to run another step."""
        return bool(self._leaving) or not (self._is_over or self._changes.is_empty)

    def take(self) -> list[Any]:
        """The events since the last call. After an error, later calls only remove all named blocks."""
        events: list[Event] = []
        try:
            self._take(events)
        except Exception:  # noqa: BLE001 - any bug: vLLM goes on
            self._fail()
        try:
            return [self._make(event) for event in events]
        except Exception:  # noqa: BLE001 - vLLM's events have other fields
            self._fail()
            self._leaving.clear()
            return []

    def _fail(self) -> None:
        _log.exception("aoffload: KV events of host memory and disk have ended, because of an error")
        if self._is_over:
            self._leaving.clear()
        else:
            self._end()

    def _take(self, events: list[Event]) -> None:
        if self._is_off() and not self._is_over:
            self._end()
        if self._is_over:
            self._remove_leaving(events, self._units_per_step)
            return
        cleared = self._cleared()
        if cleared is not self._seen:
            self._seen = cleared
            self._changes.tell_anew()
        self._learn(events)
        left = self._units_per_step
        while left > 0:
            if self._leaving:
                left -= self._remove_leaving(events, left)
                continue
            told = self._changes.take(1)
            if not told:
                self._learned.clear()
                break
            (change,) = told
            if isinstance(change, Cleared):
                self._leaving, self._units, self._num_unnamed = self._units, {}, 0
            else:
                left -= change.stop - change.start
                tell = self._tell_stored if change.kind is Kind.STORED else self._tell_removed
                tell(change, events)
        self._forget_requests()

    def _end(self) -> None:
        """Stop. Later calls of `take` remove all named blocks."""
        self._is_over = True
        self._changes.end()
        self._leaving, self._units = {**self._leaving, **self._units}, {}
        for each in (self._settled, self._matched, self._learned, self._requests, self._ended):
            each.clear()

    def _forget_requests(self) -> None:
        if not self._ended:
            return
        ledger = self._ledger
        storing = {job.request_id for job in ledger.jobs.unsettled.values()} | set(ledger.deferred_requests)
        for name in self._ended - storing:
            if name not in ledger.live_requests:
                self._requests.pop(name, None)
        self._ended &= storing

    # -- hashes ---------------------------------------------------------------------------------------------------

    def _learn(self, events: list[Event]) -> None:
        """Give the units of landed stores and of matches their hashes."""
        for source in (self._settled, self._matched):
            early: list[tuple[list[Change], str]] = []
            for changes, name in source:
                request = self._requests.get(name)
                left = [] if request is None else self._learn_from(request, changes, events)
                if left and self._find(name) is request:
                    early.append((left, name))
            source[:] = early

    def _learn_from(self, request: Any, changes: Iterable[Change], events: list[Event]) -> list[Change]:
        """Returns the changes that still have units without a hash. vLLM may compute it when it knows more tokens."""
        lora, hashes, per_unit = request.lora_request, request.block_hashes, self._per_unit
        owner = NOBODY
        if lora is not None or request.cache_salt:
            lora_id, name = (None, None) if lora is None else (lora.lora_int_id, lora.lora_name)
            owner = Owner(lora_id, name, request.cache_salt or None)
        spans = [_span_of(each) for each in request.mm_features or ()]
        early: list[Change] = []
        for change in changes:
            fresh: list[Named] = []
            for unit, digest in enumerate(self._digests.of(change).digests, change.start):
                known = self._units.get(digest)
                if known is not None and known.hashes:
                    continue
                first = unit * per_unit
                found = hashes[first : first + per_unit]
                if len(found) < per_unit or None in found:
                    early.append(change)
                    break
                parent = hashes[first - 1] if first else None
                at, end = unit * self._unit_tokens, (unit + 1) * self._unit_tokens
                told = self._learned.setdefault(digest, _Unit()) if known is None else known
                told.parent, told.hashes, told.owner = parent, tuple(found), owner
                told.first = tuple(request.all_token_ids[at : at + self._num_ahead])
                told.spans = tuple([span for span in spans if span.start < end and span.stop > at])
                if known is not None:
                    self._num_unnamed -= 1
                    fresh.append((unit, digest, known))
            for place in _places(fresh):
                component, tier = divmod(place, len(Tier))
                here = [named for named in fresh if named[2].places >> place & 1]
                self._name(change, here, component, Tier(tier), events)
        return early

    # -- events ---------------------------------------------------------------------------------------------------

    def _tell_stored(self, change: Change, events: list[Event]) -> None:
        place = change.component * len(Tier) + change.tier
        named: list[Named] = []
        for unit, digest in enumerate(self._digests.of(change).digests, change.start):
            found = self._units.get(digest)
            if found is None:
                known = self._learned.get(digest)
                found = _Unit()
                if known is not None:
                    found.parent, found.hashes, found.owner = known.parent, known.hashes, known.owner
                    found.first, found.spans = known.first, known.spans
                self._units[digest] = found
                self._num_unnamed += not found.hashes
            found.places |= 1 << place
            if found.hashes:
                named.append((unit, digest, found))
        self._name(change, named, change.component, change.tier, events)

    def _name(self, change: Change, named: list[Named], component: int, tier: Tier, events: list[Event]) -> None:
        """Name units of the run of `change` that a place holds now, in their order. There is one event for each group
        and each stretch of consecutive blocks."""
        place = component * len(Tier) + tier
        stretch: list[Named] = []
        for one in named:
            unit, _, found = one
            if self._may_have_twins(found):
                self._twins[place, found.hashes[-1]] += 1
                if self._twins[place, found.hashes[-1]] > 1:
                    continue
            if stretch:
                last, _, before = stretch[-1]
                if last + 1 != unit or before.hashes[-1] != found.parent or before.owner != found.owner:
                    self._store(change, stretch, component, tier, events)
                    stretch = []
            stretch.append(one)
        if stretch:
            self._store(change, stretch, component, tier, events)

    def _store(self, change: Change, stretch: list[Named], component: int, tier: Tier, events: list[Event]) -> None:
        (start, _, first), stop, size = stretch[0], stretch[-1][0] + 1, self._unit_tokens
        parent = None if first.parent is None else self._convert(first.parent)
        token_ids = token_ids_of(change, size, start, stop)
        token_ids = [*first.first, *token_ids][: len(token_ids)]
        spans = list(dict.fromkeys([span for _, _, found in stretch for span in found.spans]))
        for group in self._groups[component]:
            hashes = [one for _, _, found in stretch for one in self._hashes(found, group)]
            starts = range(start * size, stop * size, group.block_size)
            extra_keys = extra_keys_of(spans, starts, first.owner, lambda span: span.digest.decode())
            events.append(stored_event(group, self._media[tier], hashes, parent, token_ids, first.owner, extra_keys))

    def _tell_removed(self, change: Change, events: list[Event]) -> None:
        place = change.component * len(Tier) + change.tier
        gone: list[_Unit] = []
        for digest in self._digests.of(change).digests:
            found = self._units.get(digest)
            if found is None or not found.places >> place & 1:
                continue
            found.places &= ~(1 << place)
            if self._is_gone(found, place):
                gone.append(found)
            if not found.places:
                del self._units[digest]
                self._num_unnamed -= not found.hashes
                if found.hashes:
                    self._learned[digest] = found
        self._remove(gone, place, events)

    def _may_have_twins(self, found: _Unit) -> bool:
        return found.owner.lora_name is not None or self._num_ahead > 0

    def _is_gone(self, found: _Unit, place: int) -> bool:
        """Whether an event has to tell routers that a place has lost the unit."""
        if not found.hashes:
            return False
        if not self._may_have_twins(found):
            return True
        key = place, found.hashes[-1]
        self._twins[key] -= 1
        if self._twins[key]:
            return False
        del self._twins[key]
        return True

    def _remove(self, gone: Sequence[_Unit], place: int, events: list[Event]) -> None:
        component, tier = divmod(place, len(Tier))
        for group in self._groups[component] if gone else ():
            hashes = [one for found in gone for one in self._hashes(found, group)]
            events.append(removed_event(group, self._media[Tier(tier)], hashes))

    def _remove_leaving(self, events: list[Event], most: int) -> int:
        """Remove up to `most` units from before a reset, the last units first. Keep their hashes for the changes in the
        queue."""
        gone: dict[int, list[_Unit]] = {}
        num = 0
        while self._leaving and num < most:
            digest, found = self._leaving.popitem()
            num += 1
            for place in _places([(0, digest, found)]):
                if self._is_gone(found, place):
                    gone.setdefault(place, []).append(found)
            if found.hashes and not self._is_over:
                self._learned[digest] = found
        for place, units in gone.items():
            self._remove(units, place, events)
        return num

    def _hashes(self, found: _Unit, group: EventGroup) -> list[Any]:
        """The hash of each block of `group` in a unit."""
        step = group.block_size // self._hash_block_size
        return [self._convert(one) for one in found.hashes[step - 1 :: step]]


def event_groups(kv_cache_config: Any, groups: CachedGroups) -> list[EventGroup]:
    """The descriptions of the ledger's groups in vLLM's events."""
    from .internals import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

    found = []
    for number, size in zip(groups.ids, groups.block_sizes, strict=True):
        spec = kv_cache_config.kv_cache_groups[number].kv_cache_spec
        kind = get_kv_cache_spec_kind(spec).value
        found.append(EventGroup(number, size, kind, get_kv_cache_spec_sliding_window(spec)))
    return found


def event_maker() -> Callable[[Event], Any]:
    """A function that makes vLLM's own event of an event's fields."""
    from .internals import BlockRemoved, BlockStored

    kinds = {"BlockStored": BlockStored, "BlockRemoved": BlockRemoved}
    return lambda event: kinds[event.pop("type")](**event)


def hash_converter() -> Callable[[Any], Any]:
    """A function that turns a hash of vLLM into the hash of an event: 64 bits or the whole, as vLLM is configured."""
    from .internals import maybe_convert_block_hash

    found: Callable[[Any], Any] = maybe_convert_block_hash
    return found


def _units_of(run: Run, start: int, stop: int) -> list[Change]:
    """Units `[start, stop)` of the path of `run`, one change for each run that has them now."""
    pieces = stretches(run, start, stop)
    return [Change.of(Kind.STORED, Tier.HOST, 0, each, first, last) for each, first, last in pieces]


def _span_of(feature: Any) -> KeySpan:
    """The span of a multi-modal input, with vLLM's identifier of the input."""
    start = feature.mm_position.offset
    return KeySpan(start, start + feature.mm_position.length, feature.identifier.encode())


def _places(named: Iterable[Named]) -> list[int]:
    bits = 0
    for _, _, found in named:
        bits |= found.places
    return [place for place in range(bits.bit_length()) if bits >> place & 1]
