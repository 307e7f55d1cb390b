"""Load or compute: what of a hit is loaded, by what both would cost.

    loading costs      max(A, Q) - Q           this request waits for its first token
                       + 2 busy(W) L           those behind it wait for what it loads
    computing costs    H                       this request waits for its first token
                       + 2 busy(Q) H           those behind it wait for what it computes

A is when the hit has arrived: L the time that its copy takes, W what is queued before it, and the link's latency. H is
the time that computing the hit takes, Q what is queued before that. busy(t) = t / (t + 0.2 s): where nothing is queued
nobody waits behind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from .._arguments import check_int

IDLE_S = 0.2
"""So much queued makes a queue half as busy as an endless one."""
NUM_BEHIND = 2.0
"""Requests that what one takes of an endless queue's time is expected to delay."""
TRIAL = 0.01
"""Of the time since a link was measured last, what a load may take that only measures it again."""


@dataclass(slots=True, eq=False)
class Loadable:
    """What a load would bring: units `[start, stop)`, and the blocks to copy for them."""

    start: int
    stop: int
    num_blocks: int


@dataclass(slots=True, eq=False)
class LoadOffer:
    """What could be loaded for one request, how the link is doing that would bring it, and how the engine is doing that
    would compute it instead."""

    num_units: int
    """Of the hit."""
    num_bytes: int
    """To copy for them."""
    unit_tokens: int
    rest_tokens: int
    """Behind the hit: computed in any case."""
    tokens_per_s: float | None
    """Speed of computing; None: not known."""
    queued_tokens: int = 0
    """To be computed before this request."""
    bytes_per_s: float | None = None
    """Of the link when it was measured last, and no more than what is in flight shows; None: not known."""
    queued_bytes: int = 0
    """To be copied before these."""
    latency_s: float = 0.0
    """Of a copy, besides what its bytes take."""
    age_s: float = 0.0
    """Since the link was measured last."""
    left_s: float | None = None
    """Until the request's deadline; None: it has none."""

    @property
    def arrives_s(self) -> float:
        """Until the hit has arrived. 0 as long as nothing was measured: the first load is the measurement."""
        if not self.bytes_per_s:
            return 0.0
        return self.latency_s + (self.queued_bytes + self.num_bytes) / self.bytes_per_s

    def first_token_s(self, num_units: int) -> float:
        """Until the first token if `num_units` are loaded. What is not known takes no time."""
        arrived_s, speed = self.arrives_s if num_units else 0.0, self.tokens_per_s
        if not speed:
            return arrived_s
        num_tokens = self.rest_tokens + self.unit_tokens * (self.num_units - num_units)
        return max(arrived_s, self.queued_tokens / speed) + num_tokens / speed


class LoadChoice(Protocol):
    """Decides what of a hit is loaded."""

    def stop(self, offer: LoadOffer) -> int:
        """How many units of the hit are loaded, from the first one on; the others are computed. Called for every
        request with a host hit, in the ledger's thread."""
        ...


class CostChoice:
    """Loads the hit if that costs no more than computing it. With a deadline: what meets it, if only one of the two
    does. What was slow is tried again now and then, by a load that is small."""

    def stop(self, offer: LoadOffer) -> int:
        num_units, tokens_per_s, bytes_per_s = offer.num_units, offer.tokens_per_s, offer.bytes_per_s
        if not tokens_per_s:
            return num_units  # nothing to compare with
        if not bytes_per_s:  # somebody's load is the measurement
            return 0 if offer.queued_bytes else num_units
        queue_s, hit_s = offer.queued_tokens / tokens_per_s, num_units * offer.unit_tokens / tokens_per_s
        wait_s, load_s = offer.queued_bytes / bytes_per_s, offer.num_bytes / bytes_per_s
        late_s = offer.latency_s + wait_s + load_s - queue_s  # for who computes meanwhile
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
    """What `choice` says, which may be a program's own. `InvalidArgument` for what is no number of units, or more."""
    stop = choice.stop(offer)
    return stop if type(stop) is int and 0 <= stop <= most else check_int("load_choice", stop, 0, most)


def load_choice_of(value: Any) -> LoadChoice | None:
    """The choice that `OffloadConfig.load_choice` names or is. None: whatever can be loaded is."""
    if isinstance(value, str):
        return CostChoice() if value == "cost" else None
    return value  # type: ignore[no-any-return]
