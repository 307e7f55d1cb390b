"""Synthetic traces that are hard for an eviction order: loops, scans, drifts, phases. The module also has their common
parts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import count

import numpy as np

from aoffload.plan.trace import Trace, TracedRequest

__all__ = ["MADE", "made"]

LENGTH = 20
"""Blocks of most prompts."""
Draw = random.Random
Prompts = Iterator[tuple[int, ...]]
"""Names of blocks. The whole tuple up to a name identifies the prefix."""


def _prompt(name: int, length: int = LENGTH, shared: int = 0) -> tuple[int, ...]:
    return (*(-1 - at for at in range(shared)), *(name * 1000 + at for at in range(length - shared)))


def _fits(capacity: int) -> int:
    return max(2, capacity // LENGTH)


def loop(draw: Draw, capacity: int) -> Prompts:
    """A loop over a fifth more than the capacity. LRU is the worst order."""
    while True:
        yield from (_prompt(name) for name in range(_fits(capacity) * 6 // 5))


def fitting_loop(draw: Draw, capacity: int) -> Prompts:
    """A loop over nine tenths of the capacity. Nothing needs to be evicted."""
    while True:
        yield from (_prompt(name) for name in range(_fits(capacity) * 9 // 10))


def scan(draw: Draw, capacity: int) -> Prompts:
    """A hot third of the capacity, between prompts that never return."""
    new = count(10_000)
    while True:
        yield _prompt(draw.randrange(_fits(capacity) // 3 + 1)) if draw.random() < 0.4 else _prompt(next(new))


def popular(draw: Draw, capacity: int) -> Prompts:
    """Popularity by Zipf's law that never changes."""
    names = range(_fits(capacity) * 5)
    weights = np.cumsum([1 / (1 + name) for name in names]).tolist()
    while True:
        yield from (_prompt(name) for name in draw.choices(names, cum_weights=weights, k=100))


def drift(draw: Draw, capacity: int) -> Prompts:
    """Popularity that shifts: prompts that were requested often do not return."""
    for number in count():
        yield _prompt(number // 12 + int(_fits(capacity) * draw.random() ** 3))


def phases(draw: Draw, capacity: int) -> Prompts:
    """A loop, then drift, then popularity, 600 requests each."""
    while True:
        for kind in (loop, drift, popular):
            prompts = kind(draw, capacity)
            yield from (next(prompts) for _ in range(600))


def talks(draw: Draw, capacity: int) -> Prompts:
    """Conversations that grow turn by turn after a shared beginning."""
    new, open_talks = count(), list[tuple[int, int]]()
    while True:
        if len(open_talks) < _fits(capacity) or draw.random() < 0.1:
            open_talks.append((next(new), draw.randint(8, 20)))
        at = int(len(open_talks) * draw.random())
        name, length = open_talks.pop(at)
        yield _prompt(name, length, shared=5)
        if length < 60:
            open_talks.append((name, length + draw.randint(1, 6)))


def deaths(draw: Draw, capacity: int) -> Prompts:
    """Each prompt is requested six times in consecutive turns and never again. Others are requested twice, most of the
    capacity apart. So a count predicts the opposite of the truth."""
    waiting: list[tuple[int, int]] = []
    for number in count():
        if number % 2:
            yield _prompt(100_000 + number // 12)
            continue
        waiting.append((number, number))
        yield _prompt(number)
        if number - waiting[0][1] > _fits(capacity) // 2:
            yield _prompt(waiting.pop(0)[0])


def turn(draw: Draw, capacity: int) -> Prompts:
    """Counts are right for 2,000 requests, and wrong afterwards."""
    first, then = scan(draw, capacity), deaths(draw, capacity)
    yield from (next(first) for _ in range(2000))
    yield from then


def uniform(draw: Draw, capacity: int) -> Prompts:
    """Random choice among twice the capacity. No order is better than another."""
    while True:
        yield _prompt(draw.randrange(2 * _fits(capacity)))


def bursts(draw: Draw, capacity: int) -> Prompts:
    """Prompts return within moments, up to eight times, or not at all."""
    new = count()
    while True:
        names = [next(new) for _ in range(8)]
        asked = [name for name in names for _ in range(draw.choice((1, 1, 2, 8)))]
        draw.shuffle(asked)
        yield from (_prompt(name, draw.randint(5, 40)) for name in asked)


def stacks(draw: Draw, capacity: int) -> Prompts:
    """Back and forth through a fourth more than the capacity. LRU is the best order."""
    names = range(_fits(capacity) * 5 // 4)
    while True:
        yield from (_prompt(name) for name in names)
        yield from (_prompt(name) for name in reversed(names))


MADE: dict[str, Callable[[Draw, int], Prompts]] = {
    kind.__name__: kind
    for kind in (
        loop, fitting_loop, scan, popular, drift, phases, talks, deaths, turn, uniform, bursts, stacks,
    )
}  # fmt: skip


def made(name: str, capacity: int, num_requests: int, seed: int = 0) -> Trace:
    """The trace of that name, for a cache of `capacity` blocks."""
    prompts, names = MADE[name](Draw(seed), capacity), dict[tuple[int, int], int]()
    requests = []
    for number, prompt in zip(range(num_requests), prompts, strict=False):
        blocks, last = [], -1
        for block in prompt:
            last = names.setdefault((last, block), len(names))
            blocks.append(last)
        requests.append(TracedRequest(float(number), 512 * len(blocks) + 1, 1, np.array(blocks, np.int32), len(blocks)))
    return Trace(name, tuple(requests), 512, len(names))
