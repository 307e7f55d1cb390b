"""Which order rules in each tier whose eviction learns, and what each of both has evicted."""

from __future__ import annotations

from dataclasses import dataclass

from ..prefix import TOKEN_BYTES
from .cache import PrefixCache
from .hops import Tier
from .learning import Learning
from .observer import Moves
from .status import EvictionRule, EvictionStatistics, TierEviction

__all__ = ["Rulings"]

RUN_BYTES = 512
"""Of what is remembered, beside its tokens, for each stretch of a prompt."""


@dataclass(slots=True, eq=False)
class _Ruled:
    num_switches: int = 0
    num_before: int = 0
    """Blocks that were evicted until the last switch,"""
    num_by_learned: int = 0
    """and of these by what was learned."""


class Rulings:
    """Tells the observer when the guard of a tier switches between both orders."""

    def __init__(self, cache: PrefixCache, learning: Learning, moves: Moves) -> None:
        self._cache = cache
        self._learning = learning
        self._moves = moves
        self._learned = learning.ruled
        self._ruled = {tier: _Ruled() for tier in learning.tiers}

    def look(self) -> None:
        """Called when the guards have counted a request."""
        learned, before = self._learning.ruled, self._learned
        if learned != before:
            self._learned = learned
            for tier in self._learning.tiers:
                if (tier in learned) is not (tier in before):
                    self._switched(tier, was_learned=tier in before)

    def _switched(self, tier: Tier, *, was_learned: bool) -> None:
        ruled, num_evicted = self._ruled[tier], self._cache.tiers[tier].num_evicted
        ruled.num_switches += 1
        if was_learned:
            ruled.num_by_learned += num_evicted - ruled.num_before
        ruled.num_before = num_evicted
        self._moves.told.eviction_switched(self._tier(tier))

    def _tier(self, tier: Tier) -> TierEviction:
        ruled, num_evicted, is_learned = self._ruled[tier], self._cache.tiers[tier].num_evicted, tier in self._learned
        num_by_learned = ruled.num_by_learned + (num_evicted - ruled.num_before if is_learned else 0)
        learned_hits, lru_hits = self._learning.shadow_hits(tier)
        rule = EvictionRule.LEARNED if is_learned else EvictionRule.LRU
        return TierEviction(
            tier, rule, learned_hits, lru_hits, ruled.num_switches, num_by_learned, num_evicted - num_by_learned
        )

    def statistics(self) -> EvictionStatistics:
        num_runs, num_tokens = self._learning.num_runs, self._learning.num_tokens
        tiers = tuple(self._tier(tier) for tier in self._learning.tiers)
        return EvictionStatistics(tiers, num_runs, num_tokens * TOKEN_BYTES + num_runs * RUN_BYTES)
