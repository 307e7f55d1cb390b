"""Large matrix products beside copies at full rate in both directions, each compared with the same alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from aoffload.cuda import CudaOptions
from aoffload.ledger import Direction

from .cuda_copying import NUM_BLOCKS_MOVED, SECONDS, Copying, cuda_device, share_row
from .harness import Measured, Row, Sample, interleave, timed
from .peer import Peer
from .sizes import sized

__all__ = ["overlap_rows", "run", "traffic"]

PRODUCT_SIDE = sized(8192, 64)
NUM_PRODUCTS = 40


def run(vllm: Peer | None = None) -> Iterator[Row]:
    """All rows. Without a CUDA device, no rows and a message."""
    if (device := cuda_device("cuda_overlap")) is not None:
        yield from overlap_rows(device, CudaOptions())


def overlap_rows(
    device: torch.device, options: CudaOptions, num_moved: int = NUM_BLOCKS_MOVED, seconds: float = SECONDS
) -> Iterator[Row]:
    """Large matrix products with copies at full rate in both directions, beside the same alone, and the rate of those
    copies."""
    left, right = (torch.randn(PRODUCT_SIDE, PRODUCT_SIDE, dtype=torch.bfloat16, device=device) for _ in range(2))

    def multiply() -> None:
        for _ in range(NUM_PRODUCTS):
            torch.mm(left, right)

    moved: list[Sample] = []
    with Copying(device, options, piece_bytes=64 * 1024, num_moved=num_moved) as copying:

        def beside() -> Sample:
            with traffic(copying, moved):
                return _timed_by_device(multiply)

        found = interleave({"alone": lambda: _timed_by_device(multiply), "beside": beside}, seconds=2 * seconds)
        yield share_row("matrix products beside copies both ways", NUM_PRODUCTS, "1/s", found, "alone", "beside", 0.97)
        copies = {"beside": Measured.of(moved)}
        copies |= interleave({"alone": lambda: timed(lambda: copying.move(*Direction))}, seconds=seconds)
        gigabytes = 2 * copying.gigabytes
        yield share_row("the copies beside those products", gigabytes, "GB/s", copies, "alone", "beside", 0.9)


def _timed_by_device(work: Callable[[], None]) -> Sample:
    """Timed by the device, on the stream of the work alone."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    work()
    end.record()
    end.synchronize()
    return Sample(start.elapsed_time(end) / 1e3, 0.0)


@contextmanager
def traffic(
    copying: Copying, moved: list[Sample], directions: tuple[Direction, ...] = tuple(Direction)
) -> Iterator[None]:
    """Copy all blocks in `directions` repeatedly, from before the block is entered to its end. The times go to `moved`.

    Raises the error that ended the copies early, because the block then ran without copies.
    """
    has_begun, is_over = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def feed() -> None:
        try:
            while not is_over.is_set():
                moved.append(timed(lambda: copying.move(*directions)))
                has_begun.set()
        except BaseException as error:  # noqa: BLE001 - raised below, in the thread that measures
            errors.append(error)
        finally:
            has_begun.set()

    feeder = threading.Thread(target=feed)
    feeder.start()
    has_begun.wait()
    try:
        yield
    finally:
        is_over.set()
        feeder.join()
    if errors:
        raise errors[0]
