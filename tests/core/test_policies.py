"""The guarantees of each store policy on a ledger, and the limits of one request on reads and stores."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from driving import BLOCK, ROOT, Driven, prompt, write_back

from aoffload import (
    ConfigError,
    EagerStore,
    InvalidArgument,
    KVCacheGroup,
    LazyStore,
    NoStore,
    SelectiveStore,
    SlidingWindow,
)
from aoffload._common.tiers import Tier
from aoffload._config.groups import FullAttention
from aoffload._eviction.counts import RUN_TOKENS, HitCounts
from aoffload._extensions.store_policies import StorePolicies
from aoffload._kernel.events import Event, StoreSkipped
from aoffload._kernel.layout import Layout
from aoffload._kernel.pools import LeastRecentlyUsed
from aoffload._kernel.records import LedgerRequest, Part
from aoffload._kernel.states import Direction, Outcome
from aoffload._kernel.tokens import TokenSequence
from aoffload.ledger import Prefix, Root, StoreScope

A, B, C, D = (prompt(name, 17) for name in (1, 2, 3, 4))
"""Four blocks and one more token each."""
WINDOWED = [KVCacheGroup("full", block_size=BLOCK), KVCacheGroup("window", SlidingWindow(9), BLOCK)]


class Lazy(Driven):
    """With everything that the watermark asks for landed at once, unless a test takes it itself."""

    def __init__(self, num_device: int, num_host: int = 32, *, watermark: int = 4, **config: Any) -> None:
        super().__init__(num_device, num_host, store_policy=LazyStore(watermark), **config)

    def watermark(self) -> list[Any]:
        plans = list(write_back(self.ledger))
        self.ledger.check_integrity()
        return plans

    def serve(self, tokens: list[int], **options: Any) -> LedgerRequest:
        request = super().serve(tokens, **options)
        self.land(self.watermark())
        return request

    def stored(self, tokens: list[int]) -> int:
        """Tokens of a prompt that are in the host, wherever else they are."""
        self.evict_device()
        return sum(self.hit(tokens))


def in_host(driven: Driven) -> int:
    host = driven.ledger.statistics().host
    return host.num_blocks - host.num_free


# -- lazy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("watermark", "num_stored"), [(4, 0), (5, 4)])
def test_lazy_stores_what_the_next_blocks_will_evict(watermark: int, num_stored: int) -> None:
    """Not while the room for the next `watermark_blocks` is free; as whole prefixes once one of them would evict."""
    driven = Lazy(9, watermark=watermark)
    request = driven.running(A)
    assert driven.commit(request) == [] == driven.watermark(), "nobody evicts what is in use"
    assert driven.release(request) == []
    driven.serve(prompt(8, 4), max_hit_tokens=0)
    assert driven.ledger.statistics().device.num_free == 4
    assert in_host(driven) == num_stored


def test_lazy_leaves_alone_what_is_behind_the_watermark() -> None:
    """The hot end of the device is not copied."""
    driven = Lazy(13)
    for tokens in (A, B, C):
        driven.serve(tokens)
    assert driven.ledger.statistics().device.num_free == 1
    assert driven.hit(A) == (16, 0)
    assert in_host(driven) == 4
    assert driven.stored(A) == 16
    assert driven.stored(B) == 0, "evicted faster than it could be stored: lost, and no harm"


def test_being_stored_is_no_use() -> None:
    """What was stored because it is the oldest stays the oldest; the next allocation evicts it, not what is hotter."""
    driven = Lazy(13)
    for tokens in (A, B, C):
        driven.serve(tokens)
    assert in_host(driven) == 4
    driven.serve(D)
    assert [driven.hit(tokens)[0] for tokens in (A, B, C)] == [0, 16, 16]
    assert driven.hit(A) == (0, 16)


@pytest.mark.parametrize("before_it_lands", [True, False])
def test_a_use_during_the_store_counts(before_it_lands: bool) -> None:
    """A hit on blocks that are being stored makes them the newest, whether the store or the request ends first."""
    driven = Lazy(14)
    for tokens in (A, B):
        driven.serve(tokens)
    request = driven.running(C)
    driven.commit(request)
    stores = driven.launch(driven.watermark())
    assert sum(plan.num_blocks for plan in stores) == 4
    reader = driven.running(A)
    if before_it_lands:
        driven.release(reader, "done reading")
    for plan in stores:
        driven.end(plan)
    if not before_it_lands:
        driven.release(reader, "done reading")
    driven.release(request)
    device = driven.ledger.cache.tiers[Tier.DEVICE]
    assert next(part.run.tokens[0] for part in device.order) == B[0] % 256


def test_what_is_being_stored_counts_and_is_held() -> None:
    """No more than a watermark is pinned by stores at a time. A request that needs blocks meanwhile takes what
    follows."""
    driven = Lazy(13)
    for tokens in (A, B, C):
        request = driven.running(tokens)
        driven.commit(request)
        driven.release(request)
    (store,) = driven.launch(driven.watermark())
    assert store.num_blocks == 4 == driven.num_pinned()[0]
    assert driven.watermark() == []
    request = driven.running(D)
    driven.commit(request)
    assert driven.watermark() == [], "what is in flight is the watermark"
    assert [driven.hit(tokens)[0] for tokens in (A, B, C)] == [16, 0, 16]
    driven.end(store)
    assert driven.watermark() == [], "A is safe, and the next to go"
    driven.land(driven.launch(driven.release(request)))
    driven.serve(B)
    assert (driven.hit(A), driven.hit(C)) == ((0, 16), (16, 0))


def test_a_lazy_store_that_failed_is_offered_again() -> None:
    """As long as it is there, it is about to be lost."""
    driven = Lazy(8)
    driven.serve(A)
    request = driven.running(prompt(9, 4))
    driven.commit(request)
    (store,) = driven.launch(driven.watermark())
    driven.end(store, Outcome.FAILED)
    driven.release(request)
    (again,) = driven.watermark()
    assert list(again.source_ids) == list(store.source_ids)
    driven.land([again])
    assert driven.stored(A) == 16


def test_a_look_at_the_watermark_costs_nothing_where_nothing_has_changed() -> None:
    """It is asked after every commit of every decoding request: only when room has changed does it look."""
    looks: list[int] = []

    class Watched:
        def __init__(self) -> None:
            self._order = LeastRecentlyUsed()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._order, name)

        def __iter__(self) -> Iterator[Part]:
            looks.append(1)
            return iter(self._order)

    driven = Driven(8, store_policy=LazyStore(8), eviction=Watched)
    driven.serve(A)
    driven.land(write_back(driven.ledger))
    before = len(looks)
    write_back(driven.ledger)
    assert len(looks) == before
    request = driven.ledger.admit(Prefix.of(ROOT, prompt(9, 4)))
    driven.ledger.allocate_nowait(request)
    before = len(looks)
    write_back(driven.ledger)
    assert len(looks) == before + 1


def test_lazy_stores_windows_at_once() -> None:
    """A request leaves a window, and the device evicts it, long before full attention. So at the end of the prompt the
    window is stored, with its margin, and full attention is stored before it is evicted."""
    long = prompt(1, 41)
    driven = Lazy(40, 60, watermark=36, groups=WINDOWED)
    request = driven.running(long)
    (window,) = driven.launch(driven.commit(request))
    assert window.num_blocks == 3, "two blocks of the window, and one before"
    driven.end(window)
    assert driven.release(request) == []
    (full,) = driven.launch(driven.watermark())
    assert full.num_blocks == 10
    driven.end(full)
    assert driven.watermark() == []
    driven.evict_device()
    assert driven.hit(long) == (0, 40)


def test_the_default_watermark_is_an_eighth_of_the_pool() -> None:
    """Resolved by the ledger: the same object may serve pools of any size."""
    layout = Layout.of([KVCacheGroup("full", block_size=BLOCK)])
    sizes = [LazyStore().for_ledger(layout, num).num_watermark_blocks for num in (3000, 4)]
    assert sizes == [375, 1]
    assert LazyStore(7).for_ledger(layout, 3000).num_watermark_blocks == 7


def test_the_default_watermark_follows_the_length_of_requests() -> None:
    """One allocation must not evict more than the watermark stores in time: it is as long as the longest of the last
    requests, up to half of the pool. Requests of any length then lose nothing."""
    driven = Driven(40, 200, store_policy="lazy")
    for user in range(2, 8):
        request = driven.running(prompt(user, 48))
        driven.land([*driven.commit(request), *write_back(driven.ledger)])
        driven.land([*driven.release(request), *write_back(driven.ledger)])
    driven.evict_device()
    assert [sum(driven.hit([*prompt(user, 48), 7])) for user in range(2, 6)] == [48] * 4

    policy = LazyStore().for_ledger(driven.ledger.layout, 40)
    for num_units, watermark in ((6, 6), (12, 12), (30, 20), (1, 20)):
        policy.seen(request, 0, num_units)
        assert policy.num_watermark_blocks == watermark
    for _ in range(2 * 32):  # a request is seen at its admission and at its end
        policy.seen(request, 0, 1)
    assert policy.num_watermark_blocks == 5


class Places:
    """The eviction order as a sorted list."""

    def __init__(self) -> None:
        self.parts: list[Part] = []

    def put(self, part: Part) -> None:
        at = next((i for i, other in enumerate(self.parts) if other.last_use > part.last_use), len(self.parts))
        self.parts.insert(at, part)


@pytest.mark.parametrize("seed", range(20))
def test_what_goes_back_gets_its_place(seed: int) -> None:
    """However many come and go, a part that nobody used is put back between those that were used before and after."""
    rng, order, places = random.Random(seed), LeastRecentlyUsed(), Places()
    away: list[Part] = []
    driven = Driven(8, 8)
    driven.serve(A)
    run = next(iter(driven.ledger.cache.index.runs.values()))
    for _ in range(200):
        if away and rng.random() < 0.4:
            part = away.pop(rng.randrange(len(away)))
            if rng.random() < 0.3:
                order.add(part)
            else:
                order.add_back(part)
            places.put(part)
        elif places.parts and rng.random() < 0.5:
            part = rng.choice(places.parts)
            places.parts.remove(part)
            order.remove(part)
            away.append(part)
        else:
            part = Part(Tier.HOST, 0, 1, run, 0, 0)
            order.add(part)
            places.put(part)
        assert [id(part) for part in order] == [id(part) for part in places.parts]


# -- selective ----------------------------------------------------------------------------------------------------


def test_selective_stores_what_was_asked_for_twice() -> None:
    """Exactly the blocks that two prompts have in common, at the commit of the second."""
    driven = Driven(40, store_policy="selective")
    driven.serve(A)
    assert in_host(driven) == 0
    driven.serve([*A[:8], *B])
    assert in_host(driven) == 2
    driven.serve(A)
    assert in_host(driven) == 4


def test_the_counts_outlive_every_tier() -> None:
    """A prompt that comes back when all of it was evicted has been asked for twice all the same."""
    driven = Driven(8, store_policy=SelectiveStore(min_seen=3))
    for expected in (0, 0, 4, 4):
        driven.serve(A)
        driven.evict_device()
        assert in_host(driven) == expected


def test_what_was_generated_counts_once_when_it_is_done() -> None:
    """The next turn asks for it a second time."""
    driven = Driven(20, store_policy="selective")
    request = driven.running(prompt(1, 8))
    driven.commit(request, 8)
    driven.ledger.extend_nowait(request, 24)
    driven.commit(request, 16, prompt(2, 8))
    driven.release(request)
    assert in_host(driven) == 0
    driven.serve([*prompt(1, 8), *prompt(2, 8), 5])
    assert in_host(driven) == 4


def test_the_counts_are_bounded() -> None:
    """In tokens, whatever comes: the least recently seen is forgotten first, the end of a prefix before its start."""
    policy = SelectiveStore(max_counted_tokens=40 * (RUN_TOKENS + 16))
    driven = Driven(40, store_policy=policy)
    counts = counts_of(driven)
    for name in range(1, 300):
        driven.serve(prompt(name, 17))
        driven.serve([*prompt(5, 8), *prompt(name + 1000, 8), 3])
        assert counts.num_tokens <= policy.max_counted_tokens
        assert counts.num_tokens == sum(map(counts._cost, counts._runs.values()))
        assert all(run.key == key for key, run in counts._runs.items())
    assert counts.stop_of(sequence(prompt(5, 8)), 2, 100) == 2, "what is seen all the time is still known"
    assert counts.stop_of(sequence(prompt(20, 17)), 4, 1) == 0
    assert counts.stop_of(sequence(prompt(299, 17)), 4, 1) == 4


def test_a_request_larger_than_all_counts() -> None:
    """One long prompt does not break the bound, it only counts for nothing."""
    driven = Driven(40, store_policy=SelectiveStore(max_counted_tokens=50))
    for _ in range(3):
        driven.serve(A)
    assert counts_of(driven).num_tokens <= 50
    assert in_host(driven) == 0


def test_a_policy_object_may_serve_several_ledgers() -> None:
    """What it counts is each ledger's own."""
    policy = SelectiveStore()
    one, other = Driven(20, store_policy=policy), Driven(20, store_policy=policy)
    one.serve(A)
    other.serve(A)
    assert in_host(one) == in_host(other) == 0
    one.serve(A)
    assert (in_host(one), in_host(other)) == (4, 0)


def test_another_root_is_another_prefix() -> None:
    """Nobody's prompt makes another tenant's count."""
    driven = Driven(40, store_policy="selective")
    driven.serve(A)
    driven.serve(A, root=Root("test", "a tenant"))
    assert in_host(driven) == 0


def counts_of(driven: Driven) -> HitCounts:
    counts = driven.ledger.find(StorePolicies)._policy.counts  # type: ignore[union-attr]
    assert isinstance(counts, HitCounts)
    return counts


def sequence(tokens: list[int]) -> TokenSequence:
    return TokenSequence(Prefix.of(ROOT, tokens), BLOCK)


@pytest.mark.parametrize("seed", range(30))
def test_the_counts_are_those_of_a_count_for_every_block(seed: int) -> None:
    """By runs or block by block: the same numbers, for prompts that part anywhere."""
    rng, naive = random.Random(seed), Counter[tuple[int, ...]]()
    seen = HitCounts(Layout.of([KVCacheGroup("full", FullAttention(), BLOCK)]), 10**9)
    for _ in range(40):
        units = [rng.randrange(2) for _ in range(rng.randint(1, 8))]
        tokens = sequence([unit for unit in units for _ in range(BLOCK)])
        first = rng.choice([0, 0, rng.randint(0, len(units))])
        seen.see(tokens, first, len(units))
        naive.update(tuple(units[: at + 1]) for at in range(first, len(units)))
        for num_times in (1, 2, 3):
            limit = rng.randint(0, len(units))
            wanted = (at for at in range(limit) if naive[tuple(units[: at + 1])] < num_times)
            assert seen.stop_of(tokens, limit, num_times) == next(wanted, limit)


def test_what_was_asked_for_longest_ago_is_forgotten_first() -> None:
    """Counts have room for two prompts: asking for the first one again makes the second one the next to go."""
    layout = Layout.of([KVCacheGroup("full", FullAttention(), BLOCK)])
    seen = HitCounts(layout, 2 * (4 * BLOCK + RUN_TOKENS))
    for tokens in (A, B, A, C):
        seen.see(sequence(tokens), 0, 4)
    assert [seen.stop_of(sequence(tokens), 4, 1) for tokens in (A, B, C)] == [4, 0, 4]
    assert [seen.stop_of(sequence(tokens), 4, 2) for tokens in (A, C)] == [4, 0]


# -- what one request may read and store --------------------------------------------------------------------------

EVERY: list[Any] = ["eager", LazyStore(8), SelectiveStore(min_seen=1)]
every_policy = pytest.mark.parametrize("policy", EVERY, ids=["eager", "lazy", "selective"])


def live(driven: Driven, tokens: list[int], generated: int = 8, **options: Any) -> None:
    """A whole life with some generated tokens, every store landed."""
    request = driven.running(tokens, **options)
    driven.land(driven.commit(request, len(tokens)))
    driven.ledger.extend_nowait(request, len(tokens) + generated)
    driven.land(driven.commit(request, len(tokens) + generated, range(700, 700 + generated)))
    driven.land(driven.release(request))
    for _ in range(2):
        driven.land(write_back(driven.ledger))


@every_policy
@pytest.mark.parametrize(
    ("options", "num_stored"),
    [
        ({}, 6),
        ({"store": "all"}, 6),
        ({"store": StoreScope.PROMPT}, 4),
        ({"store": "prompt", "max_store_tokens": 11}, 2),
        ({"store": "none"}, 0),
        ({"max_store_tokens": 23}, 5),
        ({"max_store_tokens": 20}, 5),
        ({"max_store_tokens": 3}, 0),
        ({"max_store_tokens": 0}, 0),
        ({"reads_cache": False}, 6),
    ],
    ids=str,
)
def test_what_of_a_request_is_stored(policy: Any, options: dict[str, Any], num_stored: int) -> None:
    """All, its prompt, its first tokens, or nothing, whichever policy decides: whole blocks, rounded down."""
    driven = Driven(8, store_policy=policy)
    live(driven, A, **options)
    assert in_host(driven) == num_stored
    driven.evict_device()
    assert driven.hit([*A, *range(700, 708)]) == (0, num_stored * BLOCK)


@every_policy
@pytest.mark.parametrize("limit", [16, 24])
def test_the_window_at_the_limit_is_stored(policy: Any, limit: int) -> None:
    """A hit can end only where the window before it is there: it is, at the end of what may be stored."""
    driven = Driven(60, 60, groups=WINDOWED, store_policy=LazyStore(60) if isinstance(policy, LazyStore) else policy)
    request = driven.running(prompt(1, 41), max_store_tokens=limit)
    for stop in (8, 16, 24, 32, 41):
        driven.land(driven.commit(request, stop))
        driven.land(write_back(driven.ledger))
    driven.land(driven.release(request))
    driven.land(write_back(driven.ledger))
    driven.evict_device()
    assert driven.hit(prompt(1, 41)) == (0, limit)


@every_policy
def test_somebody_else_may_have_it_stored(policy: Any) -> None:
    """Not to store is one request's wish, not a property of the tokens: who hits them and may store, does."""
    driven = Driven(8, store_policy=policy)
    driven.serve(A, store="none")
    driven.land(write_back(driven.ledger))
    assert in_host(driven) == 0
    driven.serve(A)
    driven.land(write_back(driven.ledger))
    assert in_host(driven) == 4


def test_a_request_that_reads_nothing() -> None:
    """It computes everything itself, and what it computes is cached as ever: what is there stays where it is."""
    driven = Driven(20)
    driven.serve(A)
    request = driven.running(A, reads_cache=False)
    assert request.match.num_tokens == 0
    assert driven.commit(request) == []
    driven.release(request)
    assert driven.hit(A) == (16, 0)
    driven.evict_device()
    request = driven.allocated(A, reads_cache=False)
    assert driven.ledger.plan_load(request) == ()
    assert driven.num_pinned() == (5, 0)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        *(("store", value) for value in ("some", "", None, True, 1, b"all", ["all"], EagerStore())),
        *(("reads_cache", value) for value in (None, 1, 0, "no")),
        *(("max_store_tokens", value) for value in (-1, True, 1.5, "4", (1,))),
    ],
    ids=str,
)
def test_bad_wishes_are_refused_by_name(argument: str, value: object) -> None:
    """And nothing is changed."""
    driven = Driven(8)
    before = driven.picture()
    with pytest.raises(InvalidArgument) as refusal:
        driven.admit(A, **{argument: value})
    assert refusal.value.argument == argument
    assert driven.picture() == before


@pytest.mark.parametrize(
    ("argument", "make"),
    [
        *(("watermark_blocks", lambda v=v: LazyStore(v)) for v in (0, -1, True, 2**31, 1.5, "8")),
        *(("min_seen", lambda v=v: SelectiveStore(v)) for v in (0, -1, True, 10**7, 1.5, None)),
        *(("max_counted_tokens", lambda v=v: SelectiveStore(max_counted_tokens=v)) for v in (0, 2**40, None)),
    ],
)
def test_bad_settings_of_a_policy_are_refused_by_name(argument: str, make: Callable[[], object]) -> None:
    """Where the policy is made."""
    with pytest.raises(ConfigError) as refusal:
        make()
    assert refusal.value.argument == f"store_policy.{argument}"


# -- refused, and offered again -----------------------------------------------------------------------------------


@every_policy
@pytest.mark.parametrize("again", ["commit", "release", "hit"])
def test_a_refused_store_is_offered_again(policy: Any, again: str) -> None:
    """Host full: skipped. When there is room it is stored, at the next commit, at the end, or when another request
    hits the same device blocks."""
    skipped: list[int] = []

    class Watcher:
        def observe(self, event: Event) -> None:
            if isinstance(event, StoreSkipped) and event.reason == "host_full":
                skipped.append(event.num_blocks)

    driven = Driven(9, 4, store_policy=policy, observer=Watcher())
    driven.serve(B, store="all")
    driven.land(write_back(driven.ledger))
    driven.evict_device()
    driven.land(write_back(driven.ledger))
    assert in_host(driven) == 4
    keeper = driven.admit(B)
    assert keeper.match.num_host_tokens == 16, "all of the host is pinned"
    request = driven.running(A)
    assert driven.commit(request) == []
    if again == "hit":
        driven.release(request, "left")
        request = driven.running(A)
        assert request.match.num_device_tokens == 16
    assert write_back(driven.ledger) == ()
    driven.release(keeper, "left")
    plans = driven.commit(request) if again != "release" else []
    plans += [*driven.release(request), *write_back(driven.ledger)]
    assert sum(plan.num_blocks for plan in plans if plan.direction is Direction.STORE) == 4
    assert skipped or isinstance(policy, LazyStore)


def test_the_watermark_says_what_it_could_not_store() -> None:
    """`store_skipped` without a request: it is on nobody's behalf. With room it is stored."""
    skipped: list[tuple[object, int]] = []

    class Watcher:
        def observe(self, event: Event) -> None:
            if isinstance(event, StoreSkipped):
                skipped.append((event.request, event.num_blocks))

    driven = Lazy(9, 4, watermark=9, observer=Watcher())
    driven.serve(B)
    driven.evict_device()
    keeper = driven.admit(B)
    driven.serve(A)
    assert skipped == [(None, 4)]
    driven.release(keeper, "left")
    driven.land(driven.watermark())
    assert driven.stored(A) == 16


def test_off_and_one_of_ones_own() -> None:
    """A policy is any object that answers; `EagerStore` is a base for it."""

    class FirstBlocks(EagerStore):
        def wanted_stop(self, request: LedgerRequest) -> int:
            return min(2, request.published)

    driven = Driven(20, store_policy=FirstBlocks())
    driven.serve(A)
    assert in_host(driven) == 2
    driven = Driven(20, store_policy=NoStore())
    driven.serve(A)
    assert in_host(driven) == 0


@pytest.mark.parametrize(
    ("name", "members"),
    [
        ("store_policy.for_ledger", {"for_ledger": lambda *_: None}),
        ("store_policy.num_watermark_blocks", {"num_watermark_blocks": "x"}),
        ("store_policy.num_watermark_blocks", {"num_watermark_blocks": -5}),
        ("store_policy.num_watermark_blocks", {"num_watermark_blocks": True}),
    ],
)
def test_wrong_answers_of_a_policy_are_refused_by_name(name: str, members: dict[str, Any]) -> None:
    """A policy that answers wrongly is refused when the ledger is made."""
    with pytest.raises(ConfigError) as refusal:
        Driven(20, store_policy=type("Wrong", (EagerStore,), members)())
    assert refusal.value.argument == name
