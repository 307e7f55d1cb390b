"""Requests that all fit on the device: with eager stores of everything, beside a runtime that stores nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from functools import partial

import torch

from aoffload import KVCacheGroup, OffloadConfig, OffloadRuntime

from .cuda_copying import SECONDS, cuda_device, share_row
from .harness import Row, Sample, interleave
from .peer import Peer
from .sizes import sized

__all__ = ["Serving", "fitting_row", "run"]

BLOCK_SIZE = 16
BLOCKS_PER_REQUEST = 8
VALUES_PER_BLOCK = 64 * 1024
"""Values of four bytes: 256 KiB."""


def run(vllm: Peer | None = None) -> Iterator[Row]:
    """The row. Without a CUDA device, no row and a message."""
    if (device := cuda_device("cuda_fitting")) is not None:
        yield fitting_row(Serving(device))


def fitting_row(serving: Serving, seconds: float = 2 * SECONDS) -> Row:
    """Rounds of requests per second, relative to the rate without offload."""
    subjects = {policy: partial(serving.once, policy) for policy in ("eager", "off")}
    found = interleave(subjects, seconds=seconds, least=sized(5, 1))
    return share_row("requests that fit on the device", 1.0, "rounds/s", found, "off", "eager", 0.99)


class Serving:
    """Requests one after the other, each a forward of some matrix products in a worker thread, like those of an
    engine."""

    def __init__(
        self,
        device: torch.device,
        num_requests: int = sized(40, 3),
        num_products: int = sized(64, 1),
        product_side: int = sized(4096, 8),
    ) -> None:
        self._num_requests, self._num_products = num_requests, num_products
        self._pool = torch.zeros(num_requests * BLOCKS_PER_REQUEST + 1, VALUES_PER_BLOCK, device=device)
        self._matrix = torch.randn(product_side, product_side, dtype=torch.bfloat16, device=device)

    @property
    def num_blocks(self) -> int:
        """Blocks of all requests."""
        return self._num_requests * BLOCKS_PER_REQUEST

    def once(self, policy: str) -> Sample:
        """Serve all requests, and wait for all their stores."""
        return asyncio.run(self._serve(policy))

    async def _serve(self, policy: str) -> Sample:
        group = KVCacheGroup("full", block_size=BLOCK_SIZE)
        config = OffloadConfig(groups=[group], num_host_blocks=self.num_blocks, store_policy=policy)
        async with OffloadRuntime(config, self._pool) as runtime:
            began_s = time.perf_counter()
            for number in range(self._num_requests):
                await self._request(runtime, number)
            await runtime.flush()
            took_s = time.perf_counter() - began_s
            num_stored = runtime.statistics().transfers.blocks_stored
        if num_stored != (0 if policy == "off" else self.num_blocks):
            raise RuntimeError(f"{policy}: {num_stored} blocks were stored, so there is nothing to compare")
        return Sample(took_s, 0.0)

    async def _request(self, runtime: OffloadRuntime, number: int) -> None:
        num_tokens = BLOCKS_PER_REQUEST * BLOCK_SIZE
        async with runtime.request([number + 1] * num_tokens) as request:
            await request.allocate()
            await request.load()
            await runtime.run_step([request], self._forward)
            request.commit(num_tokens)

    def _forward(self) -> None:
        """Compute, and wait for the result, as for a token that the next step needs."""
        for _ in range(self._num_products):
            torch.mm(self._matrix, self._matrix)
        if self._matrix.is_cuda:
            torch.cuda.current_stream().synchronize()
