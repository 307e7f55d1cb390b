"""The soak on streams: real threads, a slow device, and checks of every byte and every owner.

On the simulated device here, and on a real one in `test_cuda_gpu.py`. It passes, and it notices what it is there for.
"""

from __future__ import annotations

import itertools
import queue
import sys
import threading
from functools import partial

import pytest
import torch
from copies import GUARD_S
from cuda_mutants import Unfenced, Unordered, Unproven
from simulated_cuda import SimulatedCuda, SimulatedKernel, on

from aoffload import KVCacheGroup, OffloadConfig, OffloadRuntime
from aoffload._common.tiers import Tier
from aoffload._kernel.plans import Completion, TransferPlan
from aoffload._kernel.states import Outcome
from aoffload._transfer.backends.cpu import CpuBackend
from aoffload._transfer.backends.cuda.backend import CudaBackend
from aoffload._transfer.backends.cuda.events import AdaptivePolling
from aoffload._transfer.backends.cuda.trials import BreakEven
from aoffload._transfer.fences import PASSED, Fence
from aoffload.transport import Env
from proof.soak import Length, soak
from proof.soak_memory import Compute, DeviceMemory, MakeMemory
from proof.soak_owners import OwnedTransport, Owners
from proof.soak_result import SoakResult

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory is read from /proc")

SHORT = Length(num_clients=40, num_sessions=2, num_rests=2)
NUM_TRIES = 30
"""These mutants are caught by the first. One event that is used over and over most often waits for too much:
`test_cuda_rules.py` has that."""
CONFIG = OffloadConfig(groups=[KVCacheGroup("full", block_size=4)], num_host_blocks=8)


def simulated(backend: type[CudaBackend], seed: int, break_even: BreakEven | None = None) -> MakeMemory:
    """Memories on devices of their own, whose streams run in an order of chance."""
    seeds = itertools.count(seed)

    def memory(shape: tuple[int, int], num_tensors: int) -> DeviceMemory:
        cuda = SimulatedCuda(next(seeds))
        # Short naps, because work on this device is done when somebody asks for it.
        waiting = AdaptivePolling(shortest_s=1e-6, longest_s=20e-6)
        kernel = SimulatedKernel(cuda) if break_even is not None else None
        options = on(cuda, waiting=waiting, kernel=lambda device: kernel, break_even=break_even)
        made = partial(backend, options=options)
        give = partial(cuda.compute_on, cuda.compute)
        compute = Compute(torch.device("cpu"), made, give, pause=partial(cuda.pause, cuda.compute), finish=cuda.finish)
        return DeviceMemory(shape, num_tensors, compute)

    return memory


def check(result: SoakResult) -> None:
    assert result.found == [], result.table()
    assert result.max_pinned_at_rest == 0
    assert result.blocks_checked and result.blocks_loaded and result.blocks_stored and result.num_rests


@pytest.mark.slow
def test_a_short_soak_on_streams_passes() -> None:
    """Every byte is right and in the right hands, though nobody waits for a forward; nothing is pinned at rest."""
    result = soak("trio", 1, SHORT, simulated(CudaBackend, 1))
    check(result)
    assert result.num_done > result.num_requests / 2


@pytest.mark.slow
def test_a_short_soak_with_the_kernel_passes() -> None:
    """The same where small pieces are copied by the kernel, and none is large."""
    result = soak("asyncio", 2, SHORT, simulated(CudaBackend, 2, break_even=BreakEven(2**40, 2**40)))
    check(result)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [Unfenced, Unordered, Unproven])
def test_a_rule_that_is_taken_out_fails_it(mutant: type[CudaBackend]) -> None:
    """Whichever rule of order is missing, some forward reads other bytes than belong there, or a checksum says so."""
    for seed in range(NUM_TRIES):
        found = soak("asyncio", seed, SHORT, simulated(mutant, seed)).found
        if any("wrong bytes" in problem or "other bytes than were stored" in problem for problem in found):
            return
    pytest.fail("no soak found a wrong byte")


class Gated(CpuBackend):
    """Copies wait until they are let through."""

    gate = threading.Event()

    def copy(self, plan: TransferPlan) -> Fence:
        assert self.gate.wait(GUARD_S)
        return super().copy(plan)


def test_a_forward_in_somebody_elses_block_is_noticed() -> None:
    """Also when the block has gone back and out again meanwhile: ids say nothing about who owns them."""
    runtime = OffloadRuntime(CONFIG, torch.zeros(8, 3))
    spoiled: list[list[int]] = []
    owners = Owners(runtime, lambda block_ids: spoiled.append(list(block_ids)))
    pool = runtime.ledger.cache.tiers[Tier.DEVICE].pool
    taken = pool.take(3)
    held = owners.owned(Tier.DEVICE, taken)
    assert held.problem("it") == ""
    pool.give(taken)
    assert "no owner" in held.problem("it")
    pool.take(pool.num_free)
    assert "another owner" in held.problem("it")
    assert [len(block_ids) for block_ids in spoiled] == [3, 3, 7]


def held_copy(tier: Tier | None, is_doomed: bool) -> list[str]:
    """What is found when the blocks of a tier go back while a copy of them is under way."""
    found: list[str] = []
    ends: queue.SimpleQueue[Completion] = queue.SimpleQueue()
    Gated.gate = threading.Event()
    transport = OwnedTransport(torch.zeros(8, 3), Gated, found.append)
    runtime = OffloadRuntime(CONFIG, transport=transport)
    owners = transport.owners = Owners(runtime, lambda block_ids: None)
    owners.is_doomed = lambda job_id: is_doomed  # type: ignore[method-assign]
    pools = {each: runtime.ledger.cache.tiers[each].pool for each in (Tier.DEVICE, Tier.HOST)}
    taken = {each: pool.take(2) for each, pool in pools.items()}
    transport.open(8, verify=False, deliver=ends.put, env=Env())
    transport.launch(TransferPlan(1, Tier.DEVICE, Tier.HOST, taken[Tier.DEVICE], taken[Tier.HOST]), PASSED)
    if tier is not None:
        pools[tier].give(taken[tier])
    Gated.gate.set()
    assert ends.get(timeout=GUARD_S).outcome is Outcome.LANDED
    assert transport.close(GUARD_S)
    return found


@pytest.mark.parametrize("is_doomed", [False, True])
def test_a_copy_into_somebody_elses_block_is_noticed(is_doomed: bool) -> None:
    """Also of a job that was given up: it still writes."""
    (problem,) = held_copy(Tier.HOST, is_doomed)
    assert "job 1 touches HOST block" in problem


def test_a_copy_from_somebody_elses_block_is_noticed() -> None:
    """A store whose source went back would store what somebody else writes there; if anybody were told of it."""
    (problem,) = held_copy(Tier.DEVICE, is_doomed=False)
    assert "job 1 touches DEVICE block" in problem
    assert held_copy(Tier.DEVICE, is_doomed=True) == []
    assert held_copy(None, is_doomed=False) == []
