"""A pool that is full only because copies hold freed blocks: vLLM waits for them a while instead of preempting."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest
from engine_doubles import TEXT, Request
from small_engine import SmallEngine, held, to_rest

from aoffload import Tier
from aoffload._vllm.frees import MIN_STEPS, WAIT_S
from aoffload._vllm.messages import Commands
from aoffload.ledger import Completion, Outcome, TransferPlan

LONG = range(100, 116)


def hold_back(engine: SmallEngine) -> list[TransferPlan]:
    """Stores that are launched from now on do not begin. Returns the list of their plans."""
    found: list[TransferPlan] = []

    def alter(commands: Commands) -> Commands:
        found.extend(commands.stores)
        return attrs.evolve(commands, stores=())

    engine.alter = alter
    return found


def let_go(engine: SmallEngine) -> None:
    engine.alter = lambda commands: commands


def serve(engine: SmallEngine, *requests: Request) -> None:
    """Until every request has finished, whatever copies do."""
    engine.submit(*requests)
    for _ in range(200):
        if not (engine.waiting or engine.running):
            return
        engine.step()
    raise AssertionError(f"not served: {[request.request_id for request in engine.waiting]}")


def over(engines: Callable[..., SmallEngine]) -> tuple[SmallEngine, list[TransferPlan]]:
    """An engine in which a store holds 7 of 39 blocks, and their request is over."""
    engine = engines(num_blocks=40)
    plans = hold_back(engine)
    serve(engine, Request("first", TEXT))
    let_go(engine)
    return engine, plans


def asks(engine: SmallEngine) -> bool:
    """vLLM finds no block in the step that it schedules."""
    found: bool = engine.connector.has_pending_block_frees()
    return found


def full(engines: Callable[..., SmallEngine], num_new: int = 12) -> tuple[SmallEngine, list[TransferPlan], Request]:
    """An engine in which a store holds 7 of 12 blocks whose request is over, and a request has the other 5 and finds no
    sixth one."""
    engine = engines(num_blocks=13)
    plans = hold_back(engine)
    serve(engine, Request("first", TEXT))
    let_go(engine)
    request = Request("long", LONG, num_new=num_new)
    engine.submit(request)
    while not engine.num_waits and not engine.num_preemptions:
        engine.step()
    return engine, plans, request


def test_a_store_that_ends_soon_is_waited_for(engines: Callable[..., SmallEngine]) -> None:
    """Instead of a preemption: the request goes on with the blocks that come back when the copy ends."""
    engine, plans, request = full(engines)
    engine.step()
    assert engine.num_waits == 2 and engine.num_preemptions == 0 and request in engine.running
    engine.workers[0].start(plans)
    engine.run()
    assert engine.num_preemptions == 0 and held(engine) == 0


def test_nobody_takes_the_blocks_that_a_request_waits_for(engines: Callable[..., SmallEngine]) -> None:
    """A new request is not matched in a step in which a running one waits."""
    engine, plans, _ = full(engines)
    other = Request("other", range(50, 53))
    assert asks(engine) and engine.connector.get_num_new_matched_tokens(other, 0) == (None, False)
    engine.workers[0].start(plans)
    engine.run(other)
    assert engine.num_preemptions == 0


def test_a_store_that_hangs_is_waited_for_once(engines: Callable[..., SmallEngine]) -> None:
    """For a while. Then vLLM preempts, and never waits for that copy again, so requests go on in the blocks that are
    left."""
    engine, plans, request = full(engines)
    engine.now = WAIT_S
    for _ in range(MIN_STEPS):
        engine.step()
    assert request in engine.running
    engine.now += 0.01
    engine.step()
    assert engine.num_preemptions == 1 and request in engine.waiting
    assert not asks(engine), "for the same copy"
    other = Request("other", range(50, 54), num_new=3)
    engine.waiting.insert(0, other)
    for _ in range(200):
        engine.step()
    assert other not in engine.waiting and other not in engine.running
    engine.workers[0].start(plans)
    to_rest(engine)


def test_a_wait_lasts_some_steps_even_if_they_are_slow(engines: Callable[..., SmallEngine]) -> None:
    """A copy may begin with the first of them, and is reported with the last one."""
    engine, plans, request = full(engines)
    for _ in range(MIN_STEPS - 1):
        assert request in engine.running
        engine.now += 2 * WAIT_S
        engine.step()
    assert request in engine.running and engine.num_waits == MIN_STEPS
    engine.step()
    assert engine.num_preemptions == 1
    engine.workers[0].start(plans)
    to_rest(engine)


def test_a_later_wait_has_a_time_of_its_own(engines: Callable[..., SmallEngine]) -> None:
    """vLLM had blocks in a step since, so its last wait takes nothing from the next one."""
    engine, plans = over(engines)
    assert asks(engine)
    for _ in range(MIN_STEPS + 1):
        engine.step()
    engine.now = 10 * WAIT_S
    assert asks(engine)
    engine.workers[0].start(plans)
    to_rest(engine)


def test_there_is_nothing_to_wait_for(engines: Callable[..., SmallEngine]) -> None:
    """Before a copy, and after it."""
    engine, plans = over(engines)
    engine.workers[0].start(plans)
    to_rest(engine)
    assert not asks(engine)


def test_blocks_of_a_running_request_do_not_come_back(engines: Callable[..., SmallEngine]) -> None:
    """A copy holds them, but its end gives nothing to anybody."""
    engine = engines(num_blocks=40)
    plans = hold_back(engine)
    request = Request("first", TEXT, num_new=8)
    engine.submit(request)
    engine.step()
    assert plans and not asks(engine)
    engine.finish(request)
    assert asks(engine)
    let_go(engine)
    engine.workers[0].start(plans)
    to_rest(engine)


def test_a_copy_that_was_not_launched_is_not_near(engines: Callable[..., SmallEngine]) -> None:
    """It begins only when others have ended: here one that reads blocks of a running request."""
    engine = engines(num_blocks=40)
    plans = hold_back(engine)
    running, other = Request("running", LONG, num_new=30), Request("other", range(40, 60))
    engine.submit(running)
    engine.step()
    link = engine.half._queue.link(Tier.DEVICE, Tier.HOST)
    link.max_bytes, link.follows, link.max_jobs = 1, False, 1
    engine.submit(other)
    engine.step()
    assert other not in engine.running and not asks(engine)
    link.max_bytes, link.max_jobs = 10**9, 10**9
    let_go(engine)
    engine.workers[0].start(plans)
    to_rest(engine)


def test_a_stalled_link_is_not_waited_for(engines: Callable[..., SmallEngine]) -> None:
    """Its copies end when the one that hangs does, and nobody knows when that is."""
    engine, plans = over(engines)
    overdue = engine.half._queue.link(Tier.DEVICE, Tier.HOST).overdue
    overdue.add(10_000)
    assert not asks(engine)
    overdue.clear()
    assert asks(engine)
    engine.workers[0].start(plans)
    to_rest(engine)


def test_an_error_means_that_nothing_is_waited_for(
    engines: Callable[..., SmallEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It turns the cache off; vLLM preempts, as without a connector."""
    engine, plans = over(engines)
    engine.may_be_off = True

    def fail(*arguments: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(engine.half, "frees_soon", fail)
    assert not asks(engine)
    assert "ZeroDivisionError" in engine.connector.off_reason
    monkeypatch.undo()
    assert not asks(engine), "it is off"
    engine.workers[0].start(plans)
    to_rest(engine)


def test_a_store_that_fails_ends_a_wait(engines: Callable[..., SmallEngine]) -> None:
    """Its blocks come back as well."""
    engine, plans, _ = full(engines)
    for plan in plans:
        engine.workers[0].copies.end(Completion(plan.job_id, Outcome.FAILED))
    engine.run()
    assert engine.num_preemptions == 0 and held(engine) == 0


def test_no_request_waits_for_ever(engines: Callable[..., SmallEngine]) -> None:
    """Many requests in a pool that is too small for them, with real copies: all end, and no block is lost."""
    engine = engines(num_blocks=13, most_tokens=8, num_host_blocks=200)
    engine.run(*(Request(f"r{at}", range(20 * at, 20 * at + 20), num_new=9) for at in range(9)))
    assert held(engine) == 0
