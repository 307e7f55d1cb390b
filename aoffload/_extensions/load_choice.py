"""Load or compute: decides how much of a hit to load, by estimating the cost of loading and of computing.

    loading costs      max(A, Q) - Q           this request waits for its first token
                       + 2 busy(W) L           requests after it wait for its copy
    computing costs    H                       this request waits for its first token
                       + 2 busy(Q) H           requests after it wait for its forward

All times are in seconds. L is the time of the copy alone, W the time of the copies queued before it, and A = latency +
W + L the time until the hit has arrived. H is the time to compute the hit, and Q the time to compute the tokens queued
before it. busy(t) = t / (t + 0.2 s) is near 0 if little is queued, because then few requests come after this one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from .._common.arguments import check_int
from .._common.tiers import BELOW, Tier
from .._kernel.ledger import CoreLedger
from .._kernel.records import NO_LIMIT, LedgerRequest
from .._kernel.states import RequestState as State

IDLE_S = 0.2
"""Queue length in seconds at which `busy` is 0.5."""
NUM_BEHIND = 2.0
"""Number of requests that one request is expected to delay if the queue is always full."""
TRIAL = 0.01
"""Maximum time of a load that only measures the link again, as a share of the time since the last measurement."""


@dataclass(slots=True, eq=False)
class Loadable:
    """A load that could be planned: units `[start, stop)`, and the number of blocks to copy for them."""

    start: int
    stop: int
    num_blocks: int


def loadable(ledger: CoreLedger, request: LedgerRequest, max_tokens: int | None = None) -> Loadable | None:
    """The load that `plan_load` would plan now. None: there is nothing to load, or the load was planned before."""
    layout, start, stop = ledger.layout, ledger.own(request).published, request.hit_stop
    if max_tokens is not None or stop > request.num_units:
        limit = NO_LIMIT if max_tokens is None else check_int("max_tokens", max_tokens, 0) // layout.unit_tokens
        stop = min(stop, request.num_units, limit)
    lease = request.leases.get(BELOW)
    if stop <= start or lease is None or request.state is not State.ALLOCATED or request.epoch != ledger.cache.epoch:
        return None
    if request.num_steps or request.waiter is not None:
        return None  # `plan` refuses it
    run, there = lease.run, start
    part = run.parts[Tier.DEVICE]
    if part.incoming is not None or part.stop > start or run.start > start:  # else the device has no unit of it
        there = min(ledger.loads.on_its_way(run.whole_path(), start, stop)[1], stop)
    return Loadable(start, stop, layout.num_blocks(there, start, stop))


@dataclass(slots=True, eq=False)
class LoadOffer:
    """The input of the choice for one request: its hit, the state of the link, and the state of the engine."""

    num_units: int
    """Units of the hit that could be loaded."""
    num_bytes: int
    """Bytes to copy for these units."""
    unit_tokens: int
    rest_tokens: int
    """Tokens after the hit. They are computed in any case."""
    tokens_per_s: float | None
    """Computing speed; None if unknown."""
    queued_tokens: int = 0
    """Tokens that are computed before the tokens of this request."""
    bytes_per_s: float | None = None
    """Speed of the link at its last measurement, or a lower speed if the copies in flight show it; None if unknown."""
    queued_bytes: int = 0
    """Bytes that are copied before this load."""
    latency_s: float = 0.0
    """Seconds that a copy takes in addition to the time for its bytes."""
    age_s: float = 0.0
    """Seconds since the last measurement of the link."""
    left_s: float | None = None
    """Seconds until the deadline of the request; None if it has no deadline."""

    @property
    def arrives_s(self) -> float:
        """Seconds until the hit has arrived. 0 if the link was never measured, because then the first load measures
        it."""
        if not self.bytes_per_s:
            return 0.0
        return self.latency_s + (self.queued_bytes + self.num_bytes) / self.bytes_per_s

    def first_token_s(self, num_units: int) -> float:
        """Seconds until the first token if `num_units` are loaded. An unknown time counts as 0."""
        arrived_s, speed = self.arrives_s if num_units else 0.0, self.tokens_per_s
        if not speed:
            return arrived_s
        num_tokens = self.rest_tokens + self.unit_tokens * (self.num_units - num_units)
        return max(arrived_s, self.queued_tokens / speed) + num_tokens / speed


class LoadChoice(Protocol):
    """Decides how much of a hit is loaded."""

    def stop(self, offer: LoadOffer) -> int:
        """The number of leading units of the hit to load; the others are computed. Called for every request with a host
        hit, in the ledger's thread."""
        ...


class CostChoice:
    """Loads the hit if loading costs no more than computing it. If a deadline of the request can be met by only one of
    the two, the choice is that one. Now and then, a slow link is probed with a small load."""

    def stop(self, offer: LoadOffer) -> int:
        num_units, tokens_per_s, bytes_per_s = offer.num_units, offer.tokens_per_s, offer.bytes_per_s
        if not tokens_per_s:
            return num_units  # nothing to compare with
        if not bytes_per_s:  # load, to measure the link; but only one load at a time
            return 0 if offer.queued_bytes else num_units
        queue_s, hit_s = offer.queued_tokens / tokens_per_s, num_units * offer.unit_tokens / tokens_per_s
        wait_s, load_s = offer.queued_bytes / bytes_per_s, offer.num_bytes / bytes_per_s
        late_s = offer.latency_s + wait_s + load_s - queue_s  # the engine computes queued tokens meanwhile
        if late_s < 0.0:
            late_s = 0.0
        if offer.left_s is not None:
            left_s = offer.left_s - queue_s - offer.rest_tokens / tokens_per_s
            if (late_s > left_s) != (hit_s > left_s):
                return num_units if hit_s > left_s else 0
        loading = late_s + NUM_BEHIND * wait_s / (wait_s + IDLE_S) * load_s
        computing = hit_s + NUM_BEHIND * queue_s / (queue_s + IDLE_S) * hit_s
        if loading <= computing:
            return num_units
        if offer.queued_bytes:
            return 0
        return int(num_units * min(1.0, TRIAL * offer.age_s / (offer.latency_s + load_s)))


def chosen_stop(choice: LoadChoice, offer: LoadOffer, most: int) -> int:
    """The answer of `choice`. `InvalidArgument` unless it is an integer in `[0, most]`: the program may have written
    `choice`."""
    stop = choice.stop(offer)
    return stop if type(stop) is int and 0 <= stop <= most else check_int("load_choice.stop", stop, 0, most)


def load_choice_of(value: Any) -> LoadChoice | None:
    """The choice for `OffloadConfig.load_choice`, which is a name or an object. None: load everything."""
    if isinstance(value, str):
        return CostChoice() if value == "cost" else None
    return value  # type: ignore[no-any-return]
