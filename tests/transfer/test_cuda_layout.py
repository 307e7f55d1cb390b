"""Descriptors: the right bytes for every layout and list of blocks, in the fewest pieces."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import Pool, separate_sizes, stacked

from aoffload._kernel.states import Direction
from aoffload._transfer.backends.cuda.driver import Pieces
from aoffload._transfer.backends.cuda.layout import Layout, Scratch
from aoffload._transfer.region import KVRegion, regions_of

HOST = 2**40
"""Where the host pool is said to begin: descriptors are only numbers."""

layouts = st.sampled_from((separate_sizes, stacked))


def ids(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(numbers, dtype=np.int64)


def bytes_of(pieces: Pieces) -> dict[int, int]:
    """From each source byte to where it goes."""
    columns = zip(pieces.sources.tolist(), pieces.destinations.tolist(), pieces.sizes.tolist(), strict=True)
    return {source + n: destination + n for source, destination, size in columns for n in range(size)}


def naively(regions: list[KVRegion], on_device: list[int], on_host: list[int]) -> dict[int, int]:
    """The same for a store, region by region and byte by byte."""
    found = {}
    block_bytes = sum(region.block_bytes for region in regions)
    for block_id, host_id in zip(on_device, on_host, strict=True):
        offset = HOST + host_id * block_bytes
        for region in regions:
            start = region.address + block_id * region.block_stride_bytes
            found.update({start + n: offset + n for n in range(region.block_bytes)})
            offset += region.block_bytes
    return found


def drawn(seed: int, layout: Callable[[random.Random], Pool]) -> tuple[list[KVRegion], list[int], list[int], int]:
    """Regions, device and host ids, neighbours among them, and a border somewhere in the host pool."""
    rng = random.Random(seed)
    regions = layout(rng).regions
    num_blocks = regions[0].num_blocks
    count = rng.randint(0, num_blocks - 1)
    start = rng.randint(1, num_blocks - count) if count else 1
    on_device = list(range(start, start + count)) if rng.random() < 0.5 else rng.sample(range(1, num_blocks), count)
    on_host = list(range(3, 3 + count)) if rng.random() < 0.5 else rng.sample(range(20), count)
    block_bytes = sum(region.block_bytes for region in regions)
    return regions, on_device, on_host, HOST + rng.randint(1, 20 * block_bytes)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), layout=layouts, direction=st.sampled_from(Direction))
def test_any_layout_any_ids_are_the_right_bytes(
    seed: int, layout: Callable[[random.Random], Pool], direction: Direction
) -> None:
    """Every byte goes where it belongs, none goes twice, and no piece crosses a border."""
    regions, on_device, on_host, border = drawn(seed, layout)
    pieces = Layout.of_block(tuple(regions), HOST, (border,)).pieces(
        direction, ids(*on_device), ids(*on_host), Scratch()
    )
    found = bytes_of(pieces)
    if direction is Direction.LOAD:
        found = {destination: source for source, destination in found.items()}
    assert found == naively(regions, on_device, on_host)
    assert pieces.num_bytes == len(found)
    host = pieces.sources if direction is Direction.LOAD else pieces.destinations
    assert not ((host < border) & (host + pieces.sizes > border)).any()
    assert (pieces.sizes > 0).all()


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), layout=layouts)
def test_the_alignment_of_a_layout_is_that_of_all_its_batches(
    seed: int, layout: Callable[[random.Random], Pool]
) -> None:
    """A power of two up to 16 that divides every address and size, whatever the blocks: the kernel is built once."""
    regions, on_device, on_host, border = drawn(seed, layout)
    found = Layout.of_block(tuple(regions), HOST, (border,))
    pieces = found.pieces(Direction.LOAD, ids(*on_device), ids(*on_host), Scratch())
    assert found.alignment in (1, 2, 4, 8, 16)
    for numbers in (pieces.sources, pieces.destinations, pieces.sizes):
        assert not (numbers % np.uint64(found.alignment)).any()


def test_a_layout_in_round_numbers_is_fully_aligned() -> None:
    """As the layouts of engines are: the kernel moves sixteen bytes at once."""
    assert Layout.of_block(regions_of(torch.zeros(40, 2, 64)), HOST, (HOST + 2**21,)).alignment == 16
    assert Layout.of_block(regions_of(torch.zeros(40, 6, dtype=torch.uint8)), HOST).alignment == 2
    assert Layout.of_block((KVRegion(torch.zeros(40, 5), 20, 16),), HOST).alignment == 4


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), layout=layouts)
def test_pieces_are_as_few_as_can_be(seed: int, layout: Callable[[random.Random], Pool]) -> None:
    """No two pieces are neighbours on both sides, unless a border or another allocation begins between them."""
    regions, on_device, on_host, border = drawn(seed, layout)
    pieces = Layout.of_block(tuple(regions), HOST, (border,)).pieces(
        Direction.STORE, ids(*on_device), ids(*on_host), Scratch()
    )
    ends = {
        (source + size, destination + size)
        for source, destination, size in zip(
            pieces.sources.tolist(), pieces.destinations.tolist(), pieces.sizes.tolist(), strict=True
        )
    }
    starts = zip(pieces.sources.tolist(), pieces.destinations.tolist(), strict=True)
    assert [start for start in starts if start in ends and start[1] != border] == []


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), layout=layouts)
def test_region_after_region_is_the_same_as_all_at_once(seed: int, layout: Callable[[random.Random], Pool]) -> None:
    """Layouts of single regions add up to that of the block."""
    regions, on_device, on_host, border = drawn(seed, layout)
    found: dict[int, int] = {}
    scratch = Scratch()
    for single in Layout.of_each_region(tuple(regions), HOST, (border,)):
        found.update(bytes_of(single.pieces(Direction.STORE, ids(*on_device), ids(*on_host), scratch)))
    assert found == naively(regions, on_device, on_host)


@pytest.mark.parametrize(
    ("kv_caches", "on_device", "on_host", "num_pieces"),
    [
        (torch.zeros(40, 2, 64), (3, 4, 5, 9), (7, 8, 9, 1), 2),
        (torch.zeros(40, 2, 64), (5, 4, 3), (9, 8, 7), 1),
        (torch.zeros(40, 2, 64), (3, 5, 7), (7, 8, 9), 3),
        (list(torch.zeros(4, 40, 2, 64)), (3, 4), (7, 8), 8),
        (list(torch.zeros(40, 4, 2, 64).unbind(1)), (3, 4), (7, 8), 1),
        (list(torch.zeros(40, 4, 2, 64).unbind(1)[:3]), (3, 4), (7, 8), 2),
    ],
    ids=["neighbours", "in any order", "gaps on one side", "layers apart", "layers in a block", "not all of a block"],
)
def test_neighbours_on_both_sides_are_one_piece(
    kv_caches: object, on_device: tuple[int, ...], on_host: tuple[int, ...], num_pieces: int
) -> None:
    """What the layouts of engines come to."""
    layout = Layout.of_block(regions_of(kv_caches), HOST)
    assert len(layout.pieces(Direction.STORE, ids(*on_device), ids(*on_host), Scratch())) == num_pieces


def test_two_allocations_that_touch_stay_two_pieces() -> None:
    """A driver copies within one allocation; that another one begins where it ends is chance."""
    layout = Layout.of_block(regions_of(torch.zeros(8, 4)), HOST)
    (part,) = layout.parts
    block_bytes = part.num_bytes
    neighbour = type(part)(part.address + block_bytes, part.stride_bytes, block_bytes, part.num_bytes, part.memory + 1)
    apart = Layout([part, neighbour], HOST, 2 * block_bytes, ())
    assert len(apart.parts) == 2
    assert len(apart.pieces(Direction.LOAD, ids(1), ids(0), Scratch())) == 2


def test_descriptor_arrays_are_used_again() -> None:
    """A batch no larger than one before allocates no arrays of its own."""
    scratch = Scratch()
    first = scratch.take((100, 3))
    assert all(np.shares_memory(*pair) for pair in zip(first, scratch.take((7, 5)), strict=True))
    assert not np.shares_memory(first[0], first[1])
    assert scratch.take((1000, 3))[0].shape == (1000, 3)
