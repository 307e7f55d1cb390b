"""Commits: publish what a forward has computed and offer it to the host; take it back if the forward has failed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .._arguments import check_int
from .._eviction.learned import Learning
from .._extensions.forks import taken_from
from .._extensions.lazy import EvictionWatermark
from .._extensions.overlap import check_valid
from .._extensions.pins import Pins
from .._extensions.store_policies import StorePolicy
from ..errors import CommitError
from .cache import PrefixCache
from .events import Moves
from .jobs import Stores
from .leases import (
    RequestLeases,
    first_published,
    publish,
    published_by,
    read_by,
    runs_from,
    slide,
    step_back,
    take_private,
)
from .loads import require_no_holes
from .plans import TransferPlan
from .prefix import TOKEN_BYTES, TokenIds, encode_tokens
from .records import Run
from .requests import LedgerRequest
from .states import Computing, NoEpoch, Tier, require
from .states import RequestState as State
from .waiting import Admission

__all__ = ["Commits"]


@dataclass(slots=True, eq=False)
class Commits:
    cache: PrefixCache
    request_leases: RequestLeases
    stores: Stores
    admission: Admission
    moves: Moves
    policy: StorePolicy
    watermark: EvictionWatermark
    pins: Pins
    learning: Learning | None = None

    def commit(
        self, request: LedgerRequest, num_computed_tokens: object, new_token_ids: TokenIds = ()
    ) -> tuple[TransferPlan, ...]:
        """Append `new_token_ids`, then publish the whole units of the first `num_computed_tokens` (a total, not an
        increment). Returns the stores to launch. If the policy raises, nothing has changed."""
        num_tokens, added = self.check(request, num_computed_tokens, new_token_ids)
        known, computed, first = request.sequence.num_tokens, request.num_computed_tokens, request.published
        num_units, is_current = num_tokens // self.cache.layout.unit_tokens, request.epoch == self.cache.epoch
        if added:
            request.sequence.append(added)
        wanted = 0
        if num_units and request.store_limit and is_current:
            # The policy may be the program's own and raise, so it is asked before anything is published. Then `added`
            # is dropped: a commit that is repeated would append it twice.
            request.num_computed_tokens, request.published = num_tokens, max(first, num_units)
            try:
                wanted = min(request.published, request.store_limit, self.policy.wanted_stop(request))
            except BaseException:
                request.sequence.drop_after(known)
                raise
            finally:
                request.num_computed_tokens, request.published = computed, first
        if request.state is State.ALLOCATED:
            self.request_leases.end_host_lease(request)
            self.moves.request(request, State.RUNNING)
        if num_tokens > computed and request.computing is Computing.NOTHING and not request.num_steps:
            self.cache.last_uses.are_covered = False  # no step covers this commit
        request.num_computed_tokens = num_tokens
        request.has_committed, request.computing = True, Computing.NOTHING
        plans: tuple[TransferPlan, ...] = ()
        if is_current:
            publish(self.request_leases, request, num_units)
            plans = self.offer_stores(request, first, wanted)
        if self.cache.layout.windows:
            slide(self.cache, request)
        return plans

    def check(self, request: LedgerRequest, num_computed_tokens: object, new_token_ids: TokenIds) -> tuple[int, bytes]:
        """Raise if the commit is invalid; returns `num_computed_tokens`, and the new tokens, encoded."""
        if request.computing is Computing.LOST_BLOCKS:
            problem = f"cannot count: {request} was preempted since its last step: compute again in a new step"
            raise CommitError("num_computed_tokens", problem)
        require(request, "commit", State.ALLOCATED, State.RUNNING)
        if request.state is State.ALLOCATED:
            require_no_holes(request, "commit")
        has_none = type(new_token_ids) is tuple and not new_token_ids  # as most commits of a prefill
        added = b"" if has_none else encode_tokens(new_token_ids, "new_token_ids")
        num_tokens = request.checked_count(num_computed_tokens, request.num_computed_tokens, len(added) // TOKEN_BYTES)
        if request.overlap is not None:
            check_valid(request, num_tokens)
        allocated = request.num_units * self.cache.layout.unit_tokens
        if num_tokens > allocated:
            problem = f"is {num_tokens}, beyond the {allocated} tokens that were allocated: `extend` takes more"
            raise CommitError("num_computed_tokens", problem)
        return num_tokens, added

    def offer_last(self, request: LedgerRequest) -> tuple[TransferPlan, ...]:
        """The request is done: tell the policy what was generated, and plan the stores that it wants now."""
        if Tier.DEVICE not in request.leases or not request.store_limit:
            return ()
        self.policy.seen(request, request.sequence.num_prompt_units, request.published)
        wanted = min(request.published, request.store_limit, self.policy.wanted_stop(request))
        return self.offer_stores(request, request.published, wanted, is_last=True)

    def offer_stores(
        self, request: LedgerRequest, first: int, stop: int, *, is_last: bool = False
    ) -> tuple[TransferPlan, ...]:
        """Plan the stores up to unit `stop`, as the policy wants: of the path of `request`, the units from `first` on,
        and those before it that the host lacks. With an eviction watermark, plan none, but mark the path to be stored
        later.

        Window bands are stored only where a later hit may end: at the end of the prompt, at the store limit of the
        request, and at the end of the request."""
        lease = request.leases.get(Tier.DEVICE)
        if lease is None or not request.store_limit:
            return ()
        if (
            self.learning is not None
            and not is_last
            and (first == request.ready_stop or first < request.sequence.num_prompt_units)
        ):
            self.learning.mark(self.cache, request, lease.run, 0 if first == request.ready_stop else first)
        if self.watermark.num_blocks:
            self.watermark.offer(lease.run, stop)
            return ()
        host = self.cache.tiers[self.stores.destination]
        if first and host.num_evicted != request.evictions_before and not is_last and self._lacks(lease.run, first):
            if first < stop:
                self.moves.told.store_skipped(request, (stop - first) * self.cache.layout.full.width, "evicted")
            return ()
        with_windows = False
        if self.cache.layout.windows:
            with_windows = is_last or request.is_at_end or first < stop == request.store_limit
        jobs = self.stores.offer(request, lease.run, first, stop, with_windows=with_windows)
        return tuple([job.plan for job in jobs]) if jobs else ()

    def _lacks(self, run: Run, stop: int) -> bool:
        """Whether the host lacks something of the path of `run` before unit `stop`. If it has evicted blocks since a
        request was admitted, only the last offer of that request stores it again: where the host cannot keep what live
        requests hold, each of them would evict all others at every commit."""
        return bool(self.cache.full.lacking(run, self.stores.source, self.stores.destination, stop, stop))

    def plan_write_back(self) -> tuple[TransferPlan, ...]:
        """Plan stores of what is about to be evicted; none unless the policy has a watermark."""
        return tuple([job.plan for job in self.watermark.plan()]) if self.watermark.num_blocks else ()

    def invalidate(
        self, request: LedgerRequest, first_wrong: object, readers: Iterable[LedgerRequest]
    ) -> dict[LedgerRequest, int]:
        """See `Ledger.invalidate`. Returns each request with its first wrong unit, also requests that are over.

        Requests that have matched the wrong KV but have no block tables yet are matched again. If such a request has a
        grant that was not accepted yet, the grant goes back and the request joins the line again.
        """
        require(request, "invalidate", State.RUNNING)
        ready = request.ready_stop * self.cache.layout.unit_tokens
        from_token = check_int("from_token", first_wrong, 0)
        if not ready <= from_token <= request.num_computed_tokens:
            raise CommitError("from_token", f"must lie in [{ready}, {request.num_computed_tokens}], got {from_token}")
        start = from_token // self.cache.layout.unit_tokens
        others = [other for other in readers if other is not request]
        # Also after a reset, when the index has none of these runs: other requests may still share the blocks.
        wrong = dict.fromkeys(runs_from(self.cache, request, first_published(self.cache, request, start), ()))
        tainted = self._taint(wrong, others, {request: from_token})
        self.cache.withdraw_all(wrong)
        self.pins.renew()
        self.admission.match_again([other for other in others if other in tainted or _leases_any(other, wrong)])
        goes_on = self._compute_again(request, from_token, tainted)
        request.sequence.drop_after(from_token + 1)
        request.num_computed_tokens = from_token
        if goes_on and self._reaches_back(request):
            return tainted
        request.epoch = NoEpoch.INVALIDATED
        return {request: start, **tainted}

    def _compute_again(self, request: LedgerRequest, from_token: int, readers: Iterable[LedgerRequest]) -> bool:
        """Let `request` compute again from `from_token` on, into private blocks. False: other requests still read some
        of the blocks, and `request` can get no others in their place. Either there is no room, or a step of `request`
        writes to them, or the first one begins with right KV, which a fresh block would lack."""
        start, excess = divmod(from_token, self.cache.layout.unit_tokens)
        published = published_by(self.cache, request, start)
        shared = read_by(readers, published)
        needed = sum((run.stop - run.start) * band.width for band, run in shared)
        is_half_right = excess and any(run.start == start for _, run in shared)  # in any band
        if shared and (request.num_steps or needed > self.admission.num_available or is_half_right):
            return False
        take_private(self.cache, request, published, shared)
        step_back(self.request_leases, request, start)
        return True

    def _reaches_back(self, request: LedgerRequest) -> bool:
        """Whether the window tables still reach back far enough to compute on from `num_computed_tokens`."""
        tables = zip(self.cache.layout.windows, request.tables[1:], strict=True)
        return all(table.start <= band.first_needed(request.num_computed_tokens) for band, table in tables)

    def _taint(
        self, wrong: dict[Run, None], others: list[LedgerRequest], sources: dict[LedgerRequest, int]
    ) -> dict[LedgerRequest, int]:
        """Find the requests among `others` that may have read wrong KV, and taint them. Returns them, each with its
        first wrong unit.

        Wrong are the runs `wrong`, and what `sources` have computed, each from its first wrong token on. What a tainted
        request has computed from its first wrong unit on is wrong, too: the request joins `sources`, its runs join
        `wrong`, and the search goes on until it finds no more."""
        tainted: dict[LedgerRequest, int] = {}
        found = True
        while found:
            found = False
            for other in others:
                if other in tainted:
                    continue
                read = [run.start for run in _read(other) if run in wrong]
                read += taken_from(other, sources, self.cache.layout.unit_tokens)
                read += self._read_before(other, sources)
                if read:
                    # Only from its first wrong unit on: what it computed before is right, and others may use it.
                    tainted[other] = min(read)
                    sources[other] = min(read) * self.cache.layout.unit_tokens
                    other.epoch = NoEpoch.INVALIDATED  # whatever its task still commits before it unwinds
                    wrong.update(dict.fromkeys(runs_from(self.cache, other, min(read), wrong)))
                    found = True
        return tainted

    def _read_before(self, other: LedgerRequest, sources: dict[LedgerRequest, int]) -> list[int]:
        """The first wrong unit of each of `sources` whose wrong KV `other` may have read before it gave up its blocks.
        It has no leases left that would tell, so tokens are compared. It is tainted even if it computes all KV again:
        tokens that it sampled from wrong KV are wrong."""
        if not other.read_before:
            return []
        unit = self.cache.layout.unit_tokens
        firsts = {source: at // unit for source, at in sources.items()}
        return [
            first
            for source, first in firsts.items()
            if first < other.read_before and other.sequence.agrees(source.sequence, (first + 1) * unit)
        ]


def _read(request: LedgerRequest) -> Iterator[Run]:
    """The runs that `request` may have computed with. A request without block tables has none: its leases only pin."""
    for lease in request.all_leases() if request.tables else ():
        yield from lease.run.path()


def _leases_any(request: LedgerRequest, runs: dict[Run, None]) -> bool:
    return any(run in runs for lease in request.all_leases() for run in lease.run.path())
