"""The number of engine steps that copies take, on simulated links, so that no figure depends on the machine.

An engine computes a prompt of 32,768 tokens in four steps, with the KV of Llama-8B (2 MiB a block of 16 tokens), and
loads it again while it decodes. A step submits copies and settles those that have ended. The limit is the time that the
link needs, in whole steps, and one more step to settle the last copy.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator

import attrs
import numpy as np

from aoffload import HostCache, KVCacheGroup, OffloadConfig, Tier
from aoffload.ledger import Completion, CopyQueue, Outcome, Prefix, Root, TransferPlan
from aoffload.transport import Fence

from .harness import Row
from .peer import Peer

__all__ = ["Stepping", "link_step_rows", "run"]

LINKS = (50e9, 5e9, 2e9)
BLOCK, BLOCK_BYTES, NUM_TOKENS, STEP_TOKENS = 16, 2 << 20, 32768, 8192
PREFILL_S, DECODE_S = 0.35, 0.015
"""Durations of a step that computes 8,192 tokens, and of a step that decodes, on one GPU."""


def run(vllm: Peer | None = None) -> Iterator[Row]:
    yield from link_step_rows()


def link_step_rows() -> Iterator[Row]:
    for link in LINKS:
        steps = Stepping(link)
        found = steps.compute()
        name = f"32,768 tokens, link of {link / 1e9:.0f} GB/s"
        yield Row(
            name=f"{name}: stored", value=steps.num_stored_tokens, unit="tokens", against="computed", limit=NUM_TOKENS,
            ratio=steps.num_stored_tokens / NUM_TOKENS, wanted=1.0,
        )  # fmt: skip
        yield _row(f"{name}: steps until no block is held", *found)
        yield _row(f"{name}: steps of a load", *steps.load())
        yield _row(f"{name}: steps of a load in a fresh process", *Stepping(link, is_fresh=True).load())


def _row(name: str, num_steps: int, least: int) -> Row:
    ratio = num_steps / max(1, least)
    return Row(
        name=name, value=num_steps, unit="steps", against="the link needs", limit=least, ratio=ratio, wanted=1.25,
        is_at_most=True,
    )  # fmt: skip


@attrs.define(eq=False)
class Link:
    """Copies one job after the other in each direction, in the time that a link of `bytes_per_s` takes."""

    bytes_per_s: float
    now: float = 0.0
    _busy_until: dict[Tier, float] = attrs.field(factory=dict)
    _under_way: list[tuple[float, TransferPlan]] = attrs.field(factory=list)

    def launch(self, plan: TransferPlan, after: Fence | None) -> None:
        begins = max(self.now, self._busy_until.get(plan.destination, 0.0))
        ends = begins + plan.num_blocks * BLOCK_BYTES / self.bytes_per_s
        self._busy_until[plan.destination] = ends
        self._under_way.append((ends, plan))

    def ended(self) -> list[TransferPlan]:
        over = [plan for ends, plan in self._under_way if ends <= self.now]
        self._under_way = [(ends, plan) for ends, plan in self._under_way if ends > self.now]
        return over


@attrs.define(eq=False)
class Blocks:
    """The blocks of the engine. Counts those that copies hold."""

    num_held: int = 0

    def hold(self, block_ids: array[int]) -> None:
        self.num_held += len(block_ids)

    def give(self, block_ids: array[int]) -> None:
        self.num_held -= len(block_ids)

    def find(self, request_id: str, group: int, start: int, stop: int) -> range:
        """Only the request uses the blocks, so each of them still has its KV."""
        return range(1 + start, 1 + stop)


class Stepping:
    """An engine that drives a ledger and a copy queue once a step. `is_fresh`: the queue has launched nothing yet."""

    def __init__(self, bytes_per_s: float, *, is_fresh: bool = False) -> None:
        config = OffloadConfig(groups=[KVCacheGroup("full", block_size=BLOCK)], num_host_blocks=4096)
        self.link, self.blocks = Link(bytes_per_s), Blocks()
        self.ledger = HostCache(config, 16385, self.blocks, block_bytes=BLOCK_BYTES, clock=lambda: self.link.now)
        self.tokens = np.random.default_rng(0).integers(0, 50000, NUM_TOKENS + 1)
        self.tables = [range(1, NUM_TOKENS // BLOCK + 1)]
        self.queue = self._queue(config)
        if is_fresh:
            self.compute()
            self.queue = self._queue(config)

    def _queue(self, config: OffloadConfig) -> CopyQueue:
        return CopyQueue(self.ledger, self.link, config, clock=lambda: self.link.now, block_bytes=BLOCK_BYTES)

    def step(self, seconds: float) -> None:
        self.link.now += seconds
        for plan in self.link.ended():
            self.queue.deliver(Completion(plan.job_id, Outcome.LANDED, plan.num_blocks))
        self.queue.advance()
        self.queue.submit(self.ledger.offer_deferred())

    def compute(self) -> tuple[int, int]:
        """Compute and store the prompt. Returns the steps until no block is held, and the steps that the link needs."""
        self.step(0.0)
        prefix = Prefix.of(Root("llama"), self.tokens)
        request = self.ledger.admit(prefix, num_device_tokens=0, reads_cache=False)
        for stop in range(STEP_TOKENS, NUM_TOKENS + 1, STEP_TOKENS):
            self.queue.submit(self.ledger.offer(request, stop, self.tables))
            self.step(PREFILL_S)
        self.ledger.release(request)
        left_s = (NUM_TOKENS - self.num_stored_tokens) // BLOCK * BLOCK_BYTES / self.link.bytes_per_s
        return self._until_idle(), math.ceil(left_s / DECODE_S) + bool(left_s)

    def load(self) -> tuple[int, int]:
        """Load the prompt again. Returns the steps that it takes, and the steps that the link needs."""
        request = self.ledger.admit(Prefix.of(Root("llama"), self.tokens), num_device_tokens=0)
        assert request.match.num_host_tokens == NUM_TOKENS
        self.queue.submit(self.ledger.plan_load(request, into=self.tables))
        num_steps = self._until_idle()
        self.ledger.release(request)
        return num_steps, math.ceil(NUM_TOKENS // BLOCK * BLOCK_BYTES / self.link.bytes_per_s / DECODE_S) + 1

    def _until_idle(self) -> int:
        num_steps = 0
        while self.ledger.jobs.unsettled or self.ledger.deferred_requests:
            self.step(DECODE_S)
            num_steps += 1
        return num_steps

    @property
    def num_stored_tokens(self) -> int:
        return self.ledger.lookup(Prefix.of(Root("llama"), self.tokens)).num_host_tokens
