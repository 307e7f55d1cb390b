"""Learned eviction: the estimates, suffixes that are evicted before their prefixes, the guard, and hints."""

from __future__ import annotations

import itertools
import random
from bisect import bisect_right
from typing import Any

import pytest
from driving import BLOCK, Driven, prompt

from aoffload import ConfigError, InvalidArgument, KVCacheGroup, SlidingWindow
from aoffload._common.prefix import Prefix, Root
from aoffload._common.tiers import Tier
from aoffload._config.groups import FullAttention
from aoffload._eviction.counts import MAX_RUN_TOKENS, CountedRun, HitCounts
from aoffload._eviction.learned import (
    NUM_BINS,
    NUM_CLASSES,
    TOP_USES,
    Guard,
    LearnedOrder,
    ReturnTimes,
    class_of,
    num_sampled,
    sample_of,
)
from aoffload._eviction.status import EvictionRule, HintEnd, TierEviction
from aoffload._kernel.events import Observer
from aoffload._kernel.layout import Layout
from aoffload._kernel.tokens import TokenSequence
from aoffload.ledger import Event, EvictionSwitched, HintEnded, HintGiven, LearnedEviction

A, B, C, D = (prompt(name, 17) for name in (1, 2, 3, 4))
"""Four blocks and one more token each."""
LAYOUT = Layout.of([KVCacheGroup("full", FullAttention(), 1)])


def learned(
    num_device: int = 8, num_host: int = 8, *, device: bool = False, observer: Observer | None = None, **config: Any
) -> Driven:
    return Driven(num_device, num_host, observer=observer, eviction=LearnedEviction(device=device), **config)


def host_order(driven: Driven) -> list[Any]:
    return list(driven.ledger.cache.tiers[Tier.HOST].order)


# -- what is learned ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_worth_falls_with_age_and_rises_with_use(seed: int) -> None:
    """Whatever was seen: so a prefix is worth at least as much as the part after it, which is older and less used."""
    rng = random.Random(seed)
    times = ReturnTimes(rng.choice((1, 40, 5000)))
    last = dict[int, tuple[int, int]]()
    for _ in range(700):
        name, size = int(80 * rng.random() ** 3), rng.randint(1, 30)
        since, uses = last.get(name, (0, 0))
        if uses:
            times.returned(class_of(uses), since, size)
        last[name] = (times.clock, uses + 1)
        by_class = [0] * NUM_CLASSES
        by_class[class_of(uses + 1)] = size
        times.asked(by_class)
    ages = sorted(rng.randrange(10**6) for _ in range(100))
    for of_class in range(NUM_CLASSES):
        worths = [times.worth(of_class, age) for age in ages]
        assert worths == sorted(worths, reverse=True)
        if of_class:
            assert all(worth >= times.worth(of_class - 1, age) for age, worth in zip(ages, worths, strict=True))


def test_what_returns_soon_is_worth_more() -> None:
    """Units asked for twice return within moments, others never: the former are worth much more."""
    times, since = ReturnTimes(1000), 0
    for number in range(1000):
        if number % 2:
            if since:
                times.returned(1, since, 10)
            since = times.clock
            times.asked([0, 10, 0, 0])
        else:
            times.asked([10, 0, 0, 0])
    assert times.worth(1, 5) > 5 * times.worth(0, 5)


def test_what_is_counted_stays_small() -> None:
    """However many requests come: of the past, the less is kept the longer ago it is."""
    times = ReturnTimes(10_000)
    for _ in range(60_000):
        times.asked([30, 0, 0, 0])
    assert len(times._past) <= 16 * NUM_BINS


def test_what_has_not_returned_is_at_risk_in_each_bin_that_it_reached() -> None:
    """Half of the units return after 1,000 others, the rest never: half of them come into all later bins."""
    times, asked = ReturnTimes(1000), list[int]()
    for number in range(3000):
        if number >= 100 and number % 2:
            times.returned(0, asked[number - 100], 10)
        asked.append(times.clock)
        times.asked([10, 0, 0, 0])
    (reached, *_), (returned, *_) = times._reached(), times._returned
    at = bisect_right(times._ends, 1000)
    assert returned[at] == sum(returned) and returned[at] == pytest.approx(reached[at] / 2, rel=0.05)
    assert reached[at + 1] == pytest.approx(times._asked_before(times.clock - times._ends[at])[0] / 2, rel=0.05)


# -- the order ----------------------------------------------------------------------------------------------------


def test_what_was_asked_for_often_outlives_what_was_used_last() -> None:
    """Once it is known that prompts asked for once do not return, they go first, however late they came."""
    driven = learned(num_device=8, num_host=24)
    for number in range(1600):
        driven.serve(prompt(100 + number, 17) if number % 4 else A)
    driven.serve(A)
    for number in range(6):  # more than the host holds
        driven.serve(prompt(5000 + number, 17))
    assert sum(driven.hit(A)) == 16


def test_it_remembers_what_was_evicted() -> None:
    """How often a prompt was asked for counts also after nothing of it is cached any more."""
    driven = learned(num_device=8, num_host=8)
    driven.serve(A)
    driven.serve(B)
    driven.serve(C)
    driven.serve(D)
    assert sum(driven.hit(A)) == 0
    driven.serve(A)
    assert {part.rank for part in host_order(driven) if part.run.tokens[0] == A[0] % 256} == {1}


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_a_prefix_loses_its_tail_before_its_head(seed: int, device: bool, groups: int) -> None:
    """In every tier, whichever order rules, and whatever hints spare."""
    rng = random.Random(seed)
    kinds = [KVCacheGroup("full", block_size=BLOCK), KVCacheGroup("window", SlidingWindow(9), BLOCK)][:groups]
    driven = learned(16 * groups, 24 * groups, device=device, groups=kinds)
    beginnings = [prompt(name, 12) for name in range(2)]
    for number in range(250):
        tokens = [*rng.choice(beginnings), *prompt(10 + rng.randrange(6), rng.randint(1, 30))]
        if rng.random() < 0.2:
            driven.ledger.eviction.hint(driven.prefix(tokens), expires_at=number + rng.randint(1, 30))
        driven.ledger.lapse(number)
        driven.serve(tokens)
        for tier in driven.ledger.cache.tiers:
            order = list(tier.order)
            assert tier.order.oldest() is (order[0] if order else None)
            places = {part: at for at, part in enumerate(order)}
            for part, at in places.items():
                head = part.run.before
                if not part.component and head is not None and head.parts[part.tier] in places:
                    assert places[head.parts[part.tier]] > at
            for run in driven.ledger.cache.index.runs.values():
                for part, head in zip(run.parts, run.before.parts if run.before is not None else (), strict=False):
                    assert part.rank // NUM_CLASSES <= head.rank // NUM_CLASSES, "spared longer than its head"


def test_a_reset_forgets_no_counts_and_keeps_its_kind() -> None:
    """After a reset the order learns on, from an empty cache."""
    driven = learned()
    driven.serve(A)
    driven.ledger.reset()
    assert isinstance(driven.ledger.cache.tiers[Tier.HOST].order, LearnedOrder)
    driven.serve(A)
    assert {part.rank for part in host_order(driven)} == {1}


# -- the guard ----------------------------------------------------------------------------------------------------


def test_the_last_use_rules_where_it_hits_more() -> None:
    """Where counts say the opposite of what is right, the guard sees it within some hundred requests."""
    rng, times = random.Random(3), ReturnTimes(2000)
    guard = Guard(times, 2000)
    assert not guard.is_learned and Guard(times, 20).is_learned
    guard.is_learned = True
    counts = HitCounts(LAYOUT, 20_000, 1, guard)
    for number in range(600):  # those asked for often are over, and what is new returns once
        name = number // 8 if number % 2 else 10_000 + number // 2 - rng.choice((0, 0, 12))
        tokens = [name * 1000 + at for at in range(64)]
        path = counts.path(TokenSequence(Prefix.of(Root(""), tokens), 1), 0, 64)
        by_class = [0] * NUM_CLASSES
        for counted in path:
            counted.used(times.clock)
            by_class[class_of(counted.num_uses)] += 64
        if sample := sample_of(path):
            guard.asked(sample)
        times.asked(by_class)
        counts.trim()
    for shadow in (guard._learned, guard._last_used):
        held = [size for ring in shadow.rings for size in ring.values()]
        assert sum(held) == shadow.num_held > 0 and shadow.num_held <= shadow.capacity
        assert min(held) > 0
    assert not guard.is_learned and guard.learned_hits < guard.last_used_hits
    for hits, rules in ((99.0, False), (102.0, True), (99.9, True), (99.0, False)):
        guard.learned_hits, guard.last_used_hits = hits, 100.0
        guard.judge()
        assert guard.is_learned is rules


class Heard:
    def __init__(self) -> None:
        self.switches: list[TierEviction] = []
        self.hints: list[tuple[int, str, int | HintEnd]] = []

    def observe(self, event: Event) -> None:
        match event:
            case EvictionSwitched(tier):
                self.switches.append(tier)
            case HintGiven(hint_id, category, num_tokens):
                self.hints.append((hint_id, category, num_tokens))
            case HintEnded(hint_id, category, end):
                self.hints.append((hint_id, category, end))


def hit_lately(driven: Driven, learned: float, last_use: float) -> None:
    """So often, in the small caches of the host's guard."""
    learning = driven.ledger.eviction.learning
    guard = learning.guards[Tier.HOST]
    guard.learned_hits, guard.last_used_hits = learned, last_use


def test_a_switch_of_the_ruling_order_is_told_once_and_evictions_are_counted_by_it() -> None:
    """To the observer, with the hits that speak for it; `statistics()` has the same."""
    heard = Heard()
    driven = learned(num_device=24, num_host=20, observer=heard)
    found = driven.ledger.statistics().eviction
    assert found is not None and found.tiers[0].rule is EvictionRule.LEARNED and not found.num_remembered_runs
    names = itertools.count(1)

    def serve_some() -> None:
        """New prompts: some of them are in the guard's sample."""
        for name in itertools.islice(names, 16):
            driven.serve(prompt(name, 65))

    serve_some()
    assert driven.ledger.cache.tiers[Tier.HOST].num_evicted and not heard.switches
    hit_lately(driven, 90.0, 100.0)
    serve_some()
    (switch,) = heard.switches
    assert (switch.tier, switch.rule, switch.num_switches) == (Tier.HOST, EvictionRule.LRU, 1)
    assert 60 < switch.learned_hits < switch.lru_hits and switch.num_evicted_learned > 0 == switch.num_evicted_lru
    hit_lately(driven, 102.0, 100.0)
    serve_some()
    assert [each.rule for each in heard.switches] == [EvictionRule.LRU, EvictionRule.LEARNED]
    statistics = driven.ledger.statistics()
    assert statistics.eviction is not None
    (host,) = statistics.eviction.tiers
    assert statistics.learned == (Tier.HOST,) and host.num_switches == 2 and host.num_evicted_lru > 0
    evicted = driven.ledger.cache.tiers[Tier.HOST].num_evicted
    assert host.num_evicted_learned + host.num_evicted_lru == evicted
    num_runs = statistics.eviction.num_remembered_runs
    assert 0 < num_runs <= 48 and statistics.eviction.num_remembered_bytes >= num_runs * 64 * 4
    assert Driven(8).ledger.statistics().eviction is None


def test_a_sample_is_an_eighth() -> None:
    """Of any run, however it is cut: its parts have what it had, and no more."""
    counts = HitCounts(LAYOUT, 10**6)
    total = 0
    for name in range(200):
        sequence = TokenSequence(Prefix.of(Root(""), [name * 1000 + at for at in range(100)]), 1)
        (whole,) = counts.path(sequence, 0, 100)
        size = num_sampled(whole)
        parts: list[CountedRun] = [*counts.path(sequence, 0, 37), *counts.path(sequence, 37, 100)]
        assert sum(num_sampled(part) for part in parts) == size
        total += size
    assert 0.9 < total / (200 * 100 / 8) < 1.1


@pytest.mark.parametrize("seed", range(8))
def test_merged_runs_of_the_history_count_as_before(seed: int) -> None:
    """Prompts grow and part: each unit has the class and the time of its last request that a count of each prefix by
    itself gives, although runs that are always requested together are one."""
    rng, counts = random.Random(seed), HitCounts(LAYOUT, 10**6, 1, None, TOP_USES)
    known: dict[tuple[int, ...], tuple[int, int]] = {}
    prompts = [[0, 0]]
    for now in range(1, 200):
        tokens = list(rng.choice(prompts[-6:]))[: rng.choice((3, 5, 10**6, 10**6))]
        tokens += [rng.randrange(2) for _ in range(rng.randrange(4))]
        prompts.append(tokens)
        for counted in counts.path(TokenSequence(Prefix.of(Root(""), tokens), 1), 0, len(tokens)):
            for stop in range(counted.start + 1, counted.stop + 1):
                uses, last = known.get(tuple(tokens[:stop]), (0, 0))
                assert (class_of(counted.num_uses), counted.last_asked) == (class_of(uses), last)
                known[tuple(tokens[:stop])] = (uses + 1, now)
            counted.used(now)


@pytest.mark.parametrize(("turn_tokens", "num_runs"), [(10, 6), (1000, 8)])
def test_the_history_of_a_long_session_has_few_runs(turn_tokens: int, num_runs: int) -> None:
    """A prompt that grows with each request does not become a run for each request. Runs of many tokens are not merged,
    because merging copies their tokens."""
    counts = HitCounts(LAYOUT, 10**6, 1, None, TOP_USES)
    for turn in range(1, 41):
        tokens = range(turn * turn_tokens)
        path = counts.path(TokenSequence(Prefix.of(Root(""), tokens), 1), 0, len(tokens))
        for counted in path:
            counted.used(turn)
    assert len(counts) == num_runs
    assert max(counted.stop - counted.start for counted in path) <= MAX_RUN_TOKENS


# -- hints --------------------------------------------------------------------------------------------------------


def spared(driven: Driven) -> set[int]:
    return {part.rank // NUM_CLASSES for part in host_order(driven)}


def test_a_hint_spares_until_it_expires() -> None:
    """What it is about is evicted last, and is like all others from then on."""
    driven = learned(num_device=8, num_host=12)
    driven.serve(A)
    assert driven.ledger.eviction.hint(driven.prefix(A), expires_at=10.0) == 16
    assert driven.ledger.next_lapse == 10.0 and driven.ledger.statistics().num_hints == 1
    for name in range(20, 40):
        driven.serve(prompt(name, 17))
    assert sum(driven.hit(A)) == 16
    assert driven.ledger.eviction.hint(driven.prefix(A), expires_at=10.0) == 16
    driven.ledger.lapse(9.9)
    assert max(spared(driven)) > 0
    driven.ledger.lapse(10.0)
    assert spared(driven) == {0} and driven.ledger.statistics().num_hints == 0
    for name in range(40, 60):
        driven.serve(prompt(name, 17))
    assert sum(driven.hit(A)) == 0


def test_a_hint_never_pins() -> None:
    """Where only spared blocks could make room, they go."""
    driven = learned(num_device=8, num_host=8, device=True)
    driven.serve(A)
    driven.serve(B)
    for tokens in (A, B):
        driven.ledger.eviction.hint(driven.prefix(tokens), expires_at=100.0)
    long = prompt(9, 32)
    driven.serve(long)
    assert sum(driven.hit(long)) == 28


def test_a_hint_ends_when_it_has_come_true() -> None:
    driven = learned()
    driven.serve(A)
    driven.ledger.eviction.hint(driven.prefix(A), expires_at=10.0)
    driven.serve(A)
    assert spared(driven) == {0} and driven.ledger.statistics().num_hints == 0


def test_a_hint_ends_for_what_it_has_spared() -> None:
    """And not for what came later in its place, which another hint spares."""
    driven = learned(num_device=8, num_host=8)
    driven.serve(A)
    driven.ledger.eviction.hint(driven.prefix(A), expires_at=10.0)
    driven.serve(prompt(9, 32))
    assert sum(driven.hit(A)) == 0
    driven.serve(A[:9])
    assert driven.ledger.eviction.hint(driven.prefix(A[:9]), expires_at=20.0) == 8
    driven.ledger.lapse(10.0)
    assert driven.ledger.statistics().num_hints == 1
    assert {part.rank // NUM_CLASSES for part in host_order(driven) if part.run.tokens[0] == A[0] % 256} == {1}
    driven.ledger.lapse(20.0)
    assert spared(driven) == {0}


def test_a_hint_about_what_the_history_has_forgotten_comes_true() -> None:
    """What it spares is still there, and its return is seen. What hints tell the history is bounded, too."""
    heard = Heard()
    driven = learned(num_device=8, num_host=8, observer=heard)
    for number in range(40):
        driven.serve(A)
        driven.ledger.eviction.hint(driven.prefix(A), expires_at=1e9, category="shell")
        for other in range(20):
            driven.serve(prompt(100 + 20 * number + other, 32))
    driven.serve(A)
    ends = [end for _, _, end in heard.hints if isinstance(end, HintEnd)]
    assert ends == [HintEnd.TRUE] * 40
    assert driven.ledger.eviction.hint(driven.prefix(A), expires_at=1e9, category="shell") == len(A) // 4 * 4
    found = driven.ledger.statistics().eviction
    assert found is not None
    for number in range(1000):
        driven.ledger.eviction.hint(driven.prefix(prompt(2000 + number, 32)), expires_at=1e9)
    after = driven.ledger.statistics().eviction
    assert after is not None and after.num_remembered_bytes < 2 * found.num_remembered_bytes


def test_hints_that_never_come_true_spare_nothing() -> None:
    """Those of their category; others do."""
    driven = learned(num_device=8, num_host=12)
    for number in range(30):
        tokens = prompt(100 + number, 17)
        driven.serve(tokens)
        driven.ledger.eviction.hint(driven.prefix(tokens), expires_at=float(number), category="search")
        driven.ledger.lapse(float(number))
    driven.serve(A)
    assert driven.ledger.eviction.hint(driven.prefix(A), expires_at=100.0, category="search") == 0
    assert driven.ledger.eviction.hint(driven.prefix(A), expires_at=100.0, category="shell") == 16


def test_a_hint_without_learned_eviction_is_refused() -> None:
    """The handle names the key of the configuration."""
    with pytest.raises(ConfigError, match=r"^eviction: "):
        Driven(8).ledger.eviction.hint(Driven.prefix(A), expires_at=10.0)


def test_what_becomes_of_hints_is_told() -> None:
    """Whether they spare anything, and how each ends, once; its number says which one it was."""
    heard = Heard()
    driven = learned(observer=heard)
    driven.serve(A)
    for tokens, expires_at in ((A, 10.0), (A, 20.0), (B, 5.0)):
        driven.ledger.eviction.hint(driven.prefix(tokens), expires_at=expires_at, category="tool")
    assert heard.hints == [(1, "tool", 16), (1, "tool", HintEnd.DROPPED), (2, "tool", 16), (3, "tool", 0)]
    heard.hints.clear()
    driven.serve(A)
    driven.ledger.lapse(10.0)
    driven.ledger.eviction.hint(driven.prefix(A), expires_at=30.0, category="tool")
    driven.ledger.reset()
    ends = [(2, "tool", HintEnd.TRUE), (3, "tool", HintEnd.LAPSED)]
    assert heard.hints == [*ends, (4, "tool", 16), (4, "tool", HintEnd.DROPPED)]
    assert driven.ledger.statistics().num_hints == 0


@pytest.mark.parametrize(
    ("argument", "options"),
    [("expires_at", {"expires_at": "soon"}), ("category", {"expires_at": 1.0, "category": 5})],
)
def test_a_bad_hint_is_refused_by_name(argument: str, options: dict[str, Any]) -> None:
    driven = learned()
    with pytest.raises(InvalidArgument) as refused:
        driven.ledger.eviction.hint(driven.prefix(A), **options)
    assert refused.value.argument == argument
