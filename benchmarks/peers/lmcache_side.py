"""LMCache in this process, on CPU tensors: its engine and its local CPU backend, built as in its own tests.

LMCache has no connector for paged CPU tensors in process. The one here passes them to LMCache's own operations: by
slots, like its connectors for vLLM, or by blocks, which is faster. LMCache moves a CPU worker's blocks out of process
in the same way. The layout suits it well: a block of one layer is contiguous on both sides.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from typing import Any

os.environ["LMCACHE_TRACK_USAGE"] = "false"
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")

import line
import torch
from lmcache import device_ops
from lmcache.lmcache_native import EngineKVFormat, TransferDirection
from lmcache.utils import mock_up_broadcast_fn, mock_up_broadcast_object_fn
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from lmcache.v1.metadata import LMCacheMetadata

NAME = "lmcache_side"
CPU = torch.device("cpu")
NUM_LAYERS = 32
BLOCK_SIZE = 16
OBJECT_SIZE = 256
"""Tokens of one of LMCache's memory objects, 32 MiB here; its default."""
WIDTH = 2048
"""Elements of two bytes for each token and layer: 64 KiB a block."""
DTYPE = torch.bfloat16
LAYOUT = EngineKVFormat.NL_X_NB_BS_HS
M_MMAP_MAX, M_TRIM_THRESHOLD = -4, -1


def keep_what_is_freed() -> None:
    """LMCache stores through temporary memory of 32 MiB. If that is mapped anew each time, stores take four times as
    long."""
    libc = ctypes.CDLL(None)
    assert libc.mallopt(M_MMAP_MAX, 0) and libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


class Paged:
    """A tensor of random bytes for each layer, and the places of one prompt's blocks in them."""

    def __init__(self, num_blocks: int, ids: Sequence[int]) -> None:
        shape = (num_blocks, BLOCK_SIZE, WIDTH)
        self.bits = [torch.randint(-(2**15), 2**15, shape, dtype=torch.int16) for _ in range(NUM_LAYERS)]
        self.layers = [layer.view(DTYPE) for layer in self.bits]
        self.rows = [layer.view(num_blocks * BLOCK_SIZE, WIDTH) for layer in self.layers]
        self.ids = torch.tensor(ids)
        self.slots = (self.ids[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()
        self.num_bytes = len(ids) * BLOCK_SIZE * NUM_LAYERS * WIDTH * DTYPE.itemsize


class Connector(GPUConnectorInterface):
    """Copies between paged CPU tensors and memory objects. Like LMCache's own connectors, it gets the place of every
    token."""

    def __init__(self, num_blocks: int) -> None:
        self.num_slots = num_blocks * BLOCK_SIZE
        self.shape = device_ops.PageBufferShapeDesc()
        self.shape.kv_size, self.shape.nl, self.shape.nb = 1, NUM_LAYERS, num_blocks
        self.shape.bs, self.shape.nh, self.shape.hs = BLOCK_SIZE, 1, WIDTH
        self.shape.element_size, self.shape.dtype = DTYPE.itemsize, DTYPE

    def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **about: Any) -> None:
        self.move(TransferDirection.D2H, memory_objs, starts, ends, **about)

    def batched_to_gpu(self, memory_objs: Any = None, starts: Any = None, ends: Any = None, **about: Any) -> None:
        self.move(TransferDirection.H2D, memory_objs, starts, ends, **about)

    def move(self, direction: Any, objects: Any, starts: Any, ends: Any, *, by: str, paged: Paged) -> None:
        {"slots": self.by_slots, "blocks": self.by_blocks}[by](direction, objects, starts, ends, paged)

    def by_slots(self, direction: Any, objects: Any, starts: Any, ends: Any, paged: Paged) -> None:
        for one, start, end in zip(objects, starts, ends, strict=True):
            device_ops.multi_layer_kv_transfer(
                one.tensor, paged.rows, paged.slots[start:end], CPU, self.num_slots, direction, LAYOUT, BLOCK_SIZE
            )

    def by_blocks(self, direction: Any, objects: Any, starts: Any, ends: Any, paged: Paged) -> None:
        tensors = [one.tensor.view(NUM_LAYERS, OBJECT_SIZE, WIDTH) for one in objects]
        ids = paged.ids[starts[0] // BLOCK_SIZE : ends[-1] // BLOCK_SIZE]
        device_ops.multi_layer_block_kv_transfer(
            paged.layers, tensors, ids, CPU, direction, self.shape, OBJECT_SIZE, LAYOUT, 0
        )

    def get_shape(self, num_tokens: int) -> torch.Size:
        return torch.Size([1, NUM_LAYERS, num_tokens, WIDTH])

    def from_gpu(self, memory_obj: Any, start: int, end: int, **about: Any) -> None:
        self.batched_from_gpu([memory_obj], [start], [end], **about)

    def to_gpu(self, memory_obj: Any, start: int, end: int, **about: Any) -> None:
        self.batched_to_gpu([memory_obj], [start], [end], **about)


def engine_with(connector: Connector, num_bytes: int) -> Any:
    """An engine with one rank, host memory for `num_bytes`, and no further tier."""
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=OBJECT_SIZE, local_cpu=True, max_local_cpu_size=1.5 * num_bytes / 2**30,
        extra_config={"save_only_first_rank": False},  # else it broadcasts in this layout, although there is one rank
    )  # fmt: skip
    metadata = LMCacheMetadata(
        model_name="model", world_size=1, local_world_size=1, worker_id=0, local_worker_id=0, kv_dtype=DTYPE,
        kv_shape=(NUM_LAYERS, 1, OBJECT_SIZE, 1, WIDTH), use_mla=True, chunk_size=OBJECT_SIZE,
    )  # fmt: skip
    engine = LMCacheEngineBuilder.get_or_create(
        NAME, config, metadata, connector, mock_up_broadcast_fn, mock_up_broadcast_object_fn
    )
    engine.post_init()
    return engine


class Side:
    """One prompt, its blocks scattered over paged tensors, and the engine."""

    def __init__(self, num_blocks: int, ids: Sequence[int]) -> None:
        self.paged = Paged(num_blocks, ids)
        self.tokens = torch.randint(0, 100_000, (len(self.paged.slots),))
        self.engine = engine_with(Connector(num_blocks), self.paged.num_bytes)

    def store(self, by: str) -> dict[str, float]:
        self.engine.clear(self.tokens)  # blocks that it has already would not be stored again
        took = line.timed_once(lambda: self.engine.store(self.tokens, by=by, paged=self.paged))
        assert self.engine.lookup(self.tokens) == len(self.tokens)
        return took

    def load(self, by: str) -> dict[str, float]:
        found: list[torch.Tensor] = []
        took = line.timed_once(lambda: found.append(self.engine.retrieve(self.tokens, by=by, paged=self.paged)))
        assert int(found[0].sum()) == len(self.tokens)
        return took

    def num_arrived(self, by: str) -> int:
        """Number of bytes that return to their places in wiped tensors. Fails if any bytes come elsewhere."""
        ids, bits = self.paged.ids, self.paged.bits
        before = [layer[ids] for layer in bits]
        self.store(by)
        for layer in bits:
            layer.zero_()
        self.load(by)
        num_same = sum(int((layer[ids] == was).sum()) for layer, was in zip(bits, before, strict=True))
        for layer, was in zip(bits, before, strict=True):
            layer[ids] = 0
            assert not layer.any(), "bytes came where no block of the prompt is"
            layer[ids] = was
        return num_same * DTYPE.itemsize


SIDES: list[Side] = []


def prepare(num_blocks: int, ids: list[int]) -> dict[str, int]:
    """Make the side. Returns the bytes that one unit of work moves, and torch's default number of threads."""
    keep_what_is_freed()
    SIDES[:] = [Side(num_blocks, ids)]
    return {"num_bytes": SIDES[0].paged.num_bytes, "num_threads": torch.get_num_threads()}


def check(by: str) -> int:
    """Number of bytes that arrive after a store and a load."""
    return SIDES[0].num_arrived(by)


def store(by: str, num_threads: int) -> dict[str, float]:
    """Store all blocks from the paged tensors to host memory. The time includes the hashes of the tokens."""
    torch.set_num_threads(num_threads)
    return SIDES[0].store(by)


def load(by: str, num_threads: int) -> dict[str, float]:
    """Load all blocks back into the paged tensors."""
    torch.set_num_threads(num_threads)
    return SIDES[0].load(by)


CALLS: dict[str, Callable[..., Any]] = {"prepare": prepare, "check": check, "store": store, "load": load}

if __name__ == "__main__":
    try:
        line.serve(CALLS)
    finally:
        LMCacheEngineBuilder.destroy(NAME)  # otherwise its threads would keep this process alive
