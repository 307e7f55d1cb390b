"""Quotas: floors and ceilings of tenants in the host and on the disk.

The account of a run follows from the `cache_salt` of its root. The index keeps the root of a run at every split and
merge, so a watcher that hears of each block that becomes cached, or is no longer cached, counts exactly.

All copies to the host and the disk get their blocks in one place, `Stores.store`, whether they store, demote, preempt
or fetch. It asks how many units it may bring (`ask_take`). The answer follows from three rules, in this order:

    daily writes   the disk takes no more for the account than its budget has left
    ceiling        what the account holds, what copies under way bring for it, and what is asked for stay at or below
                   the ceiling. First the account's own oldest blocks are evicted. If too few are evictable, the rest is
                   refused
    floors         if too few blocks are free then, blocks of any account are evicted in the order of `AccountOrder`.
                   When the account that loses them reaches its floor, the order is asked again

A floor is a preference of the order, and no promise: `num_available` counts the evictable blocks of all accounts, so if
no account above its floor has an evictable block, the oldest of all blocks is evicted.

**After a restart**, the disk restores blocks that name the digest of their root, and not its salt. They count for the
default account until a request with that root comes. Then they move to the account of its salt, which may be above its
ceiling until its next store.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import attrs

from .._common.prefix import Root
from .._common.tiers import HIT_TIERS, Tier
from .._config.quotas import Quotas
from .._eviction.accounts import AccountOrder, Share
from .._kernel.base import CacheBase
from .._kernel.events import Event
from .._kernel.extension import Build, LedgerExtension
from .._kernel.index import Hit
from .._kernel.layout import Component
from .._kernel.records import Job, Lease, LedgerRequest, Part, Run
from .._kernel.tokens import TokenSequence
from .._tiers.write_rate import DailyBudget
from ..errors import ConfigError, IntegrityError, OutOfBlocks
from .pins import Pin, Pins, parts_under

TIERS = {Tier.HOST: "host", Tier.DISK: "disk"}
"""The tiers with quotas, and how their keys begin."""


@attrs.frozen
class AccountTier:
    """Blocks and limits of one account in one tier."""

    tier: Tier
    num_blocks: int
    """Cached blocks of the account, evictable or not."""
    num_pending: int
    """Blocks that copies under way write for the account."""
    floor: int
    ceiling: int
    """Never more than all blocks of the tier."""
    num_evicted: int
    """Blocks of the account that were evicted for other accounts."""
    num_replaced: int
    """Blocks of the account that were evicted for its own new blocks."""
    num_refused: int
    """Blocks of the account that were not stored because of the ceiling or `daily_writes`."""


@attrs.frozen
class AccountStatistics:
    """The account of one salt, or the default account."""

    name: str
    """The name of the account's quota, or the number of the account. The default account is "default"."""
    tiers: tuple[AccountTier, ...]
    num_pinned: int
    """Host blocks that pins of the account hold."""
    max_pinned: int | None
    """Host blocks that pins of the account may hold. None: no limit."""
    num_writable: int | None
    """Blocks that may be written to the disk for the account now. None: no `daily_writes`."""

    def __str__(self) -> str:
        held = [
            f"{TIERS[each.tier]} {each.num_blocks:,} blocks (floor {each.floor:,}, ceiling {each.ceiling:,}), "
            f"{each.num_evicted:,} evicted for others, {each.num_refused:,} refused"
            for each in self.tiers
        ]
        pinned = f"; {self.num_pinned:,} pinned" if self.num_pinned else ""
        return f"account {self.name}: {'; '.join(held)}{pinned}"


@attrs.frozen
class QuotaReached(Event):
    """A quota has limited a store of the account. Further limited stores are not reported until `QuotaCleared`."""

    account: str
    tier: Tier
    limit: str
    """The limit: `ceiling` or `daily_writes`."""


@attrs.frozen
class QuotaCleared(Event):
    """The account has made its first store since `QuotaReached` that no quota limited."""

    account: str
    tier: Tier


@dataclass(slots=True, eq=False)
class _Account:
    name: str
    max_pinned: int | None
    budget: DailyBudget | None
    shares: dict[Tier, Share] = field(default_factory=dict)


class QuotaAccounts(LedgerExtension):
    """The accounts of tenants (`Ledger.quotas`, `HostCache.quotas`)."""

    def __init__(self, quotas: Quotas) -> None:
        self.pins = QuotaPins(self)
        self._quotas = quotas
        self._numbers = quotas.numbers
        self._restored: dict[bytes, int] = {}
        """By digest of a root: the account of restored runs, if it is not the default one."""
        self._unknown: set[bytes] = set()
        """Digests of roots whose restored runs count for the default account."""
        self._pending: dict[int, tuple[Share, int]] = {}
        """By job id: the share that a copy under way counts in, and its number of blocks."""
        self._counted_up_to = 0
        """The id of the last job that `_count_pending` has looked at."""
        self._accounts: list[_Account] = []
        self._shares: dict[Tier, list[Share]] = {}
        """By tier, then by number of the account."""

    # -- construction ---------------------------------------------------------------------------------------------

    def on_build(self, build: Build) -> None:
        self._block_bytes = build.block_bytes
        for name, quota in zip(self._quotas.names, self._quotas.quotas, strict=True):
            pinned, daily = quota.num_bytes("pinned"), quota.num_bytes("daily_writes")
            self._accounts.append(
                _Account(
                    name,
                    None if pinned is None else pinned // build.block_bytes,
                    None if daily is None else DailyBudget(daily),
                )
            )
        build.when_sized(partial(self._add_tiers, build))

    def _add_tiers(self, build: Build) -> None:
        for tier, key in TIERS.items():
            if tier not in build.sizes:
                for number, quota in enumerate(self._quotas.quotas):
                    if any(value is not None for name, value in attrs.asdict(quota).items() if name in _needs(key)):
                        raise ConfigError(
                            "quotas",
                            f"of account {self._accounts[number].name} limit the {key}, which is not configured",
                        )
                continue
            size = build.sizes[tier]
            for account, quota in zip(self._accounts, self._quotas.quotas, strict=True):
                floor, ceiling = quota.num_bytes(f"{key}_floor"), quota.num_bytes(f"{key}_ceiling")
                most = size if ceiling is None else min(size, ceiling // build.block_bytes)
                account.shares[tier] = Share((floor or 0) // build.block_bytes, most)
            shares = self._shares[tier] = [account.shares[tier] for account in self._accounts]
            if (total := sum(share.floor for share in shares)) > size:
                raise ConfigError(
                    "quotas", f"have floors of {total:,} blocks in total on the {key}, which has {size:,} blocks"
                )
            make: Any = build.orders.pop(tier, None)
            build.set_order(tier, partial(AccountOrder, self.number_of, shares, make))

    def on_attach(self, ledger: CacheBase) -> None:
        self._cache, self._jobs, self._moves = ledger.cache, ledger.jobs, ledger.moves
        ledger.cache.watch(self)

    # -- accounts -------------------------------------------------------------------------------------------------

    def number_of(self, run: Run) -> int:
        """The number of the account of `run`."""
        salt = run.root.cache_salt
        if salt is not None:
            return self._numbers.get(salt, 0)
        return self._restored.get(run.root.digest, 0) if self._restored else 0

    def max_pinned(self, run: Run) -> int | None:
        """Host blocks that pins of the account of `run` may hold. None: the account has no limit."""
        return self._accounts[self.number_of(run)].max_pinned

    def ceiling(self, tier: Tier, number: int) -> int:
        """Blocks of `tier` that the account may hold."""
        shares = self._shares.get(tier)
        return self._cache.tiers[tier].capacity if shares is None else shares[number].ceiling

    def num_left(self, tier: Tier, number: int) -> int:
        """Blocks of `tier` that the account may store now without evicting its own."""
        self._count_pending()
        shares = self._shares.get(tier)
        if shares is None:
            return self.ceiling(tier, number)
        left, writable = shares[number].num_left(), None
        if tier is Tier.DISK:
            writable = self._num_writable(self._accounts[number])
        return left if writable is None else min(left, writable)

    def _recognise(self, root: Root) -> None:
        """Move restored runs with the digest of `root` to the account of its salt."""
        if root.digest not in self._unknown or root.cache_salt is None:
            return
        self._unknown.discard(root.digest)
        number = self._numbers.get(root.cache_salt, 0)
        if not number:
            return
        runs = [run for run in self._cache.index.runs.values() if run.root.digest == root.digest]
        moved = {part for run in runs if not self.number_of(run) for part in run.parts}
        for tier, shares in self._shares.items():
            order = self._order(tier)
            parts = [part for part in order.parts_of(0) if part in moved]
            num_blocks = sum(len(part.blocks) for part in moved if part.tier is tier)
            order.move(parts, 0, number)
            shares[0].num_cached -= num_blocks
            shares[number].num_cached += num_blocks
        self._restored[root.digest] = number

    def _order(self, tier: Tier) -> AccountOrder:
        order = self._cache.tiers[tier].order
        assert isinstance(order, AccountOrder)
        return order

    # -- counting -------------------------------------------------------------------------------------------------

    def part_changed(self, part: Part, first: int, stop: int) -> None:
        """See `BlockWatcher`."""
        shares = self._shares.get(part.tier)
        if shares is None:
            return
        root = part.run.root
        if root.weights_epoch is None and root.digest not in self._restored:  # read from a disk
            self._unknown.add(root.digest)
        shares[self.number_of(part.run)].num_cached += (part.stop - part.first - (stop - first)) * part.width

    def all_cleared(self, epoch: int) -> None:
        """See `BlockWatcher`."""
        self._unknown.clear()
        self._restored.clear()
        for shares in self._shares.values():
            for share in shares:
                share.num_cached = 0

    def _count_pending(self) -> None:
        """Count the blocks of jobs that were planned since the last call."""
        for job in reversed(self._jobs.unsettled.values()):
            if job.job_id <= self._counted_up_to:
                break
            shares = self._shares.get(job.plan.destination)
            if shares is not None:
                share, num_blocks = shares[self.number_of(job.run)], len(job.plan.destination_ids)
                share.num_pending += num_blocks
                self._pending[job.job_id] = share, num_blocks
        self._counted_up_to = self._jobs.last_id

    def on_job_settled(self, job: Job) -> None:
        if (found := self._pending.pop(job.job_id, None)) is not None:
            found[0].num_pending -= found[1]
        if job.plan.destination is Tier.DISK and job.completion is not None:
            budget = self._accounts[self.number_of(job.run)].budget
            if budget is not None:
                budget.spend(len(job.plan.destination_ids) * self._block_bytes, self._now())

    def _now(self) -> float:
        """Without a clock, the writes of an account never become older."""
        return 0.0 if self._moves.clock is None else self._moves.clock()

    def _num_writable(self, account: _Account) -> int | None:
        """Blocks that may be written to the disk for `account` now. None: no limit of its own."""
        if account.budget is None:
            return None
        left = account.budget.left(self._now()) // self._block_bytes
        return max(0, left - account.shares[Tier.DISK].num_pending)

    # -- questions ------------------------------------------------------------------------------------------------

    def on_admitted(self, request: LedgerRequest, parent: LedgerRequest | None) -> None:
        if self._unknown:
            self._recognise(request.sequence.root)

    def on_sequence(self, sequence: TokenSequence) -> None:
        if self._unknown:
            self._recognise(sequence.root)

    def ask_take(self, tier: Tier, run: Run, component: Component, num_units: int) -> int:
        if tier not in self._shares:
            return num_units
        if self._unknown:
            self._recognise(run.root)
        self._count_pending()
        number, width = self.number_of(run), component.width
        account, share = self._accounts[number], self._shares[tier][number]
        granted, limit = num_units, ""
        if tier is Tier.DISK and (writable := self._num_writable(account)) is not None and writable < granted * width:
            granted, limit = writable // width, "daily_writes"
        left = share.num_left()
        if left < granted * width:
            num_evictable = self._num_evictable(tier, number, granted * width - left)
            if left + num_evictable < granted * width:
                granted, limit = max(0, left + num_evictable) // width, "ceiling"
            if granted:
                self._replace(tier, number, granted * width - left)
        self._make_free(tier, share, granted * width)
        share.num_refused += (num_units - granted) * width
        if share.is_cut is not (granted < num_units):
            share.is_cut = not share.is_cut
            self._moves.note(QuotaReached(account.name, tier, limit) if limit else QuotaCleared(account.name, tier))
        return granted

    def _num_evictable(self, tier: Tier, number: int, enough: int) -> int:
        """Evictable blocks of the account. The count ends at `enough`."""
        found = 0
        for part in self._order(tier).unsorted_parts_of(number):
            found += len(part.blocks)
            if found >= enough:
                break
        return found

    def _replace(self, tier: Tier, number: int, num_blocks: int) -> None:
        """Evict `num_blocks` of the account's own oldest blocks, in whole units."""
        share, order = self._shares[tier][number], self._order(tier)
        while num_blocks > 0 and (part := order.oldest_of(number)) is not None:
            num_units = min(-(-num_blocks // part.width), part.stop - part.first)
            self._evict(part, num_units)
            share.num_replaced += num_units * part.width
            num_blocks -= num_units * part.width

    def _make_free(self, tier: Tier, taker: Share, num_blocks: int) -> None:
        """Evict blocks of any account until `num_blocks` are free. The caller has checked `num_available`."""
        pool, order, shares = self._cache.tiers[tier].pool, self._order(tier), self._shares[tier]
        while (short := num_blocks - pool.num_free) > 0:
            part = order.oldest()
            assert part is not None, "more blocks than `num_available`"
            num_units = min(-(-short // part.width), order.num_evictable(part))
            loser = shares[self.number_of(part.run)]
            self._evict(part, num_units)
            if loser is taker:
                loser.num_replaced += num_units * part.width
            else:
                loser.num_evicted += num_units * part.width

    def _evict(self, part: Part, num_units: int) -> None:
        blocks = self._cache.tiers[part.tier]
        blocks.trim(part, num_units)
        blocks.num_evicted += num_units * part.width
        self._cache.tidy(part.run)

    # -- reports --------------------------------------------------------------------------------------------------

    def statistics(self) -> tuple[AccountStatistics, ...]:
        """The statistics of each account, by number: first the default account, then the salts in the order of the
        configuration."""
        self._count_pending()
        num_pinned = self.pins.num_pinned()
        return tuple(
            AccountStatistics(
                account.name,
                tuple([_seen(tier, share) for tier, share in account.shares.items()]),
                num_pinned.get(number, 0),
                account.max_pinned,
                self._num_writable(account),
            )
            for number, account in enumerate(self._accounts)
        )

    def report_blocks(self, tier: Tier) -> Iterable[Any]:
        """Reports no blocks. Raises `IntegrityError` if the counts of an account are wrong."""
        for number, share in enumerate(self._shares.get(tier, ())):
            runs = [run for run in self._cache.index.runs.values() if self.number_of(run) == number]
            expected = sum(len(part.blocks) for run in runs for part in run.parts_in(tier))
            if share.num_cached != expected:
                name = self._accounts[number].name
                raise IntegrityError(f"{tier.name} blocks of account {name} are miscounted: {share}, {expected}")
            pending = sum(num_blocks for counted, num_blocks in self._pending.values() if counted is share)
            if share.num_pending != pending or not self._pending.keys() <= self._jobs.unsettled.keys():
                raise IntegrityError(f"{tier.name} blocks under way are miscounted: {share}, {pending}")
        return ()


def _needs(key: str) -> tuple[str, ...]:
    """The keys of a quota that need the tier whose keys begin with `key`."""
    return (f"{key}_floor", f"{key}_ceiling", *(("daily_writes",) if key == "disk" else ()))


def _seen(tier: Tier, share: Share) -> AccountTier:
    return AccountTier(
        tier, share.num_cached, share.num_pending, share.floor, share.ceiling, share.num_evicted, share.num_replaced,
        share.num_refused,
    )  # fmt: skip


class QuotaPins(Pins):
    """`Ledger.pins` with quotas: the pins of an account hold at most `Quota.pinned` of the host, and as much of the
    device."""

    def __init__(self, accounts: QuotaAccounts) -> None:
        super().__init__()
        self._accounts = accounts

    def _check_share(
        self, hit: Hit, wishes: list[Any], among: Collection[Pin], max_share: float, argument: str
    ) -> None:
        super()._check_share(hit, wishes, among, max_share, argument)
        if not hit.path or (bound := self._accounts.max_pinned(hit.path[-1])) is None:
            return
        number = self._accounts.number_of(hit.path[-1])
        for tier in HIT_TIERS:
            kept = self._kept(tier).get(number, set())
            num_kept = sum(len(part.blocks) for part in kept)
            added = self._num_added(hit, [wish for wish in wishes if wish.tier is tier], kept)
            if num_kept + added > bound:
                raise OutOfBlocks(added, max(0, bound - num_kept), retryable=added <= bound, argument="quotas")

    def _kept(self, tier: Tier) -> dict[int, set[Part]]:
        """By account: the parts of `tier` that its pins hold."""
        leases: dict[int, list[Lease]] = {}
        for lease in self.report_leases():
            if lease.tier is tier:
                leases.setdefault(self._accounts.number_of(lease.run), []).append(lease)
        return {number: parts_under(own) for number, own in leases.items()}

    def num_pinned(self) -> dict[int, int]:
        """By account: the blocks of the host that its pins hold. Accounts without pins are left out."""
        return {number: sum(len(part.blocks) for part in parts) for number, parts in self._kept(Tier.HOST).items()}
