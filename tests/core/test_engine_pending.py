"""Engine-owned blocks: requests that are matched again, and requests that wait for blocks that another one loads."""

from __future__ import annotations

from typing import Any

import pytest
from engine_driving import EngineDriven, loaded, prompt

from aoffload import RequestState, Tier
from aoffload.ledger import Outcome, Root

A, B = prompt(1, 17), prompt(2, 17)
S = RequestState


# -- asking again -------------------------------------------------------------------------------------------------


def test_asking_again_with_the_same_number_keeps_the_pins() -> None:
    """What an engine was told stays true while it makes room, also when more is stored meanwhile."""
    driven = EngineDriven(8)
    driven.serve(A[:9])
    request = driven.admit(A)
    assert driven.ask(request) == (0, 8, "hit") and driven.num_pinned() == 2
    driven.serve(A)
    driven.serve(B)
    assert driven.ask(request) == (0, 8, "hit") and request.state is S.PINNED
    driven.land(driven.load(request, driven.fresh(17)))
    assert request.num_computed_tokens == 8


def test_asking_again_with_another_number_moves_the_pins() -> None:
    """The engine's own cache has lost or gained blocks: what follows is asked for anew."""
    driven = EngineDriven()
    driven.serve(A)
    request = driven.admit(A, 8)
    assert driven.ask(request, 4) == (4, 12, "hit") and driven.num_pinned() == 4
    assert driven.ask(request, 16) == (16, 0, "hit") and driven.num_pinned() == 0
    driven.reset(Tier.HOST)
    assert driven.ask(request, 0) == (0, 0, "miss")
    driven.serve(A)
    assert driven.ask(request, 5) == (4, 12, "hit") and driven.num_pinned() == 4
    driven.release(request)
    driven.assert_at_rest()


def test_asking_again_over_runs_that_were_cut_and_joined() -> None:
    """Pins that move release runs that join again: what was found is found."""
    driven = EngineDriven(32)
    for stop in (5, 9, 13, 17):
        driven.serve([*A[:stop], *B])
    request = driven.admit(A)
    for num_device_tokens in (4, 12, 0, 16, 8, 0):
        found = driven.ask(request, num_device_tokens)
        assert found == (num_device_tokens, 16 - num_device_tokens, "hit")
    driven.release(request)
    assert loaded(driven, A) == 16


# -- waiting for what another one brings --------------------------------------------------------------------------


def test_who_needs_what_another_one_brings_is_told_to_ask_again() -> None:
    """While the load of the next block is planned or launched, and until its request has offered: then the engine's own
    cache has it. It pins nothing meanwhile, and is woken once."""
    driven, woken = EngineDriven(), list[str]()
    driven.serve(A)
    bringer, tables = driven.admit(A), driven.fresh(17)
    assert driven.admit(A, request_id="too early").match.num_tokens == 16, "nothing is planned yet"
    driven.release(driven.ledger.live_requests["too early"])
    plans = driven.load(bringer, tables)
    retried = driven.pending(A, woken)
    assert retried.match.num_tokens == 0 and not retried.leases
    driven.launch(plans)
    assert driven.ask(retried, 0, wake=lambda: woken.append("last")) == (0, 0, "pending")
    driven.end(plans[0])
    assert driven.ask(retried, 0, wake=lambda: woken.append("last"))[2] == "pending" and woken == []
    assert driven.num_pinned() == 0
    assert driven.offer(bringer, 17, tables) == [] and woken == ["last"]
    assert driven.ask(retried, 16) == (16, 0, "hit") and driven.load(retried) == []
    driven.offer(bringer, 18, driven.fresh(20), [7])
    driven.release(bringer)
    assert woken == ["last"] and retried.num_computed_tokens == 16


def test_the_answer_after_it_may_be_a_load() -> None:
    """The engine has evicted the blocks again, or never cached them: the pending request loads for itself."""
    driven, woken = EngineDriven(), list[str]()
    driven.serve(A)
    bringer, plans = driven.loading(A)
    retried = driven.pending(A, woken)
    driven.land(plans)
    driven.release(bringer, "preempted")
    assert woken == ["asker"] and driven.ask(retried) == (0, 16, "hit") and driven.num_pinned() == 4


@pytest.mark.parametrize("is_launched", [False, True])
def test_pending_ends_when_the_bringer_leaves(is_launched: bool) -> None:
    """Also in the middle of its load."""
    driven, woken = EngineDriven(), list[str]()
    driven.serve(A)
    bringer = driven.admit(A)
    plans = driven.load(bringer, driven.fresh(17))
    if is_launched:
        driven.launch(plans)
    askers = [driven.pending(A, woken, name) for name in ("first", "second")]
    driven.release(bringer, "preempted")
    assert woken == ["first", "second"]
    assert driven.ask(askers[0]) == (0, 16, "hit")
    (mine,) = driven.load(askers[0], driven.fresh(17))
    assert driven.ask(askers[1]) == (0, 0, "pending"), "another one brings it now"
    driven.land([mine])
    driven.release(askers[0])
    assert woken == ["first", "second"], "asked without a wake"


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.UNPROVEN, Outcome.CORRUPT])
def test_pending_ends_when_nothing_of_the_load_has_come(outcome: Outcome) -> None:
    """A lost load brings nothing that could be waited for."""
    driven, woken = EngineDriven(), list[str]()
    driven.serve(A)
    _, (plan,) = driven.loading(A)
    retried = driven.pending(A, woken)
    driven.end(plan, outcome, 0, (0,) if outcome is Outcome.CORRUPT else ())
    assert woken == ["asker"]
    left = 0 if outcome is Outcome.CORRUPT else 16
    assert driven.ask(retried) == (0, left, "hit" if left else "miss")


def test_pending_ends_when_what_was_loaded_is_taken_back() -> None:
    """By its own request, before that has offered: nothing brings it any more. What was not taken back still comes."""
    driven, woken = EngineDriven(), list[str]()
    driven.serve(A)
    bringer, plans = driven.loading(A)
    driven.land(plans)
    retried = driven.pending(A, woken)
    driven.invalidate(bringer, 16)
    assert woken == [], "what it has loaded ends there"
    driven.invalidate(bringer, 9)
    assert woken == ["asker"]
    assert driven.ask(retried, wake=lambda: woken.append("again")) == (0, 0, "pending"), "two blocks still come"
    driven.invalidate(bringer, 2)
    assert woken == ["asker", "again"] and driven.ask(retried) == (0, 0, "miss")
    driven.release(retried)
    driven.release(bringer)
    driven.assert_at_rest()


def test_pending_ends_by_the_clock() -> None:
    """After `pending_timeout_s` since it was told first, however often it has asked: a bringer that hangs holds up
    nobody else for longer."""
    driven, woken = EngineDriven(pending_timeout_s=3.0), list[str]()
    driven.serve(A)
    driven.now = 100.0
    driven.loading(A)
    retried = driven.pending(A, woken)
    for driven.now in (101.0, 102.5, 102.9):
        assert driven.ask(retried, wake=lambda: woken.append("asker")) == (0, 0, "pending")
    driven.now = 103.0
    assert driven.ask(retried) == (0, 16, "hit")
    driven.release(driven.ledger.live_requests["request-1"])
    assert woken == [], "it waits for nobody any more"


def test_who_was_pending_before_may_be_so_again() -> None:
    """Another question begins another wait."""
    driven, woken = EngineDriven(pending_timeout_s=3.0), list[str]()
    driven.serve(A)
    bringer, _ = driven.loading(A)
    retried = driven.pending(A, woken)
    driven.release(bringer, "preempted")
    driven.now = 10.0
    assert driven.ask(retried, 0) == (0, 16, "hit")
    driven.loading(A)
    assert driven.ask(retried, 4) == (4, 0, "pending")
    driven.now = 12.9
    assert driven.ask(retried, 4) == (4, 0, "pending")
    driven.now = 13.0
    assert driven.ask(retried, 4) == (4, 12, "hit")


def test_who_does_not_need_what_is_brought_does_not_wait() -> None:
    """Another prompt, another salt, a prompt that parts before the first block, one for which the engine has it all, or
    has more than the load begins with, and one that reads no cache."""
    driven = EngineDriven(64)
    tokens = prompt(3, 33)
    for one in (tokens, B, [*tokens[:2], *B], [*tokens[:5], *B]):
        driven.serve(one)
    salted, _ = driven.computed(tokens, root=Root("test", "salt"))
    driven.land(driven.offer(salted, 33, driven.fresh(33)))
    bringer = driven.admit(tokens, 8)
    driven.load(bringer, driven.fresh(33), max_tokens=16)
    assert driven.admit(tokens, 8).match.is_pending and driven.admit([*tokens[:14], 1, 2, 3], 8).match.is_pending
    for other, have in ((B, 0), ([*tokens[:2], *B], 0), ([*tokens[:5], *B], 4)):
        assert driven.admit(other, have).match.answer.value == "hit"
    assert driven.admit(tokens, 8, root=Root("test", "salt")).match.num_host_tokens == 24
    assert driven.admit(tokens, 4).match.num_host_tokens == 28, "the block behind is nobody's"
    assert driven.admit(tokens, 16).match.num_host_tokens == 16
    assert not driven.admit(tokens, 8, reads_cache=False).match.is_pending


def test_who_leaves_while_pending_is_not_woken() -> None:
    """Nothing is left of its question."""
    driven, woken = EngineDriven(), list[str]()
    driven.serve(A)
    bringer, plans = driven.loading(A)
    driven.release(driven.pending(A, woken), "cancelled")
    driven.land(plans)
    driven.release(bringer)
    assert woken == []
    driven.assert_at_rest()


def test_whoever_is_woken_may_ask_at_once() -> None:
    """`wake` may call the ledger."""
    driven, found = EngineDriven(), list[Any]()
    driven.serve(A)
    bringer, plans = driven.loading(A)
    retried = driven.admit(A, wake=lambda: found.append(driven.ledger.match_again(retried, num_device_tokens=0)))
    driven.land(plans)
    driven.release(bringer)
    driven.check()
    assert [match.num_host_tokens for match in found] == [16]
