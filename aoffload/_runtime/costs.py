"""Loading or computing: estimates of the present cost of both, and the decisions that the runtime derives from them.

Loading a hit is worth it only if the copy takes less time than computing its tokens. That changes from second to
second: links are shared, and a request that computes delays the requests after it. Two decisions are made here:

    fetch_bound_s     whether a fetch from a tier below the host begins, and how long its request waits: at most as long
                      as computing its tokens would take. After that, the request computes the missing tokens
    LoadCosts.limit   how much of its host hit a request loads: `plan_load(max_tokens=)`. `LoadCosts.bound` is the same
                      for an engine that owns the device blocks: the engine has to know the answer at the match

The links of the copy queue measure copies. `PrefillSpeed` measures computing, from the time between the begin of a step
and its commits, unless the engine reports it (`report_compute`) or the configuration gives it. The tokens that requests
still have to compute count as queued, unless the engine reports its queue (`report_queue`). As long as the speed of
computing is unknown, everything is loaded, because there is no comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import attrs

from .._common.arguments import check_int, check_type, number_of, shown
from .._common.tiers import BELOW, DEVICE
from .._extensions.assembly import AnyLedger, check_ledger
from .._extensions.load_choice import CostChoice, LoadChoice, LoadOffer, chosen_stop, load_choice_of
from .._extensions.status import Declined
from .._host_cache.host_cache import HostCache
from .._host_cache.requests import HostCacheRequest
from .._kernel.records import LedgerRequest
from .._kernel.states import ALLOCATED, PINNED
from .._transfer.copy_queue import CopyQueue, Link
from .._transfer.rates import TransferRate
from ..errors import InvalidArgument

WORTH = 0.8
"""A fetch is worth it if it takes at most this share of the time to compute its tokens."""
KEEP = 0.8
"""Weight of the earlier measurements, at each new one."""
LEAST_TOKENS = 16
"""Minimum tokens that a request computes in a step that measures prompts. A request that decodes computes fewer."""


def fetch_bound_s(num_tokens: int, tokens_per_s: float | None, fetch_s: float, most_s: float) -> float:
    """How long a request may wait for a fetch of `num_tokens` that takes `fetch_s` seconds; 0: it does not fetch.

    `tokens_per_s` is the speed of computing these tokens; None if unknown. No request waits longer than `most_s`.
    """
    compute_s = most_s if tokens_per_s is None else min(most_s, num_tokens / tokens_per_s)
    return compute_s if fetch_s < WORTH * compute_s else 0.0


@attrs.define(eq=False)
class _Step:
    begun_s: float
    is_counted: bool = False


@attrs.define(eq=False)
class PrefillSpeed:
    """The speed of computing prompts, in tokens per second, from the time between the begin of a step and its commits.

    `given` replaces the measurement.
    """

    given: float | None = None
    tokens_per_s: float | None = attrs.field(init=False)
    """None: not known yet."""
    _num_tokens: float = 0.0
    _seconds: float = 0.0
    _steps: dict[str, _Step] = attrs.field(factory=dict)
    """The step of each request that has not committed it."""

    def __attrs_post_init__(self) -> None:
        self.tokens_per_s = self.given

    def begins(self, request_ids: Iterable[str], now: float) -> None:
        """A step with these requests begins."""
        step = _Step(now)
        for request_id in request_ids:
            self._steps[request_id] = step

    def computed(self, request_id: str, num_tokens: int, now: float) -> None:
        """The step of this request has computed `num_tokens` of its tokens. A step is one measurement: the tokens of
        all its requests are added up."""
        step = self._steps.pop(request_id, None)
        if step is None or num_tokens < LEAST_TOKENS:
            return
        if step.is_counted:
            self._counted(self._num_tokens + num_tokens, self._seconds)
        elif now > step.begun_s:
            step.is_counted = True
            self.report(num_tokens, now - step.begun_s)

    def report(self, num_tokens: int, seconds: float) -> None:
        """Computing `num_tokens` tokens took `seconds`."""
        if seconds > 0 and num_tokens >= LEAST_TOKENS:
            self._counted(KEEP * self._num_tokens + num_tokens, KEEP * self._seconds + seconds)

    def _counted(self, num_tokens: float, seconds: float) -> None:
        self._num_tokens, self._seconds = num_tokens, seconds
        if self.given is None:
            self.tokens_per_s = num_tokens / seconds

    def forget(self, request_id: str) -> None:
        """The request is over."""
        self._steps.pop(request_id, None)


MOST_TOKENS, MOST_S = 2**53, 1e9
"""Maximum of a report, so that sums of reports stay finite."""
_BEFORE_LOAD = (ALLOCATED, PINNED)

HearsDeclined = Callable[[str, int, float, float], object]
"""Called with a request's id, the tokens that it computes instead of loading, and the seconds to its first token with
and without loading them."""


def _ignore(request_id: str, num_tokens: int, load_s: float, compute_s: float) -> None:
    """Default `declined`: does nothing."""


@attrs.define(eq=False)
class LoadCosts:
    """Decides how much of its hit each request of `ledger` loads, as `load_choice` of its configuration says.

    A request counts as queued, with the tokens that it has to compute, from `limit` or `bound` on until `computed` or
    `forget`. The speed of computing is that of steps, of `report_compute`, or `prefill_tokens_per_s`. While the speed
    is unknown, everything is loaded.
    """

    ledger: AnyLedger
    copies: CopyQueue
    speed: PrefillSpeed = attrs.field()
    declined: HearsDeclined = _ignore
    num_declined: int = attrs.field(default=0, init=False)
    """Number of times that a part of a hit was computed instead."""
    _choice: LoadChoice | None = attrs.field(init=False)
    """None: load everything."""
    _link: Link = attrs.field(init=False)
    _rate: TransferRate = attrs.field(init=False)
    _block_bytes: int = attrs.field(init=False)
    _unit_tokens: int = attrs.field(init=False)
    _queued: dict[str, int] = attrs.field(init=False, factory=dict)
    """Tokens that requests have to compute, by id."""
    _sum_queued: int = attrs.field(init=False, default=0)
    """The sum of `_queued`."""
    _reported: int = attrs.field(init=False, default=0)
    """Tokens queued before those of `_queued`, from `report_queue`."""
    _explained: dict[str, Declined] = attrs.field(init=False)
    """The declined loads of live requests, for the ledger's `explain`."""

    @speed.default
    def _speed(self) -> PrefillSpeed:
        return PrefillSpeed(check_ledger("ledger", self.ledger).config.prefill_tokens_per_s)

    def __attrs_post_init__(self) -> None:
        check_ledger("ledger", self.ledger)
        check_type("copies", self.copies, CopyQueue)
        self._choice = load_choice_of(self.ledger.config.load_choice)
        self._link = self.copies.link(BELOW, DEVICE)
        self._rate = self._link.rate or TransferRate()
        self._block_bytes, self._unit_tokens = self.copies.block_bytes, self.ledger.layout.unit_tokens
        self._explained = self.ledger.reports.declined

    # -- the choice -----------------------------------------------------------------------------------------------

    def limit(self, record: LedgerRequest, max_tokens: int | None = None, left_s: float | None = None) -> int | None:
        """The `max_tokens` to pass to `plan_load` for `record`. `left_s`: seconds until the deadline of the request."""
        choice, unit, request_id = self._choice, self._unit_tokens, record.request_id
        if choice is None or (self.speed.tokens_per_s is None and type(choice) is CostChoice):
            return max_tokens  # the choice would be to load everything, because there is no comparison
        found = self.ledger.loadable(record, max_tokens)
        if found is None:
            if record.state in _BEFORE_LOAD:
                num_tokens = record.sequence.num_tokens - max(record.published * unit, record.given_tokens)
                self._sum_queued += num_tokens - self._queued.get(request_id, 0)
                self._queued[request_id] = num_tokens
            return max_tokens
        link, rate, num_units = self._link, self._rate, found.stop - found.start
        rest_tokens = record.sequence.num_tokens - found.stop * unit
        others = self._sum_queued - self._queued.get(request_id, 0)
        now = self.copies.clock()
        offer = LoadOffer(
            num_units, found.num_blocks * self._block_bytes, unit, rest_tokens,
            self.speed.tokens_per_s, self._reported + others,
            rate.bytes_per_s(link.num_bytes, now), link.queued_bytes + link.num_bytes, rate.latency_s,
            max(0.0, now - rate.ended_s), left_s,
        )  # fmt: skip
        num_declined = num_units - chosen_stop(choice, offer, num_units)
        self._queued[request_id] = num_tokens = rest_tokens + num_declined * unit
        self._sum_queued = others + num_tokens
        if not num_declined:
            if self._explained:
                self._explained.pop(request_id, None)
            return max_tokens
        self.num_declined += 1
        declined = Declined(num_declined * unit, offer.first_token_s(num_units), offer.first_token_s(0))
        self._explained[request_id] = declined
        self.declined(request_id, declined.num_tokens, declined.load_s, declined.compute_s)
        return (found.stop - num_declined) * unit

    def bound(self, record: HostCacheRequest, left_s: float | None = None) -> None:
        """Reduce the match of `record`, a request of a `HostCache`, to the part to load."""
        if record.state is PINNED:
            from_token = self.limit(record, None, left_s)
            if from_token is not None:
                cache: HostCache = record.ledger
                cache.decline(record, from_token)

    # -- the queue of tokens to compute ---------------------------------------------------------------------------

    def computed(self, request_id: str, num_tokens: int) -> None:
        """Report that `num_tokens` more tokens of a request are computed."""
        left = self._queued.get(request_id)
        if left is None:  # the last `report_queue` counts it, or it only generates
            if num_tokens >= LEAST_TOKENS:
                self._reported = max(0, self._reported - num_tokens)
        elif num_tokens < left:
            self._sum_queued -= num_tokens
            self._queued[request_id] = left - num_tokens
        else:
            self._sum_queued -= self._queued.pop(request_id)

    def forget(self, request_id: str) -> None:
        """Report that the request is over."""
        self._sum_queued -= self._queued.pop(request_id, 0)
        self._explained.pop(request_id, None)

    def report_queue(self, num_tokens: int) -> None:
        """Report that `num_tokens` tokens of prompts will be computed before those of the next request."""
        self._reported, self._sum_queued = check_int("num_tokens", num_tokens, 0, MOST_TOKENS), 0
        self._queued.clear()

    def report_compute(self, num_tokens: int, seconds: float) -> None:
        """Report that computing `num_tokens` tokens of prompts has taken `seconds`."""
        check_report(num_tokens, seconds)
        self.speed.report(num_tokens, float(seconds))


def check_report(num_tokens: object, seconds: object) -> None:
    """Check the arguments of `report_compute`."""
    check_int("num_tokens", num_tokens, 0, MOST_TOKENS)
    found = number_of(seconds)
    if found is None or not 0 <= found <= MOST_S:
        raise InvalidArgument("seconds", f"must be a number of seconds in [0, {MOST_S:g}], got {shown(seconds)}")
