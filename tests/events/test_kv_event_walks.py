"""The published KV events equal the cached blocks after every call of random walks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from engine_random_walk import EngineWalk
from event_subscriber import EventSubscriber, cached_blocks
from random_walk import Walk

from aoffload import Ledger, Tier
from aoffload._kernel.cache import PrefixCache
from aoffload._kernel.pools import TierBlocks
from aoffload._kernel.records import Run
from aoffload._observe.kv_events.changes import Changes
from aoffload._observe.kv_events.format import EventEncoder, EventFormat

NUM_WALKS = 40
NUM_CALLS = 500


class FollowedLedger:
    """A ledger whose events are encoded, decoded and followed after every call."""

    def __init__(self, ledger: Ledger, most: int = 10**6) -> None:
        self.ledger = ledger
        self.changes = Changes(ledger, most, lambda: None)
        self.encoder = EventEncoder(ledger.layout, EventFormat(), 0)
        self.follower = EventSubscriber()
        self.counts: Counter[str] = Counter()
        self.changes.begin()

    def publish(self) -> None:
        self.changes.expect()
        while told := self.changes.take(7):
            self.counts.update(type(one).__name__ for one in told)
            self.follower.apply(self.encoder.batch(told, 0.0))

    def check(self) -> None:
        self.publish()
        assert self.follower.cached == cached_blocks(self.ledger)


def followed_walk(kind: type[Any], seed: int, **options: Any) -> tuple[Any, FollowedLedger]:
    """What is right of a walk without its follower, the core's own tests of walks say."""
    walk = kind(seed, **options)
    followed = FollowedLedger(walk.ledger)
    walk.check = followed.check
    return walk, followed


@pytest.mark.parametrize("with_windows", [False, True], ids=["full attention", "windows"])
def test_a_subscriber_rebuilds_exactly_what_is_cached(with_windows: bool) -> None:
    """Whatever is published, evicted, stored, loaded, corrupt, given up, invalidated, reset, preempted or forked: a
    subscriber that knows only the format has the same blocks for each tier and group, with the same tokens."""
    seen: Counter[str] = Counter()
    for seed in range(NUM_WALKS):
        walk, followed = followed_walk(Walk, seed, with_windows=with_windows)
        seen.update(walk.run(NUM_CALLS))
        seen.update(followed.counts)
        seen["events"] += followed.follower.num_events
    happened = ("device hit", "host hit", "invalidated", "reset", "preempted", "forked", "load corrupt", "store failed")
    assert min(seen[what] for what in happened) > 0, seen
    assert seen["events"] > 2000 and seen["Cleared"] > NUM_WALKS


def test_of_blocks_that_an_engine_keeps_nothing_is_told() -> None:
    """What an engine has on its device it can tell itself; what is stored of it is ours to tell."""
    num_events = 0
    for seed in range(NUM_WALKS // 2):
        walk, followed = followed_walk(EngineWalk, seed)
        assert walk.ledger.cache.tiers[Tier.DEVICE].watcher is None
        walk.run(NUM_CALLS)
        assert all(medium == "CPU" for medium, _, _ in followed.follower.cached)
        num_events += followed.follower.num_events
    assert num_events > 200


@pytest.mark.parametrize("with_windows", [False, True], ids=["full attention", "windows"])
def test_who_is_too_slow_is_told_anew(with_windows: bool) -> None:
    """However rarely it is looked at, what is waiting is bounded, and what is told in the end is what is cached."""
    for seed in range(20):
        walk = Walk(seed, with_windows=with_windows)
        followed = FollowedLedger(walk.ledger, most=5)
        for _ in range(10):
            for _ in range(20):
                getattr(walk, walk.random.choices(list(walk.OPERATIONS), walk.weights)[0])()
                assert len(followed.changes._told) <= followed.changes._limit + 4
            followed.check()


def test_who_has_missed_too_much_is_told_anew() -> None:
    """A subscriber that asks for what is no longer kept gets it all with the next change."""
    walk = Walk(3, is_plain=True)
    followed = FollowedLedger(walk.ledger)
    walk.run(40)
    followed.publish()
    assert cached_blocks(walk.ledger)
    followed.follower = EventSubscriber()  # as one that begins now, with nothing to be had from before
    followed.changes.fall_behind()
    before = followed.counts["Cleared"]
    while followed.counts["Cleared"] == before:
        walk.run(1)
        followed.publish()
    followed.check()


def skip(monkeypatch: pytest.MonkeyPatch, kind: type[Any], name: str) -> None:
    """Have one place in the core forget to tell."""
    call = getattr(kind, name)

    def silent(self: Any, *args: Any) -> Any:
        tiers = [value for value in (self, *args) if isinstance(value, TierBlocks)]
        tiers = tiers or list(self.tiers)
        watchers = [tier.watcher for tier in tiers]
        for tier in tiers:
            tier.watcher = None
        try:
            return call(self, *args)
        finally:
            for tier, watcher in zip(tiers, watchers, strict=True):
                tier.watcher = watcher

    monkeypatch.setattr(kind, name, silent)


@pytest.mark.parametrize(
    ("kind", "name"),
    [(TierBlocks, "trim"), (PrefixCache, "forget"), (PrefixCache, "reset"), (PrefixCache, "withdraw_part")],
)
def test_a_place_that_forgets_to_tell_is_noticed(monkeypatch: pytest.MonkeyPatch, kind: type[Any], name: str) -> None:
    """The negative control: with any one of them silent, some walk ends with another set of blocks."""
    skip(monkeypatch, kind, name)
    walks = (followed_walk(Walk, seed, with_windows=True)[0] for seed in range(NUM_WALKS))
    with pytest.raises((AssertionError, KeyError)):
        sum((walk.run(NUM_CALLS) for walk in walks), Counter())


def test_nobody_watches_unless_asked() -> None:
    """A ledger that nobody follows tells nobody, and one that is followed no more, neither."""
    walk = Walk(1)
    assert all(tier.watcher is None for tier in walk.ledger.cache.tiers)
    followed = FollowedLedger(walk.ledger)
    assert all(tier.watcher is not None for tier in walk.ledger.cache.tiers)
    followed.changes.end()
    assert all(tier.watcher is None for tier in walk.ledger.cache.tiers)


def test_parts_that_only_change_hands_are_not_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is cut, joined or moved holds what it held: the ledger says nothing of it."""
    walk, followed = followed_walk(Walk, 5, with_windows=True)
    watcher, splits = followed.changes, list[int]()
    split = PrefixCache.split

    def quiet_split(self: PrefixCache, run: Run, at: int) -> Run:
        before = len(watcher._told)
        head = split(self, run, at)
        splits.append(len(watcher._told) - before)
        return head

    monkeypatch.setattr(PrefixCache, "split", quiet_split)
    walk.run(NUM_CALLS)
    assert splits and not any(splits)
