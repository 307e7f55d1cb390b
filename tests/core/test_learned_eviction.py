"""Learned eviction: what is learned about returns, suffixes evicted before their prefixes, hints, the guard."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from driving import BLOCK, Driven, prompt

from aoffload import ConfigError, InvalidArgument, KVCacheGroup, SlidingWindow
from aoffload._common.prefix import Prefix, Root
from aoffload._common.tiers import Tier
from aoffload._config.groups import FullAttention
from aoffload._eviction.counts import MAX_RUN_TOKENS, HitCounts
from aoffload._eviction.idle import MAX_CHANGED, IdlePaths
from aoffload._eviction.learned import Guard, LearnedOrder, _are_alike
from aoffload._eviction.returns import (
    ENDS,
    HALVED_AFTER,
    MAX_BUCKETS,
    MERGED,
    NEVER,
    NUM_BINS,
    NUM_CLASSES,
    TICKS,
    ReturnTimes,
    bin_of,
    class_of,
)
from aoffload._eviction.status import EvictionRule, TierEviction
from aoffload._kernel.events import Observer
from aoffload._kernel.layout import Layout
from aoffload._kernel.tokens import TokenSequence
from aoffload.ledger import Event, EvictionSwitched, LearnedEviction

A, B, C, D = (prompt(name, 17) for name in (1, 2, 3, 4))
"""Four blocks and one more token each."""
LAYOUT = Layout.of([KVCacheGroup("full", FullAttention(), 1)])


class Clock:
    def __init__(self) -> None:
        self.now = 1.0

    def __call__(self) -> float:
        return self.now


def learned(
    num_device: int = 8, num_host: int = 8, *, device: bool = False, observer: Observer | None = None,
    clock: Clock | None = None, **config: Any,
) -> Driven:  # fmt: skip
    return Driven(
        num_device, num_host, observer=observer, clock=clock, eviction=LearnedEviction(device=device), **config
    )


def ruling(driven: Driven) -> Driven:
    """The learned order rules from now on, whatever the guard counts."""
    guard = driven.ledger.eviction.learning.guards[Tier.HOST]
    guard.learned_hits, guard.lru_hits, guard.is_learned = 1e12, 1.0, True
    return driven


def host_order(driven: Driven) -> list[Any]:
    return list(driven.ledger.cache.tiers[Tier.HOST].order)


def ranks(driven: Driven, tokens: list[int]) -> set[int]:
    """The buckets of the parts in the host whose runs begin as `tokens` do."""
    return {part.rank for part in host_order(driven) if part.run.tokens[0] == tokens[0] % 256}


# -- what is learned ----------------------------------------------------------------------------------------------


class Traffic:
    """Requests for single units, one a second, that are idle right away."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.times = ReturnTimes()
        self.times.clock_of = lambda: self.clock
        self.returns: dict[int, tuple[int, int]] = {}
        """By second: the bucket and the time of what returns then."""

    def run(self, num_seconds: int, ask: Any) -> ReturnTimes:
        """`ask(second)` says the bucket of the unit that is requested, and after how many seconds it returns."""
        for second in range(num_seconds):
            self.clock.now += 1.0
            now = self.times.advance()
            if second in self.returns:
                self.times.returned(*self.returns.pop(second), 1)
            bucket, later = ask(second)
            self.times.idle(bucket, 1)
            if later is not None:
                self.returns[second + later] = (bucket, now)
            self.times.counted()
        return self.times


def worth_at(times: ReturnTimes, bucket: int, seconds: float) -> float:
    return times.worth[bucket][bin_of(int(seconds * TICKS))]


def test_worth_rises_to_the_time_of_return_and_falls_after_it() -> None:
    """Units that return after 60 s are worth the more the nearer that is, and little once it is over."""
    times = Traffic().run(3000, lambda second: (1, 60) if second % 2 else (0, None))
    early, near, late = (worth_at(times, 1, seconds) for seconds in (1, 50, 300))
    assert early < near and late < near / 20
    assert worth_at(times, 0, 1) < early / 20


def test_a_prediction_counts_as_far_as_it_comes_true() -> None:
    """Of two categories that predict the same, one is right and one lies: after some hundred requests each is worth
    what it brought, and the bucket says so."""
    traffic = Traffic()
    honest, liar = traffic.times.bucket("tool", 20.0), traffic.times.bucket("liar", 20.0)
    assert honest != liar and honest == traffic.times.bucket("tool", 19.0) >= NUM_CLASSES
    times = traffic.run(2000, lambda second: (honest, 20) if second % 2 else (liar, None))
    assert worth_at(times, honest, 10) > 30 * worth_at(times, liar, 10)
    found = {each.category: each for each in times.statistics(16)}
    assert found["tool"].returned > 0.95 and found["liar"].returned == 0.0
    assert found["tool"].median_s == pytest.approx(20, rel=0.3) and found["liar"].median_s is None
    assert found["tool"].predicted_s == pytest.approx(20, rel=0.3) and found["tool"].num_requests is None


def test_never_is_a_prediction_like_others() -> None:
    """Where prompts that were said to be over return, they are worth what their returns bring."""
    traffic = Traffic()
    never = traffic.times.bucket("", NEVER)
    times = traffic.run(1000, lambda second: (never, 5) if second % 2 else (0, None))
    assert worth_at(times, never, 1) > 10 * worth_at(times, 0, 1)


def test_what_has_not_returned_is_at_risk_in_each_bin_that_it_reached() -> None:
    """Half of the units return after 100 s, the rest never: half of them come into all later bins."""
    traffic = Traffic()
    times = traffic.run(3000, lambda second: (0, 100 if second % 2 else None))
    times._note()
    (reached, *_), (returned, *_) = times._reached(np.array(times._returned)), times._returned
    at = bin_of(100 * TICKS)
    assert returned[at] == sum(returned) and returned[at] == pytest.approx(reached[at] / 2, rel=0.1)
    assert reached[at + 1] == pytest.approx(reached[at] / 2, rel=0.1)


def test_what_is_counted_stays_small_and_fades() -> None:
    """However many requests come: of the past, the less is kept the longer ago it is, and old counts weigh less."""
    times = Traffic().run(60_000, lambda _: (0, None))
    assert len(times._past) <= MERGED * 24
    assert times._became_idle[0] < 2 * HALVED_AFTER


def test_buckets_are_bounded() -> None:
    """A client that names a new category with each hint uses up no memory and takes no bucket from others: from some
    number on, new categories count as none."""
    times = ReturnTimes()
    first = times.bucket("first", None)
    found = {times.bucket(f"category {number}", 2.0 ** (number % 40)) for number in range(3 * MAX_BUCKETS)}
    assert max(found) < MAX_BUCKETS and times.bucket("first", None) == first
    assert times.bucket("one more", 7.0) == times.bucket("", 7.0)
    assert len({times.bucket("", 2.0**octave) for octave in range(-10, 40)}) > 20


def test_without_a_clock_the_time_is_the_number_of_units() -> None:
    """And a clock that goes back stands still, but for a tick with each reading."""
    times = ReturnTimes()
    times.idle(0, 50)
    assert times.advance() == 50 * TICKS
    for seconds in (3.0, math.nan, math.inf, -math.inf):
        times.clock_of = lambda seconds=seconds: lambda: seconds  # type: ignore[misc]
        before = times.now
        assert times.advance() == before + 1


# -- idle paths ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_the_leaf_that_is_worth_least_is_found(seed: int) -> None:
    """Whatever is added, removed, moved and asked: as by a look at all leaves. A node with idle children is no leaf."""
    rng, times = random.Random(seed), ReturnTimes()
    for bucket in range(NUM_CLASSES):
        times.worth[bucket] = [rng.random() for _ in range(NUM_BINS)]
    idle, parents = IdlePaths[int](times), dict[int, int | None]()
    nodes = dict[int, tuple[int, int]]()
    for _ in range(600):
        times.now += rng.randrange(3 * TICKS)
        free = [node for node in range(60) if node not in nodes]
        if free and rng.random() < 0.6:
            node = rng.choice(free)
            parents[node] = (node - 1) // 3 if node else None
            nodes[node] = (rng.randrange(NUM_CLASSES), times.now - rng.randrange(2) * rng.randrange(times.now))
            idle.add(node, parents[node], *nodes[node])
        elif nodes:
            node = rng.choice(list(nodes))
            if rng.random() < 0.3:
                nodes[node] = (rng.randrange(NUM_CLASSES), nodes[node][1])
                idle.move(node, nodes[node][0])
            else:
                del nodes[node]
                idle.remove(node)
        if rng.random() < 0.5:
            continue
        times.num_computed += 1  # compare again, now
        leaves = [node for node in nodes if not any(parents[other] == node for other in nodes)]

        def worth(node: int) -> float:
            return times.worth[nodes[node][0]][bin_of(times.now - nodes[node][1])]

        found, oldest = idle.least_worth(), idle.oldest()
        assert (found is None) == (not leaves) == (oldest is None)
        if found is not None and oldest is not None:
            assert found in leaves and worth(found) == min(map(worth, leaves))
            assert nodes[oldest][1] == min(nodes[leaf][1] for leaf in leaves)
            order = list(idle.in_order(by_worth=True))
            assert order[0] == found and set(order) == set(nodes)
            assert all(order.index(node) < order.index(parents[node]) for node in nodes if parents[node] in nodes)


def test_changes_without_a_question_take_no_memory() -> None:
    """A tier that never fills never asks for a leaf."""
    idle = IdlePaths[int](ReturnTimes())
    for node in range(3 * MAX_CHANGED):
        idle.add(node, None, 0, node)
        idle.remove(node)
    assert len(idle._changed) <= MAX_CHANGED + 1 and len(idle._keys) <= 1


# -- the order ----------------------------------------------------------------------------------------------------


def test_what_was_asked_for_often_outlives_what_was_used_last() -> None:
    """Once it is known that prompts asked for once do not return, they go first, however late they came."""
    driven = learned(num_device=8, num_host=24)
    for number in range(1600):
        driven.serve(prompt(100 + number, 17) if number % 8 else A)
    driven.serve(A)
    for number in range(6):  # more than the host holds
        driven.serve(prompt(5000 + number, 17))
    assert sum(driven.hit(A)) == 16


def test_it_remembers_what_was_evicted() -> None:
    """How often a prompt was asked for counts also after nothing of it is cached any more."""
    driven = learned(num_device=8, num_host=8)
    for tokens in (A, B, C, D):
        driven.serve(tokens)
    assert sum(driven.hit(A)) == 0
    driven.serve(A)
    assert ranks(driven, A) == {class_of(2)}


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_a_prefix_loses_its_tail_before_its_head(seed: int, device: bool, groups: int) -> None:
    """In every tier, whichever order rules, and whatever hints predict."""
    rng, clock = random.Random(seed), Clock()
    kinds = [KVCacheGroup("full", block_size=BLOCK), KVCacheGroup("window", SlidingWindow(9), BLOCK)][:groups]
    driven = learned(16 * groups, 24 * groups, device=device, groups=kinds, clock=clock)
    beginnings = [prompt(name, 12) for name in range(2)]
    for number in range(250):
        clock.now += rng.randrange(40)
        if number == 100:
            ruling(driven)
        tokens = [*rng.choice(beginnings), *prompt(10 + rng.randrange(6), rng.randint(1, 30))]
        if rng.random() < 0.2:
            driven.ledger.eviction.returns(driven.prefix(tokens), in_s=rng.randint(1, 300))
        elif rng.random() < 0.1:
            driven.ledger.eviction.done(driven.prefix(tokens))
        driven.serve(tokens)
        for tier in driven.ledger.cache.tiers:
            order, first = list(tier.order), tier.order.oldest()
            assert first in (order or (None,))
            assert len(set(order)) == len(order)
            assert sum(len(part.blocks) for part in order) == tier.num_cached
            places = {part: at for at, part in enumerate(order)}
            for part, at in places.items():
                head = part.run.before
                if not part.component and head is not None and head.parts[part.tier] in places:
                    assert places[head.parts[part.tier]] > at
                    assert head.parts[part.tier] is not first


@pytest.mark.parametrize("seed", range(4))
def test_while_the_last_use_rules_it_evicts_as_lru(seed: int) -> None:
    """Block for block, hints or not: a hint is no use."""
    rng, clock = random.Random(seed), Clock()
    ours, plain = learned(12, 24, clock=clock), Driven(12, 24)
    beginnings = [prompt(name, 12) for name in range(2)]
    for _ in range(200):
        clock.now += 1.0
        tokens = [*rng.choice(beginnings), *prompt(10 + rng.randrange(6), rng.randint(1, 30))]
        ours.ledger.eviction.learning.guards[Tier.HOST].is_learned = False
        if rng.random() < 0.3:
            ours.ledger.eviction.returns(ours.prefix(tokens), in_s=rng.randint(1, 300))
        assert ours.hit(tokens) == plain.hit(tokens)
        ours.ledger.eviction.learning.guards[Tier.HOST].learned_hits = 0.0
        ours.serve(tokens)
        plain.serve(tokens)


def test_a_reset_forgets_no_counts_and_keeps_its_kind() -> None:
    """After a reset the order learns on, from an empty cache."""
    driven = learned()
    driven.serve(A)
    driven.ledger.reset()
    assert isinstance(driven.ledger.cache.tiers[Tier.HOST].order, LearnedOrder)
    driven.serve(A)
    assert {part.rank for part in host_order(driven)} == {class_of(2)}


# -- hints --------------------------------------------------------------------------------------------------------


def taught(clock: Clock, *, lies: bool = False) -> Driven:
    """A host of 16 blocks that has seen hints of 20 s come true, and prompts without a hint that never return. If it
    `lies`, the hints do not come true."""
    driven = learned(num_device=8, num_host=16, clock=clock)
    for number in range(200):
        hinted = prompt(1000 + number, 17)
        driven.serve(hinted)
        driven.ledger.eviction.returns(driven.prefix(hinted), in_s=20.0, category="tool")
        driven.serve(prompt(3000 + number, 17))
        clock.now += 20.0
        if not lies:
            driven.serve(hinted)
            driven.ledger.eviction.done(driven.prefix(hinted))
    driven.serve(A)
    assert driven.ledger.eviction.returns(driven.prefix(A), in_s=20.0, category="tool") == 16
    clock.now += 10.0
    for name in range(20, 26):
        ruling(driven).serve(prompt(name, 17))
    return driven


def test_a_prompt_that_returns_soon_outlives_what_was_used_later() -> None:
    assert sum(taught(Clock()).hit(A)) == 16


def test_hints_that_do_not_come_true_keep_nothing() -> None:
    """Lies sink into the counts of their bucket."""
    assert sum(taught(Clock(), lies=True).hit(A)) == 0


def test_a_prompt_that_is_done_goes_first() -> None:
    """A later hint replaces an earlier one."""
    clock = Clock()
    driven = taught(clock)
    driven.ledger.eviction.done(driven.prefix(A))
    names = range(30, 34)
    for name in names:
        driven.serve(prompt(name, 17))
        driven.ledger.eviction.returns(driven.prefix(prompt(name, 17)), in_s=20.0, category="tool")
    assert sum(driven.hit(A)) == 0 and all(sum(driven.hit(prompt(name, 17))) == 16 for name in names)


def test_a_request_ends_a_hint() -> None:
    """The prompt is in the class of its number of requests again, until a hint about the new request."""
    driven = learned(num_device=8, num_host=16, clock=Clock())
    driven.serve(A)
    driven.ledger.eviction.returns(driven.prefix(A), in_s=5.0)
    assert min(ranks(driven, A)) >= NUM_CLASSES
    driven.serve(A)
    assert ranks(driven, A) == {class_of(2)}


def test_a_hint_during_the_request_counts_from_its_end() -> None:
    """The usual place of a hint is before the release, when the answer is committed."""
    driven = learned(num_device=8, num_host=16, clock=Clock())
    request = driven.running(A)
    driven.land(driven.commit(request))
    assert driven.ledger.eviction.returns(driven.prefix(A), in_s=5.0) == 16
    driven.land(driven.release(request))
    assert min(ranks(driven, A)) >= NUM_CLASSES


def test_a_hint_is_about_its_own_path() -> None:
    """A prefix that another prompt has used since keeps its bucket, and no other salt's prompt is touched."""
    driven = learned(num_device=16, num_host=24, clock=Clock())
    shared = prompt(7, 8)
    ours, theirs = [*shared, *prompt(8, 9)], [*shared, *prompt(9, 9)]
    driven.serve(ours)
    driven.serve(theirs)
    driven.serve(ours, root=Root("test", "other"))
    before = {part: part.rank for part in host_order(driven)}
    assert driven.ledger.eviction.returns(driven.prefix(ours), in_s=9.0) == 16
    changed = [part for part in host_order(driven) if before.get(part) != part.rank]
    assert changed and all(part.run.start == 2 and part.run.root == Root("test") for part in changed)


def test_what_many_prompts_begin_with_is_not_done() -> None:
    """If one session is over, the system prompt that others continue keeps its bucket."""
    driven = learned(num_device=16, num_host=24, clock=Clock())
    shared = prompt(7, 8)
    ours, theirs = [*shared, *prompt(8, 9)], [*shared, *prompt(9, 9)]
    driven.serve(theirs)
    driven.serve(ours)
    driven.ledger.eviction.done(driven.prefix(ours))
    never = driven.ledger.eviction.learning.times.bucket("", NEVER)
    assert {part.run.start: part.rank == never for part in host_order(driven) if part.run.start < 2} == {0: False}
    assert sum(part.rank == never for part in host_order(driven)) == 1
    driven.ledger.eviction.done(driven.prefix(shared))
    assert sum(part.rank == never for part in host_order(driven)) == 1


def test_moved_counts_are_never_negative() -> None:
    """A hint about a prompt that became idle long ago takes no more from its old bucket than is there."""
    traffic = Traffic()
    times = traffic.run(20_000, lambda _: (0, None))
    times.moved(0, times.bucket("", NEVER), 10**6)
    assert times._became_idle[0] == 0.0


def test_a_request_of_other_weights_is_idle_under_its_new_root() -> None:
    """A request that has not begun to compute gets another root if the weights change. At its end, the prompt is idle
    under that root, and hints about it are about cached blocks."""
    driven = learned(num_device=8, num_host=16, clock=Clock())
    request = driven.admit(A)
    driven.ledger.weights.set("step-2")
    driven.ledger.allocate_nowait(request)
    driven.land(driven.ledger.plan_load(request))
    driven.land(driven.commit(request))
    driven.land(driven.release(request))
    assert driven.ledger.eviction.returns(driven.prefix(A), in_s=5.0) == 16
    assert all(counted.idle_since for counted in driven.ledger.eviction.learning.counts._runs.values())


def test_a_hint_never_pins() -> None:
    """Where only such blocks could make room, they go."""
    driven = learned(num_device=8, num_host=8, device=True, clock=Clock())
    for tokens in (A, B):
        driven.serve(tokens)
        driven.ledger.eviction.returns(driven.prefix(tokens), in_s=1.0)
    long = prompt(9, 32)
    driven.serve(long)
    assert sum(driven.hit(long)) == 28


def test_hints_about_unknown_prompts_take_no_memory() -> None:
    """They answer 0 and leave nothing behind."""
    driven = learned(num_device=8, num_host=8)
    driven.serve(A)
    found = driven.ledger.statistics().eviction
    for number in range(100):
        assert driven.ledger.eviction.returns(driven.prefix(prompt(2000 + number, 32)), in_s=1e9) == 0
        assert driven.ledger.eviction.done(driven.prefix(prompt(2000 + number, 3))) == 0
    after = driven.ledger.statistics().eviction
    assert found is not None and after is not None and after.num_remembered_bytes == found.num_remembered_bytes


def test_a_request_that_fails_is_idle_again() -> None:
    """What was released without a result counts as what was done, once."""
    driven = learned(num_device=8, num_host=16, clock=Clock())
    driven.serve(A)
    driven.ledger.release(driven.admit(A), "cancelled")
    times = driven.ledger.eviction.learning.times
    assert sum(times._became_idle) == pytest.approx(4 + 4, rel=0.001)
    assert sum(map(sum, times._returned)) == pytest.approx(4, rel=0.001)


def test_a_hint_without_learned_eviction_is_refused() -> None:
    """The handle names the key of the configuration."""
    with pytest.raises(ConfigError, match=r"^eviction: "):
        Driven(8).ledger.eviction.returns(Driven.prefix(A), in_s=10.0)


@pytest.mark.parametrize(
    ("argument", "options"),
    [
        ("in_s", {"in_s": "soon"}), ("in_s", {"in_s": -1.0}), ("in_s", {"in_s": math.nan}),
        ("in_s", {"in_s": True}), ("category", {"in_s": 1.0, "category": 5}),
        ("category", {"in_s": 1.0, "category": "x" * 257}),
    ],
)  # fmt: skip
def test_a_bad_hint_is_refused_by_name(argument: str, options: dict[str, Any]) -> None:
    driven = learned()
    with pytest.raises(InvalidArgument) as refused:
        driven.ledger.eviction.returns(driven.prefix(A), **options)
    assert refused.value.argument == argument


# -- the guard ----------------------------------------------------------------------------------------------------


def test_the_last_use_rules_where_it_hits_more() -> None:
    """Where counts say the opposite of what is right, the guard sees it within some hundred requests."""
    times = ReturnTimes()
    times.worth[0], times.worth[1] = (
        [0.0] * NUM_BINS,
        [1.0] * NUM_BINS,
    )  # the wrong way round: 0 returns, and 1 does not
    guard = Guard(times, 400)
    counts = HitCounts(LAYOUT, 10**6, 1, None, _are_alike)
    assert not guard.is_learned
    guard.is_learned, guard.learned_hits, guard.lru_hits = True, 100.0, 90.0
    for number in range(200):
        for bucket, name in ((0, number % 8), (1, 1000 + number)):
            sequence = TokenSequence(Prefix.of(Root(""), prompt(name, 16)), 1)
            path = counts.path(sequence, 0, 16)
            guard.began(path)
            for counted in path:
                counted.bucket, counted.last_asked = bucket, times.advance()
            for shadow in guard.shadows:
                shadow.put(path)
    for shadow in (guard.learned, guard.lru):
        assert sum(shadow.held.values()) == shadow.num_held > 0 and shadow.num_held <= shadow.capacity
        assert min(shadow.held.values()) > 0
    assert not guard.is_learned and guard.learned_hits < guard.lru_hits


@pytest.mark.parametrize("seed", range(3))
def test_simulated_caches_hold_what_their_orders_keep(seed: int) -> None:
    """The same as the host itself, if it is ruled by the same order: requests hit as many blocks."""
    for is_learned in (False, True):
        rng, clock = random.Random(seed), Clock()
        driven = learned(num_device=8, num_host=24, clock=clock)
        guard = driven.ledger.eviction.learning.guards[Tier.HOST]
        shadow, hits, simulated = (guard.learned if is_learned else guard.lru), 0, 0
        for _ in range(300):
            clock.now += rng.randrange(30)
            tokens = prompt(int(20 * rng.random() ** 2), 13 + 4 * rng.randrange(2))
            path = driven.ledger.eviction.learning.counts.known(TokenSequence(driven.prefix(tokens), BLOCK), 3)
            simulated += shadow.num_hits(path)
            hits += min(3, sum(driven.hit(tokens)) // BLOCK)
            guard.is_learned, guard.learned_hits, guard.lru_hits = (
                is_learned,
                1e9 * is_learned,
                1e9 * (not is_learned),
            )
            driven.serve(tokens)
            driven.evict_device()
        assert simulated == pytest.approx(hits, rel=0.05) and hits > 200


class Heard:
    def __init__(self) -> None:
        self.switches: list[TierEviction] = []

    def observe(self, event: Event) -> None:
        if isinstance(event, EvictionSwitched):
            self.switches.append(event.tier)


def hit_lately(driven: Driven, by_learned: float, last_use: float) -> None:
    """So often, in the simulated caches of the host's guard."""
    guard = driven.ledger.eviction.learning.guards[Tier.HOST]
    guard.learned_hits, guard.lru_hits, guard._num_requested = by_learned, last_use, 1e6


def test_a_switch_of_the_ruling_order_is_told_once_and_evictions_are_counted_by_it() -> None:
    """To the observer, with the hits that speak for it; `statistics()` has the same."""
    heard = Heard()
    driven = learned(num_device=24, num_host=20, observer=heard)
    found = driven.ledger.statistics().eviction
    assert found is not None and found.tiers[0].rule is EvictionRule.LRU and not found.num_remembered_runs
    assert not found.buckets
    for first, hits in ((0, (100.0, 100.0)), (16, (104.0, 100.0)), (32, (90.0, 100.0))):
        hit_lately(driven, *hits)
        for name in range(first, first + 16):
            driven.serve(prompt(name, 65))
    assert [each.rule for each in heard.switches] == [EvictionRule.LEARNED, EvictionRule.LRU]
    switch = heard.switches[0]
    assert (switch.tier, switch.num_switches) == (Tier.HOST, 1)
    assert switch.learned_hits > switch.lru_hits > 60 and switch.num_evicted_lru > 0 == switch.num_evicted_learned
    statistics = driven.ledger.statistics()
    assert statistics.eviction is not None
    (host,) = statistics.eviction.tiers
    assert statistics.learned == () and host.num_switches == 2 and host.num_evicted_learned > 0
    evicted = driven.ledger.cache.tiers[Tier.HOST].num_evicted
    assert host.num_evicted_learned + host.num_evicted_lru == evicted
    num_runs = statistics.eviction.num_remembered_runs
    assert 0 < num_runs <= 48 and statistics.eviction.num_remembered_bytes >= num_runs * 64 * 4
    assert statistics.eviction.buckets[0].num_requests == 1
    assert Driven(8).ledger.statistics().eviction is None


# -- the history --------------------------------------------------------------------------------------------------


def shadowed(seed: int) -> HitCounts:
    return HitCounts(LAYOUT, 10**6, 1, None, _are_alike)


@pytest.mark.parametrize("seed", range(8))
def test_merged_runs_of_the_history_count_as_before(seed: int) -> None:
    """Prompts grow and part: each unit has the class and the time of its last request that a count of each prefix by
    itself gives, although runs that are always requested together are one."""
    rng, counts = random.Random(seed), shadowed(seed)
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


@pytest.mark.parametrize("seed", range(4))
def test_a_path_is_continued_or_walked_again(seed: int) -> None:
    """An answer for the prompt is continued with the units of the answer; if another request has split, merged or
    forgotten its runs meanwhile, the path is walked again."""
    rng, counts = random.Random(seed), HitCounts(LAYOUT, 120, 1, None, _are_alike)
    prompts = [[0, 0, 1]]
    for now in range(1, 300):
        tokens = list(rng.choice(prompts[-6:]))[: rng.choice((3, 5, 40))] + [rng.randrange(3) for _ in range(4)]
        prompts.append(tokens)
        sequence = TokenSequence(Prefix.of(Root(""), tokens), 1)
        path = counts.path(sequence, 0, len(tokens) - 3)
        for other in rng.sample(prompts, min(len(prompts), rng.randrange(3))):
            for counted in counts.path(TokenSequence(Prefix.of(Root(""), other), 1), 0, len(other)):
                counted.used(now)
            counts.trim()
        counts.known(TokenSequence(Prefix.of(Root(""), rng.choice(prompts)), 1), 3)
        found = counts.path_from(path, sequence, len(tokens))
        order = {counted: place for place, counted in enumerate(counts._runs.values())}
        assert all(order[counted.before] > place for counted, place in order.items() if counted.before in order)
        assert [counted.start for counted in found[1:]] == [counted.stop for counted in found[:-1]]
        assert found[0].start == 0 and found[-1].stop == len(tokens)
        assert b"".join(bytes(counted.tokens) for counted in found) == bytes(sequence.shared_stretch(0, len(tokens)))
        for counted in found:
            counted.used(now)
        counts.trim()


@pytest.mark.parametrize(("turn_tokens", "num_runs"), [(10, 4), (1000, 6)])
def test_the_history_of_a_long_session_has_few_runs(turn_tokens: int, num_runs: int) -> None:
    """A prompt that grows with each request does not become a run for each request. Runs of many tokens are not merged,
    because merging copies their tokens."""
    counts = shadowed(0)
    for turn in range(1, 41):
        tokens = range(turn * turn_tokens)
        path = counts.path(TokenSequence(Prefix.of(Root(""), tokens), 1), 0, len(tokens))
        for counted in path:
            counted.used(turn)
    assert len(counts) == num_runs
    assert max(counted.stop - counted.start for counted in path) <= MAX_RUN_TOKENS


def test_bins_cover_seconds_to_months() -> None:
    """Each begins where the one before it ends."""
    assert sorted(ENDS) == ENDS and ENDS[0] == TICKS and ENDS[-1] > 60 * 86_400 * TICKS
    assert [bin_of(age) for age in (0, TICKS - 1, TICKS, 10**30)] == [0, 0, 1, NUM_BINS - 1]
    assert Guard(ReturnTimes(), 5).shadows[0].capacity == 5
