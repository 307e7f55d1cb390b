"""How blocks are moved between scattered rows and host memory: which way, in how many calls, and exactly."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from aoffload._transfer.backends import rows
from aoffload._transfer.backends.rows import (
    FlatRows,
    LockWaits,
    PatientRows,
    RowMover,
    Rows,
    Stripes,
    common_unit,
    pieces_of,
    progressions,
    row_mover,
)
from aoffload._transfer.region import KVRegion, regions_of
from aoffload._transfer.turns import SWITCH_S

LAYER_BYTES = 4096


class ScriptedWaits(LockWaits):
    """Calls wait as long as a test says, one after the other; `num_calls` of them were timed."""

    def __init__(self, before_s: float, *timed_s: float) -> None:
        super().__init__(before_s)
        self._timed_s = list(timed_s)
        self.num_calls = 0

    @contextmanager
    def timing(self, num_calls: int) -> Iterator[None]:
        yield
        self.num_calls += num_calls
        self.last_s = self._timed_s.pop(0) if self._timed_s else self.last_s


def regions_at(memory: torch.Tensor, starts: list[int], num_blocks: int, stride: int, size: int) -> list[KVRegion]:
    extent = (num_blocks - 1) * stride + size
    return [KVRegion(memory[start : start + extent], stride, size) for start in starts]


def on_their_own(rng: random.Random) -> tuple[torch.Tensor, list[KVRegion]]:
    """Layers as an allocator leaves them: at multiples of its alignment, or of less, in any order, of two sizes."""
    num_blocks, unit = rng.randint(2, 9), rng.choice((1, 8, 64, 128))
    memory = torch.from_numpy(np.frombuffer(rng.randbytes(60_000), np.uint8).copy())
    end = -memory.data_ptr() % 64 + unit * rng.randint(0, 3)
    regions: list[KVRegion] = []
    for _ in range(rng.randint(1, 6)):
        size = unit * rng.randint(1, 3)
        stride = size + unit * rng.choice((0, 0, 1))
        regions += regions_at(memory, [end], num_blocks, stride, size)
        end += num_blocks * stride + unit * rng.choice((0, 1, 5))
    rng.shuffle(regions)
    return memory, regions


def movers(regions: list[KVRegion]) -> Iterator[RowMover]:
    """Every way there is to move these regions, whichever would be chosen."""
    pieces = pieces_of(tuple(regions))
    yield row_mover(tuple(regions))
    yield Stripes.of(pieces)
    yield FlatRows.of(pieces)
    for wait_s in (0.0, 1.0):
        yield PatientRows(FlatRows.of(pieces), Stripes.of(pieces), ScriptedWaits(wait_s, 0.0, 0.0, 1.0))


@settings(max_examples=80)
@given(seed=st.integers(0, 2**32))
def test_every_way_moves_the_same_bytes(seed: int) -> None:
    """Gathered is what the addresses say; scattered goes there, and no byte beside it changes."""
    rng = random.Random(seed)
    memory, regions = on_their_own(rng)
    num_blocks, base = regions[0].num_blocks, memory.data_ptr()
    ids = rng.sample(range(num_blocks), rng.randint(1, num_blocks))
    block_bytes = sum(region.block_bytes for region in regions)
    starts = [(region.address - base, region) for region in regions]
    where = np.array(
        [
            [start + b * region.block_stride_bytes + at for start, region in starts for at in range(region.block_bytes)]
            for b in ids
        ]
    )
    for mover in movers(regions):
        host = np.zeros((len(ids), block_bytes), np.uint8)
        cut = rng.randint(0, len(ids))
        mover.gather(np.array(ids, np.int64), [host[:cut], host[cut:]])
        assert (host == memory.numpy()[where]).all()
        expected, fresh = memory.numpy().copy(), np.frombuffer(rng.randbytes(host.nbytes), np.uint8).reshape(host.shape)
        expected[where] = fresh
        mover.scatter(np.array(ids, np.int64), [fresh[:cut], fresh[cut:]])
        assert (memory.numpy() == expected).all()


def test_one_dense_region_and_stacked_layers_are_flat_rows() -> None:
    """The layouts of engines take one call each way, whatever else wants the GIL."""
    dense = torch.zeros(8, 2, 3)
    layers = torch.zeros(4, 8, 2, 3)
    assert isinstance(row_mover(regions_of(dense)), FlatRows)
    assert isinstance(row_mover(regions_of(list(layers))), FlatRows)
    inside = row_mover(regions_of(list(layers.transpose(0, 1).contiguous().unbind(1))))
    assert isinstance(inside, FlatRows)
    assert inside.long.offsets.tolist() == [0]  # neighbours inside a block are joined


def test_layers_allocated_one_by_one_load_in_rows_as_long_as_a_piece() -> None:
    """What they have in common is little more than an alignment; a load takes one call and one row per piece anyway."""
    mover = row_mover(layers_at([192, 40_000 - 64, 90_048]))
    assert isinstance(mover, PatientRows)
    assert mover.rows.dense.array[:1].nbytes == 64
    assert mover.rows.long.array[:1].nbytes == LAYER_BYTES
    assert len(mover.rows.long.indices(np.arange(2, dtype=np.int64))) == 2 * 3


def test_rows_of_different_strides_are_one_pattern() -> None:
    """A tensor with gaps between its blocks is no reason for another call."""
    memory = torch.zeros(400_000, dtype=torch.uint8)
    start = -memory.data_ptr() % 64
    regions = [
        *regions_at(memory, [start], 8, 16_384, 16_384),
        *regions_at(memory, [start + 10 * 16_384], 8, 2 * 16_384, 16_384),
    ]
    mover = row_mover(tuple(regions))
    assert isinstance(mover, FlatRows)
    assert mover.dense.indices(np.array([3])).tolist() == [3, 10 + 6]


def test_what_has_nothing_in_common_is_stripes() -> None:
    """Rows of a few bytes would need more room for indices than for what they move."""
    memory = torch.zeros(100_000, dtype=torch.uint8)
    uneven = [KVRegion(memory[start : start + 4000], 1000, 900) for start in (0, 7001, 20_000)]
    assert isinstance(row_mover(regions_of(uneven)), Stripes)


@pytest.mark.parametrize("num_regions", [1, 3])
def test_evenly_spaced_regions_share_a_stripe(num_regions: int) -> None:
    """Layers allocated one by one, at equal distances, cost one call per block and not one per layer."""
    memory = torch.zeros(100_000, dtype=torch.uint8)
    regions = [KVRegion(memory[start : start + 4096], 1024, 1000) for start in range(8, 5000 * num_regions, 5000)]
    mover = row_mover(regions_of([*regions, KVRegion(memory[60_001 : 60_001 + 4096], 1024, 1000)]))
    assert isinstance(mover, Stripes)
    assert [stripe.blocks.shape[1] for stripe in mover.stripes] == ([2] if num_regions == 1 else [3, 1])


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([], []),
        ([5], [(0, 1)]),
        ([1, 2, 3], [(0, 3)]),
        ([9, 1, 2, 3], [(0, 2), (2, 4)]),
        ([6, 4, 2, 3, 9], [(0, 3), (3, 5)]),
        ([4, 2, 0], [(0, 3)]),
    ],
)
def test_progressions_take_two_blocks_at_least(ids: list[int], expected: list[tuple[int, int]]) -> None:
    """Any two blocks are at equal distances, however scattered they are; only the last may be alone."""
    assert [(part.start, part.stop) for part in progressions(np.array(ids, dtype=np.int64))] == expected


def layers_at(starts: list[int]) -> tuple[KVRegion, ...]:
    memory = torch.zeros(200_000, dtype=torch.uint8)
    first = -memory.data_ptr() % 64
    return tuple(regions_at(memory, [first + start for start in starts], 8, LAYER_BYTES, LAYER_BYTES))


def patient(scripted: ScriptedWaits) -> PatientRows:
    pieces = pieces_of(layers_at([0, 40_000, 90_048]))
    assert common_unit(pieces) == 64
    return PatientRows(FlatRows.of(pieces), Stripes.of(pieces), scripted)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many blocks each call of a stripe took: every such call releases the GIL once."""
    sizes: list[int] = []
    copyto = np.copyto

    def counted(destination: NDArray[np.uint8], source: NDArray[np.uint8]) -> None:
        sizes.append(len(source))
        copyto(destination, source)

    monkeypatch.setattr(rows.np, "copyto", counted)
    return sizes


def store(mover: RowMover, ids: list[int]) -> None:
    mover.gather(np.array(ids, np.int64), [np.zeros((len(ids), 3 * LAYER_BYTES), np.uint8)])


def test_while_others_want_the_lock_a_store_is_one_call(copied: list[int]) -> None:
    """Each call that releases the lock has to wait for it again, so there is one, however many blocks there are."""
    scripted = ScriptedWaits(1.0, 1.0)
    store(patient(scripted), [6, 1, 4, 3, 7, 2])
    assert (scripted.num_calls, copied) == (1, [])


def test_while_nobody_wants_the_lock_a_store_takes_long_pieces(copied: list[int]) -> None:
    """Two blocks a call and stripe: here three layers, no three of which are evenly spaced, so two stripes."""
    scripted = ScriptedWaits(0.0)
    store(patient(scripted), [6, 1, 4, 3, 7, 2])
    assert (scripted.num_calls, copied) == (6, [2] * 6)


def test_a_store_changes_its_way_when_the_loop_does(copied: list[int]) -> None:
    """The first wait has the rest of a job in one call; the first call without one, the next job in short ones."""
    scripted = ScriptedWaits(0.0, 0.0, 1.0, 0.0)
    mover = patient(scripted)
    store(mover, [6, 1, 4, 3, 7, 2])
    assert (scripted.num_calls, copied) == (2 * 2 + 1, [2] * 4)
    store(mover, [6, 1, 4, 3, 7, 2])
    assert copied == [2] * (4 + 6)


def test_a_wait_is_time_that_is_not_the_threads_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copying is no wait, however long it takes."""
    clocks = {"perf_counter": 5.0, "thread_time": 1.0}
    for name in clocks:
        monkeypatch.setattr(rows.time, name, lambda name=name: clocks[name])
    found = LockWaits()
    for own_s, other_s, has_waited in ((0.5, 0.0, False), (0.5, 2 * SWITCH_S, True), (0.5, 0.0, False)):
        with found.timing(1):
            clocks["thread_time"] += own_s
            clocks["perf_counter"] += own_s + other_s
        assert found.have_begun == has_waited
    for own_s, has_waited in ((1.0, False), (SWITCH_S, True)):  # small calls, few of which wait
        with found.timing(100):
            clocks["thread_time"] += own_s
            clocks["perf_counter"] += own_s + 50 * SWITCH_S
        assert found.have_begun == has_waited


def test_rows_name_no_byte_behind_the_last_block() -> None:
    """The array ends where the highest region ends, also where rows overlap."""
    pieces = pieces_of(layers_at([64, 40_000 - 64 * 13]))
    rows = Rows.of(pieces, 64, LAYER_BYTES).array
    low, high = min(piece.address for piece in pieces), max(piece.end for piece in pieces)
    assert rows.__array_interface__["data"][0] == low
    assert low + (len(rows) - 1) * rows.strides[0] + rows[:1].nbytes == high
