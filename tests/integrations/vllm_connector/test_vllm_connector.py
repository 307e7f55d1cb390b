"""Both halves of the connector around a small scheduler that calls vLLM's hooks in vLLM's order."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import attrs
import pytest
from engine_doubles import TEXT, Request
from small_engine import SmallEngine, counted, held, instead, over, to_rest

from aoffload._vllm.messages import Commands
from aoffload.ledger import Completion, Outcome, TransferPlan


def test_what_was_evicted_is_loaded(warm: Callable[..., SmallEngine]) -> None:
    """A prompt that returns computes its last block only, over bytes that are right."""
    engine = warm()
    seen: list[int] = []
    engine.alter = lambda commands: (seen.extend(plan.num_blocks for plan in commands.loads), commands)[1]
    engine.run(Request("again", TEXT))
    assert sum(seen) == 7
    assert held(engine) == 0


def test_what_the_engine_has_is_not_loaded(warm: Callable[..., SmallEngine]) -> None:
    """The host is asked for what lies after the engine's own hit."""
    engine = warm()
    engine.run(Request("own", TEXT[:13]))
    before = counted(engine, "copied_blocks|load|host")
    engine.manager.evict_all()
    engine.run(Request("head", TEXT[:13]))  # three blocks are in the engine's own cache again
    loaded = counted(engine, "copied_blocks|load|host")
    engine.run(Request("again", TEXT))
    assert (loaded - before, counted(engine, "copied_blocks|load|host") - loaded) == (3, 4)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    "end", [over(Outcome.FAILED), over(Outcome.CORRUPT, corrupt=(2,)), over(Outcome.CORRUPT, corrupt=(0,))]
)
def test_a_lost_load_is_computed(
    warm: Callable[..., SmallEngine], end: Callable[[TransferPlan], Completion | None], num_ranks: int
) -> None:
    """It is not tried again by the request that lost it, and the engine goes on."""
    engine = warm(num_ranks=num_ranks)
    plans = instead(engine, end)
    engine.run(Request("again", TEXT))
    assert len(plans) == 1
    assert counted(engine, "lost_tokens") == 28
    assert held(engine) == 0


def test_what_has_landed_of_a_load_counts(warm: Callable[..., SmallEngine]) -> None:
    """With one group the engine computes on after it, in the same blocks."""
    engine = warm()
    copied: list[TransferPlan] = []

    def alter(commands: Commands) -> Commands:
        plans = []
        for plan in commands.loads:
            front = attrs.evolve(plan, source_ids=plan.source_ids[:3], destination_ids=plan.destination_ids[:3])
            plans.append(front)
        copied.extend(plans)
        return attrs.evolve(commands, loads=tuple(plans))

    engine.alter = alter
    request = Request("again", TEXT)
    engine.submit(request)
    while not engine.over:
        engine.step()
        for done in engine.workers[0].copies.take():  # the front is copied: say that no more of it came
            engine.workers[0].copies.end(attrs.evolve(done, outcome=Outcome.FAILED))
    assert request.num_computed_tokens == 12
    engine.alter = lambda commands: commands
    engine.run()
    assert len(copied) == 1
    assert counted(engine, "lost_tokens") == 16


def test_a_load_that_hangs_is_given_up(warm: Callable[..., SmallEngine]) -> None:
    """Its blocks stay held until a late report proves it over: nothing is computed into them."""
    engine = warm(transfer_timeout_s=3, num_blocks=40)
    plans = instead(engine, lambda plan: None)
    engine.submit(Request("again", TEXT))
    for _ in range(3):
        engine.step()
    assert engine.waiting, "not before its time is over"
    engine.now = 3.0
    engine.run()
    assert held(engine) == 7
    assert engine.connector.ledger.statistics().device.num_quarantined == 7
    engine.workers[0].copies.end(Completion(plans[0].job_id, Outcome.FAILED))
    engine.step()
    assert held(engine) == 0


def test_a_plan_that_a_worker_refuses_is_a_lost_load(warm: Callable[..., SmallEngine]) -> None:
    """Rows that do not exist, for one."""
    engine = warm()
    engine.alter = lambda commands: attrs.evolve(
        commands,
        loads=tuple(attrs.evolve(plan, source_ids=array("i", [9999] * plan.num_blocks)) for plan in commands.loads),
    )
    engine.run(Request("again", TEXT))
    assert counted(engine, "jobs|load|host|failed") == 1


def test_a_block_that_changed_in_host_memory_is_lost(warm: Callable[..., SmallEngine]) -> None:
    """With `verify`, its checksum says so before anything is computed over it."""
    engine = warm(verify=True)
    engine.workers[0]._transport.backend._host[...] ^= 255  # type: ignore[union-attr]
    engine.run(Request("again", TEXT))
    assert counted(engine, "jobs|load|host|corrupt") == 1


def test_an_aborted_load_is_reported(warm: Callable[..., SmallEngine]) -> None:
    """The engine keeps the blocks of a request that it waits for until it hears of the load."""
    engine = warm()
    seen: list[str] = []
    held_back: list[TransferPlan] = []

    def alter(commands: Commands) -> Commands:
        seen.extend(report.request_id for report in commands.reports)
        held_back.extend(commands.loads)
        return attrs.evolve(commands, loads=())

    engine.alter = alter
    request = Request("again", TEXT)
    engine.submit(request)
    engine.step()
    engine.finish(request)
    engine.step()
    assert seen == ["again"]
    assert held(engine) == 7, "the copy holds its blocks itself"
    engine.workers[0].start(held_back)
    engine.run()
    assert held(engine) == 0


def test_a_reset_forgets_the_host(warm: Callable[..., SmallEngine]) -> None:
    """Weights have changed: what was stored before is never loaded."""
    engine = warm()
    engine.connector.reset_cache()
    engine.run(Request("again", TEXT))
    assert counted(engine, "copied_blocks|load|host") == 0


def test_an_error_turns_the_cache_off(
    warm: Callable[..., SmallEngine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also while a request waits for its load: it computes, and so do all others."""
    engine = warm()
    engine.may_be_off = True
    request = Request("again", TEXT)
    engine.submit(request)
    engine.step()
    monkeypatch.setattr(engine.half, "_plan_stores", lambda scheduled: 1 / 0)
    monkeypatch.setattr(engine.half, "take", lambda reports: 1 / 0)
    engine.run(Request("later", TEXT))
    assert "ZeroDivisionError" in engine.connector.off_reason
    assert "aoffload is off" in caplog.text
    assert engine.connector.get_kv_connector_stats().data["off"] == 1
    to_rest(engine)


def test_a_request_without_a_key_is_served(warm: Callable[..., SmallEngine]) -> None:
    """It neither stores nor loads; those with keys do, before and after."""
    engine = warm()
    engine.run(Request("embedded", TEXT, prompt_embeds=object()), Request("new", range(100, 120)))
    assert counted(engine, "copied_blocks|store|host") == 7 + 5
    engine.manager.evict_all()
    engine.run(Request("again", TEXT))
    assert counted(engine, "copied_blocks|load|host") == 7


def test_two_salts_share_nothing(warm: Callable[..., SmallEngine]) -> None:
    """The same tokens, another tenant."""
    engine = warm()
    engine.run(Request("again", TEXT, cache_salt="another"))
    assert counted(engine, "copied_blocks|load|host") == 0
