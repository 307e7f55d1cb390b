"""Scenarios with a layer that attends to a window and one that attends to everything: two groups of blocks."""

from __future__ import annotations

from functools import partial

from .bench import Bench, Scenario, run_part
from .models import HYBRID
from .one_rank import ours, without
from .rows import Row
from .shared_prompt import shared_prompts
from .transfers import faulty

__all__ = ["SCENARIOS"]

SMALL_POOL = 110
NAME = "hybrid: "


def all_fail(bench: Bench, model: str = NAME, num_blocks: int = SMALL_POOL) -> Row:
    return _faulty(bench, "AllFail", f"{model}every load fails", num_blocks)


def half_fail(bench: Bench) -> Row:
    return _faulty(bench, "HalfFail", "hybrid: every load fails half-way")


def _faulty(bench: Bench, name: str, about: str, num_blocks: int = SMALL_POOL) -> Row:
    with bench.engine(num_blocks, faulty(name)) as engine:
        served, transport = bench.talk(engine), engine.worker_connector.transport
    row = bench.judge(about, served, f"{transport.num_failed_loads} loads failed")
    return row.missed("" if transport.num_failed_loads else "nothing was loaded")


def unproven(bench: Bench) -> Row:
    with bench.engine(SMALL_POOL, faulty("SomeUnproven")) as engine:
        transport = engine.worker_connector.transport
        for turn in range(3):
            engine.serve(bench.turn(turn))
        num_held, num_late = engine.num_held, transport.release()
        engine.serve(bench.turn(3))
        served = engine.rest()
    row = bench.judge("hybrid: loads are unproven and write late", served, f"{num_late} loads, {num_held} blocks held")
    return row.missed("" if num_late else "no load was late", "" if num_held else "nothing was held meanwhile")


SCENARIOS = (
    Scenario("without", partial(without, num_blocks=SMALL_POOL, model=NAME)),
    Scenario("ours", partial(ours, num_blocks=SMALL_POOL, model=NAME), is_short=True),
    Scenario("every load fails", all_fail, is_short=True),
    Scenario("half", half_fail),
    Scenario("unproven", unproven),
    *shared_prompts(NAME),
)

if __name__ == "__main__":
    run_part(HYBRID, SCENARIOS)
