"""Matches and blocks for an engine that owns its device blocks and has its own prefix cache.

**Blocks.** The ledger caches nothing in these blocks, and no request owns them here. They are the source or the
destination of copies, and only jobs hold them:

    plan_load(into=ids)   the job holds `ids` until the copy is proven over, however late
    offer(..., ids)       the job holds `ids` until the copy is over, proven or not: a stray read does no harm

A load that is never proven over keeps its blocks in quarantine. So nothing is loaded while more than
`max_quarantined_share` of the engine's blocks are in quarantine.

**Matches.** The engine names the tokens that its own cache holds, and the ledger matches host memory after them.

**Arrivals.** Two requests do not load the same block. The second request gets the answer PENDING, holds no pins, and
asks again: once the first request has offered, the engine's own prefix cache holds the block.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from .._common.arguments import check_has
from .._common.tiers import BELOW, DEVICE
from .._extensions.load_choice import Loadable
from .._kernel.cache import PrefixCache
from .._kernel.index import Hit, held_stop, is_branch_point, present_stop
from .._kernel.leases import RequestLeases
from .._kernel.moves import Moves
from .._kernel.plans import PrefixMatch
from .._kernel.pools import TierBlocks
from .._kernel.protocols import EvictionOrder
from .._kernel.records import NO_LIMIT, Checkpoints, Job, Run
from .._kernel.states import MATCHED, PINNED
from .._kernel.tokens import TokenSequence
from ..errors import ConfigError
from .events import LoadsPaused, LoadsResumed
from .protocols import EngineBlocks
from .requests import HostCacheRequest


@dataclass(slots=True, eq=False, repr=False)
class HeldBlocks:
    """A pool without free blocks. It counts the blocks that jobs hold, and reports them to the engine."""

    blocks: EngineBlocks
    num_blocks: int = 0
    """Blocks held now. A block that is held twice counts twice."""
    num_free: int = field(default=0, init=False)

    def __repr__(self) -> str:
        return f"<HeldBlocks {self.num_blocks} held>"

    def hold(self, block_ids: array[int]) -> None:
        self.blocks.hold(block_ids)  # first: if the engine raises, nothing is held
        self.num_blocks += len(block_ids)

    def take(self, num_blocks: int) -> array[int]:
        assert not num_blocks, "taken more than is free"
        return array("i")

    def give(self, block_ids: array[int]) -> None:
        self.num_blocks -= len(block_ids)
        self.blocks.give(block_ids)

    def free_ids(self) -> Iterable[int]:
        return ()


@dataclass(slots=True, eq=False, repr=False)
class EngineTier(TierBlocks):
    """The device tier of a `HostCache`. No block is free or cached here: pinned + quarantined = held by jobs."""

    held: HeldBlocks = field(kw_only=True)
    """The pool."""
    moves: Moves = field(kw_only=True)
    max_quarantined: int = field(kw_only=True)
    """Nothing is loaded while more blocks than this are in quarantine."""

    @classmethod
    def of(cls, blocks: EngineBlocks, order: EvictionOrder, moves: Moves, max_quarantined: int) -> EngineTier:
        check_has("engine_blocks", blocks, "EngineBlocks", "hold give", ConfigError)
        held = HeldBlocks(blocks)
        return cls(
            DEVICE, held, order, held=held, moves=moves, max_quarantined=max_quarantined,
            is_outside=True,
        )  # fmt: skip

    @property
    def may_load(self) -> bool:
        """False while too many blocks are in quarantine. Then nothing is loaded, and hits count as misses."""
        return self.num_quarantined <= self.max_quarantined

    def quarantine(self, block_ids: array[int]) -> None:
        could_load = self.may_load
        TierBlocks.quarantine(self, block_ids)
        if could_load and not self.may_load:
            self.moves.note(LoadsPaused(self.num_quarantined))

    def end_quarantine(self, block_ids: array[int]) -> None:
        could_load = self.may_load
        TierBlocks.end_quarantine(self, block_ids)
        if self.may_load and not could_load:
            self.moves.note(LoadsResumed(self.num_quarantined))

    def hold(self, block_ids: array[int]) -> None:
        self.held.hold(block_ids)

    def unhold(self, block_ids: array[int]) -> None:
        self.held.give(block_ids)

    @property
    def finds(self) -> bool:
        """Whether the engine can find blocks in its prefix cache."""
        return hasattr(self.held.blocks, "find")

    def find(self, request_id: str, group: int, start: int, stop: int) -> Sequence[int]:
        """Blocks that the engine still has in its prefix cache; zeros if it has no `find`."""
        find = getattr(self.held.blocks, "find", None)
        return [0] * (stop - start) if find is None else find(request_id, group, start, stop)


@dataclass(slots=True, frozen=True)
class Arrival:
    """Units `[start, stop)` on their way into an engine's blocks. Once their request has offered, the engine's own
    prefix cache has them, and other requests hit them there."""

    start: int
    stop: int
    jobs: tuple[Job, ...]


@dataclass(slots=True, eq=False)
class _Question:
    """A request that got the answer PENDING."""

    since: float
    wake: Callable[[], object]
    bringer: HostCacheRequest
    """The request whose load it waits for."""


@dataclass(slots=True, eq=False)
class Arrivals:
    clock: Callable[[], float]
    pending_timeout_s: float
    under_way: dict[HostCacheRequest, Arrival] = field(default_factory=dict)
    """The arrivals by request, until the first offer of the request, or until its end."""
    _questions: dict[HostCacheRequest, _Question] = field(default_factory=dict)

    def bringer(self, request: HostCacheRequest, unit: int, num_tokens: int) -> HostCacheRequest | None:
        """The request whose load brings `unit` of `request`. None: no load brings it, or `request` has waited for
        `pending_timeout_s`. The first `num_tokens` tokens of `request` end with `unit`."""
        if self.clock() >= self.pending_until(request):
            return None
        sequence = request.sequence
        tokens = sequence.first_bytes(unit, num_tokens)
        for other, arrival in self.under_way.items():
            if not arrival.start <= unit < arrival.stop:
                continue
            # For most arrivals, comparing this one unit shows that they bring another one.
            if other.sequence.first_bytes(unit, num_tokens) == tokens and other.sequence.agrees(sequence, num_tokens):
                return other
        return None

    def pending_until(self, request: HostCacheRequest) -> float:
        """The time from which `request` no longer gets the answer PENDING. Infinity if it is not waiting."""
        question = self._questions.get(request)
        return math.inf if question is None else question.since + self.pending_timeout_s

    def waits_for(self, request: HostCacheRequest) -> HostCacheRequest | None:
        """The request whose load `request` waits for, because its last answer was PENDING. None: it waits for none."""
        question = self._questions.get(request)
        return None if question is None else question.bringer

    def ask_again(self, request: HostCacheRequest, bringer: HostCacheRequest, wake: Callable[[], object]) -> None:
        """Record that `request` gets the answer PENDING because of the load of `bringer`. The timeout counts from the
        first such answer."""
        before = self._questions.get(request)
        self._questions[request] = _Question(self.clock() if before is None else before.since, wake, bringer)

    def pending_wakes(self) -> list[Callable[[], object]]:
        """The callbacks of all requests that got the answer PENDING."""
        return [question.wake for question in self._questions.values()]

    def answered(self, request: HostCacheRequest) -> None:
        self._questions.pop(request, None)

    def fell_short(self, request: HostCacheRequest, stop: int) -> list[Callable[[], object]]:
        """Record that the load of `request` has only reached unit `stop`. Returns the callbacks to call."""
        arrival = self.under_way[request]
        if stop == arrival.start:
            del self.under_way[request]
        else:
            self.under_way[request] = Arrival(arrival.start, stop, arrival.jobs)
        return self._waiting_for(request)

    def invalidated(self, request: HostCacheRequest, stop: int) -> list[Callable[[], object]]:
        """Record that the units of `request` from `stop` on are invalid. Returns the callbacks to call."""
        arrival = self.under_way.get(request)
        return [] if arrival is None or arrival.stop <= stop else self.fell_short(request, max(stop, arrival.start))

    def over(self, request: HostCacheRequest) -> list[Callable[[], object]]:
        """End the arrival of `request`, which has offered its loaded units or is over. Returns the callbacks to
        call."""
        return [] if self.under_way.pop(request, None) is None else self._waiting_for(request)

    def _waiting_for(self, request: HostCacheRequest) -> list[Callable[[], object]]:
        return [question.wake for question in self._questions.values() if question.bringer is request]


@dataclass(slots=True, eq=False)
class EngineMatches:
    cache: PrefixCache
    request_leases: RequestLeases
    moves: Moves
    arrivals: Arrivals
    device: EngineTier

    def match(self, request: HostCacheRequest, num_device_tokens: int, wake: Callable[[], object]) -> None:
        """Match and pin the units that the host holds after `num_device_tokens`: PINNED afterwards. MATCHED, without
        pins, while another request is loading the next block; then `wake` is called when another match may get another
        answer."""
        is_same = request.state is PINNED and num_device_tokens == request.engine_tokens
        if is_same and self._is_held(request):
            return
        request.engine_tokens = num_device_tokens
        hit = self._hit(request)
        bringer = None
        if hit.stop > hit.device_stop and self.arrivals.under_way:
            num_tokens = (hit.device_stop + 1) * self.cache.layout.unit_tokens
            bringer = self.arrivals.bringer(request, hit.device_stop, num_tokens)
        self.request_leases.end_host_lease(request)
        if bringer is not None:
            self.arrivals.ask_again(request, bringer, wake)
            request.match = PrefixMatch(hit.device_stop * self.cache.layout.unit_tokens, 0, is_pending=True)
        else:
            self.arrivals.answered(request)
            self._pin(request, hit)
        if request.state is not MATCHED:  # observers find the answer in it
            self.moves.request(request, MATCHED)
        if bringer is None:
            self.moves.request(request, PINNED)

    def _is_held(self, request: HostCacheRequest) -> bool:
        """Whether the whole hit can still be loaded."""
        start = request.engine_tokens // self.cache.layout.unit_tokens
        return self.held_stop(request, start, request.hit_stop) == request.hit_stop

    def _hit(self, request: HostCacheRequest, at_most: int = NO_LIMIT) -> Hit:
        start = request.engine_tokens // self.cache.layout.unit_tokens
        if request.epoch != self.cache.epoch:
            return Hit(start, start, ())
        return self.hit_after(request.sequence, min(request.hit_limit, at_most), start, request.hit_alignment)

    def hit_after(self, sequence: TokenSequence, limit: int, start: int, alignment: int = 1) -> Hit:
        """The hit in host memory within units `[start, limit)`, without the unit of the last token. It ends at a
        multiple of `alignment` units. Empty while too many blocks are in quarantine."""
        if not self.device.may_load:
            return Hit(start, start, ())
        layout, path, stop = self.cache.layout, list[Run](), start
        limit = min((sequence.num_tokens - 1) // layout.unit_tokens, limit)
        for run, agreed in self.cache.index.walk(sequence, limit):
            path.append(run)
            stop = agreed
        full_stop = 0
        if layout.recurrent is not None:
            full_stop = present_stop(path, BELOW, start, stop) if layout.full.width else stop
        stop = held_stop(layout, path, BELOW, start, stop, alignment, given=start)
        return Hit(start, max(start, stop), tuple(path), full_stop)

    def _pin(self, request: HostCacheRequest, hit: Hit) -> None:
        unit = self.cache.layout.unit_tokens
        if self.cache.layout.recurrent is not None:
            request.checkpoints = Checkpoints()
            is_branch = is_branch_point(self.cache.index, request.sequence, hit)
            request.checkpoints.branch_stop = hit.full_stop if is_branch else 0
        if hit.stop > hit.device_stop:
            run = self.cache.cut(hit.run_at(hit.stop), hit.stop)
            request.leases[BELOW] = self.cache.lease(BELOW, run)
        lower = self.request_leases.num_lower_units(request, hit.stop) * unit
        request.published, request.ready_stop, request.hit_stop = 0, 0, hit.stop
        num_host_tokens = (hit.stop - hit.device_stop) * unit
        request.match = PrefixMatch(hit.device_stop * unit, num_host_tokens, num_lower_tokens=lower)
        for hook in self.request_leases.hooks.on_matched:
            hook(request)

    def match_again(self, request: HostCacheRequest, at_most: int = NO_LIMIT) -> None:
        """Match a PINNED request again, up to unit `at_most`. Its number of device tokens stays the same."""
        self.request_leases.end_host_lease(request)
        self._pin(request, self._hit(request, at_most))

    def loadable(self, request: HostCacheRequest) -> Loadable | None:
        """A load of the whole hit. None: there is nothing to load, or the load was planned before."""
        start = request.engine_tokens // self.cache.layout.unit_tokens
        if request.state is not PINNED or request.hit_stop <= start:
            return None
        return Loadable(start, request.hit_stop, self.cache.layout.num_blocks(start, start, request.hit_stop))

    def forget(self, requests: Iterable[HostCacheRequest]) -> None:
        """Match PINNED `requests` again, up to their old hit, if the host no longer holds all of it."""
        for request in requests:
            if request.state is PINNED and not self._is_held(request):
                self.match_again(request, request.hit_stop)

    def held_stop(self, request: HostCacheRequest, start: int, stop: int) -> int:
        """The unit up to which the hit can still be loaded. A corrupt block may have shortened the hit. `start` while
        too many blocks are in quarantine, because nothing is loaded then."""
        if request.epoch != self.cache.epoch or BELOW not in request.leases or not self.device.may_load:
            return start
        path = request.leases[BELOW].run.whole_path()
        return max(start, held_stop(self.cache.layout, path, BELOW, start, stop, given=start))
