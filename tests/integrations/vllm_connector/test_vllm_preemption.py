"""Requests that vLLM preempts: their blocks are free, and others', at once."""

from __future__ import annotations

from collections.abc import Callable

from engine_doubles import TEXT, Request
from small_engine import SmallEngine, counted, held

from aoffload import RequestState


def resident(engine: SmallEngine) -> list[RequestState]:
    """States of the requests that the ledger knows."""
    return [record.state for record in engine.connector.ledger.live_requests.values()]


def settle(engine: SmallEngine) -> None:
    """Let all copies end, while no request computes."""
    running, engine.running = engine.running, []
    engine.run()
    engine.running = running


def test_the_blocks_of_a_preempted_request_may_change_hands(engines: Callable[..., SmallEngine]) -> None:
    """vLLM frees them at once: only copies keep blocks, and each copies what it was offered."""
    engine = engines(num_blocks=13, most_tokens=8, num_host_blocks=200)
    engine.run(*(Request(f"r{at}", range(20 * at, 20 * at + 20), num_new=9) for at in range(5)))
    assert engine.num_preemptions > 1
    engine.manager.evict_all()
    engine.run(*(Request(f"again {at}", range(20 * at, 20 * at + 20)) for at in range(5)))
    assert counted(engine, "copied_blocks|load|host") >= 20
    assert held(engine) == 0


def test_a_preempted_request_is_let_go_of(engines: Callable[..., SmallEngine]) -> None:
    """With the step that tells of it, not only when the request is scheduled again."""
    engine = engines(most_tokens=8)
    request = Request("first", TEXT)
    engine.submit(request)
    engine.step()
    assert resident(engine) == [RequestState.RUNNING]
    engine.preempt(request)
    engine.waiting.remove(request)  # no room for it
    engine.step()
    assert resident(engine) == []
    engine.run(request)


def test_what_it_had_generated_is_found_again(engines: Callable[..., SmallEngine]) -> None:
    """A request comes back with the tokens that it has generated; those are in host memory, too."""
    engine = engines()
    request = Request("first", TEXT, num_new=12)
    engine.submit(request)
    while request.num_new > 1:
        engine.step()
    settle(engine)
    engine.preempt(request)
    engine.manager.evict_all()
    engine.run()
    assert counted(engine, "copied_blocks|load|host") == 10


def test_a_load_of_the_step_that_tells_of_a_preemption(warm: Callable[..., SmallEngine]) -> None:
    """When vLLM resets its prefix cache it preempts what runs between two steps, and schedules it again in the next:
    the load that it asks for there is its new one."""
    engine = warm()
    request = Request("again", TEXT, num_new=4)
    engine.submit(request)
    while request not in engine.running:
        engine.step()
    settle(engine)
    engine.preempt(request)
    engine.manager.evict_all()
    engine.run()
    assert counted(engine, "copied_blocks|load|host") == 14
    assert held(engine) == 0


def test_a_preempted_request_offers_again(engines: Callable[..., SmallEngine]) -> None:
    """It begins from its first token: what the host has forgotten meanwhile is stored again."""
    engine = engines()
    request = Request("first", TEXT, num_new=1)
    engine.submit(request)
    engine.step()
    engine.connector.reset_cache()
    settle(engine)
    engine.preempt(request)
    engine.manager.evict_all()
    engine.run()
    assert engine.connector.ledger.statistics().host.num_cached == 7
