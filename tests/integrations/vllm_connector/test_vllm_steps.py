"""The metadata of a step for the workers, the work of the workers, and the end of a request."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
from engine_doubles import TEXT, Request
from small_engine import SmallEngine, counted, held, instead

from aoffload import Tier
from aoffload._vllm.messages import Commands, Reports
from aoffload.ledger import Completion, Direction, Outcome, TransferPlan

GUARD_S = 60.0
"""Never waited for in full unless something hangs that must not."""


def recorded(engine: SmallEngine) -> list[str]:
    """What the first worker does from now on, in order: loads, stores, forwards."""
    done: list[str] = []
    transport, forward = engine.workers[0]._transport, engine._forward
    assert transport is not None
    launch = transport.launch

    def launched(plan: TransferPlan, after: Any) -> None:
        done.append(f"{plan.direction.value} {plan.num_blocks}")
        launch(plan, after)

    def computed(*arguments: Any) -> None:
        done.append("forward")
        forward(*arguments)

    transport.launch = launched  # type: ignore[method-assign]
    engine._forward = computed  # type: ignore[method-assign]
    return done


def test_stores_begin_behind_the_forward_and_loads_before_it(warm: Callable[..., SmallEngine]) -> None:
    """What a step computes is not there before its forward. A load waits for none."""
    engine = warm(num_blocks=40)
    done = recorded(engine)
    engine.submit(Request("again", TEXT), Request("other", range(100, 130)))
    engine.step()
    assert done == ["load 7", "forward", "store 7"]
    engine.run()


def test_each_chunk_is_offered_in_its_step(engines: Callable[..., SmallEngine]) -> None:
    """As far as it is computed when the forward of the step is over, and no further."""
    engine = engines(most_tokens=10)
    done = recorded(engine)
    engine.run(Request("first", TEXT))
    assert done == ["forward", "store 2", "forward", "store 3", "forward", "store 2"]


def test_a_block_is_offered_in_the_step_that_fills_it(engines: Callable[..., SmallEngine]) -> None:
    """Token by token: a block that waits for the next one would be lost with the next failure."""
    engine = engines()
    done = recorded(engine)
    engine.run(Request("first", TEXT[:9], num_new=8))
    assert done == ["forward", "store 2", *["forward"] * 3, "store 1", *["forward"] * 4, "store 1", "forward"]


def test_generated_tokens_are_offered(engines: Callable[..., SmallEngine]) -> None:
    """Block by block: the next turn of a conversation begins with them."""
    engine = engines()
    request = Request("first", TEXT, num_new=7)
    engine.run(request)
    engine.manager.evict_all()
    engine.run(Request("next", [*request.all_token_ids, 1, 2, 3]))
    assert counted(engine, "copied_blocks|load|host") == 9


def test_a_step_without_work_carries_nothing(engines: Callable[..., SmallEngine]) -> None:
    """Most steps generate a token in the middle of a block."""
    engine = engines()
    seen: list[Commands] = []
    engine.alter = lambda commands: (seen.append(commands), commands)[1]
    engine.run(Request("first", TEXT[:9], num_new=2))
    assert [bool(one.stores) for one in seen[:3]] == [True, False, False]


def test_a_step_that_fills_no_block_reads_no_table(
    engines: Callable[..., SmallEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it call the ledger: there is nothing new to store."""
    engine = engines()
    request = Request("first", TEXT[:9], num_new=5)
    engine.submit(request)
    engine.step()
    offers: list[int] = []
    offer = engine.connector.ledger.offer

    def seen(record: Any, num_computed_tokens: int, *arguments: Any, **options: Any) -> Any:
        offers.append(num_computed_tokens)
        return offer(record, num_computed_tokens, *arguments, **options)

    monkeypatch.setattr(engine.connector.ledger, "offer", seen)
    engine.run()
    assert offers == [12]


def test_nothing_is_kept_when_a_request_is_over(engines: Callable[..., SmallEngine]) -> None:
    """vLLM frees its blocks at once; those that a copy reads are free when it is over. The engine steps until then."""
    engine = engines()
    held_back: list[TransferPlan] = []
    engine.alter = lambda commands: (held_back.extend(commands.stores), attrs.evolve(commands, stores=()))[1]
    request = Request("first", TEXT)
    engine.submit(request)
    engine.step()
    assert not engine.manager.tables and held(engine) == 7
    assert engine.connector.has_pending_push_work()
    assert engine.connector.ledger.statistics().num_requests == 0
    engine.workers[0].start(held_back)
    engine.run()
    assert held(engine) == 0
    assert not engine.connector.has_pending_push_work()


@pytest.mark.parametrize("policy", ["eager", "selective"])
def test_a_last_offer_has_what_no_step_has_offered(engines: Callable[..., SmallEngine], policy: str) -> None:
    """A policy that counts hears of the end of each request: then it stores what was asked for twice."""
    engine = engines(store_policy=policy)
    for name in ("first", "second", "third"):
        engine.run(Request(name, TEXT, num_new=8))
        engine.manager.evict_all()
    assert engine.connector.ledger.statistics().host.num_cached == 9


def test_a_preempted_request_that_is_aborted_offers_nothing(engines: Callable[..., SmallEngine]) -> None:
    """Its blocks are others' by then."""
    engine = engines(most_tokens=8, store_policy="selective")
    request = Request("first", TEXT)
    engine.submit(request)
    engine.step()
    engine.step()
    engine.preempt(request)
    engine.finish(request)
    engine.run()
    assert held(engine) == 0


def test_an_aborted_load_that_has_not_started_is_over(warm: Callable[..., SmallEngine]) -> None:
    """It waits after another one for room in flight, and is discarded. vLLM hears of it, or it never frees the blocks
    of the request; the engine steps until it has."""
    engine = warm(num_blocks=40, num_host_blocks=40)
    engine.run(Request("other", range(100, 130)))
    engine.manager.evict_all()
    engine.half._queue.link(Tier.HOST, Tier.DEVICE).max_bytes = 1
    plans = instead(engine, lambda plan: None)
    first, second = Request("again", TEXT), Request("another", range(100, 130))
    engine.submit(first, second)
    engine.step()
    assert len(plans) == 1, "the other one waits"
    engine.finish(second)
    assert engine.connector.has_pending_push_work()
    engine.step()
    assert "another" not in engine.manager.tables
    engine.workers[0].copies.end(Completion(plans[0].job_id, Outcome.FAILED))
    engine.run()
    assert held(engine) == 0


def test_reports_keep_the_engine_stepping(engines: Callable[..., SmallEngine]) -> None:
    """Also without any copy: vLLM waits for them."""
    engine = engines()
    assert not engine.connector.has_pending_push_work()
    engine.half._reports.append(SimpleNamespace())  # type: ignore[arg-type]
    assert engine.connector.has_pending_push_work()
    engine.half._reports.clear()


def test_ends_of_both_kinds_in_one_step(engines: Callable[..., SmallEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers report the end of one load in the step in which the scheduler sees another one land."""
    engine = engines()
    monkeypatch.setattr(engine.half, "take", lambda reports: {"landed"})
    engine.workers[0].copies.end(Completion(7, Outcome.LANDED))
    output = SimpleNamespace(
        kv_connector_worker_meta=engine.copiers[0].build_connector_worker_meta(), finished_recving={"lost"}
    )
    engine.connector.update_connector_output(output)
    assert output.finished_recving == {"landed", "lost"}


# -- ranks ------------------------------------------------------------------------------------------------------------


def test_a_load_is_over_when_every_rank_has_it(warm: Callable[..., SmallEngine]) -> None:
    """Each rank copies its part; a forward that began before the last would read what is not there."""
    engine = warm(num_ranks=2)
    late: list[TransferPlan] = []
    start = engine.workers[1].start
    engine.workers[1].start = lambda plans, uses=None: late.extend(plans)  # type: ignore[method-assign,misc]
    engine.submit(Request("again", TEXT))
    engine.step()
    assert late and engine.workers[0].copies.wait(GUARD_S)
    engine.step()
    assert engine.loading and not engine.over
    engine.workers[1].start = start  # type: ignore[method-assign]
    start(late)
    engine.run()
    assert counted(engine, "copied_blocks|load|host") == 7


def test_a_load_counts_as_far_as_every_rank_has_it(warm: Callable[..., SmallEngine]) -> None:
    """A rank that refuses its part loses the load, whatever the others have."""
    engine = warm(num_ranks=2)
    engine.workers[1].sleep()
    engine.run(Request("again", TEXT))
    assert counted(engine, "lost_tokens") == 28
    engine.workers[1].wake_up()


def test_reports_of_several_ranks_and_steps_add_up() -> None:
    """vLLM joins what the ranks of a step have to say; a rank may have said something in an earlier one."""
    one, other, third = (Completion(number, Outcome.LANDED, 1) for number in range(3))
    joined = Reports({0: (one,)}).joined(Reports({1: (one,), 0: (other,)})).joined(Reports({1: (third,)}))
    assert joined == Reports({0: (one, other), 1: (one, third)})


@pytest.mark.parametrize("rank", range(2))
def test_a_rank_that_copies_nothing_any_more_is_heard_beside_any_other(rank: int) -> None:
    """Whichever report comes first."""
    reports = [Reports({number: ()}, f"rank {rank} stopped" if number == rank else "") for number in range(2)]
    assert reports[0].joined(reports[1]).gone == reports[1].joined(reports[0]).gone == f"rank {rank} stopped"


def test_a_worker_reports_each_end_once(warm: Callable[..., SmallEngine]) -> None:
    """And nothing at all in a step in which nothing has ended."""
    engine = warm()
    worker = engine.workers[0]
    assert worker.take_reports() is None
    for number in (90, 91):
        worker.copies.end(Completion(number, Outcome.LANDED, 1))
    worker_reports = worker.take_reports()
    assert worker_reports is not None and [one.job_id for one in worker_reports.by_rank[0]] == [90, 91]
    assert worker.take_reports() is None


def test_loads_and_stores_go_to_the_workers_once(warm: Callable[..., SmallEngine]) -> None:
    """A plan that left with a step does not leave with the next."""
    engine = warm()
    seen: list[tuple[int, Direction]] = []

    def alter(commands: Commands) -> Commands:
        seen.extend((plan.job_id, plan.direction) for plan in (*commands.loads, *commands.stores))
        return commands

    engine.alter = alter
    engine.run(Request("again", [*TEXT, *range(90, 99)]))
    assert len(seen) == len(set(seen)) == 2


def test_what_exceeds_the_bound_is_stored_by_later_steps(engines: Callable[..., SmallEngine]) -> None:
    """Also after its request has ended, whose blocks vLLM still has in its prefix cache: the engine steps until all of
    it is in host memory. Nothing about an ended request is kept after that."""
    engine = engines(num_blocks=64, max_bytes_in_flight=1)
    prompts = [TEXT, [100 + token for token in TEXT], range(50, 80)]
    engine.run(*(Request(f"r{number}", prompt) for number, prompt in enumerate(prompts)))
    assert engine.connector.ledger.statistics().host.num_cached == 7 + 7 + 7 and not held(engine)
    assert not engine.half._ended and not engine.connector.ledger.deferred_requests
    engine.manager.evict_all()
    engine.run(*(Request(f"again{number}", prompt) for number, prompt in enumerate(prompts)))
    assert counted(engine, "copied_blocks|load|host") == 3 * 7


def test_blocks_that_vllm_has_reused_are_not_stored(engines: Callable[..., SmallEngine]) -> None:
    """A prompt that was deferred and whose blocks others have taken since is a miss, and no wrong bytes."""
    engine = engines(num_blocks=18, max_bytes_in_flight=1)
    prompts = [[(number * 37 + token) % 200 for token in range(30)] for number in range(12)]
    for round_number in range(3):
        for number, prompt in enumerate(prompts):
            engine.submit(Request(f"r{number} {round_number}", prompt))
        engine.run()
    assert counted(engine, "copied_blocks|load|host") and not held(engine)


@pytest.mark.parametrize("how", ["reset", "id"])
def test_what_was_deferred_of_an_ended_request_ends(engines: Callable[..., SmallEngine], how: str) -> None:
    """With a reset of vLLM's prefix cache, and when vLLM uses its id again."""
    engine = engines(num_blocks=64, max_bytes_in_flight=1)
    held_back: list[TransferPlan] = []
    engine.alter = lambda commands: (held_back.extend(commands.stores), attrs.evolve(commands, stores=()))[1]
    engine.submit(Request("first", TEXT))
    engine.step()
    assert engine.connector.ledger.deferred_requests == ("first",) and list(engine.half._ended) == ["first"]
    engine.alter = lambda commands: commands
    if how == "reset":
        engine.connector.reset_cache()
        engine.manager.evict_all()
    else:
        engine.submit(Request("first", range(100, 130)))
    engine.step()
    engine.workers[0].start(held_back)
    engine.run()
    assert engine.connector.ledger.statistics().host.num_cached == (0 if how == "reset" else 8)
    assert not engine.half._ended
