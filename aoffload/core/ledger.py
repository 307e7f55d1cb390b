"""The ledger: the synchronous API. A step-based engine drives it directly; the async runtime is its first client.

A request's way through it: `admit` (match and pin) -> `allocate_nowait` or `queue_allocation` + `accept` -> `plan_load`
-> `commit` ... -> `release`. `plan_load`, `commit` and `release` return plans; `launch` and `settle` report what became
of them. Nothing here waits, and no call leaves anything half done.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs

from ..arguments import check_callable, check_has, shown
from ..errors import InvalidArgument
from ..prefix import Prefix
from .arguments import check_prefix, check_text, check_tier
from .eviction import LeastRecentlyUsed
from .hops import Tier
from .integrity import check_integrity
from .kept import CacheTransfer, Demotion, Pin, Prefetch
from .ledger_remote import RemoteOfLedger
from .lifecycle import PinState
from .owners import Holding, nobody
from .pins import check_time
from .status import EvictionStatistics, Holder, RequestStatus, TierStatistics, explained, plain
from .tokens import TokenSequence
from .watching import BlockWatcher

__all__ = ["Ledger", "LedgerStatistics", "RemoteCounts"]

MAX_CATEGORY = 256
"""Characters of the category of a hint, which is kept."""


@attrs.frozen
class RemoteCounts:
    """Cells of a remote store. What it holds, only the store knows."""

    num_loads: int
    """On their way into the host."""
    num_stores: int
    num_forgotten: int
    """To be removed: see `Ledger.take_forgotten_cells`."""


@attrs.frozen
class LedgerStatistics:
    device: TierStatistics
    host: TierStatistics
    num_requests: int
    num_waiting: int
    num_jobs: int
    num_late_completions: int
    num_pins: int
    """Held pins of `Ledger.pin`, not those of requests."""
    loads_paused: bool
    """With `engine_blocks`: more than `max_quarantined_share` of the blocks is in quarantine. Nothing is loaded."""
    disk: TierStatistics | None
    """None without a disk."""
    remote: RemoteCounts | None
    """None without a remote store."""
    learned: tuple[Tier, ...]
    """The tiers whose eviction follows what was learned now, and not the last use."""
    num_hints: int
    """In force."""
    eviction: EvictionStatistics | None
    """None unless eviction learns."""


class Ledger(RemoteOfLedger):
    """Decides what each block holds, for which owners, and what may happen to it next.

    `num_device_blocks` is the number of rows of the KV tensors, the null block 0 included. `block_bytes` is the size of
    one block over all regions; it only bounds bytes in flight and per job, and converts `host_bytes` to blocks.

    The ledger allocates the device blocks. With `engine_blocks`, an engine does, which has a pool and a prefix cache
    itself: then `offer` takes the place of `commit`, `plan_load` copies into blocks that the engine names, and the
    calls about device blocks raise `WrongState` (docs/engines.md has the table). `clock` counts seconds, such as
    `time.monotonic`: `engine_blocks` need one, otherwise it only tells the ages in `requests()`.
    """

    def __repr__(self) -> str:
        tiers = [f"{t.tier.name.lower()} {t.pool.num_free}/{t.pool.num_blocks} free" for t in self.cache.tiers]
        return f"<Ledger {', '.join(tiers)}, {len(self.holdings)} requests>"

    # -- what no request asks for ---------------------------------------------------------------------------------

    def pin(self, prefix: Prefix, *, expires_at: float = math.inf) -> Pin:
        """Pin what is cached of `prefix` until `unpin`, or until `lapse` is called with `expires_at` or a later time.
        `OutOfBlocks` if all pins together would keep more than `max_pinned_share` of a tier."""
        if self._moves.is_telling:
            raise self._in_report("pin")
        return self._pins.pin(TokenSequence(check_prefix(prefix), self.layout.unit_tokens), expires_at, self)

    def unpin(self, pin: Pin) -> None:
        """End a pin. One that has ended by itself is left as it is; a second `unpin` raises."""
        if self._moves.is_telling:
            raise self._in_report("unpin")
        if not isinstance(pin, Pin) or pin.ledger is not self:
            raise InvalidArgument("pin", f"was not made by this ledger: {shown(pin)}")
        if pin.state in (PinState.HELD, PinState.RELEASED):
            self._pins.end(pin, PinState.RELEASED)
            self.admission.serve_line()

    @property
    def next_lapse(self) -> float:
        """When the first pin or hint lapses; infinity without one."""
        if self._hints is not None:
            return min(self._pins.next_lapse, self._hints.next_lapse)
        return self._pins.next_lapse

    def lapse(self, now: float) -> None:
        """End the pins and hints that expire at `now` or before."""
        if self._moves.is_telling:
            raise self._in_report("lapse")
        if self._pins.lapse(now):
            self.admission.serve_line()
        if self._hints is not None:
            self._hints.lapse(now)

    def hint(self, prefix: Prefix, *, expires_at: float, category: str = "") -> int:
        """Spare what is cached of `prefix` until it is asked for, or until `lapse` is called with `expires_at` or a
        later time: it is evicted last. Pins nothing. Returns the tokens that are spared, 0 unless eviction learns.

        Hints of a `category`, at most 64 of them, spare nothing while less than a quarter of them comes true."""
        if self._moves.is_telling:
            raise self._in_report("hint")
        check_prefix(prefix)
        expires_at, category = check_time("expires_at", expires_at), check_text("category", category)
        if len(category) > MAX_CATEGORY:
            raise InvalidArgument("category", f"must have at most {MAX_CATEGORY} characters, got {len(category):,}")
        if self._hints is None:
            return 0
        unit = self.layout.unit_tokens
        return self._hints.hint(TokenSequence(prefix, unit), expires_at, category) * unit

    def drop_pins(self) -> None:
        """End every pin: DROPPED."""
        if self._moves.is_telling:
            raise self._in_report("drop_pins")
        self._pins.end_all(PinState.DROPPED)
        self.admission.serve_line()

    def prefetch(self, prefix: Prefix, wake: Callable[[], object] = nobody) -> Prefetch:
        """Start loading what a request for `prefix` would load: its `plans` have to be launched."""
        self._require_own_device("prefetch")
        check_callable("wake", wake)
        return self._cache_transfers.prefetch(TokenSequence(check_prefix(prefix), self.layout.unit_tokens), wake, self)

    def demote(self, prefix: Prefix, wake: Callable[[], object] = nobody) -> Demotion:
        """Start moving `prefix` from the device to the host: its `plans` have to be launched."""
        self._require_own_device("demote")
        check_callable("wake", wake)
        return self._cache_transfers.demote(TokenSequence(check_prefix(prefix), self.layout.unit_tokens), wake, self)

    def cancel(self, transfer: CacheTransfer) -> None:
        """Cancel a prefetch, a fetch or a demotion; nothing if it is over. Launched copies and all stores go on."""
        if self._moves.is_telling:
            raise self._in_report("cancel")
        if not isinstance(transfer, CacheTransfer) or transfer.holding.ledger is not self:
            raise InvalidArgument("transfer", f"was not begun by this ledger: {shown(transfer)}")
        if not transfer.is_over:
            self._settled(self._cache_transfers.cancel(transfer))
            transfer.wake()

    def cancel_cache_transfers(self) -> None:
        for transfer in tuple(self._cache_transfers.under_way.values()):
            self.cancel(transfer)

    # -- the whole ------------------------------------------------------------------------------------------------

    def reset(self, tier: Tier | None = None) -> None:
        """Forget everything cached, or everything that `tier` holds. Every pin ends, unless only the disk is reset.

        No request begins to compute with KV from before the reset. The reset drops the match of a request without
        blocks. If the load of a request is not over, the request loses its device hit, its load ends with no tokens,
        and the request computes from its first token (with `engine_blocks`: from the end of the engine's own hit). A
        request whose load is over, or that computes without a load, keeps its blocks and goes on, unless its caller was
        not told yet that the load is over: see `lost_to_reset`. Requests from before
        the reset publish and store nothing any more, unless only a tier below the device is reset."""
        if self._moves.is_telling:
            raise self._in_report("reset")
        if tier is not None and check_tier("tier", tier) is Tier.DEVICE:
            self._require_own_device("reset of this tier")
        if tier is Tier.DISK and not self.cache.has_disk:
            raise InvalidArgument("tier", "is not there: this ledger has no disk")
        if tier is Tier.REMOTE:
            raise InvalidArgument("tier", "is not this ledger's: another namespace finds nothing in it")
        if tier in (None, Tier.DISK):
            self._restores = None
        if tier is not Tier.DISK:  # no pin keeps anything there
            self._pins.end_all(PinState.DROPPED)
        if tier is None:
            self.cache.reset()
            if self._hints is not None:
                self._hints.clear()
        else:
            self.cache.reset_tier(tier)
        if tier is not Tier.DISK:  # no request has a match there
            match_again = self.admission.match_again if self._engine is None else self._engine.matches.forget
            match_again(self.holdings.values())
        for holding in (*self.holdings.values(), *self._closing):
            if tier is Tier.DEVICE and holding.num_units and holding.epoch == self.cache.epoch:
                holding.orphan()
        self.admission.serve_line()

    def statistics(self) -> LedgerStatistics:
        device, host, *rest = (tier.statistics() for tier in self.cache.tiers)
        line = self.admission.line
        waiting = len(line.extending) + len(line.allocating)
        num_jobs, num_pins = len(self.jobs.unsettled), len(self._pins.pins)
        late, paused = self.jobs.num_late, self._engine is not None and self._engine.matches.loads_paused
        disk = rest[0] if rest else None
        eviction = None if self._rulings is None else self._rulings.statistics()
        learned = () if eviction is None else eviction.learned
        return LedgerStatistics(
            device, host, len(self.holdings), waiting, num_jobs, late, num_pins, paused, disk, self._remote_counts(),
            learned, 0 if self._hints is None else len(self._hints), eviction,
        )  # fmt: skip

    def _remote_counts(self) -> RemoteCounts | None:
        if self._remote_stores is None:
            return None
        hops = [job.plan.hop for job in self.jobs.unsettled.values()]
        num_loads, num_stores = hops.count((Tier.REMOTE, Tier.HOST)), hops.count((Tier.HOST, Tier.REMOTE))
        return RemoteCounts(num_loads, num_stores, len(self._remote_stores.forgotten))

    def requests(self) -> tuple[RequestStatus, ...]:
        """The live requests, the one that is in its state for the longest first: what each holds and waits for, and who
        holds that. Ages are None in a ledger without a `clock`."""
        return tuple(self.situation.requests())

    def holders(self) -> tuple[Holder, ...]:
        """Everybody who holds device blocks, the biggest first: requests, steps (also for requests that are over),
        pins, jobs, prefetches, demotions."""
        return tuple(self.situation.biggest())

    def explain(self) -> str:
        """`requests()` and `holders()` as a table to print."""
        found = self.statistics()
        device, lower = found.device, [("host", found.host), ("disk", found.disk)]
        live = f"{found.num_requests:,} request{'' if found.num_requests == 1 else 's'}"
        if found.remote is not None and (moving := found.remote.num_loads + found.remote.num_stores):
            live += f", {moving:,} cell{'' if moving == 1 else 's'} on the way"
        if self._engine is None:
            about = f"{device.counted('device')}; {live}, {found.num_waiting:,} in line"
        else:  # what it has free and cached only the engine knows, and who waits for room
            held = f"{device.num_blocks:,} ({device.num_quarantined:,} quarantined)"
            about = (
                f"{self._engine.num_rows - 1:,} device blocks, which the engine hands out: copies hold {held}; {live}"
            )
        below = [tier.counted(name) for name, tier in lower if tier is not None and tier.num_blocks]
        return explained("\n".join((about, *below, *self._evicts(found))), self.requests(), self.holders())

    def _evicts(self, found: LedgerStatistics) -> tuple[str, ...]:
        """By which order, in words; nothing where it is the default."""
        if found.eviction is not None:
            num_hints = found.num_hints
            hints = f"; {num_hints:,} hint{'' if num_hints == 1 else 's'} in force" if num_hints else ""
            return (f"{found.eviction}{hints}",)
        order = self.cache.tiers[Tier.HOST].order
        if isinstance(order, LeastRecentlyUsed):
            return ()
        return (f"eviction: an order of the program's own, {plain(type(order).__name__)}",)

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless every block has exactly one owner and every reference belongs to a lease."""
        if self._moves.is_telling:  # blocks on their way have no owner, or two
            raise self._in_report("check_integrity")
        owners = (*self.holdings.values(), *self._closing, *self._cache_transfers.under_way)
        check_integrity(self.cache, self.jobs, self.admission.line, owners, self._pins.pins)

    def watch(self, watcher: BlockWatcher | None) -> None:
        """Tell `watcher` of every block that becomes cached or is no longer cached, engine-owned blocks excepted. None:
        stop telling."""
        if watcher is not None:
            check_has("watcher", watcher, "BlockWatcher", "part_changed all_cleared")
        self.cache.watch(watcher)

    def block_ids(self, holding: Holding) -> list[list[int]]:
        """The block table, one list per group."""
        tables = self._on_own_device(holding, "block_ids").tables
        return self.layout.by_group([table.ids for table in tables]) if tables else self._no_tables()
