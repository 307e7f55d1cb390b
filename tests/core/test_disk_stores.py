"""Stores on the disk: blocks are stored before their eviction from the host, in whole prefixes, labelled, and within a
budget."""

from __future__ import annotations

import hashlib
import random

import pytest
from disk_driving import HUGE, Disk, labels_of
from driving import BLOCK, ROOT, prompt

from aoffload import KVCacheGroup, SlidingWindow
from aoffload._common.prefix import KeySpan, encode_tokens
from aoffload._common.tiers import Tier
from aoffload._kernel.plans import TransferPlan
from aoffload._kernel.states import Outcome
from aoffload._tiers.disk.plans import DiskPayload
from aoffload._tiers.lower.rules import MAX_SCANNED
from aoffload.errors import ConfigError, InvalidArgument


def test_nothing_goes_down_while_the_host_has_room() -> None:
    """The disk is written to when the host comes near to evicting, not before."""
    disk = Disk()
    disk.on_host_only(prompt(1, 9 * BLOCK))
    assert disk.write_behind() == []


def test_what_the_host_is_about_to_evict_goes_down_first() -> None:
    """Once the free blocks are fewer than an eighth of the host, the oldest prefixes are stored, whole and in order."""
    disk = Disk()
    disk.on_host_only(prompt(1, 9 * BLOCK))
    disk.on_host_only(prompt(2, 6 * BLOCK))
    (plan,) = disk.write_behind()
    assert (plan.link, plan.num_blocks) == ((Tier.HOST, Tier.DISK), 9), "the prefix of the oldest blocks, from its head"
    assert disk.write_behind() == [], "it is under way"
    disk.land([plan])
    assert disk.write_behind() == [], "and then it is there"
    assert disk.ledger.statistics().disk is not None
    assert disk.ledger.statistics().disk.num_cached == 9


def test_a_budget_cuts_the_end_off_not_the_front() -> None:
    """At most so many blocks are stored in one call; the next one goes on after them, though nothing has changed."""
    disk = Disk()
    disk.on_host_only(prompt(1, 16 * BLOCK))
    first = disk.write_behind(3)
    assert [plan.num_blocks for plan in first] == [3]
    assert [label.position for label in labels_of(first) if label] == [0, 1, 2]
    assert disk.write_behind(0) == []
    disk.land(first)
    second = disk.write_behind(4)
    assert [label.position for label in labels_of(second) if label] == [3, 4, 5, 6]
    disk.land(second)
    assert disk.on_disk(prompt(1, 16 * BLOCK)) == 0, "the host has it"
    disk.forget_host()
    assert disk.on_disk(prompt(1, 16 * BLOCK)) == 7 * BLOCK


def test_a_label_says_what_a_restart_can_prove() -> None:
    """Digests through the unit and before it, the unit's tokens, the root without its keys: all from the tokens."""
    disk, tokens = Disk(), prompt(1, 3 * BLOCK)
    disk.on_host_only(tokens)
    (plan,) = disk.flush()
    digests = [b""]
    for stop in (1, 2, 3):
        digests.append(hashlib.sha256(ROOT.digest + encode_tokens(tokens[: stop * BLOCK])).digest())
    for position, label in enumerate(labels_of([plan])):
        assert label is not None
        assert (label.component, label.place, label.position, label.root) == (0, 0, position, ROOT.digest)
        assert (label.before, label.digest) == (digests[position], digests[position + 1])
        assert label.tokens == encode_tokens(tokens[position * BLOCK : (position + 1) * BLOCK])


def test_a_store_behind_another_has_the_labels_of_its_place() -> None:
    """Labels do not depend on how the index cuts its runs: those of a job that begins within a prefix are the same."""
    disk, tokens = Disk(16, 32, max_job_bytes="2B"), prompt(1, 8 * BLOCK)
    disk.on_host_only(tokens)
    disk.on_host_only([*tokens[: 5 * BLOCK], *prompt(2, 2 * BLOCK)])
    labels = {}
    for _ in range(8):
        plans = disk.ledger.disk.plan_flush(3)
        disk.land(plans)
        labels.update({label.digest: label for label in labels_of(plans) if label})
    whole = hashlib.sha256(ROOT.digest + encode_tokens(tokens)).digest()
    for stop in range(8, 1, -1):
        label = labels[whole]
        assert label.position == stop - 1
        whole = label.before
        assert whole == hashlib.sha256(ROOT.digest + encode_tokens(tokens[: (stop - 1) * BLOCK])).digest()
    assert len(labels) == 10


@pytest.mark.parametrize("flush", [False, True])
def test_units_that_a_span_touches_have_no_label(flush: bool) -> None:
    """What an image stands for is not in the tokens, so no restart can prove it, nor the part after it."""
    disk, tokens = Disk(num_host=6), prompt(1, 6 * BLOCK)
    disk.on_host_only(tokens, key_spans=[KeySpan(2 * BLOCK + 1, 3 * BLOCK, b"image")])
    plans = disk.flush() if flush else disk.write_behind()
    assert [label is None for label in labels_of(plans)] == [False, False, True, True, True, True]


def test_a_plan_says_how_often_the_disk_was_reset() -> None:
    """What was planned before a reset stays of before, whatever is written later."""
    disk = Disk(32, 32)
    disk.on_host_only(prompt(1, 32 * BLOCK))
    (before,) = disk.write_behind(2)
    disk.ledger.reset(Tier.DISK)
    (after,) = disk.write_behind(2)
    assert [DiskPayload.of(plan).generation for plan in (before, after)] == [0, 1]
    disk.land([before, after])
    disk.forget_host()
    assert disk.on_disk(prompt(1, 32 * BLOCK)) == 2 * BLOCK, "of the second one"
    disk.ledger.reset()
    disk.on_host_only(prompt(2, 32 * BLOCK))
    assert DiskPayload.of(disk.write_behind(2)[0]).generation == 2


def test_the_disk_evicts_its_oldest() -> None:
    """Disk space is made by its own order: the tails of what was stored first."""
    disk = Disk(num_slots=8)
    disk.on_disk_only(prompt(1, 6 * BLOCK))
    disk.on_disk_only(prompt(2, 5 * BLOCK))
    assert disk.on_disk([*prompt(1, 6 * BLOCK), 1]) == 3 * BLOCK
    assert disk.on_disk([*prompt(2, 5 * BLOCK), 1]) == 5 * BLOCK


def test_a_flush_keeps_what_was_used_last() -> None:
    """Where the disk cannot hold all that the host has, what was used last is stored, and nothing evicts it again."""
    disk = Disk(num_host=32, num_slots=8)
    for name in (1, 2, 3, 4):
        disk.on_host_only(prompt(name, 4 * BLOCK))
    for _ in range(20):
        disk.land(disk.ledger.disk.plan_flush(3))
    disk.forget_host()
    assert [disk.on_disk([*prompt(name, 4 * BLOCK), 1]) // BLOCK for name in (1, 2, 3, 4)] == [0, 0, 4, 4]


@pytest.mark.parametrize("seed", range(8))
def test_a_flush_writes_each_block_once(seed: int) -> None:
    """A host that holds more than the disk, whatever both have at first, however many blocks a call may store and in
    whatever order the stores end: no more is written than the disk holds, which then has what was used last."""
    rng = random.Random(seed)
    disk = Disk(num_host=48, num_slots=rng.choice([9, 10, 11, 13]))
    for name in range(1, 4):
        disk.on_host_only(prompt(name, rng.randrange(1, 8) * BLOCK))
        disk.land(disk.write_behind(rng.randrange(8), is_idle=True))
    for name in range(4, 9):
        tokens = prompt(rng.choice([name, 4]), 2 * BLOCK) + prompt(name, rng.randrange(1, 5) * BLOCK)
        disk.on_host_only(tokens)
    num_written, in_flight = 0, list[TransferPlan]()
    capacity = disk.ledger.cache.tiers[Tier.DISK].capacity
    while (plans := disk.launch(disk.ledger.disk.plan_flush(rng.randrange(1, 6)))) or in_flight:
        disk.ledger.check_integrity()
        num_written += sum(plan.num_blocks for plan in plans)
        assert num_written <= capacity
        in_flight += plans
        if in_flight and (not plans or rng.random() < 0.4):
            disk.end(in_flight.pop(rng.randrange(len(in_flight))))
    left, newest = capacity, [part.run for part in reversed(list(disk.ledger.cache.tiers[Tier.HOST].order))]
    for run in newest:
        here, there = run.parts[Tier.HOST], run.parts[Tier.DISK]
        assert len(there.blocks) >= min(left, len(here.blocks)), run
        if (left := left - len(here.blocks)) <= 0:
            break


def test_what_was_asked_for_twice_goes_down_while_the_disk_is_idle() -> None:
    """It is worth writing before the host evicts it. What was asked for once waits until then."""
    disk = Disk(num_host=64)
    for name in (1, 2, 3):
        disk.on_host_only(prompt(name, 4 * BLOCK))
    disk.serve(prompt(2, 4 * BLOCK))
    assert disk.write_behind() == []
    disk.land(disk.write_behind(is_idle=True))
    disk.forget_host()
    assert [disk.on_disk([*prompt(name, 4 * BLOCK), 1]) // BLOCK for name in (1, 2, 3)] == [0, 4, 0]


@pytest.mark.parametrize("num_before", [0, MAX_SCANNED - 1])
def test_the_front_of_what_was_used_together_goes_down_where_its_tail_has_nothing_to_store(num_before: int) -> None:
    """A prompt in the host, the front of which was asked for twice, and not its tail: the front is stored, even if a
    scan ends between the two."""
    disk, tokens = Disk(num_device=32, num_host=128), prompt(1, 8 * BLOCK)
    for name in range(num_before):
        disk.on_host_only(prompt(100 + name, BLOCK))
    disk.serve(tokens)
    # It hits the front on the device, and stores nothing: in the host, front and tail are as they were used last.
    disk.serve([*tokens[: 4 * BLOCK], *prompt(2, 4 * BLOCK)], max_store_tokens=4 * BLOCK)
    *_, tail, front = disk.ledger.cache.tiers[Tier.HOST].order
    assert (tail.first, front.first, tail.last_use) == (4, 0, front.last_use)
    if num_before:
        assert disk.write_behind(is_idle=True) == []
        disk.on_host_only(prompt(99, 8 * BLOCK))
    (plan,) = disk.write_behind(is_idle=True)
    assert [label.position for label in labels_of([plan]) if label] == [0, 1, 2, 3]
    disk.land([plan])
    assert disk.write_behind(is_idle=True) == [], "the front is there already, and so is all that was asked for twice"


def test_an_idle_disk_evicts_nothing() -> None:
    """A host larger than the disk would otherwise be written round and round."""
    disk = Disk(num_host=64, num_slots=6)
    for name in (1, 2, 3, 1, 2, 3):
        disk.on_host_only(prompt(name, 4 * BLOCK))
    written = 0
    for name in range(4, 14):
        plans = disk.write_behind(is_idle=True)
        written += sum(plan.num_blocks for plan in plans)
        disk.land(plans)
        disk.serve(prompt(name, BLOCK))
    assert written == 6


def test_only_what_was_asked_for_twice() -> None:
    """With little budget left, what is about to be evicted goes down only if it was asked for twice."""
    disk = Disk()
    disk.on_host_only(prompt(1, 8 * BLOCK))
    disk.on_host_only(prompt(2, 8 * BLOCK))
    assert disk.write_behind(only_requested_twice=True) == []
    (plan,) = disk.write_behind()
    disk.land([plan])
    disk = Disk()
    disk.on_host_only(prompt(1, 8 * BLOCK))
    disk.on_host_only(prompt(2, 8 * BLOCK))
    disk.admit(prompt(1, 5 * BLOCK))  # another request for its front, which hits no more than that
    (plan,) = disk.write_behind(only_requested_twice=True)
    assert plan.num_blocks == 5


def test_what_lies_behind_a_corrupt_block_is_not_stored() -> None:
    """It could not be published there, so it would be written again and again."""
    disk, tokens = Disk(20), [*prompt(1, 16 * BLOCK), 7]
    disk.on_host_only(tokens)
    request = disk.allocated(tokens)
    for plan in disk.launch(disk.ledger.plan_load(request)):
        disk.end(plan, Outcome.CORRUPT, 3, [3])
    disk.release(request, "failed")
    plans = disk.write_behind()
    assert sum(plan.num_blocks for plan in plans) <= 3
    disk.land(plans)
    for _ in range(3):
        disk.land(disk.flush())
    found = disk.ledger.statistics().disk
    assert found is not None and found.num_cached == 3


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.UNPROVEN, Outcome.CORRUPT])
def test_a_store_that_fails_changes_nothing_above(outcome: Outcome) -> None:
    """The host keeps what it has; the slots are free again, or in quarantine while nobody knows."""
    disk, tokens = Disk(20), [*prompt(1, 16 * BLOCK), 7]
    disk.on_host_only(tokens)
    (plan,) = disk.launch(disk.write_behind(8))
    disk.end(plan, outcome, 2, [3] if outcome is Outcome.CORRUPT else ())
    found = disk.ledger.statistics().disk
    assert found is not None
    assert (found.num_cached, found.num_quarantined) == ((0, 8) if outcome is Outcome.UNPROVEN else (2, 0))
    assert disk.hit(tokens) == (0, 16 * BLOCK)
    if outcome is Outcome.UNPROVEN:
        disk.end(plan, Outcome.LANDED)
        late = disk.ledger.statistics().disk
        assert late is not None and late.num_free == late.num_blocks


@pytest.mark.parametrize("flush", [False, True])
def test_windows_go_down_with_their_prefix(flush: bool) -> None:
    """A prefix on the disk has what a hit at its end needs of every group."""
    groups = [KVCacheGroup("full", block_size=BLOCK), KVCacheGroup("near", SlidingWindow(2 * BLOCK + 1), BLOCK)]
    disk, tokens = Disk(32, 14, groups=groups), [*prompt(1, 10 * BLOCK), 7]
    disk.on_host_only(tokens)
    disk.land(disk.ledger.disk.plan_flush(HUGE) if flush else disk.write_behind())
    disk.forget_host()
    assert disk.on_disk(tokens) == 10 * BLOCK
    assert disk.fetched(tokens) == 10 * BLOCK
    assert disk.hit(tokens) == (0, 10 * BLOCK)


@pytest.mark.parametrize("when", ["landed", "launched", "queued"])
def test_what_a_failed_forward_has_left_there_is_told(when: str) -> None:
    """A restart would find it by its label. Slots of what is right are not named, and none is named twice."""
    disk, tokens = Disk(), prompt(1, 6 * BLOCK)
    request = disk.running(tokens)
    disk.land(disk.commit(request))
    (plan,) = disk.ledger.disk.plan_flush(HUGE)
    if when != "queued":
        disk.launch([plan])
    if when == "landed":
        disk.end(plan)
    disk.ledger.invalidation.invalidate(request, 4 * BLOCK)
    disk.ledger.check_integrity()
    if when == "launched":
        assert not disk.ledger.disk.take_forgotten(), "it may still be written"
        disk.end(plan)
    elif when == "queued":
        disk.land([plan])
    # Of a store that was under way nothing is found, so its labels must go as a whole.
    expected = plan.destination_ids[4:] if when == "landed" else plan.destination_ids
    assert sorted(disk.ledger.disk.take_forgotten()) == sorted(expected)
    assert not disk.ledger.disk.take_forgotten()


@pytest.mark.parametrize("way", ["evicted", "given up", "reset"])
def test_slots_that_were_freed_may_hold_what_is_taken_back(way: str) -> None:
    """A slot keeps its record until something is stored in its place: if a forward has failed, nobody knows which of
    those that were freed have something of it. A reset leaves none that a restart finds."""
    disk, tokens = Disk(num_slots=6), prompt(1, 6 * BLOCK)
    request = disk.running(tokens)
    disk.land(disk.commit(request))
    (plan,) = disk.ledger.disk.plan_flush(HUGE)
    disk.launch([plan])
    if way == "given up":
        disk.end(plan, Outcome.UNPROVEN)
        disk.end(plan, Outcome.FAILED)
        assert sorted(disk.ledger.disk.take_forgotten()) == sorted(plan.destination_ids)
    else:
        disk.end(plan)
    if way == "reset":
        disk.ledger.reset(Tier.DISK)
    if way == "evicted":
        other = disk.running(prompt(2, 2 * BLOCK))
        disk.land(disk.commit(other))
        (failed,) = disk.ledger.disk.plan_stores(HUGE) or disk.ledger.disk.plan_flush(HUGE)
        disk.ledger.discard(failed.job_id)  # two slots are evicted for it in vain
    freed = set(disk.ledger.cache.tiers[Tier.DISK].pool.free_ids())
    disk.ledger.invalidation.invalidate(request, 0)
    forgotten = set(disk.ledger.disk.take_forgotten())
    assert forgotten >= freed if way != "reset" else not forgotten
    assert forgotten >= set(plan.destination_ids) or way == "reset"


def test_without_a_disk_nothing_is_planned() -> None:
    """Its handle names the key of the configuration, and there is nothing to reset."""
    disk = Disk()
    disk.ledger = type(disk.ledger)(type(disk.ledger.config)(groups=disk.ledger.config.groups, num_host_blocks=4), 8)
    with pytest.raises(ConfigError, match=r"^disk: "):
        disk.ledger.disk.plan_stores(8)
    assert disk.ledger.statistics().disk is None
    with pytest.raises(InvalidArgument, match="tier"):
        disk.ledger.reset(Tier.DISK)


IDLE_GROUPS = {
    "full": [KVCacheGroup("full", block_size=BLOCK)],
    "a window": [KVCacheGroup("full", block_size=BLOCK), KVCacheGroup("w", SlidingWindow(3), BLOCK)],
}


@pytest.mark.parametrize("eviction", ["lru", "learned"])
@pytest.mark.parametrize("groups", IDLE_GROUPS)
@pytest.mark.parametrize(("num_slots", "most"), [(2, 3), (7, 1), (7, 3), (12, 1)])
def test_an_idle_ledger_comes_to_rest(eviction: str, groups: str, num_slots: int, most: int) -> None:
    """On a disk that holds less than the host is about to evict, each store evicts what an earlier one has brought.
    While nobody asks for anything, no block is written twice, and after a while nothing is written."""
    disk = Disk(64, 160, num_slots, groups=IDLE_GROUPS[groups], eviction=eviction)
    for number in range(60):
        disk.on_host_only(prompt(number, 4 * BLOCK))
    seen = list[bytes]()
    while plans := disk.write_behind(most, is_idle=True):
        seen += [label.digest + bytes([label.component]) for label in labels_of(plans) if label is not None]
        disk.land(plans)
        assert len(set(seen)) == len(seen)
    assert num_slots < 4 or seen
    assert not disk.ledger.disk.stores_are_due
    for number in range(100, 160):
        disk.on_host_only(prompt(number, 4 * BLOCK))
    assert num_slots < 4 or disk.write_behind(most), "what comes nearer to its eviction is stored as before"
