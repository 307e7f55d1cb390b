"""Restores: records that an earlier process left on the disk are found again, if they are valid and do not conflict."""

from __future__ import annotations

import random
from array import array
from typing import Any

import attrs
import pytest
from disk_driving import HUGE, Disk, labels_of
from driving import BLOCK, ROOT, prompt

from aoffload import KVCacheGroup, SlidingWindow
from aoffload._common.prefix import Root, encode_tokens
from aoffload._common.tiers import Tier
from aoffload._tiers.disk.plans import BlockLabel, RestoredRun
from aoffload._tiers.disk.rules import SlotPool
from aoffload.errors import InvalidArgument

WINDOWS = (
    [KVCacheGroup("full", block_size=BLOCK)],
    [KVCacheGroup("full", block_size=BLOCK), KVCacheGroup("near", SlidingWindow(2 * BLOCK), BLOCK)],
    [KVCacheGroup("one", block_size=BLOCK), KVCacheGroup("two", block_size=BLOCK // 2)],
)


class Records:
    """What stores have written to slots: the label of each."""

    def __init__(self) -> None:
        self.labels: dict[int, BlockLabel] = {}

    def write(self, disk: Disk) -> None:
        plans = disk.ledger.disk.plan_flush(HUGE)
        for plan in plans:
            for slot, label in zip(plan.destination_ids, labels_of([plan]), strict=True):
                assert label is not None
                self.labels[slot] = label
        disk.land(plans)

    def runs(self, disk: Disk, most_units: int = 1) -> list[RestoredRun]:
        """The units one by one, or up to `most_units` that follow each other; a prefix before what follows it."""
        units: dict[bytes, dict[tuple[int, int], int]] = {}
        labels: dict[bytes, BlockLabel] = {}
        for slot, label in self.labels.items():
            units.setdefault(label.digest, {})[label.component, label.place] = slot
            labels[label.digest] = label
        components = disk.ledger.layout.components
        found: list[RestoredRun] = []
        for digest, label in sorted(labels.items(), key=lambda item: item[1].position):
            slots = tuple(
                array("i", [units[digest][component.number, place] for place in range(component.width)])
                if (component.number, 0) in units[digest] else array("i")
                for component in components
            )  # fmt: skip
            at = label.position
            found.append(RestoredRun(label.root, label.before, digest, at, at + 1, label.tokens, slots))
        return self._joined(found, most_units)

    @staticmethod
    def _joined(found: list[RestoredRun], most_units: int) -> list[RestoredRun]:
        joined: list[RestoredRun] = []
        for run in found:
            front = next(
                (one for one in joined if one.digest == run.before and one.stop - one.start < most_units), None
            )
            followers = sum(other.before == run.before for other in found)
            if front is None or followers > 1 or [bool(ids) for ids in front.slots] != [bool(ids) for ids in run.slots]:
                joined.append(run)
                continue
            slots = tuple(mine + theirs for mine, theirs in zip(front.slots, run.slots, strict=True))
            joined[joined.index(front)] = attrs.evolve(
                front, digest=run.digest, stop=run.stop, tokens=front.tokens + run.tokens, slots=slots
            )
        return sorted(joined, key=lambda one: one.start)


PROMPTS = (
    [*prompt(1, 8 * BLOCK), 7],
    [*prompt(1, 5 * BLOCK), *prompt(2, 3 * BLOCK), 7],
    [*prompt(3, 2 * BLOCK), 7],
)


def _after_a_restart(groups: list[KVCacheGroup], most_units: int) -> tuple[Disk, list[RestoredRun]]:
    disk, records = Disk(64, 64, groups=groups), Records()
    for tokens in PROMPTS:
        disk.on_host_only(tokens)
    records.write(disk)
    return Disk(64, 64, groups=groups), records.runs(disk, most_units)


def _reach(disk: Disk, tokens: list[int]) -> int:
    """Tokens that hit, or would once they are fetched."""
    match = disk.ledger.lookup(disk.prefix(tokens))
    return match.num_tokens + match.num_lower_tokens


def _restore(disk: Disk, runs: list[RestoredRun]) -> int:
    taken = 0
    for run in runs:
        taken += disk.ledger.disk.restore(run)
        disk.ledger.check_integrity()
    return taken


@pytest.mark.parametrize("most_units", [1, 3, 100])
@pytest.mark.parametrize("groups", WINDOWS)
def test_what_was_stored_is_found_after_a_restart(groups: list[KVCacheGroup], most_units: int) -> None:
    """Whatever the cuts between the runs: all prompts are on the disk, and a fetch brings them."""
    disk, runs = _after_a_restart(groups, most_units)
    assert _restore(disk, runs) == sum(len(ids) for run in runs for ids in run.slots)
    for tokens in PROMPTS:
        assert _reach(disk, tokens) == len(tokens) - 1
        assert disk.fetched(tokens) == len(tokens) - 1
    found = disk.ledger.statistics().disk
    assert found is not None and found.num_pinned == 0
    assert _restore(disk, runs) == 0, "it is there already"


def test_another_root_finds_nothing() -> None:
    """The root is known by its digest alone: another salt hits nothing, and gets nothing of it."""
    disk, runs = _after_a_restart(WINDOWS[0], 100)
    _restore(disk, runs)
    salted = Root("test", "another tenant")
    assert disk.ledger.lookup(disk.prefix(PROMPTS[0], salted)).num_lower_tokens == 0
    assert Root.of_digest(ROOT.digest) == ROOT != Root.of_digest(salted.digest)


def test_what_follows_nothing_is_left_out() -> None:
    """An orphan takes no slot, and neither does what follows it."""
    disk, runs = _after_a_restart(WINDOWS[0], 2)
    runs.remove(next(run for run in runs if run.start == 0 and run.tokens.startswith(encode_tokens(PROMPTS[0][:1]))))
    assert _restore(disk, runs) == 2
    assert disk.on_disk(PROMPTS[0]) == 0
    assert disk.on_disk(PROMPTS[2]) == 2 * BLOCK


def test_wrong_tokens_are_left_out() -> None:
    """The digest is computed again: of the tokens that are to be found by it."""
    disk, runs = _after_a_restart(WINDOWS[0], 100)
    changed = attrs.evolve(runs[0], tokens=bytes(4) + runs[0].tokens[4:])
    for wrong in (changed, attrs.evolve(runs[0], root=Root("other").digest), attrs.evolve(runs[0], digest=bytes(32))):
        assert disk.ledger.disk.restore(wrong) == 0
    assert not disk.ledger.cache.index.runs


def test_slots_that_are_taken_are_left_out() -> None:
    """No slot has two owners; slots that no run names stay free."""
    disk, runs = _after_a_restart(WINDOWS[0], 100)
    assert disk.ledger.disk.restore(runs[0]) == len(runs[0].slots[0])
    other = next(run for run in runs if run.start == 0 and run.digest != runs[0].digest)
    taken = array("i", [*other.slots[0][:-1], runs[0].slots[0][0]])
    assert disk.ledger.disk.restore(attrs.evolve(other, slots=(taken,))) == 0
    found = disk.ledger.statistics().disk
    assert found is not None
    assert (found.num_cached, found.num_free) == (len(runs[0].slots[0]), 64 - len(runs[0].slots[0]))
    disk.ledger.check_integrity()


def test_nothing_is_restored_over_what_was_stored_since() -> None:
    """After the first store on the disk a slot may hold something else than a restart has read."""
    disk, runs = _after_a_restart(WINDOWS[0], 100)
    disk.on_host_only(prompt(9, 8 * BLOCK))
    assert disk.flush()
    free = [attrs.evolve(run, slots=(array("i", [slot + 20 for slot in run.slots[0]]),)) for run in runs]
    assert _restore(disk, runs) == _restore(disk, free) == 0


@pytest.mark.parametrize("tier", [None, Tier.DISK])
def test_nothing_is_restored_after_a_reset(tier: Tier | None) -> None:
    """What was forgotten stays forgotten, though the reading of it goes on."""
    disk, runs = _after_a_restart(WINDOWS[0], 2)
    _restore(disk, runs[:2])
    disk.ledger.reset(tier)
    assert _restore(disk, runs) == 0
    assert disk.on_disk(PROMPTS[0]) == 0


def test_a_host_reset_does_not_matter() -> None:
    """The disk keeps what it has, and gets the rest."""
    disk, runs = _after_a_restart(WINDOWS[0], 2)
    _restore(disk, runs[:2])
    disk.ledger.reset(Tier.HOST)
    assert _restore(disk, runs[2:]) > 0
    assert disk.on_disk(PROMPTS[0]) == 8 * BLOCK


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("groups", WINDOWS)
def test_requests_may_run_meanwhile(groups: list[KVCacheGroup], seed: int) -> None:
    """Prompts are computed, fetched, cached and evicted between the runs, which cuts and merges those in the index:
    what was given is found in the end."""
    chance = random.Random(seed)
    disk, runs = _after_a_restart(groups, chance.choice([1, 2, 5]))
    for run in runs:
        disk.ledger.disk.restore(run)
        disk.ledger.check_integrity()
        tokens = chance.choice(PROMPTS)[: chance.randint(1, 8 * BLOCK + 1)]
        match chance.randrange(5):
            case 0:
                disk.fetched(tokens)
            case 1:
                disk.serve(tokens)
            case 2:
                disk.evict_device()
            case 3:
                disk.ledger.reset(Tier.HOST)
    disk.forget_host()
    for tokens in PROMPTS:
        assert _reach(disk, tokens) == len(tokens) - 1
        assert disk.fetched(tokens) == len(tokens) - 1


def test_what_is_restored_is_evicted_first_and_from_its_tail() -> None:
    """A later store takes slots of what no request of this process has used, a prefix's tail before its head."""
    disk, runs = _after_a_restart(WINDOWS[0], 1)
    taken = _restore(disk, runs)
    num_stored = 64 - taken + 4
    disk.on_host_only(prompt(9, num_stored * BLOCK))
    disk.flush()
    disk.forget_host()
    kept = [disk.on_disk(tokens) // BLOCK for tokens in PROMPTS]
    assert disk.on_disk([*prompt(9, num_stored * BLOCK), 1]) == num_stored * BLOCK
    assert sum(kept) - 5 == taken - 4, "blocks in front of a gap would be lost, too"


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("run", lambda run: None),
        ("run.start", lambda run: attrs.evolve(run, start=-1)),
        ("run.stop", lambda run: attrs.evolve(run, stop=run.start)),
        ("run.digest", lambda run: attrs.evolve(run, digest="no")),
        ("run.tokens", lambda run: attrs.evolve(run, tokens=run.tokens[:-1])),
        ("run.slots", lambda run: attrs.evolve(run, slots=())),
        ("run.slots", lambda run: attrs.evolve(run, slots=(list(run.slots[0]),))),
        ("run.slots", lambda run: attrs.evolve(run, slots=(run.slots[0][:-1],))),
        ("run.slots", lambda run: attrs.evolve(run, slots=(array("i", [1] * len(run.slots[0])),))),
        ("run.slots", lambda run: attrs.evolve(run, slots=(array("i", range(60, 60 + len(run.slots[0]))),))),
    ],
)
def test_what_no_restart_can_leave_is_refused(name: str, change: Any) -> None:
    """By the name of the field, with nothing changed."""
    disk, runs = _after_a_restart(WINDOWS[0], 100)
    run = max(runs, key=lambda run: len(run.slots[0]))
    before = disk.picture()
    with pytest.raises(InvalidArgument, match=name):
        disk.ledger.disk.restore(change(run))
    assert disk.picture() == before


@pytest.mark.parametrize("seed", range(10))
def test_a_pool_hands_out_the_ids_that_are_asked_for(seed: int) -> None:
    """Against a set of the free ids: those that are free are taken, none else, and extents stay whole."""
    chance, pool, free = random.Random(seed), SlotPool(200), set(range(200))
    for _ in range(300):
        first = chance.randrange(200)
        ids = array("i", range(first, min(200, first + chance.randint(1, 12))))
        if chance.random() < 0.3:
            ids = array("i", chance.sample(range(200), 5))
        assert pool.are_free(ids) == free.issuperset(ids)
        if free.issuperset(ids):
            pool.take_ids(ids)
            free.difference_update(ids)
        elif chance.random() < 0.5 and pool.num_free:
            free.difference_update(pool.take(chance.randint(1, min(4, pool.num_free))))
        else:
            back = array("i", sorted(set(ids) - free))
            pool.give(back)
            free.update(back)
        assert set(pool.free_ids()) == free and pool.num_free == len(free)
    assert encode_tokens([1]) == b"\1\0\0\0"
