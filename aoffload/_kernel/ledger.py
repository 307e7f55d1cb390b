"""The ledger: the verbs of the kernel. A step-based engine calls them directly, or the async runtime does.

One request calls them in this order (`README.md` has the theory):

Verb | state afterwards | what it does
--- | --- | ---
`admit` | PINNED | match the prompt and pin the hit, in one step
`allocate_nowait`, or `queue_allocation` and `accept` | ALLOCATED | take device blocks for the rest of the prompt
`plan_load` | LOADING, or RUNNING | plan the copies of the host hit; returns plans
`step` | | hold the blocks of a batch during a forward
`commit` | RUNNING | publish computed units; returns plans of stores
`extend_nowait`, or `queue_extension` and `accept` | | take more device blocks
`release` | DONE, ABORTED | give everything back; returns plans of stores

The caller makes the planned copies. It calls `launch` before a copy begins and `settle` when the copy is over. `fork`,
`preempt_nowait` and `resume`, `invalidate` and `reset` leave this path.

Each verb checks its arguments and the state first, so a refused call changes nothing. No verb waits, and none leaves a
change half done. A verb that may change the free blocks or the wait queue ends with `Admission.serve_queue`, which
calls the `wake` of each waiter and of each load that is over. A `wake` may call the ledger.

The constructor makes the objects of the kernel and of its features. A feature that is off is not made: its field is
None, and the verbs skip it.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Unpack

import attrs

from .._arguments import (
    as_tuple,
    check_bool,
    check_callable,
    check_has,
    check_int,
    check_names,
    check_text,
    check_type,
    shown,
)
from .._config.config import MAX_BLOCKS, OffloadConfig
from .._config.groups import KVCacheGroup
from .._config.tiers import LearnedEviction, cell_units, new_order
from .._eviction.hints import Hints
from .._eviction.learned import Learning, Rulings
from .._extensions.explain import Situation
from .._extensions.forks import Fork, Forks
from .._extensions.integrity import check_integrity
from .._extensions.lazy import EvictionWatermark
from .._extensions.load_choice import Loadable
from .._extensions.overlap import acknowledge, begin_step, can_start, expected_ids, first_invalid_token
from .._extensions.pins import Pins, check_time
from .._extensions.preemption import Preemptions
from .._extensions.prefetch import CacheTransfers
from .._extensions.store_policies import CountingPolicy, LearningPolicy, NoStore, checked, store_limit, store_policy_of
from .._host_cache.host_cache import EngineOwned
from .._host_cache.matches import Arrivals, EngineMatches, EngineTier
from .._host_cache.offers import MOST_OF_POOL, EngineOffers
from .._tiers.disk.blocks import DiskBlocks, SlotPool
from .._tiers.disk.plans import RestoredRun
from .._tiers.disk.rules import STEPS, DiskStores, Restores, check_restored
from .._tiers.fetch.rules import Fetches
from .._tiers.remote.plans import CellLabel
from .._tiers.remote.rules import RemoteStores
from ..errors import ConfigError, DuplicateRequest, InvalidArgument, WrongState
from .cache import PrefixCache
from .commits import Commits
from .events import Observer
from .index import fetchable_path, find_hit
from .jobs import JobBook, Stores
from .layout import Layout
from .leases import RequestLeases, slide_windows
from .loads import Loads, require_no_holes
from .moves import Moves
from .plans import (
    Completion,
    Extension,
    Preemption,
    PrefixMatch,
    RequestOptions,
    StoreScope,
    TierStatistics,
    TransferPlan,
    check_completion,
)
from .pools import ExtentPool, FreeList, LastUses, LeastRecentlyUsed, TierBlocks
from .prefix import Prefix, TokenIds, check_prefix
from .protocols import BlockWatcher, DevicePool, EngineBlocks, EvictionOrder
from .records import NO_LIMIT, Job
from .requests import CacheTransfer, Demotion, Fetch, LedgerRequest, Pin, Prefetch, Step, Waiter, do_nothing
from .states import BELOW, Computing, NoEpoch, PinState, Tier, check_tier, require
from .states import RequestState as State
from .status import EvictionStatistics, Holder, RequestStatus, explained, plain
from .tokens import TokenSequence
from .waiting import Admission, waiting_error

HOST_WATERMARK = 8
"""The first 1/8 of the host blocks in eviction order is stored to disk before eviction."""


def _groups_of(config: OffloadConfig) -> list[KVCacheGroup]:
    groups = [group for group in config.groups if isinstance(group, KVCacheGroup)]
    if len(groups) != len(config.groups):
        raise ConfigError("groups", "must hold KVCacheGroup objects")
    return groups


def _device_tier(num_device_blocks: int, device_pool: DevicePool | None, order: EvictionOrder) -> TierBlocks:
    if device_pool is None:
        device_pool = FreeList(num_device_blocks)
    check_has("device_pool", device_pool, "DevicePool", "num_blocks num_free take give free_ids", ConfigError)
    for name in ("num_blocks", "num_free"):  # a number of another class, such as numpy's, would spread to all sums
        check_int(f"device_pool.{name}", getattr(device_pool, name), 0, error=ConfigError)
    return TierBlocks(Tier.DEVICE, device_pool, order)


def _check_engine(device_pool: object, engine_blocks: object, clock: object) -> None:
    if engine_blocks is not None and device_pool is not None:
        raise ConfigError("device_pool", "must be None: the blocks are the engine's")
    if not callable(clock) and (clock is not None or engine_blocks is not None):
        raise InvalidArgument("clock", f"must be a function that returns seconds, got {shown(clock)}")


_WITH_A_LOAD = (State.LOADING, State.DRAINING, State.REQUEUED, State.STRANDED)


MAX_CATEGORY = 256
"""Maximum characters of the category of a hint, because the ledger keeps it."""


@attrs.frozen
class RemoteCounts:
    """Cells of a remote store that are being copied or removed. Only the store knows the cells that it holds."""

    num_loads: int
    """Being loaded into the host."""
    num_stores: int
    num_forgotten: int
    """Cells to remove from the store: see `Ledger.take_forgotten_cells`."""


@attrs.frozen
class LedgerStatistics:
    device: TierStatistics
    host: TierStatistics
    num_requests: int
    num_waiting: int
    num_jobs: int
    num_late_completions: int
    num_pins: int
    """Held pins of `Ledger.pin`, not those of requests."""
    loads_paused: bool
    """With `engine_blocks`: more than `max_quarantined_share` of the blocks are in quarantine, so nothing is loaded."""
    disk: TierStatistics | None
    """None without a disk."""
    remote: RemoteCounts | None
    """None without a remote store."""
    learned: tuple[Tier, ...]
    """The tiers that use the learned eviction order now, and not LRU."""
    num_hints: int
    """Hints in force."""
    eviction: EvictionStatistics | None
    """None unless eviction learns."""


class Ledger:
    """The verbs of the kernel, on one cache: decides which block holds which KV, and who may use it.

    `num_device_blocks` is the number of rows of the KV tensors, the null block 0 included. `block_bytes` is the size of
    one block over all regions; it only bounds bytes in flight and per job, and converts `host_bytes` to blocks.

    The ledger allocates the device blocks. With `engine_blocks`, an engine allocates them from a pool of its own and
    has its own prefix cache: then `offer` takes the place of `commit`, `plan_load` copies into blocks that the engine
    names, and the calls about device blocks raise `WrongState` (docs/engines.md has the table). `clock` counts seconds,
    such as `time.monotonic`. `engine_blocks` need one; otherwise it only gives the ages in `requests()`.
    """

    def __init__(
        self,
        config: OffloadConfig,
        num_device_blocks: int,
        *,
        block_bytes: int = 1,
        device_pool: DevicePool | None = None,
        engine_blocks: EngineBlocks | None = None,
        clock: Callable[[], float] | None = None,
        observer: Observer | None = None,
    ) -> None:
        check_type("config", config, OffloadConfig)
        check_int("num_device_blocks", num_device_blocks, 2, MAX_BLOCKS)
        check_int("block_bytes", block_bytes, 1)
        if observer is not None:
            check_has("observer", observer, "Observer", "observe")
        _check_engine(device_pool, engine_blocks, clock)
        self.config, self.layout = config, Layout.of(_groups_of(config))
        self.live_requests: dict[str, LedgerRequest] = {}
        self._closing: set[LedgerRequest] = set()
        self.steps: dict[int, Step] = {}
        """The steps under way, the oldest first."""
        self._num_steps = 0
        self._num_admitted, self._block_bytes = 0, block_bytes
        num_host_blocks = config.resolve_host_blocks(block_bytes)
        new_order, learning = self._eviction(config, num_device_blocks - 1, num_host_blocks)
        self._moves = moves = Moves(observer, clock)
        if engine_blocks is None:
            device = _device_tier(num_device_blocks, device_pool, new_order(Tier.DEVICE))
        else:
            most = int(config.max_quarantined_share * (num_device_blocks - 1))
            device = EngineTier.of(engine_blocks, new_order(Tier.DEVICE), moves, most)
        host = TierBlocks(Tier.HOST, ExtentPool(num_host_blocks), new_order(Tier.HOST))
        tiers = [device, host]
        if config.disk is not None:
            num_slots = config.disk.num_slots(block_bytes, self.layout.unit_tokens)
            slots = SlotPool(num_slots)
            tiers.append(DiskBlocks(Tier.DISK, slots, new_order(Tier.DISK), used=slots.used))
        last_uses = LastUses(num_device_blocks if engine_blocks is None else 0)
        self.cache = cache = PrefixCache(self.layout, tuple(tiers), new_order, last_uses)
        self._request_leases = leases = RequestLeases(cache)
        self.jobs = JobBook(cache, moves, self._units_per_job(config.blocks_per_job(block_bytes)))
        self._pins = Pins(cache, moves, config.max_pinned_share)
        self.admission = Admission(cache, leases, moves, self._others_hold_blocks, self._pins.yield_one)
        self._loads = Loads(cache, leases, moves, self.jobs, self.admission, self._pins.renew)
        self._forks = Forks(cache, leases, self.admission, moves)
        chosen = store_policy_of(config.store_policy).for_ledger(self.layout, num_device_blocks - 1)
        policy = checked(chosen)
        self._hints: Hints | None = None
        self._rulings: Rulings | None = None
        if learning is not None:
            self._rulings = Rulings(cache, learning, moves)
            self._hints = Hints(cache, learning, self._rulings, moves)
            policy = LearningPolicy(policy, self._hints.seen)
        if config.disk is not None or config.remote is not None:
            policy = CountingPolicy.of(policy, self.layout, has_remote=config.remote is not None)
        self._policy = policy
        stores = Stores(cache, self.jobs, moves, Tier.DEVICE, BELOW)
        self.writes_back = policy.num_watermark_blocks > 0
        """Whether the store policy has a watermark: without one, `plan_write_back` plans nothing."""
        watermark = EvictionWatermark(cache, self.jobs, stores, policy.num_watermark_blocks)
        self._commits = Commits(cache, leases, stores, self.admission, moves, policy, watermark, self._pins, learning)
        self._preemptions = Preemptions(
            cache, leases, moves, self.jobs, stores, self.admission, stores_nothing=isinstance(chosen, NoStore)
        )
        share = config.max_prefetch_share
        self._cache_transfers = CacheTransfers(cache, leases, moves, self._loads, stores, self.admission, share)
        self._fetches: Fetches | None = None
        self._restores: Restores | None = None
        """None after the first store to disk or a reset, because the slots that an earlier process has written may have
        other contents from then on."""
        self._disk_stores: DiskStores | None = None
        self._remote_stores: RemoteStores | None = None
        if isinstance(policy, CountingPolicy):
            self._wire_lower(policy, config)
        self.is_engine_owned = engine_blocks is not None
        """Whether an engine owns the device blocks."""
        self._engine: EngineOwned | None = None
        if isinstance(device, EngineTier) and clock is not None:  # `_check_engine` demands one
            if policy.num_watermark_blocks:
                raise ConfigError("store_policy", "must not be lazy: only the engine knows what it evicts next")
            most = max(1, config.bytes_in_flight // block_bytes)
            most_of_step = num_device_blocks // MOST_OF_POOL if config.max_bytes_in_flight is None else 0
            offers = EngineOffers(
                cache, self.jobs, stores, moves, policy, device, most, most_of_step, num_device_blocks, learning
            )
            arrivals = Arrivals(clock, config.pending_timeout_s)
            matches = EngineMatches(cache, leases, moves, arrivals, device)
            self._engine = EngineOwned(
                cache, leases, moves, self.jobs, offers, matches, arrivals, self._pins, num_device_blocks
            )
        self.situation = Situation(
            self.live_requests, self.steps, self._pins, self.jobs, self._cache_transfers, self.admission,
            None if self._engine is None else self._engine.arrivals, moves,
        )  # fmt: skip

    def _eviction(
        self, config: OffloadConfig, num_device: int, num_host: int
    ) -> tuple[Callable[[Tier], EvictionOrder], Learning | None]:
        """The function that makes the eviction order of a tier, and the state that all learned orders share (None
        unless eviction learns)."""
        is_named = type(config.eviction) is str and config.eviction == "learned"
        choice = LearnedEviction() if is_named else config.eviction
        if not isinstance(choice, LearnedEviction):
            make = LeastRecentlyUsed if type(choice) is str else partial(new_order, choice)
            return (lambda _: make()), None
        sizes = {Tier.HOST: num_host}
        if config.disk is not None:
            sizes[Tier.DISK] = config.disk.num_slots(self._block_bytes, self.layout.unit_tokens)
        if choice.device:
            sizes[Tier.DEVICE] = num_device
        learning = Learning(self.layout, sizes)
        return learning.new_order, learning

    def _wire_lower(self, counts: CountingPolicy, config: OffloadConfig) -> None:
        """Wire the tiers below the host: a disk, a remote store, or both."""
        from_disk = from_remote = None
        if config.disk is not None:
            from_disk = self._wire_disk(counts)
        if config.remote is not None:
            from_remote = self._wire_remote(counts, config.remote.max_cell_bytes)
        self._fetches = Fetches(
            self.cache, self._request_leases, self._cache_transfers, config.max_fetch_share,
            from_disk, from_remote, self._remote_stores,
        )  # fmt: skip

    def _wire_remote(self, counts: CountingPolicy, max_cell_bytes: int) -> Stores:
        if self.layout.windows:
            raise ConfigError("remote", "keeps full attention only: these groups have windows")
        self.jobs.tiers[Tier.REMOTE] = TierBlocks(Tier.REMOTE, ExtentPool(0), LeastRecentlyUsed(), is_outside=True)
        units = cell_units(self._block_bytes * self.layout.width, max_cell_bytes)
        self._check_cell(units * self.layout.width)
        self._remote_stores = RemoteStores(self.cache, self.jobs, counts, units)
        return Stores(self.cache, self.jobs, self._moves, Tier.REMOTE, Tier.HOST)

    def _check_cell(self, num_blocks: int) -> None:
        """Refuse cells that are larger than the share of all fetches, because they could never be loaded. A share of 0
        turns fetches off, so any size is allowed."""
        most = int(self.cache.tiers[Tier.HOST].pool.num_blocks * self.config.max_fetch_share)
        if self.config.max_fetch_share and num_blocks > most:
            share = f"max_fetch_share of host memory is {most} blocks of {self._block_bytes} bytes"
            raise ConfigError("cell_bytes", f"makes cells of {num_blocks} blocks, which could never be loaded: {share}")

    def _wire_disk(self, counts: CountingPolicy) -> Stores:
        cache, jobs, moves = self.cache, self.jobs, self._moves
        down, up = (Stores(cache, jobs, moves, *link) for link in ((Tier.HOST, Tier.DISK), (Tier.DISK, Tier.HOST)))
        blocks = cache.tiers[Tier.DISK]
        assert isinstance(blocks, DiskBlocks) and isinstance(blocks.pool, SlotPool)
        self._restores = Restores(cache, blocks, blocks.pool)
        host, disk = cache.tiers[Tier.HOST].pool.num_blocks, cache.tiers[Tier.DISK].pool.num_blocks
        most = min(max(self.layout.width, host // HOST_WATERMARK), disk)
        # The step: a scan for blocks that were requested twice walks the host's order, so skip it after small changes.
        self._disk_stores = DiskStores(EvictionWatermark(cache, jobs, down, most, max(1, most // STEPS)), counts)
        return up

    # -- how a call begins and ends -------------------------------------------------------------------------------

    def _own(self, request: object) -> LedgerRequest:
        """Refuse a request of another ledger."""
        if not isinstance(request, LedgerRequest) or request.ledger is not self:
            raise InvalidArgument("request", f"was not admitted by this ledger: {shown(request)}")
        return request

    def _require_own_device(self, call: str) -> None:
        if self._engine is not None:
            raise WrongState(f"{call}: an engine has the device blocks of this ledger: see docs/engines.md")

    def _on_own_device(self, request: object, call: str) -> LedgerRequest:
        """Refuse a request of another ledger, and `call` if an engine owns the device blocks."""
        if self._engine is None and isinstance(request, LedgerRequest) and request.ledger is self:
            return request
        self._require_own_device(call)
        return self._own(request)

    def _engine_of(self, request: object, call: str) -> EngineOwned:
        """The engine-owned device; refuse `call` if this ledger owns the device blocks."""
        self._own(request)
        if self._engine is None:
            raise WrongState(f"{call}: this ledger has device blocks itself: it takes no others")
        return self._engine

    def _others_hold_blocks(self) -> bool:
        if self.jobs.unsettled or self._closing:
            return True
        outside = (r for r in self.live_requests.values() if r.waiter is None or r.waiter.is_over)
        return any(request.holds_device_blocks for request in outside)

    def _units_per_job(self, num_blocks: int) -> Sequence[int]:
        return [max(1, num_blocks // max(1, component.width)) for component in self.layout.components]

    def _no_tables(self) -> list[list[int]]:
        return [[] for _ in self.layout.groups]

    # -- admission ------------------------------------------------------------------------------------------------

    def lookup(self, prefix: Prefix) -> PrefixMatch:
        """The hit of a request for `prefix`. Changes nothing, not even the eviction order."""
        unit = self.layout.unit_tokens
        limit = (check_prefix(prefix).num_tokens - 1) // unit
        sequence = TokenSequence(prefix, unit)
        if self._engine is not None:
            hit = self._engine.matches.hit_after(sequence, limit, 0)
        else:
            hit = find_hit(self.cache.index, sequence, self.layout, limit)
        on_disk = 0
        if self.cache.has_lower_tiers:
            on_disk = max(0, fetchable_path(self.cache.index, sequence, self.layout, limit)[1] - hit.stop) * unit
        return PrefixMatch(hit.device_stop * unit, (hit.stop - hit.device_stop) * unit, num_disk_tokens=on_disk)

    def admit(
        self,
        prefix: Prefix,
        *,
        request_id: str | None = None,
        wake: Callable[[], object] = do_nothing,
        **options: Unpack[RequestOptions],
    ) -> LedgerRequest:
        """Match `prefix` and pin the hit, in one step. `RequestOptions` documents the options.

        `reads_cache=False`: use no hit. `store` (all, the prompt only, nothing) and `max_store_tokens` (leading tokens)
        limit the tokens that may be stored. At least one token is always left to compute, so a fully cached prompt hits
        one block less.

        With `engine_blocks`, the engine has the first `num_device_tokens` on its device; the host is matched after
        them. The answer may be `PENDING`: see `match_again`.
        """
        if options:
            check_names("Ledger.admit", options, RequestOptions)
        unit = self.layout.unit_tokens
        reads_cache, max_hit_tokens = options.get("reads_cache", True), options.get("max_hit_tokens")
        store, max_store_tokens = options.get("store", StoreScope.ALL), options.get("max_store_tokens")
        hit_alignment, num_device_tokens = options.get("hit_alignment", 1), options.get("num_device_tokens", 0)
        if reads_cache is not True:
            check_bool("reads_cache", reads_cache)
        sequence = TokenSequence(check_prefix(prefix), unit)
        limit = sequence.num_prompt_units if reads_cache else 0
        if max_hit_tokens is not None:
            limit = min(limit, check_int("max_hit_tokens", max_hit_tokens, 0) // unit)
        alignment = 1
        if type(hit_alignment) is not int or hit_alignment != 1:
            alignment = math.lcm(unit, check_int("hit_alignment", hit_alignment, 1)) // unit
        may_store = NO_LIMIT
        if store is not StoreScope.ALL or max_store_tokens is not None:
            may_store = store_limit(prefix, unit, store, max_store_tokens)
        if self._engine is not None or type(num_device_tokens) is not int or num_device_tokens:
            self._check_device_tokens(num_device_tokens, sequence.num_tokens)
        if wake is not do_nothing:
            check_callable("wake", wake)
        name = self._checked_name(request_id)
        request = LedgerRequest(
            name, sequence, self.cache.epoch, self._num_admitted, limit, alignment,
            store_limit=may_store, ledger=self, evictions_before=self.cache.tiers[BELOW].num_evicted,
        )  # fmt: skip
        if may_store:
            self._policy.seen(request, 0, sequence.num_prompt_units)  # first, because a program's policy may raise
        self._num_admitted += 1
        self.live_requests[name] = request
        if self._engine is not None:
            self._engine.offers.deferred.pop(name, None)  # left by an earlier request with this id
            self._engine.matches.match(request, num_device_tokens, wake)
        else:
            self._request_leases.pin(request)
            self._moves.request(request, State.MATCHED)
            self._moves.request(request, State.PINNED)
        self._moves.report()
        return request

    def _check_device_tokens(self, num_device_tokens: int, num_tokens: int) -> None:
        check_int("num_device_tokens", num_device_tokens, 0, max(0, num_tokens - 1))
        if num_device_tokens and self._engine is None:
            raise InvalidArgument("num_device_tokens", "is for `engine_blocks`: this ledger has device blocks itself")

    def match_again(
        self, request: LedgerRequest, *, num_device_tokens: int, wake: Callable[[], object] = do_nothing
    ) -> PrefixMatch:
        """With `engine_blocks`: match again, before the load. The pins move if `num_device_tokens` has changed.

        `PENDING`: another request is loading the next block into the engine's blocks; this one has no pins meanwhile.
        `wake` is called when that load falls short, or when its request has offered or is over. After
        `pending_timeout_s` the answer is no longer `PENDING`.
        """
        engine = self._engine_of(request, "match_again")
        require(request, "match_again", State.MATCHED, State.PINNED)
        self._check_device_tokens(num_device_tokens, request.sequence.num_tokens)
        if wake is not do_nothing:
            check_callable("wake", wake)
        engine.matches.match(request, num_device_tokens, wake)
        self._moves.report()
        return request.match

    def pending_until(self, request: LedgerRequest) -> float:
        """With `engine_blocks`: the time, by the ledger's clock, from which `match_again` does not answer `PENDING` any
        more. Infinity if the last answer for the request was not `PENDING`."""
        return float(self._engine_of(request, "pending_until").arrivals.pending_until(request))

    def _checked_name(self, request_id: str | None) -> str:
        """`request_id`, or a name that no live request has."""
        if request_id is not None:
            name = check_text("request_id", request_id)
            if name in self.live_requests:
                raise DuplicateRequest("request_id", f"a live request is called {name!r}")
            return name
        name = f"request-{self._num_admitted}"
        while name in self.live_requests:
            name += "'"
        return name

    def allocate_nowait(self, request: LedgerRequest, num_tokens: int | None = None) -> None:
        """Take blocks for `num_tokens` (None: the prompt), all or nothing. `OutOfBlocks` changes nothing."""
        self.admission.allocate_nowait(self._on_own_device(request, "allocate"), num_tokens)
        self._moves.report()

    def queue_allocation(
        self, request: LedgerRequest, num_tokens: int | None = None, wake: Callable[[], object] = do_nothing
    ) -> Waiter:
        """Join the wait queue. `wake` is called once the waiter is granted or failed; then `accept` or `withdraw` it.

        `wake` may call the ledger, but must not raise."""
        check_callable("wake", wake)
        waiter = self.admission.queue_allocation(self._on_own_device(request, "allocate"), num_tokens, wake)
        self.admission.serve_queue()
        return waiter

    def extend_nowait(self, request: LedgerRequest, num_tokens: int) -> Extension:
        """Extend the block table to `num_tokens` in all. `OutOfBlocks` changes nothing."""
        try:
            return self.admission.extend_nowait(self._on_own_device(request, "extend"), num_tokens)
        finally:
            self._moves.report()

    def queue_extension(
        self, request: LedgerRequest, num_tokens: int, wake: Callable[[], object] = do_nothing
    ) -> Waiter:
        """Join the wait queue for more blocks, ahead of all allocations."""
        check_callable("wake", wake)
        waiter = self.admission.queue_extension(self._on_own_device(request, "extend"), num_tokens, wake)
        self.admission.serve_queue()
        return waiter

    def accept(self, waiter: Waiter) -> Extension:
        """Give the request of `waiter` the blocks that were granted, or raise the error of a failed waiter."""
        self._own(check_type("waiter", waiter, Waiter).request)
        try:
            return self.admission.accept(waiter)
        finally:
            self._moves.report()

    def withdraw(self, waiter: Waiter) -> None:
        """Stop waiting: give back an unused grant and serve the wait queue."""
        self._own(check_type("waiter", waiter, Waiter).request)
        self.admission.withdraw(waiter)
        self.admission.serve_queue()

    # -- forks ----------------------------------------------------------------------------------------------------

    def num_shared_tokens(self, request: LedgerRequest) -> int:
        """Leading tokens whose blocks a fork of `request` would share. It needs its own blocks for the tokens after."""
        require(self._on_own_device(request, "fork"), "fork", State.RUNNING)
        return self._forks.shared_stop(request) * self.layout.unit_tokens

    def fork(
        self,
        request: LedgerRequest,
        request_id: str | None = None,
        *,
        num_tokens: int = 0,
    ) -> Fork:
        """Start another request with the tokens that `request` has so far, RUNNING at once. It shares the full blocks;
        the engine copies the others (`Fork.copies`). It has blocks for `num_tokens`, or for all known tokens if those
        are more. `OutOfBlocks` changes nothing.
        """
        require(self._on_own_device(request, "fork"), "fork", State.RUNNING)
        self._forks.check(request)
        name, wanted = self._checked_name(request_id), check_int("num_tokens", num_tokens, 0)
        fork = self._forks.fork(request, name, self._num_admitted, wanted)
        self._num_admitted += 1
        self.live_requests[name] = fork.request
        for state in (State.MATCHED, State.PINNED, State.ALLOCATED, State.RUNNING):
            self._moves.request(fork.request, state)
        self._moves.report()
        return fork

    # -- loading --------------------------------------------------------------------------------------------------

    def plan_load(
        self,
        request: LedgerRequest,
        max_tokens: int | None = None,
        wake: Callable[[], object] = do_nothing,
        *,
        max_job_bytes: int | None = None,
        into: Sequence[Sequence[int]] | None = None,
    ) -> tuple[TransferPlan, ...]:
        """Start loading the host hit onto the device; returns the plans to launch.

        RUNNING afterwards: there is nothing to wait for. LOADING: `wake` is called when the load is over. REQUEUED: the
        load fell short and there were no free blocks for the missing units, or a reset has made the device hit useless,
        so the request gave up all its blocks. `wake` is called when its wait for blocks ends. Then accept
        `request.waiter` and plan again. Nothing is planned for a RUNNING request, but it is REQUEUED if its load is
        lost to a reset (`lost_to_reset`). `max_job_bytes` replaces the configured limit, to split an overlapped load
        into as few jobs as possible.

        With `engine_blocks`, `into` holds the request's block tables: one per group, from the first token at least to
        the end of the hit. The copies write only to the blocks named there for the units that are loaded.
        """
        if wake is not do_nothing:
            check_callable("wake", wake)
        units_per_job: Sequence[int] = ()
        if max_job_bytes is not None:
            units_per_job = self._units_per_job(check_int("max_job_bytes", max_job_bytes, 1) // self._block_bytes)
        if self._engine is not None:
            jobs = self._engine.plan_load(self._own(request), into, max_tokens, wake, units_per_job)
            self._moves.report()
            return tuple([job.plan for job in jobs])
        if into is not None:
            raise InvalidArgument("into", "is for `engine_blocks`: this ledger has device blocks itself")
        plans = self._loads.plan(self._own(request), max_tokens, wake, units_per_job)
        self.admission.serve_queue()
        return plans

    def lost_to_reset(self, request: LedgerRequest) -> bool:
        """Whether a reset came after the load was over and before the request began to compute: no step, no commit, no
        offer. The loaded KV is from before the reset. `plan_load` gives it up: call it, unless your caller has learned
        before the reset that the load was over."""
        if self._engine is None:
            return self._loads.lost_to_reset(self._own(request))
        return self._engine.lost_to_reset(self._own(request))

    def loadable(self, request: LedgerRequest, max_tokens: int | None = None) -> Loadable | None:
        """The load that `plan_load` would plan now; with `engine_blocks`, a load of the whole hit. None: there is
        nothing to load, or the load was planned before."""
        if self._engine is None:
            return self._loads.loadable(self._own(request), max_tokens)
        if max_tokens is not None:
            raise InvalidArgument("max_tokens", "is for a ledger that has device blocks itself: decline the rest")
        return self._engine.matches.loadable(self._own(request))

    def decline(self, request: LedgerRequest, from_token: int) -> PrefixMatch:
        """With `engine_blocks`: match again, before the load, up to `from_token`, rounded down to a block. The tokens
        after it are computed, and no later match of this request includes them."""
        engine = self._engine_of(request, "decline")
        require(request, "decline", State.PINNED)
        request.hit_limit = check_int("from_token", from_token, 0) // self.layout.unit_tokens
        engine.matches.match_again(request)
        self._moves.report()
        return request.match

    def abandon_load(self, request: LedgerRequest) -> None:
        """Stop waiting for a load: landed blocks count, the rest is computed. Launched copies go on.

        With `engine_blocks`, these copies go on writing to the blocks that `into` named, and their jobs hold them until
        they are over: compute the tokens after `request.num_computed_tokens` into other blocks.
        """
        require(self._own(request), "abandon_load", *_WITH_A_LOAD)
        load = request.load
        if load is not None:
            wakes = self._loads.settled(self._loads.abandon(load))
            self.admission.serve_queue(wakes + load.conclude())

    # -- jobs -----------------------------------------------------------------------------------------------------

    def launch(self, job_id: int) -> bool:
        """Mark a queued job as launched. Call it before the copy begins, because a copy cannot be recalled. False: the
        job was discarded, so do not copy."""
        job = self.jobs.unsettled.get(check_int("job_id", job_id, 0))
        is_wanted = job is not None and self.jobs.launch(job)
        self._moves.report()
        return is_wanted

    def settle(self, completion: Completion) -> None:
        """Settle a launched job: publish, release its leases, end the loads that waited for it, serve the wait queue,
        call the wakes; in this order."""
        check_completion(completion)
        self.admission.serve_queue(self._loads.settled(self.jobs.settle(completion)))

    def discard(self, job_id: int) -> None:
        """Give up a job that was never launched. The requests that wait for it compute instead."""
        job = self.jobs.unsettled.get(check_int("job_id", job_id, 0))
        if job is not None:
            self.admission.serve_queue(self._loads.settled(self.jobs.discard(job)))

    # -- computing ------------------------------------------------------------------------------------------------

    def commit(
        self, request: LedgerRequest, num_computed_tokens: int, new_token_ids: TokenIds = ()
    ) -> tuple[TransferPlan, ...]:
        """Append `new_token_ids`, then publish up to `num_computed_tokens` (absolute); returns the stores to launch."""
        plans = self._commits.commit(self._on_own_device(request, "commit"), num_computed_tokens, new_token_ids)
        self.admission.serve_queue()
        return plans

    def commit_all(
        self, commits: Iterable[tuple[LedgerRequest, int, TokenIds]]
    ) -> tuple[tuple[TransferPlan, ...], ...]:
        """Commit several requests of one forward, all or nothing. Each commit is a tuple of the arguments of `commit`.
        Returns the stores to launch, one tuple for each commit."""
        checked: list[tuple[LedgerRequest, object, TokenIds]] = []
        for one in as_tuple("commits", commits, "tuple"):
            if type(one) is not tuple or len(one) != 3:
                raise InvalidArgument(
                    "commits", f"must hold tuples (request, tokens computed, new ids), got {shown(one)}"
                )
            request = self._on_own_device(one[0], "commit")
            if any(request is other for other, *_ in checked):
                raise InvalidArgument("commits", f"names {request} twice")
            checked.append((request, one[1], one[2]))
        plans = self._commits.commit_all(checked)
        self.admission.serve_queue()
        return tuple(plans)

    def check_commit(self, request: LedgerRequest, num_computed_tokens: int, new_token_ids: TokenIds = ()) -> None:
        """Raise what `commit` would, and change nothing."""
        self._commits.check(self._on_own_device(request, "commit"), num_computed_tokens, new_token_ids)

    def offer(
        self,
        request: LedgerRequest,
        num_computed_tokens: int,
        block_ids: Sequence[Sequence[int]],
        new_token_ids: TokenIds = (),
        *,
        is_last: bool = False,
    ) -> tuple[TransferPlan, ...]:
        """With `engine_blocks`, in place of `commit`: append `new_token_ids`, then store those of the first
        `num_computed_tokens` (absolute) that the host lacks and the policy wants. Returns the stores to launch.

        `block_ids` holds the request's block tables, one per group, from the first token on: lists, ranges or arrays.
        Only the ids of stored blocks are read; with `is_last`, all are checked. Null blocks are skipped. Jobs hold the
        blocks that they copy until the copies are over, even if the request ends meanwhile. If host memory has no free
        blocks, blocks are skipped, and the next offer tries them again. Blocks above the bound of stores in flight are
        deferred: call `offer_deferred` once a step. `is_last`: the last offer of the request, which also stores the
        window blocks that a later prompt needs.
        """
        engine = self._engine_of(request, "offer")
        check_bool("is_last", is_last)
        try:
            jobs = engine.offer(request, num_computed_tokens, block_ids, new_token_ids, is_last=is_last)
        finally:
            self._moves.report()
        return tuple([job.plan for job in jobs])

    def offer_deferred(self) -> tuple[TransferPlan, ...]:
        """With `engine_blocks`, at the beginning of each step: store blocks that offers have deferred, up to the bound
        of stores in flight, those of the oldest request first. This includes blocks of requests that are over. The call
        is cheap if no blocks are deferred.

        `FindsBlocks.find` says which block of the engine holds the KV now. If the engine no longer has it, the ledger
        gives the block up and reports that to the observer (`store_skipped`, `in_flight`). Without `find`, no block is
        deferred: the next offer of the request tries the skipped blocks again. The copies have to wait for all compute
        submitted to the device so far.
        """
        if self._engine is None:
            raise WrongState("offer_deferred: this ledger has device blocks itself: it takes no others")
        try:
            return tuple([job.plan for job in self._engine.offers.offer_deferred()])
        finally:
            self._moves.report()

    @property
    def deferred_requests(self) -> tuple[str, ...]:
        """Ids of the requests with deferred blocks, the oldest first. They may be over. `find` is called for them."""
        return () if self._engine is None else tuple(self._engine.offers.deferred)

    def plan_write_back(self) -> tuple[TransferPlan, ...]:
        """Stores of the blocks that the next allocations would evict; none unless the policy stores so late
        (`LazyStore`).

        Call it after `commit` and `release`; it is cheap if nothing has changed. The blocks may have been computed at
        any time, so the copies have to wait for all compute submitted to the device so far.
        """
        plans = self._commits.plan_write_back()
        self._moves.report()
        return plans

    def invalidate(self, request: LedgerRequest, from_token: int) -> tuple[LedgerRequest, ...]:
        """Invalidate the KV that a failed forward committed: all KV from `from_token` on is wrong.

        Drops the generated tokens after `from_token`, because that forward, or a later one, sampled them. Returns the
        other requests that may have read the wrong KV; abort them. Abort `request` too if it comes first in the result:
        it would have to go back to units that have left its window, or other requests still read blocks that it would
        write to and it cannot get others.

        With `engine_blocks`: the units that were offered from `from_token` on, and all units cached after them, are no
        longer found. The requests returned may have read them in the engine's cache or from the host. The engine has to
        invalidate its own cache itself.
        """
        sequence, published = self._own(request).sequence, request.published
        if self._remote_stores is not None:
            sequence = sequence.copy()
        if self._engine is not None:
            readers, settled = self._engine.invalidate(request, from_token, tuple(self.live_requests.values()))
            self.admission.serve_queue(self._loads.settled(settled))
            self._invalidate_cells(sequence, from_token // self.layout.unit_tokens, published)
            return tuple(reader for reader in readers if not reader.is_over)
        # Requests that are over may have read it too, in a step or as forks, but need not be aborted.
        others = dict.fromkeys((*self.live_requests.values(), *self._closing, *self._forks.over))
        tainted = self._commits.invalidate(request, from_token, others)
        self._invalidate_cells(sequence, from_token // self.layout.unit_tokens, published)
        for reader, first in tainted.items() if self._remote_stores is not None else ():
            if reader is not request:  # a fork may have published units that `request` has only begun
                self._invalidate_cells(reader.sequence, first, max(reader.published, reader.read_before))
        self.admission.serve_queue()
        return tuple(reader for reader in tainted if not reader.is_over)

    def _invalidate_cells(self, sequence: TokenSequence, first: int, stop: int) -> None:
        """Invalidate the cells in a remote store that hold units `[first, stop)` of `sequence`, or follow them."""
        if self._remote_stores is not None:
            for job in self._remote_stores.invalidate(sequence, first, stop):
                self.admission.serve_queue(self._loads.settled(self.jobs.discard(job)))

    @property
    def num_steps_ended(self) -> int:
        """Number of steps that have ended. Steps are numbered in the order of their ends, see `last_step`."""
        return self.cache.last_uses.num_ended

    def last_step(self, plans: Iterable[TransferPlan]) -> int:
        """The number of the last step that may have touched the device blocks that `plans` write to. The copies have to
        wait for the fences of all steps up to that number, and for nothing else.

        0: unknown, or the step has not ended; then the loads have to wait for all compute so far. Numbers are known as
        long as every forward runs in a step. After one commit of tokens that no step has computed, all answers are 0.
        """
        number = 0
        for plan in as_tuple("plans", plans, "TransferPlan"):
            if check_type("plans", plan, TransferPlan).destination is not Tier.DEVICE:
                continue
            latest = self.cache.last_uses.latest(plan.destination_ids)
            if not latest:
                return 0
            number = max(number, latest)
        return number

    @contextmanager
    def step(self, requests: Iterable[LedgerRequest], arriving: Iterable[LedgerRequest] = ()) -> Iterator[None]:
        """Hold the blocks of `requests` while a forward touches them, even if the requests end meanwhile.

        For the requests in `arriving`, the forward overlaps a load: see `expected_block_ids`. If the load falls short,
        the tokens that the forward computed cannot be committed. A request whose load is over is held like the others.
        """
        self._require_own_device("step")
        held, arrived = as_tuple("requests", requests, "LedgerRequest"), as_tuple("arriving", arriving, "LedgerRequest")
        for request in held:
            if self._own(request).state is not State.RUNNING:
                require(request, "step", State.ALLOCATED, State.RUNNING)
                require_no_holes(request, "step")
        for request in arrived:
            require(self._own(request), "step", State.LOADING, State.RUNNING)
            if request.state is not State.RUNNING and not can_start(self.cache, request):
                raise WrongState(f"step: the load of {request} is not under way: wait until it is over")
        held += arrived
        for request in held:
            if request.load is not None or request.overlap is not None:
                begin_step(self.cache, self._moves, request)
            request.num_steps += 1
            request.computing = Computing.ITS_BLOCKS
        self._num_steps += 1
        self.steps[self._num_steps] = step = Step(self._num_steps, held)
        self._moves.step_begun(step)
        self._moves.report()
        try:
            yield
        finally:
            wakes: list[Callable[[], object]] = []
            number = self.cache.last_uses.step_ended()
            for request in held:
                request.last_step = number
                request.num_steps -= 1
                if request.num_steps:  # another step still touches its blocks
                    continue
                request.when_idle()
                if request in self._closing:
                    self._closing.discard(request)
                    self._request_leases.release_all(request)
                elif request.state is State.DRAINING and request.load is not None:
                    wakes += request.load.conclude()
                elif self.layout.windows:
                    slide_windows(self.cache, request)
            del self.steps[step.step_id]
            self._moves.step_ended(step)
            self.admission.serve_queue(wakes)

    def can_start_early(self, request: LedgerRequest) -> bool:
        """Whether `step` accepts the request as `arriving` while its load is under way."""
        return can_start(self.cache, self._on_own_device(request, "can_start_early"))

    def num_expected_tokens(self, request: LedgerRequest) -> int:
        """Tokens whose KV is on the device once the load has landed: where an overlapping step starts to compute."""
        load = self._on_own_device(request, "num_expected_tokens").load
        return request.num_computed_tokens if load is None else load.stop * self.layout.unit_tokens

    def expected_block_ids(self, request: LedgerRequest) -> list[list[int]]:
        """The block table as it will be once the load has landed, one list per group, for a step with the request in
        `arriving`. A loaded block is valid once the fence of its job has passed. `WrongState` before such a step."""
        ids = expected_ids(self._on_own_device(request, "expected_block_ids"))
        return self.layout.by_group(ids) if ids else self._no_tables()

    def begin_again(self, request: LedgerRequest) -> int | None:
        """The first token to compute again, in a new step, because the load fell short of the blocks that an
        overlapping step assumed; None: nothing to compute again. After an invalid overlap, commits need this call and a
        new step."""
        require(self._on_own_device(request, "begin_again"), "begin_again", State.RUNNING)
        acknowledge(self._moves, request)
        self._moves.report()
        return first_invalid_token(request)

    def first_invalid_token(self, request: LedgerRequest) -> int | None:
        """The same as `begin_again`, but commits stay refused."""
        return first_invalid_token(self._on_own_device(request, "first_invalid_token"))

    def release(self, request: LedgerRequest, reason: str = "closed_early") -> tuple[TransferPlan, ...]:
        """End the request: DONE if it has committed and no other `reason` is given, else ABORTED.

        Releases all its pins and blocks in this call, except blocks that a step or a job still touches. Returns the
        stores to launch. If the store policy raises, that is raised, and the request has ended without stores.
        """
        reason = check_text("reason", reason)
        self._own(request)
        if self.live_requests.get(request.request_id) is not request:
            raise WrongState(f"release: {request} is {request.state.name} already")
        done = request.state is State.RUNNING and request.has_committed and reason == "closed_early"
        try:
            return self._commits.offer_last(request) if done and request.epoch == self.cache.epoch else ()
        finally:
            if request.waiter is not None:
                self.admission.leave(request.waiter)
            settled = self._loads.abandon(request.load) if request.load is not None else []
            if request.origins:
                self._forks.leaving(request)
            if request.num_steps:
                self._closing.add(request)
            else:
                self._request_leases.release_all(request)
            del self.live_requests[request.request_id]
            if not done:
                request.reason = reason
            self._moves.request(request, State.DONE if done else State.ABORTED)
            if self._forks.over:
                self._forks.left(request)
            if self._engine is not None:
                self._engine.left(request)
            self.admission.serve_queue(self._loads.settled(settled) if settled else ())

    # -- preemption -----------------------------------------------------------------------------------------------

    def preempt_nowait(self, request: LedgerRequest) -> Preemption:
        """Give up every device block of `request`. Its computed blocks are stored in host memory as far as the host has
        free blocks, and pinned there until the request is resumed or over. Refused in a step, and in the wait queue
        unless REQUEUED."""
        self._preemptions.check(self._on_own_device(request, "preempt"))
        wakes: list[Callable[[], object]] = []
        load = request.load
        if load is not None:
            wakes += self._loads.settled(self._loads.abandon(load))
            wakes += load.conclude()
        if request.waiter is not None:  # REQUEUED: its wait ends here, too
            wakes.append(request.waiter.wake)
        found = self._preemptions.preempt(request)
        self.admission.serve_queue(wakes)  # last: a wake may call the ledger
        return found

    def resume(self, request: LedgerRequest, num_tokens: int | None = None) -> None:
        """Match a preempted request again, with the tokens that it had computed: PINNED afterwards, as after `admit`.
        It computes again from the first token that no load brings back.

        `num_tokens`: the tokens that it will allocate; `OutOfBlocks`, with nothing changed, if they can never fit.
        """
        self._preemptions.resume(self._on_own_device(request, "resume"), num_tokens)
        self.admission.serve_queue()

    def fetch(
        self,
        prefix: Prefix,
        wake: Callable[[], object] = do_nothing,
        *,
        num_remote_tokens: int = 0,
        for_request: LedgerRequest | None = None,
    ) -> Fetch:
        """Start copying to the host the units of `prefix` that only the disk holds: launch the `plans` of the fetch.
        After them, load the cells of a remote store that hold its first `num_remote_tokens`, whole cells: you have
        asked the store for them.

        All fetches together take at most `max_fetch_share` of the host; a larger fetch brings the front of its units.
        Two fetches of one prefix share the copies. A fetch ends at the first cell that the store does not hold. `wake`
        is called once the fetch is over: if it calls `match_fetched` itself, nothing can be evicted in between.
        `for_request` waits for the fetch: `requests()` and the log name it.
        """
        check_callable("wake", wake)
        if for_request is not None:
            self._own(for_request)
        sequence = TokenSequence(check_prefix(prefix), self.layout.unit_tokens)
        remote_stop = check_int("num_remote_tokens", num_remote_tokens, 0) // self.layout.unit_tokens
        cell_tokens = 0 if self._remote_stores is None else self._remote_stores.cell_units * self.layout.unit_tokens
        if num_remote_tokens and (not cell_tokens or num_remote_tokens % cell_tokens):
            raise InvalidArgument("num_remote_tokens", f"must be whole cells of {cell_tokens} tokens")
        fetch = self._need_fetches("fetch").fetch(sequence, wake, self, remote_stop, for_request)
        self._moves.report()
        return fetch

    def num_fetch_blocks(self, prefix: Prefix) -> int:
        """Blocks that a fetch of `prefix` would copy from the disk now, without those that jobs bring already."""
        sequence = TokenSequence(check_prefix(prefix), self.layout.unit_tokens)
        return self._need_fetches("num_fetch_blocks").num_blocks(sequence)

    def num_remote_fetch_blocks(self, prefix: Prefix, num_remote_tokens: int) -> int:
        """Blocks that a fetch of `prefix` would load now from the cells with its first `num_remote_tokens` tokens,
        without those that the disk holds or that jobs bring already."""
        sequence = TokenSequence(check_prefix(prefix), self.layout.unit_tokens)
        remote_stop = check_int("num_remote_tokens", num_remote_tokens, 0) // self.layout.unit_tokens
        return self._need_fetches("num_remote_fetch_blocks").num_remote_blocks(sequence, remote_stop)

    def match_fetched(self, request: LedgerRequest) -> PrefixMatch:
        """Match a PINNED request again and pin the hit, in one step, because a fetch has brought more of it. Refused in
        the wait queue, and once the request has blocks."""
        require(self._own(request), "match_fetched", State.PINNED)
        if request.waiter is not None:
            raise waiting_error(request, "match_fetched")
        if self._engine is not None:
            self._engine.matches.match_again(request)
        else:
            self._request_leases.match_again(request)
            if self._fetches is not None:
                self._fetches.keep(request)
        self.admission.serve_queue()
        return request.match

    def plan_disk_stores(
        self, max_blocks: int, *, is_idle: bool = False, only_requested_twice: bool = False
    ) -> tuple[TransferPlan, ...]:
        """Stores to disk of the blocks that the host evicts next, at most `max_blocks` blocks; with `is_idle`, also of
        blocks that were requested twice. `only_requested_twice`: of these alone. Cheap if nothing has changed."""
        check_int("max_blocks", max_blocks, 0)
        check_bool("is_idle", is_idle)
        check_bool("only_requested_twice", only_requested_twice)
        if self._disk_stores is None:
            return ()
        return self._stored(
            self._disk_stores.plan(max_blocks, is_idle=is_idle, only_requested_twice=only_requested_twice)
        )

    @property
    def disk_stores_are_due(self) -> bool:
        """Whether `plan_disk_stores` may find something that it did not find last time. Cheap."""
        return self._disk_stores is not None and self._disk_stores.are_due

    def plan_disk_flush(self, max_blocks: int) -> tuple[TransferPlan, ...]:
        """Stores to disk of the blocks in the host, at most `max_blocks` blocks, the last used first."""
        check_int("max_blocks", max_blocks, 0)
        if self._disk_stores is None:
            return ()
        return self._stored(self._disk_stores.plan_flush(max_blocks))

    def _stored(self, jobs: list[Job]) -> tuple[TransferPlan, ...]:
        if jobs:
            self._restores = None  # the stores may write to slots that an earlier process has left
        self._moves.report()
        return tuple([job.plan for job in jobs])

    def take_forgotten_slots(self) -> array[int]:
        """The slots on disk whose contents were invalidated since the last call: erase the records by which a restart
        would find them."""
        disk = self.cache.tiers[-1]
        return disk.take_forgotten() if isinstance(disk, DiskBlocks) else array("i")

    @property
    def num_disk_resets(self) -> int:
        """How often the disk was reset since this ledger was made: see `DiskPayload.generation`."""
        return 0 if self.config.disk is None else self.cache.tiers[Tier.DISK].num_resets

    def restore(self, run: RestoredRun) -> int:
        """Restore a run that an earlier process has left on disk. Returns how many of its slots are in use now.

        Restore a prefix before the runs that follow it. Requests may go on meanwhile, but restore all runs before the
        first store to disk: after that, and after a reset, nothing is restored. A run that follows no cached run is
        skipped, and so are units that are cached already."""
        if self.config.disk is None:
            raise WrongState("restore: this ledger has no disk: see `OffloadConfig.disk`")
        found = check_restored(run, self.cache)
        return 0 if self._restores is None else self._restores.restore(found)

    def _need_fetches(self, call: str) -> Fetches:
        if self._fetches is None:
            raise WrongState(f"{call}: this ledger has no disk and no remote store: see `OffloadConfig.disk`")
        return self._fetches

    @property
    def cell_units(self) -> int:
        """Units of a cell: see `cells_of`. 0 without a remote store."""
        return 0 if self._remote_stores is None else self._remote_stores.cell_units

    def plan_remote_stores(self, max_blocks: int, is_wanted: Callable[[CellLabel], bool]) -> tuple[TransferPlan, ...]:
        """Stores of whole cells that are in the host and were requested twice, at most `max_blocks` blocks, the last
        requested first. Cheap if nothing has changed.

        `is_wanted` is called for each cell in the middle of this call. It returns False if the store holds the
        cell."""
        check_int("max_blocks", max_blocks, 0)
        check_callable("is_wanted", is_wanted)
        if self._remote_stores is None:
            return ()
        ticket = self._num_admitted
        oldest = next(iter(self.live_requests.values())).ticket if self.live_requests else ticket
        return tuple([job.plan for job in self._remote_stores.plan(max_blocks, is_wanted, ticket, oldest)])

    def take_forgotten_cells(self) -> tuple[CellLabel, ...]:
        """The cells to remove from the store, because their contents were invalidated: all for which a store may have
        been planned. Cells that a store under way may still write are kept back until it is settled."""
        return () if self._remote_stores is None else self._remote_stores.take_forgotten()

    def __repr__(self) -> str:
        tiers = [f"{t.tier.name.lower()} {t.pool.num_free}/{t.pool.num_blocks} free" for t in self.cache.tiers]
        return f"<Ledger {', '.join(tiers)}, {len(self.live_requests)} requests>"

    # -- pins, hints and cache transfers --------------------------------------------------------------------------

    def pin(self, prefix: Prefix, *, expires_at: float = math.inf) -> Pin:
        """Pin the cached part of `prefix` until `unpin`, or until `lapse` is called with `expires_at` or a later time.
        `OutOfBlocks` if all pins together would keep more than `max_pinned_share` of a tier."""
        pin = self._pins.pin(TokenSequence(check_prefix(prefix), self.layout.unit_tokens), expires_at, self)
        self._moves.report()
        return pin

    def unpin(self, pin: Pin) -> None:
        """End a pin. Does nothing if the pin has ended by itself; a second `unpin` raises."""
        if not isinstance(pin, Pin) or pin.ledger is not self:
            raise InvalidArgument("pin", f"was not made by this ledger: {shown(pin)}")
        if pin.state in (PinState.HELD, PinState.RELEASED):
            self._pins.end(pin, PinState.RELEASED)
            self.admission.serve_queue()

    @property
    def next_lapse(self) -> float:
        """The time at which the first pin or hint lapses; infinity without one."""
        pins, hints = self._pins.pins, self._hints
        due = pins[0].expires_at if pins else math.inf
        return due if hints is None else min(due, hints.next_lapse)

    def lapse(self, now: float) -> None:
        """End the pins and hints that expire at `now` or before."""
        if self._pins.lapse(now):
            self.admission.serve_queue()
        if self._hints is not None:
            self._hints.lapse(now)
        self._moves.report()

    def hint(self, prefix: Prefix, *, expires_at: float, category: str = "") -> int:
        """Evict the cached part of `prefix` last, until it is requested, or until `lapse` is called with `expires_at`
        or a later time. Pins nothing. Returns the number of tokens spared, 0 unless eviction learns.

        Hints of a `category`, at most 64 of them, have no effect while less than a quarter of them come true."""
        check_prefix(prefix)
        expires_at, category = check_time("expires_at", expires_at), check_text("category", category)
        if len(category) > MAX_CATEGORY:
            raise InvalidArgument("category", f"must have at most {MAX_CATEGORY} characters, got {len(category):,}")
        if self._hints is None:
            return 0
        unit = self.layout.unit_tokens
        num_spared = self._hints.hint(TokenSequence(prefix, unit), expires_at, category) * unit
        self._moves.report()
        return num_spared

    def drop_pins(self) -> None:
        """End every pin: DROPPED."""
        self._pins.end_all(PinState.DROPPED)
        self.admission.serve_queue()

    def prefetch(self, prefix: Prefix, wake: Callable[[], object] = do_nothing) -> Prefetch:
        """Start to load the host hit of `prefix`, as a request for it would: launch the `plans` of the prefetch."""
        self._require_own_device("prefetch")
        check_callable("wake", wake)
        sequence = TokenSequence(check_prefix(prefix), self.layout.unit_tokens)
        transfer = self._cache_transfers.prefetch(sequence, wake, self)
        self._moves.report()
        return transfer

    def demote(self, prefix: Prefix, wake: Callable[[], object] = do_nothing) -> Demotion:
        """Start to move `prefix` from the device to the host: launch the `plans` of the demotion."""
        self._require_own_device("demote")
        check_callable("wake", wake)
        sequence = TokenSequence(check_prefix(prefix), self.layout.unit_tokens)
        transfer = self._cache_transfers.demote(sequence, wake, self)
        self._moves.report()
        return transfer

    def cancel(self, transfer: CacheTransfer) -> None:
        """Cancel a prefetch, a fetch or a demotion; nothing if it is over. Launched copies and all stores go on."""
        if not isinstance(transfer, CacheTransfer) or transfer.request.ledger is not self:
            raise InvalidArgument("transfer", f"was not begun by this ledger: {shown(transfer)}")
        if not transfer.is_over:
            self.admission.serve_queue(self._loads.settled(self._cache_transfers.cancel(transfer)))
            transfer.wake()

    def cancel_cache_transfers(self) -> None:
        for transfer in tuple(self._cache_transfers.under_way.values()):
            self.cancel(transfer)

    # -- the whole ------------------------------------------------------------------------------------------------

    def reset(self, tier: Tier | None = None) -> None:
        """Forget everything cached, or everything that `tier` holds. Every pin ends, unless only the disk is reset.

        No request begins to compute with KV from before the reset. The reset drops the match of a request without
        blocks. If the load of a request is not over, the request loses its device hit, its load ends with no tokens,
        and the request computes from its first token (with `engine_blocks`: from the end of the engine's own hit). A
        request whose load is over, or that computes without a load, keeps its blocks and goes on, unless its caller has
        not learned yet that the load is over: see `lost_to_reset`. Requests from before the reset publish and store
        nothing any more, unless only a tier below the device is reset."""
        if tier is not None and check_tier("tier", tier) is Tier.DEVICE:
            self._require_own_device("reset of this tier")
        if tier is Tier.DISK and self.config.disk is None:
            raise InvalidArgument("tier", "is not there: this ledger has no disk")
        if tier is Tier.REMOTE:
            raise InvalidArgument("tier", "must not be REMOTE: other processes share the store; use another namespace")
        if tier in (None, Tier.DISK):
            self._restores = None
        if tier is not Tier.DISK:  # pins have no leases there
            self._pins.end_all(PinState.DROPPED)
        if tier is None:
            self.cache.reset()
            if self._hints is not None:
                self._hints.clear()
        else:
            self.cache.reset_tier(tier)
        if tier is not Tier.DISK:  # matches have no leases there
            match_again = self.admission.match_again if self._engine is None else self._engine.matches.forget
            match_again(self.live_requests.values())
        for request in (*self.live_requests.values(), *self._closing):
            if tier is Tier.DEVICE and request.num_units and request.epoch == self.cache.epoch:
                request.epoch = NoEpoch.ORPHANED
        self.admission.serve_queue()

    def statistics(self) -> LedgerStatistics:
        device, host, *rest = (tier.statistics() for tier in self.cache.tiers)
        waiting = len(self.admission.queue.extending) + len(self.admission.queue.allocating)
        num_jobs, num_pins = len(self.jobs.unsettled), len(self._pins.pins)
        late, paused = self.jobs.num_late, self._engine is not None and not self._engine.matches.device.may_load
        disk = rest[0] if rest else None
        eviction = None if self._rulings is None else self._rulings.statistics()
        learned = () if eviction is None else eviction.learned
        return LedgerStatistics(
            device, host, len(self.live_requests), waiting, num_jobs, late, num_pins, paused, disk,
            self._remote_counts(), learned, 0 if self._hints is None else len(self._hints), eviction,
        )  # fmt: skip

    def _remote_counts(self) -> RemoteCounts | None:
        if self._remote_stores is None:
            return None
        links = [job.plan.link for job in self.jobs.unsettled.values()]
        num_loads, num_stores = links.count((Tier.REMOTE, Tier.HOST)), links.count((Tier.HOST, Tier.REMOTE))
        return RemoteCounts(num_loads, num_stores, len(self._remote_stores.forgotten))

    def requests(self) -> tuple[RequestStatus, ...]:
        """The live requests, those that have been in their state for the longest first: the blocks that each holds and
        waits for, and the holders of these. Ages are None in a ledger without a `clock`."""
        return tuple(self.situation.requests())

    def holders(self) -> tuple[Holder, ...]:
        """All holders of device blocks, the largest first: requests, steps (also for requests that are over), pins,
        jobs, prefetches, demotions."""
        return tuple(self.situation.biggest())

    def explain(self) -> str:
        """`requests()` and `holders()` as a table to print."""
        found = self.statistics()
        device, lower = found.device, [("host", found.host), ("disk", found.disk)]
        live = f"{found.num_requests:,} request{'' if found.num_requests == 1 else 's'}"
        if found.remote is not None and (moving := found.remote.num_loads + found.remote.num_stores):
            live += f", {moving:,} cell{'' if moving == 1 else 's'} on the way"
        if self._engine is None:
            about = f"{device.counted('device')}; {live}, {found.num_waiting:,} waiting"
        else:  # only the engine knows its free and cached blocks, and the requests that wait for them
            held = f"{device.num_blocks:,} ({device.num_quarantined:,} quarantined)"
            about = (
                f"{self._engine.num_rows - 1:,} device blocks, which the engine hands out: copies hold {held}; {live}"
            )
        below = [tier.counted(name) for name, tier in lower if tier is not None and tier.num_blocks]
        return explained("\n".join((about, *below, *self._evicts(found))), self.requests(), self.holders())

    def _evicts(self, found: LedgerStatistics) -> tuple[str, ...]:
        """A line of text about the eviction order, if it is not the default."""
        if found.eviction is not None:
            num_hints = found.num_hints
            hints = f"; {num_hints:,} hint{'' if num_hints == 1 else 's'} in force" if num_hints else ""
            return (f"{found.eviction}{hints}",)
        order = self.cache.tiers[Tier.HOST].order
        if isinstance(order, LeastRecentlyUsed):
            return ()
        return (f"eviction: an order of the program's own, {plain(type(order).__name__)}",)

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless every block has exactly one owner and every reference belongs to a lease."""
        owners = (*self.live_requests.values(), *self._closing, *self._cache_transfers.under_way)
        check_integrity(self.cache, self.jobs, self.admission.queue, owners, self._pins.pins)

    def watch(self, watcher: BlockWatcher | None) -> None:
        """Report to `watcher` every block that becomes cached or is no longer cached, except engine-owned blocks. None:
        stop reporting."""
        if watcher is not None:
            check_has("watcher", watcher, "BlockWatcher", "part_changed all_cleared")
        self.cache.watch(watcher)

    def block_ids(self, request: LedgerRequest) -> list[list[int]]:
        """The block table, one list per group."""
        tables = self._on_own_device(request, "block_ids").tables
        return self.layout.by_group([table.ids for table in tables]) if tables else self._no_tables()
