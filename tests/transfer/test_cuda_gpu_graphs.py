"""What only a device can show: CUDA graphs that are captured once and replayed over blocks that copies change.

Skipped, with the reason, where torch sees none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from copies import Copies
from cuda_mutants import Unfenced, Unproven

from aoffload._kernel.states import Outcome
from aoffload._transfer.backends.cuda.backend import CudaBackend, CudaOptions
from aoffload._transfer.backends.cuda.trials import BreakEven
from aoffload._transfer.fences import PASSED
from benchmarks.sizes import sized

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
SLEEP_CYCLES = 20_000_000
"""About 10 ms: a copy that does not wait is over by then."""
NUM_ROUNDS = sized(30, 3)
VALUES_PER_BLOCK = 1 << 16
ENGINE = BreakEven(0, 0)


class Reader:
    """A forward as one graph: it reads block 5 into memory of its own, at once or after 10 ms."""

    def __init__(self, pool: torch.Tensor, *, is_slow: bool) -> None:
        self.seen = torch.empty_like(pool[5])
        warm = torch.cuda.Stream()
        with torch.cuda.stream(warm):
            self.seen.copy_(pool[5])
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            if is_slow:
                torch.cuda._sleep(SLEEP_CYCLES)
            self.seen.copy_(pool[5])

    def replay(self) -> None:
        self._graph.replay()

    def saw(self, value: int) -> bool:
        torch.cuda.synchronize()
        return bool((self.seen == value).all())


def put(copies: Copies, pool: torch.Tensor, host_id: int, value: int) -> None:
    """A block of `value` in host memory."""
    pool[7] = value
    torch.cuda.synchronize()
    copies.launch_store([7], [host_id], after=PASSED)
    assert copies.next().outcome is Outcome.LANDED


def loaded(copies: Copies, pool: torch.Tensor, reader: Reader, value: int) -> bool:
    """A replay after a load, whose blocks the program heard of, reads them. The load waits for 10 ms of compute."""
    put(copies, pool, 0, value)
    torch.cuda._sleep(SLEEP_CYCLES)
    copies.launch_load([0], [5])
    assert copies.next().outcome is Outcome.LANDED
    with torch.cuda.stream(torch.cuda.Stream()):  # not ordered after the copy
        reader.replay()
        return reader.saw(value)


def overwritten(copies: Copies, pool: torch.Tensor, reader: Reader, value: int) -> bool:
    """A replay that was launched before a load into its block reads what was there before."""
    put(copies, pool, 0, value + 1)
    pool[5] = value
    reader.replay()
    copies.launch_load([0], [5])
    assert copies.next().outcome is Outcome.LANDED
    return reader.saw(value) and bool((pool[5] == value + 1).all())


@pytest.mark.parametrize(
    ("rule", "mutant"),
    [pytest.param(loaded, Unproven, id="loaded"), pytest.param(overwritten, Unfenced, id="overwritten")],
)
def test_gpu_a_graph_reads_what_was_loaded_and_nothing_that_comes_later(
    open_copies: Callable[..., Copies], rule: Any, mutant: type[CudaBackend], record_property: Any
) -> None:
    """In 30 rounds a replay always sees the blocks of its time; without the rule, at least once it does not."""
    wrong = []
    for backend in (CudaBackend, mutant):
        pool = torch.zeros(8, VALUES_PER_BLOCK, dtype=torch.int32, device="cuda")
        copies = open_copies(pool, 8, partial(backend, options=CudaOptions(break_even=ENGINE)))
        reader = Reader(pool, is_slow=rule is overwritten)
        wrong.append(sum(not rule(copies, pool, reader, 2 * number) for number in range(1, NUM_ROUNDS + 1)))
    with_it, without_it = wrong
    record_property("found", f"wrong in {with_it} of {NUM_ROUNDS} rounds with the rule, in {without_it} without")
    assert with_it == 0 < without_it
