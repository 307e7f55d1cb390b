"""The connector's answers on hits in host memory, at every try to schedule a request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
from engine_doubles import TEXT, Request
from small_engine import SmallEngine, counted, held, instead, over

from aoffload._vllm.requests import EngineRequest
from aoffload.ledger import Completion, Outcome

OTHER = list(range(100, 130))


class CountedTokens(list[int]):
    """Token ids that count how many of them are read."""

    num_read = 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        self.num_read += len(found) if isinstance(at, slice) else 1
        return found


def ask(engine: SmallEngine, request: Request, num_local: int = 0) -> tuple[int | None, bool]:
    found: tuple[int | None, bool] = engine.connector.get_num_new_matched_tokens(request, num_local)
    return found


def pinned(engine: SmallEngine) -> int:
    return engine.connector.ledger.statistics().host.num_pinned


def test_a_hit_is_loaded_while_others_compute(warm: Callable[..., SmallEngine]) -> None:
    """vLLM is told so: what it takes for a hit of its own it would read at once."""
    engine = warm()
    request = Request("again", TEXT)
    assert ask(engine, request) == (28, True)
    assert ask(engine, Request("new", OTHER)) == (0, False)
    engine.run(request)


def test_what_was_found_stays_while_there_is_no_room(warm: Callable[..., SmallEngine]) -> None:
    """Retries keep the pins: others that fill the host meanwhile evict nothing of it. A request that ends without
    having run keeps nothing."""
    engine = warm(num_host_blocks=10)
    request = Request("again", TEXT)
    assert ask(engine, request) == (28, True)
    for turn in range(3):
        engine.run(Request(f"other {turn}", range(50 + 40 * turn, 75 + 40 * turn)))
        assert pinned(engine) == 7
        assert ask(engine, request) == (28, True)
    engine.waiting.append(request)
    engine.finish(request)
    assert pinned(engine) == 0


def test_blocks_may_come_in_a_later_step(warm: Callable[..., SmallEngine]) -> None:
    """vLLM 0.33 asks in one step and allocates in another: what was found is there still."""
    engine = warm(num_host_blocks=10)
    request = Request("again", TEXT)
    assert ask(engine, request) == (28, True)
    engine.run(Request("other", OTHER))
    engine.allocate(request, 0, 28)
    engine.loading["again"] = request
    engine.run(request)
    assert counted(engine, "copied_blocks|load|host") == 7


def test_each_try_is_answered_behind_vllms_own_hit(warm: Callable[..., SmallEngine]) -> None:
    """Which may have grown or shrunk since the try before."""
    engine = warm()
    request = Request("again", TEXT)
    assert [ask(engine, request, local)[0] for local in (0, 12, 28, 8, 0)] == [28, 16, 0, 20, 28]
    engine.run(Request("head", TEXT[:13]))
    assert counted(engine, "copied_blocks|load|host") == 3
    engine.run(request)
    assert counted(engine, "copied_blocks|load|host") == 3 + 4


def test_the_same_question_is_not_matched_again(
    warm: Callable[..., SmallEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM asks at every step for as long as there is no room. What was found is pinned: it has not changed."""
    engine = warm()
    request = Request("again", TEXT)
    assert ask(engine, request, 8) == (20, True)
    with monkeypatch.context() as without:
        without.delattr(EngineRequest, "ask")
        assert ask(engine, request, 8) == (20, True)
    engine.run(request)


@pytest.mark.parametrize("end", ["reset", "quarantine"])
def test_an_answer_does_not_outlive_what_it_is_about(warm: Callable[..., SmallEngine], end: str) -> None:
    """What another request's copy, or a reset, has taken away is not promised, however often it was."""
    engine = warm(num_blocks=40, max_quarantined_share=0.1)
    request = Request("again", TEXT)
    assert ask(engine, request) == (28, True)
    if end == "reset":
        engine.connector.reset_cache()
    else:
        instead(engine, over(Outcome.UNPROVEN))
        engine.run(Request("other", TEXT))
        engine.manager.evict_all()
    assert ask(engine, request) == (0, False)
    engine.alter = lambda commands: commands
    engine.run(request)


def test_retries_do_not_read_the_tokens_again(warm: Callable[..., SmallEngine]) -> None:
    """A prompt may have a hundred thousand of them, and vLLM may ask at every step."""
    engine = warm()
    tokens = CountedTokens(TEXT)
    request = Request("again", [])
    request.all_token_ids = tokens
    for _ in range(9):
        ask(engine, request)
    assert tokens.num_read == len(TEXT)
    engine.run(request)


def test_who_shall_not_read_the_cache_finds_nothing(warm: Callable[..., SmallEngine]) -> None:
    """Log-probabilities of the prompt need every token computed. Nothing is pinned for that."""
    engine = warm()
    request = Request("again", TEXT, skip_reading_prefix_cache=True)
    assert ask(engine, request) == (0, False)
    assert pinned(engine) == 0
    engine.run(request)
    assert counted(engine, "copied_blocks|load|host") == 0


def test_one_of_many_loads_what_they_share(warm: Callable[..., SmallEngine]) -> None:
    """The others are told to ask again, also in the same step, and hit the engine's own cache then."""
    engine = warm(num_blocks=80)
    engine.run(*(Request(f"r{at}", [*TEXT, 50 + at]) for at in range(8)))
    assert counted(engine, "copied_blocks|load|host") == 7
    assert held(engine) == 0


def test_who_waits_for_anothers_load_does_not_wait_for_long(warm: Callable[..., SmallEngine]) -> None:
    """However often it asks: after `pending_timeout_s` it loads by itself."""
    engine = warm(num_blocks=40)
    instead(engine, lambda plan: None)
    leader, follower = Request("leader", TEXT), Request("follower", TEXT)
    engine.submit(leader)
    engine.step()
    for now in (0.0, 0.7, 1.4, 1.9):
        engine.now = now
        assert ask(engine, follower) == (None, False)
    engine.now = 2.0
    assert ask(engine, follower) == (28, True)
    engine.alter = lambda commands: commands
    engine.submit(follower)
    engine.finish(leader)
    while engine.waiting or engine.running:
        engine.step()
    assert counted(engine, "copied_blocks|load|host") == 7


@pytest.mark.parametrize("has_landed", [True, False])
def test_who_waits_for_anothers_load_is_answered_once_it_is_over(
    warm: Callable[..., SmallEngine], monkeypatch: pytest.MonkeyPatch, has_landed: bool
) -> None:
    """However it ended, and before its time to wait is over. Until then the same question gets the same answer, and
    costs no match."""
    engine = warm(num_blocks=40)
    plans = instead(engine, lambda plan: None)
    leader, follower = Request("leader", TEXT), Request("follower", TEXT)
    engine.submit(leader)
    engine.step()
    assert ask(engine, follower) == (None, False)
    with monkeypatch.context() as without:
        without.delattr(EngineRequest, "ask")
        assert ask(engine, follower) == (None, False)
    if has_landed:
        engine.alter = lambda commands: attrs.evolve(commands, loads=(plans.pop(),) if plans else ())
    else:
        engine.workers[0].copies.end(Completion(plans[0].job_id, Outcome.FAILED))
    while "leader" in engine.loading:
        engine.step()
    assert ask(engine, follower) == (28, True)
    engine.alter = lambda commands: commands
    engine.run(follower)


def test_nothing_is_promised_while_loads_are_refused(warm: Callable[..., SmallEngine]) -> None:
    """Behind a ledger that has failed nothing is copied any more: what host memory holds is no hit then."""
    engine = warm()
    engine.half._queue.turn_off("the ledger failed")
    assert ask(engine, Request("again", TEXT)) == (0, False)


def test_a_hit_that_is_gone_when_there_are_blocks(warm: Callable[..., SmallEngine]) -> None:
    """Between two hooks all was forgotten: the request that vLLM promised a load to hears of its end, and computes."""
    engine = warm()
    request = Request("again", TEXT)
    assert ask(engine, request) == (28, True)
    engine.connector.reset_cache()
    engine.allocate(request, 0, 28)
    engine.loading["again"] = request
    engine.run(request)
    assert counted(engine, "copied_blocks|load|host") == 0
    assert counted(engine, "lost_tokens") == 28


def test_a_load_that_was_lost_is_not_promised_again(warm: Callable[..., SmallEngine]) -> None:
    """By the request that has lost it. Others may find more luck."""
    engine = warm()
    plans = instead(engine, over(Outcome.FAILED))
    request = Request("again", TEXT)
    engine.submit(request)
    while not plans or engine.loading:
        engine.step()
    assert len(plans) == 1
    engine.alter = lambda commands: commands
    engine.run()
    engine.manager.evict_all()
    engine.run(Request("another", TEXT))
    assert counted(engine, "copied_blocks|load|host") == 7


def test_a_request_that_lost_a_load_loads_nothing_when_it_is_preempted_later(warm: Callable[..., SmallEngine]) -> None:
    """The same load would be lost again."""
    engine = warm()
    request = Request("again", TEXT, num_new=2)
    plans = instead(engine, over(Outcome.FAILED))
    engine.submit(request)
    while request not in engine.running:
        engine.step()
    engine.preempt(request)
    engine.manager.evict_all()
    engine.run()
    assert len(plans) == 1
