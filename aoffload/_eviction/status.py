"""Reports of learned eviction: the order that each tier uses, and what was learned about hints."""

from __future__ import annotations

import enum

import attrs

from .._common.tiers import Tier
from .._kernel.events import Event


class EvictionRule(enum.Enum):
    """The eviction order of a tier."""

    LRU = "lru"
    """Least recently used first."""
    LEARNED = "learned"
    """The least valuable blocks first: those with the fewest expected hits for the space and the time that they
    take."""
    CHECKPOINTS = "checkpoints"
    """The order of layouts with a recurrent state. It weighs the computation that each checkpoint saves."""
    OWN = "own"
    """An order that the program provides."""


_RULES = {EvictionRule.LRU: "LRU", EvictionRule.LEARNED: "the learned order"}


@attrs.frozen
class TierEviction:
    """A tier with learned eviction, and the measurements that decide between the learned order and LRU. A guard
    simulates both orders, and the tier uses the order with more hits. Older hits count less."""

    tier: Tier
    rule: EvictionRule
    """The order in use: LEARNED or LRU."""
    learned_hits: float
    lru_hits: float
    num_switches: int
    """Switches between the two orders. A tier starts with LRU."""
    num_evicted_learned: int
    """Blocks evicted while the learned order was in use."""
    num_evicted_lru: int
    """Blocks evicted while LRU was in use."""


@attrs.frozen
class BucketStatistics:
    """Statistics about prompts with one kind of hint, or without a hint. Older requests count less."""

    category: str
    """The category that the hints name; empty if they name none."""
    predicted_s: float | None
    """Seconds until the return that the hints predict, up to a factor of 1.3; infinity if they predict no return. None
    if they predict no time, or without a hint."""
    num_requests: int | None
    """For prompts without a hint, the number of their requests: 1, 2, or 3 for 3 or more. Otherwise None."""
    num_tokens: float
    """Tokens of these prompts that became idle."""
    returned: float
    """Share of the idle tokens that were requested again."""
    median_s: float | None
    """Median seconds until idle tokens were requested again. None if none was."""


@attrs.frozen
class EvictionStatistics:
    """The state of learned eviction."""

    tiers: tuple[TierEviction, ...]
    buckets: tuple[BucketStatistics, ...]
    """The buckets that have seen prompts. They show whether hints come true."""
    num_remembered_runs: int
    """Stretches of prompts for which requests are counted."""
    num_remembered_bytes: int
    """Approximate memory that these counts use in this process."""

    def __str__(self) -> str:
        ruled = ", ".join(f"{each.tier.name.lower()} by {_RULES[each.rule]}" for each in self.tiers)
        return f"eviction: {ruled}, chosen by the guard"

    @property
    def learned(self) -> tuple[Tier, ...]:
        """The tiers that use the learned order now."""
        return tuple(each.tier for each in self.tiers if each.rule is EvictionRule.LEARNED)


@attrs.frozen
class EvictionSwitched(Event):
    """Learned eviction has switched between the learned order and LRU. `tier.rule` is the order from now on."""

    tier: TierEviction
