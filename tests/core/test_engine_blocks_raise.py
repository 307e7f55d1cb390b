"""An engine's `hold` or `give` that raises, though it must not: nothing of ours leaks, and who did it is named."""

from __future__ import annotations

from array import array

import pytest
from engine_driving import Counted, EngineDriven, prompt

from aoffload import RequestState
from aoffload.errors import InvalidArgument
from aoffload.ledger import Completion, Outcome

A = prompt(1, 17)
"""Four whole blocks and the token that is always computed."""


class Raising(Counted):
    """Counts until it is told to fail."""

    fails = ""

    def hold(self, block_ids: array[int]) -> None:
        if self.fails == "hold":
            raise KeyError("a bug of the engine")
        super().hold(block_ids)

    def give(self, block_ids: array[int]) -> None:
        super().give(block_ids)
        if self.fails == "give":
            raise KeyError("a bug of the engine")


@pytest.mark.parametrize("max_job_bytes", [1 << 20, 1], ids=["one job", "several jobs"])
def test_an_offer_that_is_not_held_stores_nothing(max_job_bytes: int) -> None:
    """Its host blocks are free again, blocks that were not held are not given, and the next offer stores."""
    driven = EngineDriven(engine=Raising(), max_job_bytes=max_job_bytes)
    holding, tables = driven.computed(A)
    driven.engine.fails = "hold"
    with pytest.raises(InvalidArgument, match="engine_blocks: its hold raised KeyError") as raised:
        driven.offer(holding, 16, tables)
    assert isinstance(raised.value.__cause__, KeyError)
    driven.check()
    assert (driven.engine.given, driven.num_pinned(), holding.state) == ([], 0, RequestState.RUNNING)
    driven.engine.fails = ""
    driven.land(driven.offer(holding, 16, tables, is_last=True))
    driven.release(holding)
    driven.assert_at_rest()
    assert driven.hit(A) == 16


def test_an_offer_of_which_a_part_was_held_gives_that_part() -> None:
    """Copies of an earlier offer from other blocks are not touched."""
    driven = EngineDriven(engine=Raising(), max_job_bytes=1)
    holding, tables = driven.computed(A)
    before = driven.launch(driven.offer(holding, 8, tables))

    def hold_one(block_ids: array[int], left: list[int] = [1]) -> None:  # noqa: B006 - counts
        if not left:
            raise KeyError("a bug of the engine")
        left.pop()
        Counted.hold(driven.engine, block_ids)

    driven.engine.hold = hold_one
    with pytest.raises(InvalidArgument, match="hold"):
        driven.offer(holding, 16, tables)
    del driven.engine.hold
    driven.check()
    assert driven.engine.given == tables[0][2:3] and driven.held() == sorted(tables[0][:2])
    for plan in before:
        driven.end(plan)
    driven.release(holding)
    driven.assert_at_rest()


def test_a_load_that_is_not_held_is_over() -> None:
    """Its request computes, who waits for the same blocks is told, and a later request loads."""
    driven, woken = EngineDriven(engine=Raising()), list[str]()
    driven.serve(A)
    holding = driven.admit(A)
    driven.engine.fails, driven.engine.given = "hold", []
    with pytest.raises(InvalidArgument, match="engine_blocks: its hold raised KeyError"):
        driven.load(holding, driven.fresh(17), wake=lambda: woken.append("load"))
    driven.check()
    assert (holding.state, holding.num_computed_tokens, woken) == (RequestState.RUNNING, 0, ["load"])
    driven.engine.fails = ""
    driven.release(holding)
    driven.assert_at_rest()
    other = driven.admit(A)
    driven.land(driven.load(other, driven.fresh(17)))
    assert other.num_computed_tokens == 16 and driven.engine.given


def test_what_give_raises_comes_when_the_ledger_is_whole() -> None:
    """The copy is settled and its bytes count; `settle` raises last, and once."""
    driven = EngineDriven(engine=Raising())
    holding, tables = driven.computed(A)
    (plan,) = driven.launch(driven.offer(holding, 16, tables, is_last=True))
    driven.engine.fails = "give"
    with pytest.raises(InvalidArgument, match="engine_blocks: its give raised KeyError"):
        driven.ledger.settle(Completion(plan.job_id, Outcome.LANDED, 4))
    driven.check()
    driven.ledger.settle(Completion(plan.job_id, Outcome.LANDED, 4))
    driven.release(holding)
    driven.assert_at_rest()
    assert driven.hit(A) == 16
