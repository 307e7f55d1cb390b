"""Loads of the CPU backend region after region: the same bytes, the first layer first."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from copies import GUARD_S, Copies
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layouts import Pool, filled, separate_sizes, stacked
from numpy.typing import NDArray

from aoffload._kernel.states import Direction, Outcome
from aoffload._transfer.backends.cpu import CpuBackend
from aoffload._transfer.backends.rows import LockWaits, RegionColumns
from aoffload._transfer.fences import LoadedRegion, RegionFences
from aoffload._transfer.region import KVRegion
from aoffload.errors import RegionNotLoaded

layouts = st.sampled_from((separate_sizes, stacked))


class SteppedBackend(CpuBackend):
    """Waits before each region until the test lets it go on."""

    fails_at: int | None = None

    def open(self, num_host_blocks: int) -> None:
        super().open(num_host_blocks)
        self.may_copy = threading.Semaphore(0)
        self.num_batches = 0

    def copy_region(self, index: int, on_device: NDArray[np.int64], on_host: NDArray[np.int64]) -> None:
        assert self.may_copy.acquire(timeout=GUARD_S)
        if index == self.fails_at:
            raise OSError("the cable fell out")
        super().copy_region(index, on_device, on_host)

    def copy_batch(self, direction: Direction, on_device: NDArray[np.int64], on_host: NDArray[np.int64]) -> None:
        self.num_batches += 1
        super().copy_batch(direction, on_device, on_host)


class BreakingBackend(SteppedBackend):
    fails_at = 1


def stepped(copies: Copies) -> SteppedBackend:
    assert isinstance(copies.transport.backend, SteppedBackend)
    return copies.transport.backend


class Job:
    """A load of what some blocks of a random pool were, into others."""

    def __init__(self, rng: random.Random, pool: Pool, backend: type[CpuBackend] = CpuBackend) -> None:
        self.pool, num_blocks = pool, pool.regions[0].num_blocks
        self.copies = Copies(pool.regions, num_blocks + 3, backend, verify=True)
        count = rng.randint(1, num_blocks - 1)
        sources = rng.sample(range(1, num_blocks), count)
        self.targets = rng.sample(range(1, num_blocks), count)
        self.hosts = rng.sample(range(num_blocks + 3), count)
        self.expected = [pool.parts(block_id) for block_id in sources]
        assert self.copies.store(sources, self.hosts).outcome is Outcome.LANDED
        pool.memory.copy_(filled(pool.memory.numel(), torch.uint8, rng) & 1)
        self.before = [pool.parts(block_id) for block_id in range(num_blocks)]
        self.outside = pool.memory.clone()

    def launch(self) -> RegionFences:
        return self.copies.launch_watched(self.hosts, self.targets)

    def has_loaded(self, num_regions: int) -> bool:
        """Whether these regions of every block are what was stored, and everything else is as it was."""
        backend = self.copies.transport.backend
        found = [self.pool.parts(block_id) for block_id in range(len(self.before))]
        wanted = [*self.before]
        for block_id, stored in zip(self.targets, self.expected, strict=True):
            wanted[block_id] = stored[:num_regions] + self.before[block_id][num_regions:]
        memory = self.pool.memory.clone()
        for block_id in self.targets:
            backend.write_device_block(block_id, np.frombuffer(b"".join(self.before[block_id]), dtype=np.uint8))
        nothing_else = torch.equal(self.pool.memory, self.outside)
        self.pool.memory.copy_(memory)
        return found == wanted and nothing_else


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), layout=layouts)
def test_any_layout_is_loaded_region_after_region(seed: int, layout: Callable[[random.Random], Pool]) -> None:
    """Neighbours inside a block or tensors of their own: every byte as in a load of whole blocks, and no other."""
    loads_by_region(seed, layout)


def loads_by_region(seed: int, layout: Callable[[random.Random], Pool]) -> None:
    rng = random.Random(seed)
    job = Job(rng, layout(rng))
    fences = job.launch()
    assert job.copies.next().outcome is Outcome.LANDED
    assert all(fence.query() for fence in fences.fences)
    assert job.has_loaded(len(fences))
    assert job.copies.transport.close(GUARD_S)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), layout=layouts)
def test_any_layout_is_loaded_region_after_region_beside_a_busy_loop(
    seed: int, layout: Callable[[random.Random], Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is moved in other ways there is moved as exactly, in parts that end inside of it."""
    monkeypatch.setattr(LockWaits, "have_begun", True)
    monkeypatch.setattr("aoffload._transfer.backends.rows.PART_BYTES", 40)
    loads_by_region(seed, layout)


@pytest.mark.parametrize("layout", [separate_sizes, stacked])
@pytest.mark.parametrize("seed", range(5))
def test_a_region_is_there_before_the_next_one_is_copied(seed: int, layout: Callable[[random.Random], Pool]) -> None:
    """Behind a fence are its bytes; of later regions nothing has come, and their fences have not passed."""
    rng = random.Random(seed)
    job = Job(rng, layout(rng), SteppedBackend)
    fences = job.launch()
    for index, fence in enumerate(fences.fences):
        assert not fence.is_given
        stepped(job.copies).may_copy.release()
        fence.synchronize()
        if index + 1 == len(fences):  # then all is verified: what is looked at is written to as well
            assert job.copies.next().outcome is Outcome.LANDED
        assert job.has_loaded(index + 1)
    assert job.copies.transport.close(GUARD_S)


def layered_pool() -> tuple[torch.Tensor, list[torch.Tensor]]:
    """`[blocks, layers, …]` and its layers, neighbours inside a block, full of `10 * block + layer`."""
    pool = (torch.arange(12, dtype=torch.int32)[:, None] * 10 + torch.arange(3, dtype=torch.int32))[:, :, None]
    pool = pool.repeat(1, 1, 4)
    return pool, list(pool.unbind(1))


def test_a_region_that_fails_ends_the_fences_behind_it(open_copies: Callable[..., Copies]) -> None:
    """What came before is there. Of the rest nobody waits for ever, and no block counts as loaded."""
    pool, layers = layered_pool()
    copies = open_copies(layers, 6, BreakingBackend)
    copies.store([1, 2], [4, 0])
    fences = copies.launch_watched([4, 0], [5, 6])
    for _ in layers:
        stepped(copies).may_copy.release()
    fences[0].synchronize()
    assert pool[5:7, 0, 0].tolist() == [10, 20]
    for fence in fences.fences[1:]:
        assert fence._is_given.wait(GUARD_S)
        with pytest.raises(RegionNotLoaded, match="the cable fell out"):
            LoadedRegion((fence,)).wait()
    completion = copies.next()
    assert (completion.outcome, completion.num_landed) == (Outcome.FAILED, 0)
    assert "the cable fell out" in completion.error


def test_a_load_that_nobody_watches_is_copied_as_ever(open_copies: Callable[..., Copies]) -> None:
    """By the calls that move whole blocks; so is one that was forgotten, and a store."""
    pool, layers = layered_pool()
    copies = open_copies(layers, 6, SteppedBackend)
    copies.store([1, 2], [4, 0])
    copies.load([4, 0], [5, 6])
    forgotten = RegionFences(3)
    copies.transport.watch(3, forgotten)
    for _ in range(2):
        copies.transport.forget(3)
    copies.load([4, 0], [7, 8])
    assert torch.equal(pool[[5, 6, 7, 8]], pool[[1, 2, 1, 2]])
    assert stepped(copies).num_batches == 3
    assert not any(fence.is_given for fence in forgotten.fences)


def test_many_short_stretches_take_two_calls_beside_a_busy_loop(
    open_copies: Callable[..., Copies], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call would have to get the GIL back; while nobody wants it, every byte is copied once."""
    _, layers = layered_pool()
    copies = open_copies(layers, 12)
    taken: list[str] = []
    for name in ("scatter", "scatter_twice"):
        monkeypatch.setattr(RegionColumns, name, noted(name, taken))
    for is_busy, hosts in ((False, [1, 3, 5]), (True, [1, 3, 5]), (True, [1, 2, 3])):
        monkeypatch.setattr(LockWaits, "have_begun", is_busy)
        copies.launch_watched(hosts, [5, 9, 2])
        assert copies.next().outcome is Outcome.LANDED
    assert taken == ["scatter"] * 3 + ["scatter_twice"] * 3 + ["scatter"] * 3


def noted(name: str, taken: list[str]) -> Callable[..., None]:
    move = getattr(RegionColumns, name)

    def noting(columns: RegionColumns, on_device: NDArray[np.int64], on_host: NDArray[np.int64]) -> None:
        taken.append(name)
        move(columns, on_device, on_host)

    return noting


def test_elements_are_aligned_on_both_sides() -> None:
    """Regions of odd sizes shift those after them in host memory: numpy must not copy those by a detour."""
    memory = torch.zeros(400, dtype=torch.uint8)
    regions = (KVRegion(memory[:60], 6, 6), KVRegion(memory[64:224], 16, 16), KVRegion(memory[224:], 16, 2))
    backend = CpuBackend(regions)
    backend.open(4)
    assert [columns.blocks.itemsize for columns in backend._columns] == [2, 2, 2]
    assert all(each.blocks.flags.aligned and each.columns.flags.aligned for each in backend._columns)
