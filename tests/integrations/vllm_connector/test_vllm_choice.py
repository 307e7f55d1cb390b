"""`load_choice` in vLLM: the part of a hit that is loaded, and the part that is computed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import pytest
from engine_doubles import TEXT, Request
from small_engine import SmallEngine, counted

from aoffload._vllm.messages import Commands

LOAD_S = 4.0
HIT = 28


@pytest.fixture
def measured(warm: Callable[..., SmallEngine]) -> Callable[..., SmallEngine]:
    """An engine that has loaded TEXT once, which took `LOAD_S`, and has forgotten it again."""

    def make(**options: Any) -> SmallEngine:
        engine = warm(load_choice="cost", **options)

        def alter(commands: Commands) -> Commands:
            engine.now += LOAD_S if commands.loads else 0.0
            return commands

        engine.alter = alter
        engine.run(Request("again", TEXT))
        engine.manager.evict_all()
        assert (counted(engine, "copied_blocks|load|host"), counted(engine, "declined_loads")) == (7, 0)
        return engine

    return make


def ask(engine: SmallEngine, request: Request) -> tuple[int | None, bool]:
    found: tuple[int | None, bool] = engine.connector.get_num_new_matched_tokens(request, 0)
    return found


def test_what_is_computed_sooner_is_not_loaded(measured: Callable[..., SmallEngine]) -> None:
    """vLLM is told of no hit, however often it asks; nothing stays pinned, and it counts once."""
    engine = measured(prefill_tokens_per_s=100.0)
    request = Request("third", TEXT)
    assert [ask(engine, request) for _ in range(3)] == [(0, False)] * 3
    assert counted(engine, "declined_loads") == 1 and engine.connector.ledger.statistics().host.num_pinned == 0
    assert "computes 28 tokens of its host hit" in engine.connector.ledger.explain()
    engine.run(request)
    assert counted(engine, "copied_blocks|load|host") == 7 and not engine.connector.ledger.reports.declined


def test_what_is_loaded_sooner_is_loaded(measured: Callable[..., SmallEngine]) -> None:
    """As without the key."""
    engine = measured(prefill_tokens_per_s=1.0)
    engine.run(Request("third", TEXT))
    assert (counted(engine, "copied_blocks|load|host"), counted(engine, "declined_loads")) == (14, 0)


def test_what_is_queued_to_be_computed_counts(measured: Callable[..., SmallEngine]) -> None:
    """A load that ends before the request's turn costs nothing. What has run, or has gone, is queued no longer."""
    engine = measured(prefill_tokens_per_s=10.0)
    assert ask(engine, Request("idle", TEXT)) == (0, False)
    long, third = Request("long", range(100, 200)), Request("third", TEXT)
    assert ask(engine, long) == (0, False)
    assert ask(engine, third) == (HIT, True)
    for request in (long, third):
        engine.submit(request)
        engine.finish(request)
    engine.half.forget("idle")
    assert ask(engine, Request("fourth", TEXT)) == (0, False)
    engine.half.forget("fourth")
    generating = Request("generating", range(100, 180), num_new=9)
    engine.submit(generating)
    engine.step()
    assert generating in engine.running
    assert ask(engine, Request("fifth", TEXT)) == (0, False)
    engine.half.forget("fifth")
    engine.run()


def test_the_speed_of_computing_is_that_of_steps(engines: Callable[..., SmallEngine]) -> None:
    """Everything is loaded until a step has shown it. Nobody measures without the key."""
    for choice, speed in (("cost", len(TEXT) / 2.0), ("always", None)):
        engine = engines(load_choice=choice)
        engine.half.steps.clock = partial(next, count(step=2.0))
        assert engine.half.steps.speed.tokens_per_s is None
        engine.run(Request("first", TEXT))
        assert engine.half.steps.speed.tokens_per_s == speed


def test_a_preempted_request_is_decided_anew(measured: Callable[..., SmallEngine]) -> None:
    """What computing cost when it came first is no answer to its second try."""
    engine = measured(prefill_tokens_per_s=100.0, most_tokens=8)
    request = Request("third", TEXT)
    engine.submit(request)
    engine.step()
    assert counted(engine, "declined_loads") == 1
    engine.preempt(request)
    engine.manager.evict_all()
    engine.half.steps.speed.tokens_per_s = 1.0
    engine.run()
    assert (counted(engine, "copied_blocks|load|host"), counted(engine, "declined_loads")) == (14, 1)
