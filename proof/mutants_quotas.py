"""Planted defects of the quotas of tenants."""

from __future__ import annotations

from .planting import Mutant

__all__ = ["QUOTA_MUTANTS"]

ORDER, QUOTAS = "aoffload._eviction.accounts", "aoffload._extensions.quotas"
CONFIG, SOURCES = "aoffload._config.quotas", "aoffload._config.sources"
STORES, LOWER = "aoffload._kernel.jobs", "aoffload._tiers.lower.rules"
TESTS = "tests/core/test_quotas.py"

QUOTA_MUTANTS = (
    Mutant(
        "a part is evicted across the floor",
        ORDER,
        "        return min(num_units, above // part.width) or num_units\n",
        "        return num_units\n",
        "a floor holds to the block",
        test=f"{TESTS}::test_a_floor_holds_to_the_block",
    ),
    Mutant(
        "a unit is evicted across the floor",
        ORDER,
        "share.num_above() >= part.width",
        "share.num_above() > 0",
        "a unit of several blocks does not cross a floor",
        test=f"{TESTS}::test_a_unit_of_two_blocks_does_not_cross_a_floor",
    ),
    Mutant(
        "no floors",
        ORDER,
        "share.num_above() >= part.width",
        "True",
        "no block of an account at its floor is evicted while another is above its floor",
        test=f"{TESTS}::test_a_scan_takes_nothing_from_a_tenant_at_its_floor",
    ),
    Mutant(
        "copies under way raise an account above its floor",
        ORDER,
        "        return max(0, self.num_cached - self.floor)\n",
        "        return max(0, self.num_cached + self.num_pending - self.floor)\n",
        "a copy may fail, so it does not count above the floor",
        test=f"{TESTS}::test_what_copies_bring_does_not_count_above_a_floor",
    ),
    Mutant(
        "a floor reserves",
        ORDER,
        "        return found\n",
        "        return found if is_above else None\n",
        "free and evictable blocks are there for all",
        test=f"{TESTS}::test_without_an_account_above_its_floor_the_oldest_block_goes",
    ),
    Mutant(
        "accounts number their uses alone",
        ORDER,
        "        self._num_uses = next(self._uses)\n",
        "",
        "above their floors, all accounts share one order",
        test=f"{TESTS}::test_accounts_compare_their_last_uses",
    ),
    Mutant(
        "the order foretells no floor",
        ORDER,
        "            above[number] = max(0, above[number] - len(part.blocks))\n",
        "",
        "the disk stores first what the host evicts first",
        test=f"{TESTS}::test_the_order_is_that_of_the_evictions",
    ),
    Mutant(
        "copies under way are above the ceiling",
        ORDER,
        "        return self.ceiling - self.num_cached - self.num_pending\n",
        "        return self.ceiling - self.num_cached\n",
        "an account never holds more than its ceiling",
        test=f"{TESTS}::test_what_copies_bring_counts_below_a_ceiling",
    ),
    Mutant(
        "a tenant at its ceiling replaces the blocks of others",
        QUOTAS,
        "            if granted:\n                self._replace(tier, number, granted * width - left)\n",
        "",
        "an account at its ceiling replaces its own blocks",
        test=f"{TESTS}::test_a_tenant_at_its_ceiling_replaces_its_own_oldest",
    ),
    Mutant(
        "blocks are evicted for a unit that does not fit",
        QUOTAS,
        "            if granted:\n                self._replace(tier, number, granted * width - left)\n",
        "            self._replace(tier, number, num_units * width - left)\n",
        "a store that is refused evicts nothing",
        test=f"{TESTS}::test_a_unit_that_does_not_fit_costs_no_block",
    ),
    Mutant(
        "the kernel stores what was refused",
        STORES,
        "            granted = min(granted, ask(self.destination, end, component, granted))\n",
        "            granted = max(granted, ask(self.destination, end, component, granted))\n",
        "an extension decides how many units a copy brings",
        test=f"{TESTS}::test_a_ceiling_of_nothing_stores_nothing",
    ),
    Mutant(
        "a flush turns over the blocks of a tenant",
        LOWER,
        "            fits = min(left, own.setdefault(number, ceiling))\n",
        "            own[number], fits = left, left\n",
        "a flush stores each block once",
        test=f"{TESTS}::test_a_flush_ends_below_a_ceiling",
    ),
    Mutant(
        "an idle disk turns over the blocks of a tenant",
        LOWER,
        "            if num_blocks <= room:\n",
        "            if True:\n",
        "an idle disk evicts nothing",
        test=f"{TESTS}::test_an_idle_disk_does_not_turn_over_the_blocks_of_a_tenant",
    ),
    Mutant(
        "writes under way are not of the day",
        QUOTAS,
        "        return max(0, left - account.shares[Tier.DISK].num_pending)\n",
        "        return left\n",
        "no more than the daily writes of a tenant are written",
        test=f"{TESTS}::test_daily_writes_are_for_each_tenant",
    ),
    Mutant(
        "restored blocks stay with the default account",
        QUOTAS,
        "        self._restored[root.digest] = number\n",
        "        del number\n",
        "the first request with a root tells whose its restored blocks are",
        test=f"{TESTS}::test_restored_blocks_move_to_their_tenant_with_its_first_call",
    ),
    Mutant(
        "restored parts stay in the order of the default account",
        QUOTAS,
        "            order.move(parts, 0, number)\n",
        "",
        "a part is in the order of its account",
        test=f"{TESTS}::test_restored_blocks_move_to_their_tenant_with_its_first_call",
    ),
    Mutant(
        "a reset leaves counts",
        QUOTAS,
        "                share.num_cached = 0\n",
        "                pass\n",
        "the counts of the accounts are exact",
        test=f"{TESTS}::test_a_reset_empties_every_account",
    ),
    Mutant(
        "each pin may hold the whole share",
        QUOTAS,
        "        if num_kept + added > bound:\n",
        "        if added > bound:\n",
        "the pins of a tenant hold its share together",
        test=f"{TESTS}::test_pins_of_a_tenant_hold_its_share_at_most",
    ),
    Mutant(
        "a configuration shows its salts",
        CONFIG,
        "converter=_salts, repr=False)\n",
        "converter=_salts)\n",
        "no report shows a salt",
        test=f"{TESTS}::test_no_report_shows_a_salt",
    ),
    Mutant(
        "a scan in the order of the accounts",
        LOWER,
        "        parts.sort(key=lambda part: part.last_use)",
        "        pass",
        "an idle disk gets blocks of every tenant",
        test=f"{TESTS}::test_an_idle_disk_gets_blocks_of_every_tenant",
    ),
    Mutant(
        "each cut is an event",
        QUOTAS,
        "            share.is_cut = not share.is_cut\n",
        "            share.is_cut = False\n",
        "an event when a quota begins to cut, and one when it ends",
        test=f"{TESTS}::test_a_store_is_cut_if_nothing_of_the_tenant_is_evictable",
    ),
)
