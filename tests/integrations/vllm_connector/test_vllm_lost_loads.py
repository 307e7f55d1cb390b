"""Reports to vLLM on loads that failed or landed only in part."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest
from engine_doubles import TEXT, Request
from small_engine import SmallEngine, counted, held, instead, to_rest

from aoffload._vllm.messages import Commands
from aoffload.ledger import Completion, Outcome, TransferPlan

TWO_GROUPS = (0, 12)


def copy_front(engine: SmallEngine, num_blocks: int, outcome: Outcome = Outcome.FAILED) -> None:
    """Of each load only the first blocks are copied, on all ranks; then it ends like that."""

    def alter(commands: Commands) -> Commands:
        for plan in commands.loads:
            for worker, memory in zip(engine.workers, engine.memories, strict=True):
                host = worker._transport.backend._host  # type: ignore[union-attr]
                for source, destination in list(zip(plan.source_ids, plan.destination_ids, strict=True))[:num_blocks]:
                    memory.view(2, -1, 16)[:, destination] = memory.new_tensor(host[source].reshape(2, 16))
                corrupt = (num_blocks,) if outcome is Outcome.CORRUPT else ()
                worker.copies.end(Completion(plan.job_id, outcome, num_blocks, corrupt))
        return attrs.evolve(commands, loads=())

    engine.alter = alter


def reported_failures(engine: SmallEngine) -> tuple[set[str], set[int]]:
    """All that the workers have told vLLM: requests whose load failed, and blocks that are invalid."""
    failed = {name for step in engine.worker_outputs for one in step for name in one.results.failed_recving}
    return failed, {block_id for step in engine.worker_outputs for one in step for block_id in one.invalid}


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.CORRUPT])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_with_one_group_what_has_landed_counts(
    warm: Callable[..., SmallEngine], outcome: Outcome, num_ranks: int
) -> None:
    """vLLM is told the blocks after it, and no others; it computes on at the first of them, in the same blocks."""
    engine = warm(num_ranks=num_ranks)
    copy_front(engine, 3, outcome)
    request = Request("again", TEXT)
    engine.submit(request)
    while not engine.over:
        engine.step()
    assert request.num_computed_tokens == 12
    assert reported_failures(engine) == (set(), set(engine.manager.block_ids("again")[0][3:]))
    engine.run()
    assert counted(engine, "lost_tokens") == 16


@pytest.mark.parametrize("windows", [(0,), TWO_GROUPS])
def test_a_load_that_brought_nothing_is_lost_whole(warm: Callable[..., SmallEngine], windows: tuple[int, ...]) -> None:
    """The request begins again, with blocks of its own."""
    engine = warm(windows=windows, num_blocks=40)
    copy_front(engine, 0)
    engine.run(Request("again", TEXT))
    assert reported_failures(engine) == ({"again"}, set())


@pytest.mark.parametrize("windows", [(0, 0), TWO_GROUPS])
def test_with_several_groups_a_load_is_lost_whole(warm: Callable[..., SmallEngine], windows: tuple[int, ...]) -> None:
    """An id of a block may belong to any of them: vLLM refuses such ids, and so the request begins again."""
    engine = warm(windows=windows, num_blocks=40)
    copy_front(engine, 4)
    engine.run(Request("again", TEXT))
    assert reported_failures(engine) == ({"again"}, set())
    assert counted(engine, "lost_tokens") > 0


def test_blocks_that_a_copy_may_still_write_to_are_never_told(warm: Callable[..., SmallEngine]) -> None:
    """vLLM would compute into them. Here the front of a load has landed, and its end may land at any time."""
    engine = warm(num_blocks=40)
    engine.connector.ledger.jobs.units_per_job = (4,)
    late: list[TransferPlan] = []

    def alter(commands: Commands) -> Commands:
        late.extend(commands.loads[1:])
        return attrs.evolve(commands, loads=commands.loads[:1])

    engine.alter = alter
    request = Request("again", TEXT, num_new=9)
    engine.submit(request)
    engine.step()
    assert late, "the load is one job"
    late_ids = {block_id for plan in late for block_id in plan.destination_ids}
    for plan in late:
        engine.workers[0].copies.end(Completion(plan.job_id, Outcome.UNPROVEN))
    while engine.loading:
        engine.step()
    assert reported_failures(engine) == ({"again"}, set())
    assert not late_ids & set(engine.manager.block_ids("again")[0]), "it computes elsewhere"
    engine.alter = lambda commands: commands
    engine.workers[0].start(late)
    to_rest(engine)


def test_an_unproven_load_keeps_its_blocks_until_late_proof(warm: Callable[..., SmallEngine]) -> None:
    """And the request computes meanwhile, in others."""
    engine = warm(num_blocks=40)
    plans = instead(engine, lambda plan: Completion(plan.job_id, Outcome.UNPROVEN))
    engine.run(Request("again", TEXT))
    assert reported_failures(engine) == ({"again"}, set())
    assert held(engine) == 7
    engine.alter = lambda commands: commands
    engine.workers[0].start(plans)
    to_rest(engine)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_every_worker_says_that_a_load_is_over(warm: Callable[..., SmallEngine], num_ranks: int) -> None:
    """vLLM waits for all of them; one that says nothing would leave the request waiting for ever."""
    engine = warm(num_ranks=num_ranks)
    copy_front(engine, 0)
    engine.run(Request("again", TEXT))
    over = [[one.results.finished_recving for one in step] for step in engine.worker_outputs]
    assert [one for one in over if any(one)] == [[{"again"}] * num_ranks]
