"""A model with a windowed group, and runtimes for it: with windows, and with full groups in their place.

A full group keeps all that a windowed one does. So the same engine has to give the same answers on both, and what
doesn't depend on freed blocks can be shown on either.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs
import torch

from aoffload import KVCacheGroup, OffloadConfig, OffloadRuntime
from aoffload._config.groups import FullAttention, SlidingWindow
from aoffload._reference.engine.batching import EngineOptions, PrefillStart
from aoffload._reference.engine.engine import PagedEngine
from aoffload._reference.engine.layers import LayerGroup, layer_regions, places_of
from aoffload._reference.engine.paged import PagedBatch, Span
from aoffload._transfer.local import LocalTransport
from aoffload.demo.backends import Tampering

VOCABULARY = 997
WINDOW = 10
OPTIONS = EngineOptions(block_size=4, prefill_tokens=8, decode_rows=4, max_running=8)
BY_LAYER = attrs.evolve(OPTIONS, prefill_start=PrefillStart.BY_LAYER)
KINDS = ["stand-in", "windows"]


def weigh(tokens: Sequence[int], start: int) -> int:
    return sum((start + index + 1) * (token + 1) for index, token in enumerate(tokens))


def answer(prompt: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    """What the model says: a function of all tokens and, once more, of those in the window, by position."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        first = max(0, len(tokens) - WINDOW)
        tokens.append((weigh(tokens, 0) + 31 * weigh(tokens[first:], first)) % VOCABULARY)
    return tuple(tokens[len(prompt) :])


class WindowedModel:
    """A full and a windowed layer that keep each token and its position: one wrong block is a wrong answer.

    Row 0 of its KV tensor is NaN, as every row that nobody has written: reading one fails the step.
    """

    vocab_size = VOCABULARY
    groups = (LayerGroup("full", (0,)), LayerGroup("sliding", (1,), SlidingWindow(WINDOW)))

    def new_kv_cache(self, num_blocks: int, block_size: int) -> torch.Tensor:
        return torch.full((num_blocks, 1, 2, block_size, 1, 1), torch.nan)

    def forward(self, batch: PagedBatch, kv_cache: torch.Tensor) -> torch.Tensor:
        flat = kv_cache[:, 0, :, :, 0, 0]
        for blocks in batch.slot_blocks:
            assert blocks.all(), "the null block is written to"
            flat[blocks, 0, batch.slot_offsets] = batch.input_ids.float()
            flat[blocks, 1, batch.slot_offsets] = batch.positions.float()
        for place in places_of(self.groups).values():
            batch.fences.wait_for(place)
        logits = torch.zeros(batch.num_sequences, VOCABULARY)
        for row, span in enumerate(batch.spans):
            everything = self._read(flat, span, 0, None)
            inside = self._read(flat, span, 1, WINDOW)[-WINDOW:]
            logits[row, (everything.sum() + 31 * inside.sum()) % VOCABULARY] = 1.0
        return logits

    def _read(self, flat: torch.Tensor, span: Span, group: int, window: int | None) -> torch.Tensor:
        """The weight of each position that a query of the span reads."""
        first = span.first_key(window)
        where = torch.arange(first, span.kv_len)
        blocks, offsets = span.tables[group][where // OPTIONS.block_size], where % OPTIONS.block_size
        tokens, positions = (flat[blocks, which, offsets] for which in (0, 1))
        if not torch.equal(positions, where.float()):
            raise ArithmeticError(f"positions {first} to {span.kv_len} of group {group} hold {positions.tolist()}")
        return (positions.long() + 1) * (tokens.long() + 1)


@attrs.frozen
class Bench:
    runtime: OffloadRuntime
    engine: PagedEngine

    async def ask(self, prompt: Sequence[int], num_tokens: int = 3, **options: Any) -> Any:
        """Generate, and check the answer."""
        generation = await self.engine.generate(prompt, num_tokens, **options)
        assert generation.token_ids == answer(prompt, num_tokens)
        sources = generation.num_device_tokens, generation.num_host_tokens, generation.num_computed_tokens
        assert sum(sources) == generation.num_prompt_tokens == len(prompt)
        return generation

    async def check_no_pins(self) -> None:
        await self.runtime.flush()
        self.runtime.check_integrity()
        statistics = self.runtime.statistics()
        assert (statistics.device.num_pinned, statistics.host.num_pinned) == (0, 0)
        engine = self.engine.statistics()
        assert (engine.num_waiting, engine.num_prefilling, engine.num_decoding) == (0, 0, 0)


@asynccontextmanager
async def serving(
    kind: str,
    num_blocks: int,
    *,
    options: EngineOptions = OPTIONS,
    store_policy: str = "eager",
    tampering: Tampering | None = None,
    on_step: Callable[[int], None] = lambda _: None,
) -> AsyncIterator[Bench]:
    model = WindowedModel()
    kv_cache = model.new_kv_cache(num_blocks + 1 + options.num_scratch_blocks, options.block_size)
    attentions = [FullAttention(), SlidingWindow(WINDOW) if kind == "windows" else FullAttention()]
    config = OffloadConfig(
        groups=[
            KVCacheGroup(group.name, attention=attention, block_size=options.block_size)
            for group, attention in zip(model.groups, attentions, strict=True)
        ],
        num_host_blocks=400,
        store_policy=store_policy,
        verify=True,
    )
    backend = tampering.make_backend if tampering is not None else None
    transport = LocalTransport(layer_regions(kv_cache[: num_blocks + 1]), backend=backend)
    async with OffloadRuntime(config, transport=transport) as runtime:
        async with PagedEngine(model, runtime, kv_cache, options, on_step=on_step) as engine:
            bench = Bench(runtime, engine)
            yield bench
        await bench.check_no_pins()


def prompt_of(number: int, num_tokens: int = 22) -> list[int]:
    return [(number * 31 + index * 7) % VOCABULARY for index in range(num_tokens)]
