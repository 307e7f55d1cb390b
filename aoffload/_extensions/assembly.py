"""`Ledger`: the kernel with its features; and `AnyLedger`, the base of `Ledger` and `HostCache`.

The configuration decides which features a ledger has. `built_in` makes their extensions, and the constructor adds the
program's own extensions after them. Each feature has its verbs on a handle:

Handle | verbs | present
--- | --- | ---
`pins` | `hold`, `release`, `drop` | always
`transfers` | `prefetch`, `demote`, `cancel` | always; a `HostCache` only cancels
`hints` | `apply`, `apply_all`, `reject` | always
`forks`, `preemption`, `invalidation`, `overlap` | | always; not in a `HostCache`
`weights` | `set` | always
`reports` | `requests`, `holders` | always
`write_back` | `plan` | if `store_policy` has a watermark; not in a `HostCache`
`eviction` | `returns`, `done` | if `eviction` is learned
`quotas` | `statistics` | if `quotas` is configured
`disk`, `remote`, `fetches` | | if `disk` or `remote` is configured

An extension that needs no configuration is made when its handle is first read, so an unused feature costs nothing. The
handle of a feature that is off raises `ConfigError`, which names the configuration key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import attrs

from .._common.arguments import check_int, check_type, shown
from .._common.tiers import Tier
from .._config.config import MAX_BLOCKS, OffloadConfig
from .._config.tiers import LearnedEviction
from .._eviction.checkpoints import CheckpointEviction
from .._eviction.extension import Eviction
from .._eviction.status import EvictionStatistics
from .._kernel.base import CacheBase, configured_groups
from .._kernel.events import Observer
from .._kernel.extension import LedgerExtension
from .._kernel.hooks import GuardedOrder
from .._kernel.layout import Layout
from .._kernel.ledger import CoreLedger
from .._kernel.plans import TierStatistics
from .._kernel.protocols import DevicePool
from .._kernel.records import LedgerRequest
from .._tiers.disk.extension import DiskExtension
from .._tiers.fetch.rules import Fetches
from .._tiers.remote.extension import RemoteCounts, RemoteExtension
from ..errors import ConfigError, InvalidArgument
from .explain import Reports
from .forks import Forks
from .hints import Hints, HintStatistics
from .integrity import check_integrity
from .invalidation import Invalidation
from .lazy import WriteBack
from .load_choice import Loadable, loadable
from .overlap import Overlap
from .pins import Pins
from .preemption import Preemptions
from .prefetch import DeviceTransfers
from .quotas import AccountStatistics, QuotaAccounts
from .status import explained, plain
from .store_policies import (
    EagerStore,
    LazyStore,
    NoStore,
    RequestCounts,
    StorePolicies,
    StorePolicy,
    store_policy_for,
)
from .transfers import CacheTransfers
from .weights import Weights

Handle = TypeVar("Handle", bound=LedgerExtension)


def built_in(
    config: OffloadConfig, layout: Layout, num_device_blocks: int
) -> tuple[StorePolicy, list[LedgerExtension]]:
    """The store policy, and the extensions that `config` needs."""
    check_int("num_device_blocks", num_device_blocks, 2, MAX_BLOCKS)
    found: list[LedgerExtension] = []
    counts = None
    if config.disk is not None or config.remote is not None:
        counts = RequestCounts(has_remote=config.remote is not None)
        if config.disk is not None:
            found.append(DiskExtension(config.disk, counts))
        if config.remote is not None:
            found.append(RemoteExtension(config.remote, counts))
    policy = store_policy_for(config.store_policy, layout, num_device_blocks - 1)
    if type(policy) not in (EagerStore, LazyStore):
        found.append(StorePolicies(policy))
    is_named = type(config.eviction) is str and config.eviction == "learned"
    choice = LearnedEviction() if is_named else config.eviction
    if isinstance(choice, LearnedEviction):
        found.append(Eviction(choice))
    elif layout.recurrent is not None and not callable(choice):
        found.append(CheckpointEviction())
    if config.quotas is not None:  # after learned eviction, whose orders the accounts have
        accounts = QuotaAccounts(config.quotas)
        found += [accounts, accounts.pins]
    if counts is not None:
        found += [counts, Fetches()]
    if config.weights_epoch:
        found.append(Weights())
    return policy, found


@attrs.frozen
class LedgerStatistics:
    """A snapshot of the counts of blocks, requests and jobs, returned by `statistics()` of a ledger."""

    device: TierStatistics
    host: TierStatistics
    num_requests: int
    num_waiting: int
    num_jobs: int
    num_late_completions: int
    num_pins: int
    """Pins of `Pins.hold` that are held now. The leases of requests do not count."""
    loads_paused: bool
    """Whether a `HostCache` loads nothing, because more than `max_quarantined_share` of the blocks are in
    quarantine."""
    disk: TierStatistics | None
    """None without a disk."""
    custom: TierStatistics | None
    """None without a `LowerTier` of the program's own."""
    remote: RemoteCounts | None
    """None without a remote store."""
    learned: tuple[Tier, ...]
    """The tiers that use the learned eviction order now, instead of LRU."""
    eviction: EvictionStatistics | None
    """None unless eviction is learned."""
    weights_epoch: str
    """The weights' epoch; empty if none is set."""
    num_weights_changes: int
    """Number of changes of the weights' epoch."""
    quotas: tuple[AccountStatistics, ...]
    """The account of each salt, after the default account. Empty without quotas."""
    hints: HintStatistics | None
    """The answers to the hints of `Hints.apply`. None before the first hint."""


class AnyLedger(CacheBase):
    """Base of `Ledger` and `HostCache`: the handles and reports that both have."""

    def _needed(self, kind: type[Handle], key: str) -> Handle:
        """The extension of class `kind`. `ConfigError(key)` if there is none, because the configuration has no
        `key`."""
        found = self.find(kind)
        if found is None:
            raise ConfigError(key, f"is not configured, so this {type(self).__name__} has no such feature")
        return found

    @property
    def pins(self) -> Pins:
        """Keep cached prompts from eviction."""
        return self.add_once(Pins, Pins)

    @property
    def transfers(self) -> CacheTransfers:
        """Cancel fetches; in a `Ledger`, prefetch and demote prompts."""
        return self.add_once(CacheTransfers, CacheTransfers)

    @property
    def weights(self) -> Weights:
        """Change the weights' epoch."""
        return self.add_once(Weights, Weights)

    @property
    def hints(self) -> Hints:
        """Act on hints, in which clients predict the future of their prompts."""
        return self.add_once(Hints, Hints)

    @property
    def reports(self) -> Reports:
        """The holders of device blocks, and the cause of each request's wait."""
        return self.add_once(Reports, Reports)

    @property
    def eviction(self) -> Eviction:
        """Predict when prompts return. `ConfigError("eviction")` unless eviction is learned."""
        return self._needed(Eviction, "eviction")

    @property
    def quotas(self) -> QuotaAccounts:
        """The accounts of tenants. `ConfigError("quotas")` without quotas."""
        return self._needed(QuotaAccounts, "quotas")

    @property
    def disk(self) -> DiskExtension:
        """Plan the stores of the disk. `ConfigError("disk")` without a disk."""
        return self._needed(DiskExtension, "disk")

    @property
    def remote(self) -> RemoteExtension:
        """Plan the stores of the remote tier. `ConfigError("remote")` without a remote tier."""
        return self._needed(RemoteExtension, "remote")

    @property
    def fetches(self) -> Fetches:
        """Fetch prompts from the tiers below the host. `ConfigError("disk")` if there is no such tier."""
        if self.cache.has_lower_tiers:  # perhaps only the program's own `LowerTier`
            return self.add_once(Fetches, Fetches)
        return self._needed(Fetches, "disk")

    # -- verbs that differ ----------------------------------------------------------------------------------------

    def loadable(self, request: Any, max_tokens: int | None = None) -> Loadable | None:
        """See `Ledger.loadable`."""
        raise NotImplementedError

    # -- reports and checks ---------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Requests in the wait queue."""
        return 0

    @property
    def loads_paused(self) -> bool:
        """Whether loads are paused, because too many of an engine's blocks are in quarantine."""
        return False

    def statistics(self) -> LedgerStatistics:
        """The counts of blocks, requests and jobs."""
        tiers = {tier.tier: tier.statistics() for tier in self.jobs.tiers.values()}
        pins, remote, eviction = self.find(Pins), self.find(RemoteExtension), self.find(Eviction)
        weights, hints = self.find(Weights), self.find(Hints)
        learned = None if eviction is None else eviction.statistics()
        accounts = self.find(QuotaAccounts)
        return LedgerStatistics(
            tiers[Tier.DEVICE], tiers[Tier.HOST], len(self.live_requests), self.num_waiting,
            len(self.jobs.unsettled), self.jobs.num_late,
            0 if pins is None else len(pins.held), self.loads_paused, tiers.get(Tier.DISK), tiers.get(Tier.CUSTOM),
            None if remote is None else remote.counts, () if learned is None else learned.learned,
            learned, *(("", 0) if weights is None else (weights.epoch, weights.num_changes)),
            () if accounts is None else accounts.statistics(), None if hints is None else hints.statistics(),
        )  # fmt: skip

    def explain(self) -> str:
        """`reports` as a table to print: the requests, the cause of each wait, and the holders of device blocks."""
        found = self.statistics()
        live = f"{found.num_requests:,} request{'' if found.num_requests == 1 else 's'}"
        if found.remote is not None and (moving := found.remote.num_loads + found.remote.num_stores):
            live += f", {moving:,} cell{'' if moving == 1 else 's'} in transit"
        lower = [("host", found.host), ("disk", found.disk), ("custom", found.custom)]
        below = [tier.counted(name) for name, tier in lower if tier is not None and tier.num_blocks]
        more = [f"weights' epoch: {plain(found.weights_epoch)}"] if found.weights_epoch else []
        more += [] if found.hints is None else [str(found.hints)]
        about = "\n".join((self._about(found, live), *below, *self._evicts(found), *more, *map(str, found.quotas)))
        return explained(about, self.reports.requests(), self.reports.holders())

    def _about(self, found: LedgerStatistics, live: str) -> str:
        """The first line of `explain`. `live` counts the requests."""
        return f"{found.device.counted('device')}; {live}, {found.num_waiting:,} waiting"

    def _evicts(self, found: LedgerStatistics) -> tuple[str, ...]:
        """A line of text about the eviction order, if it is not the default."""
        if found.eviction is not None:
            return (str(found.eviction),)
        order = self.cache.tiers[Tier.HOST].order
        if not isinstance(order, GuardedOrder):
            return ()
        return (f"eviction: custom order {plain(order.name)}",)

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless every block has exactly one owner and every reference belongs to a lease."""
        check_integrity(self)


def check_ledger(name: str, value: object) -> AnyLedger:
    """`InvalidArgument` naming the argument `name` unless `value` is a `Ledger` or a `HostCache`."""
    if not isinstance(value, AnyLedger):
        raise InvalidArgument(name, f"must be a Ledger or a HostCache, got {shown(value)}")
    return value


class Ledger(AnyLedger, CoreLedger):
    """Decides which block holds which KV and which requests may use it. Its methods are the basic verbs. Each further
    feature has its verbs on a handle, such as `pins`.

    `num_device_blocks` is the number of rows of the KV tensors, the null block 0 included. `block_bytes` is the size of
    one block over all regions; it only bounds bytes in flight and per job, and converts `host_bytes` to blocks.

    The ledger allocates the device blocks. For an engine that has its own block pool and prefix cache, use a
    `HostCache` instead. `clock` counts seconds, such as `time.monotonic`. Learned eviction, the daily writes of quotas
    and the ages in reports use it. `extensions`: features that the program adds (docs/extending.md).
    """

    def __init__(
        self,
        config: OffloadConfig,
        num_device_blocks: int,
        *,
        block_bytes: int = 1,
        device_pool: DevicePool | None = None,
        clock: Callable[[], float] | None = None,
        observer: Observer | None = None,
        extensions: Iterable[LedgerExtension] = (),
    ) -> None:
        check_type("config", config, OffloadConfig)
        policy, found = built_in(config, Layout.of(configured_groups(config)), num_device_blocks)
        if policy.num_watermark_blocks:
            found.append(WriteBack(policy))
        self._stores_nothing = isinstance(policy, NoStore)
        CoreLedger.__init__(
            self, config, num_device_blocks, block_bytes=block_bytes, device_pool=device_pool, clock=clock,
            observer=observer, built_in=found, extensions=extensions,
        )  # fmt: skip

    @property
    def transfers(self) -> DeviceTransfers:
        """Prefetch and demote prompts."""
        return self.add_once(DeviceTransfers, DeviceTransfers)

    @property
    def forks(self) -> Forks:
        """Start requests that share the blocks of others."""
        return self.add_once(Forks, Forks)

    @property
    def preemption(self) -> Preemptions:
        """Let requests give up their blocks and continue later."""
        return self.add_once(Preemptions, lambda: Preemptions(stores_nothing=self._stores_nothing))

    @property
    def invalidation(self) -> Invalidation:
        """Withdraw the KV that a failed forward has committed."""
        return self.add_once(Invalidation, Invalidation)

    @property
    def overlap(self) -> Overlap:
        """Begin steps before the loads of their requests are over."""
        return self.add_once(Overlap, Overlap)

    @property
    def write_back(self) -> WriteBack:
        """Store blocks that are about to be evicted. `ConfigError("store_policy")` unless the store policy has a
        watermark."""
        return self._needed(WriteBack, "store_policy")

    @property
    def writes_back(self) -> bool:
        """Whether the store policy has a watermark."""
        return self.find(WriteBack) is not None

    @property
    def num_waiting(self) -> int:
        """Requests in the wait queue."""
        return len(self.admission.queue.extending) + len(self.admission.queue.allocating)

    def loadable(self, request: LedgerRequest, max_tokens: int | None = None) -> Loadable | None:
        """The load that `plan_load` would plan now. None if there is nothing to load, or if the load was planned
        before."""
        return loadable(self, request, max_tokens)

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless every block has exactly one owner and every reference belongs to a lease."""
        check_integrity(self, self.admission.queue)
