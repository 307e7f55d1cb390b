"""A model with a recurrent state whose every answer depends on every byte that it reads, and runtimes for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs
import torch
from windowed import OPTIONS, WINDOW, WindowedModel, weigh

from aoffload import OffloadConfig, OffloadRuntime
from aoffload._config.groups import SlidingWindow
from aoffload._reference.engine.batching import EngineOptions
from aoffload._reference.engine.checkpoints import engine_groups
from aoffload._reference.engine.engine import PagedEngine
from aoffload._reference.engine.layers import LayerGroup
from aoffload._reference.engine.paged import PagedBatch
from aoffload._reference.engine.recurrent import StateLayout, recurrent_slices
from aoffload._transfer.local import LocalTransport
from aoffload.demo.backends import Tampering

VOCABULARY = 997
PRIME = 2**31 - 1
KINDS = ["full", "windows"]
SIZE = 9
"""Numbers of a state: 72 bytes, three blocks of 32."""


def fold(tokens: Sequence[int], state: int = 1) -> int:
    """The state after `tokens`: a function of all of them and their order."""
    for token in tokens:
        state = (state * 1009 + token + 1) % PRIME
    return state


def answer(prompt: Sequence[int], num_tokens: int, kind: str) -> tuple[int, ...]:
    """What the model says: a function of all KV, of the KV in the window, and of the state."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        first = max(0, len(tokens) - WINDOW)
        total = weigh(tokens, 0) + (31 * weigh(tokens[first:], first) if kind == "windows" else 0)
        tokens.append((total + fold(tokens)) % VOCABULARY)
    return tuple(tokens[len(prompt) :])


class FoldingModel(WindowedModel):
    """The model of `windowed`, with a recurrent layer that has each token folded into its state.

    A state knows its position and fills all its bytes, so a forward fails on a state of another position, and on one
    whose rows belong to different states.
    """

    def __init__(self, kind: str) -> None:
        full, sliding = LayerGroup("full", (0,)), LayerGroup("sliding", (1,), SlidingWindow(WINDOW))
        self.groups = (full, sliding) if kind == "windows" else (full,)  # type: ignore[assignment]
        self.states = StateLayout.of(
            [(2, "recurrent", 0, torch.zeros(1, SIZE, dtype=torch.int64))], torch.device("cpu")
        )
        self.num_resumed = 0

    def forward(self, batch: PagedBatch, kv_cache: torch.Tensor) -> torch.Tensor:
        parts = recurrent_slices(batch.slices)
        self.num_resumed += sum(bool(part.resume) for part in parts)
        for part in parts:
            part.enter(kv_cache)
        flat = kv_cache[:, 0, :, :, 0, 0]
        for blocks in batch.slot_blocks:
            assert blocks.all(), "the null block is written to"
            flat[blocks, 0, batch.slot_offsets] = batch.input_ids.float()
            flat[blocks, 1, batch.slot_offsets] = batch.positions.float()
        logits = torch.zeros(batch.num_sequences, VOCABULARY)
        for row, (span, part) in enumerate(zip(batch.spans, parts, strict=True)):
            if part.slot is None:
                continue
            total = int(self._read(flat, span, 0, None).sum())
            if len(self.groups) > 1:
                total += 31 * int(self._read(flat, span, 1, WINDOW)[-WINDOW:].sum())
            [state] = part.slot.views
            found = state[0].tolist()
            if part.start and (len(set(found[1:])) > 1 or found[0] != part.start):
                raise ArithmeticError(f"the state at {part.start} is {found}")
            after = fold(list(part.token_ids), found[1] if part.start else 1)
            state.copy_(torch.tensor([[part.stop] + [after] * (SIZE - 1)]))
            logits[row, (total + after) % VOCABULARY] = 1.0
        for part in parts:
            part.leave(kv_cache)
        return logits


@attrs.frozen
class Bench:
    kind: str
    model: FoldingModel
    runtime: OffloadRuntime
    engine: PagedEngine
    kv_cache: torch.Tensor

    async def ask(self, prompt: Sequence[int], num_tokens: int = 3, **options: Any) -> Any:
        """Generate, and check the answer."""
        generation = await self.engine.generate(prompt, num_tokens, **options)
        assert generation.token_ids == answer(prompt, num_tokens, self.kind)
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
    tampering: Tampering | None = None,
    on_step: Callable[[int], None] = lambda _: None,
) -> AsyncIterator[Bench]:
    model = FoldingModel(kind)
    kv_cache = model.new_kv_cache(num_blocks + 1 + options.num_scratch_blocks, options.block_size)
    config = OffloadConfig(
        groups=engine_groups(model, options),
        num_host_blocks=400,
        verify=True,
    )
    backend = tampering.make_backend if tampering is not None else None
    transport = LocalTransport([kv_cache[: num_blocks + 1]], backend=backend)
    async with OffloadRuntime(config, transport=transport) as runtime:
        async with PagedEngine(model, runtime, kv_cache, options, on_step=on_step) as engine:
            bench = Bench(kind, model, runtime, engine, kv_cache)
            yield bench
        await bench.check_no_pins()


def prompt_of(number: int, num_tokens: int = 22) -> list[int]:
    return [(number * 31 + index * 7) % VOCABULARY for index in range(num_tokens)]
