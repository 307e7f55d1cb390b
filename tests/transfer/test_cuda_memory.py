"""The pinned host pool: allocated in pieces, all or nothing, with one warning, and released."""

from __future__ import annotations

import ctypes
import os
import platform
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
from aoffload._transfer.backends.base import anonymous_memory
from aoffload._transfer.backends.cuda import page_locked
from aoffload._transfer.backends.cuda.backend import CudaBackend
from aoffload._transfer.backends.cuda.driver import CudaError
from aoffload._transfer.backends.cuda.page_locked import (
    ALIGNMENT,
    MAX_PIECE_BYTES,
    MBIND,
    HostMemoryError,
    MemoryLimit,
    memory_limit,
    node_of,
    page_locked_memory,
    prefer_node,
    register_in_pieces,
    run_near,
)
from aoffload._transfer.region import regions_of
from aoffload._transfer.shared_memory import SharedMemory, shared_size
from aoffload._transfer.transport import PinProgress
from aoffload.errors import ConfigError
from aoffload.transport import Env, LocalTransport

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
    for words in (
        "0.0156 GiB of host memory",
        "piece",
        "CUDA_ERROR_OUT_OF_MEMORY",
        "memory free",
        "not `ulimit -l`",
    ):
        assert words in str(error)
    assert isinstance(error.__cause__, CudaError)


CGROUPS = {
    "version 2": (
        "0::/pod/engine",
        "sys/fs/cgroup",
        "memory.max memory.current inactive_file active_file",
        "max",
    ),
    "version 1": (
        "8:pids:/\n4:cpu,memory:/pod/engine\n0::/",
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes memory.usage_in_bytes total_inactive_file total_active_file",
        str(2**63 - 4096),
    ),
}


@pytest.mark.parametrize("version", CGROUPS)
def test_the_cgroup_that_leaves_least_is_the_limit(version: str, tmp_path: Path) -> None:
    """Of the process's own and those around it, where the cache of files counts as free: Linux drops it. In a container
    only the mount point may be there."""
    lines, mount, names, unlimited = CGROUPS[version]

    def write(folder: str, limit: str, used: int) -> None:
        limit_file, used_file, *cached = names.split()
        at = tmp_path / mount / folder
        at.mkdir(parents=True, exist_ok=True)
        (at / limit_file).write_text(f"{limit}\n")
        (at / used_file).write_text(f"{used}\n")
        (at / "memory.stat").write_text(f"anon 7\n{cached[0]} 100\n{cached[1]} 20\n")

    assert memory_limit(tmp_path) is None
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(lines)
    assert memory_limit(tmp_path) is None
    write("", unlimited, 5000)
    assert memory_limit(tmp_path) is None
    write("", "9000", 2120)
    assert memory_limit(tmp_path) == MemoryLimit(9000, 2000)
    write("pod/engine", "8000", 520)
    write("pod", "2000", 620)
    found = memory_limit(tmp_path)
    assert found == MemoryLimit(2000, 500) and found.left_bytes == 1500


def test_a_pool_for_which_the_process_would_be_killed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is allocated, and the error has both figures: a warning and slower copies would only put the end off."""
    left = MemoryLimit(3 * 2**30, 2**30)
    monkeypatch.setattr(page_locked, "memory_limit", lambda: left)
    monkeypatch.setattr(page_locked, "anonymous_memory", lambda *_: pytest.fail("it allocates"))
    cuda = SimulatedCuda()
    with pytest.raises(ConfigError, match=r"2.5 GiB of host memory .* 2 GiB left of .* limit of 3 GiB") as refused:
        page_locked_memory(cuda, 2560, MIB, ignored)
    assert refused.value.argument == "num_host_blocks"
    monkeypatch.undo()
    monkeypatch.setattr(page_locked, "memory_limit", lambda: MemoryLimit(9 * MIB, MIB))
    assert page_locked_memory(cuda, 8, MIB, ignored).is_page_locked


def test_the_node_of_a_device_is_what_linux_says(tmp_path: Path) -> None:
    """By its place on the bus, in Linux's spelling; -1 and a machine without these files say nothing."""
    for name, text in (("0000:1b:00.0", "1\n"), ("0000:2b:00.0", "-1\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "numa_node").write_text(text)
    assert node_of("0000:1B:00.0", tmp_path) == 1
    assert node_of("0000:2B:00.0", tmp_path) is None
    assert node_of("0000:3B:00.0", tmp_path) is None
    assert node_of("", tmp_path) is None


def test_the_pool_is_taken_from_the_node_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything touches it, and also where there is no such node: then it comes from anywhere."""
    asked: list[object] = []

    class Placed(SimulatedCuda):
        def register(self, address: int, num_bytes: int) -> None:
            asked.append("registered")
            super().register(address, num_bytes)

    cuda = Placed()
    cuda.pci_bus_id = "0000:1B:00.0"
    monkeypatch.setattr(page_locked, "node_of", {"0000:1B:00.0": 1}.get)
    monkeypatch.setattr(page_locked, "prefer_node", lambda rows, node: asked.append((rows.nbytes, node)))
    monkeypatch.setattr(page_locked, "run_near", asked.append)
    page_locked_memory(cuda, 4, MIB, ignored).unregister(cuda)
    assert asked == [(4 * MIB, 1), 1, "registered"]
    prefer_node(anonymous_memory(1, MIB), 1023)
    prefer_node(anonymous_memory(0, MIB), 0)


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="this system does not tell where memory is")
def test_linux_is_asked_for_pages_of_the_node() -> None:
    """The pool's pages come from it, as long as it has some."""
    memory, other = anonymous_memory(4, MIB), anonymous_memory(1, MIB)
    call, nodes = ctypes.CDLL(None).syscall, ctypes.c_ulong(1)
    if call(MBIND.get(platform.machine(), -1), ctypes.c_void_p(other.ctypes.data), MIB, 1, ctypes.byref(nodes), 64, 0):
        pytest.skip("this system does not let a process choose")
    prefer_node(memory, 0)
    addressed = [line.split() for line in Path("/proc/self/numa_maps").read_text().splitlines()]
    policies = {int(address, 16): policy for address, policy, *_ in addressed}
    mapping = max(start for start in policies if start <= memory.ctypes.data)  # it may begin before the memory
    assert policies[mapping] == "prefer:0"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not let a thread choose")
def test_threads_that_register_run_near_the_device(tmp_path: Path) -> None:
    """On the processors of its node, where the first touch takes the pages from; the thread that opens is left alone,
    and nothing is changed where the node is unknown."""
    (tmp_path / "node1").mkdir()
    before, seen = os.sched_getaffinity(0), list[set[int]]()
    cpus = sorted(before)
    (tmp_path / "node1/cpulist").write_text(f"{cpus[0]}-{cpus[0]},{cpus[-1] + 1}\n")

    def near(node: int | None) -> None:
        run_near(node, tmp_path)
        seen.append(os.sched_getaffinity(0))

    for node in (1, 0, None):
        thread = threading.Thread(target=near, args=(node,))
        thread.start()
        thread.join(GUARD_S)
    assert seen == [{cpus[0]}, before, before]
    assert os.sched_getaffinity(0) == before


def test_a_listener_that_fails_leaves_nothing_registered() -> None:
    """Whatever goes wrong on the way, the pages are released."""
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
    assert cuda.registered and len(cuda.streams) == 4
    backend.close()
    assert cuda.registered == {} and len(cuda.streams) == 1


def test_a_pool_without_blocks_is_no_special_case() -> None:
    """Nothing is registered, and nothing has to be released."""
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
from aoffload._transfer.backends.cuda.page_locked import page_locked_memory
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

    class Unknowing(SimulatedCuda):
        def learn(self, memory: object) -> None:
            assert self.registered
            raise OSError("it learns nothing")

    cuda = Unknowing()
    transport = LocalTransport(torch.zeros(4, 8), partial(CudaBackend, options=on(cuda)))
    with pytest.raises(OSError, match="it learns nothing"):
        transport.open(4, verify=False, deliver=lambda completion: None, env=Env())
    assert cuda.registered == {}


class PinsOnCall(SimulatedCuda):
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
    """The loop goes on meanwhile, the log has a line for each piece, and who is cancelled releases every page."""
    cuda, scope = PinsOnCall(), anyio.CancelScope()
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


def test_memory_that_ranks_share_is_locked_by_each_and_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device registers the same pages at its own addresses. What another rank has locked already takes no memory
    again, so a limit that is enough for one copy is enough for all ranks."""
    shared = SharedMemory(shared_size(4, MIB))
    monkeypatch.setattr(page_locked, "memory_limit", lambda: MemoryLimit(5 * MIB, 0))
    one = page_locked_memory(SimulatedCuda(), 4, MIB, ignored, shared_path=shared.path)
    one.rows[:] = 7
    monkeypatch.setattr(page_locked, "memory_limit", lambda: MemoryLimit(5 * MIB, 4 * MIB))
    cuda = SimulatedCuda()
    other = page_locked_memory(cuda, 4, MIB, ignored, shared_path=shared.path)
    assert (other.rows == 7).all()
    assert other.address != one.address
    assert cuda.registered == {piece.address: piece.num_bytes for piece in other.pieces}
    shared.close()
