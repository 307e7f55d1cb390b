"""The ledger: the synchronous face. A step-based engine drives it directly; the async runtime is its first client.

A request's way through it: `admit` (match and pin) -> `allocate_nowait` or `queue_allocation` + `accept` -> `plan_load`
-> `commit` ... -> `release`. Plans come out of `plan_load`, `commit` and `release`; `launch` and `settle` take in what
became of them. Nothing here waits, and no call leaves anything half done.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import attrs

from ..arguments import as_tuple, check_callable, check_has, check_type, shown
from ..config import MAX_BLOCKS, OffloadConfig
from ..errors import ConfigError, DuplicateRequest, InvalidArgument, WrongState
from ..prefix import Prefix, TokenIds
from .admission import Admission
from .answer import PrefixMatch
from .arguments import check_bool, check_completion, check_int, check_prefix, check_text, check_tier
from .blocks import DevicePool, ExtentPool, FreeList
from .cache import PrefixCache
from .commits import Commits
from .early import begin_step, can_start, expected_ids, first_invalid_token, tell
from .engine_arrivals import Arrivals
from .engine_blocks import EngineBlocks, EngineTier
from .engine_offers import EngineOffers
from .engine_owned import EngineOwned
from .errands import Errands
from .eviction import EvictionOrder, LeastRecentlyUsed
from .forks import Fork, Forks
from .frontier import Frontier
from .groups import KVCacheGroup, Layout
from .integrity import check_integrity
from .jobs import JobBook
from .keeping import Keeping
from .kept import Demotion, Errand, Pin, Prefetch
from .lifecycle import PinState, RequestState, require
from .loads import Loads, require_no_holes
from .matching import find_hit, find_hit_behind
from .observer import Moves, Observer
from .owners import Extension, Holding, Waiter, nobody
from .pins import Pins
from .plan import Completion, Outcome, Tier, TransferPlan
from .policy import StoreScope, store_limit, store_policy_of
from .preemption import Preemption, Preemptions
from .records import Job
from .stores import Stores
from .tiers import BlockWatcher, TierBlocks, TierStatistics
from .tokens import TokenSequence
from .windows import slide

__all__ = ["Ledger", "LedgerStatistics"]

_S = RequestState
_LOADING = (_S.LOADING, _S.DRAINING, _S.REQUEUED, _S.STRANDED)
OBSERVES = "request_moved job_moved store_skipped pin_moved errand_moved early_moved"
ORDERS = "add add_newer add_back remove oldest __iter__"


@attrs.frozen
class LedgerStatistics:
    device: TierStatistics
    host: TierStatistics
    num_requests: int
    num_waiting: int
    num_jobs: int
    num_late_completions: int
    num_pins: int
    """Pins that are held: those of `pin`, not those of requests."""


class Ledger:
    """Which block holds what, for whom, and what may happen to it next.

    `num_device_blocks` is the number of rows of the KV tensors, the null block 0 included. `block_bytes` is what one
    block takes over all regions; it only bounds what is in flight.

    The device blocks are the ledger's to give. With `engine_blocks` they are an engine's own, which has a pool and a
    prefix cache itself: then `offer` takes the place of `commit`, `plan_load` copies into blocks that the engine names,
    and the calls about device blocks raise `WrongState` (docs/engines.md has the table). `clock` is what the engine
    measures seconds by, such as `time.monotonic`.
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
        groups = [group for group in config.groups if isinstance(group, KVCacheGroup)]
        if len(groups) != len(config.groups):
            raise ConfigError("groups", "must hold KVCacheGroup objects")
        if device_pool is not None:
            check_has("device_pool", device_pool, "DevicePool", "num_blocks num_free take give free_ids", ConfigError)
        if observer is not None:
            check_has("observer", observer, "Observer", OBSERVES)
        _check_engine(device_pool, engine_blocks, clock)
        self.config = config
        self.layout = Layout.of(groups)
        self.holdings: dict[str, Holding] = {}
        self._closing: set[Holding] = set()
        self._new_order = _eviction_of(config.eviction)
        host = ExtentPool(config.resolve_host_blocks(block_bytes))
        if engine_blocks is not None:
            device: TierBlocks = EngineTier.of(engine_blocks, self._new_order())
        else:
            pool = device_pool if device_pool is not None else FreeList(num_device_blocks)
            device = TierBlocks(Tier.DEVICE, pool, self._new_order())
        tiers = (device, TierBlocks(Tier.HOST, host, self._new_order()))
        self.cache = PrefixCache(self.layout, tiers, self._new_order)
        self._block_bytes = block_bytes
        units_per_job = self._units_per_job(config.blocks_per_job(block_bytes))
        self._moves = Moves(observer)
        self._pins = Pins(self.cache)
        self.jobs = JobBook(self.cache, self._moves, units_per_job)
        self._keeping = Keeping(self.cache, self._moves, config.max_pinned_share)
        yield_pin = self._keeping.yield_one
        self.admission = Admission(self.cache, self._pins, self._moves, self._others_hold_room, yield_pin)
        self._loads = Loads(self.cache, self._pins, self._moves, self.jobs, self.admission)
        self._forks = Forks(self.cache, self._pins, self.admission, self._moves)
        policy = store_policy_of(config.store_policy).for_ledger(self.layout, num_device_blocks - 1)
        stores = Stores(self.cache, self.jobs, self._moves)
        frontier = Frontier(self.cache, self.jobs, stores, policy.num_frontier_blocks)
        self._commits = Commits(
            self.cache, self._pins, stores, self.admission, self._loads, policy, frontier, self._keeping
        )
        self._preemptions = Preemptions(self.cache, self._pins, self._moves, self.jobs, stores, self.admission, policy)
        share = config.max_prefetch_share
        self._errands = Errands(self.cache, self._pins, self._moves, self._loads, stores, self.admission, share)
        self._engine: EngineOwned | None = None
        self._conclude_loads = self._loads.conclude_all
        if isinstance(device, EngineTier) and clock is not None:
            if policy.num_frontier_blocks:
                raise ConfigError("store_policy", "must not be lazy: when an engine evicts what, only it knows")
            most = max(1, config.bytes_in_flight // block_bytes)
            offers = EngineOffers(self.cache, self.jobs, stores, self._moves, policy, device, most)
            arrivals = Arrivals(clock, config.pending_timeout_s)
            self._engine = EngineOwned(
                self.cache, self._pins, self._moves, self.jobs, offers, arrivals, self._keeping, num_device_blocks
            )
            self._conclude_loads = self._engine.conclude_all
        self._num_admitted = 0

    def __repr__(self) -> str:
        device, host = (f"{t.pool.num_free}/{t.pool.num_blocks}" for t in self.cache.tiers)
        return f"<Ledger device {device} free, host {host} free, {len(self.holdings)} requests>"

    # -- admission ------------------------------------------------------------------------------------------------

    def lookup(self, prefix: Prefix) -> PrefixMatch:
        """What is cached of `prefix`. Takes nothing, touches nothing."""
        unit = self.layout.unit_tokens
        limit = (check_prefix(prefix).num_tokens - 1) // unit
        sequence, index = TokenSequence(prefix, unit), self.cache.index
        if self._engine is not None:
            hit = find_hit_behind(index, sequence, self.layout, limit, 0)
        else:
            hit = find_hit(index, sequence, self.layout, limit)
        return PrefixMatch(hit.device_stop * unit, (hit.stop - hit.device_stop) * unit)

    def admit(
        self,
        prefix: Prefix,
        *,
        request_id: str | None = None,
        max_hit_tokens: int | None = None,
        hit_alignment: int = 1,
        reads_cache: bool = True,
        store: StoreScope | str = StoreScope.ALL,
        max_store_tokens: int | None = None,
        num_device_tokens: int = 0,
        wake: Callable[[], object] = nobody,
    ) -> Holding:
        """Match `prefix` and pin what is cached of it, in one step. All limits are in tokens.

        With `reads_cache=False` it uses no hit. `store` and `max_store_tokens` narrow what of it may be stored: all,
        its prompt or nothing, and how many of its first tokens.
        At least one token is always left to compute: a prompt that is cached to its last block hits one block less.

        With `engine_blocks`, `num_device_tokens` says how many leading tokens the engine has on its device: the host is
        asked for what lies behind. The answer may be `PENDING`: see `match_again`.
        """
        unit = self.layout.unit_tokens
        if reads_cache is not True:
            check_bool("reads_cache", reads_cache)
        num_tokens = check_prefix(prefix).num_tokens
        limit = num_tokens // unit if reads_cache else 0
        if max_hit_tokens is not None:
            limit = min(limit, check_int("max_hit_tokens", max_hit_tokens, 0) // unit)
        alignment = math.lcm(unit, check_int("hit_alignment", hit_alignment, 1)) // unit
        may_store = store_limit(prefix, unit, store, max_store_tokens)
        if self._engine is not None or type(num_device_tokens) is not int or num_device_tokens:
            self._check_device_tokens(num_device_tokens, num_tokens)
        check_callable("wake", wake)
        name = self._checked_name(request_id)
        holding = Holding(
            name, TokenSequence(prefix, unit), self.cache.epoch, self._num_admitted, limit, alignment,
            store_limit=may_store, ledger=self,
        )  # fmt: skip
        self._enter(holding)
        self._commits.admitted(holding)
        if self._engine is not None:
            self._engine.match(holding, num_device_tokens, wake)
            return holding
        self._pins.pin(holding)
        self._moves.request(holding, _S.MATCHED)
        self._moves.request(holding, _S.PINNED)
        return holding

    def _check_device_tokens(self, num_device_tokens: int, num_tokens: int) -> None:
        check_int("num_device_tokens", num_device_tokens, 0, max(0, num_tokens - 1))
        if num_device_tokens and self._engine is None:
            raise InvalidArgument("num_device_tokens", "is for `engine_blocks`: this ledger has device blocks itself")

    def match_again(
        self, holding: Holding, *, num_device_tokens: int, wake: Callable[[], object] = nobody
    ) -> PrefixMatch:
        """With `engine_blocks`: ask again, before the load. With the same `num_device_tokens` the pins stay, with
        others they move.

        `PENDING`: another request's load is bringing the next block into blocks of the engine's. It holds no pins.
        `wake` is called when that request has offered or is over; after `pending_timeout_s` the answer is another one.
        """
        engine = self._engine_of(holding, "match_again")
        require(holding, "match_again", _S.MATCHED, _S.PINNED)
        self._check_device_tokens(num_device_tokens, holding.sequence.num_tokens)
        check_callable("wake", wake)
        engine.match(holding, num_device_tokens, wake)
        return holding.match

    def _checked_name(self, request_id: str | None) -> str:
        if request_id is None:
            return self._unused_name(self._num_admitted)
        name = check_text("request_id", request_id)
        if name in self.holdings:
            raise DuplicateRequest("request_id", f"a live request is called {name!r}")
        return name

    def _enter(self, holding: Holding) -> None:
        self._num_admitted += 1
        self.holdings[holding.request_id] = holding

    def _unused_name(self, ticket: int) -> str:
        """A name for a request without one, whatever callers call theirs."""
        name = f"request-{ticket}"
        while name in self.holdings:
            name += "'"
        return name

    def allocate_nowait(self, holding: Holding, num_tokens: int | None = None) -> None:
        """Room for `num_tokens` (the prompt's, if None), all or nothing; `OutOfBlocks` changes nothing."""
        self.admission.allocate_nowait(self._on_own_device(holding, "allocate"), num_tokens)

    def queue_allocation(
        self, holding: Holding, num_tokens: int | None = None, wake: Callable[[], object] = nobody
    ) -> Waiter:
        """Join the line for room; `wake` is called once the waiter is over. Then `accept` or `withdraw` it.

        Whoever is woken may call the ledger, which is whole by then, but must not raise."""
        check_callable("wake", wake)
        waiter = self.admission.queue_allocation(self._on_own_device(holding, "allocate"), num_tokens, wake)
        self.admission.serve_line()
        return waiter

    def extend_nowait(self, holding: Holding, num_tokens: int) -> Extension:
        """Room for `num_tokens` in all; `OutOfBlocks` changes nothing."""
        return self.admission.extend_nowait(self._on_own_device(holding, "extend"), num_tokens)

    def queue_extension(self, holding: Holding, num_tokens: int, wake: Callable[[], object] = nobody) -> Waiter:
        """Join the line for more room, before everybody who has none yet."""
        check_callable("wake", wake)
        waiter = self.admission.queue_extension(self._on_own_device(holding, "extend"), num_tokens, wake)
        self.admission.serve_line()
        return waiter

    def accept(self, waiter: Waiter) -> Extension:
        """Take what `waiter` was granted, or raise what it failed with."""
        self._own(check_type("waiter", waiter, Waiter).holding)
        return self.admission.accept(waiter)

    def withdraw(self, waiter: Waiter) -> None:
        """Stop waiting: an unused grant goes back, and whoever waits behind gets its chance."""
        self._own(check_type("waiter", waiter, Waiter).holding)
        self.admission.withdraw(waiter)
        self.admission.serve_line()

    # -- forks ----------------------------------------------------------------------------------------------------

    def num_shared_tokens(self, holding: Holding) -> int:
        """The tokens whose blocks a fork of `holding` would share with it; from there on it needs blocks."""
        require(self._on_own_device(holding, "fork"), "fork", _S.RUNNING)
        return self._forks.shared_stop(holding) * self.layout.unit_tokens

    def fork(
        self,
        holding: Holding,
        request_id: str | None = None,
        *,
        num_tokens: int = 0,
    ) -> Fork:
        """Another request with the tokens that `holding` has so far, RUNNING at once: full blocks are shared, what is
        not full is the engine's to copy. It has room for `num_tokens`, or for what is known if that is more.
        `OutOfBlocks` changes nothing.
        """
        shared = self.num_shared_tokens(holding) // self.layout.unit_tokens
        self._forks.check(holding)
        name, wanted = self._checked_name(request_id), check_int("num_tokens", num_tokens, 0)
        num_units = self._forks.num_units(holding, wanted)
        unborn = self._forks.twin(holding, name, self._num_admitted)
        blocks = self._forks.take(holding, shared, num_units)
        self._enter(unborn)
        return self._forks.share(holding, unborn, shared, num_units, blocks)

    # -- loading --------------------------------------------------------------------------------------------------

    def plan_load(
        self,
        holding: Holding,
        max_tokens: int | None = None,
        wake: Callable[[], object] = nobody,
        *,
        max_job_bytes: int | None = None,
        into: Sequence[Sequence[int]] | None = None,
    ) -> tuple[TransferPlan, ...]:
        """Start bringing the host hit onto the device; the plans that have to be launched for it.

        RUNNING afterwards: nothing has to be waited for. LOADING: `wake` is called when the load is over, or, REQUEUED,
        when room was granted after it had to let go of everything (`holding.waiter`: accept it and plan again).
        `max_job_bytes` replaces that of the configuration: an overlapped load is split into as few jobs as possible.

        With `engine_blocks`, `into` are the request's block tables from the first token on, one for each group, at
        least up to the end of the hit: the copies go into exactly these blocks. Nothing else in them is touched.
        """
        check_callable("wake", wake)
        units_per_job: Sequence[int] = ()
        if max_job_bytes is not None:
            units_per_job = self._units_per_job(check_int("max_job_bytes", max_job_bytes, 1) // self._block_bytes)
        if self._engine is not None:
            jobs = self._engine.plan_load(self._own(holding), into, max_tokens, wake, units_per_job)
            return tuple([job.plan for job in jobs])
        if into is not None:
            raise InvalidArgument("into", "is for `engine_blocks`: this ledger has device blocks itself")
        plans = self._loads.plan(self._own(holding), max_tokens, wake, units_per_job)
        self.admission.serve_line()
        return plans

    def _units_per_job(self, num_blocks: int) -> Sequence[int]:
        return [max(1, num_blocks // max(1, band.width)) for band in self.layout.bands]

    def abandon_load(self, holding: Holding) -> None:
        """Stop waiting for a load: what has landed counts, the rest is computed. Launched copies go on."""
        require(self._on_own_device(holding, "abandon_load"), "abandon_load", *_LOADING)
        if holding.load is not None:
            self._settled(self._loads.abandon(holding), also=holding)

    # -- jobs -----------------------------------------------------------------------------------------------------

    def launch(self, job_id: int) -> bool:
        """Whether the job is still wanted. From here on it cannot be recalled."""
        job = self.jobs.unsettled.get(check_int("job_id", job_id, 0))
        return job is not None and self.jobs.launch(job)

    def settle(self, completion: Completion) -> None:
        """Take in what became of a launched job: publish, drop its leases, serve the line, wake. In this order."""
        check_completion(completion)
        self._settled(self.jobs.settle(completion))

    def discard(self, job_id: int) -> None:
        """Give up a job that was never launched; who waits for it computes instead."""
        job = self.jobs.unsettled.get(check_int("job_id", job_id, 0))
        if job is not None:
            self._settled(self.jobs.discard(job))

    def _settled(self, jobs: list[Job], also: Holding | None = None) -> None:
        over = self._loads.settled(jobs)
        if also is not None and also.load is not None and also not in over:
            over.append(also)
        for job in jobs:
            if job.completion is not None and job.completion.outcome is Outcome.CORRUPT:
                self._keeping.renew()
                break
        wakes: list[Callable[[], object]] = []
        requests = over
        if self._errands.under_way:
            requests = [holding for holding in over if holding not in self._errands.under_way]
            wakes = self._errands.conclude(over)
        wakes += self._conclude_loads(requests)
        self.admission.serve_line(wakes)

    # -- computing ------------------------------------------------------------------------------------------------

    def commit(
        self, holding: Holding, num_computed_tokens: int, new_token_ids: TokenIds = ()
    ) -> tuple[TransferPlan, ...]:
        """Append `new_token_ids`, then publish up to `num_computed_tokens` (absolute); returns the stores to launch."""
        plans = self._commits.commit(self._on_own_device(holding, "commit"), num_computed_tokens, new_token_ids)
        self.admission.serve_line()
        return plans

    def check_commit(self, holding: Holding, num_computed_tokens: int, new_token_ids: TokenIds = ()) -> None:
        """Raise what `commit` would, and change nothing."""
        self._commits.check(self._on_own_device(holding, "commit"), num_computed_tokens, new_token_ids)

    def offer(
        self,
        holding: Holding,
        num_computed_tokens: int,
        block_ids: Sequence[Sequence[int]],
        new_token_ids: TokenIds = (),
        *,
        is_last: bool = False,
    ) -> tuple[TransferPlan, ...]:
        """With `engine_blocks`, in place of `commit`: append `new_token_ids`, and store what the host lacks of the
        first `num_computed_tokens` (absolute) as far as the policy wants it; returns the stores to launch.

        `block_ids` are the request's block tables from the first token on, one for each group: lists, ranges or arrays,
        read only where something is stored. The null block is skipped. Copies read these blocks until they are over:
        they are held until then, whatever becomes of the request. What is refused (no room, too much in flight) is told
        to the observer, and made good by the next offer. `is_last`: nothing comes after it, so what a later prompt
        needs of windows is stored as well.
        """
        engine = self._engine_of(holding, "offer")
        check_bool("is_last", is_last)
        jobs = engine.offer(holding, num_computed_tokens, block_ids, new_token_ids, is_last=is_last)
        return tuple([job.plan for job in jobs])

    def plan_frontier(self) -> tuple[TransferPlan, ...]:
        """Stores of what the next allocations would evict, for a policy that waits for that (`LazyStore`), else none.

        Call it after `commit` and `release`: where nothing has changed it costs nothing. What it stores was computed
        at any time: the copies have to wait for all compute given to the device so far.
        """
        return self._commits.plan_frontier()

    def invalidate(self, holding: Holding, from_token: int) -> tuple[Holding, ...]:
        """Take back what a failed forward committed: nothing from `from_token` on was ever right.

        Generated tokens behind `from_token` are forgotten: that forward, or one after it, has sampled them.
        Returns the other holdings that may have read it; they have to be aborted. So has `holding` itself where it
        comes first: it would have to go back behind its window, or others still read blocks that it would compute into
        and there is no room for others.

        With `engine_blocks`: what was offered from `from_token` on, and what hangs on it, cannot be found any more, and
        who may have read it, in the engine's own cache or from the host, is returned. What its cache holds is the
        engine's to forget.
        """
        self._own(holding)
        if self._engine is not None:
            told, settled = self._engine.invalidate(holding, from_token, tuple(self.holdings.values()))
            self._settled(settled)
            return tuple(told)
        # Who is over but still computes in a step has read them, too; it is only no longer there to be aborted.
        readers = dict.fromkeys((*self.holdings.values(), *self._closing, *self._forks.over))
        tainted = self._commits.invalidate(holding, from_token, readers)
        self.admission.serve_line()
        return tuple(reader for reader in tainted if not reader.is_over)

    @contextmanager
    def step(self, holdings: Iterable[Holding], arriving: Iterable[Holding] = ()) -> Iterator[None]:
        """Hold the blocks of `holdings` while a forward touches them, whatever becomes of their requests.

        Of `arriving`, the forward starts on what a load still brings: see `expected_block_ids`. Should the load end
        otherwise, what it has computed cannot be committed. Whose load is over by now is held like the others.
        """
        self._require_own_device("step")
        held, early = as_tuple("holdings", holdings, "Holding"), as_tuple("arriving", arriving, "Holding")
        self._check_step(held, early)
        held += early
        for holding in held:
            begin_step(self.cache, self._moves, holding)
            holding.began_step()
        try:
            yield
        finally:
            wakes: list[Callable[[], object]] = []
            for holding in held:
                if holding.ended_step():
                    wakes += self._end_steps(holding)
            self.admission.serve_line(wakes)

    def _check_step(self, holdings: Iterable[Holding], arriving: Iterable[Holding]) -> None:
        for holding in holdings:
            require(self._own(holding), "step", _S.ALLOCATED, _S.RUNNING)
            require_no_holes(holding, "step")
        for holding in arriving:
            require(self._own(holding), "step", _S.LOADING, _S.DRAINING, _S.RUNNING)
            if holding.state is not _S.RUNNING and not can_start(self.cache, holding):
                raise WrongState(f"step: the load of {holding} is not under way: wait until it is over")

    def _end_steps(self, holding: Holding) -> list[Callable[[], object]]:
        """The last forward that touched its blocks is over. Whom to wake once the line was served."""
        holding.when_idle()
        if holding in self._closing:
            self._closing.discard(holding)
            self._pins.let_go(holding)
        elif holding.state is _S.DRAINING:
            return self._loads.conclude_all([holding])
        else:
            slide(self.cache, holding)
        return []

    def can_start_early(self, holding: Holding) -> bool:
        """Whether `step` takes it as `arriving` while it is LOADING."""
        return can_start(self.cache, self._on_own_device(holding, "can_start_early"))

    def num_expected_tokens(self, holding: Holding) -> int:
        """Tokens whose KV is on the device when its load has landed: where an early step starts to compute."""
        load = self._on_own_device(holding, "num_expected_tokens").load
        return holding.num_computed_tokens if load is None else load.stop * self.layout.unit_tokens

    def expected_block_ids(self, holding: Holding) -> list[list[int]]:
        """Its block table when its load has landed, one list per group, for a step that has it as `arriving`. Until
        then nothing is there but what the jobs' own fences have passed for. `WrongState` where no step holds them."""
        ids = expected_ids(self._on_own_device(holding, "expected_block_ids"))
        return self.layout.by_group(ids) if ids else self._no_tables()

    def begin_again(self, holding: Holding) -> int | None:
        """From which token on an early step's work has to be done again, in a new step, since the load fell short of
        what it took for loaded. None: nothing that was computed is in doubt. Only who has asked may commit again."""
        require(self._on_own_device(holding, "begin_again"), "begin_again", _S.RUNNING)
        tell(self._moves, holding)
        return first_invalid_token(holding)

    def first_invalid_token(self, holding: Holding) -> int | None:
        """The same for who only looks: nothing can be committed for that."""
        return first_invalid_token(self._on_own_device(holding, "first_invalid_token"))

    def release(self, holding: Holding, reason: str = "closed_early") -> tuple[TransferPlan, ...]:
        """End the request: DONE if it has committed and no other `reason` is given, else ABORTED. Every pin goes.

        Synchronous and complete. Only blocks that a step or a job still touches stay theirs. Returns stores to launch.
        """
        reason = check_text("reason", reason)
        if self._own(holding).is_over:
            raise WrongState(f"release: {holding} is {holding.state.name} already")
        plans: tuple[TransferPlan, ...] = ()
        done = holding.state is _S.RUNNING and holding.has_committed and reason == "closed_early"
        if done and holding.epoch == self.cache.epoch:
            plans = self._commits.offer_stores(holding, holding.published, is_last=True)
        if holding.waiter is not None:
            self.admission.leave(holding.waiter)
        settled = self._loads.abandon(holding) if holding.load is not None else []
        if holding.origins:
            self._forks.leaving(holding)
        if holding.num_steps:
            self._closing.add(holding)
        else:
            self._pins.let_go(holding)
        del self.holdings[holding.request_id]
        if not done:
            holding.aborted(reason)
        self._moves.request(holding, _S.DONE if done else _S.ABORTED)
        if self._forks.over:
            self._forks.left(holding)
        if self._engine is not None:
            self._engine.left(holding)
        if settled:
            self._settled(settled)
        else:
            self.admission.serve_line()
        return plans

    # -- preemption -----------------------------------------------------------------------------------------------

    def preempt_nowait(self, holding: Holding) -> Preemption:
        """Give up every device block of `holding`, and keep what it has computed in host memory as far as there is
        room: pinned until it is resumed or over. Not while a step touches its blocks, nor while it waits for room."""
        self._preemptions.check(self._on_own_device(holding, "preempt"))
        if holding.load is not None:
            self.abandon_load(holding)
        waiter = holding.waiter  # of a load that has lost its place: it ends here, too
        found = self._preemptions.preempt(holding)
        self.admission.serve_line([] if waiter is None else [waiter.wake])
        return found

    def resume(self, holding: Holding, num_tokens: int | None = None) -> None:
        """Match again what a preempted request had computed: PINNED afterwards, as after `admit`. What was lost in
        between is computed again, from the first token that a load does not bring back.

        `num_tokens`: how many it will ask room for; refused here, with nothing changed, if they can never fit.
        """
        self._preemptions.resume(self._on_own_device(holding, "resume"), num_tokens)
        self.admission.serve_line()

    # -- what no request asks for ---------------------------------------------------------------------------------

    def pin(self, prefix: Prefix, *, expires_at: float = math.inf) -> Pin:
        """Keep what is cached of `prefix` where it is, until `unpin`, or until `lapse` is told of a time from
        `expires_at` on. `OutOfBlocks` if all pins together would keep more than `max_pinned_share` of a tier."""
        return self._keeping.pin(TokenSequence(check_prefix(prefix), self.layout.unit_tokens), expires_at, self)

    def unpin(self, pin: Pin) -> None:
        """End a pin. One that has ended by itself is left as it is; ending it twice raises."""
        if not isinstance(pin, Pin) or pin.ledger is not self:
            raise InvalidArgument("pin", f"was not made by this ledger: {shown(pin)}")
        if pin.state in (PinState.HELD, PinState.RELEASED):
            self._keeping.end(pin, PinState.RELEASED)
            self.admission.serve_line()

    @property
    def next_lapse(self) -> float:
        """When the first pin lapses; infinity without one."""
        return self._keeping.next_lapse

    def lapse(self, now: float) -> None:
        """End the pins that expire at `now` or before."""
        if self._keeping.lapse(now):
            self.admission.serve_line()

    def drop_pins(self) -> None:
        """End every pin, whoever holds it."""
        self._keeping.end_all(PinState.DROPPED)
        self.admission.serve_line()

    def prefetch(self, prefix: Prefix, wake: Callable[[], object] = nobody) -> Prefetch:
        """Start bringing onto the device what a request for `prefix` would load: its `plans` have to be launched."""
        self._require_own_device("prefetch")
        check_callable("wake", wake)
        return self._errands.prefetch(TokenSequence(check_prefix(prefix), self.layout.unit_tokens), wake, self)

    def demote(self, prefix: Prefix, wake: Callable[[], object] = nobody) -> Demotion:
        """Start sending `prefix` from the device to the host: its `plans` have to be launched."""
        self._require_own_device("demote")
        check_callable("wake", wake)
        return self._errands.demote(TokenSequence(check_prefix(prefix), self.layout.unit_tokens), wake, self)

    def cancel(self, errand: Errand) -> None:
        """Wait for a prefetch or a demotion no more. One that is over is left as it is."""
        if not isinstance(errand, Errand) or errand.holding.ledger is not self:
            raise InvalidArgument("errand", f"was not begun by this ledger: {shown(errand)}")
        if not errand.is_over:
            self._settled(self._errands.cancel(errand))
            errand.wake()

    def cancel_errands(self) -> None:
        for errand in tuple(self._errands.under_way.values()):
            self.cancel(errand)

    # -- the whole ------------------------------------------------------------------------------------------------

    def reset(self, tier: Tier | None = None) -> None:
        """Forget everything cached, or what one tier holds. Live requests keep their blocks; unless it was a lower tier
        alone, they publish and store nothing any more. Every pin ends."""
        if tier is not None and check_tier("tier", tier) is Tier.DEVICE:
            self._require_own_device("reset of this tier")
        self._keeping.end_all(PinState.DROPPED)
        if tier is None:
            self.cache.reset()
        else:
            self._reset_tier(tier)
        self.admission.serve_line()

    def _reset_tier(self, tier: Tier) -> None:
        self.cache.reset_tier(tier)
        match_again = self.admission.match_again if self._engine is None else self._engine.forget_matches
        match_again(self.holdings.values())
        for holding in (*self.holdings.values(), *self._closing):
            if tier is Tier.DEVICE and holding.num_units and holding.epoch == self.cache.epoch:
                holding.orphan()

    def statistics(self) -> LedgerStatistics:
        device, host = (tier.statistics() for tier in self.cache.tiers)
        line = self.admission.line
        waiting = len(line.extending) + len(line.allocating)
        num_jobs, num_pins = len(self.jobs.unsettled), len(self._keeping.pins)
        return LedgerStatistics(device, host, len(self.holdings), waiting, num_jobs, self.jobs.num_late, num_pins)

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless every block is in exactly one hand and every reference is a lease's."""
        owners = (*self.holdings.values(), *self._closing, *self._errands.under_way)
        check_integrity(self.cache, self.jobs, self.admission.line, owners, self._keeping.pins)

    def watch(self, watcher: BlockWatcher | None) -> None:
        """Tell `watcher` (nobody, if None) of every block that is cached from now on, and of every one that is no
        more; of device blocks only where they are our own."""
        if watcher is not None:
            check_has("watcher", watcher, "BlockWatcher", "part_changed all_cleared")
        self.cache.watch(watcher)

    def block_ids(self, holding: Holding) -> list[list[int]]:
        """The block table, one list per group."""
        tables = self._on_own_device(holding, "block_ids").tables
        return self.layout.by_group([table.ids for table in tables]) if tables else self._no_tables()

    def _no_tables(self) -> list[list[int]]:
        return [[] for _ in self.layout.groups]

    def _own(self, holding: Holding) -> Holding:
        """Refuse what another ledger has handed out: its blocks are not ours."""
        if not isinstance(holding, Holding) or holding.ledger is not self:
            raise InvalidArgument("holding", f"was not admitted by this ledger: {shown(holding)}")
        return holding

    def _require_own_device(self, call: str) -> None:
        if self._engine is not None:
            raise WrongState(f"{call}: an engine has the device blocks of this ledger: see docs/engines.md")

    def _on_own_device(self, holding: Holding, call: str) -> Holding:
        """A request whose device blocks are ours."""
        if self._engine is None and isinstance(holding, Holding) and holding.ledger is self:
            return holding
        self._require_own_device(call)
        return self._own(holding)

    def _engine_of(self, holding: Holding, call: str) -> EngineOwned:
        """The engine whose blocks the request has."""
        self._own(holding)
        if self._engine is None:
            raise WrongState(f"{call}: this ledger has device blocks itself: it takes no others")
        return self._engine

    def _others_hold_room(self) -> bool:
        if self.jobs.unsettled or self._closing:
            return True
        return any(h.holds_room and (h.waiter is None or h.waiter.is_over) for h in self.holdings.values())


def _check_engine(device_pool: object, engine_blocks: object, clock: object) -> None:
    if engine_blocks is None:
        if clock is not None:
            raise InvalidArgument("clock", "is for `engine_blocks`: nothing else here measures time")
        return
    if device_pool is not None:
        raise ConfigError("device_pool", "must be None: the blocks are the engine's")
    if not callable(clock):
        raise InvalidArgument("clock", f"must be what the engine measures seconds by, got {shown(clock)}")


def _eviction_of(value: object) -> Callable[[], EvictionOrder]:
    if isinstance(value, str) and value == "lru":
        return LeastRecentlyUsed
    if not callable(value):
        raise ConfigError("eviction", f"must be 'lru' or a factory of eviction orders, got {shown(value)}")

    def make() -> EvictionOrder:
        try:
            order = value()
        except Exception as error:
            raise ConfigError("eviction", f"made no order: {type(error).__name__}: {error}") from error
        check_has("eviction", order, "factory of eviction orders", ORDERS, ConfigError)
        return order  # type: ignore[no-any-return]

    return make
