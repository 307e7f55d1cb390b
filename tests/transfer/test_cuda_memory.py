"""The pinned host pool: in pieces, all or nothing, one warning, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import warnings
from functools import partial
from pathlib import Path

import anyio
import pytest
import structlog
import torch
from copies import GUARD_S
from simulated_cuda import SimulatedCuda, on

from aoffload import KVCacheGroup, OffloadConfig, OffloadRuntime
from aoffload.env import Env
from aoffload.transfer.backends.base import anonymous_memory
from aoffload.transfer.backends.cuda import CudaBackend, CudaError, HostMemoryError, PinProgress
from aoffload.transfer.backends.cuda.page_locked import (
    ALIGNMENT,
    MAX_PIECE_BYTES,
    page_locked_memory,
    register_in_pieces,
)
from aoffload.transfer.region import regions_of
from aoffload.transport import LocalTransport

MIB = 2**20


def ignored(progress: PinProgress) -> None:
    return None


def test_the_whole_pool_is_registered_in_pieces_where_it_is() -> None:
    """The pieces cover the pool without gap or overlap, end between huge pages, and are told of one by one."""
    cuda, heard = SimulatedCuda(), list[PinProgress]()
    memory = page_locked_memory(cuda, 9, MIB, heard.append, max_piece_bytes=2 * MIB)
    assert cuda.registered == {piece.address: piece.num_bytes for piece in memory.pieces}
    assert sum(piece.num_bytes for piece in memory.pieces) == 9 * MIB
    assert memory.pieces[0].address == memory.address
    assert all(border % ALIGNMENT == 0 for border in memory.borders)
    assert max(piece.num_bytes for piece in memory.pieces) <= 2 * MIB
    assert [progress.total_bytes for progress in heard] == [9 * MIB] * len(memory.pieces)
    assert heard[-1].num_bytes == 9 * MIB
    memory.unregister(cuda)
    assert cuda.registered == {}


def test_pieces_are_never_larger_than_a_driver_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terabyte is cut into pieces of 64 GiB at most; nothing of it is touched to find out."""
    from aoffload.transfer.backends.cuda import page_locked

    pieces = list(page_locked._cut(ALIGNMENT + 4096, 2**40, MAX_PIECE_BYTES))
    assert max(piece.num_bytes for piece in pieces) <= MAX_PIECE_BYTES
    assert sum(piece.num_bytes for piece in pieces) == 2**40
    assert len(list(page_locked._cut(ALIGNMENT, 2**29, MAX_PIECE_BYTES))) == 1


def test_pieces_are_registered_by_several_threads_at_once() -> None:
    """Four registrations meet in the middle of theirs: none waits for another."""
    meeting = threading.Barrier(4, timeout=20)

    class Meeting(SimulatedCuda):
        def register(self, address: int, num_bytes: int) -> None:
            meeting.wait()
            super().register(address, num_bytes)

    cuda = Meeting()
    rows = anonymous_memory(8, MIB)
    aligned = rows.ctypes.data % ALIGNMENT == 0
    pieces = register_in_pieces(cuda, rows[: 8 if aligned else 7], ignored, max_piece_bytes=2 * MIB)
    assert len(pieces) == 4


def test_a_refusal_names_size_piece_and_limit_and_leaves_nothing_registered() -> None:
    """All or nothing; the error is one of configuration."""
    cuda = SimulatedCuda(pinnable_bytes=5 * MIB)
    rows = anonymous_memory(16, MIB)
    with pytest.raises(HostMemoryError, match="num_host_blocks") as caught:
        register_in_pieces(cuda, rows, ignored, max_piece_bytes=2 * MIB)
    error = caught.value
    assert cuda.registered == {}
    assert error.size_bytes == 16 * MIB
    assert error.piece_bytes <= 2 * MIB
    for words in ("0.0156 GiB of host memory", "piece", "CUDA_ERROR_OUT_OF_MEMORY", "memlock limit", "memory free"):
        assert words in str(error)
    assert isinstance(error.__cause__, CudaError)


def test_a_listener_that_fails_leaves_nothing_registered() -> None:
    """Whatever goes wrong on the way, the pages are let go of."""
    cuda = SimulatedCuda()

    def stop(progress: PinProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        register_in_pieces(cuda, anonymous_memory(16, MIB), stop, max_piece_bytes=2 * MIB)
    assert cuda.registered == {}


def test_what_cannot_be_pinned_is_used_as_it_is_with_one_warning() -> None:
    """Eight pieces fail, one warning is given, and blocks still come back, copied one by one."""
    cuda = SimulatedCuda(pinnable_bytes=0)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        backend = CudaBackend(regions_of(torch.zeros(4, MIB, dtype=torch.uint8)), options=on(cuda, max_piece_bytes=MIB))
        backend.open(16)
    assert [str(warning.message).partition(":")[0] for warning in given] == ["copies will be slow"]
    assert given[0].category is RuntimeWarning
    assert not backend.host.is_page_locked
    assert "pageable" in repr(backend)
    backend.close()


def test_closing_lets_go_of_everything() -> None:
    """Registrations, streams and events: what was made is destroyed."""
    cuda = SimulatedCuda()
    backend = CudaBackend(regions_of(torch.zeros(4, 8)), options=on(cuda))
    backend.open(4)
    backend.record_fence().synchronize()
    assert cuda.registered and len(cuda.streams) == 3
    backend.close()
    assert cuda.registered == {} and len(cuda.streams) == 1


def test_a_pool_without_blocks_is_no_special_case() -> None:
    """Nothing is registered, and nothing has to be let go of."""
    cuda = SimulatedCuda()
    backend = CudaBackend(regions_of(torch.zeros(4, 8)), options=on(cuda))
    backend.open(0)
    assert cuda.registered == {}
    backend.close()


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs /proc")
def test_forked_children_do_not_get_the_pool() -> None:
    """Their first write would part the memory from what the device sees (`dc`: do not copy on fork)."""
    memory = page_locked_memory(SimulatedCuda(), 4, MIB, ignored)
    found = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line[:1] in "0123456789abcdef" and "-" in line.split()[0]:
            start, end = (int(number, 16) for number in line.split()[0].split("-"))
        elif line.startswith("VmFlags") and start <= memory.address < end:
            found = line
    assert "dc" in found.split()


KILLED = """
import sys
sys.path[:0] = sys.argv[1:]
from simulated_cuda import SimulatedCuda
from aoffload.transfer.backends.cuda.page_locked import page_locked_memory
memory = page_locked_memory(SimulatedCuda(), 64, 2**20, lambda progress: None)
memory.rows[:] = 7
lines = [line.split() for line in open("/proc/self/maps")]
at = memory.address
print(next(line for line in lines if int(line[0].split("-")[0], 16) <= at < int(line[0].split("-")[1], 16)), flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_a_killed_process_leaves_nothing() -> None:
    """The pool is private memory without a name: after SIGKILL there is no file of it, in /dev/shm or anywhere."""
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, *paths], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        mapping = process.stdout.readline()
        open_files = [os.readlink(found) for found in Path(f"/proc/{process.pid}/fd").iterdir()]
        process.send_signal(signal.SIGKILL)
    assert "rw-p" in mapping and "'0']" in mapping  # private, and of no file
    assert not [name for name in open_files if "shm" in name or "memfd" in name]


def test_a_backend_that_cannot_open_lets_go_of_what_it_has_pinned() -> None:
    """What goes wrong after the pinning, too, leaves nothing registered."""
    cuda = SimulatedCuda()

    def no_kernel(device: torch.device) -> None:
        assert cuda.registered
        raise OSError("no compiler")

    transport = LocalTransport(torch.zeros(4, 8), partial(CudaBackend, options=on(cuda, kernel=no_kernel)))
    with pytest.raises(OSError, match="no compiler"):
        transport.open(4, verify=False, deliver=lambda completion: None, env=Env())
    assert cuda.registered == {}


class PinsWhenTold(SimulatedCuda):
    """Registers memory when a test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun, self.may_pin = threading.Event(), threading.Event()

    def register(self, address: int, num_bytes: int) -> None:
        self.has_begun.set()
        assert self.may_pin.wait(GUARD_S)
        super().register(address, num_bytes)


@pytest.mark.anyio
@pytest.mark.parametrize("leaves", [False, True], ids=["stays", "leaves"])
async def test_a_runtime_that_pins_holds_up_nobody_and_leaves_nothing_pinned(leaves: bool) -> None:
    """The loop goes on meanwhile, the log has a line for each piece, and who is cancelled lets go of every page."""
    cuda, scope = PinsWhenTold(), anyio.CancelScope()
    pool = torch.zeros(9, MIB, dtype=torch.uint8)
    transport = LocalTransport(pool, partial(CudaBackend, options=on(cuda, max_piece_bytes=2 * MIB)))
    config = OffloadConfig(groups=[KVCacheGroup("full")], num_host_blocks=9)
    log, entered = structlog.testing.CapturingLogger(), list[int]()
    logger = structlog.wrap_logger(log, processors=[])

    async def live() -> None:
        with scope:
            async with OffloadRuntime(config, transport=transport, logger=logger):
                entered.append(sum(cuda.registered.values()))

    async with anyio.create_task_group() as group:
        group.start_soon(live)
        assert await anyio.to_thread.run_sync(cuda.has_begun.wait, GUARD_S)
        if leaves:
            scope.cancel()
        for _ in range(10):
            await anyio.lowlevel.checkpoint()
        cuda.may_pin.set()
    pieces = [call.kwargs for call in log.calls if call.kwargs["event"] == "host_memory_page_locked"]
    assert entered == ([] if leaves else [9 * MIB])
    assert cuda.registered == {}
    assert all(not lane._thread.is_alive() for lane in transport._lanes.values())
    if not leaves:
        assert len(pieces) == pieces[0]["num_pieces"] >= 5
        assert sum(event["piece_bytes"] for event in pieces) == 9 * MIB == pieces[-1]["num_bytes"]
