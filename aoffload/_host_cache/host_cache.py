"""`HostCache`: host memory and the tiers below it, for an engine that has its own device blocks and prefix cache.

The verbs of one request:

    admit(k)         matches and pins the host blocks after the k tokens in the engine's cache. PENDING: another request
                     is loading the next block, so call `match_again` later
    plan_load(into)  plans copies into the engine's blocks, which jobs hold
    offer(n, ids)    plans stores of the blocks of the first n tokens that the host lacks
    offer_deferred() plans stores of the blocks that offers have deferred. Call it at the beginning of a step
    invalidate(n)    withdraws the blocks offered from token n on, because their KV is wrong
    release()        ends the request

A `HostCache` has no index of the device: the engine passes the number of tokens in its own cache. A request has no
block table here, and the engine may free and reuse its blocks at any time, except blocks that a job holds.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Unpack

from .._common.arguments import check_bool, check_callable, check_int, check_text, check_type, shown
from .._common.prefix import TOKEN_BYTES, Prefix, TokenIds, encode_tokens
from .._common.tiers import BELOW, DEVICE
from .._config.config import OffloadConfig
from .._extensions.assembly import AnyLedger, LedgerStatistics, built_in
from .._extensions.load_choice import Loadable
from .._kernel.base import configured_groups
from .._kernel.events import Observer
from .._kernel.extension import LedgerExtension
from .._kernel.index import lower_path
from .._kernel.layout import Component, Layout
from .._kernel.moves import Moves
from .._kernel.plans import PrefixMatch, RequestOptions, TransferPlan
from .._kernel.pools import TierBlocks
from .._kernel.protocols import EvictionOrder
from .._kernel.records import Job, LedgerRequest, Load, Run, call_all, do_nothing
from .._kernel.states import (
    ABORTED,
    ALLOCATED,
    COMPUTES_NOTHING,
    DONE,
    JOB_QUEUED,
    LANDED,
    LOADING,
    MATCHED,
    PINNED,
    RUNNING,
    UNPROVEN,
    Direction,
    NoEpoch,
    require,
)
from ..errors import CommitError, ConfigError, InvalidArgument, WrongState
from .ids import EngineIds, checkpoint_ids, has_null, named_rows, without_null
from .matches import Arrival, Arrivals, EngineMatches, EngineTier
from .offers import MOST_OF_POOL, EngineOffers
from .protocols import EngineBlocks
from .requests import HostCacheRequest

_NEW = "new_token_ids"
_NOTHING: Mapping[int, range] = {}
NO_CHECKPOINTS: Mapping[int, Sequence[int]] = {}
_WITH_A_LOAD = (LOADING,)


class HostCache(AnyLedger):
    """Host memory for an engine that has its own block pool and prefix cache. docs/engines.md is the guide.

    `engine_blocks` is the engine's pool. The other arguments are those of `Ledger`.
    """

    live_requests: dict[str, HostCacheRequest]  # type: ignore[assignment]
    _request_class = HostCacheRequest

    def __init__(
        self,
        config: OffloadConfig,
        num_device_blocks: int,
        engine_blocks: EngineBlocks,
        *,
        clock: Callable[[], float],
        block_bytes: int = 1,
        observer: Observer | None = None,
        extensions: Iterable[LedgerExtension] = (),
    ) -> None:
        check_type("config", config, OffloadConfig)
        if not callable(clock):
            raise InvalidArgument("clock", f"must be a function that returns seconds, got {shown(clock)}")
        policy, found = built_in(config, Layout.of(configured_groups(config)), num_device_blocks)
        if policy.num_watermark_blocks:
            raise ConfigError("store_policy", "must not be lazy: only the engine knows what it evicts next")
        most_quarantined = int(config.max_quarantined_share * (num_device_blocks - 1))
        tiers: list[EngineTier] = []

        def make_device(order: EvictionOrder, moves: Moves) -> TierBlocks:
            tiers.append(EngineTier.of(engine_blocks, order, moves, most_quarantined))
            return tiers[0]

        super().__init__(
            config, num_device_blocks, make_device, num_tracked_blocks=0, block_bytes=block_bytes, clock=clock,
            observer=observer, built_in=found, extensions=extensions,
        )  # fmt: skip
        self._num_rows = num_device_blocks
        most = max(1, config.bytes_in_flight // block_bytes)
        most_of_step = num_device_blocks // MOST_OF_POOL if config.max_bytes_in_flight is None else 0
        self.end_call = self._end_call
        self._attach()
        self.offers = EngineOffers(
            self.cache, self.jobs, self.stores, self.moves, self.hooks, tiers[0], most, most_of_step, num_device_blocks,
        )  # fmt: skip
        self.arrivals = Arrivals(clock, config.pending_timeout_s)
        self.matches = EngineMatches(self.cache, self.request_leases, self.moves, self.arrivals, tiers[0])
        self._unwritten: dict[LedgerRequest, dict[int, range]] = {}
        """By component number: tokens that the request's load skipped, because they are before the window at the end of
        the load. The engine's blocks for these tokens were never written."""

    # -- the begin and end of a call ------------------------------------------------------------------------------

    def own(self, request: object) -> HostCacheRequest:
        """Return `request`, if it is one of this ledger. Refuses any other object, and a call from inside a hook."""
        if not isinstance(request, HostCacheRequest) or request.ledger is not self:
            raise self._foreign(request)
        if self.hooks.calling:
            self.hooks.refuse_verb()
        return request

    def _end_call(self, wakes: Iterable[Callable[[], object]] = ()) -> None:
        """No block is granted here, because the engine grants them."""
        self.moves.report()
        call_all(iter(wakes))
        if self.hooks.error is not None:
            self._fail()

    def rematch(self, request: LedgerRequest) -> None:
        """Match `request`, which is PINNED, again."""
        self.matches.match_again(self.own(request))

    def match_all_again(self) -> None:
        """Match again the live requests whose match has lost blocks."""
        self.matches.forget(tuple(self.live_requests.values()))

    def possible_publishers(self) -> Iterable[LedgerRequest]:
        """Includes requests that are over but still have deferred blocks, because the engine may find these blocks
        until they are stored."""
        return (*self.live_requests.values(), *[old.request for old in self.offers.deferred.values()])

    def has_begun(self, request: LedgerRequest) -> bool:
        """True for a PINNED request, because it may have computed: its next call may be its first offer. A MATCHED
        request has to match again first, with the tokens that the engine's cache has then."""
        return request.state is not MATCHED

    def pending_wakes(self) -> list[Callable[[], object]]:
        """The callbacks of requests whose last answer was `PENDING`."""
        return self.arrivals.pending_wakes()

    def waits_for(self, request: LedgerRequest) -> LedgerRequest | None:
        """The request whose load `request` waits for, because its answer is `PENDING`. None: it waits for none."""
        return self.arrivals.waits_for(request) if isinstance(request, HostCacheRequest) else None

    @property
    def loads_paused(self) -> bool:
        """Whether nothing is loaded, because too many blocks of the engine are in quarantine."""
        return not self.matches.device.may_load

    def _about(self, found: LedgerStatistics, live: str) -> str:
        # Only the engine knows its free and cached blocks, and the requests that wait for them.
        device = found.device
        held = f"{device.num_blocks:,} ({device.num_quarantined:,} quarantined)"
        return f"{self._num_rows - 1:,} device blocks, which the engine allocates: copies hold {held}; {live}"

    # -- matches --------------------------------------------------------------------------------------------------

    def lookup(self, prefix: Prefix) -> PrefixMatch:
        """The hit in host memory of a request for `prefix`. Changes nothing, not even the eviction order."""
        unit, sequence = self.layout.unit_tokens, self.sequence_of(prefix)
        limit = (sequence.num_tokens - 1) // unit
        hit = self.matches.hit_after(sequence, limit, 0)
        lower = 0
        if self.cache.has_lower_tiers:
            lower = max(0, lower_path(self.cache.index, sequence, self.layout, limit)[1] - hit.stop) * unit
        return PrefixMatch(hit.device_stop * unit, (hit.stop - hit.device_stop) * unit, num_lower_tokens=lower)

    def admit(
        self,
        prefix: Prefix,
        *,
        request_id: str | None = None,
        num_device_tokens: int = 0,
        wake: Callable[[], object] = do_nothing,
        **options: Unpack[RequestOptions],
    ) -> HostCacheRequest:
        """Match `prefix` in host memory and pin the hit, in one call. The hit begins after the first
        `num_device_tokens` tokens, which are in the engine's own cache. `RequestOptions` documents the options. The
        result, `request.match`, may be `PENDING`: see `match_again`."""
        if wake is not do_nothing:
            check_callable("wake", wake)
        request = self._checked(prefix, request_id, options)
        assert isinstance(request, HostCacheRequest)
        self._check_device_tokens(num_device_tokens, request.sequence.num_tokens)
        for ask in reversed(self.hooks.ask_admit):  # the program's own first, because a store policy counts these calls
            ask(request)
        self.enrol(request)
        self.offers.deferred.pop(request.request_id, None)  # left by an earlier request with this id
        self.matches.match(request, num_device_tokens, wake)
        self.moves.report()
        if self.hooks.error is not None:
            self.release(request, "error: ExtensionError")  # the caller does not get the request
        return request

    @staticmethod
    def _check_device_tokens(num_device_tokens: object, num_tokens: int) -> None:
        check_int("num_device_tokens", num_device_tokens, 0, max(0, num_tokens - 1))

    def match_again(
        self, request: HostCacheRequest, *, num_device_tokens: int, wake: Callable[[], object] = do_nothing
    ) -> PrefixMatch:
        """Match again, before the load. If `num_device_tokens` has changed, the pins move. The call also says that the
        request has computed nothing, so after a change of the weights' epoch the request belongs to the new epoch.

        `PENDING`: another request is loading the next block into the engine's blocks. Meanwhile this request has no
        pins. `wake` is called when that load falls short, or when the other request has offered or is over. After
        `pending_timeout_s` the answer is no longer `PENDING`.
        """
        require(self.own(request), "match_again", MATCHED, PINNED)
        self._check_device_tokens(num_device_tokens, request.sequence.num_tokens)
        if wake is not do_nothing:
            check_callable("wake", wake)
        if request.epoch is NoEpoch.ORPHANED:  # only a change of the weights' epoch orphans requests of a `HostCache`
            self.weights.begin_again(request)
        self.matches.match(request, num_device_tokens, wake)
        self.end_call()
        return request.match

    def pending_until(self, request: HostCacheRequest) -> float:
        """The time, by the clock, from which `match_again` no longer answers `PENDING`. Infinity if the last answer for
        the request was not `PENDING`."""
        return float(self.arrivals.pending_until(self.own(request)))

    def loadable(self, request: HostCacheRequest, max_tokens: int | None = None) -> Loadable | None:
        """A load of the whole hit. None if there is nothing to load, or if the load was planned before. `max_tokens`
        has to be None. To load less, call `decline`."""
        if max_tokens is not None:
            raise InvalidArgument("max_tokens", "must be None: call `decline` for tokens that must not be loaded")
        return self.matches.loadable(self.own(request))

    def decline(self, request: HostCacheRequest, from_token: int) -> PrefixMatch:
        """Match again, before the load, with a hit that ends no later than `from_token` (rounded down to a block). The
        engine computes the tokens after the hit, and no later match of this request includes them."""
        require(self.own(request), "decline", PINNED)
        request.hit_limit = check_int("from_token", from_token, 0) // self.layout.unit_tokens
        self.matches.match_again(request)
        self.end_call()
        return request.match

    # -- loads ----------------------------------------------------------------------------------------------------

    def plan_load(
        self,
        request: HostCacheRequest,
        max_tokens: int | None = None,
        wake: Callable[[], object] = do_nothing,
        *,
        max_job_bytes: int | None = None,
        into: Sequence[Sequence[int]] | None = None,
        into_checkpoint: Sequence[int] | None = None,
    ) -> tuple[TransferPlan, ...]:
        """Start loading the host hit into the blocks that `into` names; returns the plans to launch.

        `into` holds the request's block tables: one per group, from the first token at least to the end of the hit. The
        copies write only to the blocks named there for the units that are loaded. If the request is RUNNING afterwards,
        there is nothing to wait for. If it is LOADING, `wake` is called when the load is over. For a request that was
        RUNNING already, nothing is planned; if its load is lost to a reset (`lost_to_reset`), the call gives up the
        load. `max_job_bytes` replaces the configured limit.

        Full attention loads all units after the tokens of the engine's cache. A window loads only the units that are
        read at the end of the hit. All other entries of `into` may be the null block 0. If the window begins inside the
        first of its units, the blocks of this unit before the window may be missing, too. Blocks before a window are
        not loaded, so keep them out of the engine's prefix cache. If the engine's own hit ends inside a block, name a
        new block in its place, because the load brings this block as a whole.

        With a recurrent state, `into_checkpoint` holds the blocks for the checkpoint at the end of the hit, and the
        lists of its groups in `into` are ignored.
        """
        if wake is not do_nothing:
            check_callable("wake", wake)
        units_per_job: Sequence[int] = ()
        if max_job_bytes is not None:
            units_per_job = self._units_per_job(check_int("max_job_bytes", max_job_bytes, 1) // self.block_bytes)
        return self.plans_of(self._load(self.own(request), into, into_checkpoint, max_tokens, wake, units_per_job))

    def _load(
        self,
        request: HostCacheRequest,
        into: Sequence[Sequence[int]] | None,
        into_checkpoint: Sequence[int] | None,
        max_tokens: object,
        wake: Callable[[], object],
        units_per_job: Sequence[int],
    ) -> list[Job]:
        """Plan jobs that load the host hit into the blocks named by `into`. RUNNING afterwards: nothing to wait for."""
        require(request, "load", PINNED, LOADING, RUNNING)
        limit = request.hit_stop * self.cache.layout.unit_tokens
        if max_tokens is not None:
            limit = min(limit, check_int("max_tokens", max_tokens, 0))
        if request.state is not PINNED:
            if into is not None:
                raise WrongState(
                    f"load: an earlier call has named the blocks of {request}: call it again without `into`"
                )
            if request.load is not None:  # called again
                request.load.wake = wake
            elif self.lost_to_reset(request):
                call_all(iter(self._falls_short(request, self.arrivals.under_way[request].start)))
            return []
        start, wanted = (tokens // self.cache.layout.unit_tokens for tokens in (request.engine_tokens, limit))
        stop = self.matches.held_stop(request, start, wanted)
        try:
            ids = self._destinations(into, into_checkpoint, start, stop) if stop > start else []
        except InvalidArgument:
            # A corrupt block may have shortened the hit since the match. If `into` is right for the match, but has no
            # blocks for the windows at the earlier end, nothing is loaded.
            if stop == wanted:
                raise
            self._destinations(into, into_checkpoint, start, wanted)
            stop, ids = start, []
        self.moves.request(request, ALLOCATED)
        if self.cache.layout.windows:
            self._unwritten[request] = self._left_out(ids, start, stop)
        jobs: list[Job] = []
        for component, first, blocks in ids:
            run = request.leases[BELOW].run
            jobs += self.jobs.plan(request, BELOW, DEVICE, run, component, first, stop, blocks, units_per_job)
        if not jobs:  # no hit, or no component needs a block of it
            self._run(request, stop)
            return []
        request.load = Load(stop, wake, partial(self._conclude, request), request.ticket, jobs)
        self.arrivals.under_way[request] = Arrival(start, stop, tuple(jobs))
        self.moves.request(request, LOADING)
        return jobs

    def lost_to_reset(self, request: HostCacheRequest) -> bool:
        """Whether a reset came after the load was over and before the first offer of the request.
        `Ledger.lost_to_reset` says what to do."""
        is_running = self.own(request).state is RUNNING and request in self.arrivals.under_way
        return is_running and request.epoch != self.cache.epoch

    def abandon_load(self, request: HostCacheRequest) -> None:
        """Stop waiting for a load. The request uses the blocks that have landed, and computes the rest.

        Launched copies continue to write to the blocks that `into` named, and jobs hold these blocks until the copies
        are over. So compute the tokens after `request.num_computed_tokens` into other blocks.
        """
        require(self.own(request), "abandon_load", *_WITH_A_LOAD)
        load = request.load
        if load is not None:
            wakes = self.jobs.end_claims(self.jobs.abandon(load))
            self.end_call(wakes + load.conclude())

    def _falls_short(self, request: HostCacheRequest, ready: int) -> list[Callable[[], object]]:
        """End the load of `request`, of which only the units before `ready` count. Returns the callbacks to call."""
        unit, arrival = self.cache.layout.unit_tokens, self.arrivals.under_way[request]
        request.num_lost_tokens += (arrival.stop - ready) * unit
        request.retry_max_hit_tokens = ready * unit
        self._ready(request, ready)
        self._written_from(request, ready)
        return self.arrivals.fell_short(request, ready)

    def _left_out(self, ids: Sequence[tuple[Component, int, array[int]]], start: int, stop: int) -> dict[int, range]:
        """For each window, the tokens from unit `start` on that a load up to unit `stop` does not write."""
        layout = self.cache.layout
        firsts = [first * layout.unit_tokens for first in layout.starts(stop)]
        for component, _, blocks in ids:
            if has_null(blocks):
                firsts[component.number] = component.first_token(stop * layout.unit_tokens)
        begin = start * layout.unit_tokens
        return {
            number: range(begin, first) for number, first in enumerate(firsts[: len(layout.paged)]) if begin < first
        }

    def _written_from(self, request: HostCacheRequest, start: int) -> None:
        """The request computes all units from `start` on, so none of them is without its bytes."""
        first = start * self.cache.layout.unit_tokens
        for number, tokens in self._unwritten.get(request, {}).items():
            self._unwritten[request][number] = range(tokens.start, min(tokens.stop, first))

    def _destinations(
        self,
        into: Sequence[Sequence[int]] | None,
        into_checkpoint: Sequence[int] | None,
        start: int,
        stop: int,
    ) -> list[tuple[Component, int, array[int]]]:
        """For each component that a load up to `stop` writes to: its first unit there, and the destination blocks."""
        layout = self.cache.layout
        found: list[tuple[Component, int, array[int]]] = []
        rows: list[array[int]] = []
        ids = EngineIds.of(layout, self._num_rows, "into", into, stop)
        for component in layout.paged:
            needed = component.first_unit(stop)
            first = max(start, needed)
            if not component.width or first >= stop:
                continue
            blocks = named = ids.of_component(component, first, stop)
            if has_null(blocks):
                # The engine may have no blocks before a window that begins inside its first unit.
                before = component.before_window(stop) if first == needed else []
                if not {at for at, block_id in enumerate(blocks) if not block_id}.issubset(before):
                    raise InvalidArgument("into", "names the null block at a position whose KV must be loaded")
                named = without_null(blocks)
            found.append((component, first, blocks))
            rows.append(named)
        if layout.recurrent is not None or into_checkpoint is not None:
            rows.append(checkpoint_ids(layout.recurrent, self._num_rows, "into_checkpoint", into_checkpoint))
            assert layout.recurrent is not None
            found.append((layout.recurrent, stop - 1, rows[-1]))
        named_all = named_rows(self._num_rows, rows)
        if not named_all.are_distinct:
            raise InvalidArgument("into", "names a block twice")
        if wrong := named_all.shared_with(self.jobs.ids_being_written(DEVICE)):
            raise InvalidArgument("into", f"names block {wrong}, which another copy may still write to")
        if wrong := named_all.shared_with(self.jobs.ids_being_read(DEVICE)):
            raise InvalidArgument("into", f"names block {wrong}, which a store still reads")
        return found

    def _conclude(self, request: HostCacheRequest) -> list[Callable[[], object]]:
        """End the load of `request`, whose jobs are all settled or were given up; returns the callbacks to call."""
        arrival, load = self.arrivals.under_way[request], request.load
        assert load is not None
        wakes = [load.wake]
        # After a reset, the copies have brought KV from before the reset.
        ready = self._ready_stop(arrival) if request.epoch == self.cache.epoch else arrival.start
        request.load = None
        if ready < arrival.stop:
            wakes += self._falls_short(request, ready)
        self._run(request, ready)
        return wakes

    def _run(self, request: HostCacheRequest, ready: int) -> None:
        """Let `request` compute from unit `ready` on."""
        if (lease := request.leases.get(BELOW)) is not None:
            self.offers.reached(request, lease.run)
        self.request_leases.end_host_lease(request)
        self._ready(request, ready)
        self.moves.request(request, RUNNING)

    def _ready(self, request: HostCacheRequest, ready: int) -> None:
        request.hit_stop = request.published = request.ready_stop = ready
        request.num_computed_tokens = max(request.engine_tokens, ready * self.cache.layout.unit_tokens)

    def _ready_stop(self, arrival: Arrival) -> int:
        """The unit from which on the request can compute. The copies of all units before it that computing reads, in
        every group, are proven over."""
        layout, stop = self.cache.layout, arrival.stop
        for job in arrival.jobs:
            done = job.completion
            if done is None or done.outcome is not LANDED:
                num_proven = 0 if done is None or done.outcome is UNPROVEN else done.num_landed
                stop = min(stop, job.start + num_proven // layout.components[job.component].width)
        if stop == arrival.stop:
            return stop
        if layout.recurrent is not None:
            return arrival.start  # only the checkpoint at the planned end was loaded
        for component in layout.windows:
            # Only the window before the planned end was loaded; an earlier end may need units before that, or blocks
            # of its first unit that were left out.
            brought = min(
                [
                    job.start + (job.num_left_out(component.width) > 0)
                    for job in arrival.jobs
                    if job.component == component.number
                ],
                default=arrival.stop,
            )
            if max(arrival.start, component.first_unit(stop)) < min(brought, stop):
                return arrival.start
        return stop

    # -- offers ---------------------------------------------------------------------------------------------------

    def offer(
        self,
        request: HostCacheRequest,
        num_computed_tokens: int,
        block_ids: Sequence[Sequence[int]],
        new_token_ids: TokenIds = (),
        *,
        checkpoints: Mapping[int, Sequence[int]] = NO_CHECKPOINTS,
        is_last: bool = False,
    ) -> tuple[TransferPlan, ...]:
        """Append `new_token_ids`, then plan stores of the blocks of the first `num_computed_tokens` tokens (an absolute
        number) that the host lacks and the store policy wants. Returns the stores to launch.

        `block_ids` holds the request's block tables, one per group, from the first token on: lists, ranges or arrays.
        Only the ids of stored blocks are read; with `is_last`, all are checked. Null blocks are skipped. Jobs hold the
        blocks that they copy until the copies are over, even if the request ends meanwhile. If host memory has no free
        blocks, blocks are skipped, and the next offer tries them again. Blocks above the bound of stores in flight are
        deferred: call `offer_deferred` once per step. `is_last` marks the last offer of the request, which also stores
        the window blocks that a later prompt needs.

        With a recurrent state, `checkpoints` names the blocks that hold a checkpoint now, by the number of tokens
        before the checkpoint, which is a whole number of units. Only these checkpoints become findable. The lists of
        their groups in `block_ids` are ignored.
        """
        self.own(request)
        check_bool("is_last", is_last)
        try:
            jobs = self._offer(request, num_computed_tokens, block_ids, new_token_ids, checkpoints, is_last=is_last)
        finally:
            self.end_call()
        return tuple([job.plan for job in jobs])

    def _offer(
        self,
        request: HostCacheRequest,
        num_computed_tokens: object,
        block_ids: Sequence[Sequence[int]],
        new_token_ids: TokenIds,
        checkpoints: Mapping[int, Sequence[int]],
        *,
        is_last: bool,
    ) -> list[Job]:
        """Append `new_token_ids`, and plan stores of the blocks of the first `num_computed_tokens` that the policy
        wants."""
        given = _parsed(checkpoints, self.cache.layout.recurrent, self._num_rows)
        require(request, "offer", PINNED, RUNNING)
        added = b"" if type(new_token_ids) is list and not new_token_ids else encode_tokens(new_token_ids, _NEW)
        before = request.num_computed_tokens if request.state is RUNNING else request.engine_tokens
        num_tokens = request.checked_count(num_computed_tokens, before, len(added) // TOKEN_BYTES)
        num_units = num_tokens // self.cache.layout.unit_tokens
        ids = EngineIds.of(self.cache.layout, self._num_rows, "block_ids", block_ids, num_units)
        written = self._checkpoints(given, num_units) if given else {}
        known, computed, published = request.sequence.num_tokens, request.num_computed_tokens, request.published
        if added:
            request.sequence.append(added)
        request.num_computed_tokens, request.published = num_tokens, num_units
        try:
            wanted = self.offers.wanted(
                request, published, ids, self._unwritten.get(request, _NOTHING), written, is_last=is_last
            )
            self.offers.check_sources(wanted.offers)
        except BaseException:  # also of the policy or of `find`
            request.sequence.drop_after(known)
            request.num_computed_tokens, request.published = computed, published
            self.hooks.take_error()  # of a hook that was asked about this offer
            raise
        if request.state is PINNED:  # without a load
            self.request_leases.end_host_lease(request)
            request.hit_stop = 0
            request.num_computed_tokens = request.engine_tokens  # observers read the ready tokens from it
            self.moves.request(request, ALLOCATED)
            self.moves.request(request, RUNNING)
        request.num_computed_tokens = num_tokens
        request.has_committed, request.computing = True, COMPUTES_NOTHING
        self.offers.computed(num_units - before // self.cache.layout.unit_tokens)
        jobs = self.offers.store(request, wanted, self._unwritten.get(request, _NOTHING))
        if self.arrivals.under_way:
            call_all(iter(self.arrivals.over(request)))
        return jobs

    def _checkpoints(self, given: Mapping[Any, array[int]], num_units: int) -> dict[int, array[int]]:
        """The checkpoints of an offer of `num_units` units, by unit in prefix order."""
        unit, found = self.cache.layout.unit_tokens, dict[int, array]()  # type: ignore[type-arg]
        for at, ids in given.items():
            if type(at) is not int or at % unit or not 0 < at <= num_units * unit:
                known = f"a multiple of {unit} up to the {num_units * unit} tokens of whole blocks that are computed"
                raise InvalidArgument("checkpoints", f"names {shown(at)}, which is not {known}")
            found[at // unit] = ids
        if not named_rows(self._num_rows, [*found.values()]).are_distinct:
            raise InvalidArgument("checkpoints", "names a block twice")
        return dict(sorted(found.items()))

    def planned_checkpoints(self, request: HostCacheRequest) -> tuple[int, ...]:
        """The positions after the hit, in tokens, at which a checkpoint of the recurrent state serves later prompts:
        the end of the prompt, and the branch, where the cached KV goes further than the last checkpoint. The engine
        decides where it writes checkpoints, and passes those positions to `offer`."""
        if self.own(request).checkpoints is None:
            return ()
        start = max(request.hit_stop, request.engine_tokens // self.layout.unit_tokens)
        positions = self.request_leases.planned(request, start)
        return tuple([position * self.layout.unit_tokens for position in sorted(positions)])

    def offer_deferred(self) -> tuple[TransferPlan, ...]:
        """Call this at the beginning of each step. Plans stores of blocks that offers have deferred, up to the bound of
        stores in flight; the oldest request comes first. Requests that are over are included. The call is cheap if no
        blocks are deferred.

        `FindsBlocks.find` returns the engine's blocks that hold the KV now. If the engine no longer has a block, the
        ledger gives up that block and reports it to the observer (`store_skipped`, `in_flight`). Without `find`, no
        block is deferred: the next offer of the request tries the skipped blocks again. The copies have to wait for all
        compute submitted to the device so far.
        """
        self.hooks.refuse_verb()
        try:
            jobs = self.offers.offer_deferred()
        finally:
            self.end_call()
        return tuple([job.plan for job in jobs])

    @property
    def deferred_requests(self) -> tuple[str, ...]:
        """Ids of the requests with deferred blocks, the oldest first, also of requests that are over. Keep their
        tokens, because `find` is called for them. At most 128 requests have deferred blocks: for one more, the ledger
        gives up those of the oldest."""
        return tuple(self.offers.deferred)

    # -- the end --------------------------------------------------------------------------------------------------

    def release(self, request: LedgerRequest, reason: str = "closed_early") -> tuple[TransferPlan, ...]:
        """End the request: DONE if it has offered and no other `reason` is given, else ABORTED. Releases all its pins.
        The call plans no stores, because `offer` with `is_last` has planned them."""
        reason = check_text("reason", reason)
        self.own(request)
        if self.live_requests.get(request.request_id) is not request:
            raise WrongState(f"release: {request} is {request.state.name} already")
        done = request.state is RUNNING and request.has_committed and reason == "closed_early"
        settled = self.jobs.abandon(request.load) if request.load is not None else []
        for hook in self.hooks.on_leaving:
            hook(request, True)
        self.request_leases.release_all(request)
        del self.live_requests[request.request_id]
        if not done:
            request.reason = reason
        self.moves.request(request, DONE if done else ABORTED)
        self.arrivals.answered(request)
        self.offers.forget(request)
        self._unwritten.pop(request, None)
        wakes = self.arrivals.over(request)
        for released in self.hooks.on_released:
            released(request)
        self.end_call([*wakes, *self.jobs.end_claims(settled)])
        return ()

    # -- invalidation ---------------------------------------------------------------------------------------------

    def invalidate(self, request: HostCacheRequest, from_token: int) -> tuple[HostCacheRequest, ...]:
        """Invalidate the blocks that a failed forward has offered: all KV from `from_token` on is wrong.

        No later match finds the units that were offered from `from_token` on, or units that are cached after them.
        Drops the generated tokens after `from_token`. Abort the returned requests, because they may have read the wrong
        KV in the engine's cache or from the host. Invalidate the engine's own cache, too.
        """
        sequence, published = self.own(request).sequence, request.published
        if self.hooks.on_invalidated:
            sequence = sequence.copy()
        readers, settled = self._invalidate(request, from_token, tuple(self.live_requests.values()))
        wakes, start = self.jobs.end_claims(settled), from_token // self.layout.unit_tokens
        # An engine's blocks may be shorter than a unit. So if this request has only a part of a unit, other requests
        # may have offered the whole unit with its wrong blocks.
        if start < published or any(component.width > 1 for component in self.layout.components):
            wakes += self.invalidated(sequence, start, published)
        self.end_invalidation(found := tuple([reader for reader in readers if not reader.is_over]), wakes)
        return found

    def _invalidate(
        self, request: HostCacheRequest, first_wrong: object, others: Iterable[HostCacheRequest]
    ) -> tuple[list[HostCacheRequest], list[Job]]:
        """Withdraw the units that were offered from token `first_wrong` on, and all units cached after them. Returns
        those of `others` that may have read these units, in the engine's cache or from the host, and the jobs that were
        settled because queued stores were discarded."""
        require(request, "invalidate", RUNNING, instead="call `load` or `offer` first")
        from_token = check_int("from_token", first_wrong, 0, request.num_computed_tokens)
        for number, tokens in self._unwritten.get(request, {}).items():
            # If a window reads tokens that the load skipped, the request would have to compute these, too.
            first_read = self.cache.layout.components[number].first_token(from_token)
            if tokens.start < from_token and first_read < tokens.stop:
                problem = f"is {from_token}, where a window reads KV that was not loaded: go back to {tokens.start}"
                raise CommitError("from_token", problem)
        start = from_token // self.cache.layout.unit_tokens
        wrong = self._runs_from(request, from_token)
        others = [other for other in others if other is not request]
        tainted = [other for other in others if self._may_have_read(other, request, from_token)]
        queued = self._queued_after(wrong)
        self.cache.withdraw_all(wrong, self.jobs.unsettled.values())  # first: releasing leases may merge runs
        settled = [job for one in queued if not one.is_settled for job in self.jobs.discard(one)]
        for hook in self.hooks.on_withdrawn:
            hook()
        for other in tainted:
            other.epoch = NoEpoch.INVALIDATED
        self.matches.forget([other for other in others if other not in tainted])
        self.offers.invalidated(request.sequence, from_token + 1)
        request.sequence.drop_after(from_token + 1)
        self.offers.forget(request)
        request.published, request.ready_stop = min(request.published, start), min(request.ready_stop, start)
        request.num_computed_tokens = from_token
        self._written_from(request, start)
        call_all(iter(self.arrivals.invalidated(request, start)))
        return tainted, settled

    def _runs_from(self, request: HostCacheRequest, from_token: int) -> list[Run]:
        """The cached runs of the request's tokens from the unit of `from_token` on. Any request may have offered them,
        because several requests may have computed them with the same blocks. An engine's blocks may be shorter than a
        unit, and may ignore key spans. So every run with the same tokens up to `from_token` counts."""
        index, start = self.cache.index, from_token // self.cache.layout.unit_tokens
        runs = [run for run, agreed in index.walk(request.sequence, request.published) if agreed > start]
        others = (run for run in index.runs.values() if run not in runs)
        runs += [run for run in others if _is_alike(run, request, start, from_token)]
        for run in runs:
            if run.start < start:
                self.cache.split(run, start)
        return runs

    def _may_have_read(self, other: HostCacheRequest, request: HostCacheRequest, from_token: int) -> bool:
        loaded = 0 if other.state in (MATCHED, PINNED) else other.hit_stop * self.cache.layout.unit_tokens
        has_more = max(other.engine_tokens, loaded) > from_token
        return has_more and other.sequence.begins_alike(request.sequence, from_token + 1)

    def _queued_after(self, wrong: Iterable[Run]) -> list[Job]:
        """Queued stores of `wrong` runs and of runs after them, the last one first. Leaves out stores to a tier that
        the index does not know, because such a store may end before the first wrong unit. `RemoteStores.invalidate`
        finds these stores."""
        heads = set(wrong)
        queued = [job for job in self.jobs.unsettled.values() if job.state is JOB_QUEUED]
        stores = [job for job in reversed(queued) if job.plan.direction is Direction.STORE]
        known = [job for job in stores if job.destination_lease is not None]
        return [job for job in known if not heads.isdisjoint(job.run.path())]


def _is_alike(run: Run, request: HostCacheRequest, start: int, from_token: int) -> bool:
    """Whether `run` has unit `start`, and its tokens up to `from_token` are those of `request`."""
    sequence = request.sequence
    if not run.start <= start < run.stop or run.root != sequence.root:
        return False
    paths = ((current, sequence.first_bytes(current.start, from_token + 1)) for current in run.path())
    return all(current.tokens[: len(tokens)] == tokens[: len(current.tokens)] for current, tokens in paths)


def _parsed(
    checkpoints: Mapping[int, Sequence[int]], recurrent: Component | None, num_rows: int
) -> Mapping[Any, array[int]]:
    """`checkpoints` of an offer, read before anything else is checked: a foreign mapping may run code of its own."""
    if checkpoints is NO_CHECKPOINTS:
        return {}
    try:
        given: dict[Any, Any] = dict(checkpoints.items())
    except Exception:  # noqa: BLE001 - whatever a foreign mapping raises
        problem = f"must map numbers of tokens to block ids, got {shown(checkpoints)}"
        raise InvalidArgument("checkpoints", problem) from None
    return {at: checkpoint_ids(recurrent, num_rows, "checkpoints", ids) for at, ids in given.items()}
