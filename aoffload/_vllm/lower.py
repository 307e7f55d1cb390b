"""The tiers below host memory in the scheduler: a disk, a remote store, and fetches from both."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import attrs

from .. import HostCache, OffloadConfig, PrefixMatch, RequestState, Tier
from .._runtime.costs import PrefillSpeed, fetch_bound_s
from .._tiers.fetch.rules import first_tokens
from ..ledger import Completion, CopyQueue, Fetch, TransferPlan
from .counts import Counts
from .disk import DiskSide
from .messages import Said, TieredOutbox
from .remote import RemoteSide
from .requests import EngineRequest, Fetching

# -- fetches ---------------------------------------------------------------------------------------------------------
#
# A request's fetch from below host memory, which comes before vLLM gets the length of the hit.
#
# question    how much has the remote store after the hit? Asked in one step, answered in a later one
# gate        would the fetch end before the same tokens could be computed?
# fetch       copies into host memory, for at most the time that computing them would take
#
# Until the fetch ends, vLLM is answered "ask again". Meanwhile it schedules other requests.

PENDING = PrefixMatch(0, 0, is_pending=True)
FROM_DISK, FROM_REMOTE = (Tier.DISK, Tier.HOST), (Tier.REMOTE, Tier.HOST)


@attrs.frozen
class Offer:
    """The tokens that a fetch could bring."""

    stop: int
    """The token at which the hit would end."""
    remote_stop: int
    """The token at which the part from the remote store would end; 0 if that part is empty."""
    seconds: float


@attrs.define(eq=False)
class Fetches:
    """One per engine with a disk or a remote store."""

    ledger: HostCache
    queue: CopyQueue
    counts: Counts
    block_bytes: int
    most_s: float
    """The longest time for which a fetch may delay a request."""
    speed: PrefillSpeed
    clock: Callable[[], float]
    disk: DiskSide | None
    remote: RemoteSide | None
    _num_loads_over: int = attrs.field(default=0, init=False)
    """Loads from below the host that have ended."""

    def copied(self, plan: TransferPlan) -> None:
        """A copy has ended."""
        self._num_loads_over += plan.link in (FROM_DISK, FROM_REMOTE)

    def fetched(self, found: EngineRequest, match: PrefixMatch) -> PrefixMatch:
        """`match` of `found`, after the blocks that only lower tiers have were fetched, or after the time for that is
        over. Until then, the answer is pending."""
        is_late = self.clock() >= found.fetch_until
        if found.fetch is not None:
            if not found.fetch.is_over and not is_late:
                return PENDING
            if not found.fetch.is_over:
                self.counts.counted["late_fetches"] += 1
                self.ledger.transfers.cancel(found.fetch)
            match = found.ask_behind_fetch(self.ledger, self.counts.num_failed)
        if is_late:
            found.fetching = Fetching.OVER
        if found.fetching is Fetching.OVER or match.is_pending:
            return match
        if self._asks(found, match):
            return PENDING
        offer = self._offer(found, match)
        return match if offer is None else self._bring(found, match, offer)

    # -- available blocks -----------------------------------------------------------------------------------------

    def _disk_stop(self, match: PrefixMatch) -> int:
        is_usable = self.disk is not None and match.num_lower_tokens and self.disk.may_fetch
        return match.num_tokens + match.num_lower_tokens if is_usable else match.num_tokens

    def _asks(self, found: EngineRequest, match: PrefixMatch) -> bool:
        """Whether `found` waits for an answer of the store. It asks once, if a fetch could be worth its time."""
        asked = found.asked
        if asked is not None:
            return asked.num_cells is None and self.clock() < asked.until
        if self.remote is None or found.record is None or not self.remote.may_fetch:
            return False
        unit_tokens = self.ledger.layout.unit_tokens
        most = min(found.record.hit_limit * unit_tokens, found.prefix.num_tokens - 1)
        stop, behind = self.remote.cells_stop(most), self._disk_stop(match)
        if stop <= behind or not self._bound_s(match, self._offer_of(found, match, behind, stop)):
            return False
        found.asked = self.remote.ask(first_tokens(found.prefix, stop), behind)
        return True

    def _offer(self, found: EngineRequest, match: PrefixMatch) -> Offer | None:
        """The offer that is worth a fetch: disk and store together, or the disk alone. None: neither."""
        disk_stop, remote_stop = self._disk_stop(match), 0
        if self.remote is not None and found.asked is not None and self.remote.may_fetch:
            remote_stop = found.asked.stop * self.ledger.layout.unit_tokens
        offers = [(disk_stop, remote_stop), (disk_stop, 0)] if remote_stop > disk_stop else [(disk_stop, 0)]
        if max(disk_stop, remote_stop) <= match.num_tokens:
            return None
        for from_disk, from_remote in offers:
            offer = self._offer_of(found, match, from_disk, from_remote)
            if found.num_tried >= 0 or self._bound_s(match, offer):  # a fetch that has begun runs until its deadline
                return offer
        self.counts.counted["declined_fetches"] += 1
        found.fetching = Fetching.OVER
        return None

    def _offer_of(self, found: EngineRequest, match: PrefixMatch, disk_stop: int, remote_stop: int) -> Offer:
        stop, seconds = max(disk_stop, remote_stop), 0.0
        wanted = first_tokens(found.prefix, stop)
        if disk_stop > match.num_tokens:
            seconds = self._seconds(FROM_DISK, self.ledger.fetches.num_blocks(first_tokens(found.prefix, disk_stop)))
        if remote_stop:
            num_blocks = self.ledger.fetches.num_remote_blocks(wanted, remote_stop)
            seconds = max(seconds, self._seconds(FROM_REMOTE, num_blocks))
        return Offer(stop, remote_stop, seconds)

    def _seconds(self, link: tuple[Tier, Tier], num_blocks: int) -> float:
        return self.queue.seconds(*link, num_blocks)

    def _bound_s(self, match: PrefixMatch, offer: Offer) -> float:
        """How long the request may wait for `offer`. 0: it computes the tokens instead."""
        num_tokens = offer.stop - match.num_tokens
        return fetch_bound_s(num_tokens, self.speed.tokens_per_s, offer.seconds, self.most_s)

    # -- fetching -------------------------------------------------------------------------------------------------

    def _bring(self, found: EngineRequest, match: PrefixMatch, offer: Offer) -> PrefixMatch:
        """Fetch as many blocks as fit into free host blocks. If none fit, wait for the fetches of other requests, if
        there are any."""
        are_others = any(self.queue.num_under_way(*link) for link in (FROM_DISK, FROM_REMOTE))
        if found.num_tried == self._num_loads_over and are_others:
            return PENDING
        if match.num_tokens <= found.num_fetched and not are_others:  # the last fetch has loaded nothing
            found.fetching = Fetching.OVER
            return match
        fetch = self._begin(found, match, offer)
        if not fetch.plans and fetch.is_over and not are_others:
            found.fetching = Fetching.OVER
            return match
        return PENDING

    def _begin(self, found: EngineRequest, match: PrefixMatch, offer: Offer) -> Fetch:
        record = found.record
        assert record is not None, "a match without a request"

        def arrived() -> None:
            # Match in the same step in which the fetch ends, because its blocks are evictable from now on.
            if record.state is RequestState.PINNED:
                self.ledger.fetches.match_again(record)

        wanted = first_tokens(found.prefix, offer.stop)
        fetch = self.ledger.fetches.fetch(wanted, arrived, num_remote_tokens=offer.remote_stop, for_request=record)
        if found.num_tried < 0:
            found.fetch_until = self.clock() + self._bound_s(match, offer)
            self.counts.counted["fetches"] += 1
        found.num_tried = self._num_loads_over
        if fetch.plans or not fetch.is_over:  # otherwise there was no free block, and a later call tries again
            found.fetch, found.num_fetched = fetch, match.num_tokens
            found.fetched += [self.ledger.jobs.unsettled[plan.job_id] for plan in fetch.plans]
            self.queue.submit(fetch.plans)
        return fetch


# -- lower -----------------------------------------------------------------------------------------------------------


@attrs.frozen
class Lower:
    """One per engine with tiers below the host. All calls come from the thread of vLLM's scheduler, and none waits."""

    ledger: HostCache
    disk: DiskSide | None
    remote: RemoteSide | None
    fetches: Fetches

    @classmethod
    def of(
        cls, config: OffloadConfig, ledger: HostCache, queue: CopyQueue, outbox: TieredOutbox, counts: Counts,
        block_bytes: int, speed: PrefillSpeed, clock: Callable[[], float],
    ) -> Lower:  # fmt: skip
        most_s = config.fetch_bound_s
        disk = remote = None
        if config.disk is not None:
            disk = DiskSide(ledger, queue, outbox, counts, config.disk, block_bytes, clock)
        if config.remote is not None:
            remote = RemoteSide(ledger, queue, outbox, counts, config.remote, block_bytes, most_s, clock)
        fetches = Fetches(ledger, queue, counts, block_bytes, most_s, speed, clock, disk, remote)
        return cls(ledger, disk, remote, fetches)

    @property
    def _sides(self) -> list[DiskSide | RemoteSide]:
        return [side for side in (self.disk, self.remote) if side is not None]

    @property
    def is_busy(self) -> bool:
        """Whether vLLM has to run more steps."""
        return self.disk is not None and self.disk.is_busy

    @property
    def may_fetch(self) -> bool:
        """Whether a fetch of blocks that the index knows may begin."""
        return self.disk is not None and self.disk.may_fetch

    def fetched(self, found: EngineRequest, match: PrefixMatch) -> PrefixMatch:
        return self.fetches.fetched(found, match)

    def hear(self, said: Iterable[Said], completions: Iterable[Completion]) -> None:
        """Take the reports of the worker's tiers, and the copies that have ended, before these are settled."""
        for side in self._sides:
            side.take(said)
        for completion in completions:
            job = self.ledger.jobs.unsettled.get(completion.job_id)
            if job is not None:
                self.fetches.copied(job.plan)
                for side in self._sides:
                    side.copied(job.plan, completion)

    def look(self) -> None:
        """Store blocks below host memory that are worth it."""
        for side in self._sides:
            side.look()

    def reset(self) -> None:
        """The ledger has forgotten everything."""
        for side in self._sides:
            side.reset()

    def gauges(self) -> dict[str, float]:
        return {name: value for side in self._sides for name, value in side.gauges().items()}
