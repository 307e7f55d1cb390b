"""Learned eviction on the seam of the ledger: `Ledger.eviction`."""

from __future__ import annotations

from functools import partial

from .._common.arguments import check_text
from .._common.prefix import Prefix
from .._common.tiers import Tier
from .._config.tiers import LearnedEviction
from .._kernel.base import CacheBase, check_time
from .._kernel.extension import Build, LedgerExtension
from .._kernel.records import LedgerRequest
from ..errors import InvalidArgument
from .accounts import AccountOrder
from .hints import Hints
from .learned import LearnedOrder, Learning, Rulings
from .status import EvictionStatistics

MAX_CATEGORY = 256
"""Maximum characters of the category of a hint, because the ledger keeps it."""


class Eviction(LedgerExtension):
    """`Ledger.eviction` and `HostCache.eviction`, if eviction learns."""

    learning: Learning

    def __init__(self, choice: LearnedEviction) -> None:
        self._choice = choice

    def on_build(self, build: Build) -> None:
        build.when_sized(partial(self._set_orders, build))

    def _set_orders(self, build: Build) -> None:
        sizes: dict[Tier, int] = {tier: size for tier, size in build.sizes.items() if tier is not Tier.DEVICE}
        if self._choice.device:
            sizes[Tier.DEVICE] = build.sizes[Tier.DEVICE]
        self.learning = Learning(build.layout, sizes)
        for tier in sizes:
            build.set_order(tier, partial(self.learning.new_order, tier))

    def on_attach(self, ledger: CacheBase) -> None:
        self._ledger, self._cache = ledger, ledger.cache
        self._take_orders()
        self._rulings = Rulings(ledger.cache, self.learning, ledger.moves)
        self._hints = Hints(ledger.cache, self.learning, self._rulings, ledger.moves)

    def _take_orders(self) -> None:
        present = {tier: self._cache.tiers[tier].order for tier in self.learning.tiers}
        self.learning.orders = {
            tier: order for tier, order in present.items() if isinstance(order, (LearnedOrder, AccountOrder))
        }

    # -- the verbs ------------------------------------------------------------------------------------------------

    def hint(self, prefix: Prefix, *, expires_at: float, category: str = "") -> int:
        """Evict the cached part of `prefix` last, until it is requested, or until `lapse` of the ledger is called with
        `expires_at` or a later time. Pins nothing. Returns the number of tokens spared.

        The hints of one `category` have no effect while less than a quarter of them come true. The ledger keeps the
        records of 64 categories."""
        sequence = self._ledger.sequence_of(prefix)
        expires_at, category = check_time("expires_at", expires_at), check_text("category", category)
        if len(category) > MAX_CATEGORY:
            raise InvalidArgument("category", f"must have at most {MAX_CATEGORY} characters, got {len(category):,}")
        num_units = self._hints.hint(sequence, expires_at, category)
        self._ledger.end_call()
        return num_units * self._cache.layout.unit_tokens

    @property
    def num_hints(self) -> int:
        """Hints in force."""
        return len(self._hints)

    def statistics(self) -> EvictionStatistics:
        return self._rulings.statistics()

    # -- hooks ----------------------------------------------------------------------------------------------------

    def on_admitted(self, request: LedgerRequest, parent: LedgerRequest | None) -> None:
        if request.store_limit and parent is None:  # a fork requests nothing new
            self._hints.seen(request, 0, request.sequence.num_prompt_units)

    def on_published(self, request: LedgerRequest, first: int) -> None:
        """Tell the orders how often the new units were requested."""
        lease = request.leases.get(Tier.DEVICE)
        if lease is None or not request.store_limit:
            return
        is_first = first == request.ready_stop
        if is_first or first < request.sequence.num_prompt_units:
            self.learning.mark(self._cache, request, lease.run, 0 if is_first else first)

    def on_finishing(self, request: LedgerRequest) -> None:
        self._hints.seen(request, request.sequence.num_prompt_units, request.published)

    def on_released(self, request: LedgerRequest) -> None:
        self.learning.uses.pop(request, None)

    def on_reset(self, tier: Tier | None) -> None:
        if tier is None:
            self._take_orders()
            self._hints.clear()

    def ask_next_lapse(self) -> float:
        return self._hints.next_lapse

    def on_lapse(self, now: float) -> None:
        self._hints.lapse(now)
