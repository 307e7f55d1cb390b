"""The maximum rate of the link: one large copy of page-locked memory in each direction, and both directions at once, by
torch alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .cuda_copying import KIB, MIB, SECONDS, cuda_device
from .harness import Row, interleave, timed
from .peer import Peer
from .sizes import sized

__all__ = ["PUBLISHED_GBPS", "ceiling_rows", "run"]

NUM_BYTES = sized(KIB * MIB, 4 * MIB)
PUBLISHED_GBPS = {"load": 50.0, "store": 50.0, "both ways": 83.0}
"""Rates that vLLM has published for an H100, one direction and both directions."""


def run(vllm: Peer | None = None) -> Iterator[Row]:
    """A row for each direction. Without a CUDA device, no rows and a message."""
    if (device := cuda_device("cuda_ceilings")) is not None:
        yield from ceiling_rows(device)


def ceiling_rows(device: torch.device, num_bytes: int = NUM_BYTES, seconds: float = SECONDS / 2) -> Iterator[Row]:
    """Gigabytes per second, beside the rates that vLLM has published."""
    source, destination = (torch.empty(num_bytes, dtype=torch.uint8).pin_memory() for _ in range(2))
    there, back = (torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    copies = {"load": (there, source), "store": (destination, back)}
    streams = {way: torch.cuda.Stream() for way in copies}  # type: ignore[no-untyped-call]

    def copy(*ways: str) -> None:
        for way in ways:
            to, given = copies[way]
            with torch.cuda.stream(streams[way]):
                to.copy_(given, non_blocking=True)
        for way in ways:
            streams[way].synchronize()

    named = {"load": ("load",), "store": ("store",), "both ways": ("load", "store")}
    subjects = {name: (lambda ways=ways: timed(lambda: copy(*ways))) for name, ways in named.items()}
    found = interleave(subjects, seconds=seconds)
    for name, ways in named.items():
        ours, gigabytes, published = found[name], len(ways) * num_bytes / 1e9, PUBLISHED_GBPS[name]
        yield Row(
            name=f"one large copy, {name}", value=gigabytes / ours.median_s, unit="GB/s",
            spread=f"{gigabytes / ours.high_s:.3g}-{gigabytes / ours.low_s:.3g}", against="vLLM, published",
            limit=published, ratio=gigabytes / ours.median_s / published,
        )  # fmt: skip
