"""What `test_cuda_nvidia` runs in a process of its own, where the driver library is the stub: NVIDIA's bindings, our
driver layer and the whole backend above it, on ordinary memory."""

from __future__ import annotations

import sys
import threading
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from copies import Copies

from aoffload.core.plan import Outcome
from aoffload.transfer.backends.cuda import CudaBackend, CudaOptions, DeviceLost, Pieces, SourceOrder
from aoffload.transfer.backends.cuda.nvidia import NvidiaDriver
from aoffload.transfer.fence import PASSED
from aoffload.transfer.region import regions_of


class StubDriver(NvidiaDriver):
    """Where torch has no device, its current stream is one of the stub's."""

    def current_stream(self) -> Any:
        if not hasattr(self, "_compute"):
            self._compute = self.create_stream()
        return self._compute

    def on_stream(self, stream: Any) -> AbstractContextManager[object]:
        return nullcontext()


def round_trip() -> None:
    """Scattered blocks of strided regions, there and back."""
    pool = torch.randint(0, 255, (16, 3, 4096), dtype=torch.uint8)
    wanted = pool.clone()
    made = CudaOptions(driver=lambda regions: StubDriver(0), kernel=lambda device: None)
    copies = Copies([pool[:, 0], pool[:, 2]], 20, partial(CudaBackend, options=made), verify=True)
    assert copies.store([3, 4, 9, 15], [7, 8, 0, 19]).outcome is Outcome.LANDED
    pool[3:].zero_()
    assert copies.load([7, 8, 0, 19], [3, 4, 9, 15]).outcome is Outcome.LANDED
    for block_id in (3, 4, 9, 15):
        assert torch.equal(pool[block_id, ::2], wanted[block_id, ::2])
        assert not pool[block_id, 1].any()
    assert copies.transport.close(20)


def pieces(num_pieces: int) -> tuple[Pieces, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    source = np.arange(num_pieces, dtype=np.uint64)
    destination = np.zeros_like(source)
    at = np.arange(num_pieces, dtype=np.uint64) * np.uint64(8)
    sizes = np.full(num_pieces, 8, dtype=np.uint64)
    addresses = (np.uint64(array.ctypes.data) for array in (source, destination))
    found = Pieces(*(address + at for address in addresses), sizes)
    return found, source, destination


def batches() -> None:
    """Both orders; every piece arrives; nothing is asked of the driver for no pieces."""
    driver = StubDriver(0)
    with driver.bound():
        stream = driver.create_stream()
        for order in SourceOrder:
            given, source, destination = pieces(1000)
            driver.copy_batch(given, order, stream)
            assert (source == destination).all()
        empty = Pieces(*(np.zeros(0, dtype=np.uint64) for _ in range(3)))
        driver.copy_batch(empty, SourceOrder.ANY, stream)
        some = Pieces(given.sources[::3], given.destinations[::3], given.sizes[::3])
        destination[:] = 2**63
        driver.copy_batch(some, SourceOrder.STREAM, stream)
        assert (destination[::3] == source[::3]).all() and (destination[1::3] == 2**63).all()
    print(driver)


def waits() -> None:
    """Other threads run while one waits in the driver."""
    driver, turns, is_over = StubDriver(0), 0, threading.Event()

    def wait() -> None:
        with driver.bound():
            event = driver.create_event()
            driver.record_event(event, driver.create_stream())
            driver.synchronize_event(event)
        is_over.set()

    threading.Thread(target=wait).start()
    while not is_over.wait(0.001):
        turns += 1
    assert turns > 20, turns


def lost() -> None:
    """A sticky error is a device that is lost; a query that is not ready is none."""
    driver = StubDriver(0)
    with driver.bound():
        event = driver.create_event()
        with pytest.raises(DeviceLost, match="cuEventRecord: CUDA_ERROR_ILLEGAL_ADDRESS"):
            driver.record_event(event, driver.create_stream())


def maps() -> None:
    """Asked of the device: 91 is what the driver calls it."""
    assert StubDriver(0).maps_host_memory


def maps_not() -> None:
    assert not StubDriver(0).maps_host_memory


def busy() -> None:
    driver = StubDriver(0)
    with driver.bound():
        event = driver.create_event()
        driver.record_event(event, driver.create_stream())
        assert driver.query_event(event) is False


def others_events() -> None:
    """A fence of another driver object is an event all the same; what is none is not."""
    one, other = StubDriver(0), StubDriver(1)
    backends = [
        CudaBackend(regions_of(torch.zeros(4, 4)), options=CudaOptions(driver=lambda regions, driver=driver: driver))
        for driver in (one, other)
    ]
    fence = backends[0].record_fence()
    assert int(other.event_of(fence)) == int(fence.event)
    assert other.event_of(PASSED) is None


if __name__ == "__main__":
    {
        "round_trip": round_trip,
        "pageable": round_trip,
        "batches": batches,
        "waits": waits,
        "lost": lost,
        "busy": busy,
        "maps": maps,
        "maps_not": maps_not,
        "others_events": others_events,
    }[sys.argv[1]]()
