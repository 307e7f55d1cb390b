"""`PagedEngine` in a simulation: a model without weights, whose KV is the prefix and whose next token is known."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import attrs
import torch

from aoffload import FullAttention, RequestAborted, RuntimeClosed, SlidingWindow
from aoffload._reference.engine.batching import EngineOptions
from aoffload._reference.engine.engine import PagedEngine
from aoffload._reference.engine.layers import LayerGroup
from aoffload._reference.engine.loop import EngineClosed, StepFailed
from aoffload._reference.engine.paged import PagedBatch
from aoffload.testing import Client, SimulatedEngine, Simulation, Violation

__all__ = ["TagModel", "next_token", "paged_engine", "paged_windows"]

VOCAB = 97
BLOCK = 2
WINDOW = 4
OPTIONS = EngineOptions(block_size=BLOCK, prefill_tokens=4, max_running=3)


def next_token(tokens: Sequence[int]) -> int:
    """The token that the model generates after `tokens`."""
    return hashlib.blake2b(repr(tuple(tokens)).encode(), digest_size=2).digest()[0] % VOCAB


@attrs.define(eq=False)
class TagModel:
    """Implements `PagedModel` on the tags of a simulated device; the engine's scratch blocks are its own."""

    simulated: SimulatedEngine
    vocab_size: int = VOCAB
    _scratch: dict[int, object] = attrs.field(factory=dict)
    _identities: dict[int, object] = attrs.field(factory=dict)
    groups: tuple[LayerGroup, ...] = (LayerGroup("full", (0,)),)

    def new_kv_cache(self, num_blocks: int, block_size: int) -> torch.Tensor:
        return torch.zeros(num_blocks, 1)

    def forward(self, batch: PagedBatch, kv_cache: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(batch.num_sequences, self.vocab_size)
        for row, span in enumerate(batch.spans):
            ids = batch.input_ids[span.first : span.stop].tolist()
            start = span.kv_len - len(ids)
            tokens = self._extend(span.tables[0].tolist(), start, ids)
            for number, group in enumerate(self.groups[1:], start=1):
                self._slide(number, group.window or 0, span.tables[number].tolist(), tokens, start)
            logits[row, next_token(tokens)] = 1.0
        return logits

    def _extend(self, table: list[int], start: int, ids: list[int]) -> tuple[int, ...]:
        """Read and check the blocks before `start`, and write the computed ones. Returns all tokens."""
        tokens: tuple[int, ...] = ()
        for index in range(-(-start // BLOCK)):
            stop = min(start, (index + 1) * BLOCK)
            found = self._read(table[index])
            if not isinstance(found, tuple) or len(found) != stop or found[: len(tokens)] != tokens:
                raise Violation("wrong bytes", f"block {index} (id {table[index]}) holds {found} behind {tokens}")
            tokens = found
        for index in range(start // BLOCK, -(-(start + len(ids)) // BLOCK)):
            stop = min(start + len(ids), (index + 1) * BLOCK)
            self._write(table[index], (*tokens[:start], *ids)[:stop])
        return (*tokens[:start], *ids)

    def _slide(self, number: int, window: int, table: list[int], tokens: tuple[int, ...], start: int) -> None:
        """Like `_extend`, for a group with a window: the tokens are known."""
        for index in range(max(0, start - window + 1) // BLOCK, -(-start // BLOCK)):
            found = self._read(table[index])
            if found != (number, tokens[: min(start, (index + 1) * BLOCK)]):
                raise Violation("wrong bytes", f"block {index} (id {table[index]}) of group {number} holds {found}")
        for index in range(start // BLOCK, -(-len(tokens) // BLOCK)):
            self._write(table[index], (number, tokens[: (index + 1) * BLOCK]))

    def _read(self, block_id: int) -> object:
        content = self.simulated.device.content
        return self._identities.get(content[block_id]) if block_id < len(content) else self._scratch.get(block_id)

    def _write(self, block_id: int, held: object) -> None:
        content = self.simulated.device.content
        if block_id >= len(content):
            self._scratch[block_id] = held
            return
        tag = self.simulated.tags.of(("paged", held))
        self._identities[tag] = held
        content[block_id] = tag


async def paged_engine(sim: Simulation) -> None:
    """The engine that comes with the package: batches, a forward thread, clients that leave at any time."""
    simulated = sim.runtime(num_device_blocks=12, num_host_blocks=sim.random.choice((4, 16)), block_sizes=(BLOCK,))
    await _serve(sim, simulated, TagModel(simulated))


async def paged_windows(sim: Simulation) -> None:
    """The package's engine with a window: room slice by slice; the last request gives way when none can go on."""
    simulated = sim.runtime(
        num_device_blocks=17, num_host_blocks=sim.random.choice((8, 30)),
        block_sizes=(BLOCK, BLOCK), attention=(FullAttention(), SlidingWindow(WINDOW)),
    )  # fmt: skip
    groups = (LayerGroup("group0", (0,)), LayerGroup("group1", (1,), SlidingWindow(WINDOW)))
    await _serve(sim, simulated, TagModel(simulated, groups=groups))


async def _serve(sim: Simulation, simulated: SimulatedEngine, model: TagModel) -> None:
    kv_cache = model.new_kv_cache(simulated.transport.num_device_blocks + OPTIONS.num_scratch_blocks, BLOCK)
    async with simulated.runtime as runtime:
        async with PagedEngine(model, runtime, kv_cache, OPTIONS, env=sim.env) as engine:
            for index in range(5):
                prompt = [index % 2, 1, 2, 3, *range(4, sim.random.randint(5, 13))]

                async def generate(client: Client, prompt: list[int] = prompt) -> None:
                    await sim.jitter()
                    await _generate(engine, client, prompt)

                sim.spawn(f"r{index}", generate).may_raise = (RequestAborted, RuntimeClosed, EngineClosed, StepFailed)
            await sim.join()
            await runtime.flush()


async def _generate(engine: PagedEngine, client: Client, prompt: list[int]) -> None:
    def watch(_: int) -> None:
        client.request = engine.runtime._session.requests.get(client.name)

    num_new = client.simulation.random.randint(1, 4)
    found = await engine.generate(prompt, num_new, request_id=client.name, on_token=watch)
    expected = list(prompt)
    for _ in range(num_new):
        expected.append(next_token(expected))
    if list(found.token_ids) != expected[len(prompt) :]:
        raise Violation("wrong answer", f"{found.token_ids} after {prompt}")
    client.outcome = "D"
