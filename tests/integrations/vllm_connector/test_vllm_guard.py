"""An error in the connector turns it off: vLLM goes on without a cache, and gets every block back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
from engine_doubles import TEXT, Request
from small_engine import SmallEngine, counted, held, instead, to_rest

from aoffload.ledger import TransferPlan

OTHER = list(range(100, 130))


def fail(*arguments: object, **options: object) -> None:
    raise ZeroDivisionError("a bug")


def serve(engine: SmallEngine) -> None:
    """Go on until every request has finished, whatever copies do."""
    for _ in range(200):
        if not (engine.waiting or engine.running):
            return
        engine.step()
    raise AssertionError(f"not served: {[request.request_id for request in engine.waiting]}")


def narrow(engine: SmallEngine) -> SmallEngine:
    """From now on copies wait for room in flight: one at a time."""
    for link in engine.half._queue._links.values():
        link.max_bytes, link.follows = 1, False
    engine.most_tokens, engine.may_be_off = 12, True
    return engine


HOOKS = ["match", "allocated", "step", "_plan_stores", "take", "_take_over", "finished", "_offer_last"]


@pytest.mark.parametrize("hook", HOOKS)
def test_an_error_in_any_hook_turns_the_cache_off(
    warm: Callable[..., SmallEngine], monkeypatch: pytest.MonkeyPatch, hook: str
) -> None:
    """A request that waits for a load computes, and so do all others; none waits for ever, and no block is lost. What
    takes longer than a load is bounded too: some copies wait for room in flight."""
    engine = narrow(warm(num_blocks=40))
    engine.submit(Request("again", TEXT), Request("other", OTHER))
    engine.step()
    monkeypatch.setattr(engine.half, hook, fail)
    engine.run(Request("later", [*TEXT[:9], *OTHER]))
    assert "ZeroDivisionError" in engine.connector.off_reason
    engine.run(Request("last", TEXT))
    to_rest(engine)


@pytest.mark.parametrize("hook", ["plan_load", "offer", "release", "settle", "launch", "admit", "match_again"])
@pytest.mark.parametrize("after", range(4))
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_error_in_the_ledger_turns_the_cache_off(
    warm: Callable[..., SmallEngine], monkeypatch: pytest.MonkeyPatch, hook: str, after: int, num_ranks: int
) -> None:
    """In the middle of a hook that has planned copies already. Reports of several ranks are joined once, so reports
    that were joined before the error must not be lost."""
    engine = narrow(warm(num_blocks=60, num_ranks=num_ranks))
    sound, calls = getattr(engine.connector.ledger, hook), iter(range(1_000))

    def once(*arguments: Any, **options: Any) -> Any:
        return fail() if next(calls) == after else sound(*arguments, **options)

    monkeypatch.setattr(engine.connector.ledger, hook, once, raising=True)
    engine.run(Request("again", TEXT), Request("other", OTHER), Request("third", [*TEXT[:9], *OTHER], num_new=5))
    engine.run(Request("last", TEXT))
    to_rest(engine)


@pytest.mark.parametrize("part", ["reset", "engine_reset"])
def test_an_error_in_a_reset_turns_the_cache_off(
    warm: Callable[..., SmallEngine], monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """KV that could not be forgotten is never loaded."""
    engine = narrow(warm())
    monkeypatch.setattr(engine.connector.ledger if part == "reset" else engine.half, part, fail)
    assert engine.connector.reset_cache()
    engine.run(Request("again", TEXT))
    assert "ZeroDivisionError" in engine.connector.off_reason
    to_rest(engine)


def test_a_load_that_was_promised_before_an_error_is_lost(
    warm: Callable[..., SmallEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.33 may have blocks for it in a later step than it asked in: it is told that nothing comes."""
    engine = narrow(warm())
    request = Request("again", TEXT)
    assert engine.connector.get_num_new_matched_tokens(request, 0) == (28, True)
    monkeypatch.setattr(engine.half, "match", fail)
    engine.run(Request("other", OTHER))
    engine.allocate(request, 0, 28)
    engine.loading["again"] = request
    engine.run(request)
    to_rest(engine)


def test_an_aborted_load_is_over_behind_an_error(
    warm: Callable[..., SmallEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine steps until vLLM has heard of it."""
    engine = narrow(warm())
    plans = instead(engine, lambda plan: None)
    request = Request("again", TEXT)
    engine.submit(request)
    engine.step()
    monkeypatch.setattr(engine.half, "finished", fail)
    engine.finish(request)
    assert engine.connector.has_pending_push_work()
    engine.step()
    assert "again" not in engine.manager.tables
    engine.workers[0].start(plans)
    to_rest(engine)


def test_who_waits_for_a_load_computes_behind_an_error(
    warm: Callable[..., SmallEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once. The copy that is under way keeps its blocks, until it is over: it may still write to them. The engine
    steps on for it until its time is over."""
    engine = narrow(warm(num_blocks=40))
    plans = instead(engine, lambda plan: None)
    engine.submit(Request("again", TEXT))
    engine.step()
    monkeypatch.setattr(engine.half, "step", fail)
    serve(engine)
    assert held(engine) == 7 and engine.connector.has_pending_push_work()
    engine.now = 30.0
    engine.run()
    assert held(engine) == engine.connector.ledger.statistics().device.num_quarantined == 7
    engine.workers[0].start(plans)
    to_rest(engine)


def test_copies_that_wait_for_room_give_their_blocks_back_behind_an_error(
    warm: Callable[..., SmallEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would never start; the one that is under way ends."""
    engine = narrow(warm(num_blocks=40))
    held_back: list[TransferPlan] = []
    engine.alter = lambda commands: (held_back.extend(commands.stores), attrs.evolve(commands, stores=()))[1]
    engine.submit(Request("other", OTHER))
    while engine.running or engine.waiting:
        engine.step()
    assert held(engine) == 7 and sum(plan.num_blocks for plan in held_back) == 3
    monkeypatch.setattr(engine.half, "step", fail)
    engine.step()
    assert held(engine) == 3
    engine.workers[0].start(held_back)
    to_rest(engine)


def test_a_store_that_hangs_gives_its_blocks_back_behind_an_error(
    warm: Callable[..., SmallEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the same time as ever: it only reads them. The engine steps until then; what the store writes to stays in
    quarantine until it ends."""
    engine = warm(num_blocks=40, store_timeout_s=10)
    engine.may_be_off, held_back = True, list[TransferPlan]()
    engine.alter = lambda commands: (held_back.extend(commands.stores), attrs.evolve(commands, stores=()))[1]
    engine.submit(Request("other", OTHER))
    serve(engine)
    monkeypatch.setattr(engine.half, "step", fail)
    engine.now = 9.9
    engine.step()
    assert engine.connector.off_reason and held(engine) == 7
    assert engine.connector.has_pending_push_work()
    engine.now = 10.0
    engine.run()
    assert held(engine) == 0 and engine.connector.ledger.statistics().host.num_quarantined == 7
    engine.workers[0].start(held_back)
    for _ in range(20_000):
        engine.step()
        if not engine.connector.ledger.statistics().host.num_quarantined:
            return
    raise AssertionError("a late proof was not heard")


def test_copies_that_end_behind_an_error_are_not_late(
    warm: Callable[..., SmallEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody gives up what has ended in time."""
    engine = warm(num_blocks=40)
    engine.may_be_off, held_back = True, list[TransferPlan]()
    engine.alter = lambda commands: (held_back.extend(commands.stores), attrs.evolve(commands, stores=()))[1]
    engine.submit(Request("other", OTHER))
    serve(engine)
    monkeypatch.setattr(engine.half, "step", fail)
    engine.step()
    engine.workers[0].start(held_back)
    to_rest(engine)
    engine.now = 100.0
    engine.run(Request("last", TEXT))
    assert counted(engine, "overdue_jobs|store|host") == 0
