"""The counts of a soak, and its verdict."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import attrs
import numpy as np

__all__ = ["Sample", "SoakResult"]

FEWEST_JUDGED = 3000
"""Fewest requests for a verdict on the slope of the memory. Over fewer, it says more about the start of the process
than about leaks."""
MAX_SLOPE = 0.2
"""MB (10**6 bytes) per thousand requests."""


@attrs.frozen
class Sample:
    num_requests: int
    """Requests that have ended so far."""
    rss_bytes: int
    num_fds: int
    num_threads: int

    @classmethod
    def take(cls, num_requests: int) -> Sample:
        rss = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return cls(num_requests, rss, len(os.listdir("/proc/self/fd")), threading.active_count())


@attrs.frozen
class SoakResult:
    """What a run has seen. It has passed if there is no problem."""

    backend: str
    seed: int
    wall_s: float
    num_requests: int
    num_done: int
    num_ended_early: dict[str, int]
    """By what ended them. `gave way`: only requests waiting for more room held any, and this was the youngest."""
    blocks_checked: int
    blocks_loaded: int
    blocks_stored: int
    blocks_verified: int
    blocks_evicted: int
    num_failed_forwards: int
    num_resets: int
    num_rests: int
    max_waiting: int
    max_pinned_at_rest: int
    samples: list[Sample] = attrs.field(repr=False)
    found: list[str]
    """What went wrong while it ran."""
    memory: str = "cpu"
    """Where the KV was."""

    @property
    def judged(self) -> list[Sample]:
        """The samples after the first quarter of the requests."""
        return [sample for sample in self.samples if sample.num_requests >= self.num_requests / 4] or self.samples[-1:]

    @property
    def slope(self) -> float:
        """Growth of resident memory after the warm-up, by least squares, in MB (10**6 bytes) per thousand requests."""
        requests = np.array([sample.num_requests for sample in self.judged])
        rss = np.array([sample.rss_bytes for sample in self.judged])
        spread = requests - requests.mean()
        return float((spread * (rss - rss.mean())).sum() / max((spread**2).sum(), 1e-9)) * 1e3 / 1e6

    @property
    def problems(self) -> list[str]:
        return [*self.found, *self._not_flat(), *self._never_seen()]

    @property
    def has_passed(self) -> bool:
        return not self.problems

    def _not_flat(self) -> list[str]:
        fds = [sample.num_fds for sample in self.judged]
        problems = [f"file descriptors: {min(fds)} to {max(fds)}"] if min(fds) != max(fds) else []
        if self.num_requests >= FEWEST_JUDGED and self.slope >= MAX_SLOPE:
            problems.append(f"resident memory: {self.slope:.2f} MB per thousand requests")
        return problems

    def _never_seen(self) -> list[str]:
        """Events that a whole run must have and this one never had. A run that a problem cut short may miss any."""
        names = ("blocks_loaded", "blocks_stored", "blocks_verified", "blocks_evicted", "max_waiting", "num_rests")
        return [] if self.found else [f"never happened: {name}" for name in names if not getattr(self, name)]

    def table(self) -> str:
        """The figures as text, one line each."""
        rows = list(self._rows())
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:{width}}  {value}" for name, value in rows)

    def _rows(self) -> list[tuple[str, str]]:
        early = [(f"  ended early: {name}", f"{number:,}") for name, number in sorted(self.num_ended_early.items())]
        names = ("checked", "loaded", "stored", "verified", "evicted")
        blocks = [(f"blocks {name}", f"{getattr(self, f'blocks_{name}'):,}") for name in names]
        judged = "" if self.num_requests >= FEWEST_JUDGED else " (not judged: too short a run)"
        rss = [sample.rss_bytes / 1e6 for sample in (self.judged[0], self.judged[-1])]
        return [
            ("backend, memory, seed, seconds", f"{self.backend}, {self.memory}, {self.seed}, {self.wall_s:.1f}"),
            ("requests", f"{self.num_requests:,}"),
            ("  done", f"{self.num_done:,}"),
            *early,
            *blocks,
            ("failed forwards, resets", f"{self.num_failed_forwards:,}, {self.num_resets}"),
            ("most waiting for room", f"{self.max_waiting}"),
            ("rests, most pinned at one", f"{self.num_rests}, {self.max_pinned_at_rest}"),
            ("resident MB, warm and last", f"{rss[0]:.1f}, {rss[1]:.1f}"),
            ("slope, MB per 1,000 requests", f"{self.slope:+.3f}{judged}"),
            ("descriptors, first/last/most", _span([sample.num_fds for sample in self.samples])),
            ("threads, first/last/most", _span([sample.num_threads for sample in self.samples])),
            ("verdict", "passed" if self.has_passed else "FAILED"),
            *(("  problem", problem) for problem in self.problems[:8]),
        ]

    def as_json(self) -> str:
        more = {"slope_mb_per_1000": self.slope, "problems": self.problems, "has_passed": self.has_passed}
        return json.dumps({**attrs.asdict(self), **more}, indent=1)


def _span(values: list[int]) -> str:
    return f"{values[0]}/{values[-1]}/{max(values)}"
