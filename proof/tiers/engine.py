"""An engine over real bytes, each of which it checks before it goes on from it."""

from __future__ import annotations

import random

import attrs
import torch

from aoffload import OffloadConfig, OffloadRuntime, Request

__all__ = ["BLOCK_TOKENS", "ByteEngine", "WrongBytes", "tokens_of"]

BLOCK_TOKENS = 16
NUMBERS = 256
"""Of eight bytes, in each of the two regions of a block: 4 KiB together."""
FIRST_TOKENS = 1000
"""Token ids that a prompt may have."""


class WrongBytes(AssertionError):  # noqa: N818 - what happened
    """A block that counts as ready holds something else than the KV of its prompt."""


def tokens_of(prompt: int, num_tokens: int) -> list[int]:
    """Prompts of one ten share their first half; no other prefix is shared."""
    half = num_tokens // 2
    shared = [prompt // 10 * FIRST_TOKENS + at % FIRST_TOKENS for at in range(half)]
    return shared + [2**30 + prompt * FIRST_TOKENS + at % FIRST_TOKENS for at in range(half, num_tokens)]


class Silent:
    """A logger that says nothing."""

    def bind(self, **values: object) -> Silent:
        return self

    def debug(self, event: str, **values: object) -> None:
        """Nothing."""

    info = warning = error = debug


@attrs.define(eq=False)
class ByteEngine:
    """KV is a number for each block, made of all tokens up to its end, in every eight bytes of it."""

    num_blocks: int
    tensors: list[torch.Tensor] = attrs.field(init=False)
    num_checked: int = attrs.field(default=0, init=False)
    num_hit: int = attrs.field(default=0, init=False)
    runtime: OffloadRuntime = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.tensors = [torch.zeros(self.num_blocks, NUMBERS, dtype=torch.int64) for _ in range(2)]

    def run_with(self, config: OffloadConfig) -> OffloadRuntime:
        self.runtime = OffloadRuntime(config, self.tensors, logger=Silent())
        return self.runtime

    async def serve(self, tokens: list[int], rng: random.Random | None = None) -> int:
        """Serve one prompt: how many of its tokens hit, each of their bytes compared."""
        async with self.runtime.request(tokens) as request:
            await request.allocate()
            num_ready = await request.load()
            self._check(request, tokens, num_ready)
            stop = len(tokens) if rng is None else rng.randint(num_ready, len(tokens))
            with self.runtime.step([request]):
                self._compute(request, tokens, num_ready, stop)
            if stop > num_ready:
                request.commit(stop)
            self.num_hit += num_ready
            return num_ready
        raise AssertionError("nobody cancels it")

    @staticmethod
    def _kv(tokens: list[int], index: int) -> int:
        return hash(tuple(tokens[: (index + 1) * BLOCK_TOKENS])) | 1

    def _check(self, request: Request, tokens: list[int], num_ready: int) -> None:
        (table,) = request.block_ids
        for index in range(num_ready // BLOCK_TOKENS):
            right = self._kv(tokens, index)
            self.num_checked += 1
            if not all(bool((tensor[table[index]] == right).all()) for tensor in self.tensors):
                raise WrongBytes(f"block {index} of {tokens[:1]} and {tokens[-1:]}, of {num_ready} tokens that hit")

    def _compute(self, request: Request, tokens: list[int], start: int, stop: int) -> None:
        (table,) = request.block_ids
        for index in range(start // BLOCK_TOKENS, -(-stop // BLOCK_TOKENS)):
            whole = (index + 1) * BLOCK_TOKENS <= stop
            for tensor in self.tensors:
                tensor[table[index]] = self._kv(tokens, index) if whole else -1
