"""Bytes through the CPU backend: every layout, exactly, and nothing beside it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from copies import Copies
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layouts import Pool, filled, separate_sizes, stacked
from numpy.typing import NDArray

from aoffload._kernel.states import Direction, Outcome
from aoffload._transfer.backends.cpu import CpuBackend
from aoffload._transfer.backends.rows import LockWaits, Stripes, stretches
from aoffload._transfer.region import regions_of
from aoffload.errors import ConfigError


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), layout=st.sampled_from((separate_sizes, stacked)))
def test_any_layout_comes_back_byte_for_byte(seed: int, layout: Callable[[random.Random], Pool]) -> None:
    """Store some blocks, overwrite everything, load them elsewhere: they are there, and nothing else changed."""
    stores_and_loads(random.Random(seed), layout)


def stores_and_loads(rng: random.Random, layout: Callable[[random.Random], Pool]) -> None:
    pool = layout(rng)
    num_blocks = pool.regions[0].num_blocks
    copies = Copies(pool.regions, num_blocks + 3, verify=True)
    count = rng.randint(1, num_blocks - 1)
    sources = rng.sample(range(1, num_blocks), count)
    targets = rng.sample(range(1, num_blocks), count)
    hosts = rng.sample(range(num_blocks + 3), count)
    expected = [pool.block(block_id) for block_id in sources]
    assert copies.store(sources, hosts).outcome is Outcome.LANDED
    pool.memory.copy_(filled(pool.memory.numel(), torch.uint8, rng) & 1)
    before = [pool.block(block_id) for block_id in range(num_blocks)]
    outside = pool.memory.clone()
    assert copies.load(hosts, targets).outcome is Outcome.LANDED
    for block_id in range(num_blocks):
        wanted = expected[targets.index(block_id)] if block_id in targets else before[block_id]
        assert pool.block(block_id) == wanted
    # What belongs to no block at all: put the old blocks back, and the memory is as it was.
    for block_id in targets:
        copies.transport.backend.write_device_block(block_id, np.frombuffer(before[block_id], dtype=np.uint8))
    assert torch.equal(pool.memory, outside)
    assert copies.transport.close(20)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([], []),
        ([5], [(0, 1)]),
        ([1, 2, 3], [(0, 3)]),
        ([1, 3, 4, 2], [(0, 1), (1, 3), (3, 4)]),
        ([3, 2], [(0, 1), (1, 2)]),
    ],
)
def test_stretches_are_maximal(ids: list[int], expected: list[tuple[int, int]]) -> None:
    """Neighbours are moved together, in ascending order only."""
    assert [(part.start, part.stop) for part in stretches(np.array(ids, dtype=np.int64))] == expected


def test_a_large_plan_is_cut_into_batches(open_copies: Callable[..., Copies], monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch ends inside a plan without losing or doubling a block."""
    monkeypatch.setattr("aoffload._transfer.backends.cpu.BATCH_BYTES", 100)
    pool = torch.arange(40 * 8, dtype=torch.int32).reshape(40, 8)
    wanted = pool.clone()
    copies = open_copies(pool, 40, verify=True)
    device, host = random.Random(1).sample(range(1, 40), 39), list(range(39))
    assert copies.store(device, host).num_bytes == 39 * 32
    pool[1:] = 0
    assert copies.load(host, device).num_landed == 39
    assert torch.equal(pool, wanted)


def test_a_plan_without_blocks_lands(open_copies: Callable[..., Copies]) -> None:
    """Nothing to copy is no special case."""
    copies = open_copies(torch.zeros(3, 2), 0, verify=True)
    assert copies.store([], []).outcome is Outcome.LANDED


def test_host_memory_that_cannot_be_had_is_a_config_error() -> None:
    """The message names the argument and the size."""
    backend = CpuBackend(regions_of(torch.zeros(3, 1024)))
    for absurd in (2**45, 2**60, -1):
        with pytest.raises(ConfigError, match="num_host_blocks"):
            backend.open(absurd)


def test_copying_leaves_torch_threads_alone(open_copies: Callable[..., Copies]) -> None:
    """The engine's own number of threads is not ours to change."""
    before = torch.get_num_threads()
    pool: Any = torch.zeros(5, 64)
    copies = open_copies(pool, 4)
    copies.store([1, 2], [0, 1])
    assert torch.get_num_threads() == before


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call has to wait for the GIL, as beside a loop that is never idle."""
    monkeypatch.setattr(LockWaits, "have_begun", True)


@pytest.mark.usefixtures("waiting")
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), layout=st.sampled_from((separate_sizes, stacked)))
def test_any_layout_comes_back_beside_a_busy_loop(seed: int, layout: Callable[[random.Random], Pool]) -> None:
    """What is moved in other ways there is moved as exactly."""
    stores_and_loads(random.Random(seed), layout)


@pytest.mark.usefixtures("waiting")
def test_short_stretches_go_through_a_buffer_beside_a_busy_loop(
    open_copies: Callable[..., Copies], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However scattered a job is on both sides: a few calls, each for as many blocks as fit into the buffer."""
    monkeypatch.setattr("aoffload._transfer.backends.cpu.STAGE_BYTES", 7 * 32)
    pool = torch.arange(40 * 8, dtype=torch.int32).reshape(40, 8)
    wanted = pool.clone()
    copies = open_copies(pool, 80, verify=True)
    moved: list[int] = []
    mover = copies.transport.backend._mover  # type: ignore[attr-defined]
    for name in ("gather", "scatter"):
        monkeypatch.setattr(type(mover), name, counted(getattr(type(mover), name), moved))
    device, host = random.Random(1).sample(range(1, 40), 20), list(range(40, 0, -2))
    assert copies.store(device, host).outcome is Outcome.LANDED
    pool[1:] = 0
    assert copies.load(host, device).outcome is Outcome.LANDED
    assert torch.equal(pool[device], wanted[device])
    assert int(pool.sum()) == int(wanted[[0, *device]].sum())
    assert moved == [7, 7, 6] * 2


def test_short_stretches_take_a_call_each_while_nobody_waits(
    open_copies: Callable[..., Copies], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every byte is copied once."""
    monkeypatch.setattr(LockWaits, "have_begun", False)
    copies = open_copies(torch.zeros(40, 8), 80)
    moved: list[int] = []
    mover = copies.transport.backend._mover  # type: ignore[attr-defined]
    monkeypatch.setattr(type(mover), "gather", counted(type(mover).gather, moved))
    copies.store([5, 3, 9], [1, 2, 40])
    assert moved == [2, 1]


def counted(move: Callable[..., None], moved: list[int]) -> Callable[..., None]:
    """`move`, which notes how many blocks each call takes."""

    def noting(mover: object, block_ids: NDArray[np.int64], extents: list[NDArray[np.uint8]]) -> None:
        moved.extend(map(len, extents))
        move(mover, block_ids, extents)

    return noting


def test_host_memory_lies_outside_of_the_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A place between two tensors is not taken while there is another: numpy would copy everything twice."""
    memory = torch.zeros(3, 4096, dtype=torch.uint8)
    backend = CpuBackend(regions_of([memory[0].reshape(4, 1024), memory[2].reshape(4, 1024)]))
    between, outside = memory[1].numpy().reshape(2, 2048), np.zeros((2, 2048), np.uint8)
    offered = [between, between, outside]
    monkeypatch.setattr("aoffload._transfer.backends.cpu.anonymous_memory", lambda *size: offered.pop(0))
    monkeypatch.setattr("aoffload._transfer.backends.cpu.STAGE_BYTES", 0)
    backend.open(0)
    assert np.shares_memory(backend._staging[Direction.LOAD].stage, outside)
    assert not offered


def test_host_memory_between_the_regions_is_no_part_of_what_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no other place, no array reaches over it, so numpy copies nothing twice; the bytes are right."""
    memory = torch.arange(3 * 4096, dtype=torch.int32).view(torch.uint8).reshape(3, -1)
    backend = CpuBackend(regions_of([memory[0].reshape(4, 4096), memory[2].reshape(4, 4096)]))
    between = memory[1].numpy()[:16384].reshape(2, 8192)
    monkeypatch.setattr("aoffload._transfer.backends.cpu.anonymous_memory", lambda *size: between)
    monkeypatch.setattr("aoffload._transfer.backends.cpu.STAGE_BYTES", 0)
    backend.open(0)
    assert isinstance(backend._mover, Stripes)
    assert len(backend._mover.stripes) == 2
    expected = memory.reshape(3, 4, 4096)[:, 2].clone()
    backend._mover.gather(np.array([2]), [between[:1]])
    assert between[0].tobytes() == expected[0].numpy().tobytes() + expected[2].numpy().tobytes()
