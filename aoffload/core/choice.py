"""Load or compute: what of a hit is loaded, by what both would cost.

    cost of loading n tokens      max(A, Q) + (all - n) / C           this request waits for its first token
                                  + 2 busy(Q) (hit - n) / C           those behind it wait for what it computes
                                  + 2 busy(W) bytes(n) / bandwidth    and for what it loads

A is when the n tokens have arrived, W the time that what is queued on the hop takes, Q the time that queued compute
takes, C the speed of computing, and busy(t) = t / (t + 0.2 s): where nothing is queued nobody waits behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..arguments import check_int

__all__ = ["CostChoice", "LoadChoice", "LoadOffer", "Loadable", "TierOffer", "chosen_stop", "load_choice_of"]

IDLE_S = 0.2
"""So much queued makes a queue half as busy as an endless one."""
NUM_BEHIND = 2.0
"""Requests that what one takes of an endless queue's time is expected to delay."""


@dataclass(slots=True, eq=False)
class Loadable:
    """What a load would bring: units `[start, stop)`, and the blocks to copy for them."""

    start: int
    stop: int
    num_blocks: int


@dataclass(slots=True, eq=False)
class TierOffer:
    """The part of a hit that one tier has, and how the hop is doing that brings it."""

    num_units: int
    num_bytes: int
    queued_bytes: int = 0
    """To be copied before these."""
    latency_s: float = 0.0
    bytes_per_s: float | None = None
    """Of late; None: not known."""
    service_bytes: int = 0
    """In service now."""
    service_s: float = 0.0
    """For how long they have been: the hop is not faster than that."""

    @property
    def seconds_per_byte(self) -> float:
        """0 as long as nothing was measured: the first load is the measurement."""
        found = 1.0 / self.bytes_per_s if self.bytes_per_s else 0.0
        if self.service_bytes and (at_least := self.service_s / self.service_bytes) > found:
            return at_least
        return found

    @property
    def arrives_s(self) -> float:
        """Until all of it has arrived."""
        return self.latency_s + (self.queued_bytes + self.num_bytes) * self.seconds_per_byte


@dataclass(slots=True, eq=False)
class LoadOffer:
    """What could be loaded for one request, and how the engine is doing that would compute it instead."""

    unit_tokens: int
    tiers: Sequence[TierOffer]
    """In the order of their tokens: the units of a tier follow those of the one before it."""
    rest_tokens: int
    """Behind the hit: computed in any case."""
    tokens_per_s: float | None
    """Speed of computing; None: not known."""
    queued_tokens: int = 0
    """To be computed before this request."""
    left_s: float | None = None
    """Until the request's deadline; None: it has none."""

    @property
    def num_units(self) -> int:
        return sum([tier.num_units for tier in self.tiers])

    def first_token_s(self, num_tiers: int) -> float:
        """Until the first token if what the first `num_tiers` have is loaded. What is not known takes no time."""
        tiers, speed = self.tiers, self.tokens_per_s
        arrived_s = max([tier.arrives_s for tier in tiers[:num_tiers]], default=0.0)
        if not speed:
            return arrived_s
        num_tokens = self.rest_tokens + self.unit_tokens * sum([tier.num_units for tier in tiers[num_tiers:]])
        return max(arrived_s, self.queued_tokens / speed) + num_tokens / speed


class LoadChoice(Protocol):
    """Decides what of a hit is loaded."""

    def stop(self, offer: LoadOffer) -> int:
        """How many units of the hit are loaded, from the first one on; the others are computed. Called for every
        request with a host hit, in the ledger's thread."""
        ...


class CostChoice:
    """Loads what the first tiers have, up to the one where the cost is least. With a deadline: where that meets it, if
    anything does."""

    def stop(self, offer: LoadOffer) -> int:
        speed = offer.tokens_per_s
        if not speed:
            return offer.num_units  # nothing to compare with
        unit_s, start_s = offer.unit_tokens / speed, offer.queued_tokens / speed
        saved_s = unit_s * (1.0 + NUM_BEHIND * start_s / (start_s + IDLE_S))  # of everybody's time, by a loaded unit
        left_s, cost_s, num_units, best = offer.left_s, start_s, 0, 0
        least_s = cost_s
        if left_s is not None:  # from now on, what is left when all is computed behind what is loaded
            left_s -= offer.rest_tokens / speed + offer.num_units * unit_s
        is_late = left_s is not None and start_s > left_s
        for tier in offer.tiers:
            if tier.bytes_per_s is None and tier.queued_bytes:
                break  # somebody else's load is the measurement
            byte_s, tier_units = tier.seconds_per_byte, tier.num_units
            wait_s, load_s = tier.queued_bytes * byte_s, tier.num_bytes * byte_s
            arrived_s = tier.latency_s + wait_s + load_s
            if arrived_s > start_s:
                cost_s, start_s = cost_s + arrived_s - start_s, arrived_s
            cost_s += NUM_BEHIND * wait_s / (wait_s + IDLE_S) * load_s - tier_units * saved_s
            num_units += tier_units
            would_be_late = left_s is not None and start_s - num_units * unit_s > left_s
            if would_be_late < is_late or (would_be_late == is_late and cost_s <= least_s):
                best, least_s, is_late = num_units, cost_s, would_be_late
        return best


def chosen_stop(choice: LoadChoice, offer: LoadOffer, most: int) -> int:
    """What `choice` says, which may be a program's own. `InvalidArgument` for what is no number of units, or more."""
    stop = choice.stop(offer)
    return stop if type(stop) is int and 0 <= stop <= most else check_int("load_choice", stop, 0, most)


def load_choice_of(value: Any) -> LoadChoice | None:
    """The choice that `OffloadConfig.load_choice` names or is. None: whatever can be loaded is."""
    if isinstance(value, str):
        return CostChoice() if value == "cost" else None
    return value  # type: ignore[no-any-return]
