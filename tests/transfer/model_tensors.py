"""KV tensors of a model as engines lay them out, filled with random bytes, and a runtime over them with a disk."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import torch

from aoffload import DiskTier, KVRegion, ModelLayout, OffloadConfig, OffloadRuntime, RegionSpec, groups_of

CONFIGS = Path(__file__).parents[1] / "model_configs"
MODELS = sorted(path.stem for path in CONFIGS.glob("*.json"))
Blocks = tuple[torch.Tensor, int]
"""A tensor, and its axis that counts blocks."""


def config_of(model: str, **changes: Any) -> dict[str, Any]:
    """The configuration of a model, with other values for some fields of its decoder."""
    found: dict[str, Any] = json.loads((CONFIGS / f"{model}.json").read_text())
    found.get("text_config", found).update(changes)
    return found


def layout_of(model: str, changes: dict[str, Any] | None = None, **options: Any) -> ModelLayout:
    return groups_of(config_of(model, **(changes or {})), **options)


# -- forms: the tensors of a region, and what is given to KVRegion.of_model -------------------------------------------


def inside(spec: RegionSpec, num_blocks: int) -> tuple[list[Blocks], Any]:
    """Keys and values inside a block: vLLM's `[num_blocks, 2, B, H, D]` and `[num_blocks, B, 576]`, and FlashInfer's
    NHD and HND."""
    tensor = zeros(spec, num_blocks, *spec.shape)
    return [(tensor, 0)], tensor


def keys_first(spec: RegionSpec, num_blocks: int) -> tuple[list[Blocks], Any]:
    """vLLM's `[2, num_blocks, B, H, D]`."""
    if not has_sides(spec):
        return inside(spec, num_blocks)
    tensor = zeros(spec, 2, num_blocks, *spec.shape[1:])
    return [(tensor, 1)], KVRegion.all_of(tensor, block_axis=1)


def token_rows(spec: RegionSpec, num_blocks: int) -> tuple[list[Blocks], Any]:
    """SGLang's flat rows of tokens, `[num_blocks * B, H, D]`, keys and values in two tensors."""
    sides = 2 if has_sides(spec) else 1
    shape = spec.shape[-(len(spec.shape) - sides + 1) :]
    if len(shape) == 1:  # packed pages have no rows of tokens
        return inside(spec, num_blocks)
    flat = [zeros(spec, num_blocks * shape[0], *shape[1:]) for _ in range(sides)]
    views = [each.view(num_blocks, *shape) for each in flat]
    return [(each, 0) for each in views], views


def heads_first_view(spec: RegionSpec, num_blocks: int) -> tuple[list[Blocks], Any]:
    """The shape of NHD over memory in HND, as attention backends of vLLM see it: `[num_blocks, 2, B, H, D]`,
    permuted."""
    if not has_sides(spec):
        return inside(spec, num_blocks)
    view = zeros(spec, num_blocks, *spec.shape).transpose(2, 3)
    return [(view, 0)], view


FORMS = {"inside": inside, "keys first": keys_first, "token rows": token_rows, "heads first view": heads_first_view}
Form = Callable[[RegionSpec, int], tuple[list[Blocks], Any]]


def has_sides(spec: RegionSpec) -> bool:
    return len(spec.shape) >= 3 and spec.shape[0] == 2


def zeros(spec: RegionSpec, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=getattr(torch, spec.dtype))


@attrs.frozen
class ModelTensors:
    """The tensors of a model in one form."""

    model: ModelLayout
    num_blocks: int
    blocks: dict[str, list[Blocks]]
    given: dict[str, Any]

    @classmethod
    def of(cls, model: ModelLayout, form: Form, num_blocks: int) -> ModelTensors:
        made = {spec.name: form(spec, num_blocks) for spec in model.regions}
        return cls(model, num_blocks, {n: m[0] for n, m in made.items()}, {n: m[1] for n, m in made.items()})

    def regions(self) -> tuple[KVRegion, ...]:
        return KVRegion.of_model(self.model, self.given)

    def fill(self, block_id: int, generator: torch.Generator) -> None:
        """Random bytes in every region."""
        for block in self._of_block(block_id):
            num_bytes = block.numel() * block.element_size()
            drawn = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)
            block.copy_(drawn.view(block.dtype).reshape(block.shape))

    def content(self, block_id: int) -> list[bytes]:
        """The bytes of a block, for each tensor."""
        return [
            block.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for block in self._of_block(block_id)
        ]

    def _of_block(self, block_id: int) -> list[torch.Tensor]:
        return [tensor.select(axis, block_id) for parts in self.blocks.values() for tensor, axis in parts]


# -- a runtime with a disk ---------------------------------------------------------------------------------------------


def unit_tokens(model: ModelLayout) -> int:
    return math.lcm(*(group.block_size for group in model.groups))


def blocks_for(model: ModelLayout, num_tokens: int) -> int:
    """Device blocks for a request of that many tokens, with the null block."""
    num_units = -(-num_tokens // unit_tokens(model))
    return 1 + num_units * sum(unit_tokens(model) // group.block_size for group in model.groups)


@asynccontextmanager
async def runtime_on(tensors: ModelTensors, path: Path, namespace: str | None = None) -> AsyncIterator[OffloadRuntime]:
    """A runtime whose host is empty when it opens: what it finds was on the disk at `path`."""
    model, num_blocks = tensors.model, tensors.num_blocks
    size = (4 << 20) + 2 * num_blocks * (model.block_bytes + 8192)
    config = OffloadConfig(
        groups=model.groups,
        num_host_blocks=num_blocks,
        namespace=model.fingerprint if namespace is None else namespace,
        disk=DiskTier(path, size, close_flush_s=60),
        prefill_tokens_per_s=1.0,  # to fetch is always faster
        max_fetch_share=1.0,
    )
    async with OffloadRuntime(config, tensors.regions()) as runtime:
        await runtime.disk.wait_restored()
        yield runtime


async def compute(runtime: OffloadRuntime, tensors: ModelTensors, prompt: list[int], seed: int) -> list[Any]:
    """Serve a prompt whose KV is random bytes; the bytes of its whole blocks, for each group."""
    generator = torch.Generator().manual_seed(seed)
    async with runtime.request(prompt) as request:
        await request.allocate()
        await request.load()
        with runtime.step([request]):
            written = []
            for group, table in zip(tensors.model.groups, request.block_ids, strict=True):
                whole = table[: len(prompt) // group.block_size]
                for block_id in whole:
                    tensors.fill(block_id, generator)
                written.append([tensors.content(block_id) for block_id in whole])
        request.commit(len(prompt))
    await runtime.flush()
    return written


async def loaded(runtime: OffloadRuntime, tensors: ModelTensors, prompt: list[int]) -> tuple[int, list[Any]]:
    """The number of tokens that a request finds, and the bytes of the blocks that it reads, by group and position."""
    async with runtime.request(prompt) as request:
        await request.allocate()
        num_tokens = await request.load()
        found = [
            {i: tensors.content(table[i]) for i in group.attention.required_blocks(num_tokens, group.block_size)}
            for group, table in zip(tensors.model.groups, request.block_ids, strict=True)
        ]
        return num_tokens, found
    raise AssertionError("the request was cancelled")
