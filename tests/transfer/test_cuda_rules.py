"""The rules of order on a device, each with the mutant that breaks it: on a simulated device, 30 rounds of chance each.

The device runs its streams in an order of chance, so whatever is not ordered happens in any order. Which tests keep
which rule, of this file unless said, and the mutant without it:

- a store waits for after=, the compute that wrote its source; without one for the caller's stream:
  store_after_its_compute, store_without_a_fence (Unfenced)
- a load waits for what still reads or writes its destination: load_after_the_reader, load_after_the_writer (Unfenced)
- device to host reads in stream order, host to device may read early:
  test_each_direction_reads_its_source_as_its_rule_says (Unordered)
- going on and publishing come after the load's fence: told_when_it_is_there (Unproven)
- a fence keeps its meaning: fence_kept_while_another_is_recorded; tests/transfer/test_cuda_events.py
  test_no_event_is_recorded_while_somebody_holds_a_fence_of_it (OneEvent)
- requests of a step may share a fence: tests/shell/test_scopes.py test_one_fence_for_a_step
- a block changes hands once every job and step has let go: tests/core/test_ledger.py
  test_a_step_holds_what_it_touches; tests/core/test_transfers.py
  test_unproven_destinations_are_never_reused_until_proven
- with ranks, a job ends with the last rank's fence: tests/transfer/test_ranks.py
  test_a_job_is_complete_when_every_rank_is
- loads before stores, bounded in flight: tests/shell/test_worker.py test_loads_go_before_stores,
  test_jobs_in_flight_are_bounded
- few batches are under way: tests/transfer/test_cuda.py test_batches_under_way_are_few
- one thread submits, another verifies: tests/transfer/test_cuda.py test_one_thread_submits_while_another_verifies;
  tests/transfer/test_cuda.py test_single_blocks_do_not_wait_for_copies
- a kernel's table is written again once no kernel reads it: tests/transfer/test_cuda_kernel.py
  test_a_table_is_written_again_only_when_no_kernel_reads_it
- a held store holds no load: test_a_store_that_is_held_holds_no_load
- the fence is on the caller's stream, or the one named: test_a_named_compute_stream_is_the_one_that_is_fenced
- the event loop never waits for the device: tests/transfer/test_cuda_runtime.py
  test_the_event_loop_goes_on_while_the_device_works
- a region's fence passes when its bytes are there: tests/transfer/test_cuda_events.py
  test_a_layer_can_start_when_its_region_is_there
- all together, in real threads; under the runtime: tests/transfer/test_cuda_soak.py
  test_a_rule_that_is_taken_out_fails_it; tests/transfer/test_cuda_runtime.py test_every_hit_is_what_was_computed
  (Unfenced, Unordered, Unproven)
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from copies import Copies
from cuda_mutants import OneEvent, Unfenced, Unordered, Unproven
from simulated_cuda import SimulatedCuda, Stream, on

from aoffload._kernel.states import Outcome
from aoffload._transfer.backends.cuda.backend import CudaBackend
from aoffload._transfer.backends.cuda.driver import SourceOrder
from aoffload._transfer.fences import PASSED

NUM_ROUNDS = 30

Round = Callable[[type[CudaBackend], int], bool]
"""Whether the bytes were right with this backend and seed."""


def opened(backend: type[CudaBackend], cuda: SimulatedCuda, num_host_blocks: int = 8) -> tuple[torch.Tensor, Copies]:
    """Block `b` is full of `b`; two regions a block, so that a copy has several pieces."""
    pool = torch.arange(10, dtype=torch.int32)[:, None, None].repeat(1, 3, 4)
    return pool, Copies([pool[:, 0], pool[:, 2]], num_host_blocks, partial(backend, options=on(cuda)))


def written(pool: torch.Tensor, block_id: int, value: int) -> Callable[[], object]:
    """A forward that writes a block, in two goes."""
    return lambda: pool[block_id].fill_(value)


def hosted(copies: Copies) -> list[int]:
    """The first number of each host block."""
    backend = copies.transport.backend
    assert isinstance(backend, CudaBackend)
    return [int(number) for number in backend.host.rows.view("i4")[:, 0]]


def store_after_its_compute(backend: type[CudaBackend], seed: int) -> bool:
    """A store after the fence of the forward that writes its source."""
    cuda = SimulatedCuda(seed)
    pool, copies = opened(backend, cuda)
    for value in (97, 98, 99):
        cuda.compute_on(cuda.compute, written(pool, 5, value))
    copies.launch_store([5], [0], after=copies.transport.record_fence())
    assert copies.next().outcome is Outcome.LANDED
    return ended(copies, cuda, hosted(copies)[0] == 99)


def store_without_a_fence(backend: type[CudaBackend], seed: int) -> bool:
    """A store that is given none waits for all compute of the caller's stream."""
    cuda = SimulatedCuda(seed)
    pool, copies = opened(backend, cuda)
    cuda.compute_on(cuda.compute, written(pool, 5, 99))
    copies.launch_store([5], [0])
    assert copies.next().outcome is Outcome.LANDED
    return ended(copies, cuda, hosted(copies)[0] == 99)


def load_after_the_reader(backend: type[CudaBackend], seed: int) -> bool:
    """A load into a block that the forward still reads."""
    cuda = SimulatedCuda(seed)
    pool, copies = opened(backend, cuda)
    copies.launch_store([7], [0], after=PASSED)
    assert copies.next().outcome is Outcome.LANDED
    cuda.finish()
    seen: list[torch.Tensor] = []
    for _ in range(3):
        cuda.compute_on(cuda.compute, lambda: seen.append(pool[5].clone()))
    copies.launch_load([0], [5])
    assert copies.next().outcome is Outcome.LANDED
    cuda.finish()
    right = all(bool((block == 5).all()) for block in seen) and bool((pool[5, ::2] == 7).all())
    return ended(copies, cuda, right)


def load_after_the_writer(backend: type[CudaBackend], seed: int) -> bool:
    """A load into a block that the forward before still zeroes."""
    cuda = SimulatedCuda(seed)
    pool, copies = opened(backend, cuda)
    copies.launch_store([7], [0], after=PASSED)
    assert copies.next().outcome is Outcome.LANDED
    cuda.finish()
    for _ in range(3):
        cuda.compute_on(cuda.compute, written(pool, 5, 0))
    copies.launch_load([0], [5])
    assert copies.next().outcome is Outcome.LANDED
    cuda.finish()
    return ended(copies, cuda, bool((pool[5, ::2] == 7).all()))


def told_when_it_is_there(backend: type[CudaBackend], seed: int) -> bool:
    """Who hears that a load landed finds its bytes."""
    cuda = SimulatedCuda(seed)
    pool, copies = opened(backend, cuda)
    copies.launch_store([6, 7], [0, 3])
    assert copies.next().outcome is Outcome.LANDED
    cuda.finish()
    copies.launch_load([0, 3], [2, 1])
    assert copies.next().outcome is Outcome.LANDED
    right = bool((pool[2, ::2] == 6).all() and (pool[1, ::2] == 7).all())
    return ended(copies, cuda, right)


def fence_kept_while_another_is_recorded(backend: type[CudaBackend], seed: int) -> bool:
    """A fence goes on meaning what it meant, whatever is recorded after it, on whatever stream."""
    cuda = SimulatedCuda(seed)
    pool, copies = opened(backend, cuda)
    for value in (98, 99):
        cuda.compute_on(cuda.compute, written(pool, 5, value))
    after = copies.transport.record_fence()
    cuda.current = Stream("another request's")
    cuda.streams.append(cuda.current)
    other = copies.transport.record_fence()
    copies.launch_store([5], [0], after=after)
    assert copies.next().outcome is Outcome.LANDED
    del other
    return ended(copies, cuda, hosted(copies)[0] == 99)


def ended(copies: Copies, cuda: SimulatedCuda, is_right: bool) -> bool:
    cuda.finish()
    assert copies.transport.close(20)
    return is_right


@pytest.mark.parametrize(
    ("rule", "mutant"),
    [
        (store_after_its_compute, Unfenced),
        (store_without_a_fence, Unfenced),
        (load_after_the_reader, Unfenced),
        (load_after_the_writer, Unfenced),
        (store_after_its_compute, Unordered),
        (told_when_it_is_there, Unproven),
        (fence_kept_while_another_is_recorded, OneEvent),
    ],
    ids=lambda given: given.__name__,
)
def test_with_the_rule_never_and_without_it_sometimes(rule: Round, mutant: type[CudaBackend]) -> None:
    """In 30 rounds the bytes are always right; in 30 rounds of the mutant, at least once they are not."""
    assert all(rule(CudaBackend, seed) for seed in range(NUM_ROUNDS))
    assert not all(rule(mutant, seed) for seed in range(NUM_ROUNDS))


def test_each_direction_reads_its_source_as_its_rule_says(open_copies: Callable[..., Copies]) -> None:
    """Stores in stream order, loads as early as the device likes; each stream waits, copies, records."""
    cuda = SimulatedCuda()
    _, copies = opened(CudaBackend, cuda)
    after = copies.transport.record_fence()
    copies.launch_store([2, 3, 5], [0, 1, 2], after=after)
    copies.next()
    copies.load([1, 2], [6, 7])
    assert copies.transport.close(20)
    load, store, size = "copy1", "copy2", 16
    assert [entry[:3] for entry in cuda.log if entry[0] != "learns"] == [
        ("compute", "records", 1),
        (store, "waits for", "compute"),
        (store, "copies", SourceOrder.STREAM),
        (store, "records", 2),
        ("compute", "records", 3),
        (load, "waits for", "compute"),
        (load, "copies", SourceOrder.ANY),
        (load, "records", 4),
    ]
    assert [entry[4] for entry in cuda.log if entry[1] == "copies"] == [3 * 2 * size, 2 * 2 * size]


def test_a_named_compute_stream_is_the_one_that_is_fenced() -> None:
    """An engine whose forward runs on a stream of its own says which."""
    cuda = SimulatedCuda()
    forward = Stream("forward")
    cuda.streams.append(forward)
    pool = torch.zeros(4, 2)
    copies = Copies(pool, 3, partial(CudaBackend, compute_stream=forward, options=on(cuda)))  # type: ignore[arg-type]
    copies.load([0], [2])
    assert copies.transport.close(20)
    assert ("copy2", "waits for", "forward") in cuda.log


def test_foreign_fences_are_waited_for_on_the_host() -> None:
    """A fence that is no event of a device cannot be waited for by a stream."""
    waited: list[str] = []

    class HostFence:
        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            waited.append("host")

    _, copies = opened(CudaBackend, SimulatedCuda())
    copies.launch_store([1], [0], after=HostFence())
    assert copies.next().outcome is Outcome.LANDED
    assert copies.transport.close(20)
    assert waited == ["host"]


def test_a_store_that_is_held_holds_no_load() -> None:
    """Directions have a stream and a thread each: a store after a long forward holds nothing else up."""
    cuda = SimulatedCuda()
    _, copies = opened(CudaBackend, cuda)
    copies.store([1], [0])
    cuda.current = Stream("forward")
    cuda.streams.append(cuda.current)
    release = cuda.hold(cuda.current)
    held = copies.launch_store([2], [1], after=copies.transport.record_fence())
    cuda.current = cuda.compute
    loaded = copies.launch_load([0], [3])
    ended_first = copies.next().job_id
    release()
    assert [ended_first, copies.next().job_id] == [loaded, held]
    assert copies.transport.close(20)


def test_the_table_of_rules_names_tests_that_there_are() -> None:
    """What stands above names tests that there are, in the file of that name or else in this one."""
    root = Path(__file__).parents[2]
    rows = [" ".join(row.split()) for row in re.findall(r"^- ((?:.+\n)(?:  .+\n)*)", __doc__, re.MULTILINE)]
    assert len(rows) > 10
    for row in rows:
        for part in row.partition(": ")[2].partition(" (")[0].split(";"):
            (file, *_), tests = [*re.findall(r"tests/\S+\.py", part), __file__], re.findall(r"(?<!\S)[a-z_]{8,}", part)
            text = (root / file).read_text()
            assert tests and [test for test in tests if f"def {test}(" not in text] == []
        mutants = Path(__file__).with_name("cuda_mutants.py").read_text()
        assert all(f"class {mutant}(" in mutants for mutant in re.findall(r"[A-Z]\w+", row.partition(" (")[2]))
