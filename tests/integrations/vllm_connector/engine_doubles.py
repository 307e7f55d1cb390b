"""Stand-ins for vLLM's requests, block pool and scheduler, as far as the connector sees them."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

BLOCK = 4
PAGE_BYTES = 16
TEXT = list(range(30))


def feature(start: int, length: int, name: str, modality: str = "image") -> Any:
    return SimpleNamespace(mm_position=SimpleNamespace(offset=start, length=length), identifier=name, modality=modality)


class Request:
    def __init__(self, request_id: str, tokens: Iterable[int], **fields: Any) -> None:
        self.request_id, self.all_token_ids = request_id, list(tokens)
        self.num_computed_tokens, self.cache_salt, self.lora_request, self.mm_features = 0, None, None, []
        self.prompt_embeds, self.resumable, self.skip_reading_prefix_cache = None, False, False
        self.num_new = 0
        """Tokens that it generates."""
        self.__dict__.update(fields)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def block_hashes(self) -> list[bytes]:
        """One for each block, of all tokens up to its end, and of name and path of the adapter."""
        lora = self.lora_request
        hasher = hashlib.sha256(b"" if lora is None else f"{lora.lora_name} {lora.lora_path} ".encode())
        found = []
        for start in range(0, self.num_tokens - BLOCK + 1, BLOCK):
            hasher.update(repr(self.all_token_ids[start : start + BLOCK]).encode())
            found.append(hasher.digest())
        return found


class Block:
    def __init__(self, block_id: int) -> None:
        self.block_id, self.ref_cnt, self.key = block_id, 0, None


class Pool:
    """Free blocks keep what is cached in them until they are taken. Block 0 is the null block: nobody owns it."""

    hash_block_size = BLOCK

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.free = OrderedDict.fromkeys(range(1, num_blocks))
        self.cached: dict[Any, Block] = {}

    @property
    def null(self) -> Block:
        return self.blocks[0]

    @property
    def cached_block_hash_to_block(self) -> dict[Any, Block]:
        return self.cached

    def touch(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self.free.pop(block.block_id, None)
            block.ref_cnt += block is not self.null

    def free_blocks(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            if block is self.null:
                continue
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

    def get_num_free_blocks(self) -> int:
        return len(self.free)

    def evict_blocks(self, block_ids: set[int]) -> None:
        for block_id in block_ids:
            block = self.blocks[block_id]
            if block.key is not None:
                del self.cached[block.key]
                block.key = None

    def reset_prefix_cache(self) -> bool:
        self.evict_blocks(set(range(len(self.blocks))))
        self.cached = {}
        return True

    def get_cached_block(self, block_hash: Any, group_ids: list[int]) -> list[Block] | None:
        found = self.cached.get((group_ids[0], block_hash))
        return None if found is None else [found]


class Manager:
    """Block tables by request: one for each group, full attention or, where `windows` has a number, the last so many
    tokens."""

    def __init__(self, num_blocks: int, windows: Sequence[int] = (0,)) -> None:
        self.block_pool, self.windows = Pool(num_blocks), windows
        self.tables: dict[str, tuple[list[Block], ...]] = {}

    def get_blocks(self, request_id: str) -> Any:
        return SimpleNamespace(blocks=self.tables.get(request_id, tuple([] for _ in self.windows)))

    def block_ids(self, request_id: str) -> tuple[list[int], ...]:
        return tuple([block.block_id for block in table] for table in self.get_blocks(request_id).blocks)

    def first_needed(self, group: int, stop: int) -> int:
        """The first block of `group` that the token after block `stop` reads."""
        window = self.windows[group]
        return max(0, stop * BLOCK - window + 1) // BLOCK if window else 0

    def hit(self, request: Request) -> int:
        """Blocks of the longest prefix at whose end every group has what it reads."""
        keys = request.block_hashes[: (request.num_tokens - 1) // BLOCK]
        for stop in range(len(keys), 0, -1):
            if all(
                (group, keys[at]) in self.block_pool.cached
                for group in range(len(self.windows))
                for at in range(self.first_needed(group, stop), stop)
            ):
                return stop
        return 0

    def adopt(self, request: Request, num_blocks: int) -> None:
        pool, keys = self.block_pool, request.block_hashes
        found = []
        for group in range(len(self.windows)):
            first = self.first_needed(group, num_blocks)
            found.append([pool.null] * first + [pool.cached[group, keys[at]] for at in range(first, num_blocks)])
            pool.touch(found[-1])
        self.tables[request.request_id] = tuple(found)

    def has_room(self, request: Request, num_hit: int, num_tokens: int) -> bool:
        """Whether there are blocks for `num_tokens` after a hit of `num_hit` blocks."""
        taken = sum(
            self.block_pool.cached[group, request.block_hashes[at]].block_id in self.block_pool.free
            for group in range(len(self.windows))
            for at in range(self.first_needed(group, num_hit), num_hit)
        )
        wanted = (-(-num_tokens // BLOCK) - num_hit) * len(self.windows)
        return len(self.block_pool.free) >= taken + wanted

    def grow(self, request: Request, num_computed: int, num_tokens: int) -> bool:
        """Blocks for `num_tokens`, if there are enough. What lies before the window of the first token to compute
        becomes null."""
        stop, tables = -(-num_tokens // BLOCK), self.tables[request.request_id]
        if sum(stop - len(table) for table in tables) > len(self.block_pool.free):
            return False
        for group, table in enumerate(tables):
            first = self.first_needed(group, num_computed // BLOCK)
            for at, block in enumerate(table[:first]):
                if block is not self.block_pool.null:
                    table[at] = self.block_pool.null
                    self.block_pool.free_blocks([block])
            table += [self.block_pool.null] * (min(first, stop) - len(table))
            table += self.block_pool.take(stop - len(table))
        return True

    def cache(self, request: Request, num_tokens: int) -> None:
        for group, table in enumerate(self.tables[request.request_id]):
            for block, key in zip(table, request.block_hashes[: num_tokens // BLOCK], strict=False):
                if block is not self.block_pool.null and (group, key) not in self.block_pool.cached and not block.key:
                    block.key = (group, key)
                    self.block_pool.cached[block.key] = block

    def release(self, request: Request) -> None:
        for table in self.tables.pop(request.request_id, ()):
            self.block_pool.free_blocks(reversed(table))

    def reset(self) -> None:
        """vLLM's `reset_prefix_cache`: the pool gets another map."""
        self.evict_all()
        self.block_pool.cached = {}

    def evict_all(self) -> None:
        self.block_pool.cached.clear()
        for block in self.block_pool.blocks:
            block.key = None


def lora(adapter: int, name: str = "tenant", path: str = "/adapter", load_inplace: bool = False) -> Any:
    return SimpleNamespace(lora_int_id=adapter, lora_name=name, lora_path=path, load_inplace=load_inplace)


class Weights:
    """An adapter as vLLM has loaded it."""

    def __init__(self, adapter: int, number: int) -> None:
        self.id, self.number, self.loras = adapter, number, {"layer": torch.full((2, 3), number, dtype=torch.bfloat16)}


class LoraManager:
    """vLLM's manager of adapters in a worker: it reads the files of an adapter that it has not, or evicted, and for
    `load_inplace`. `files` say which weights lie at a path."""

    def __init__(self, lora_config: Any, files: dict[str, int]) -> None:
        self.lora_config, self.files, self.num_read = lora_config, files, 0
        self._loaded = OrderedDict[int, Any]()
        self._adapter_manager = SimpleNamespace(list_adapters=lambda: dict(self._loaded))

    def list_adapters(self) -> set[int]:
        return set(self._loaded)

    def add_adapter(self, request: Any) -> None:
        if request.lora_int_id not in self.list_adapters() or request.load_inplace:
            self.num_read += 1
            self._loaded[request.lora_int_id] = Weights(request.lora_int_id, self.files[request.lora_path])
            self._loaded.move_to_end(request.lora_int_id)
            while len(self._loaded) > self.lora_config.max_cpu_loras:
                self._loaded.popitem(last=False)

    def set_active_adapters(self, requests: Any, mapping: Any) -> None:
        for request in requests:
            self.add_adapter(request)

    def evict(self) -> None:
        self._loaded.clear()

    def number(self, request: Any) -> int:
        """Stands for the weights that a forward of `request` computes with."""
        found: int = 0 if request is None else self._loaded[request.lora_int_id].number
        return found


class Worker:
    """vLLM's worker, as far as sleep goes: it registers KV tensors, and discards their memory and that of the weights.
    A number stands for the weights."""

    def __init__(self, copier: Any, memory: torch.Tensor) -> None:
        self.copier, self.memory = copier, memory
        self.model_runner, self.model = self, torch.nn.Linear(3, 5)
        self.load_weights(0)

    def get_model(self) -> torch.nn.Module:
        return self.model

    def load_weights(self, number: int) -> None:
        for each in self.model.parameters():
            each.data.fill_(number)

    @property
    def number(self) -> int:
        return int(self.model.bias[0])

    def register(self, layers: Iterable[str]) -> None:
        self.copier.register_kv_caches(dict.fromkeys(layers, self.memory))

    def sleep(self, level: int) -> None:
        self.copier.unregister_kv_caches()
        self.memory.zero_()
        if level == 2:
            self.load_weights(99)  # whatever the memory has then

    def wake_up(self) -> None:
        self.copier.restore_kv_caches()


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
