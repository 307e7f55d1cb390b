"""The harness: the compared subjects take turns, so that other work on the machine slows them all.

A subject does one unit of work per call, and returns its time. Each round calls every subject once, beginning with
another one. The first rounds do not count. `calibrate` measures the machine itself, before and after: figures of two
runs can be compared only as far as their calibrations agree.
"""

from __future__ import annotations

import gc
import hashlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs
import numpy as np

__all__ = ["SAMPLE_S", "Measured", "Rounds", "Row", "Sample", "Subject", "calibrate", "interleave", "timed"]


@attrs.frozen
class Sample:
    """One unit of work: seconds of wall time, and of CPU time of the thread that did it."""

    wall_s: float
    cpu_s: float


Subject = Callable[[], Sample]
SAMPLE_S = 0.02
"""Minimum duration of a sample of short work."""


@attrs.frozen
class Measured:
    """Times of one subject, in seconds: median, tenth and ninetieth percentile, and the median CPU time."""

    median_s: float
    low_s: float
    high_s: float
    cpu_s: float
    num_samples: int

    @classmethod
    def of(cls, samples: list[Sample]) -> Measured:
        walls = [sample.wall_s for sample in samples]
        low, high = np.percentile(walls, (10, 90))
        cpu = statistics.median(sample.cpu_s for sample in samples)
        return cls(statistics.median(walls), float(low), float(high), cpu, len(samples))

    @property
    def spread(self) -> str:
        """The tenth to the ninetieth percentile, in microseconds."""
        return f"{self.low_s * 1e6:.3g}-{self.high_s * 1e6:.3g}"


@attrs.frozen(kw_only=True)
class Row:
    """One line of the table. `ratio` has to be at least `wanted`, or at most that if `is_at_most`."""

    name: str
    value: float
    unit: str
    against: str
    """The peer or limit that it is compared with, measured in the same rounds."""
    limit: float
    ratio: float
    wanted: float | None = None
    is_at_most: bool = False
    spread: str = ""

    @classmethod
    def faster(cls, name: str, ours: Measured, against: str, other: Measured, wanted: float | None) -> Row:
        """A row whose ratio is the time of `other`, divided by that of `ours`."""
        return cls(
            name=name, value=ours.median_s * 1e6, unit="us", against=against, limit=other.median_s * 1e6,
            ratio=other.median_s / ours.median_s, wanted=wanted, spread=ours.spread,
        )  # fmt: skip

    @property
    def verdict(self) -> str:
        if self.wanted is None:
            return ""
        is_met = self.ratio <= self.wanted if self.is_at_most else self.ratio >= self.wanted
        return f"{'at most' if self.is_at_most else 'at least'} {self.wanted:g}: {'met' if is_met else 'MISSED'}"

    def as_dict(self) -> dict[str, Any]:
        return {**attrs.asdict(self), "verdict": self.verdict}


def timed(work: Callable[[], object], least_s: float = 0.0) -> Sample:
    """Repeat `work` for `least_s`, an even number of times, or do it once if that is 0. Returns the time of one call.

    A single call of a few microseconds would mostly pay for CPU caches that other work has filled.
    """
    cpu, wall = time.thread_time(), time.perf_counter()
    work()
    number = 1
    while (took := time.perf_counter() - wall) < least_s or (least_s and number % 2):
        work()
        number += 1
    return Sample(took / number, (time.thread_time() - cpu) / number)


class Rounds:
    """Yields the name to be measured next, round after round. Add each sample before asking for the next name.

    for name in rounds:
        rounds.add(name, subjects[name]())
    """

    def __init__(self, names: Iterable[str], *, seconds: float, least: int = 7, warm_up: int = 2) -> None:
        self.samples: dict[str, list[Sample]] = {name: [] for name in names}
        self._seconds, self._least, self._warm_up = seconds, least, warm_up

    def __iter__(self) -> Iterator[str]:
        order = list(self.samples)
        with _no_collections():
            for _ in range(self._warm_up):
                yield from order
            for found in self.samples.values():
                found.clear()
            end, rounds = time.perf_counter() + self._seconds, 0
            while rounds < self._least or time.perf_counter() < end:
                yield from order
                order.append(order.pop(0))
                rounds += 1

    def add(self, name: str, sample: Sample) -> None:
        self.samples[name].append(sample)

    def measured(self) -> dict[str, Measured]:
        return {name: Measured.of(found) for name, found in self.samples.items()}


def interleave(subjects: Mapping[str, Subject], *, seconds: float, least: int = 7) -> dict[str, Measured]:
    """Call the subjects in turns for about `seconds`, and for at least `least` rounds."""
    rounds = Rounds(subjects, seconds=seconds, least=least)
    for name in rounds:
        rounds.add(name, subjects[name]())
    return rounds.measured()


@contextmanager
def _no_collections() -> Iterator[None]:
    """Freeze the objects that exist already, so that collections do not scan them during the measurement."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def calibrate() -> dict[str, float]:
    """The machine's speed at this moment: GB/s of a memmove, MB/s of a hash, ns of one pass of an empty loop."""
    source = np.ones(64 * 2**20, dtype=np.uint8)
    destination = np.ones_like(source)
    moved = min(timed(lambda: np.copyto(destination, source)).wall_s for _ in range(5))
    text = bytes(2**20)
    hashed = min(timed(lambda: hashlib.sha256(text).digest()).wall_s for _ in range(5))
    looped = min(timed(lambda: [None for _ in range(100_000)]).wall_s for _ in range(5))
    return {
        "memmove_gb_per_s": source.nbytes / moved / 1e9,
        "sha256_mb_per_s": len(text) / hashed / 1e6,
        "loop_ns": looped * 1e4,
    }
