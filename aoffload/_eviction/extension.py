"""Learned eviction on the seam of the ledger: `Ledger.eviction`."""

from __future__ import annotations

from functools import partial

from .._common.arguments import check_text, shown
from .._common.hints import MAX_CATEGORY
from .._common.prefix import Prefix
from .._common.tiers import Tier
from .._config.tiers import LearnedEviction
from .._kernel.base import CacheBase, check_time
from .._kernel.extension import Build, LedgerExtension
from .._kernel.records import LedgerRequest
from ..errors import InvalidArgument
from .accounts import AccountOrder
from .learned import GuardReports, LearnedOrder, Learning
from .returns import NEVER
from .status import EvictionStatistics


class Eviction(LedgerExtension):
    """Takes predictions for learned eviction (`Ledger.eviction`, `HostCache.eviction`)."""

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
        self._reports = GuardReports(ledger.cache, self.learning, ledger.moves)
        self.learning.times.clock_of = lambda: ledger.moves.clock

    def _take_orders(self) -> None:
        present = {tier: self._cache.tiers[tier].order for tier in self.learning.tiers}
        self.learning.orders = {
            tier: order for tier, order in present.items() if isinstance(order, (LearnedOrder, AccountOrder))
        }

    # -- the verbs ------------------------------------------------------------------------------------------------

    def returns(self, prefix: Prefix, *, in_s: float | None = None, category: str = "") -> int:
        """Predict that `prefix` is requested again in about `in_s` seconds. Without a time, the prediction is the usual
        time of prompts with the same `category`. Returns the number of cached tokens of `prefix`.

        A prediction counts more, the more earlier predictions of about the same time and the same category have come
        true. It pins nothing. A later call for the same prompt replaces the prediction, and a request for the prompt
        ends it.
        """
        if in_s is not None:
            in_s = check_time("in_s", in_s)
            if not in_s >= 0:
                raise InvalidArgument("in_s", f"must be at least 0 seconds, got {shown(in_s)}")
        return self._hint(prefix, in_s, category)

    def done(self, prefix: Prefix, *, category: str = "") -> int:
        """Predict that `prefix` is not requested again. The call otherwise works like `returns`."""
        return self._hint(prefix, NEVER, category)

    def _hint(self, prefix: Prefix, in_s: float | None, category: str) -> int:
        sequence, category = self._ledger.sequence_of(prefix), check_text("category", category)
        if len(category) > MAX_CATEGORY:
            raise InvalidArgument("category", f"must have at most {MAX_CATEGORY} characters, got {len(category):,}")
        num_units = self.learning.hinted(self._cache, sequence, in_s, category)
        self._ledger.end_call()
        return num_units * self._cache.layout.unit_tokens

    def statistics(self) -> EvictionStatistics:
        """The state of learned eviction and its counts at this moment."""
        return self._reports.statistics()

    # -- hooks ----------------------------------------------------------------------------------------------------

    def on_admitted(self, request: LedgerRequest, parent: LedgerRequest | None) -> None:
        if request.store_limit and parent is None and self.learning.began(request):  # a fork requests nothing new
            self._reports.report_switches()

    def on_finishing(self, request: LedgerRequest) -> None:
        if request.store_limit:
            self._ended(request, max(request.published, request.sequence.num_prompt_units))

    def on_leaving(self, request: LedgerRequest, is_last: bool) -> None:
        if is_last and self.learning.is_live(request):  # it leaves without having finished
            self._ended(request, request.sequence.num_prompt_units)

    def _ended(self, request: LedgerRequest, stop: int) -> None:
        lease, run = request.leases.get(Tier.DEVICE), None
        if lease is not None:
            run = lease.run
        else:  # the last run that has no units of other prompts
            for found, agreed in self._cache.index.walk(request.sequence, stop):
                run = found if agreed == found.stop else run
        self.learning.ended(self._cache, request, stop, run)

    def on_reset(self, tier: Tier | None) -> None:
        if tier is None:
            self._take_orders()
