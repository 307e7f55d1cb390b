"""Stand-ins for vLLM's requests, block pool and scheduler, as far as the connector sees them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

BLOCK = 4
PAGE_BYTES = 16


def feature(start: int, length: int, name: str, modality: str = "image") -> Any:
    return SimpleNamespace(mm_position=SimpleNamespace(offset=start, length=length), identifier=name, modality=modality)


class Request:
    def __init__(self, request_id: str, tokens: Iterable[int], **fields: Any) -> None:
        self.request_id, self.all_token_ids = request_id, list(tokens)
        self.num_computed_tokens, self.cache_salt, self.lora_request, self.mm_features = 0, None, None, []
        self.prompt_embeds, self.resumable, self.skip_reading_prefix_cache = None, False, False
        self.__dict__.update(fields)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def block_hashes(self) -> list[tuple[int, ...]]:
        """One for each block, of all tokens up to its end."""
        return [tuple(self.all_token_ids[: end + BLOCK]) for end in range(0, self.num_tokens - BLOCK + 1, BLOCK)]


class Block:
    def __init__(self, block_id: int) -> None:
        self.block_id, self.ref_cnt, self.key = block_id, 0, None


class Pool:
    """Free blocks keep what is cached in them until they are taken."""

    hash_block_size = BLOCK

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.free = OrderedDict.fromkeys(range(1, num_blocks))
        self.cached: dict[Any, Block] = {}

    def touch(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self.free.pop(block.block_id, None)
            block.ref_cnt += 1

    def free_blocks(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0, "freed more often than held"
            if not block.ref_cnt:
                self.free[block.block_id] = None

    def take(self, number: int) -> list[Block]:
        taken = [self.blocks[self.free.popitem(last=False)[0]] for _ in range(number)]
        for block in taken:
            self.cached.pop(block.key, None)
            block.key, block.ref_cnt = None, 1
        return taken

    def get_cached_block(self, block_hash: Any, group_ids: list[int]) -> list[Block] | None:
        found = self.cached.get((group_ids[0], block_hash))
        return None if found is None else [found]


class Manager:
    """Block tables by request, of one group."""

    def __init__(self, num_blocks: int) -> None:
        self.block_pool = Pool(num_blocks)
        self.tables: dict[str, list[Block]] = {}

    def get_blocks(self, request_id: str) -> Any:
        return SimpleNamespace(blocks=(self.tables.get(request_id, []),))

    def hit(self, request: Request) -> list[Block]:
        found = []
        for key in request.block_hashes[: (request.num_tokens - 1) // BLOCK]:
            cached = self.block_pool.get_cached_block(key, [0])
            if cached is None:
                break
            found += cached
        return found

    def adopt(self, request: Request, blocks: list[Block]) -> None:
        self.block_pool.touch(blocks)
        self.tables[request.request_id] = list(blocks)

    def grow(self, request: Request, num_tokens: int) -> None:
        table = self.tables.setdefault(request.request_id, [])
        table += self.block_pool.take(-(-num_tokens // BLOCK) - len(table))

    def cache(self, request: Request, num_tokens: int) -> None:
        for at, key in enumerate(request.block_hashes[: num_tokens // BLOCK]):
            block = self.tables[request.request_id][at]
            if (0, key) not in self.block_pool.cached and block.key is None:
                block.key = (0, key)
                self.block_pool.cached[block.key] = block

    def release(self, request: Request) -> None:
        self.block_pool.free_blocks(reversed(self.tables.pop(request.request_id, [])))

    def evict_all(self) -> None:
        self.block_pool.cached.clear()
        for block in self.block_pool.blocks:
            block.key = None


def kv_tensor(num_blocks: int, num_layers: int = 2) -> tuple[torch.Tensor, Any]:
    """The memory of a KV cache, layer after layer, and vLLM's description of it."""
    plane = num_blocks * PAGE_BYTES
    names = [f"layer.{number}" for number in range(num_layers)]
    placed = SimpleNamespace(
        size=num_layers * plane,
        layers=names,
        layer_stride=plane,
        block_stride=PAGE_BYTES,
        offset=0,
        host_resident=False,
    )
    return torch.zeros(num_layers * plane, dtype=torch.uint8), placed
