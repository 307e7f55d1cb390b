"""Random layouts of regions, and the bytes of each block as plain Python sees them."""

from __future__ import annotations

import random

import torch

from aoffload._transfer.region import KVRegion, regions_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.int64, torch.bool)


def filled(num_bytes: int, dtype: torch.dtype, rng: random.Random) -> torch.Tensor:
    """A tensor of random bytes, seen as `dtype`."""
    data = bytearray(rng.randbytes(num_bytes))
    if dtype is torch.bool:
        data = bytearray(byte & 1 for byte in data)
    return torch.frombuffer(data, dtype=torch.uint8).clone().view(dtype)


class Pool:
    """One memory from which regions are cut, and the bytes of each block as plain Python sees them."""

    def __init__(self, memory: torch.Tensor, regions: list[KVRegion]) -> None:
        self.memory = memory.view(torch.uint8)
        self.regions = regions

    def block(self, block_id: int) -> bytes:
        return b"".join(self.parts(block_id))

    def parts(self, block_id: int) -> list[bytes]:
        """What each region has of it."""
        data = self.memory.numpy().tobytes()
        base = self.memory.data_ptr()
        starts = [(region.address - base + block_id * region.block_stride_bytes, region) for region in self.regions]
        return [data[start : start + region.block_bytes] for start, region in starts]


def separate_sizes(rng: random.Random) -> Pool:
    """Regions of different sizes, strides and offsets, some with gaps, in any order."""
    num_blocks, dtype = rng.randint(2, 9), rng.choice(DTYPES)
    item = torch.empty(0, dtype=dtype).element_size()
    shapes = []
    end = item * rng.randint(0, 3)
    for _ in range(rng.randint(1, 4)):
        size = item * rng.randint(1, 12)
        stride = size + item * rng.choice((0, 0, 1, 5))
        shapes.append((end // item, size, stride))
        end += stride * num_blocks + item * rng.randint(0, 3)
    memory = filled(end, dtype, rng)
    regions = [
        KVRegion(memory[first : first + (stride * (num_blocks - 1) + size) // item], stride, size)
        for first, size, stride in shapes
    ]
    rng.shuffle(regions)
    return Pool(memory, regions)


def stacked(rng: random.Random) -> Pool:
    """Layers in one tensor, as `[layers, blocks, ...]` or `[blocks, layers, ...]`."""
    num_blocks, num_layers, dtype = rng.randint(2, 9), rng.randint(1, 5), rng.choice(DTYPES)
    elements = rng.randint(1, 9)
    item = torch.empty(0, dtype=dtype).element_size()
    memory = filled(num_blocks * num_layers * elements * item, dtype, rng)
    if rng.random() < 0.5:
        tensors = list(memory.reshape(num_layers, num_blocks, elements))
    else:
        tensors = list(memory.reshape(num_blocks, num_layers, elements).unbind(1))
    if rng.random() < 0.3:
        rng.shuffle(tensors)
    return Pool(memory, list(regions_of(tensors)))
