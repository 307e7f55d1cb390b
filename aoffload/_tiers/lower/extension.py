"""`LowerTier`: a tier below the host that the program provides, on the seam of the ledger.

The index has the blocks of the tier. So the ledger decides which block of the tier holds which KV, which blocks are
stored and evicted, and which are fetched into the host. The program provides the copies: see `TransportTier`.
"""

from __future__ import annotations

import math

from ..._common.arguments import check_int, number_of, shown
from ..._common.tiers import Tier
from ..._config.config import MAX_BLOCKS
from ..._kernel.base import CacheBase
from ..._kernel.extension import Build, LedgerExtension
from ..._kernel.plans import TransferPlan
from ..._kernel.pools import ExtentPool, TierBlocks
from ...errors import ConfigError, InvalidArgument
from .rules import stores_to


class LowerTier(LedgerExtension):
    """A tier that the program adds: `Tier.CUSTOM`, with `num_blocks` blocks. Pass it to a runtime or a ledger in
    `extensions`. A runtime also needs the tier's copies (see `LocalTransport`).

    The tier stores the blocks that the host evicts next. A request fetches blocks of its prompt from the tier into the
    host. `timeouts_s`: seconds after which a load and a store are given up. None: `transfer_timeout_s` and
    `store_timeout_s`. A derived class may override the hooks of `LedgerExtension`; it has to call `super` in `on_build`
    and `on_attach`.
    """

    tier = Tier.CUSTOM

    def __init__(self, num_blocks: int, *, timeouts_s: tuple[float, float] | None = None) -> None:
        self.num_blocks = check_int("num_blocks", num_blocks, 1, MAX_BLOCKS)
        self._timeouts_s = None if timeouts_s is None else _checked(timeouts_s)

    def on_build(self, build: Build) -> None:
        pool, timeouts_s = ExtentPool(self.num_blocks), self._timeouts_s
        build.add_tier(
            self.tier, self.num_blocks, lambda order: TierBlocks(self.tier, pool, order, timeouts_s=timeouts_s)
        )

    def on_attach(self, ledger: CacheBase) -> None:
        if self.tier not in ledger.jobs.tiers:
            raise ConfigError("extensions", f"{type(self).__name__}.on_build must call super().on_build")
        self._ledger = ledger
        self._stores = stores_to(ledger, self.tier)

    def plan_stores(self, max_blocks: int) -> tuple[TransferPlan, ...]:
        """Plan stores of the blocks that the host evicts next, at most `max_blocks` blocks. Cheap if nothing has
        changed. A runtime calls it. If you use a ledger alone, call it after each step."""
        self._ledger.hooks.refuse_verb()
        check_int("max_blocks", max_blocks, 0)
        if not self._stores.are_due:
            return ()
        return self._ledger.plans_of(self._stores.plan(max_blocks, is_idle=False, only_requested_twice=False))


def _checked(timeouts_s: object) -> tuple[float, float]:
    if isinstance(timeouts_s, (tuple, list)) and len(timeouts_s) == 2:
        load_s, store_s = map(number_of, timeouts_s)
        if load_s is not None and store_s is not None and min(load_s, store_s) > 0 and max(load_s, store_s) < math.inf:
            return load_s, store_s
    raise InvalidArgument("timeouts_s", f"must be two numbers of seconds above 0, or None, got {shown(timeouts_s)}")
