"""KV layouts: the axis of blocks, the bytes of a block, and layouts that are refused or cause a warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import structlog
import torch

from aoffload import ChunkedLocal, KVCacheGroup, KVRegion, OffloadConfig, OffloadRuntime
from aoffload._transfer.local import LocalTransport, described
from aoffload._transfer.region import byte_rows, regions_of
from aoffload.errors import RegionError

N, B, H, D = 7, 16, 3, 4
RECIPES: dict[str, tuple[Callable[[], torch.Tensor], int, int]] = {
    "keys and values in a block": (lambda: torch.zeros(N, 2, B, H, D), 0, 1),
    "heads before tokens": (lambda: torch.zeros(N, 2, H, B, D), 0, 1),
    "a view with tokens before heads": (lambda: torch.zeros(N, 2, H, B, D).permute(0, 1, 3, 2, 4), 0, 1),
    "keys, then values": (lambda: torch.zeros(2, N, B, H, D), 1, 2),
    "a view with keys, then values": (lambda: torch.zeros(N, 2, B, H, D).permute(1, 0, 2, 3, 4), 1, 1),
    "layers, then keys, then values": (lambda: torch.zeros(3, 2, N, B, H, D), 2, 6),
    "one latent vector a token": (lambda: torch.zeros(N, B, 9), 0, 1),
    "slots of tokens, seen as blocks": (lambda: torch.zeros(N * B, H, D).view(N, B, H, D), 0, 1),
    "heads outermost": (lambda: torch.zeros(H, N, B, D), -3, 3),
}
"""Made from no element: each as (tensor, the axis that counts blocks, in how many parts a block is)."""

each_recipe = pytest.mark.parametrize("name", RECIPES)


def numbered(name: str) -> tuple[torch.Tensor, int, int]:
    make, axis, num_parts = RECIPES[name]
    tensor = make()
    tensor.copy_(torch.arange(tensor.numel(), dtype=torch.float32).reshape(tensor.shape))
    return tensor, axis, num_parts


@each_recipe
def test_a_block_is_what_its_index_selects(name: str) -> None:
    """In every layout in use, block `b` of the regions together holds exactly the elements of `select(axis, b)`, in as
    few parts as the memory allows."""
    tensor, axis, num_parts = numbered(name)
    regions = KVRegion.all_of(tensor, axis)
    assert len(regions) == num_parts
    assert {region.num_blocks for region in regions} == {N}
    for block_id in range(N):
        held = torch.cat([byte_rows(region)[block_id].view(torch.float32) for region in regions])
        assert sorted(held.tolist()) == sorted(tensor.select(axis, block_id).flatten().tolist())
    regions_of(regions)  # no byte in two of them


@each_recipe
def test_one_region_is_enough_or_says_what_is(name: str) -> None:
    """`of` takes what lies together whatever the order of axes, and else names `all_of`."""
    tensor, axis, num_parts = numbered(name)
    if num_parts == 1:
        region, (same,) = KVRegion.of(tensor, axis), KVRegion.all_of(tensor, axis)
        assert (region.address, region.block_bytes, region.block_shape) == (
            same.address,
            same.block_bytes,
            same.block_shape,
        )
    else:
        with pytest.raises(RegionError, match=r"not contiguous.*all_of"):
            KVRegion.of(tensor, axis)


@pytest.mark.parametrize("axis", [5, -6, 1.0, True, None])
def test_an_axis_that_is_none_is_refused_by_name(axis: object) -> None:
    for call in (KVRegion.of, KVRegion.all_of):
        with pytest.raises(RegionError, match=r"^block_axis: must be an axis of \[7, 2, 16, 3, 4\]"):
            call(torch.zeros(N, 2, B, H, D), axis)  # type: ignore[arg-type]


def test_a_block_in_too_many_parts_is_refused() -> None:
    """Each part is a copy of its own: thousands of them are a mistake."""
    with pytest.raises(RegionError, match="more than 1024 parts"):
        KVRegion.all_of(torch.zeros(2000, 3, 2), block_axis=1)


def test_a_first_axis_of_two_is_warned_of() -> None:
    """Keys and values first would be taken for a pool of one block and the null block, silently."""
    flash = torch.zeros(2, N, B, H, D)
    with pytest.warns(UserWarning, match=r"kv_caches\['layer 0'\].*2 blocks.*all_of\(tensor, block_axis=1\)"):
        regions_of({"layer 0": flash})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(regions_of(KVRegion.all_of(flash, block_axis=1))) == 2
        regions_of(torch.zeros(2, 2, B))


def config_of(*block_sizes: int) -> OffloadConfig:
    kinds = [ChunkedLocal(64 * (number + 1)) for number in range(len(block_sizes))]
    groups = [KVCacheGroup(f"g{i}", kind, size) for i, (kind, size) in enumerate(zip(kinds, block_sizes, strict=True))]
    return OffloadConfig(groups=groups, num_host_blocks=4)


def test_blocks_of_another_size_are_refused() -> None:
    """A configured block of 32 tokens over tensors whose blocks hold 16 would copy half of what it should."""
    with pytest.raises(RegionError, match=r"^kv_caches: .*\[2, 16, 3, 4\], where no axis counts 32 tokens.*block_size"):
        OffloadRuntime(config_of(32), torch.zeros(N, 2, B, H, D))
    OffloadRuntime(config_of(32, 16), torch.zeros(N, 2, B, H, D))  # of one of its groups
    OffloadRuntime(config_of(16), torch.zeros(N, 2, B, H, D))
    OffloadRuntime(config_of(32), torch.zeros(N, 2 * B * H * D))  # a flat block says nothing
    by_hand = KVRegion(torch.zeros(N, 2, B, H, D), block_stride_bytes=2 * B * H * D * 4, block_bytes=2 * B * H * D * 4)
    OffloadRuntime(config_of(32), by_hand)


def test_the_layout_is_described_in_a_line() -> None:
    """Regions that are alike are counted, not listed; gaps between blocks are named."""
    layers = [torch.zeros(N, 2, B, H, D, dtype=torch.float16) for _ in range(3)]
    block = "7 blocks [2, 16, 3, 4] torch.float16 (768 bytes) on cpu"
    assert described(LocalTransport(layers)) == f"3 regions of {block}"
    keys = layers[0][:, 0]
    gap = "7 blocks [16, 3, 4] torch.float16 (384 bytes, 768 bytes apart) on cpu"
    assert described(LocalTransport([layers[1], keys])) == f"1 region of {block}, 1 region of {gap}"
    assert described(object()) == ""


@pytest.mark.anyio
async def test_the_layout_is_in_the_log_when_the_runtime_opens() -> None:
    """The start of the log says how the tensors were understood."""
    captured = structlog.testing.LogCapture()
    logger = structlog.wrap_logger(structlog.PrintLogger(), processors=[captured])
    async with OffloadRuntime(config_of(16), torch.zeros(N, 2, B, H, D), logger=logger):
        pass
    (opened,) = [entry for entry in captured.entries if entry["event"] == "runtime_opened"]
    assert opened["layout"] == "1 region of 7 blocks [2, 16, 3, 4] torch.float32 (1536 bytes) on cpu"
