"""Engine-owned device blocks: the engine keeps its blocks and its prefix cache, the ledger keeps host memory.

A request's way through it:

    match(k)         pins what the host holds behind the k tokens that the engine has; or PENDING: another request is
                     loading the next block, and the engine asks again
    plan_load(into)  copies into the engine's blocks, held by the jobs
    offer(n, ids)    stores of what the host lacks of the first n tokens, from the engine's blocks
    offer_deferred() at the beginning of a step: stores of the blocks that offers have deferred
    invalidate(n)    what was offered from token n on was wrong

The ledger has no index of the device: the engine says what it has there. A request has no block table here, and the
engine may free and reuse its blocks at any time, except those that a job holds.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from .._arguments import check_int
from .._extensions.pins import Pins
from .._kernel.cache import PrefixCache
from .._kernel.jobs import JobBook
from .._kernel.layout import Component
from .._kernel.leases import RequestLeases
from .._kernel.moves import Moves
from .._kernel.prefix import TOKEN_BYTES, TokenIds, encode_tokens
from .._kernel.records import Job, Load, Run
from .._kernel.requests import LedgerRequest, call_all
from .._kernel.states import BELOW, Computing, Direction, JobState, NoEpoch, Outcome, Tier, require
from .._kernel.states import RequestState as State
from ..errors import CommitError, InvalidArgument, WrongState
from .ids import EngineIds, has_null, named_rows
from .matches import Arrival, Arrivals, EngineMatches
from .offers import EngineOffers

_NEW = "new_token_ids"
_NOTHING: Mapping[int, range] = {}


@dataclass(slots=True, eq=False)
class EngineOwned:
    cache: PrefixCache
    request_leases: RequestLeases
    moves: Moves
    jobs: JobBook
    offers: EngineOffers
    matches: EngineMatches
    arrivals: Arrivals
    pins: Pins
    num_rows: int
    _unwritten: dict[LedgerRequest, dict[int, range]] = field(default_factory=dict)
    """Units that the request's load skipped, by component number: they lay before the window at the end of the load.
    Blocks that the engine names there were never written."""

    def left(self, request: LedgerRequest) -> None:
        """Forget `request`, which is over, and wake the requests that wait for its load."""
        self.arrivals.answered(request)
        self.offers.forget(request)
        self._unwritten.pop(request, None)
        call_all(iter(self.arrivals.over(request)))

    # -- loads ----------------------------------------------------------------------------------------------------

    def plan_load(
        self,
        request: LedgerRequest,
        into: Sequence[Sequence[int]] | None,
        max_tokens: object,
        wake: Callable[[], object],
        units_per_job: Sequence[int],
    ) -> list[Job]:
        """Plan jobs that load the host hit into the blocks named by `into`. RUNNING afterwards: nothing to wait for."""
        require(request, "load", State.PINNED, State.LOADING, State.RUNNING)
        limit = request.hit_stop * self.cache.layout.unit_tokens
        if max_tokens is not None:
            limit = min(limit, check_int("max_tokens", max_tokens, 0))
        if request.state is not State.PINNED:
            if into is not None:
                raise WrongState(f"load: the blocks of {request} were named before: call it again without `into`")
            if request.load is not None:  # called again
                request.load.wake = wake
            elif self.lost_to_reset(request):
                call_all(iter(self._falls_short(request, self.arrivals.under_way[request].start)))
            return []
        start = request.engine_tokens // self.cache.layout.unit_tokens
        stop = self.matches.held_stop(request, start, limit // self.cache.layout.unit_tokens)
        ids = self._destinations(into, start, stop) if stop > start else []
        self.moves.request(request, State.ALLOCATED)
        if self.cache.layout.windows:
            firsts = zip(self.cache.layout.windows, self.cache.layout.window_starts(stop), strict=True)
            self._unwritten[request] = {
                component.number: range(start, first) for component, first in firsts if start < first
            }
        jobs: list[Job] = []
        for component, first, blocks in ids:
            run = request.leases[BELOW].run
            jobs += self.jobs.plan(request, BELOW, Tier.DEVICE, run, component, first, stop, blocks, units_per_job)
        if not jobs:  # no hit, or one at whose end no window needs anything
            self._run(request, stop)
            return []
        request.load = Load(stop, wake, partial(self._conclude, request), request.ticket, jobs)
        self.arrivals.under_way[request] = Arrival(start, stop, tuple(jobs))
        self.moves.request(request, State.LOADING)
        return jobs

    def lost_to_reset(self, request: LedgerRequest) -> bool:
        """See `Ledger.lost_to_reset`."""
        is_running = request.state is State.RUNNING and request in self.arrivals.under_way
        return is_running and request.epoch != self.cache.epoch

    def _falls_short(self, request: LedgerRequest, ready: int) -> list[Callable[[], object]]:
        """The load of `request`, which is over, counts only up to unit `ready`. Returns the callbacks to call."""
        unit, arrival = self.cache.layout.unit_tokens, self.arrivals.under_way[request]
        request.num_lost_tokens += (arrival.stop - ready) * unit
        request.retry_max_hit_tokens = ready * unit
        self._ready(request, ready)
        return self.arrivals.fell_short(request, ready)

    def _destinations(
        self, into: Sequence[Sequence[int]] | None, start: int, stop: int
    ) -> list[tuple[Component, int, array[int]]]:
        """For each component that a load up to `stop` writes to: its first unit there, and the destination blocks."""
        layout = self.cache.layout
        found: list[tuple[Component, int, array[int]]] = []
        ids = EngineIds.of(layout, self.num_rows, "into", into, stop)
        for component in layout.components:
            first = max(start, component.first_unit(stop))
            if component.width and first < stop:
                found.append((component, first, ids.of_component(component, first, stop)))
        blocks = [blocks for _, _, blocks in found]
        if any(map(has_null, blocks)):
            raise InvalidArgument("into", "names the null block where something has to be loaded")
        named = named_rows(self.num_rows, blocks)
        if not named.are_distinct:
            raise InvalidArgument("into", "names a block twice")
        if wrong := named.shared_with(self.jobs.ids_being_written(Tier.DEVICE)):
            raise InvalidArgument("into", f"names block {wrong}, which another copy may still write to")
        if wrong := named.shared_with(self.jobs.ids_being_read(Tier.DEVICE)):
            raise InvalidArgument("into", f"names block {wrong}, which a store still reads")
        return found

    def _conclude(self, request: LedgerRequest) -> list[Callable[[], object]]:
        """End the load of `request`, whose jobs are all settled or were given up; returns the callbacks to call."""
        arrival, load = self.arrivals.under_way[request], request.load
        assert load is not None
        wakes = [load.wake]
        # After a reset, the KV that the copies have brought is from before the reset.
        ready = self._ready_stop(arrival) if request.epoch == self.cache.epoch else arrival.start
        request.load = None
        if ready < arrival.stop:
            wakes += self._falls_short(request, ready)
        self._run(request, ready)
        return wakes

    def _run(self, request: LedgerRequest, ready: int) -> None:
        """Let `request` compute on from unit `ready`."""
        if (lease := request.leases.get(BELOW)) is not None:
            self.offers.reached(request, lease.run)
        self.request_leases.end_host_lease(request)
        self._ready(request, ready)
        self.moves.request(request, State.RUNNING)

    def _ready(self, request: LedgerRequest, ready: int) -> None:
        request.hit_stop = request.published = request.ready_stop = ready
        request.num_computed_tokens = max(request.engine_tokens, ready * self.cache.layout.unit_tokens)

    def _ready_stop(self, arrival: Arrival) -> int:
        """The unit at which computing can go on: all that it needs before is proven to be there, in every group."""
        layout, stop = self.cache.layout, arrival.stop
        for job in arrival.jobs:
            done = job.completion
            if done is None or done.outcome is not Outcome.LANDED:
                num_proven = 0 if done is None or done.outcome is Outcome.UNPROVEN else done.num_landed
                stop = min(stop, job.start + num_proven // layout.components[job.component].width)
        for component in layout.windows:
            # Only the window before the planned end was loaded; an earlier end may need units before that.
            brought = min(
                (job.start for job in arrival.jobs if job.component == component.number), default=arrival.stop
            )
            if max(arrival.start, component.first_unit(stop)) < min(brought, stop):
                return arrival.start
        return stop

    # -- offers ---------------------------------------------------------------------------------------------------

    def offer(
        self,
        request: LedgerRequest,
        num_computed_tokens: object,
        block_ids: Sequence[Sequence[int]],
        new_token_ids: TokenIds,
        *,
        is_last: bool,
    ) -> list[Job]:
        """Append `new_token_ids`, and store what the policy wants of the first `num_computed_tokens`."""
        require(request, "offer", State.PINNED, State.RUNNING)
        added = b"" if type(new_token_ids) is list and not new_token_ids else encode_tokens(new_token_ids, _NEW)
        before = request.num_computed_tokens if request.state is State.RUNNING else request.engine_tokens
        num_tokens = request.checked_count(num_computed_tokens, before, len(added) // TOKEN_BYTES)
        num_units = num_tokens // self.cache.layout.unit_tokens
        ids = EngineIds.of(self.cache.layout, self.num_rows, "block_ids", block_ids, num_units)
        known, computed, published = request.sequence.num_tokens, request.num_computed_tokens, request.published
        if added:
            request.sequence.append(added)
        request.num_computed_tokens, request.published = num_tokens, num_units
        try:
            wanted = self.offers.wanted(request, ids, self._unwritten.get(request, _NOTHING), is_last=is_last)
            self.offers.check_sources(wanted.offers)
        except BaseException:  # also of the policy or of `find`
            request.sequence.drop_after(known)
            request.num_computed_tokens, request.published = computed, published
            raise
        if request.state is State.PINNED:  # without a load
            self.request_leases.end_host_lease(request)
            request.hit_stop = 0
            request.num_computed_tokens = request.engine_tokens  # observers find what was ready in it
            self.moves.request(request, State.ALLOCATED)
            self.moves.request(request, State.RUNNING)
        request.num_computed_tokens = num_tokens
        request.has_committed, request.computing = True, Computing.NOTHING
        self.offers.computed(num_units - before // self.cache.layout.unit_tokens)
        jobs = self.offers.store(request, wanted, self._unwritten.get(request, _NOTHING))
        if self.arrivals.under_way:
            call_all(iter(self.arrivals.over(request)))
        return jobs

    # -- taking back ----------------------------------------------------------------------------------------------

    def invalidate(
        self, request: LedgerRequest, first_wrong: object, others: Iterable[LedgerRequest]
    ) -> tuple[list[LedgerRequest], list[Job]]:
        """Take back what was offered from token `first_wrong` on, and all cached behind it. Returns those of `others`
        that may have read it, in the engine's cache or from the host, and the jobs settled by discarding queued
        stores."""
        require(request, "invalidate", State.RUNNING, instead="call `load` or `offer` first")
        from_token = check_int("from_token", first_wrong, 0, request.num_computed_tokens)
        for number, units in self._unwritten.get(request, {}).items():
            # Where a window reads units that the load skipped, they would have to be computed, too.
            component, first = self.cache.layout.components[number], units.start * self.cache.layout.unit_tokens
            if first < from_token and component.first_needed(from_token) < units.stop:
                problem = f"is {from_token}, where a window reads what the load has not brought: go back to {first}"
                raise CommitError("from_token", problem)
        start = from_token // self.cache.layout.unit_tokens
        wrong = self._runs_from(request, from_token)
        others = [other for other in others if other is not request]
        tainted = [other for other in others if self._may_have_read(other, request, from_token)]
        queued = self._queued_after(wrong)
        self.cache.withdraw_all(wrong)  # first: releasing leases may merge runs
        settled = [job for one in queued if not one.is_settled for job in self.jobs.discard(one)]
        self.pins.renew()
        for other in tainted:
            other.epoch = NoEpoch.INVALIDATED
        self.matches.forget([other for other in others if other not in tainted])
        self.offers.invalidated(request.sequence, from_token + 1)
        request.sequence.drop_after(from_token + 1)
        self.offers.forget(request)
        request.published, request.ready_stop = min(request.published, start), min(request.ready_stop, start)
        request.num_computed_tokens = from_token
        for number, units in self._unwritten.get(request, {}).items():
            self._unwritten[request][number] = range(units.start, min(units.stop, start))
        call_all(iter(self.arrivals.invalidated(request, start)))
        return tainted, settled

    def _runs_from(self, request: LedgerRequest, from_token: int) -> list[Run]:
        """The cached runs of its tokens from the unit of `from_token` on, whichever request has offered them: they may
        have been computed with the same blocks. An engine's blocks may be shorter than a unit, and ignore key spans:
        so every run with the same tokens up to `from_token` counts."""
        index, start = self.cache.index, from_token // self.cache.layout.unit_tokens
        runs = [run for run, agreed in index.walk(request.sequence, request.published) if agreed > start]
        others = (run for run in index.runs.values() if run not in runs)
        runs += [run for run in others if _is_alike(run, request, start, from_token)]
        for run in runs:
            if run.start < start:
                self.cache.split(run, start)
        return runs

    def _may_have_read(self, other: LedgerRequest, request: LedgerRequest, from_token: int) -> bool:
        loaded = 0 if other.state in (State.MATCHED, State.PINNED) else other.hit_stop * self.cache.layout.unit_tokens
        has_more = max(other.engine_tokens, loaded) > from_token
        return has_more and other.sequence.begins_alike(request.sequence, from_token + 1)

    def _queued_after(self, wrong: Iterable[Run]) -> list[Job]:
        """Queued stores of `wrong` runs and of runs after them, the last one first. Not stores to a tier that the index
        does not know, which has rules of its own (`RemoteStores.invalidate`): such a store may end before a wrong
        unit."""
        heads = set(wrong)
        queued = [job for job in self.jobs.unsettled.values() if job.state is JobState.QUEUED]
        stores = [job for job in reversed(queued) if job.plan.direction is Direction.STORE]
        known = [job for job in stores if job.destination_lease is not None]
        return [job for job in known if not heads.isdisjoint(job.run.path())]


def _is_alike(run: Run, request: LedgerRequest, start: int, from_token: int) -> bool:
    """Whether `run` has unit `start`, and its tokens up to `from_token` are those of `request`."""
    sequence = request.sequence
    if not run.start <= start < run.stop or run.root != sequence.root:
        return False
    paths = ((current, sequence.first_bytes(current.start, from_token + 1)) for current in run.path())
    return all(current.tokens[: len(tokens)] == tokens[: len(current.tokens)] for current, tokens in paths)
