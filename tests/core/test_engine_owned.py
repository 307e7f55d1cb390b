"""Engine-owned blocks: stores from them, loads into them, and blocks held by jobs.

Who waits for whom is in test_engine_pending.py, invalidated KV in test_engine_invalidation.py, what is refused in
test_engine_refusals.py, and every call in any order in test_engine_walks.py."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from engine_driving import BLOCK, EngineDriven, Finding, Seen, destinations, loaded, prompt, sources

from aoffload import (
    ChunkedLocal,
    FullAttention,
    KVCacheGroup,
    OffloadConfig,
    OutOfBlocks,
    RequestState,
    SelectiveStore,
    SlidingWindow,
    Tier,
    WrongState,
)
from aoffload.errors import CommitError, InvalidArgument
from aoffload.ledger import Direction, Outcome, Prefix, Root, StoreScope

A, B = prompt(1, 17), prompt(2, 17)
FULL = KVCacheGroup("full", block_size=BLOCK)
S = RequestState


def windowed(window: int) -> list[KVCacheGroup]:
    return [FULL, KVCacheGroup("window", SlidingWindow(window), BLOCK)]


# -- what is stored -----------------------------------------------------------------------------------------------


def test_an_offer_stores_once_what_the_host_lacks() -> None:
    """Full blocks of the computed tokens, as they come; what is stored or on its way is not stored again, neither for
    the same request nor for another one that has computed it in blocks of its own."""
    driven = EngineDriven()
    request, (table,) = driven.computed(A)
    first = driven.offer(request, 9, [table])
    assert sources(first) == [table[:2]] and first[0].direction is Direction.STORE
    second = driven.offer(request, 17, [table])
    assert sources(second) == [table[2:4]]
    assert driven.offer(request, 17, [table]) == []
    other, theirs = driven.computed(A)
    assert driven.offer(other, 17, theirs) == []
    driven.land([*second, *first])
    assert driven.offer(request, 17, [table], is_last=True) == []
    assert driven.hit(A) == loaded(driven, A) == 16


def test_what_is_left_of_a_long_run_does_not_keep_its_prompt_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a run has nearly all of its prompt, they share one memory. Cut, it has memory of its own."""
    monkeypatch.setattr("aoffload._kernel.tokens.LONG_BYTES", 1)
    driven = EngineDriven()
    request, (table,) = driven.computed(A)
    driven.land(driven.offer(request, 17, [table]))
    cache, tokens = driven.ledger.cache, np.array(A[:16], np.int32).tobytes()
    (run,) = cache.index.runs.values()
    assert isinstance(run.tokens, memoryview) and run.tokens == tokens
    head = cache.split(run, 3)
    assert type(head.tokens) is type(run.tokens) is bytes
    assert bytes(head.tokens) + bytes(run.tokens) == tokens
    assert driven.hit(A) == 16


def test_generated_tokens_are_stored_as_they_are_computed() -> None:
    """`new_token_ids` are appended first; an offer counts from the first token on, and may say nothing new."""
    driven = EngineDriven()
    request, _ = driven.computed(A[:7])
    (table,) = driven.fresh(20)
    tokens = [*A[:7], 70, 71, 72, 73, 74, 75]
    driven.compute(tokens, [table])
    first = driven.offer(request, 7, [table], [70])
    assert sources(first) == [table[:1]]
    driven.land(first)
    assert driven.offer(request, 7, [table]) == []
    driven.land(driven.offer(request, 12, [table], [71, 72, 73, 74, 75]))
    assert (request.num_computed_tokens, request.sequence.num_tokens) == (12, 13)
    assert loaded(driven, tokens) == 12
    driven.release(request)
    assert request.state is S.DONE


def test_what_was_not_proven_to_be_stored_is_offered_again() -> None:
    """Of a store that failed what follows what has landed, of one that nobody can prove everything."""
    driven = EngineDriven(8)
    request, (table,) = driven.computed(A)
    (plan,) = driven.launch(driven.offer(request, 17, [table]))
    driven.end(plan, Outcome.FAILED, 1)
    (plan,) = driven.launch(driven.offer(request, 17, [table]))
    assert sources([plan]) == [table[1:4]]
    driven.end(plan, Outcome.UNPROVEN)
    assert driven.held() == [] and driven.ledger.statistics().host.num_quarantined == 3
    again = driven.offer(request, 17, [table])
    assert sources(again) == [table[1:4]]
    driven.land(again)
    assert loaded(driven, A) == 16
    driven.end(plan)
    driven.release(request)
    driven.assert_at_rest()


def test_a_full_host_takes_what_fits() -> None:
    """The front of it; the observer hears of the rest, and the next offer makes good what is possible then."""
    seen = Seen()
    driven = EngineDriven(6, observer=seen)
    blocker, theirs = driven.computed(B)
    driven.land(driven.offer(blocker, 17, theirs))
    pin = driven.ledger.pins.hold(Prefix.of(Root("test"), B[:8]))
    keeper = driven.admit(B)
    request, (table,) = driven.computed(A)
    assert sources(driven.offer(request, 17, [table])) == [table[:2]]
    assert seen.skipped == [(2, "host_full")]
    driven.release(keeper)
    driven.ledger.pins.release(pin)
    assert sources(driven.offer(request, 17, [table])) == [table[2:4]]


@pytest.mark.parametrize(
    ("policy", "options", "stored"),
    [
        ("eager", {}, 20),
        ("eager", {"store": StoreScope.PROMPT}, 16),
        ("eager", {"store": "none"}, 0),
        ("eager", {"max_store_tokens": 9}, 8),
        ("off", {}, 0),
    ],
)
def test_what_a_request_and_the_policy_allow(policy: str, options: dict[str, Any], stored: int) -> None:
    """The scope, the limit and the policy narrow what is stored, and the request goes on all the same."""
    driven = EngineDriven(store_policy=policy)
    request, _ = driven.computed(A, **options)
    tables, tokens = driven.fresh(24), [*A, 70, 71, 72, 73]
    driven.compute(tokens, tables)
    driven.land(driven.offer(request, 17, tables))
    driven.land(driven.offer(request, 20, tables, tokens[17:], is_last=True))
    assert driven.hit(tokens) == stored and request.num_computed_tokens == 20


def test_where_there_is_no_host_nothing_is_stored() -> None:
    """An engine may run without host memory."""
    driven = EngineDriven(0)
    request, tables = driven.computed(A)
    assert driven.offer(request, 17, tables, is_last=True) == [] and request.num_computed_tokens == 17


def test_a_selective_policy_counts_who_asks() -> None:
    """A prompt is stored when it was asked for twice; what was generated counts when nothing comes after it."""
    driven = EngineDriven(store_policy=SelectiveStore(2))
    tokens = [*A, 70, 71, 72, 73]
    tables = driven.fresh(21)
    driven.compute(tokens, tables)
    for in_between, stored in ((0, 0), (16, 20)):
        request = driven.admit(A, reads_cache=False)
        driven.land(driven.offer(request, 17, tables))
        assert driven.hit([*tokens, 1]) == in_between
        driven.land(driven.offer(request, 20, tables, tokens[17:], is_last=True))
        driven.release(request)
        assert driven.hit([*tokens, 1]) == stored


def test_beyond_the_bound_in_flight_nothing_is_queued() -> None:
    """What of an offer would exceed `max_bytes_in_flight` is skipped, with a word to the observer; once there is room
    the next one stores it."""
    seen = Seen()
    driven = EngineDriven(observer=seen, max_bytes_in_flight=5)
    first, ours = driven.computed(A)
    second, theirs = driven.computed(B)
    plans = driven.offer(first, 17, ours)
    as_much_as_may_be = driven.offer(second, 17, theirs)
    assert sources(as_much_as_may_be) == [theirs[0][:1]] and seen.skipped == [(3, "in_flight")]
    assert driven.offer(second, 17, theirs) == [] and driven.hit(B) == 0
    driven.land([*plans, *as_much_as_may_be])
    driven.land(driven.offer(second, 17, theirs))
    assert loaded(driven, A) == loaded(driven, B) == 16
    assert {reason for _, reason in seen.skipped} == {"in_flight"}


def test_what_exceeds_the_bound_by_itself_is_stored_all_the_same() -> None:
    """A prompt larger than `max_bytes_in_flight` is stored piece by piece, the next one when the last one is over; a
    window, of which only the whole is of use, at once when nothing else is under way."""
    driven = EngineDriven(max_bytes_in_flight=1)
    request, tables = driven.computed(A)
    for stored in (4, 8, 12, 16):
        driven.land(driven.offer(request, 17, tables))
        assert driven.hit(A) == stored
    driven = EngineDriven(groups=[KVCacheGroup("window", SlidingWindow(9), BLOCK)], max_bytes_in_flight=1)
    driven.serve(A)
    assert driven.hit(A) == 16


def test_blocks_before_the_window_of_a_load_are_nobody_s_bytes() -> None:
    """A load brings of a window what is needed at its end. The blocks before it, which the table names as well, hold
    nothing: no offer stores them."""
    driven = EngineDriven(groups=[KVCacheGroup("window", SlidingWindow(5), BLOCK)])
    tokens = prompt(1, 25)
    driven.serve(tokens)
    request, tables = driven.admit(tokens), driven.fresh(25)
    driven.land(driven.load(request, tables))
    driven.compute(tokens, tables, request.num_computed_tokens)
    written = {block_id for block_id in tables[0] if block_id in driven.memory[Tier.DEVICE]}
    driven.reset(Tier.HOST)
    plans = driven.offer(request, 25, tables, is_last=True)
    assert plans and written.issuperset(plan_id for ids in sources(plans) for plan_id in ids)


def test_a_match_that_is_gone_meanwhile_is_asked_again() -> None:
    """With the same tokens the pins stay as long as the host holds them; when a block of them was found rotten, the
    answer is another one."""
    driven = EngineDriven()
    driven.serve(A)
    waiting, (other, plans) = driven.admit(A, 4), driven.loading(A)
    driven.end(plans[0], Outcome.CORRUPT, num_landed=2, corrupt=(2,))
    driven.release(other)
    assert driven.ask(waiting, 4)[:2] == (4, 4)


def test_loads_do_not_count_among_stores_in_flight() -> None:
    """However much is being loaded, as much may be stored."""
    driven = EngineDriven(max_bytes_in_flight=4)
    driven.serve(A)
    _, load = driven.loading(A)
    other, theirs = driven.computed(B)
    assert sources(driven.offer(other, 17, theirs)) == [theirs[0][:4]]
    driven.land(load)


# -- null blocks --------------------------------------------------------------------------------------------------


def test_the_spine_is_stored_up_to_the_first_null_block() -> None:
    """Nothing behind a gap is found, so nothing behind it is stored; a later offer that names the block goes on."""
    driven = EngineDriven()
    request, (table,) = driven.computed(A)
    assert driven.offer(request, 17, [[0, *table[1:]]]) == []
    driven.land(driven.offer(request, 17, [[*table[:2], 0, *table[3:]]]))
    assert driven.hit(A) == 8
    late = driven.offer(request, 17, [table])
    assert sources(late) == [table[2:4]]
    driven.land(late)
    assert loaded(driven, A) == 16


def test_of_a_window_null_blocks_are_skipped_one_by_one() -> None:
    """What lies before and after one is stored; the window is found once it is whole."""
    driven = EngineDriven(32, groups=windowed(17))
    request, (full, window) = driven.computed(A)
    plans = driven.offer(request, 17, [full, [window[0], 0, *window[2:]]])
    assert sources(plans) == [full[:4], window[:1], window[2:4]]
    driven.land(plans)
    assert loaded(driven, A) == 4  # the first block is window enough for it
    late = driven.offer(request, 17, [full, window])
    assert sources(late) == [window[1:2]]
    driven.land(late)
    assert loaded(driven, A) == 16


def test_null_blocks_of_which_nothing_is_wanted_are_not_looked_at() -> None:
    """What is stored already may have left the engine's table since: ids are read where something is stored."""
    driven = EngineDriven(32, groups=windowed(5))
    request, (full, window) = driven.computed(A[:9])
    driven.land(driven.offer(request, 9, [full, window]))
    tokens = [*A[:9], *range(70, 77)]
    long, wide = driven.fresh(17)
    driven.compute(tokens, [long, wide])
    plans = driven.offer(request, 16, [[0, 0, *long[2:]], [0, 0, 0, *wide[3:]]], tokens[9:], is_last=True)
    assert sources(plans)[0] == long[2:4]
    driven.land(plans)
    assert driven.hit([*tokens, 1]) in (8, 16)


def test_blocks_that_the_engine_finds_take_the_place_of_null_ones() -> None:
    """`find` is asked where the table has null blocks; what the table names goes before what is found."""
    engine = Finding()
    driven = EngineDriven(engine=engine)
    request, (table,) = driven.computed(A, request_id="r")
    engine.known = {("r", 0, 1): table[1], ("r", 0, 3): 999}
    plans = driven.offer(request, 17, [[table[0], 0, table[2], table[3], 0]])
    assert sources(plans) == [table[:4]]
    assert {(name, group) for name, group, _, _ in engine.asked} == {("r", 0)}
    driven.land(plans)
    assert loaded(driven, A) == 16


def test_what_the_engine_does_not_find_stays_a_gap() -> None:
    """Of the spine what lies before the gap is stored, of a window what lies around it."""
    engine = Finding()
    driven = EngineDriven(32, engine=engine, groups=windowed(17))
    request, (full, window) = driven.computed(A, request_id="r")
    engine.known = {("r", 0, 0): full[0], ("r", 1, 3): window[3]}
    plans = driven.offer(request, 17, [[0, full[1], 0, 0, 0], [0, window[1], 0, 0, 0]])
    assert sources(plans) == [full[:2], window[1:2], window[3:4]]
    driven.land(plans)


# -- several groups -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 6, 40])
def test_groups_of_unequal_blocks(window: int) -> None:
    """Tables of different lengths, in the order of the groups: each block is stored from, and brought back to, its
    place in its own group."""
    groups = [
        KVCacheGroup("small", block_size=2),
        KVCacheGroup("window", SlidingWindow(window), 8),
        KVCacheGroup("large", block_size=8),
        KVCacheGroup("other", SlidingWindow(window), 4),
    ]
    driven = EngineDriven(64, groups=groups)
    tokens = prompt(3, 25)
    driven.serve(tokens)
    assert loaded(driven, tokens) == 24
    assert loaded(driven, tokens, 8) == loaded(driven, tokens, 13) == 24
    assert loaded(driven, [*tokens[:18], *B[:5]]) in (0, 16)


def test_a_window_that_begins_inside_a_unit_has_null_blocks_before_it() -> None:
    """The engine has no blocks before its window, although the host stores whole units. It gets the window, and a block
    that is missing inside it is refused."""
    groups = [KVCacheGroup("full", block_size=8), KVCacheGroup("window", SlidingWindow(10), 2)]
    driven = EngineDriven(64, groups=groups)
    tokens = prompt(3, 25)
    driven.serve(tokens)
    for num_null in (8, 7):
        request = driven.admit(tokens)
        full, window = driven.fresh(25)
        window[:num_null] = [0] * num_null
        if num_null == 8:
            with pytest.raises(InvalidArgument, match="null block at a position whose KV must be loaded"):
                driven.load(request, [full, window])
        else:
            plans = driven.load(request, [full, window])
            assert destinations(plans) == [full[:3], window[7:12]]
            driven.land(plans)
            assert not driven.wrong(tokens, [full, window], 0, 24) and request.num_computed_tokens == 24
        driven.release(request)
    driven.assert_at_rest()


def test_a_corrupt_block_after_null_blocks_is_the_right_one() -> None:
    """The copies that are left out do not count: the host forgets the unit of the corrupt block, and no other."""
    groups = [KVCacheGroup("full", block_size=8), KVCacheGroup("window", SlidingWindow(10), 2)]
    driven = EngineDriven(64, groups=groups)
    tokens = prompt(3, 25)
    driven.serve(tokens)
    request = driven.admit(tokens)
    full, window = driven.fresh(25)
    window[:7] = [0] * 7
    of_full, of_window = driven.launch(driven.load(request, [full, window]))
    driven.end(of_full)
    driven.end(of_window, Outcome.CORRUPT, num_landed=1, corrupt=[1])  # the first block of the last unit
    driven.release(request)
    assert driven.ledger.statistics().host.num_cached == 3 + 8, "full attention, and two units of the window"
    assert driven.hit(tokens) == driven.hit(tokens[:17]) == 16


def test_a_load_that_falls_short_after_null_blocks_brings_nothing() -> None:
    """At an earlier end, the window reads blocks that the engine had not, though they are in a unit that was loaded."""
    groups = [KVCacheGroup("full", block_size=8), KVCacheGroup("window", SlidingWindow(10), 2)]
    driven = EngineDriven(64, groups=groups)
    tokens = prompt(3, 17)
    driven.serve(tokens)
    request = driven.admit(tokens)
    full, window = driven.fresh(17)
    window[:3] = [0] * 3
    of_full, of_window = driven.launch(driven.load(request, [full, window]))
    driven.end(of_full, Outcome.FAILED, num_landed=1)
    driven.end(of_window)
    assert request.num_computed_tokens == 0
    driven.release(request)
    driven.assert_at_rest()


def test_computing_again_does_not_begin_where_a_window_reads_null_blocks() -> None:
    """After a failed forward, its request goes on at the end of its load, or computes what the load left out, too."""
    groups = [KVCacheGroup("full", block_size=8), KVCacheGroup("window", SlidingWindow(10), 2)]
    driven = EngineDriven(64, groups=groups)
    tokens = prompt(3, 25)
    driven.serve(tokens)
    request = driven.admit(tokens)
    full, window = driven.fresh(25)
    window[:7] = [0] * 7
    driven.land(driven.load(request, [full, window]))
    with pytest.raises(CommitError, match="go back to 0"):
        driven.invalidate(request, 20)
    driven.invalidate(request, 24)
    driven.invalidate(request, 0)
    driven.release(request)


@pytest.mark.parametrize("attention", [SlidingWindow(5), ChunkedLocal(8)])
def test_windows_alone(attention: Any) -> None:
    """Without full attention a hit is where a window is whole; the engine leaves what lies before it null."""
    driven = EngineDriven(groups=[KVCacheGroup("window", attention, BLOCK)])
    tokens = prompt(3, 16)
    driven.serve(tokens)
    request = driven.admit(tokens)
    start = attention.required_blocks(12, BLOCK).start
    assert request.match.num_host_tokens == 12
    (table,) = driven.fresh(16)
    table[:start] = [0] * start
    plans = driven.load(request, [table])
    assert destinations(plans) == [table[start:3]]
    driven.land(plans)
    assert not driven.wrong(tokens, [table], 0, 12) and request.num_computed_tokens == 12


# -- what is loaded -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [list, tuple, lambda ids: array("q", ids), lambda ids: np.array(ids, np.int64)])
def test_ids_may_come_in_many_forms(make: Callable[[list[int]], Any]) -> None:
    """Lists, tuples, arrays and numpy arrays of whatever width."""
    driven = EngineDriven()
    request, (table,) = driven.computed(A)
    stores = driven.offer(request, 17, [make(table)])
    assert sources(stores) == [table[:4]]
    driven.land(stores)
    reader = driven.admit(A)
    assert destinations(driven.load(reader, (make([50, 51, 52, 53]),))) == [[50, 51, 52, 53]]


def test_ids_may_be_ranges() -> None:
    """A range names blocks that lie together, and an array of arrays names groups."""
    driven = EngineDriven()
    driven.serve(A)
    request = driven.admit(A)
    driven.land(driven.load(request, [range(90, 95)]))
    assert not driven.wrong(A, [range(90, 95)], 0, 16)
    assert sources(driven.offer(request, 17, np.array([range(90, 95)]))) == []
    driven.reset(Tier.HOST)
    assert sources(driven.offer(request, 17, np.array([range(90, 95)]))) == [[90, 91, 92, 93]]


def test_a_load_writes_behind_what_the_engine_has() -> None:
    """Into exactly the blocks that are named for what is brought; what stands before and after is ignored."""
    driven = EngineDriven()
    driven.serve(A)
    request = driven.admit(A, 8)
    assert (request.match.num_device_tokens, request.match.num_host_tokens) == (8, 8)
    plans = driven.load(request, [[0, 0, 40, 41, 0, 0]])
    assert destinations(plans) == [[40, 41]] and driven.held() == [40, 41]
    assert request.state is S.LOADING
    driven.land(plans)
    assert not driven.wrong(A, [[0, 0, 40, 41, 0]], 8, 16)
    assert (request.state, request.num_computed_tokens, request.num_lost_tokens) == (S.RUNNING, 16, 0)


@pytest.mark.parametrize(("num_device_tokens", "first"), [(0, 0), (3, 0), (4, 1), (7, 1), (15, 3), (16, 4)])
def test_what_the_engine_has_counts_by_whole_units(num_device_tokens: int, first: int) -> None:
    """Half a block is brought again; where nothing is left to bring, the request computes on from its own tokens."""
    driven = EngineDriven()
    driven.serve(A)
    request = driven.admit(A, num_device_tokens)
    assert request.match.num_tokens == 16
    plans = driven.load(request, [range(40, 45)])
    assert destinations(plans) == ([[*range(40 + first, 44)]] if first < 4 else [])
    driven.land(plans)
    assert request.num_computed_tokens == 16


def test_without_a_hit_there_is_nothing_to_name() -> None:
    """`into` may be left out; the request runs at once, from where the engine has come to."""
    driven = EngineDriven()
    request = driven.admit(A, 7)
    assert driven.load(request) == [] and (request.state, request.num_computed_tokens) == (S.RUNNING, 7)
    assert not request.num_lost_tokens


@pytest.mark.parametrize(("most", "ready"), [(0, 0), (3, 0), (4, 4), (11, 8), (16, 16), (99, 16)])
def test_less_may_be_loaded_than_was_matched(most: int, ready: int) -> None:
    """`max_tokens` rounds down to a unit."""
    driven = EngineDriven()
    driven.serve(A)
    request = driven.admit(A)
    (table,) = driven.fresh(17)
    driven.land(driven.load(request, [table], max_tokens=most))
    assert request.num_computed_tokens == ready and not driven.wrong(A, [table], 0, ready)


def test_the_last_token_is_computed() -> None:
    """A prompt that is stored to its end hits one block less; limits of a request narrow what it is brought."""
    driven = EngineDriven(16)
    driven.serve(A[:16])
    assert driven.admit(A[:16]).match.num_tokens == 12
    assert driven.admit(A[:16], max_hit_tokens=9).match.num_tokens == 8
    assert driven.admit(A[:16], hit_alignment=8).match.num_tokens == 8
    assert driven.admit(A[:16], reads_cache=False).match.num_tokens == 0


def test_a_load_that_is_planned_again_has_the_last_wake() -> None:
    """Nothing is planned twice; the last caller is woken."""
    driven, woken = EngineDriven(), list[str]()
    driven.serve(A)
    request = driven.admit(A)
    plans = driven.load(request, driven.fresh(17), wake=lambda: woken.append("first"))
    assert driven.load(request, None, wake=lambda: woken.append("second")) == []
    driven.land(plans)
    assert woken == ["second"]
    assert driven.load(request, None) == [] and woken == ["second"]
    with pytest.raises(WrongState, match="has named the blocks"):
        driven.load(request, driven.fresh(17))  # nothing would be copied into these


def test_an_offer_in_place_of_a_load_lets_the_hit_go() -> None:
    """Who computes what it could have loaded pins nothing any more."""
    driven = EngineDriven()
    driven.serve(A)
    request, tables = driven.admit(A), driven.fresh(17)
    driven.compute(A, tables)
    assert driven.num_pinned() == 4
    assert driven.offer(request, 4, tables) == []
    assert request.state is S.RUNNING and driven.num_pinned() == 0


# -- which blocks are held ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", Outcome)
def test_the_sources_of_a_store_are_held_from_the_plan_to_the_end(outcome: Outcome) -> None:
    """Queued or launched, and whatever becomes of the request; given back however the copy ends: nobody is harmed by a
    stray reader."""
    driven = EngineDriven(8)
    request, (table,) = driven.computed(A)
    plans = driven.offer(request, 17, [table])
    assert driven.held() == table[:4]
    driven.launch(plans)
    driven.release(request)
    assert driven.held() == table[:4]
    driven.end(plans[0], outcome, 2, (2,) if outcome is Outcome.CORRUPT else ())
    assert driven.held() == [] and sorted(driven.engine.given) == table[:4]
    driven.end(plans[0])
    assert sorted(driven.engine.given) == table[:4], "late proof gives nothing twice"
    driven.assert_at_rest()


@pytest.mark.parametrize("outcome", [Outcome.LANDED, Outcome.FAILED, Outcome.CORRUPT])
def test_the_destinations_of_a_load_are_held_until_the_copy_is_over(outcome: Outcome) -> None:
    """From the plan to the end of the copy; then the request's own hold is what keeps them."""
    driven = EngineDriven()
    driven.serve(A)
    request = driven.admit(A)
    plans = driven.load(request, [[40, 41, 42, 43]])
    assert driven.held() == [40, 41, 42, 43]
    driven.launch(plans)
    assert driven.held() == [40, 41, 42, 43]
    driven.end(plans[0], outcome, 1, (1,) if outcome is Outcome.CORRUPT else ())
    assert driven.held() == []
    driven.release(request)
    driven.assert_at_rest()


@pytest.mark.parametrize("late", [Outcome.LANDED, Outcome.FAILED])
def test_the_destinations_of_an_unproven_load_are_held_until_late_proof(late: Outcome) -> None:
    """A copy that may still be writing keeps its blocks, whatever else happens."""
    driven = EngineDriven()
    driven.serve(A)
    request, (plan,) = driven.loading(A)
    blocks = list(plan.destination_ids)
    driven.end(plan, Outcome.UNPROVEN)
    driven.release(request)
    driven.reset()
    driven.end(plan, Outcome.UNPROVEN)
    statistics = driven.ledger.statistics().device
    assert driven.held() == blocks and (statistics.num_quarantined, statistics.num_pinned) == (4, 0)
    driven.end(plan, late)
    assert driven.held() == [] and sorted(driven.engine.given[-4:]) == blocks
    driven.assert_at_rest()


@pytest.mark.parametrize("is_load", [False, True])
def test_a_job_that_is_given_up_gives_its_blocks_back(is_load: bool) -> None:
    """`discard`: nothing was started."""
    driven = EngineDriven()
    if is_load:
        driven.serve(A)
        request = driven.admit(A)
        (plan,) = driven.load(request, driven.fresh(17))
    else:
        request, tables = driven.computed(A)
        (plan,) = driven.offer(request, 17, tables)
    assert len(driven.held()) == 4
    driven.ledger.discard(plan.job_id)
    driven.check()
    assert driven.held() == [] and not driven.ledger.launch(plan.job_id)
    assert (request.state, request.num_computed_tokens) == (S.RUNNING, 0 if is_load else 17)
    assert (request.num_lost_tokens > 0) is is_load


def test_a_block_may_be_held_twice() -> None:
    """After a reset the same blocks are stored anew while the old copy still reads them."""
    driven = EngineDriven()
    request, (table,) = driven.computed(A)
    (old,) = driven.launch(driven.offer(request, 17, [table]))
    driven.reset(Tier.HOST)
    (new,) = driven.launch(driven.offer(request, 17, [table]))
    assert driven.held() == sorted(table[:4] * 2)
    driven.end(old)
    assert driven.held() == table[:4] and driven.hit(A) == 0
    driven.end(new)
    assert driven.held() == [] and loaded(driven, A) == 16


def test_a_request_may_leave_in_the_middle_of_a_copy() -> None:
    """The engine takes a request's blocks back when it likes: only what the copy writes stays held, and nothing waits
    for it."""
    driven, woken = EngineDriven(), list[int]()
    driven.serve(A)
    request, (plan,) = driven.loading(A, wake=lambda: woken.append(1))
    driven.release(request, "preempted")
    assert request.state is S.ABORTED and driven.held() == list(plan.destination_ids)
    driven.end(plan)
    assert driven.held() == [] and woken == [] and request.state is S.ABORTED
    assert loaded(driven, A) == 16
    driven.assert_at_rest()


def test_queued_loads_end_with_their_request() -> None:
    """What was not launched is not wanted any more: its blocks go back at once, the host's pins, too."""
    driven = EngineDriven(max_job_bytes=2)
    driven.serve(A)
    request = driven.admit(A)
    first, second = driven.load(request, driven.fresh(17))
    driven.launch([first])
    driven.release(request, "preempted")
    assert driven.held() == list(first.destination_ids) and not driven.ledger.launch(second.job_id)
    driven.end(first)
    driven.assert_at_rest()


def test_a_store_outlives_its_request() -> None:
    """What was offered before the request left is found by the next one."""
    driven = EngineDriven()
    request, tables = driven.computed(A)
    plans = driven.offer(request, 17, tables)
    driven.release(request, "preempted")
    driven.land(plans)
    assert loaded(driven, A) == 16


# -- loads that fall short ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ends", "ready"),
    [
        ([(Outcome.LANDED, 2), (Outcome.FAILED, 1)], 12),
        ([(Outcome.LANDED, 2), (Outcome.FAILED, 0)], 8),
        ([(Outcome.FAILED, 1), (Outcome.LANDED, 2)], 4),
        ([(Outcome.UNPROVEN, 1), (Outcome.LANDED, 2)], 0),
        ([(Outcome.CORRUPT, 1), (Outcome.LANDED, 2)], 4),
        ([(Outcome.LANDED, 2), (Outcome.CORRUPT, 0)], 8),
    ],
)
@pytest.mark.parametrize("order", [1, -1])
def test_of_a_load_counts_what_is_proven_without_a_gap(ends: Any, ready: int, order: int) -> None:
    """In one group computing goes on after it, in whatever order the copies end; the request remembers that it has lost
    a load, and its engine is told once, when all of it is over."""
    driven, woken = EngineDriven(max_job_bytes=2), list[int]()
    driven.serve(A)
    request, tables = driven.admit(A), driven.fresh(17)
    plans = driven.launch(driven.load(request, tables, wake=lambda: woken.append(1)))
    for plan, (outcome, num_landed) in [*zip(plans, ends, strict=True)][::order]:
        assert woken == [] and request.state is S.LOADING
        driven.end(plan, outcome, num_landed, (num_landed,) if outcome is Outcome.CORRUPT else ())
    assert woken == [1] and (request.state, request.num_computed_tokens) == (S.RUNNING, ready)
    assert request.num_lost_tokens and not driven.wrong(A, tables, 0, ready)
    driven.compute(A, tables, ready)
    driven.land(driven.offer(request, 17, tables))


def test_a_lost_load_goes_back_to_what_the_engine_had() -> None:
    """Also to half a block."""
    driven = EngineDriven()
    driven.serve(A)
    request, (plan,) = driven.loading(A, 7)
    driven.end(plan, Outcome.FAILED, 0)
    assert (request.num_computed_tokens, request.num_lost_tokens > 0) == (7, True)


@pytest.mark.parametrize(("in_window", "is_first"), [(False, False), (False, True), (True, False), (True, True)])
def test_with_a_window_a_load_comes_whole_or_not_at_all(in_window: bool, is_first: bool) -> None:
    """Of the window only what lies before the end of the load was brought: further back there is none."""
    driven = EngineDriven(32, groups=windowed(5))
    driven.serve(A)
    request, plans = driven.loading(A, 4)
    assert [len(plan.source_ids) for plan in plans] == [3, 1]
    failing = plans[in_window]
    driven.end(failing, Outcome.FAILED, 0 if is_first or in_window else 2)
    driven.end(plans[not in_window])
    assert (request.num_computed_tokens, request.num_lost_tokens > 0) == (4, True)


def test_a_window_that_was_brought_from_the_start_on_may_end_early() -> None:
    """All that a chunk needs lies in the load: computing goes on after what has landed."""
    groups = [FULL, KVCacheGroup("chunk", ChunkedLocal(16), BLOCK)]
    driven = EngineDriven(32, groups=groups)
    tokens = A[:13]
    driven.serve(tokens)
    request, tables = driven.admit(tokens), driven.fresh(13)
    full, chunk = driven.launch(driven.load(request, tables))
    assert (len(full.source_ids), len(chunk.source_ids)) == (3, 3)
    driven.end(full, Outcome.FAILED, 2)
    driven.end(chunk)
    assert request.num_computed_tokens == 8 and not driven.wrong(tokens, tables, 0, 8)


def test_a_corrupt_block_is_forgotten() -> None:
    """It is a miss for everybody from then on, and what lies before it a hit; an offer stores it anew."""
    driven = EngineDriven()
    driven.serve(A)
    request, tables = driven.admit(A), driven.fresh(17)
    (plan,) = driven.launch(driven.load(request, tables))
    driven.end(plan, Outcome.CORRUPT, 2, (2,))
    assert request.num_computed_tokens == 8 and not driven.wrong(A, tables, 0, 8)
    assert driven.offer(request, 8, tables) == []
    assert driven.hit(A) == loaded(driven, A) == 8
    driven.compute(A, tables, 8)
    again = driven.offer(request, 17, tables)
    assert sources(again)[0][0] == tables[0][2]
    driven.land(again)
    assert loaded(driven, A) == 16


def test_what_was_matched_and_is_corrupt_by_now_is_not_loaded() -> None:
    """Of a hit that another load has found corrupt only what is left is brought, and the blocks after are nobody's."""
    driven = EngineDriven(pending_timeout_s=1.0)
    driven.serve(A)
    _, (plan,) = driven.loading(A)
    late = driven.admit(A)
    driven.now = 5.0
    assert driven.ask(late) == (0, 16, "hit")
    driven.end(plan, Outcome.CORRUPT, 1, (1,))
    plans = driven.load(late, [[40, 41, 42, 43]])
    assert destinations(plans) == [[40]] and driven.held() == [40]
    driven.land(plans)
    assert late.num_computed_tokens == 4


# -- pins ---------------------------------------------------------------------------------------------------------


def test_a_pin_keeps_host_blocks() -> None:
    """Whatever is stored beside it, until it ends; of the engine's blocks it keeps none."""
    driven = EngineDriven(8)
    driven.serve(A)
    pin = driven.ledger.pins.hold(Prefix.of(Root("test"), A), expires_at=5.0)
    for name in (4, 5, 6):
        driven.serve(prompt(name, 17))
    assert pin.match.num_host_tokens == driven.hit(A) == 16 and driven.held() == []
    driven.ledger.lapse(5.0)
    for name in (7, 8):
        driven.serve(prompt(name, 17))
    assert driven.hit(A) < 16
    driven.assert_at_rest()


def test_pins_keep_a_share_of_the_host() -> None:
    """Beyond `max_pinned_share` a pin is refused; a reset ends those that are held."""
    driven = EngineDriven(9, max_pinned_share=0.5)
    driven.serve(A)
    driven.serve(B)
    pin = driven.ledger.pins.hold(Prefix.of(Root("test"), A))
    with pytest.raises(OutOfBlocks):
        driven.ledger.pins.hold(Prefix.of(Root("test"), B))
    driven.check()
    driven.reset(Tier.HOST)
    assert driven.ledger.statistics().num_pins == 0 and pin.state.name == "DROPPED"
    driven.assert_at_rest()


def test_the_default_wait_is_short() -> None:
    """A request that waits for the load of another one waits seconds, not minutes."""
    config = OffloadConfig(groups=[KVCacheGroup("full", FullAttention())], num_host_blocks=1)
    assert config.pending_timeout_s == 2.0
