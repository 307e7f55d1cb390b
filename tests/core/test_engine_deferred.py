"""Engine-owned blocks: an offer over the bound in flight is deferred, and stored later."""

from __future__ import annotations

from typing import Any

import pytest
from engine_driving import EngineDriven, Finding, Seen, loaded, prompt, sources

from aoffload import HostCache, InvalidArgument, KVCacheGroup, OffloadConfig, SlidingWindow, Tier
from aoffload._host_cache.offers import MOST_DEFERRED
from aoffload.ledger import Outcome

A, B, C = prompt(1, 17), prompt(2, 17), prompt(3, 17)
BLOCK = 4


def offers_of(ledger: HostCache) -> Any:
    return ledger.offers


class Caching(EngineDriven):
    """An engine with a prefix cache: `forget` is the reuse of a block."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.seen = Seen()
        options.setdefault("max_bytes_in_flight", 2)
        super().__init__(*args, engine=Finding(), observer=self.seen, **options)

    @property
    def deferred(self) -> Any:
        return self.ledger.deferred_requests

    def begin(self, tokens: Any, request_id: str, **options: Any) -> tuple[Any, list[list[int]]]:
        request, tables = self.computed(tokens, request_id=request_id, **options)
        for group, table in enumerate(tables):
            self.engine.known |= {(request_id, group, at): block_id for at, block_id in enumerate(table)}
        return request, tables

    def forget(self, request_id: str, at: int) -> None:
        for key in [key for key in self.engine.known if key[0] == request_id and key[2] == at]:
            del self.engine.known[key]

    def step(self) -> list[Any]:
        plans = list(self.ledger.offer_deferred())
        self.check()
        return plans

    def land_all(self) -> None:
        """Steps of the engine, each of which ends all copies, until nothing is deferred."""
        for _ in range(100):
            plans = self.step()
            if not plans and not self.deferred:
                return
            self.land(plans)
        raise AssertionError("steps without an end")


def test_what_was_deferred_is_stored_after_its_request_has_ended() -> None:
    """Piece by piece, as copies end, the oldest request first: `find` names the blocks, which no table does any more.
    What is stored is what was computed, and the observer is told of no loss."""
    driven = Caching()
    plans = []
    for tokens, name in ((A, "a"), (B, "b")):
        request, tables = driven.begin(tokens, name)
        plans += driven.offer(request, 17, tables, is_last=True)
        driven.release(request)
    assert [plan.num_blocks for plan in plans] == [2] and driven.deferred == ("a", "b")
    assert driven.step() == [], "no room yet"
    driven.land(plans)
    plans = driven.step()
    assert sources(plans) == [[3, 4]] and driven.deferred == ("b",)
    driven.land(plans)
    driven.land_all()
    assert loaded(driven, A) == loaded(driven, B) == 16 and driven.seen.skipped == []
    assert not offers_of(driven.ledger)._ends and not driven.held()


def test_a_block_that_the_engine_has_reused_is_given_up() -> None:
    """Only what `find` proves is stored. What comes after a gap could never hit, so it is given up as well, and the
    observer is told of all that is lost."""
    driven = Caching()
    request, tables = driven.begin(A, "a")
    plans = driven.offer(request, 17, tables)
    driven.release(request)
    driven.forget("a", 2)
    driven.land(plans)
    assert driven.step() == [] and driven.deferred == ()
    assert loaded(driven, A) == 8 and driven.seen.skipped == [(2, "in_flight")]


def test_an_engine_that_cannot_find_blocks_is_told_at_once() -> None:
    """Nothing is deferred there: its tables are the only proof, and the next offer of the request brings them."""
    seen = Seen()
    driven = EngineDriven(observer=seen, max_bytes_in_flight=2)
    request, tables = driven.computed(A)
    driven.land(driven.offer(request, 17, tables))
    assert driven.ledger.deferred_requests == () and seen.skipped == [(2, "in_flight")]
    driven.land(driven.offer(request, 17, tables))
    assert loaded(driven, A) == 16


def test_an_own_offer_takes_up_what_was_deferred() -> None:
    driven = Caching()
    request, tables = driven.begin(A, "a")
    driven.land(driven.offer(request, 17, tables))
    assert driven.deferred == ("a",)
    driven.land(driven.offer(request, 17, tables))
    assert driven.deferred == () and driven.step() == []


@pytest.mark.parametrize("is_over", [True, False])
def test_nothing_computed_from_wrong_kv_is_stored_later(is_over: bool) -> None:
    """Whoever computed from the tokens that turn out to be wrong: the request itself, and one that has ended since."""
    driven = Caching()
    first, tables = driven.begin(A, "a")
    other, others = driven.begin([*A[:9], *B[9:]], "b")
    plans = [*driven.offer(first, 17, tables), *driven.offer(other, 17, others)]
    assert driven.deferred == ("a", "b")
    if is_over:
        driven.release(other)
    driven.invalidate(first, 8)
    driven.land(plans)
    assert driven.deferred == () and driven.step() == []


def test_after_a_reset_nothing_old_is_stored() -> None:
    driven = Caching()
    request, tables = driven.begin(A, "a")
    plans = driven.offer(request, 17, tables)
    driven.release(request)
    driven.reset()
    driven.land(plans)
    assert driven.step() == [] and driven.hit(A) == 0 and driven.deferred == ()


def test_a_new_request_with_the_same_id_is_not_the_old_one() -> None:
    """`find` is asked by request id, so what an earlier request of that id deferred is forgotten."""
    driven = Caching()
    request, tables = driven.begin(A, "a")
    plans = driven.offer(request, 17, tables)
    driven.release(request)
    driven.begin(B, "a")
    driven.land(plans)
    assert driven.step() == [] and driven.hit(A) == 8


def test_a_block_that_a_copy_may_still_write_to_is_not_read() -> None:
    """The engine's cache may name a block of which a load is under way: it is not what `find` promises, and is
    given up rather than stored."""
    driven = Caching()
    driven.serve(B[:9])
    request, tables = driven.begin(A, "a")
    plans = driven.offer(request, 17, tables)
    driven.release(request)
    loading, _ = driven.loading(B[:9])
    driven.engine.known["a", 0, 2] = int(driven.ledger.jobs.ids_being_written(Tier.DEVICE)[0][0])
    driven.land(plans)
    assert driven.step() == [] and driven.seen.skipped == [(2, "in_flight")] and loading.state.name == "LOADING"


def test_windows_are_stored_once_all_of_a_window_fits() -> None:
    groups = [KVCacheGroup("full", block_size=BLOCK), KVCacheGroup("window", SlidingWindow(9), BLOCK)]
    driven = Caching(groups=groups, num_host=32, max_bytes_in_flight=4)
    request, tables = driven.begin(A, "a")
    plans = driven.offer(request, 17, tables, is_last=True)
    driven.release(request)
    assert driven.deferred == ("a",)
    driven.land(plans)
    driven.land_all()
    assert loaded(driven, A) == 16


def test_the_number_of_requests_with_deferred_blocks_is_bounded() -> None:
    """Each keeps the tokens of its request. The oldest gives way, and the observer is told."""
    driven = Caching(num_host=512)
    plans = []
    for number in range(MOST_DEFERRED + 2):
        request, tables = driven.begin(prompt(number, 9), f"r{number}")
        plans += driven.offer(request, 9, tables)
        driven.release(request)
    assert len(driven.deferred) == MOST_DEFERRED
    assert driven.deferred[0] == "r2" and driven.seen.skipped == [(2, "in_flight")]


@pytest.mark.parametrize("in_steps", [True, False])
def test_what_one_step_computes_is_in_flight_at_once(in_steps: bool) -> None:
    """Unless `max_bytes_in_flight` is configured. An engine that says where its steps begin may compute for many
    requests in one; otherwise an offer is a step. What a step leaves behind counts in the next one."""
    driven = Caching(max_bytes_in_flight=None)
    offers = offers_of(driven.ledger)
    offers.max_blocks_in_flight = 1
    if in_steps:
        driven.step()
    first, tables = driven.begin(A, "a")
    second, others = driven.begin(B, "b")
    plans = driven.offer(first, 17, tables)
    assert [plan.num_blocks for plan in plans] == [4]
    more = driven.offer(second, 17, others)
    assert len(more) == in_steps and driven.deferred == (() if in_steps else ("b",))
    third, its = driven.begin(C, "c")
    driven.step()
    assert driven.offer(third, 17, its) == [], "the step before is still in flight"
    driven.land([*plans, *more])
    driven.land_all()
    assert loaded(driven, C) == 16


def test_copies_never_hold_most_of_the_engine_s_blocks() -> None:
    """What a step computes counts for a quarter of them at most."""
    config = OffloadConfig(groups=[KVCacheGroup("full", block_size=BLOCK)], num_host_blocks=16)
    offers = offers_of(HostCache(config, 40, engine_blocks=Finding(), clock=float))
    offers.computed(39)
    assert offers._step_blocks == 10


def test_a_store_that_fails_does_not_come_back_by_itself() -> None:
    driven = Caching()
    request, tables = driven.begin(A, "a")
    (plan,) = driven.offer(request, 17, tables)
    driven.release(request)
    driven.ledger.launch(plan.job_id)
    driven.end(plan, Outcome.FAILED, num_landed=0)
    driven.land_all()
    assert driven.hit(A) in (0, 16)


def test_a_prompt_that_the_host_has_no_room_for_holds_nobody_up() -> None:
    """What does not fit is given up, as with any offer, so that other requests have their turn and an engine comes to
    rest."""
    driven = Caching(num_host=5)
    long, tables = driven.begin(prompt(9, 41), "long")
    plans = driven.offer(long, 41, tables)
    other, others = driven.begin(A[:9], "other")
    driven.offer(other, 9, others)
    for request in (long, other):
        driven.release(request)
    assert driven.deferred == ("long", "other")
    driven.land(plans)
    driven.land_all()
    assert {reason for _, reason in driven.seen.skipped} == {"host_full"} and not driven.held()


@pytest.mark.parametrize("wrong", [[3], [1001, 1002], None, ["x", "y"], KeyError, KeyboardInterrupt])
def test_a_wrong_answer_of_find_loses_no_plan(wrong: Any) -> None:
    """It is about one request, of which nothing more is stored. What was planned before it comes with the next call."""
    driven = Caching(max_bytes_in_flight=6)
    for tokens, name in ((C, "a"), (A, "b"), (B, "c"), (prompt(4, 17), "d")):
        request, tables = driven.begin(tokens, name)
        plans = driven.offer(request, 17, tables)
        driven.release(request)
        if name == "a":
            first = plans
        elif name == "b":
            second = plans
    assert driven.deferred == ("b", "c", "d")
    driven.land([*first, *second])
    find = driven.engine.find

    def answer(request_id: str, *where: int) -> Any:
        if request_id != "c":
            return find(request_id, *where)
        if isinstance(wrong, type):
            raise wrong
        return wrong

    driven.engine.find = answer
    error = KeyboardInterrupt if wrong is KeyboardInterrupt else InvalidArgument
    with pytest.raises(error):
        driven.step()
    driven.engine.find = find
    driven.land_all()
    assert driven.hit(A) == 16 and driven.hit(prompt(4, 17)) == 16 and not driven.held()
    assert driven.hit(B) == (16 if wrong is KeyboardInterrupt else 0)


def test_deferred_windows_that_evict_each_other_are_given_up() -> None:
    """A host that cannot hold the windows of one request together would store one of them at each step, and evict
    another one: an engine at rest would copy for ever."""
    found = Finding()
    seen = Seen()
    groups = [KVCacheGroup("full", block_size=BLOCK)]
    groups += [KVCacheGroup(f"window {reach}", SlidingWindow(reach), BLOCK) for reach in (32, 36, 40)]
    driven = EngineDriven(50, engine=found, observer=seen, groups=groups, max_bytes_in_flight=8)
    tables: dict[str, list[list[int]]] = {}

    def serve(name: str, tokens: list[int]) -> None:
        request = driven.admit(tokens, request_id=name, reads_cache=False)
        tables[name] = driven.fresh(len(tokens))
        found.known |= {
            (name, group, at): block_id for group, table in enumerate(tables[name]) for at, block_id in enumerate(table)
        }
        driven.compute(tokens, tables[name])
        driven.land(driven.offer(request, len(tokens), tables[name], is_last=True))
        driven.release(request)
        for _ in range(50):
            driven.land(driven.ledger.offer_deferred())

    text = prompt(1, 120)
    for user in (2, 3):
        serve(f"branch {user}", [*text[: 40 * (user - 1)], *prompt(user, 9)])
    serve("long", text)
    assert driven.ledger.offer_deferred() == (), "it goes on for ever"
    assert "evicted" in {reason for _, reason in seen.skipped}
    driven.assert_at_rest()
