"""Quotas of tenants: floors, ceilings, pins and writes, on every way into the host and onto the disk."""

from __future__ import annotations

from typing import Any

import pytest
from disk_driving import Disk
from driving import BLOCK, Driven, prompt
from engine_driving import EngineDriven
from test_restores import Records

from aoffload import KVCacheGroup, Ledger, OffloadConfig, SlidingWindow, Tier
from aoffload._config.quotas import Quota, Quotas
from aoffload._kernel.events import Event, StoreSkipped
from aoffload._kernel.pools import LeastRecentlyUsed
from aoffload._kernel.states import Outcome
from aoffload.errors import ConfigError, IntegrityError, OutOfBlocks
from aoffload.ledger import Prefix, QuotaCleared, QuotaReached, Root
from benchmarks.made_traces import made
from benchmarks.tenants import hits_of_one
from proof.programs.fingerprint import changes, fingerprint

ANNA, BERT, CARL = Root("test", "anna"), Root("test", b"bert"), Root("test", "carl")
GROUPS = {
    "full": [KVCacheGroup("full", block_size=BLOCK)],
    "two sizes": [KVCacheGroup("large", block_size=BLOCK), KVCacheGroup("small", block_size=BLOCK // 2)],
    "a window": [KVCacheGroup("full", block_size=BLOCK), KVCacheGroup("near", SlidingWindow(6), BLOCK)],
}
EVICTIONS = ("lru", "learned")


def quotas(anna: Quota | None = None, bert: Quota | None = None, default: Quota | None = None) -> Quotas:
    return Quotas({"anna": anna or Quota(), b"bert": bert or Quota()}, default or Quota())


def of(driven: Any, name: str, tier: Tier = Tier.HOST) -> Any:
    """The account of that name in `tier`."""
    for account in driven.ledger.statistics().quotas:
        if account.name == name:
            return next(each for each in account.tiers if each.tier is tier)
    raise AssertionError(name)


def units(count: int, first: int = 1) -> list[int]:
    """A prompt of `count` whole units, and one token more."""
    return [*prompt(first, count * BLOCK), 7]


class Heard:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def observe(self, event: Event) -> None:
        if isinstance(event, (QuotaReached, QuotaCleared, StoreSkipped)):
            self.events.append(event)


# -- floors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eviction", EVICTIONS)
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS.keys())
def test_a_scan_takes_nothing_from_a_tenant_at_its_floor(groups: list[KVCacheGroup], eviction: str) -> None:
    """Anna's prompt stays in the host however many prompts of others come. Without the floor it is gone."""
    width = sum(BLOCK // group.block_size for group in groups)
    for floor, hit in ((8 * width, 4 * BLOCK), (0, 0)):
        driven = Driven(64, 16 * width, groups=groups, eviction=eviction, quotas=quotas(Quota(host_floor=floor)))
        driven.on_host_only(units(4), root=ANNA)
        for name in range(100, 130):
            driven.on_host_only(units(3, name), root=BERT if name % 2 else CARL)
        assert driven.hit(units(4), ANNA) == (0, hit)
        assert (of(driven, "1").num_evicted == 0) == (hit > 0)


def test_a_floor_holds_to_the_block() -> None:
    """A part that reaches below the floor loses only its blocks above the floor."""
    driven = Driven(64, 16, quotas=quotas(Quota(host_floor=6)))
    driven.on_host_only(units(8), root=ANNA)
    driven.on_host_only(units(8, 2), root=BERT)
    driven.on_host_only(units(4, 3), root=CARL)
    assert (of(driven, "1").num_blocks, of(driven, "2").num_blocks, of(driven, "default").num_blocks) == (6, 6, 4)
    assert driven.hit(units(8), ANNA) == (0, 6 * BLOCK)
    driven.on_host_only(units(4, 4), root=CARL)
    assert (of(driven, "1").num_blocks, of(driven, "2").num_blocks, of(driven, "default").num_blocks) == (6, 2, 8)


def test_a_unit_of_two_blocks_does_not_cross_a_floor() -> None:
    """Units are evicted whole: an account that is one block above its floor loses no unit of two blocks. The order
    foretells that, too."""
    driven = Driven(64, 24, groups=[KVCacheGroup("k", block_size=8), KVCacheGroup("v", block_size=4)],
                    quotas=quotas(Quota(host_floor=7)))  # fmt: skip
    long, short = [*prompt(1, 32), 7], [*prompt(2, 32), 7]
    driven.on_host_only(long, root=ANNA)  # four units of three blocks, in parts of widths one and two
    driven.on_host_only(short, root=BERT)
    order = driven.ledger.cache.tiers[Tier.HOST].order
    for name in range(3, 9):
        driven.on_host_only([*prompt(name, 16), 7], root=CARL)
        assert of(driven, "1").num_blocks >= 7 and next(iter(order)) is order.oldest()


def test_what_copies_bring_does_not_count_above_a_floor() -> None:
    """Copies may fail. So an account loses no cached block because copies under way would take it above its floor."""
    driven = Driven(64, 12, quotas=quotas(Quota(host_floor=4)))
    driven.on_host_only(units(4), root=ANNA)
    driven.on_host_only(units(4, 2), root=BERT)
    request = driven.running(units(4, 3), root=ANNA)
    plans = driven.launch(driven.commit(request))
    assert of(driven, "1").num_pending == 4
    driven.on_host_only(units(3, 4), root=CARL)
    assert of(driven, "1").num_blocks == 4 and of(driven, "2").num_blocks == 1
    for plan in plans:
        driven.end(plan, Outcome.FAILED)
    assert (of(driven, "1").num_blocks, of(driven, "1").num_pending) == (4, 0)
    driven.release(request)


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_without_an_account_above_its_floor_the_oldest_block_goes(eviction: str) -> None:
    """A floor is a preference, and reserves nothing: free and evictable blocks are there for all."""
    both = Quota(host_floor=8)
    driven = Driven(64, 16, quotas=quotas(both, both), eviction=eviction)
    driven.on_host_only(units(8), root=ANNA)
    driven.on_host_only(units(8, 2), root=BERT)
    driven.on_host_only(units(3, 3), root=CARL)
    assert (of(driven, "1").num_blocks, of(driven, "2").num_blocks) == (5, 8)


def test_accounts_compare_their_last_uses() -> None:
    """Above their floors, tenants share one LRU order: the oldest prompt goes first, whosever it is."""
    driven = Driven(64, 9, quotas=quotas())
    for name, root in enumerate((ANNA, BERT, CARL, ANNA, BERT, CARL), 1):
        driven.on_host_only(units(3, name), root=root)
        kept = range(max(1, name - 2), name + 1)
        roots = {1: ANNA, 2: BERT, 0: CARL}
        found = [one for one in range(1, name + 1) if driven.hit(units(3, one), roots[one % 3])[1]]
        assert found == [*kept]


def test_the_order_is_that_of_the_evictions() -> None:
    """The disk stores first what the host evicts first, so the order foretells floors, too."""
    driven = Driven(64, 16, quotas=quotas(Quota(host_floor=4)))
    for name, root in enumerate((ANNA, ANNA, BERT, CARL), 1):
        driven.on_host_only(units(4, name), root=root)
    order = driven.ledger.cache.tiers[Tier.HOST].order
    assert [part.run.root.cache_salt for part in order] == ["anna", b"bert", "carl", "anna"]
    driven.on_host_only(units(8, 5), root=CARL)  # evicts the first two
    assert [part.run.root.cache_salt for part in order] == ["carl", "carl", "anna"]


# -- ceilings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS.keys())
def test_a_tenant_at_its_ceiling_replaces_its_own_oldest(groups: list[KVCacheGroup]) -> None:
    """Others lose nothing, although the tenant's own block is not the oldest of the host."""
    width = sum(BLOCK // group.block_size for group in groups)
    driven = Driven(64, 40 * width, groups=groups, quotas=quotas(bert=Quota(host_ceiling=6 * width)))
    driven.on_host_only(units(6), root=ANNA)
    before = of(driven, "1").num_blocks
    for name in range(2, 12):
        driven.on_host_only(units(3, name), root=BERT)
        assert of(driven, "2").num_blocks <= 6 * width
    assert of(driven, "1").num_blocks == before and driven.hit(units(6), ANNA)[1] == 6 * BLOCK
    assert driven.hit(units(3, 11), BERT)[1] == 3 * BLOCK
    assert of(driven, "2").num_replaced > 0 and of(driven, "2").num_refused == 0


def test_a_store_is_cut_if_nothing_of_the_tenant_is_evictable() -> None:
    """It stores the front of the prompt, counts the rest, and says so once; a store that fits ends that."""
    heard = Heard()
    driven = Driven(64, 40, quotas=quotas(Quota(host_ceiling=4, name="team-a")), observer=heard)
    for name in (1, 2):
        driven.on_host_only(units(6, name), root=ANNA)
        assert driven.hit(units(6, name), ANNA) == (0, 4 * BLOCK)
    assert of(driven, "team-a").num_refused > 0
    reached, skipped = heard.events[0], heard.events[1]
    assert reached == QuotaReached("team-a", Tier.HOST, "ceiling")
    assert isinstance(skipped, StoreSkipped) and (skipped.num_blocks, skipped.reason) == (2, "refused")
    assert sum(isinstance(event, QuotaReached) for event in heard.events) == 1
    driven.on_host_only(units(3, 3), root=ANNA)
    assert heard.events[-1] == QuotaCleared("team-a", Tier.HOST)


def test_what_copies_bring_counts_below_a_ceiling() -> None:
    """Two requests at a time do not land more than the ceiling together."""
    driven = Driven(64, 40, quotas=quotas(Quota(host_ceiling=5)))
    requests = [driven.running(units(4, name), root=ANNA) for name in (1, 2)]
    plans = [plan for request in requests for plan in driven.launch(driven.commit(request))]
    assert sum(plan.num_blocks for plan in plans) == 5 == of(driven, "1").num_pending
    for plan in reversed(plans):
        driven.end(plan)
    assert (of(driven, "1").num_blocks, of(driven, "1").num_pending) == (5, 0)
    for request in requests:
        driven.release(request)


def test_a_unit_that_does_not_fit_costs_no_block() -> None:
    """If too few own blocks are evictable for a whole unit, none is evicted."""
    groups = [KVCacheGroup("full", block_size=BLOCK), KVCacheGroup("near", SlidingWindow(4), BLOCK // 4)]
    driven = Driven(90, 90, groups=groups, quotas=quotas(Quota(host_ceiling=8)))
    driven.on_host_only(units(2), root=ANNA)
    assert of(driven, "1").num_blocks == 6  # two of full attention, and the window, one unit of four blocks
    pin = driven.ledger.pins.hold(Prefix.of(ANNA, units(2)))
    driven.on_host_only(units(1, 2), root=ANNA)
    driven.on_host_only(units(1, 3), root=ANNA)  # one block of the second prompt is evictable, and a window needs four
    assert of(driven, "1").num_blocks == 8 and of(driven, "1").num_replaced == 0
    driven.ledger.pins.release(pin)
    driven.on_host_only(units(1, 4), root=ANNA)  # its window replaces the other one
    assert of(driven, "1").num_blocks <= 8 and of(driven, "1").num_replaced >= 4


def test_a_ceiling_of_nothing_stores_nothing() -> None:
    driven = Driven(64, 40, quotas=quotas(Quota(host_ceiling=0)))
    driven.on_host_only(units(6), root=ANNA)
    driven.on_host_only(units(6), root=BERT)
    assert driven.hit(units(6), ANNA) == (0, 0) and driven.hit(units(6), BERT) == (0, 6 * BLOCK)


def test_preemptions_and_demotions_keep_to_the_ceiling() -> None:
    """They are stores, too. A demotion that the ceiling cuts frees nothing, because it must not shorten a hit."""
    driven = Driven(64, 40, quotas=quotas(Quota(host_ceiling=2)), store_policy="off")
    request = driven.running(units(6), root=ANNA)
    driven.commit(request)
    driven.land(driven.release(request))
    transfer = driven.ledger.transfers.demote(Prefix.of(ANNA, units(6)))
    driven.land(transfer.plans)
    assert driven.hit(units(6), ANNA) == (6 * BLOCK, 0) and of(driven, "1").num_blocks == 2


def test_an_engine_keeps_to_ceilings_and_floors() -> None:
    """A `HostCache` has the same quotas."""
    driven = EngineDriven(16, quotas=quotas(Quota(host_floor=4), Quota(host_ceiling=6)))
    driven.serve(units(4), root=ANNA)
    for name in range(2, 12):
        driven.serve(units(5, name), root=BERT)
        driven.serve(units(4, name), root=CARL)
        assert of(driven, "2").num_blocks <= 6
    assert of(driven, "1").num_blocks == 4 and driven.ledger.lookup(Prefix.of(ANNA, units(4))).num_host_tokens == 16


# -- the disk ---------------------------------------------------------------------------------------------------------


def test_the_disk_has_floors_and_ceilings_of_its_own() -> None:
    """A tenant replaces its own blocks there, too; a tenant at its floor keeps its blocks."""
    disk = Disk(64, 8, 12, quotas=quotas(Quota(disk_floor=4), Quota(disk_ceiling=3)))
    for name in range(1, 2):
        disk.on_host_only(units(4, name), root=ANNA)
    for name in range(2, 20):
        disk.on_host_only(units(2, name), root=BERT if name % 2 else CARL)
        disk.land(disk.write_behind())
        assert of(disk, "2", Tier.DISK).num_blocks <= 3
    assert of(disk, "1", Tier.DISK).num_blocks == 4


def test_a_flush_ends_below_a_ceiling() -> None:
    """It stores the most recently used blocks that the ceiling allows, once: no call evicts what another has stored."""
    disk = Disk(64, 40, 64, quotas=quotas(Quota(disk_ceiling=5)))
    for name in range(1, 5):
        disk.on_host_only(units(3, name), root=ANNA)
        disk.on_host_only(units(3, name), root=CARL)
    num_stored = 0
    for _ in range(10):
        plans = disk.ledger.disk.plan_flush(4)
        disk.land(plans)
        num_stored += sum(plan.num_blocks for plan in plans)
    assert num_stored == 5 + 12 and of(disk, "1", Tier.DISK).num_replaced == 0
    disk.forget_host()
    assert disk.ledger.lookup(Prefix.of(ANNA, units(3, 4))).num_lower_tokens == 3 * BLOCK


def test_a_flush_passes_over_a_tenant_at_its_ceiling() -> None:
    """A tenant whose last prompt is longer than the disk leaves the space above its ceiling to the others."""
    disk = Disk(64, 40, 8, quotas=quotas(Quota(disk_ceiling=4)))
    disk.on_host_only(units(4, 2), root=CARL)
    disk.on_host_only(units(9), root=ANNA)
    for _ in range(3):
        disk.land(disk.ledger.disk.plan_flush(40))
    assert of(disk, "1", Tier.DISK).num_blocks == of(disk, "default", Tier.DISK).num_blocks == 4


def test_an_idle_disk_does_not_turn_over_the_blocks_of_a_tenant() -> None:
    """Blocks that were requested twice are stored while the disk is idle, but none in place of another."""
    disk = Disk(64, 40, 64, quotas=quotas(Quota(disk_ceiling=4)))
    for _ in range(2):
        for name in (1, 2, 3):
            disk.on_host_only(units(3, name), root=ANNA)
    for name in range(50, 60):
        disk.land(disk.write_behind(is_idle=True))
        disk.on_host_only(units(1, name), root=CARL)
    assert 0 < of(disk, "1", Tier.DISK).num_blocks <= 4 and of(disk, "1", Tier.DISK).num_replaced == 0


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_an_idle_disk_gets_blocks_of_every_tenant(eviction: str) -> None:
    """The eviction order begins with tenants above their floor, whatever the last use of their blocks. A scan that has
    found nothing to store among these leaves out no older blocks of the others."""
    disk = Disk(64, 64, 64, quotas=quotas(Quota(host_floor=8)), eviction=eviction)
    for _ in range(2):
        disk.on_host_only(units(4), root=ANNA)
    for _ in range(2):
        disk.on_host_only(units(4, 2), root=CARL)
    for _ in range(8):
        disk.land(disk.write_behind(1, is_idle=True))
    assert of(disk, "1", Tier.DISK).num_blocks == of(disk, "default", Tier.DISK).num_blocks == 4


@pytest.mark.parametrize("most", [1, 4, 8])
@pytest.mark.parametrize("quota", [Quota(disk_ceiling=4), Quota(disk_ceiling=0), Quota(daily_writes=0)])
def test_a_tenant_at_its_limit_of_the_disk_keeps_no_other_from_it(quota: Quota, most: int) -> None:
    """An idle disk passes over blocks that their tenant may not store, and stores those of others after them."""
    disk = Disk(64, 64, 64, quotas=quotas(quota))
    for root, tokens in ((ANNA, units(8)), (CARL, units(4, 2))):
        for _ in range(2):
            disk.on_host_only(tokens, root=root)
    for _ in range(20):
        disk.land(disk.write_behind(most, is_idle=True))
    assert of(disk, "default", Tier.DISK).num_blocks == 4


def test_a_fetch_brings_what_the_ceiling_of_the_host_allows() -> None:
    """It brings the front of the prompt, and evicts no block of others."""
    disk = Disk(64, 16, 64, quotas=quotas(Quota(host_ceiling=4)))
    disk.on_disk_only(units(3), root=ANNA)
    disk.on_disk_only(units(6, 2), root=BERT)
    for root, tokens, brought in ((ANNA, units(3), 3), (BERT, units(6, 2), 6)):
        fetch = disk.ledger.fetches.fetch(Prefix.of(root, tokens))
        disk.land(fetch.plans)
        assert disk.hit(tokens, root) == (0, brought * BLOCK)
    disk.on_host_only(units(4, 3), root=ANNA)
    fetch = disk.ledger.fetches.fetch(Prefix.of(ANNA, units(3)))
    disk.land(fetch.plans)
    assert disk.hit(units(3), ANNA) == (0, 3 * BLOCK) and of(disk, "1").num_blocks <= 4
    assert of(disk, "2").num_blocks == 6


def test_daily_writes_are_for_each_tenant() -> None:
    """What one tenant has written today does not stop the stores of another. The next day there is a new budget."""
    heard, now = Heard(), [0.0]
    config = Disk(64, 40, 64).ledger.config
    disk = Disk(64, 40, 64)
    of_anna = Quotas({"anna": Quota(daily_writes=5)})
    disk.ledger = Ledger(
        OffloadConfig(
            groups=config.groups, num_host_blocks=40, disk=config.disk, namespace="test", quotas=of_anna,
            max_fetch_share=1.0,
        ),
        65, clock=lambda: now[0], observer=heard,
    )  # fmt: skip
    for name in (1, 2):
        disk.on_host_only(units(4, name), root=ANNA)
        disk.on_host_only(units(4, name), root=CARL)
    plans = disk.ledger.disk.plan_flush(1000)
    assert (of(disk, "1", Tier.DISK).num_pending, of(disk, "default", Tier.DISK).num_pending) == (5, 8)
    assert disk.ledger.statistics().quotas[1].num_writable == 0
    disk.land(plans)
    assert QuotaReached("1", Tier.DISK, "daily_writes") in heard.events
    assert not disk.ledger.disk.plan_flush(1000), "nothing is left"
    now[0] = 86_400.0 + 600.0
    disk.land(disk.ledger.disk.plan_flush(1000))
    assert of(disk, "1", Tier.DISK).num_blocks == 8


def test_restored_blocks_move_to_their_tenant_with_its_first_call() -> None:
    """The disk knows only the digest of a root. A request, a fetch, a pin or a hint with that root tells whose blocks
    they are, so that none of them takes more than the tenant may have."""
    disk, records, both = Disk(64, 64), Records(), quotas(Quota(disk_floor=4, host_floor=4))
    disk.on_host_only(units(4), root=ANNA)
    disk.on_host_only(units(4, 2), root=CARL)
    records.write(disk)
    after = Disk(64, 16, 8, quotas=both)
    for run in records.runs(disk, 1):
        after.ledger.disk.restore(run)
    assert (of(after, "default", Tier.DISK).num_blocks, of(after, "1", Tier.DISK).num_blocks) == (8, 0)
    fetch = after.ledger.fetches.fetch(Prefix.of(ANNA, units(4)))
    assert (of(after, "default", Tier.DISK).num_blocks, of(after, "1", Tier.DISK).num_blocks) == (4, 4)
    after.land(fetch.plans)
    after.release(after.admit(units(4), root=ANNA))
    assert of(after, "1").num_blocks == 4 and of(after, "default").num_blocks == 0
    for name in range(10, 30):
        after.on_host_only(units(3, name), root=BERT)
        after.land(after.write_behind())
    after.ledger.check_integrity()
    assert of(after, "1", Tier.DISK).num_blocks == 4 and of(after, "1").num_blocks == 4


def test_roots_that_nothing_was_restored_for_take_no_memory() -> None:
    """Only a root that was read from a disk is unknown. Adapters without a salt are not."""
    disk = Disk(64, 16, 8, quotas=quotas(Quota(disk_floor=4)))
    for number in range(20):
        disk.on_host_only(units(2), root=Root("test", None, f"adapter {number}"))
        disk.land(disk.write_behind())
    assert not disk.ledger.quotas._unknown


def test_restored_blocks_of_several_tenants_go_first_in_their_order() -> None:
    """A restored part is older than all that this process has used, and the suffix goes before its prefix."""
    disk, records = Disk(64, 64), Records()
    disk.on_host_only(units(4), root=CARL)
    records.write(disk)
    after = Disk(64, 64, 8, quotas=quotas())
    order = after.ledger.cache.tiers[Tier.DISK].order
    for run in records.runs(disk, 1):
        after.ledger.disk.restore(run)
    assert [part.first for part in order] == [3, 2, 1, 0] or len(list(order)) == 1
    after.ledger.check_integrity()


# -- pins -------------------------------------------------------------------------------------------------------------


def test_pins_of_a_tenant_hold_its_share_at_most() -> None:
    """More is refused and changes nothing. Pins of others, and blocks that its pins share, do not count."""
    driven = Driven(64, 40, quotas=quotas(Quota(pinned=5)))
    for name in (1, 2):
        driven.on_host_only(units(4, name), root=ANNA)
        driven.on_host_only(units(4, name), root=CARL)
    pins = [driven.ledger.pins.hold(Prefix.of(ANNA, units(4))) for _ in range(2)]
    pins.append(driven.ledger.pins.hold(Prefix.of(CARL, units(4))))
    before = fingerprint(driven.ledger)
    with pytest.raises(OutOfBlocks, match="quotas: 4 blocks needed, 1 available") as refused:
        driven.ledger.pins.hold(Prefix.of(ANNA, units(4, 2)))
    assert changes(before, fingerprint(driven.ledger)) == [] and refused.value.retryable
    assert driven.ledger.statistics().quotas[1].num_pinned == 4
    for pin in pins:
        driven.ledger.pins.release(pin)
    driven.ledger.pins.release(driven.ledger.pins.hold(Prefix.of(ANNA, units(4, 2))))


# -- configuration and reports ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: Quota(host_floor="x"), "host_floor"), (lambda: Quota(pinned=-1), "pinned"),
        (lambda: Quota(host_floor=2, host_ceiling=1), "host_floor"), (lambda: Quota(name=3), "name"),
        (lambda: Quota(disk_floor="2GiB", disk_ceiling="1GiB"), "disk_floor"), (lambda: Quota(name="a\n"), "name"),
        (lambda: Quotas({"secret": 3}), "salts"), (lambda: Quotas("secret"), "salts"),
        (lambda: Quotas({3: Quota()}), "salts"), (lambda: Quotas({}, 3), "default"),
        (lambda: Quotas({"secret": Quota(name="a"), "b": Quota(name="a")}), "salts"),
        (lambda: Quotas({"secret": Quota(name="default")}), "salts"),
        (lambda: Quotas({"secret": Quota(name="secret")}), "salts"),
        (lambda: Driven(8, quotas=3), "quotas"),
        (lambda: Driven(8, 8, quotas=Quotas({}, Quota(host_floor=9))), "quotas"),
        (lambda: Driven(8, 8, quotas=quotas(Quota(host_floor=5), Quota(host_floor=4))), "quotas"),
        (lambda: Driven(8, 8, quotas=Quotas({}, Quota(disk_floor=1))), "quotas"),
        (lambda: Driven(8, 8, quotas=Quotas({}, Quota(daily_writes=1))), "quotas"),
        (lambda: Driven(8, 8, quotas=Quotas({}), eviction=LeastRecentlyUsed), "quotas"),
    ],
)  # fmt: skip
def test_a_wrong_quota_is_refused_without_its_salt(make: Any, key: str) -> None:
    """Each error names the key. A salt is a tenant's secret: no error shows it."""
    with pytest.raises(ConfigError) as refused:
        make()
    assert refused.value.argument == key and "secret" not in str(refused.value)


def test_no_report_shows_a_salt() -> None:
    """An account is shown by its name or its number."""
    salts = {"secret-a": Quota(name="team-a", host_ceiling=2), b"secret-b": Quota(host_floor=1)}
    heard = Heard()
    driven = Driven(64, 16, quotas=Quotas(salts), observer=heard)
    for salt in salts:
        driven.on_host_only(units(4), root=Root("test", salt))
    assert [account.name for account in driven.ledger.statistics().quotas] == ["default", "team-a", "2"]
    text = driven.ledger.explain()
    assert "account team-a: host 2 blocks (floor 0, ceiling 2), 0 evicted for others, 4 refused" in text
    for shown in (text, repr(driven.ledger.config), repr(driven.ledger.statistics()), repr(heard.events[0])):
        assert "secret" not in shown


def test_without_quotas_there_is_no_handle() -> None:
    driven = Driven(8)
    assert driven.ledger.statistics().quotas == ()
    with pytest.raises(ConfigError, match="quotas"):
        _ = driven.ledger.quotas


def test_the_check_finds_a_wrong_count() -> None:
    driven = Driven(64, 16, quotas=quotas())
    driven.on_host_only(units(4), root=ANNA)
    driven.ledger.quotas._shares[Tier.HOST][1].num_cached += 1
    with pytest.raises(IntegrityError, match="HOST blocks of account 1 are miscounted"):
        driven.ledger.check_integrity()


def test_a_reset_empties_every_account() -> None:
    driven = Driven(64, 16, quotas=quotas(Quota(host_ceiling=4)))
    for tier in (None, Tier.HOST):
        driven.on_host_only(units(4), root=ANNA)
        assert of(driven, "1").num_blocks == 4
        driven.ledger.reset(tier)
        driven.ledger.check_integrity()
        assert of(driven, "1").num_blocks == 0


# -- what it is for ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["talks", "popular"])
def test_a_scanning_tenant_costs_the_other_at_most_a_twentieth_of_its_hits(name: str) -> None:
    """With a floor, the other tenant hits at least 0.95 of what it hits alone in a host of the size of its floor.
    Without quotas it hits less than 0.8 of that."""
    trace = made(name, 300, 400)
    alone = hits_of_one(trace, 300, num_scans=0)
    assert hits_of_one(trace, 600, floor=300) >= 0.95 * alone > 0
    assert hits_of_one(trace, 600) < 0.8 * alone
