"""A load layer by layer beside a load block by block: the time until the first layer of a forward may run, and the time
of the whole load."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from queue import SimpleQueue

import torch

from aoffload import Tier
from aoffload._reference.engine.layers import layer_regions
from aoffload._transfer.fences import RegionFences
from aoffload.cuda import CudaBackend, CudaOptions
from aoffload.ledger import Completion, Outcome, TransferPlan
from aoffload.transport import Env, LocalTransport

from .cuda_copying import ENGINE, KIB, SECONDS, cuda_device
from .harness import Row, Sample, Subject, interleave, timed
from .peer import Peer
from .sizes import sized

__all__ = ["region_rows", "run"]

NUM_LAYERS = 32
SLOT_BYTES = sized(64 * KIB, KIB)
"""Bytes of one layer of an 8B model in a block of 16 tokens."""
NUM_BLOCKS = (8, 64, 256)


def run(vllm: Peer | None = None) -> Iterator[Row]:
    """All rows. Without a CUDA device, no rows and a message."""
    if (device := cuda_device("cuda_regions")) is not None:
        yield from region_rows(device)


def region_rows(
    device: torch.device,
    options: CudaOptions = ENGINE,
    sizes: tuple[int, ...] = NUM_BLOCKS,
    seconds: float = SECONDS / 3,
) -> Iterator[Row]:
    with closing(LayeredLoads(device, options, max(sizes))) as loads:
        for num_blocks in sizes:
            subjects: dict[str, Subject] = {
                "by block": lambda n=num_blocks: timed(lambda: loads.load(n)),  # type: ignore[misc]
                "by layer": lambda n=num_blocks: timed(lambda: loads.load_by_layer(n)),  # type: ignore[misc]
                "first layer": lambda n=num_blocks: loads.first_layer(n),  # type: ignore[misc]
            }
            found = interleave(subjects, seconds=seconds)
            about = f"load of {num_blocks} blocks of {NUM_LAYERS} layers"
            for name in ("first layer", "by layer"):
                ours, whole = found[name], found["by block"]
                yield Row(
                    name=f"{about}, {name}", value=ours.median_s * 1e6, unit="us", spread=ours.spread,
                    against="all of it, by block", limit=whole.median_s * 1e6, ratio=ours.median_s / whole.median_s,
                )  # fmt: skip


class LayeredLoads:
    """Loads of the first blocks of a pool whose rows have a slot for each layer."""

    def __init__(self, device: torch.device, options: CudaOptions, num_blocks: int) -> None:
        pool = torch.zeros(num_blocks + 1, NUM_LAYERS, SLOT_BYTES, dtype=torch.uint8, device=device)
        idle = torch.cuda.Stream() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._transport = LocalTransport(
            layer_regions(pool), partial(CudaBackend, compute_stream=idle, options=options)
        )  # fmt: skip
        self._completions: SimpleQueue[Completion] = SimpleQueue()
        self._job_ids = itertools.count(1)
        self._transport.open(num_blocks, verify=False, deliver=self._completions.put, env=Env())

    def load(self, num_blocks: int) -> None:
        self._transport.launch(self._plan(next(self._job_ids), num_blocks), None)
        self._landed()

    def load_by_layer(self, num_blocks: int) -> None:
        self._watched(num_blocks)
        self._landed()

    def first_layer(self, num_blocks: int) -> Sample:
        """Time until a thread that waits for the first layer continues."""
        took = timed(lambda: self._watched(num_blocks).fences[0].synchronize())
        self._landed()
        return took

    def _watched(self, num_blocks: int) -> RegionFences:
        job_id, fences = next(self._job_ids), RegionFences(NUM_LAYERS)
        self._transport.watch(job_id, fences)
        self._transport.launch(self._plan(job_id, num_blocks), None)
        return fences

    @staticmethod
    def _plan(job_id: int, num_blocks: int) -> TransferPlan:
        on_host, on_device = array("i", range(num_blocks)), array("i", range(1, num_blocks + 1))
        return TransferPlan(job_id, Tier.HOST, Tier.DEVICE, on_host, on_device)

    def _landed(self) -> None:
        completion = self._completions.get(timeout=60)
        assert completion.outcome is Outcome.LANDED, completion

    def close(self) -> None:
        assert self._transport.close(timeout_s=10)
