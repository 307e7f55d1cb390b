"""Regions from vLLM's `KVCacheTensor`s."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_doubles import PAGE_BYTES, kv_tensor

from aoffload._vllm.blocks import Placement, block_bytes_of, placements_of, regions_at
from aoffload.transport import RegionError

NUM_BLOCKS = 5
PLANE = NUM_BLOCKS * PAGE_BYTES


def tensor(**fields: Any) -> Any:
    _, placed = kv_tensor(NUM_BLOCKS)
    return SimpleNamespace(**{**vars(placed), **fields})


def test_each_layer_is_a_region() -> None:
    """Where layers come first, and a block is a page of each."""
    found = placements_of([tensor()], NUM_BLOCKS)
    assert found == (Placement(0, PAGE_BYTES), Placement(PLANE, PAGE_BYTES))
    assert block_bytes_of(found) == 2 * PAGE_BYTES


def test_groups_that_lie_over_one_another_are_copied_once() -> None:
    """A second group with fewer layers uses the same memory."""
    both = [tensor(), tensor(layers=["window.0"])]
    assert placements_of(both, NUM_BLOCKS) == placements_of(both[:1], NUM_BLOCKS)


def test_pages_that_lie_together_are_one_region() -> None:
    """Where blocks come first: a block is one stretch, whatever lies in it."""
    packed = [tensor(layer_stride=PAGE_BYTES, block_stride=3 * PAGE_BYTES, offset=at * PAGE_BYTES) for at in (0, 2)]
    assert placements_of(packed, NUM_BLOCKS) == (Placement(0, 3 * PAGE_BYTES),)


def test_heads_before_blocks_are_regions_of_their_own() -> None:
    """A layer of two planes, each of which has a part of every block."""
    planes = placements_of([tensor(layers=["layer.0"], layer_stride=2 * PLANE)], NUM_BLOCKS)
    assert [place.offset for place in planes] == [0, PLANE]


def test_a_gap_is_refused() -> None:
    """What lies there is not known."""
    with pytest.raises(RegionError, match="leave gaps of 3 bytes"):
        placements_of([tensor(layer_stride=PLANE + 3)], NUM_BLOCKS)


def test_host_memory_is_refused() -> None:
    """A part of the cache that lies in host memory has another pool."""
    with pytest.raises(RegionError, match="host memory"):
        placements_of([tensor(), tensor(host_resident=True)], NUM_BLOCKS)


def test_a_region_is_the_memory_of_the_blocks() -> None:
    """Block `b` of each layer, whatever view of it vLLM registers."""
    memory, placed = kv_tensor(NUM_BLOCKS)
    caches = {name: memory.view(2, NUM_BLOCKS, PAGE_BYTES)[at] for at, name in enumerate(placed.layers)}
    regions = regions_at(placements_of([placed], NUM_BLOCKS), caches, NUM_BLOCKS)
    memory[PLANE + 3 * PAGE_BYTES] = 7
    assert [int(region.tensor[3, 0]) for region in regions] == [0, 7]
    assert [region.num_blocks for region in regions] == [NUM_BLOCKS, NUM_BLOCKS]


def test_other_memory_is_refused() -> None:
    """Two allocations, or one that is too small, are not what vLLM has described."""
    memory, placed = kv_tensor(NUM_BLOCKS)
    places = placements_of([placed], NUM_BLOCKS)
    with pytest.raises(RegionError, match="2 allocations"):
        regions_at(places, {"layer.0": memory, "layer.1": memory.clone()}, NUM_BLOCKS)
    with pytest.raises(RegionError, match="have 8 bytes"):
        regions_at(places, {"layer.0": torch.zeros(8)[:2].to(torch.uint8).repeat(4)}, NUM_BLOCKS)
