"""What `test_cuda_nvidia` runs in processes of their own, where the driver library is the stub: NVIDIA's bindings, our
driver layer and the whole backend above it, on ordinary memory."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from copies import Copies

from aoffload._kernel.states import Outcome
from aoffload._transfer.backends.cuda.backend import CudaBackend, CudaOptions
from aoffload._transfer.backends.cuda.driver import (
    LOST_CODES,
    CudaError,
    DeviceLost,
    Pieces,
    SourceOrder,
    StreamCaptured,
)
from aoffload._transfer.backends.cuda.nvidia import NvidiaDriver
from aoffload._transfer.backends.cuda.plain import TorchDriver
from aoffload._transfer.fences import PASSED
from aoffload._transfer.region import regions_of
from aoffload.errors import DeviceGone

MOST_S = 120
"""What takes longer hangs, and is ended."""


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
            given, source, destination = pieces(4096)
            driver.copy_batch(given, order, stream)
            assert (source == destination).all()
        empty = Pieces(*(np.zeros(0, dtype=np.uint64) for _ in range(3)))
        driver.copy_batch(empty, SourceOrder.ANY, stream)
        some = Pieces(given.sources[::3], given.destinations[::3], given.sizes[::3])
        destination[:] = 2**63
        driver.copy_batch(some, SourceOrder.STREAM, stream)
        assert (destination[::3] == source[::3]).all() and (destination[1::3] == 2**63).all()
    print(driver)


def opened(pool: torch.Tensor, num_host_blocks: int, **options: Any) -> Copies:
    options = {"driver": lambda regions: StubDriver(0), "kernel": lambda device: None, **options}
    return Copies(pool, num_host_blocks, partial(CudaBackend, options=CudaOptions(**options)))


def stored_and_loaded(**options: Any) -> None:
    """Five batches each way, of blocks that are no neighbours; two are under way at most."""
    num_blocks = 4 * 4096 + 1000
    pool = torch.arange(2 * num_blocks, dtype=torch.int64)[:, None].clone()
    copies = opened(pool, num_blocks, max_batches=2, **options)
    blocks, hosts = list(range(1, 2 * num_blocks, 2)), list(range(num_blocks))
    assert copies.store(blocks, hosts).outcome is Outcome.LANDED
    pool.zero_()
    assert copies.load(hosts, blocks).outcome is Outcome.LANDED
    assert pool[:, 0].tolist() == [number if number % 2 else 0 for number in range(2 * num_blocks)]
    assert copies.transport.close(20)


def one_by_one() -> None:
    stored_and_loaded(batched=False)


def crossing() -> None:
    """A driver that takes no piece that lies in two physical allocations, unless it is copied alone."""
    pool = torch.arange(8, dtype=torch.int64)[:, None].repeat(1, 1024)
    copies = opened(pool, 4)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        assert copies.store([2, 3, 6], [0, 1, 2]).outcome is Outcome.LANDED
        assert copies.load([0, 1, 2], [4, 5, 7]).outcome is Outcome.LANDED
    assert pool[:, -1].tolist() == [0, 1, 2, 3, 2, 3, 6, 6]
    assert ["refused a batch of copies" in str(warning.message) for warning in given] == [True]
    assert copies.transport.close(20)


def fails_midway() -> None:
    """The driver answers with an error from the second copy on, and after it a third is tried."""
    pool = torch.arange(8, dtype=torch.int64)[:, None].repeat(1, 4)
    copies = opened(pool, 4)
    assert copies.store([1], [0]).outcome is Outcome.LANDED
    os.environ["STUB_LOST"] = os.environ["STUB_LOST_LATER"]
    copies.launch_store([2], [1], after=PASSED)
    failed = copies.next()
    del os.environ["STUB_LOST"]
    print(failed.outcome.name, failed.error)
    try:
        copies.launch_store([3], [2], after=PASSED)
    except DeviceGone as error:
        print(error)
    else:
        print(copies.next().outcome.name)
    assert copies.transport.close(20)


def streams_of_torch_alone() -> None:
    """Streams of a driver that has torch alone; torch has no device here, so it gets a stream class."""
    torch.cuda.ExternalStream = lambda handle, device: SimpleNamespace(cuda_stream=handle)  # type: ignore[assignment,misc]
    driver = TorchDriver(regions_of(torch.zeros(4, 4)))
    streams = [driver.create_stream() for _ in range(3)]
    assert len({stream.cuda_stream for stream in streams}) == 3
    for stream in streams:
        driver.destroy_stream(stream)
    driver.destroy_stream(SimpleNamespace(cuda_stream=32))  # one of torch's


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


def refused(call: Callable[[StubDriver, Any, Any], object]) -> CudaError:
    """What a call on an event and a stream of a driver raises."""
    driver = StubDriver(0)
    with driver.bound():
        with pytest.raises(CudaError) as raised:
            call(driver, driver.create_event(), driver.create_stream())
    return raised.value


def lost() -> None:
    """A sticky error is a device that is lost, whichever call it is that hears of it."""
    code = int(os.environ["STUB_LOST"])
    assert code in LOST_CODES
    found = [
        refused(lambda driver, event, stream: driver.record_event(event, stream)),
        refused(lambda driver, event, stream: driver.wait_event(stream, event)),
        refused(lambda driver, event, stream: driver.query_event(event)),
        refused(lambda driver, event, stream: driver.synchronize_event(event)),
        refused(lambda driver, event, stream: driver.copy_batch(pieces(3)[0], SourceOrder.ANY, stream)),
        refused(lambda driver, event, stream: driver.copy_each(pieces(3)[0], stream)),
    ]
    assert {type(error) for error in found} == {DeviceLost}
    print(*{str(error).rpartition(": ")[2] for error in found})


def refuses() -> None:
    """An error that is no loss, and one that the bindings have no name for, since the driver is newer."""
    found = [
        refused(lambda driver, event, stream: driver.query_event(event)),
        refused(lambda driver, event, stream: driver.wait_event(stream, event)),
        refused(lambda driver, event, stream: driver.copy_batch(pieces(3)[0], SourceOrder.ANY, stream)),
    ]
    assert {type(error) for error in found} == {CudaError}
    print(*found, sep="\n")


def default_stream() -> None:
    """Torch calls it 0, and means the one that all threads share."""
    assert int(StubDriver(0).stream_of(SimpleNamespace(cuda_stream=0))) == 1  # type: ignore[arg-type]
    assert int(StubDriver(0).stream_of(SimpleNamespace(cuda_stream=32))) == 32  # type: ignore[arg-type]


def captured() -> None:
    """A stream that a graph is made of takes no fence, and waits for none; others do."""
    driver = StubDriver(0)
    forward, other = SimpleNamespace(cuda_stream=int(os.environ["STUB_CAPTURED"])), SimpleNamespace(cuda_stream=32)
    backend = CudaBackend(
        regions_of(torch.zeros(4, 4)), compute_stream=forward, options=CudaOptions(driver=lambda regions: driver)  # type: ignore[arg-type]
    )  # fmt: skip
    with pytest.raises(StreamCaptured, match="commit and load outside of the capture"):
        backend.record_fence()
    with driver.bound():
        fence = backend._events.record(driver.create_stream())
    with pytest.raises(StreamCaptured):
        fence.wait(forward)  # type: ignore[arg-type]
    fence.wait(other)  # type: ignore[arg-type]


def captured_beside_the_default_stream() -> None:
    """Asked about the default stream while a stream that waits for it is captured, the driver answers 906."""
    with pytest.raises(StreamCaptured, match="commit and load outside of the capture"):
        StubDriver(0).stream_of(SimpleNamespace(cuda_stream=0))  # type: ignore[arg-type]


def old_bindings() -> None:
    StubDriver(0)  # the ones that are installed
    for version in ("12.8.0", "12.9.0"):
        importlib.import_module("cuda.bindings").__version__ = version  # type: ignore[attr-defined]
        with pytest.raises(CudaError, match=r"install 12\.9\.1") as raised:
            StubDriver(0)
        print(raised.value)


def place() -> None:
    print(StubDriver(1).pci_bus_id)


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


SCENARIOS = {
    "round_trip": round_trip,
    "pageable": round_trip,
    "batches": batches,
    "waits": waits,
    "lost": lost,
    "refuses": refuses,
    "default_stream": default_stream,
    "captured": captured,
    "beside_a_capture": round_trip,
    "captured_beside_the_default_stream": captured_beside_the_default_stream,
    "old_bindings": old_bindings,
    "place": place,
    "bounded": stored_and_loaded,
    "one_by_one": one_by_one,
    "crossing": crossing,
    "fails_midway": fails_midway,
    "streams_of_torch_alone": streams_of_torch_alone,
    "busy": busy,
    "maps": maps,
    "maps_not": maps_not,
    "others_events": others_events,
}


def play(scenario: str, environment: dict[str, str], printed: str) -> None:
    """In this process, which has met no driver before and ends with it; what it says goes into the file `printed`."""
    status = 1
    signal.alarm(MOST_S)
    try:
        file = os.open(printed, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.environ.update(environment)
        warnings.simplefilter("ignore" if scenario == "pageable" else "error")
        SCENARIOS[scenario]()
        status = 0
    except BaseException:  # noqa: BLE001 - it is told in the file
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def serve() -> None:
    """For each line of stdin, the arguments of `play`, a fork that does it; its exit status. Torch is imported once."""
    for line in sys.stdin:
        if (pid := os.fork()) == 0:
            play(*json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
