"""A runtime with metrics, a load for it, and checks of every scrape."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import attrs
import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from aoffload import KVCacheGroup, OffloadConfig, OffloadRuntime
from aoffload.ledger import Observer, Observers
from aoffload.metrics import Metrics, MetricsCollector
from aoffload.top.command import Look

BACKENDS = [pytest.param(("asyncio", {}), id="asyncio"), pytest.param(("trio", {}), id="trio")]
BLOCK = 4
GUARD_S = 60.0
"""Never waited for in full unless something hangs that must not."""


@attrs.frozen
class Scrape:
    """What one scrape has shown: samples by name and labels."""

    values: dict[tuple[str, frozenset[tuple[str, str]]], float]

    @classmethod
    def of(cls, registry: CollectorRegistry) -> Scrape:
        families = text_string_to_metric_families(generate_latest(registry).decode())
        samples = [sample for family in families for sample in family.samples]
        values = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
        assert len(values) == len(samples), "a series is shown twice"
        return cls(values)

    def sum(self, name: str, **labels: str) -> float:
        """Over every series of `name` that has `labels`."""
        wanted = labels.items()
        found = [value for (its_name, its), value in self.values.items() if its_name == name and wanted <= its]
        assert found, f"{name} {labels} is not shown"
        return sum(found)

    def check(self) -> None:
        """The laws that hold between two calls of a runtime, and at no other time."""
        for tier in ("device", "host"):
            assert self.sum("aoffload_blocks", tier=tier) == self.sum("aoffload_pool_blocks", tier=tier)
        assert min(value for (name, _), value in self.values.items() if name == "aoffload_blocks") >= 0
        live, over = self.sum("aoffload_requests"), self.sum("aoffload_requests_finished_total")
        assert self.sum("aoffload_requests_admitted_total") == live + over
        assert self.sum("aoffload_requests_waiting") <= live
        left = self.sum("aoffload_request_seconds_count", state="running")
        assert left >= self.sum("aoffload_requests_finished_total", outcome="done")

    def check_follows(self, earlier: Scrape) -> None:
        """Nothing that counts goes back."""
        counting = ("_total", "_count", "_bucket", "_sum")
        for key, value in earlier.values.items():
            assert not key[0].endswith(counting) or self.values[key] >= value, key


@attrs.frozen
class Measured:
    runtime: OffloadRuntime
    metrics: Metrics
    registry: CollectorRegistry
    collector: MetricsCollector

    def scrape(self) -> Scrape:
        return Scrape.of(self.registry)


@asynccontextmanager
async def measured(
    num_blocks: int = 8,
    *,
    others: tuple[Observer, ...] = (),
    timeout_s: float = GUARD_S,
    transport: Any = None,
    **options: Any,
) -> AsyncIterator[Measured]:
    """A runtime of `num_blocks` usable device blocks, with a registry of its own. `others` are told first."""
    metrics = Metrics()
    config = OffloadConfig(groups=[KVCacheGroup("all", block_size=BLOCK)], **{"num_host_blocks": 16, **options})
    caches = torch.zeros(num_blocks + 1, 8) if transport is None else None
    async with OffloadRuntime(config, caches, transport=transport, observers=[*others, metrics]) as runtime:
        registry, collector = CollectorRegistry(), MetricsCollector(runtime, metrics, timeout_s)
        registry.register(collector)
        yield Measured(runtime, metrics, registry, collector)


def prompt(seed: int, num_tokens: int) -> list[int]:
    """Token ids of which no prefix is shared with another seed."""
    return [seed * 100_000 + index for index in range(num_tokens)]


async def serve(runtime: OffloadRuntime, token_ids: list[int], **options: Any) -> int:
    """One request from its match to its commit; how many tokens it found ready."""
    async with runtime.request(token_ids, **options) as request:
        await request.allocate()
        num_ready = await request.load()
        request.commit(len(token_ids))
        return num_ready
    return 0


async def client(runtime: OffloadRuntime, rng: random.Random, num_requests: int) -> None:
    """Conversations over a few prompts; some turns are given up somewhere."""
    for _ in range(num_requests):
        token_ids = prompt(rng.randrange(4), rng.randint(1, 24))
        with anyio.CancelScope() as scope:
            async with runtime.request(token_ids) as request:
                await request.allocate()
                await request.load()
                if rng.random() < 0.3:
                    rng.choice([scope.cancel, request.cancel])()
                await anyio.lowlevel.checkpoint()
                request.commit(len(token_ids))


def registry_of(runtime: OffloadRuntime) -> CollectorRegistry:
    """Of a runtime that is open already."""
    moves, registry, metrics = runtime.ledger.moves, CollectorRegistry(), Metrics(runtime.env)
    moves.observer = Observers(moves.observer, metrics)  # type: ignore[arg-type]
    moves.__post_init__()
    registry.register(MetricsCollector(runtime, metrics))
    return registry


def scraped(registry: CollectorRegistry) -> Look:
    return Look.of(generate_latest(registry).decode(), 0.0)
