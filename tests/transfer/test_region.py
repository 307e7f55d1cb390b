"""Regions: the block ids that they accept."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from aoffload._transfer.region import KVRegion, byte_rows, regions_of
from aoffload.errors import RegionError


def test_a_block_is_a_row_of_the_tensor() -> None:
    """`KVRegion.of` addresses `tensor[b]` as block `b`, whatever the dtype means."""
    tensor = torch.arange(24, dtype=torch.bfloat16).reshape(4, 3, 2)
    region = KVRegion.of(tensor)
    assert (region.num_blocks, region.block_bytes, region.block_stride_bytes) == (4, 12, 12)
    assert torch.equal(byte_rows(region)[2].view(torch.bfloat16), tensor[2].reshape(-1))


def test_keys_and_values_inside_a_block_are_two_regions() -> None:
    """Only a block has to be contiguous: slices of every row work, also those that start inside the storage."""
    tensor = torch.arange(5 * 2 * 6, dtype=torch.int16).reshape(5, 2, 6)
    keys, values = regions_of([tensor[:, 0], tensor[:, 1]])
    assert (keys.num_blocks, values.num_blocks) == (5, 5)
    assert keys.block_stride_bytes == values.block_stride_bytes == 24
    assert torch.equal(byte_rows(values)[3].view(torch.int16), tensor[3, 1])


def test_an_explicit_stride_divides_the_extent_into_blocks() -> None:
    """The number of blocks follows from the tensor's own extent, not from the storage that it is a part of."""
    storage = torch.arange(100, dtype=torch.uint8)
    region = KVRegion(storage[10:50], block_stride_bytes=10, block_bytes=7)
    assert region.num_blocks == 4
    assert byte_rows(region)[3].tolist() == list(range(40, 47))


def test_the_last_block_may_end_with_the_tensor() -> None:
    """Padding after the last block is nobody's and need not exist."""
    assert KVRegion(torch.zeros(27, dtype=torch.uint8), block_stride_bytes=10, block_bytes=7).num_blocks == 3
    assert KVRegion(torch.zeros(26, dtype=torch.uint8), block_stride_bytes=10, block_bytes=7).num_blocks == 2


def test_parameters_lose_their_graph_and_keep_their_memory() -> None:
    """A tensor that requires grad is moved like any other and learns nothing of it."""
    tensor = torch.nn.Parameter(torch.ones(3, 2))
    byte_rows(regions_of(tensor)[0]).zero_()
    assert tensor.requires_grad
    assert not tensor.any()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (list, "kv_caches: is empty"),
        (dict, "kv_caches: is empty"),
        (lambda: 7, "kv_caches: must be tensors"),
        (lambda: "kv", "kv_caches: must be tensors"),
        (lambda: [torch.zeros(4, 2), None], r"kv_caches\[1\]: must be a torch tensor"),
        (lambda: [torch.zeros(4, 2), torch.zeros(5, 2)], r"kv_caches\[1\]: has 5 blocks, but kv_caches\[0\] has 4"),
        (lambda: {"a": torch.zeros(4, 2), "b": torch.zeros(3, 2)}, r"kv_caches\['b'\]: has 3 blocks"),
        (lambda: [torch.zeros(4, 3, 4)[:, :, ::2]], r"kv_caches\[0\]: a block is not contiguous"),
        (lambda: torch.zeros(4, 3, 2).transpose(0, 1), "kv_caches: a block is not contiguous"),
        (lambda: torch.zeros(0, 2), "kv_caches: has no blocks"),
        (lambda: torch.zeros(3, 0), "kv_caches: has no blocks"),
        (lambda: torch.tensor(1.0), "kv_caches: has no blocks"),
        (lambda: torch.zeros(1, 4).expand(5, 4), "block_stride_bytes: must be a positive"),
        (lambda: torch.zeros(3, 2, device="meta"), "kv_caches: is on meta"),
        (lambda: torch.zeros(3, 2).to_sparse(), "kv_caches: has the layout"),
        (lambda: torch.zeros(10).as_strided((4, 3), (2, 1)), "blocks of 12 bytes overlap at a stride of 8"),
    ],
)
def test_what_no_block_id_addresses_is_refused_by_name(make: Callable[[], object], message: str) -> None:
    """Every bad tensor raises a `RegionError` that says which one it is."""
    with pytest.raises(RegionError, match=message):
        regions_of(make())


@pytest.mark.parametrize(("shift", "size"), [(0, 16), (1, 16), (-2, 8)])
def test_no_byte_belongs_to_two_blocks(shift: int, size: int) -> None:
    """The same tensor twice, or shifted by some blocks: a load into one block would write into another."""
    tensor = torch.zeros(8, 4)
    regions = [KVRegion(tensor[first : first + 4], 16, size) for first in (2, 2 + shift)]
    with pytest.raises(RegionError, match=r"kv_caches\[1\]: shares memory with kv_caches\[0\]"):
        regions_of(regions)


def test_the_end_of_a_block_may_not_reach_into_the_next() -> None:
    """Between two blocks of a region there is room for so many bytes and not one more."""
    tensor = torch.zeros(8, 4)
    one = KVRegion(tensor[:3, :2], 16, 8)
    assert len(regions_of([one, KVRegion(tensor[:3, 2:], 16, 8)])) == 2
    with pytest.raises(RegionError, match="shares memory"):
        regions_of([one, KVRegion(tensor.reshape(-1)[2:13], 16, 12)])


def test_neighbours_in_one_tensor_share_nothing() -> None:
    """Regions that follow each other, or lie between each other's blocks, are fine."""
    tensor = torch.zeros(8, 4)
    halves = [KVRegion(tensor[first : first + 4], 16, 16) for first in (0, 4)]
    assert len(regions_of(halves)) == 2


@pytest.mark.parametrize(("offset", "is_shared"), [(0, True), (7, True), (8, False), (56, False), (57, True)])
def test_overlap_is_found_at_different_strides(offset: int, is_shared: bool) -> None:
    """Two strides over one tensor are compared block by block, to the byte."""
    tensor = torch.zeros(512, dtype=torch.uint8)
    one = KVRegion(tensor[: 3 * 64 + 8], 64, 8)
    other = KVRegion(tensor[offset : offset + 3 * 128 + 8], 128, 8)
    assert (one.num_blocks, other.num_blocks) == (4, 4)
    if is_shared:
        with pytest.raises(RegionError, match="shares memory"):
            regions_of([one, other])
    else:
        assert len(regions_of([one, other])) == 2


@pytest.mark.parametrize(
    ("stride", "size", "message"),
    [
        (8, 0, "block_bytes"),
        (-8, 4, "block_stride_bytes"),
        (8, 1.5, "block_bytes"),
        (4, 8, "overlap"),
        (64, 60, "reach"),
    ],
)
def test_impossible_sizes_are_refused(stride: int, size: int, message: str) -> None:
    """A region says which of its own arguments cannot be."""
    with pytest.raises(RegionError, match=message):
        KVRegion(torch.zeros(40, dtype=torch.uint8), stride, size)
