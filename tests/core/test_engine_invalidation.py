"""Engine-owned blocks: invalidation of wrong KV, and resets."""

from __future__ import annotations

import pytest
from engine_driving import EngineDriven, loaded, prompt, sources

from aoffload import CommitError, KVCacheGroup, RequestState, SlidingWindow, Tier
from aoffload.ledger import Prefix, Root

A, B = prompt(1, 17), prompt(2, 17)
S = RequestState


# -- taking back --------------------------------------------------------------------------------------------------


def test_queued_stores_of_what_is_taken_back_are_discarded() -> None:
    """Their blocks go back at once; what was offered before stays."""
    driven = EngineDriven()
    request, tables = driven.computed(A)
    (kept,) = driven.offer(request, 9, tables)
    (lost,) = driven.offer(request, 17, tables)
    assert driven.invalidate(request, 8) == []
    assert driven.held() == tables[0][:2] and not driven.ledger.launch(lost.job_id)
    driven.land([kept])
    assert driven.hit(A) == 8 and (request.num_computed_tokens, request.state) == (8, S.RUNNING)


@pytest.mark.parametrize("from_token", [8, 9, 11])
def test_launched_stores_of_what_is_taken_back_never_publish(from_token: int) -> None:
    """They run to their end, and free what they have brought; half a unit is wrong as a whole."""
    driven = EngineDriven()
    request, tables = driven.computed(A)
    kept, lost = (driven.launch(driven.offer(request, stop, tables)) for stop in (9, 17))
    assert driven.invalidate(request, from_token) == []
    assert driven.held() == tables[0][:4]
    driven.end(lost[0])
    driven.end(kept[0])
    assert driven.hit(A) == 8 and driven.held() == []
    driven.release(request)
    driven.assert_at_rest()


def test_one_store_over_the_border_keeps_what_is_right() -> None:
    """A copy that carries both publishes nothing that is wrong, and nothing leaks."""
    driven = EngineDriven()
    request, tables = driven.computed(A)
    (plan,) = driven.launch(driven.offer(request, 17, tables))
    driven.invalidate(request, 8)
    driven.end(plan)
    assert driven.hit(A) in (0, 8)
    driven.land(driven.offer(request, 17, tables))
    assert driven.hit(A) == 16


def test_what_is_published_and_what_hangs_on_it_is_not_found_any_more() -> None:
    """Whoever has offered it: another request may have computed it with the same blocks. Pins keep nothing of it."""
    driven = EngineDriven()
    request, tables = driven.computed(A)
    driven.land(driven.offer(request, 17, tables))
    tokens = [*A[:12], *B[:9]]
    other, theirs = driven.computed(tokens)
    driven.land(driven.offer(other, 21, theirs))
    pin = driven.ledger.pins.hold(Prefix.of(Root("test"), tokens))
    assert driven.hit(tokens) == 20
    driven.invalidate(request, 6)
    assert driven.hit(A) == driven.hit(tokens) == 4 and pin.match.num_tokens == 4
    statistics = driven.ledger.statistics().host
    assert statistics.num_free == statistics.num_blocks - 1


def test_who_has_taken_it_back_goes_on() -> None:
    """What it had generated after is forgotten; what it computes anew is stored and found."""
    driven = EngineDriven()
    request, _ = driven.computed(A[:9])
    tables = driven.fresh(24)
    driven.compute([*A[:9], *B], tables)
    driven.land(driven.offer(request, 16, tables, B[:8]))
    driven.invalidate(request, 9)
    assert (request.num_computed_tokens, request.sequence.num_tokens) == (9, 10)
    tokens = [*A[:9], B[0], *range(50, 59)]
    driven.compute(tokens, tables)
    driven.land(driven.offer(request, 18, tables, tokens[10:]))
    assert driven.hit(tokens) == loaded(driven, tokens) == 16 and driven.hit([*A[:9], *B]) == 8
    driven.release(request)
    assert request.state is S.DONE


def test_who_may_have_read_it_is_told_and_stores_nothing_any_more() -> None:
    """In the engine's own cache or from the host; not who has read only what lies before."""
    driven = EngineDriven(64)
    tokens = prompt(3, 33)
    request, tables = driven.computed(tokens)
    driven.land(driven.offer(request, 17, tables))
    by_cache = driven.admit([*tokens[:14], *B], 12, request_id="by cache")
    before = driven.admit([*tokens[:9], *B], 8, request_id="before")
    by_host, plans = driven.loading(tokens, 4, request_id="by host")
    late = driven.admit([*tokens[:13], *B], 12, request_id="late", reads_cache=False)
    driven.load(late)
    elsewhere, theirs = driven.computed(B, request_id="elsewhere")
    affected = driven.invalidate(request, 9)
    assert {one.request_id for one in affected} == {"by cache", "by host", "late"}
    driven.land(plans)
    for one in (by_cache, by_host, late):
        blocks = driven.fresh(64)
        assert driven.offer(one, one.sequence.num_tokens, blocks, is_last=True) == []
        driven.release(one, "read what was wrong")
    assert driven.offer(elsewhere, 17, theirs) and driven.offer(before, 9, driven.fresh(32)) == []
    assert driven.hit(tokens) == 8


def test_stores_of_readers_do_not_publish() -> None:
    """What hangs on the wrong tokens is on its way already: queued or launched, it is found by nobody."""
    driven = EngineDriven(64)
    request, tables = driven.computed(A)
    driven.launch(driven.offer(request, 17, tables))
    tokens = [*A, *B]
    reader, theirs = driven.computed(tokens, request_id="reader")
    driven.release(reader)
    reader = driven.admit(tokens, 17, reads_cache=False, request_id="reader")
    launched = driven.launch(driven.offer(reader, 24, theirs))
    queued = driven.offer(reader, 34, theirs)
    assert driven.invalidate(request, 4) == [reader]
    assert driven.launch(queued) == []
    for plan in launched:
        driven.end(plan)
    assert driven.hit(tokens) == 0


def test_who_has_only_matched_it_is_matched_again() -> None:
    """It has read nothing: of its hit is left what is right, and that is loaded."""
    driven = EngineDriven()
    request, tables = driven.computed(A)
    driven.land(driven.offer(request, 17, tables))
    matched, part = driven.admit(A), driven.admit(A, 8)
    assert driven.invalidate(request, 8) == []
    assert (matched.match.num_host_tokens, part.match.num_host_tokens) == (8, 0)
    assert driven.num_pinned() == 2
    plans = driven.load(matched, driven.fresh(17))
    assert [len(plan.source_ids) for plan in plans] == [2]
    driven.land(plans)
    assert matched.num_computed_tokens == 8 and driven.load(part) == []
    assert part.num_computed_tokens == 8


def test_who_is_pending_asks_again_and_finds_what_is_right() -> None:
    """Pending requests hold nothing that could be wrong."""
    driven, woken = EngineDriven(), list[str]()
    request, tables = driven.computed(A)
    driven.land(driven.offer(request, 17, tables))
    bringer, plans = driven.loading(A)
    retried = driven.pending(A, woken)
    assert driven.invalidate(request, 8) == [bringer]
    driven.land(plans)
    driven.release(bringer, "read what was wrong")
    assert woken == ["asker"] and driven.ask(retried) == (0, 8, "hit")


# -- resets -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", [None, Tier.HOST])
def test_a_reset_before_the_load(tier: Tier | None) -> None:
    """What was matched is gone: nothing is loaded, nothing stays pinned."""
    driven = EngineDriven()
    driven.serve(A)
    request = driven.admit(A, 4)
    driven.reset(tier)
    assert driven.load(request, [range(40, 45)]) == []
    assert (request.state, request.num_computed_tokens, driven.num_pinned()) == (S.RUNNING, 4, 0)
    assert driven.hit(A) == 0
    driven.release(request)
    driven.assert_at_rest()


@pytest.mark.parametrize("tier", [None, Tier.HOST])
@pytest.mark.parametrize("is_launched", [False, True])
def test_a_reset_in_the_middle_of_a_load(tier: Tier | None, is_launched: bool) -> None:
    """The copy has its source until it is over. What it brings is found by nobody and, after a reset of everything, no
    longer counts for its own request, which computes into other blocks."""
    driven, woken = EngineDriven(), list[str]()
    driven.serve(A)
    request, tables = driven.admit(A), driven.fresh(17)
    plans = driven.load(request, tables)
    if is_launched:
        driven.launch(plans)
    retried = driven.pending(A, woken)
    driven.reset(tier)
    driven.serve(B)
    assert driven.ask(retried) == (0, 0, "miss")
    driven.launch(plans)
    driven.end(plans[0])
    assert request.num_computed_tokens == (0 if tier is None else 16)
    if tier is None:
        tables = driven.fresh(17)
    else:
        assert not driven.wrong(A, tables, 0, 16)
    driven.compute(A, tables)
    stores = driven.offer(request, 17, tables)
    assert sources(stores) == ([] if tier is None else [tables[0][:4]])
    driven.land(stores)
    driven.release(request)
    driven.release(retried)
    assert driven.hit(A) == (0 if tier is None else 16)
    driven.assert_at_rest()


@pytest.mark.parametrize("tier", [None, Tier.HOST])
def test_a_reset_in_the_middle_of_a_store(tier: Tier | None) -> None:
    """It publishes nothing. After one of the host alone the same request stores it again, after a whole one only
    requests that come later do."""
    driven = EngineDriven()
    request, tables = driven.computed(A)
    (launched,) = driven.launch(driven.offer(request, 9, tables))
    queued = driven.offer(request, 17, tables)
    driven.reset(tier)
    driven.end(launched)
    driven.land(queued)
    assert driven.hit(A) == 0 and driven.held() == []
    again = driven.offer(request, 17, tables)
    assert sources(again) == ([] if tier is None else [tables[0][:4]])
    driven.land(again)
    driven.release(request)
    driven.assert_at_rest()
    driven.serve(A)
    assert loaded(driven, A) == 16


@pytest.mark.parametrize(("from_token", "is_refused"), [(0, False), (7, True), (8, True), (15, True), (16, False)])
def test_nothing_goes_back_to_where_a_window_reads_what_was_not_loaded(from_token: int, is_refused: bool) -> None:
    """A load fills only the window before its end. A request that went back further would compute on unwritten blocks
    and offer the results, so the call is refused, and the error names the first valid token."""
    groups = [KVCacheGroup("window", SlidingWindow(5), 4)]
    driven = EngineDriven(groups=groups)
    driven.serve(A)
    second = driven.admit(A)
    driven.land(driven.load(second, driven.fresh(17)))
    assert second.num_computed_tokens == 16
    before = repr(second)
    if is_refused:
        with pytest.raises(CommitError, match="go back to 0") as refusal:
            driven.ledger.invalidate(second, from_token)
        assert refusal.value.argument == "from_token"
        assert repr(second) == before
    else:
        assert driven.ledger.invalidate(second, from_token) == ()
        assert second.num_computed_tokens == from_token
