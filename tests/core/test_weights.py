"""The weights' epoch: KV of other weights is unfindable at once, and is found again when its epoch returns."""

from __future__ import annotations

from typing import Any

import pytest
from disk_driving import Disk
from driving import BLOCK, Driven, prompt
from engine_driving import EngineDriven, Finding
from remote_driving import CELL_UNITS, Remote

from aoffload import ConfigError, InvalidArgument, OffloadConfig, RequestState, Tier
from aoffload._common.prefix import Prefix, Root
from aoffload._config.groups import FullAttention, KVCacheGroup, SlidingWindow
from aoffload._observe.kv_events.changes import Changes, Cleared
from aoffload._tiers.disk.plans import RestoredRun
from aoffload.ledger import Event, PinState, WeightsChanged, cells_of

A = prompt(1, 17)
S = RequestState
GROUPS = {
    "full": [KVCacheGroup("full", block_size=4)],
    "windows": [KVCacheGroup("full", FullAttention(), 4), KVCacheGroup("window", SlidingWindow(8), 4)],
}


@pytest.fixture(params=list(GROUPS))
def driven(request: pytest.FixtureRequest) -> Driven:
    return Driven(24, 24, groups=GROUPS[request.param])


# -- names -----------------------------------------------------------------------------------------------------------


def test_the_root_of_an_epoch_is_its_own() -> None:
    """No keys and no epoch have the root of others. Without an epoch, the root is that of every version before."""
    keys = [("m", None, None), ("m", "w", None), ("m", None, "w"), ("mw", None, None), ("m", b"w", None)]
    roots = [Root(*each) for each in keys]
    made = [root.under_weights(epoch) for root in roots for epoch in ("", "w", "a", "ww", "s\0")]
    assert len({root.digest for root in made}) == len(made)
    for root in roots:
        again = root.under_weights("a").under_weights("w")
        assert again == root.under_weights("w") and again.under_weights("") == root
        assert (again.namespace, again.cache_salt, again.adapter_key) == (
            root.namespace, root.cache_salt, root.adapter_key,
        )  # fmt: skip
    unknown = Root.of_digest(roots[0].digest)
    assert unknown.under_weights("a") == roots[0].under_weights("a")
    assert roots[0].digest.hex() == "f044031e414364c64f03cebaf536671dcc569a76c17c742ac4cc6277e48f0a79"


@pytest.mark.parametrize("epoch", [None, 7, b"a", "a" * 257, "\ud800", ["a"]])
def test_what_cannot_be_an_epoch_is_refused(driven: Driven, epoch: Any) -> None:
    """And nothing has changed."""
    driven.serve(A)
    pin = driven.ledger.pins.hold(driven.prefix(A))
    before = driven.picture()
    with pytest.raises(InvalidArgument, match=r"^epoch: "):
        driven.ledger.weights.set(epoch)
    assert driven.picture() == before and pin.state is PinState.HELD
    with pytest.raises(ConfigError, match=r"^weights_epoch: "):
        OffloadConfig(groups=GROUPS["full"], num_host_blocks=4, weights_epoch=epoch)
    with pytest.raises(InvalidArgument, match=r"^weights_epoch: "):
        cells_of(driven.prefix(A), 4, 4, epoch)


def test_what_is_set_is_told() -> None:
    """In the events, the statistics and the report. The same epoch once more changes nothing."""
    heard: list[Event] = []

    class Hears:
        def observe(self, event: Event) -> None:
            heard.append(event)

    driven = Driven(8, observer=Hears(), weights_epoch="a" * 256)
    assert driven.ledger.weights.epoch == "a" * 256
    pin = driven.ledger.pins.hold(driven.prefix(A))
    driven.ledger.weights.set("a" * 256)
    assert pin.state is PinState.HELD and driven.ledger.statistics().num_weights_changes == 0
    driven.ledger.weights.set("b\n")
    assert [event for event in heard if isinstance(event, WeightsChanged)] == [WeightsChanged("a" * 256, "b\n")]
    found = driven.ledger.statistics()
    assert (found.weights_epoch, found.num_weights_changes) == ("b\n", 1)
    assert "\nweights' epoch: b" in driven.ledger.explain()


# -- what is found ---------------------------------------------------------------------------------------------------


def test_kv_of_another_epoch_is_not_found_and_returns(driven: Driven) -> None:
    """On the device and in the host, by lookups, pins, prefetches and demotions."""
    ledger = driven.ledger
    driven.serve(A)
    driven.evict_device()
    driven.serve(A[:9])
    before = driven.hit(A)
    assert sum(before) == 16
    ledger.weights.set("a")
    assert driven.hit(A) == (0, 0)
    assert ledger.pins.hold(driven.prefix(A)).match.num_tokens == 0
    assert ledger.transfers.prefetch(driven.prefix(A)).num_tokens == 0
    assert ledger.transfers.demote(driven.prefix(A)).num_blocks == 0
    ledger.weights.set("b")
    assert driven.hit(A) == (0, 0)
    ledger.weights.set("")
    assert driven.hit(A) == before
    ledger.check_integrity()


def test_each_epoch_has_its_own_kv(driven: Driven) -> None:
    """A prompt that two epochs have computed is cached twice."""
    for epoch in ("a", "b"):
        driven.ledger.weights.set(epoch)
        assert driven.serve(A).match.num_tokens == 0
    for epoch in ("a", "b"):
        driven.ledger.weights.set(epoch)
        assert driven.serve(A).match.num_tokens == 16


def test_pins_end(driven: Driven) -> None:
    """They would keep KV that no request finds."""
    driven.serve(A)
    pin = driven.ledger.pins.hold(driven.prefix(A))
    assert pin.match.num_tokens >= 16
    driven.ledger.weights.set("a")
    assert pin.state is PinState.DROPPED and driven.num_pinned() == (0, 0)


# -- requests --------------------------------------------------------------------------------------------------------

CASES = [
    (when, where) for when in ("matched", "waiting", "granted", "allocated") for where in ("device", "host", "both")
]
CASES += [(when, where) for when in ("loading", "launched", "landed") for where in ("host", "both")]
UNBEGUN = ("matched", "waiting", "granted")


@pytest.mark.parametrize("returns", [False, True])
@pytest.mark.parametrize(("when", "where"), CASES)
def test_a_request_has_nothing_of_another_epoch(driven: Driven, when: str, where: str, *, returns: bool) -> None:
    """Whatever call comes next, the request computes from its first token. Only a request that had not begun at the
    change publishes what it computes, under its new epoch. With `returns`, its old epoch comes back before it goes
    on: then a request that had not begun hits again."""
    driven.serve(A)
    if where != "device":
        driven.evict_device()
    if where == "both":
        driven.serve(A[:9])
    reader = driven.running(A) if where == "device" else None  # keeps the old blocks
    record = driven.admit(A)
    assert record.match.num_tokens == 16
    ledger, crowd = driven.ledger, None
    if when == "waiting":
        crowd = driven.admit(prompt(2, 4))
        free = ledger.statistics().device
        ledger.allocate_nowait(crowd, (free.num_free + free.num_cached) // ledger.layout.width * 4)
        ledger.queue_allocation(record)
    elif when == "granted":
        ledger.queue_allocation(record)
        assert record.waiter is not None and record.waiter.is_over
    elif when != "matched":
        ledger.allocate_nowait(record)
    if when in ("loading", "launched", "landed"):
        plans = ledger.plan_load(record)
        if when != "loading":
            driven.launch(plans)
        if when == "landed":  # and the caller does not know yet
            for plan in plans:
                driven.end(plan)
    ledger.weights.set("a")
    ledger.check_integrity()
    if when == "matched":
        assert record.match.num_tokens == 0, "a match that was dropped is no answer"
    if returns:
        ledger.weights.set("")
    if crowd is not None:
        driven.release(crowd)
    if when == "landed":
        driven.land(ledger.plan_load(record))
    driven.run_on(record)
    assert record.num_computed_tokens == (16 if when in UNBEGUN and returns else 0)
    before = driven.hit(A)
    stores = driven.commit(record)
    if when in UNBEGUN:
        assert driven.hit(A)[0] == 16, "it is a request of the present epoch"
    else:
        assert stores == [] and driven.hit(A) == before, "it publishes nothing"
    driven.land(stores)
    driven.land(driven.release(record))
    if reader is not None:
        driven.release(reader)
    assert driven.num_pinned() == (0, 0)


def test_a_request_that_computes_goes_on_and_publishes_nothing_ever_again(driven: Driven) -> None:
    """Nor does a fork of it, nor after a preemption, nor once its epoch returns."""
    record = driven.running(A)
    driven.land(driven.commit(record, 8))
    tables = driven.ledger.block_ids(record)
    driven.ledger.weights.set("a")
    assert driven.ledger.block_ids(record) == tables
    assert driven.commit(record) == [] and driven.hit(A) == (0, 0)
    child = driven.ledger.forks.fork(record, num_tokens=24).request
    driven.ledger.weights.set("")
    assert driven.commit(child, new=[1, 2, 3]) == [] and driven.release(child) == []
    assert sum(driven.hit(A)) == 8, "what was published before the change"
    assert driven.ledger.preemption.preempt(record).plans == ()
    driven.ledger.preemption.resume(record)
    assert record.match.num_tokens == 0
    driven.run_on(record)
    assert record.num_computed_tokens == 0 and driven.commit(record) == []
    assert driven.release(record) == [] and sum(driven.hit(A)) == 8


def test_a_step_under_way_publishes_nothing(driven: Driven) -> None:
    """Its forward may have used both weights."""
    record = driven.running(A)
    with driven.ledger.step([record]):
        driven.ledger.weights.set("a")
    assert driven.commit(record) == [] and driven.hit(A) == (0, 0)
    driven.ledger.weights.set("")
    assert driven.commit(record, new=[1, 2, 3, 4]) == [] and driven.hit(A) == (0, 0)
    driven.release(record)


def test_copies_under_way_land_under_their_own_root(driven: Driven) -> None:
    """A store of KV that was published before the change; and a load, whose request does not wait for it any more."""
    record = driven.running(A)
    stores = driven.launch(driven.commit(record))
    driven.ledger.weights.set("a")
    for plan in stores:
        driven.end(plan)
    driven.release(record)
    driven.evict_device()
    assert driven.hit(A) == (0, 0)
    driven.ledger.weights.set("")
    assert driven.hit(A) == (0, 16)
    record = driven.allocated(A)
    loads = driven.launch(driven.ledger.plan_load(record))
    assert loads
    driven.ledger.weights.set("a")
    for plan in loads:
        driven.end(plan)
    assert driven.hit(A) == (0, 0)
    driven.ledger.weights.set("")
    assert driven.hit(A)[0] == 16
    driven.release(record)


def test_an_invalidation_finds_kv_of_other_epochs(driven: Driven) -> None:
    """The forward that failed was before the change, and so were those that have read it."""
    author, reader = driven.running(A), driven.admit(A)
    driven.land(driven.commit(author, new=[1]))
    driven.ledger.rematch(reader)
    driven.ledger.allocate_nowait(reader)
    driven.land(driven.ledger.plan_load(reader))
    driven.commit(reader, new=[2])
    driven.ledger.weights.set("a")
    assert reader in driven.ledger.invalidation.invalidate(author, 4)
    driven.ledger.weights.set("")
    assert sum(driven.hit(A)) == 4
    for record in (author, reader):
        driven.release(record, "failed")


# -- the disk and the remote store -----------------------------------------------------------------------------------


def test_the_disk_keeps_epochs_apart() -> None:
    """Also over a restart: what it has is found once its epoch is set."""
    disk = Disk(weights_epoch="a")
    disk.on_disk_only(A)
    assert disk.on_disk(A) == 16
    restored = [_restored(part.run, part.blocks) for part in disk.ledger.cache.tiers[Tier.DISK].order]
    disk.ledger.weights.set("b")
    assert disk.on_disk(A) == 0 and disk.fetched(A) == 0
    disk.ledger.weights.set("a")
    assert disk.fetched(A) == 16
    again = Disk()
    for run in restored:
        again.ledger.disk.restore(run)
    found = []
    for epoch in ("", "a", "b", "a"):
        again.ledger.weights.set(epoch)
        found.append(again.on_disk(A))
    assert found == [0, 16, 0, 16] and again.fetched(A) == 16


def _restored(run: Any, blocks: Any) -> RestoredRun:
    return RestoredRun(run.root.digest, b"", run.hash_after.digest(), run.start, run.stop, bytes(run.tokens), (blocks,))


def test_the_cells_of_a_remote_store_are_those_of_an_epoch() -> None:
    """A process asks for the cells of its own epoch, and stores those."""
    remote = Remote()
    labels = {}
    for epoch in ("", "a", "b"):
        remote.ledger.weights.set(epoch)
        for _ in range(2):
            remote.serve(A)
        labels[epoch] = remote.ledger.remote.plan_stores(100, remote.is_wanted)
        remote.land(labels[epoch])
        cells = cells_of(remote.prefix(A), BLOCK, CELL_UNITS, epoch)
        assert [plan.payload for plan in labels[epoch]] == list(cells)
        fetch = remote.ledger.fetches.fetch(remote.prefix(A), num_remote_tokens=16)
        assert fetch.is_over, "the host has it"
    assert len(remote.cells_stored) == 3
    assert cells_of(remote.prefix(A), BLOCK, CELL_UNITS) == cells_of(remote.prefix(A), BLOCK, CELL_UNITS, "")


# -- an engine's own blocks ------------------------------------------------------------------------------------------


def test_a_host_cache_finds_nothing_of_another_epoch() -> None:
    """A request that its engine matches again is one of the new epoch. Any other one publishes nothing."""
    driven = EngineDriven()
    driven.serve(A)
    stale, again, running = driven.admit(A), driven.admit(A), driven.admit(prompt(2, 8))
    table = driven.fresh(8)
    driven.compute(prompt(2, 8), table)
    driven.land(driven.ledger.offer(running, 8, table))
    assert stale.match.num_host_tokens == again.match.num_host_tokens == 16
    driven.ledger.weights.set("a")
    assert stale.match.num_host_tokens == 0 and not stale.leases
    assert driven.ask(again)[1] == 0
    for record in (stale, running):
        table = driven.fresh(20)
        assert not driven.ledger.offer(record, record.sequence.num_tokens, table, [1, 2, 3], is_last=True)
    table = driven.fresh(17)
    driven.land(driven.ledger.offer(again, 17, table))
    assert driven.ledger.lookup(Prefix.of(Root("test"), A)).num_host_tokens == 16
    for record in (stale, running, again):
        driven.ledger.release(record)
    driven.ledger.weights.set("")
    assert driven.ledger.lookup(Prefix.of(Root("test"), A)).num_host_tokens == 16
    driven.check()


def test_a_load_of_a_host_cache_under_way_is_lost() -> None:
    """Nothing that its copies bring counts."""
    driven = EngineDriven()
    driven.serve(A)
    record = driven.admit(A)
    plans = driven.load(record, driven.fresh(17))
    assert plans
    driven.ledger.weights.set("a")
    driven.land(plans)
    assert record.state is S.RUNNING and record.num_computed_tokens == 0
    driven.ledger.release(record)


def test_deferred_blocks_of_another_epoch_are_given_up() -> None:
    """The engine would find blocks of new weights under the same tokens, also for a request that is over."""
    engine = Finding()
    driven = EngineDriven(engine=engine, max_bytes_in_flight=1)
    record = driven.admit(A, request_id="a")
    table = driven.fresh(17)
    driven.compute(A, table)
    plans = driven.ledger.offer(record, 17, table, is_last=True)
    driven.ledger.release(record)
    assert driven.ledger.deferred_requests == ("a",)
    for at, block_id in enumerate(table[0]):
        engine.known["a", 0, at] = block_id
    driven.ledger.weights.set("a")
    driven.land(plans)
    assert not driven.ledger.offer_deferred() and not driven.ledger.deferred_requests
    driven.ledger.weights.set("")
    assert driven.ledger.lookup(Prefix.of(Root("test"), A)).num_host_tokens <= 4


# -- KV events -------------------------------------------------------------------------------------------------------


def test_routers_hear_of_what_can_be_found() -> None:
    """At a change, they hear that the cache was cleared, and then what the new epoch finds. They hear nothing of KV of
    other epochs, also when it is evicted or when a store of it lands."""
    driven = Driven(24, 24)
    changes = Changes(driven.ledger, 1000, lambda: None)
    changes.begin()
    record = driven.running(A)
    stores = driven.launch(driven.commit(record))

    def told() -> list[str]:
        return [
            "cleared" if isinstance(one, Cleared) else f"{one.kind.value} {one.root.weights_epoch}"
            for one in changes.take(1000)
        ]

    assert set(told()) == {"cleared", "stored "}
    driven.ledger.weights.set("a")
    assert told() == ["cleared"]
    for plan in stores:
        driven.end(plan)
    driven.release(record)
    driven.evict_device()
    assert told() == []
    driven.serve(A)
    assert set(told()) == {"stored a"}
    driven.ledger.weights.set("")
    assert told() == ["cleared", "stored "], "what the host has"
    changes.end()
    driven.ledger.weights.set("a")
    assert told() == ["cleared"], "the end"
