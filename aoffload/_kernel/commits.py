"""Commits: publish what a forward has computed, store it in the host, and take it back if the forward has failed.

Commit. A commit names the number of tokens that are computed in all. Whole units are published: they become findable
on the device, for all requests. The store policy says up to which unit the host should have a copy, and `Stores` plans
jobs for the units that the host lacks. Last, the windows slide: blocks that computing on does not need are given back.

The policy may be the program's own, and may raise. So it is consulted before anything has changed, with a request that
looks as if the commit were done.

What is stored, and when:

    eager policies      at the commit, from the first unit that the host lacks
    with a watermark    nothing at the commit: the path is marked, and stored when it is about to be evicted
    windows             only where a later hit may end: at the end of the prompt, at the store limit, at the last offer
    a host that evicts  units that the host has evicted since the request was admitted are stored again at its last
                        offer. Otherwise live requests whose prefixes do not fit together would evict each other's
                        blocks at every commit

Invalidate. A forward has failed after its tokens were committed: KV from `from_token` on is wrong, and so is everything
computed with it. Two sets are searched until neither grows:

    wrong      runs whose blocks are wrong: at first those that the request itself has published from there on
    sources    requests that have computed wrong KV, each with its first wrong token: at first the request

    A request is tainted if it may have read wrong KV:
        a lease of its block tables covers a wrong run; or
        it is a fork, and shares wrong tokens with a source; or
        it gave up its blocks since (preempted), and its tokens agree with wrong tokens of a source
    Then it is a source, too, and the runs that it uses from its first wrong unit on are wrong.

Requests that are over, but still in a step, and forks that are over count as readers, because others may have read what
they computed. A tainted request publishes nothing any more, and its caller aborts it. All wrong runs become unfindable,
with all runs after them. Requests whose match pins such runs, and that have no blocks yet, are matched again.

The request itself computes again, from `from_token` on. Its blocks there become private again, so no other request may
read them any more. In place of blocks that others still read, it takes fresh ones. If it cannot, it is tainted as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
from .events import StoreSkipped
from .jobs import Stores
from .leases import (
    RequestLeases,
    first_published,
    publish,
    published_by,
    read_by,
    runs_from,
    slide_windows,
    step_back,
    take_private,
)
from .loads import require_no_holes
from .moves import Moves
from .plans import TransferPlan
from .prefix import TOKEN_BYTES, TokenIds, encode_tokens
from .records import Run
from .requests import LedgerRequest
from .states import Computing, NoEpoch, Tier, require
from .states import RequestState as State
from .waiting import Admission


@dataclass(slots=True, eq=False)
class Commits:
    """Commits and invalidations, and the stores that commits plan."""

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
        return self._publish(request, num_tokens, self._append(request, num_tokens, added))

    def commit_all(self, commits: Sequence[tuple[LedgerRequest, object, TokenIds]]) -> list[tuple[TransferPlan, ...]]:
        """Commit several requests, or none if one commit is refused or the policy raises."""
        appended: list[tuple[LedgerRequest, int]] = []
        found: list[tuple[LedgerRequest, int, int]] = []
        try:
            for request, num_computed_tokens, new_token_ids in commits:
                num_tokens, added = self.check(request, num_computed_tokens, new_token_ids)
                known = request.sequence.num_tokens
                found.append((request, num_tokens, self._append(request, num_tokens, added)))
                appended.append((request, known))
        except BaseException:
            for request, known in appended:
                request.sequence.drop_after(known)
            raise
        return [self._publish(request, num_tokens, wanted) for request, num_tokens, wanted in found]

    def _append(self, request: LedgerRequest, num_tokens: int, added: bytes) -> int:
        """Append the new tokens of a commit. Returns the unit up to which the policy wants its blocks in the host. If
        the policy raises, nothing has changed."""
        known, computed, first = request.sequence.num_tokens, request.num_computed_tokens, request.published
        num_units = num_tokens // self.cache.layout.unit_tokens
        if added:
            request.sequence.append(added)
        if not num_units or not request.store_limit or request.epoch != self.cache.epoch:
            return 0
        request.num_computed_tokens, request.published = num_tokens, max(first, num_units)
        try:
            return min(request.published, request.store_limit, self.policy.wanted_stop(request))
        except BaseException:
            # The commit has changed nothing, so it may be repeated: that must not append the new tokens twice.
            request.sequence.drop_after(known)
            raise
        finally:
            request.num_computed_tokens, request.published = computed, first

    def _publish(self, request: LedgerRequest, num_tokens: int, wanted: int) -> tuple[TransferPlan, ...]:
        """Publish the units that a commit has computed. Returns its stores, up to unit `wanted`."""
        computed, first = request.num_computed_tokens, request.published
        num_units, is_current = num_tokens // self.cache.layout.unit_tokens, request.epoch == self.cache.epoch
        if request.state is State.ALLOCATED:
            self.request_leases.end_host_lease(request)
            self.moves.request(request, State.RUNNING)
        if num_tokens > computed and request.computing is Computing.NOTHING and not request.num_steps:
            self.cache.last_uses.are_covered = False  # no step covers this commit
        request.num_computed_tokens, request.has_committed, request.computing = num_tokens, True, Computing.NOTHING
        plans: tuple[TransferPlan, ...] = ()
        if is_current:
            if num_units > first:
                publish(self.request_leases, request, num_units)
            plans = self.offer_stores(request, first, wanted)
        if self.cache.layout.windows:
            slide_windows(self.cache, request)
        return plans

    def check(self, request: LedgerRequest, num_computed_tokens: object, new_token_ids: TokenIds) -> tuple[int, bytes]:
        """Raise if the commit is invalid; returns `num_computed_tokens`, and the new tokens, encoded."""
        if request.computing is Computing.LOST_BLOCKS:
            problem = f"cannot count: {request} was preempted since its last step: compute again in a new step"
            raise CommitError("num_computed_tokens", problem)
        if request.state is not State.RUNNING:
            require(request, "commit", State.ALLOCATED, State.RUNNING)
            require_no_holes(request, "commit")
        has_none = type(new_token_ids) is tuple and not new_token_ids  # the common case in a prefill
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
        """The request is done: report to the policy which units were generated, and plan the stores that it wants
        now."""
        if Tier.DEVICE not in request.leases or not request.store_limit:
            return ()
        self.policy.seen(request, request.sequence.num_prompt_units, request.published)
        wanted = min(request.published, request.store_limit, self.policy.wanted_stop(request))
        return self.offer_stores(request, request.published, wanted, is_last=True)

    def offer_stores(
        self, request: LedgerRequest, first: int, stop: int, *, is_last: bool = False
    ) -> tuple[TransferPlan, ...]:
        """Plan the stores on the path of `request` up to unit `stop`, which the policy wants: the units from `first`
        on, and those before it that the host lacks. The head of this module says what is stored when."""
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
        if first and host.num_evicted != request.evictions_before and not is_last:
            source, destination = self.stores.source, self.stores.destination
            if self.cache.full.lacking(lease.run, source, destination, first, first):  # a unit before `first`
                if first < stop:
                    self.moves.note(StoreSkipped(request, (stop - first) * self.cache.layout.full.width, "evicted"))
                return ()
        with_windows = False
        if self.cache.layout.windows:
            with_windows = is_last or request.is_at_end or first < stop == request.store_limit
        jobs = self.stores.offer(request, lease.run, first, stop, with_windows=with_windows)
        return tuple([job.plan for job in jobs]) if jobs else ()

    def plan_write_back(self) -> tuple[TransferPlan, ...]:
        """Plan stores of blocks that are about to be evicted; none unless the policy has a watermark."""
        return tuple([job.plan for job in self.watermark.plan()]) if self.watermark.num_blocks else ()

    def invalidate(
        self, request: LedgerRequest, first_wrong: object, readers: Iterable[LedgerRequest]
    ) -> dict[LedgerRequest, int]:
        """See `Ledger.invalidate`. Returns the tainted requests, each with its first wrong unit, also those that are
        over; `request` comes first if it cannot compute again.

        A request that is matched again may have a grant that was not accepted yet. Then the grant goes back, and the
        request joins the wait queue again.
        """
        require(request, "invalidate", State.RUNNING)
        ready = request.ready_stop * self.cache.layout.unit_tokens
        from_token = check_int("from_token", first_wrong, 0)
        if not ready <= from_token <= request.num_computed_tokens:
            raise CommitError("from_token", f"must lie in [{ready}, {request.num_computed_tokens}], got {from_token}")
        start = from_token // self.cache.layout.unit_tokens
        others = [other for other in readers if other is not request]
        # Also after a reset, when the index has none of these runs, because other requests may still share the blocks.
        wrong = dict.fromkeys(runs_from(self.cache, request, first_published(self.cache, request, start), ()))
        tainted = self._taint(wrong, others, {request: from_token})
        self.cache.withdraw_all(wrong)
        self.pins.renew()
        self.admission.match_again([other for other in others if other in tainted or _leases_any(other, wrong)])
        goes_on = self._compute_again(request, from_token, tainted)
        request.sequence.drop_after(from_token + 1)
        request.num_computed_tokens = from_token
        tables = zip(self.cache.layout.windows, request.tables[1:], strict=True)
        if goes_on and all(table.start <= component.first_needed(from_token) for component, table in tables):
            return tainted
        # Other requests read its blocks, or its windows no longer reach back to `from_token`.
        request.epoch = NoEpoch.INVALIDATED
        return {request: start, **tainted}

    def _compute_again(self, request: LedgerRequest, from_token: int, readers: Iterable[LedgerRequest]) -> bool:
        """Let `request` compute again from `from_token` on, into private blocks. False: other requests still read some
        of its blocks, and `request` cannot take fresh blocks in their place. Either there are too few available blocks,
        or a step of `request` writes to its blocks, or the first block begins with KV that is right, which a fresh
        block would lack."""
        start, excess = divmod(from_token, self.cache.layout.unit_tokens)
        published = published_by(self.cache, request, start)
        shared = read_by(readers, published)
        needed = sum((run.stop - run.start) * component.width for component, run in shared)
        is_half_right = excess and any(run.start == start for _, run in shared)  # in any component
        if shared and (request.num_steps or needed > self.admission.num_available or is_half_right):
            return False
        take_private(self.cache, request, published, shared)
        step_back(self.request_leases, request, start)
        return True

    def _taint(
        self, wrong: dict[Run, None], others: list[LedgerRequest], sources: dict[LedgerRequest, int]
    ) -> dict[LedgerRequest, int]:
        """Find the requests among `others` that may have read wrong KV, and taint them. Returns them, each with its
        first wrong unit. Adds them to `sources`, and their runs to `wrong`: the head of this module describes the
        search."""
        tainted: dict[LedgerRequest, int] = {}
        found = True
        while found:
            found = False
            for other in others:
                if other in tainted:
                    continue
                # Without block tables it has read nothing: its leases only pin.
                leases = other.all_leases() if other.tables else ()
                read = [run.start for lease in leases for run in lease.run.path() if run in wrong]
                read += taken_from(other, sources, self.cache.layout.unit_tokens)
                read += self._read_before(other, sources)
                if read:
                    # Only from its first wrong unit on: the KV that it computed before is right, and others may use it.
                    tainted[other] = min(read)
                    sources[other] = min(read) * self.cache.layout.unit_tokens
                    other.epoch = NoEpoch.INVALIDATED  # its task may still commit before it unwinds
                    wrong.update(dict.fromkeys(runs_from(self.cache, other, min(read), wrong)))
                    found = True
        return tainted

    def _read_before(self, other: LedgerRequest, sources: dict[LedgerRequest, int]) -> list[int]:
        """The first wrong unit of each of `sources` whose wrong KV `other` may have read before it gave up its blocks.
        `other` has no leases any more that would show this, so tokens are compared. `other` is tainted even if it
        computes all KV again, because tokens that it sampled from wrong KV are wrong."""
        if not other.read_before:
            return []
        unit = self.cache.layout.unit_tokens
        firsts = {source: at // unit for source, at in sources.items()}
        return [
            first
            for source, first in firsts.items()
            if first < other.read_before and other.sequence.agrees(source.sequence, (first + 1) * unit)
        ]


def _leases_any(request: LedgerRequest, runs: dict[Run, None]) -> bool:
    return any(run in runs for lease in request.all_leases() for run in lease.run.path())
