"""A decode step beside copies. The step is launched kernel by kernel from Python, and replayed as one CUDA graph. The
copies are in pieces of several sizes by the copy engine, and by the kernel."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator

import attrs
import numpy as np
import torch

from aoffload.cuda import CudaOptions

from .cuda_ceilings import PUBLISHED_GBPS
from .cuda_copying import ENGINE, KERNEL, KIB, Copying, cuda_device
from .cuda_overlap import traffic
from .harness import Measured, Row, Sample
from .peer import Peer
from .sizes import sized

__all__ = ["Decode", "interference_rows", "run"]

SIDE = sized(4096, 64)
NUM_LAYERS = sized(32, 2)
NUM_SEQUENCES = 16
NUM_MOVED = sized(128, 1)
SECONDS_PER_ROW = sized(1.0, 0.02)
BESIDE: tuple[tuple[str, CudaOptions, int], ...] = (
    ("copies in 64 KiB", ENGINE, 64 * KIB),
    ("the kernel's copies in 16 KiB", KERNEL, 16 * KIB),
    ("copies in 16 KiB", ENGINE, 16 * KIB),
    ("copies in 1 MiB", ENGINE, 1024 * KIB),
)
MOST = {"graph": 1.03, "eager": 1.25}
"""The largest permitted ratio of a step beside copies of the copy engine to a step alone."""


def run(vllm: Peer | None = None) -> Iterator[Row]:
    """All rows. Without a CUDA device, no rows and a message."""
    if (device := cuda_device("cuda_interference")) is not None:
        yield from interference_rows(device)


def interference_rows(device: torch.device, seconds: float = SECONDS_PER_ROW) -> Iterator[Row]:
    """The median step beside copies, compared with the median of steps alone before and after, and the rate of those
    copies."""
    ways = Decode(device).ways()
    for name, options, piece_bytes in BESIDE:
        with Copying(device, options, piece_bytes, num_moved=NUM_MOVED) as copying:
            if options is KERNEL and (problem := copying.why_no_kernel()):
                print(f"cuda_interference: not beside {name}, since {problem}", file=sys.stderr)
                continue
            for way, step in ways.items():
                yield from _rows(copying, f"{way} step beside {name}", step, seconds, options is ENGINE, MOST[way])


def _rows(
    copying: Copying, name: str, step: Callable[[], None], seconds: float, is_judged: bool, most: float
) -> Iterator[Row]:
    moved: list[Sample] = []
    alone = _steps(step, seconds / 2)
    with traffic(copying, moved):
        beside = _steps(step, seconds)
    alone += _steps(step, seconds / 2)
    ours, limit = Steps.of(beside), Steps.of(alone)
    yield Row(
        name=name, value=ours.p50_s * 1e6, unit="us",
        spread=f"p99 {ours.p99_s * 1e6:.0f}, alone {limit.p99_s * 1e6:.0f}", against="alone", limit=limit.p50_s * 1e6,
        ratio=ours.p50_s / limit.p50_s, wanted=most if is_judged else None, is_at_most=True,
    )  # fmt: skip
    rate, limit_rate = 2 * copying.gigabytes / Measured.of(moved).median_s, PUBLISHED_GBPS["both ways"]
    yield Row(
        name=f"{name}: the copies", value=rate, unit="GB/s", against="vLLM, published", limit=limit_rate,
        ratio=rate / limit_rate,
    )  # fmt: skip


@attrs.frozen
class Steps:
    p50_s: float
    p99_s: float

    @classmethod
    def of(cls, took_s: list[float]) -> Steps:
        return cls(*(float(found) for found in np.percentile(took_s, (50, 99))))


def _steps(step: Callable[[], None], seconds: float) -> list[float]:
    """The time of each step until its result has arrived, as for a token that the next step needs."""
    took_s, stream = list[float](), torch.cuda.current_stream()
    end_s = time.perf_counter() + seconds
    while not took_s or time.perf_counter() < end_s:
        began_s = time.perf_counter()
        step()
        stream.synchronize()
        took_s.append(time.perf_counter() - began_s)
    return took_s


class Decode:
    """Layers of one product each, of a few sequences: bound by memory and by launches, like decoding."""

    def __init__(self, device: torch.device) -> None:
        kind = torch.bfloat16
        self._layers = [0.01 * torch.randn(SIDE, SIDE, device=device, dtype=kind) for _ in range(NUM_LAYERS)]
        self._given = torch.randn(NUM_SEQUENCES, SIDE, device=device, dtype=kind)

    def step(self) -> None:
        found = self._given
        for layer in self._layers:
            found = torch.relu(torch.mm(found, layer)) + self._given

    def ways(self) -> dict[str, Callable[[], None]]:
        """The step as a graph, and kernel by kernel."""
        warm = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        warm.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm):  # libraries allocate their memory outside of the capture
            self.step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return {"graph": graph.replay, "eager": self.step}
