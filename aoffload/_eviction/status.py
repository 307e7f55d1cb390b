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
    """The blocks that are worth least first: the fewest expected hits for the space and the time that they take."""
    CHECKPOINTS = "checkpoints"
    """The order of layouts with a recurrent state, which weighs what each checkpoint saves."""
    OWN = "own"
    """An order of the program's own."""


_RULES = {EvictionRule.LRU: "LRU", EvictionRule.LEARNED: "the learned order"}


@attrs.frozen
class TierEviction:
    """A tier with learned eviction, and the measurements that decide between the learned order and LRU. The guard
    simulates both orders, and the tier uses the order with more hits. Older hits count less."""

    tier: Tier
    rule: EvictionRule
    """LEARNED, or LRU."""
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
    """What was learned about prompts with one kind of hint, or without one. Older requests count less."""

    category: str
    """The category of the hints; empty if they name none."""
    predicted_s: float | None
    """The time that the hints predict, up to a factor of 1.3; infinite if they predict no return. None: they predict
    no time, or there was no hint."""
    num_requests: int | None
    """For prompts without a hint, the number of their requests: 1, 2, or 3 for 3 or more. Otherwise None."""
    num_tokens: float
    """Tokens that became idle."""
    returned: float
    """The share of them that returned."""
    median_s: float | None
    """The median time until they returned. None: none has returned."""


@attrs.frozen
class EvictionStatistics:
    """The state of learned eviction."""

    tiers: tuple[TierEviction, ...]
    buckets: tuple[BucketStatistics, ...]
    """Those that have seen prompts: whether hints come true."""
    num_remembered_runs: int
    """Stretches of prompts whose requests are counted."""
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
