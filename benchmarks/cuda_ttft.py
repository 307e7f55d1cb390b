"""The time to first token of a model with the shape of an 8B Llama and random weights: computing a prompt, beside
loading its KV from host memory and computing its last block."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from queue import SimpleQueue

import attrs
import torch
from torch.nn import functional

from aoffload import Tier
from aoffload.cuda import CudaBackend, CudaOptions
from aoffload.ledger import Completion, Outcome, TransferPlan
from aoffload.transport import Env, LocalTransport

from .cuda_ceilings import PUBLISHED_GBPS
from .cuda_copying import ENGINE, cuda_device
from .harness import Measured, Row, Subject, interleave, timed
from .peer import Peer
from .sizes import sized

__all__ = ["EIGHT_B", "Model", "Shape", "run", "ttft_rows"]

BLOCK_SIZE = 16
NUM_TOKENS = (8192, 2048, 16384, 512)
"""The most important lengths first, because the others may be interrupted."""
SHORTER = sized(1, 128)
"""Divisor of the prompt lengths in a dry run."""
MOST_SHARE = 1 / 3
SECONDS_PER_LENGTH = sized(1.5, 0.0)


@attrs.frozen
class Shape:
    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head: int


EIGHT_B = Shape(32, 4096, 14336, 32, 8, 128)
SHAPE = sized(EIGHT_B, Shape(2, 64, 128, 4, 2, 16))


def run(vllm: Peer | None = None) -> Iterator[Row]:
    """Two rows for each length of the prompt. Without a CUDA device, no rows and a message."""
    if (device := cuda_device("cuda_ttft")) is not None:
        yield from ttft_rows(device)


@torch.no_grad()  # not in inference mode, because other threads may not write its tensors
def ttft_rows(
    device: torch.device,
    options: CudaOptions = ENGINE,
    shape: Shape = SHAPE,
    lengths: tuple[int, ...] = NUM_TOKENS,
    seconds: float = SECONDS_PER_LENGTH,
) -> Iterator[Row]:
    model = Model(shape, device)
    for num_tokens in lengths:
        with closing(StoredPrompt(model, options, max(2 * BLOCK_SIZE, num_tokens // SHORTER))) as prompt:
            yield from _rows(prompt, num_tokens, seconds)


def _rows(prompt: StoredPrompt, num_tokens: int, seconds: float) -> Iterator[Row]:
    prompt.compute()
    prompt.store()
    subjects: dict[str, Subject] = {
        "with": lambda: timed(prompt.compute_last),
        "without": lambda: timed(prompt.compute),
        "load": lambda: timed(prompt.load),
    }
    found = interleave(subjects, seconds=seconds, least=3)
    yield _row(num_tokens, found)
    gigabytes, load, published = prompt.num_bytes / 1e9, found["load"], PUBLISHED_GBPS["load"]
    yield Row(
        name=f"the load of {num_tokens:,} tokens", value=gigabytes / load.median_s, unit="GB/s",
        spread=f"{load.median_s * 1e3:.2f} ms", against="vLLM, published", limit=published,
        ratio=gigabytes / load.median_s / published,
    )  # fmt: skip


def _row(num_tokens: int, found: dict[str, Measured]) -> Row:
    ours, other = found["with"], found["without"]
    return Row(
        name=f"first token of {num_tokens:,} tokens in host memory", value=ours.median_s * 1e3, unit="ms",
        spread=f"{ours.low_s * 1e3:.3g}-{ours.high_s * 1e3:.3g}", against="computing them",
        limit=other.median_s * 1e3, ratio=ours.median_s / other.median_s, wanted=MOST_SHARE, is_at_most=True,
    )  # fmt: skip


class Model:
    """The layers of a decoder with grouped-query attention, with random weights and without positions, because only the
    amount of work counts."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        heads = shape.num_heads * shape.head
        attended = heads + 2 * shape.num_kv_heads * shape.head
        self._layers = [
            (
                self._weight(attended, shape.hidden),
                self._weight(shape.hidden, heads),
                self._weight(2 * shape.intermediate, shape.hidden),
                self._weight(shape.hidden, shape.intermediate),
            )
            for _ in range(shape.num_layers)
        ]

    def _weight(self, rows: int, columns: int) -> torch.Tensor:
        return 0.02 * torch.randn(rows, columns, device=self.device, dtype=torch.bfloat16)

    def cache(self, num_blocks: int) -> torch.Tensor:
        """KV `[blocks, layers, 2, tokens, KV heads, head]`. No request has block 0."""
        shape = self.shape
        size = (num_blocks + 1, shape.num_layers, 2, BLOCK_SIZE, shape.num_kv_heads, shape.head)
        return torch.zeros(size, device=self.device, dtype=torch.bfloat16)

    def forward(self, cache: torch.Tensor, start: int, stop: int) -> float:
        """Compute the tokens from `start` to `stop`, which are multiples of a block, and wait for the result. `cache`
        has the KV of earlier tokens."""
        shape = self.shape
        kv_width = shape.num_kv_heads * shape.head
        width = [shape.num_heads * shape.head, kv_width, kv_width]
        blocks = slice(1 + start // BLOCK_SIZE, 1 + stop // BLOCK_SIZE)
        given = torch.randn(stop - start, shape.hidden, device=self.device, dtype=torch.bfloat16)
        for number, (attend, merge, widen, narrow) in enumerate(self._layers):
            normed = functional.rms_norm(given, (shape.hidden,))
            queries, *written = torch.split(functional.linear(normed, attend), width, -1)
            for place, new in enumerate(written):
                cache[blocks, number, place] = new.view(-1, BLOCK_SIZE, shape.num_kv_heads, shape.head)
            keys, values = (
                cache[1 : blocks.stop, number, place].reshape(-1, shape.num_kv_heads, shape.head).transpose(0, 1)[None]
                for place in range(2)
            )
            asked = queries.view(-1, shape.num_heads, shape.head).transpose(0, 1)[None]
            # The last block attends to all tokens before it. Its missing causal mask does not change the cost.
            found = functional.scaled_dot_product_attention(
                asked, keys, values, is_causal=start == 0, enable_gqa=True
            )  # fmt: skip
            given = given + functional.linear(found[0].transpose(0, 1).reshape(stop - start, -1), merge)
            gate, up = functional.linear(functional.rms_norm(given, (shape.hidden,)), widen).chunk(2, -1)
            given = given + functional.linear(functional.silu(gate) * up, narrow)
        return float(given[-1].float().sum().item())


class StoredPrompt:
    """A prompt of `num_tokens` whose KV, except for the last block, has a place in host memory."""

    def __init__(self, model: Model, options: CudaOptions, num_tokens: int) -> None:
        self._model, self._num_tokens = model, num_tokens
        self._num_blocks = num_tokens // BLOCK_SIZE
        self._cache = model.cache(self._num_blocks)
        rows = self._cache.view(self._num_blocks + 1, -1)
        self._transport = LocalTransport(rows, partial(CudaBackend, options=options))
        self._completions: SimpleQueue[Completion] = SimpleQueue()
        self._job_ids = itertools.count(1)
        self._transport.open(self._num_blocks, verify=False, deliver=self._completions.put, env=Env())
        self._on_host = array("i", range(self._num_blocks - 1))
        self._on_device = array("i", range(1, self._num_blocks))

    @property
    def num_bytes(self) -> int:
        """Number of bytes that a load moves."""
        return len(self._on_host) * self._transport.block_bytes

    def compute(self) -> None:
        self._model.forward(self._cache, 0, self._num_tokens)

    def compute_last(self) -> None:
        self.load()
        self._model.forward(self._cache, self._num_tokens - BLOCK_SIZE, self._num_tokens)

    def store(self) -> None:
        self._move(Tier.DEVICE, Tier.HOST, self._on_device, self._on_host)

    def load(self) -> None:
        self._move(Tier.HOST, Tier.DEVICE, self._on_host, self._on_device)

    def _move(self, source: Tier, destination: Tier, froms: array[int], tos: array[int]) -> None:
        self._transport.launch(TransferPlan(next(self._job_ids), source, destination, froms, tos), None)
        completion = self._completions.get(timeout=60)
        assert completion.outcome is Outcome.LANDED, completion

    def close(self) -> None:
        assert self._transport.close(timeout_s=10)
