"""Cycles and the replay of a trace by the core that the environment has: after `make compiled`, the compiled one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import attrs
import line

from aoffload.ledger import is_compiled
from benchmarks.cycle import Tokens, cycle_with, prompts_of
from benchmarks.policies import read_trace
from benchmarks.replay import NUM_REQUESTS, through_ledger, through_runtime

CYCLES: dict[int, tuple[Callable[[Tokens], None], Iterator[Tokens]]] = {}
REPLAYS: dict[str, list[Tokens]] = {}


def prepare_cycle(num_blocks: int) -> bool:
    """Two prompts that take turns, as in `benchmarks/cycle.py`. Returns whether the core is the compiled one."""
    prompts = prompts_of(num_blocks, 2)
    CYCLES[num_blocks] = cycle_with(num_blocks, prompts), itertools.cycle(prompts)
    return is_compiled


def cycle(num_blocks: int, least_s: float) -> dict[str, float]:
    serve, turns = CYCLES[num_blocks]
    return line.timed(lambda: serve(next(turns)), least_s)


def replay(path: str, at_a_time: int) -> dict[str, float]:
    """The time of one request, through a runtime that serves `at_a_time`. 0: through a ledger."""
    if path not in REPLAYS:
        REPLAYS[path] = read_trace(Path(path), NUM_REQUESTS)
    if at_a_time:
        return attrs.asdict(anyio.run(through_runtime, REPLAYS[path], at_a_time))
    return attrs.asdict(through_ledger(REPLAYS[path]))


if __name__ == "__main__":
    line.serve({"prepare_cycle": prepare_cycle, "cycle": cycle, "replay": replay})
