"""What only a device can show: bytes on real streams, each rule with its mutant, the kernel, several devices, a loss.

Skipped, with the reason, where torch sees none.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from copies import GUARD_S, Copies
from cuda_mutants import OneEvent, Unfenced, Unordered, Unproven

from aoffload._kernel.states import Direction, Outcome
from aoffload._transfer.backends.cuda.backend import CudaBackend, CudaOptions
from aoffload._transfer.backends.cuda.driver import Pieces
from aoffload._transfer.backends.cuda.events import AdaptivePolling, BlockingWait
from aoffload._transfer.backends.cuda.nvidia import NvidiaDriver
from aoffload._transfer.backends.cuda.plain import TorchDriver
from aoffload._transfer.backends.cuda.trials import BreakEven
from aoffload._transfer.fences import PASSED, RegionFences
from aoffload.errors import TransferRefused
from benchmarks.sizes import sized
from proof.soak import Length, soak
from proof.soak_memory import DeviceMemory, cuda_compute

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
SLEEP_CYCLES = 20_000_000
"""About 10 ms of a busy compute stream: long enough for an unfenced copy to overtake what follows."""
NUM_ROUNDS = sized(30, 3)
SOAK = sized(Length(seconds=3.0), Length(num_rests=1))


def nvidia(regions: Any) -> NvidiaDriver:
    try:
        return NvidiaDriver(regions[0].device.index)
    except ImportError:
        pytest.skip("cuda-bindings is not installed")


DRIVERS = {"nvidia": nvidia, "torch": TorchDriver}
each_driver = pytest.mark.parametrize("driver", DRIVERS.values(), ids=DRIVERS)
ENGINE, KERNEL = BreakEven(0, 0), BreakEven(2**40, 2**40)


def device_pool(num_regions: int = 1) -> list[torch.Tensor]:
    """Block `b` of region `r` is full of `b + 100 * r`; 256 KiB a block and region."""
    numbers = torch.arange(64, dtype=torch.int32, device="cuda")[:, None].repeat(1, 1 << 16)
    pools = [numbers + 100 * region for region in range(num_regions)]
    torch.cuda.synchronize()
    return pools


@each_driver
@pytest.mark.parametrize("break_even", [ENGINE, KERNEL, None], ids=["engine", "kernel", "measured"])
@pytest.mark.parametrize("waiting", [BlockingWait(), AdaptivePolling()], ids=["blocking", "polling"])
def test_gpu_round_trip(open_copies: Callable[..., Copies], driver: Any, break_even: Any, waiting: Any) -> None:
    """Scattered blocks of strided regions come back byte for byte, through memory that is pinned in place."""
    pool = torch.randint(0, 255, (32, 3, 40_000), dtype=torch.uint8, device="cuda")
    wanted = pool.clone()
    torch.cuda.synchronize()
    options = CudaOptions(driver=driver, break_even=break_even, waiting=waiting)
    copies = open_copies([pool[:, 0], pool[:, 2]], 40, partial(CudaBackend, options=options), verify=True)
    backend = copies.transport.backend
    assert isinstance(backend, CudaBackend)
    if break_even == KERNEL and not backend.has_kernel:
        pytest.skip(f"no kernel here: {backend.driver!r}, Triton")
    assert copies.store([3, 4, 9, 31], [7, 8, 0, 39]).outcome is Outcome.LANDED
    pool[3:].zero_()
    landed = copies.load([7, 8, 0, 39], [3, 4, 9, 31])
    assert (landed.outcome, landed.num_landed) == (Outcome.LANDED, 4)
    torch.cuda.synchronize()
    for block_id in (3, 4, 9, 31):
        assert torch.equal(pool[block_id, ::2], wanted[block_id, ::2])
        assert not pool[block_id, 1].any()
    assert backend.host.is_page_locked
    assert torch.from_numpy(backend.host.rows).is_pinned()


# -- the rules, each with its mutant ----------------------------------------------------------------------------------


def store_after_its_compute(copies: Copies, pool: torch.Tensor) -> bool:
    """The store copies what the forward wrote before the fence."""
    pool[5] = 5
    torch.cuda._sleep(SLEEP_CYCLES)
    pool[5] = 99
    copies.launch_store([5], [0], after=copies.transport.record_fence())
    return landed_as(copies, pool, 99)


def store_without_a_fence(copies: Copies, pool: torch.Tensor) -> bool:
    """A store that is given none waits for the caller's stream."""
    pool[5] = 5
    torch.cuda._sleep(SLEEP_CYCLES)
    pool[5] = 99
    copies.launch_store([5], [0])
    return landed_as(copies, pool, 99)


def load_after_the_reader(copies: Copies, pool: torch.Tensor) -> bool:
    """A load leaves its destination alone while the forward reads it."""
    pool[5], pool[7] = 5, 7
    torch.cuda.synchronize()
    copies.launch_store([7], [0], after=PASSED)
    assert copies.next().outcome is Outcome.LANDED
    torch.cuda._sleep(SLEEP_CYCLES)
    seen = pool[5].clone()
    copies.launch_load([0], [5])
    assert copies.next().outcome is Outcome.LANDED
    torch.cuda.synchronize()
    return bool((seen == 5).all() and (pool[5] == 7).all())


def told_when_it_is_there(copies: Copies, pool: torch.Tensor) -> bool:
    """Who hears that a load landed finds its bytes."""
    pool[1:33] = 3
    pool[33:63] = 0
    torch.cuda.synchronize()
    copies.launch_store(list(range(1, 31)), list(range(30)), after=PASSED)
    assert copies.next().outcome is Outcome.LANDED
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)  # which the load waits for: whoever says that it is over now is wrong
    copies.launch_load(list(range(30)), list(range(33, 63)))
    assert copies.next().outcome is Outcome.LANDED
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):  # not ordered behind the copy
        right = bool((pool[62] == 3).all())
    torch.cuda.synchronize()
    return right


def fence_kept_while_another_is_recorded(copies: Copies, pool: torch.Tensor) -> bool:
    """A fence goes on meaning what it meant, whatever is recorded after it, on whatever stream."""
    pool[5] = 5
    torch.cuda._sleep(SLEEP_CYCLES)
    pool[5] = 99
    after = copies.transport.record_fence()
    with torch.cuda.stream(torch.cuda.Stream()):
        other = copies.transport.record_fence()
        copies.launch_store([5], [0], after=after)
        assert copies.next().outcome is Outcome.LANDED
    del other
    torch.cuda.synchronize()
    copies.launch_load([0], [6])
    assert copies.next().outcome is Outcome.LANDED
    return bool((pool[6] == 99).all())


def landed_as(copies: Copies, pool: torch.Tensor, value: int) -> bool:
    assert copies.next().outcome is Outcome.LANDED
    torch.cuda.synchronize()
    copies.launch_load([0], [6])
    assert copies.next().outcome is Outcome.LANDED
    torch.cuda.synchronize()
    return bool((pool[6] == value).all())


@each_driver
@pytest.mark.parametrize(
    ("rule", "mutant"),
    [
        (store_after_its_compute, Unfenced),
        (store_without_a_fence, Unfenced),
        (load_after_the_reader, Unfenced),
        (told_when_it_is_there, Unproven),
        (fence_kept_while_another_is_recorded, OneEvent),
    ],
)
def test_gpu_with_the_rule_never_and_without_it_sometimes(
    open_copies: Callable[..., Copies], driver: Any, rule: Any, mutant: type[CudaBackend], record_property: Any
) -> None:
    """In 30 rounds the bytes are always right; in 30 rounds of the mutant, at least once they are not."""
    wrong = {}
    for backend in (CudaBackend, mutant):
        (pool,) = device_pool()
        options = CudaOptions(driver=driver, break_even=ENGINE)
        copies = open_copies(pool, 32, partial(backend, options=options))
        wrong[backend] = sum(not rule(copies, pool) for _ in range(NUM_ROUNDS))
    with_it, without_it = wrong.values()
    about = f"wrong in {with_it} of {NUM_ROUNDS} rounds with the rule, in {without_it} without"
    record_property("found", f"{about}; {copies.transport.backend!r}")
    assert with_it == 0 < without_it


def load_read_early(copies: Copies, pool: torch.Tensor) -> bool:
    """The bytes of before, though its turn came when there were others."""
    backend = copies.transport.backend
    assert isinstance(backend, CudaBackend)
    backend.host.rows[0] = 1
    pool[7] = 0
    torch.cuda._sleep(SLEEP_CYCLES)
    with backend.driver.bound():
        backend.wait_for(Direction.LOAD, (backend.record_fence(),))
        num_bytes, addresses = backend.block_bytes, (backend.host.address, pool[7].data_ptr())
        pieces = Pieces(*(np.array([number], dtype=np.uint64) for number in (*addresses, num_bytes)))
        backend.copy_by_engine(pieces, Direction.LOAD)
        backend.host.rows[0] = 2
        backend.settle(Direction.LOAD)
    return bool((pool[7].view(torch.uint8) == 1).any())


def store_read_early(copies: Copies, pool: torch.Tensor) -> bool:
    return not store_after_its_compute(copies, pool)


@pytest.mark.parametrize(
    ("read_early", "backend"),
    [pytest.param(load_read_early, CudaBackend, id="load"), pytest.param(store_read_early, Unordered, id="store")],
)
def test_gpu_how_early_copies_read(
    open_copies: Callable[..., Copies], read_early: Any, backend: type[CudaBackend], record_property: Any
) -> None:
    """Copies that are told that they may read their source before their turn, and wait for 10 ms of compute: whether
    they do is for the driver to say, so it is told and not judged."""
    (pool,) = device_pool()
    copies = open_copies(pool, 32, partial(backend, options=CudaOptions(driver=nvidia, break_even=ENGINE)))
    early = sum(read_early(copies, pool) for _ in range(NUM_ROUNDS))
    record_property("found", f"{early} of {NUM_ROUNDS} read before their turn; {copies.transport.backend!r}")


@each_driver
def test_gpu_a_load_does_not_wait_behind_a_held_store(open_copies: Callable[..., Copies], driver: Any) -> None:
    """Directions have a stream and a thread each: a store after a long forward holds nothing else up."""
    (pool,) = device_pool()
    copies = open_copies(pool, 8, partial(CudaBackend, options=CudaOptions(driver=driver, break_even=ENGINE)))
    assert copies.store([1], [0]).outcome is Outcome.LANDED
    forward = torch.cuda.Stream()
    with torch.cuda.stream(forward):
        torch.cuda._sleep(20 * SLEEP_CYCLES)
        held = copies.launch_store([2], [1], after=forward.record_event(torch.cuda.Event(blocking=True)))
    loaded = copies.launch_load([0], [3])
    assert [copies.next().job_id, copies.next().job_id] == [loaded, held]


@each_driver
def test_gpu_layers_start_while_later_ones_are_loading(open_copies: Callable[..., Copies], driver: Any) -> None:
    """A forward that waits for the fence of each region reads what was loaded, 30 times."""
    layers = device_pool(8)
    copies = open_copies(layers, 8, partial(CudaBackend, options=CudaOptions(driver=driver, break_even=ENGINE)))
    assert copies.store([1, 2, 3], [4, 0, 7]).outcome is Outcome.LANDED
    backend = copies.transport.backend
    assert isinstance(backend, CudaBackend)
    forward = torch.cuda.Stream()
    for number in range(2, 2 + NUM_ROUNDS):
        for layer in layers:
            layer[10:13] = 0
        fences = RegionFences(len(layers))
        backend.watch(number, fences)
        assert copies.launch_load([4, 0, 7], [10, 11, 12]) == number
        seen = []
        with torch.cuda.stream(forward):
            for layer, fence in zip(layers, fences.fences, strict=True):
                forward.wait_event(fence)  # type: ignore[arg-type]
                seen.append(layer[10:13].clone())
        assert copies.next().outcome is Outcome.LANDED
        forward.synchronize()
        assert [copied[:, 0].tolist() for copied in seen] == [[100 * r + 1, 100 * r + 2, 100 * r + 3] for r in range(8)]


def soaked(driver: Any, backend: type[CudaBackend], event_loop: str) -> Any:
    """On real streams: forwards that are given to one, copies beside them, in as many threads as under a runtime."""

    def memory(shape: tuple[int, int], num_tensors: int) -> DeviceMemory:
        return DeviceMemory(shape, num_tensors, cuda_compute(backend, CudaOptions(driver=driver)))

    return soak(event_loop, 1, SOAK, memory)


@each_driver
@pytest.mark.parametrize("event_loop", ["asyncio", "trio"])
def test_gpu_soak(driver: Any, event_loop: str) -> None:
    """Every byte is right and in the right hands, and nothing is pinned at rest: `test_cuda_soak`, on real streams. A
    longer one, `python -m proof.soak --device cuda`, has to have met everything."""
    pytest.importorskip(event_loop)
    result = soaked(driver, CudaBackend, event_loop)
    print(result.table())
    assert result.found == [], result.table()
    assert result.max_pinned_at_rest == 0
    assert result.blocks_checked and result.blocks_loaded and result.blocks_stored and result.num_rests


@each_driver
@pytest.mark.parametrize("mutant", [Unfenced, Unproven])
def test_gpu_soak_without_a_rule(driver: Any, mutant: type[CudaBackend]) -> None:
    """The same notices that a rule is missing."""
    result = soaked(driver, mutant, "asyncio")
    assert any("wrong bytes" in problem for problem in result.problems), result.table()


def test_gpu_a_graph_captured_beside_copies_is_not_harmed(open_copies: Callable[..., Copies]) -> None:
    """Torch's default way to capture, which ends at a careless call of any other thread; and a captured stream takes no
    fence."""
    (pool,) = device_pool()
    options = CudaOptions(driver=nvidia, break_even=ENGINE, waiting=AdaptivePolling())
    copies = open_copies(pool, 32, partial(CudaBackend, options=options))
    after, number = copies.transport.record_fence(), torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        number += 1
        with pytest.raises(TransferRefused, match="captured into a graph"):
            copies.transport.record_fence()
        for block_id in range(1, 9):
            copies.launch_store([block_id], [block_id], after=after)
            assert copies.next().outcome is Outcome.LANDED
        number += 1
    graph.replay()
    torch.cuda.synchronize()
    assert number.item() == 2
    assert copies.load([8], [20]).outcome is Outcome.LANDED
    assert bool((pool[20] == 8).all())


def test_gpu_memory_that_grows_in_place_is_copied(open_copies: Callable[..., Copies]) -> None:
    """Torch's expandable segments: one tensor over several physical allocations, in a process that is told to."""
    program = """
import torch
from functools import partial
from copies import Copies
from aoffload._kernel.states import Outcome
pool = torch.arange(64, dtype=torch.int32, device="cuda")[:, None].repeat(1, 1 << 19)  # 2 MiB a block
copies = Copies(pool, 64)
assert copies.store(list(range(1, 63)), list(range(62))).outcome is Outcome.LANDED
pool.zero_()
assert copies.load(list(range(62)), list(range(1, 63))).outcome is Outcome.LANDED
assert pool[1:63, 0].tolist() == pool[1:63, -1].tolist() == list(range(1, 63))
assert copies.transport.close(5)
print("went on")
"""
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{program}"]
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=6 * GUARD_S, check=False, env=environment
    )  # fmt: skip
    assert "went on" in done.stdout, done.stderr


def test_gpu_every_device_of_the_process(open_copies: Callable[..., Copies]) -> None:
    """Each pool on its device, whichever is current where they are used."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one device only")
    pools = [torch.arange(8, device=f"cuda:{number}")[:, None].repeat(1, 64) for number in range(2)]
    for pool in pools:
        torch.cuda.synchronize(pool.device)
    both = [open_copies(pool, 4) for pool in pools]
    for copies in both:
        assert copies.store([2, 3], [0, 1]).outcome is Outcome.LANDED
        assert copies.load([0, 1], [6, 7]).outcome is Outcome.LANDED
    assert [pool[6:, 0].tolist() for pool in pools] == [[2, 3]] * 2


LOSS = """
import torch
from copies import Copies
from aoffload._kernel.states import Outcome
from aoffload.errors import DeviceGone
pool, four = torch.zeros(8, 1 << 16, device="cuda"), torch.zeros(4, device="cuda")
beyond = torch.tensor([1 << 30], device="cuda")
copies = Copies(pool, 4)
assert copies.store([1], [0]).outcome is Outcome.LANDED
after = copies.transport.record_fence()
torch.cuda._sleep(200_000_000)
four[beyond]  # an assertion fails on the device, when it has slept
copies.launch_store([1], [1])
assert copies.next().outcome is Outcome.UNPROVEN
for direction, fence in (("load", None), ("store", None), ("store", after)):
    try:
        copies.launch_load([1], [1]) if direction == "load" else copies.launch_store([1], [1], after=fence)
    except DeviceGone as error:
        print(direction, "refused for good:", error)
copies.transport.close(5)
print("went on", flush=True)  # before torch ends, which may end badly now
"""


def test_gpu_a_lost_device_is_an_outcome(record_property: Any) -> None:
    """In a process of its own, since its context is gone afterwards: only what was under way is in doubt, everything
    else is refused for good, and the program goes on."""
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{LOSS}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=6 * GUARD_S, check=False)
    record_property("found", done.stdout.partition("refused for good: ")[2].partition("\n")[0])
    assert "went on" in done.stdout, done.stderr
    assert done.stdout.count("refused for good: device lost") == 3, done.stdout
    assert "Exception in thread" not in done.stderr
