"""The parts of a ledger, wired once, and what its calls begin and end with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ..arguments import check_has, check_type, shown
from ..config import MAX_BLOCKS, OffloadConfig
from ..errors import ConfigError, InvalidArgument, WrongState
from ..evictions import LearnedEviction, new_order
from ..remote_tier import cell_units
from .admission import Admission
from .arguments import check_int
from .blocks import ExtentPool, FreeList, SlotPool
from .cache import PrefixCache
from .cache_transfers import CacheTransfers
from .commits import Commits
from .disk_stores import STEPS, DiskStores
from .engine_arrivals import Arrivals
from .engine_blocks import EngineTier
from .engine_matches import EngineMatches
from .engine_offers import MOST_OF_POOL, EngineOffers
from .engine_owned import EngineOwned
from .eviction import EvictionOrder, LeastRecentlyUsed
from .fetches import Fetches
from .forks import Forks
from .groups import KVCacheGroup, Layout
from .hints import AlsoLearns, Hints
from .hops import BELOW, Outcome, Tier
from .jobs import JobBook
from .kept import Step
from .last_uses import LastUses
from .learning import Learning
from .loads import Loads
from .observer import Moves
from .observing import OBSERVES, Observer
from .owners import Holding
from .pins import Pins
from .policy import AlsoCounts, checked, store_policy_of
from .pools import DevicePool, EngineBlocks
from .preemption import Preemptions
from .records import Job
from .remote_stores import RemoteStores
from .request_leases import RequestLeases
from .restores import Restores
from .rulings import Rulings
from .situation import Situation
from .stores import Stores
from .tiers import DiskBlocks, RemoteBlocks, TierBlocks
from .watermark import EvictionWatermark

__all__ = ["LedgerRooms"]


HOST_WATERMARK = 8
"""The part of the host that is stored on the disk before it is evicted."""


class LedgerRooms:
    """Makes and wires the parts of a ledger. Once it is made, only its requests come and go."""

    def __init__(
        self,
        config: OffloadConfig,
        num_device_blocks: int,
        *,
        block_bytes: int = 1,
        device_pool: DevicePool | None = None,
        engine_blocks: EngineBlocks | None = None,
        clock: Callable[[], float] | None = None,
        observer: Observer | None = None,
    ) -> None:
        check_type("config", config, OffloadConfig)
        check_int("num_device_blocks", num_device_blocks, 2, MAX_BLOCKS)
        check_int("block_bytes", block_bytes, 1)
        if observer is not None:
            check_has("observer", observer, "Observer", OBSERVES)
        _check_engine(device_pool, engine_blocks, clock)
        self.config, self.layout = config, Layout.of(_groups_of(config))
        self.holdings: dict[str, Holding] = {}
        self._closing: set[Holding] = set()
        self.steps: dict[int, Step] = {}
        """Those under way, the oldest first."""
        self._num_steps = 0
        self._num_admitted, self._block_bytes = 0, block_bytes
        num_host_blocks = config.resolve_host_blocks(block_bytes)
        new_order, learning = self._eviction(config, num_device_blocks - 1, num_host_blocks)
        self._moves = moves = Moves(observer, clock)
        if engine_blocks is None:
            device = _device_tier(num_device_blocks, device_pool, new_order(Tier.DEVICE))
        else:
            most = int(config.max_quarantined_share * (num_device_blocks - 1))
            device = EngineTier.of(engine_blocks, new_order(Tier.DEVICE), moves, most)
        host = TierBlocks(Tier.HOST, ExtentPool(num_host_blocks), new_order(Tier.HOST))
        tiers = [device, host]
        if config.disk is not None:
            num_slots = config.disk.num_slots(block_bytes, self.layout.unit_tokens)
            slots = SlotPool(num_slots)
            tiers.append(DiskBlocks(Tier.DISK, slots, new_order(Tier.DISK), used=slots.used))
        last_uses = LastUses(num_device_blocks if engine_blocks is None else 0)
        self.cache = cache = PrefixCache(self.layout, tuple(tiers), new_order, last_uses)
        self._request_leases = leases = RequestLeases(cache)
        self.jobs = JobBook(cache, moves, self._units_per_job(config.blocks_per_job(block_bytes)))
        self._pins = Pins(cache, moves, config.max_pinned_share)
        self.admission = Admission(cache, leases, moves, self._others_hold_room, self._pins.yield_one)
        self._loads = Loads(cache, leases, moves, self.jobs, self.admission)
        self._forks = Forks(cache, leases, self.admission, moves)
        policy = checked(store_policy_of(config.store_policy).for_ledger(self.layout, num_device_blocks - 1))
        self._hints: Hints | None = None
        self._rulings: Rulings | None = None
        if learning is not None:
            self._hints, self._rulings = Hints(cache, learning, moves), Rulings(cache, learning, moves)
            policy = AlsoLearns(policy, learning, self._hints, self._rulings)
        if config.disk is not None or config.remote is not None:
            policy = AlsoCounts.of(policy, self.layout, has_remote=config.remote is not None)
        self._policy = policy
        stores = Stores(cache, self.jobs, moves, Tier.DEVICE, BELOW)
        self.writes_back = policy.num_watermark_blocks > 0
        """Whether `plan_write_back` ever plans anything."""
        watermark = EvictionWatermark(cache, self.jobs, stores, policy.num_watermark_blocks)
        self._commits = Commits(cache, leases, stores, self.admission, moves, policy, watermark, self._pins, learning)
        self._preemptions = Preemptions(cache, leases, moves, self.jobs, stores, self.admission, policy)
        share = config.max_prefetch_share
        self._cache_transfers = CacheTransfers(cache, leases, moves, self._loads, stores, self.admission, share)
        self._fetches: Fetches | None = None
        self._restores: Restores | None = None
        """Until the first store on the disk, or a reset: what was there before it is no longer what an earlier process
        has left."""
        self._disk_stores: DiskStores | None = None
        self._remote_stores: RemoteStores | None = None
        if isinstance(policy, AlsoCounts):
            self._wire_lower(policy, config)
        self._engine: EngineOwned | None = None
        self._conclude_loads = self._loads.conclude_all
        if isinstance(device, EngineTier) and clock is not None:  # `_check_engine` demands one
            if policy.num_watermark_blocks:
                raise ConfigError("store_policy", "must not be lazy: when an engine evicts what, only it knows")
            most = max(1, config.bytes_in_flight // block_bytes)
            most_of_step = num_device_blocks // MOST_OF_POOL if config.max_bytes_in_flight is None else 0
            offers = EngineOffers(
                cache, self.jobs, stores, moves, policy, device, most, most_of_step, num_device_blocks, learning
            )
            arrivals = Arrivals(clock, config.pending_timeout_s)
            matches = EngineMatches(cache, leases, moves, arrivals, device)
            self._engine = EngineOwned(
                cache, leases, moves, self.jobs, offers, matches, arrivals, self._pins, num_device_blocks
            )
            self._conclude_loads = self._engine.conclude_all
        self.situation = Situation(
            self.holdings, self.steps, self._pins, self.jobs, self._cache_transfers, self.admission,
            None if self._engine is None else self._engine.arrivals, moves,
        )  # fmt: skip

    def _eviction(
        self, config: OffloadConfig, num_device: int, num_host: int
    ) -> tuple[Callable[[Tier], EvictionOrder], Learning | None]:
        """What makes the order of a tier, and what it learns from."""
        is_named = type(config.eviction) is str and config.eviction == "learned"
        choice = LearnedEviction() if is_named else config.eviction
        if not isinstance(choice, LearnedEviction):
            make = LeastRecentlyUsed if type(choice) is str else partial(new_order, choice)
            return (lambda _: make()), None
        sizes = {Tier.HOST: num_host}
        if config.disk is not None:
            sizes[Tier.DISK] = config.disk.num_slots(self._block_bytes, self.layout.unit_tokens)
        if choice.device:
            sizes[Tier.DEVICE] = num_device
        learning = Learning(self.layout, sizes)
        return learning.new_order, learning

    def _wire_lower(self, counts: AlsoCounts, config: OffloadConfig) -> None:
        """Wire what is below the host: a disk, a remote store, or both."""
        from_disk = from_remote = None
        if config.disk is not None:
            from_disk = self._wire_disk(counts)
        if config.remote is not None:
            from_remote = self._wire_remote(counts, config.remote.max_cell_bytes)
        self._fetches = Fetches(
            self.cache, self._request_leases, self._cache_transfers, config.max_fetch_share,
            from_disk, from_remote, self._remote_stores,
        )  # fmt: skip

    def _wire_remote(self, counts: AlsoCounts, max_cell_bytes: int) -> Stores:
        if self.layout.windows:
            raise ConfigError("remote", "keeps full attention only: these groups have windows")
        self.jobs.tiers[Tier.REMOTE] = RemoteBlocks(Tier.REMOTE, ExtentPool(0), LeastRecentlyUsed())
        units = cell_units(self._block_bytes * self.layout.width, max_cell_bytes)
        self._check_cell(units * self.layout.width)
        self._remote_stores = RemoteStores(self.cache, self.jobs, counts, units)
        return Stores(self.cache, self.jobs, self._moves, Tier.REMOTE, Tier.HOST)

    def _check_cell(self, num_blocks: int) -> None:
        """A cell that is larger than what fetches may take would be stored and asked for, and never loaded. A share of
        0 says that nothing is to be fetched."""
        most = int(self.cache.tiers[Tier.HOST].pool.num_blocks * self.config.max_fetch_share)
        if self.config.max_fetch_share and num_blocks > most:
            room = f"max_fetch_share of host memory is {most} blocks of {self._block_bytes} bytes"
            raise ConfigError("cell_bytes", f"makes cells of {num_blocks} blocks, which could never be loaded: {room}")

    def _wire_disk(self, counts: AlsoCounts) -> Stores:
        cache, jobs, moves = self.cache, self.jobs, self._moves
        down, up = (Stores(cache, jobs, moves, *hop) for hop in ((Tier.HOST, Tier.DISK), (Tier.DISK, Tier.HOST)))
        pool = cache.tiers[Tier.DISK].pool
        assert isinstance(pool, ExtentPool)
        self._restores = Restores(cache, pool)
        host, disk = cache.tiers[Tier.HOST].pool.num_blocks, cache.tiers[Tier.DISK].pool.num_blocks
        most = min(max(self.layout.width, host // HOST_WATERMARK), disk)
        # A look at what was asked for twice walks the host's order: none for a few blocks.
        self._disk_stores = DiskStores(EvictionWatermark(cache, jobs, down, most, max(1, most // STEPS)), counts)
        return up

    # -- how a call begins and ends -------------------------------------------------------------------------------

    def _in_report(self, call: str) -> WrongState:
        """The error for a `call` by an observer during a report, because the change that is reported is not
        complete."""
        return WrongState(f"{call}: an observer must not call the ledger, which is in the middle of a change")

    def _own(self, holding: object) -> Holding:
        """Refuse a request of another ledger, and any call about a request that an observer makes during a report."""
        if self._moves.is_telling:
            raise self._in_report("a call about a request")
        if not isinstance(holding, Holding) or holding.ledger is not self:
            raise InvalidArgument("holding", f"was not admitted by this ledger: {shown(holding)}")
        return holding

    def _require_own_device(self, call: str) -> None:
        if self._moves.is_telling:
            raise self._in_report(call)
        if self._engine is not None:
            raise WrongState(f"{call}: an engine has the device blocks of this ledger: see docs/engines.md")

    def _on_own_device(self, holding: object, call: str) -> Holding:
        """Refuse a request of another ledger, and `call` if an engine owns the device blocks."""
        if (
            self._engine is None
            and isinstance(holding, Holding)
            and holding.ledger is self
            and not self._moves.is_telling
        ):
            return holding
        self._require_own_device(call)
        return self._own(holding)

    def _engine_of(self, holding: object, call: str) -> EngineOwned:
        """The engine-owned device; refuse `call` if this ledger owns the device blocks."""
        self._own(holding)
        if self._engine is None:
            raise WrongState(f"{call}: this ledger has device blocks itself: it takes no others")
        return self._engine

    def _others_hold_room(self) -> bool:
        if self.jobs.unsettled or self._closing:
            return True
        return any(h.holds_room and (h.waiter is None or h.waiter.is_over) for h in self.holdings.values())

    def _settled(self, jobs: list[Job], also: Holding | None = None) -> None:
        self.admission.serve_line(self._concluded(jobs, also))

    def _concluded(self, jobs: list[Job], also: Holding | None = None) -> list[Callable[[], object]]:
        over = self._loads.settled(jobs)
        if also is not None and also.load is not None and also not in over:
            over.append(also)
        for job in jobs:
            if job.completion is not None and job.completion.outcome is Outcome.CORRUPT:
                self._pins.renew()
                break
        wakes: list[Callable[[], object]] = []
        requests = over
        if self._cache_transfers.under_way:
            requests = [holding for holding in over if holding not in self._cache_transfers.under_way]
            wakes = self._cache_transfers.conclude(over)
        return wakes + self._conclude_loads(requests)

    def _units_per_job(self, num_blocks: int) -> Sequence[int]:
        return [max(1, num_blocks // max(1, band.width)) for band in self.layout.bands]

    def _no_tables(self) -> list[list[int]]:
        return [[] for _ in self.layout.groups]


def _groups_of(config: OffloadConfig) -> list[KVCacheGroup]:
    groups = [group for group in config.groups if isinstance(group, KVCacheGroup)]
    if len(groups) != len(config.groups):
        raise ConfigError("groups", "must hold KVCacheGroup objects")
    return groups


def _device_tier(num_device_blocks: int, device_pool: DevicePool | None, order: EvictionOrder) -> TierBlocks:
    if device_pool is None:
        device_pool = FreeList(num_device_blocks)
    check_has("device_pool", device_pool, "DevicePool", "num_blocks num_free take give free_ids", ConfigError)
    for name in ("num_blocks", "num_free"):  # of another class, such as numpy's, they end up in every sum
        check_int(f"device_pool.{name}", getattr(device_pool, name), 0, error=ConfigError)
    return TierBlocks(Tier.DEVICE, device_pool, order)


def _check_engine(device_pool: object, engine_blocks: object, clock: object) -> None:
    if engine_blocks is not None and device_pool is not None:
        raise ConfigError("device_pool", "must be None: the blocks are the engine's")
    if not callable(clock) and (clock is not None or engine_blocks is not None):
        raise InvalidArgument("clock", f"must be what the engine measures seconds by, got {shown(clock)}")
