"""Rank processes: their start, refused arguments, and their end."""

from __future__ import annotations

import multiprocessing
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import attrs
import builds
import pytest
import torch
from copies import GUARD_S

from aoffload._common.tiers import Tier
from aoffload._kernel.plans import Completion, TransferPlan
from aoffload._kernel.states import Outcome
from aoffload._transfer.backends.base import anonymous_memory
from aoffload._transfer.ranks.process import ProcessRank, spawn_ranks
from aoffload._transfer.ranks.transport import RankTransport
from aoffload.errors import ConfigError, DeviceGone, TransferRefused, WrongState
from aoffload.transport import Env

START_S = 120.0
"""A process imports torch, which takes seconds on an idle machine."""
ROOT = Path(__file__).parents[2]
forked = pytest.mark.usefixtures("forked_ranks")


class Processes:
    """An opened transport over rank processes."""

    def __init__(self, build: Any, num_ranks: int = 1, num_host_blocks: int = 4, verify: bool = False) -> None:
        self.ranks = spawn_ranks(build, num_ranks, START_S)
        self.transport = RankTransport(self.ranks, open_timeout_s=START_S)
        self.completions: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        self.transport.open(num_host_blocks, verify=verify, deliver=self.completions.put, env=Env())

    def store(self, job_id: int, device: list[int], host: list[int], after: Any = None) -> None:
        self.transport.launch(TransferPlan(job_id, Tier.DEVICE, Tier.HOST, array("i", device), array("i", host)), after)

    def load(self, job_id: int, host: list[int], device: list[int]) -> None:
        self.transport.launch(TransferPlan(job_id, Tier.HOST, Tier.DEVICE, array("i", host), array("i", device)), None)

    def next(self) -> Completion:
        return self.completions.get(timeout=GUARD_S)

    def assert_gone(self) -> None:
        for rank in self.ranks:
            with pytest.raises(ProcessLookupError):
                os.kill(rank.pid, 0)


@pytest.fixture
def start() -> Iterator[Callable[..., Processes]]:
    started: list[Processes] = []

    def start_one(*args: Any, **kwargs: Any) -> Processes:
        started.append(Processes(*args, **kwargs))
        return started[-1]

    yield start_one
    for processes in started:
        processes.transport.close(0)
        processes.assert_gone()


@pytest.fixture
def gates() -> Iterator[tuple[Connection, Connection]]:
    """This end and the rank's."""
    ours, theirs = Pipe()
    with ours, theirs:
        yield ours, theirs


def names_of_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def test_fp8_blocks_go_and_come_back_on_every_rank(start: Callable[..., Processes]) -> None:
    """Two processes store and load their own parts of a block, whatever its bytes mean, verified by checksum; Ctrl-C in
    the terminal does not reach them, and closing in time lets them end by themselves."""
    pools = [(torch.randn(8, 2, 16) + rank).to(torch.float8_e4m3fn).share_memory_() for rank in range(2)]
    before = [pool.view(torch.uint8).clone() for pool in pools]
    processes = start(partial(builds.shared, pools), 2, verify=True)
    assert (processes.transport.num_device_blocks, processes.transport.block_bytes) == (8, 64)
    for rank in processes.ranks:
        os.kill(rank.pid, signal.SIGINT)
    processes.store(1, [3, 5], [2, 0], processes.transport.record_fence())
    assert attrs.evolve(processes.next(), duration_s=0) == Completion(1, Outcome.LANDED, 2, num_bytes=128)
    processes.load(2, [0, 2], [6, 7])
    assert processes.next().outcome is Outcome.LANDED
    for pool, old in zip(pools, before, strict=True):
        assert torch.equal(pool.view(torch.uint8)[[6, 7]], old[[5, 3]])
    found = processes.transport.statistics()
    assert (found.num_loads, found.num_stores, found.blocks_loaded, found.blocks_verified) == (1, 1, 2, 2)
    assert (found.bytes_loaded, found.bytes_stored, found.blocks_corrupt) == (128, 128, 0)
    assert processes.transport.close(GUARD_S)
    assert [rank._process.exitcode for rank in processes.ranks] == [0, 0]
    assert not {name for name in names_of_threads() if name.startswith("aoffload-rank")}


@forked
def test_what_a_rank_refuses_or_cannot_fence_is_a_failure(start: Callable[..., Processes]) -> None:
    """Ids that are no blocks there, and a fence that it never recorded: nothing is copied, and the job fails. A build
    function may be given by its name."""
    processes = start("builds:plain")
    processes.load(1, [0], [8])
    (rank,) = processes.ranks
    rank.launch(TransferPlan(2, Tier.DEVICE, Tier.HOST, array("i", [1]), array("i", [0])), 77)
    processes.transport._tally.begin(2, 1)
    with pytest.raises(TransferRefused, match="rank 0: Launch cannot be written"):
        processes.store(2**64, [1], [0])
    found = [processes.next(), processes.next()]
    assert [(one.outcome, one.num_landed) for one in found] == [(Outcome.FAILED, 0)] * 2
    assert "rank 0: job 1: destination_ids must be in [1, 8), got 8" in found[0].error
    assert "there is no fence 77" in found[1].error


@forked
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (builds.failing, "build: rank 1: RuntimeError('no such device')"),
        ("builds:nothing", "build: rank 0: AttributeError"),
        (lambda rank, num_ranks: None, "build: cannot be sent to a process"),
    ],
)
def test_a_rank_that_cannot_be_built_is_named(build: Any, message: str) -> None:
    """The error says which and why, and no process is left."""
    with pytest.raises(ConfigError) as caught:
        RankTransport.spawn(build, 2, timeout_s=START_S)
    assert str(caught.value).startswith(message)
    assert multiprocessing.active_children() == []


@forked
def test_a_rank_that_ends_or_hangs_while_it_builds_is_noticed(gates: tuple[Connection, Connection]) -> None:
    """The end is seen at once; a hang at the timeout. The process is gone in both cases."""
    ended = r"^build: rank 0: its process ended before it was ready \(exit code"
    with pytest.raises(ConfigError, match=rf"{ended} 3\)$"):
        RankTransport.spawn(builds.ending, 1, timeout_s=START_S)
    hint = r'; the main module needs `if __name__ == "__main__":`'
    with pytest.raises(ConfigError, match=rf"{ended} 1\){hint}$"):
        RankTransport.spawn(builds.exiting, 1, timeout_s=START_S)
    rank = ProcessRank(partial(builds.waiting, gates[1]), 0, 1)
    with pytest.raises(WrongState, match="not ready"):
        rank.block_bytes  # noqa: B018
    with pytest.raises(ConfigError, match=r"build: rank 0: not ready after 0 s \(exit code -9\)"):
        rank.wait_ready(0)
    with pytest.raises(ConfigError, match="closed"):
        rank.wait_ready(0)
    with pytest.raises(ConfigError, match=r"num_ranks: must be .* got 0"):
        RankTransport.spawn(builds.plain, 0)


@forked
def test_a_rank_whose_device_is_lost_says_that_it_is_for_good(start: Callable[..., Processes]) -> None:
    """What it had begun is in doubt. Asked for anything more it says so, and no rank is told anything from then on."""
    found = start(builds.mortal, num_ranks=2)
    found.store(1, [1], [0])
    assert found.next().outcome is Outcome.LANDED
    found.load(2, [0], [2])
    assert found.next().outcome is Outcome.UNPROVEN
    found.load(3, [0], [3])
    assert found.next().outcome is Outcome.FAILED
    with pytest.raises(DeviceGone, match="rank 1: device lost: planted"):
        found.transport.record_fence()
    with pytest.raises(DeviceGone, match="rank 1: device lost: planted"):
        found.load(4, [0], [3])


@forked
def test_a_transport_that_was_never_opened_can_be_closed() -> None:
    """Its processes are gone, and nothing can be opened any more."""
    transport = RankTransport.spawn(builds.plain, 1, timeout_s=START_S)
    (rank,) = transport.ranks
    assert isinstance(rank, ProcessRank)
    assert transport.close(0)
    with pytest.raises(ProcessLookupError):
        os.kill(rank.pid, 0)
    with pytest.raises(WrongState, match="opened or closed before"):
        transport.open(4, verify=False, deliver=lambda completion: None, env=Env())


@forked
def test_host_memory_that_a_rank_cannot_have_names_rank_and_size() -> None:
    """Opening raises what the configuration got wrong, and every process is gone."""
    ranks = spawn_ranks(builds.plain, 1, START_S)
    with pytest.raises(
        ConfigError, match=r"num_host_blocks: rank 0: the system refuses 98304\d*.\d GiB of host memory"
    ):
        RankTransport(ranks).open(2**42, verify=False, deliver=lambda completion: None, env=Env())
    with pytest.raises(ProcessLookupError):
        os.kill(ranks[0].pid, 0)


@forked
def test_a_rank_that_dies_before_it_is_opened_is_noticed() -> None:
    """Opening does not wait for an answer that nobody gives."""
    ranks = spawn_ranks(builds.plain, 1, START_S)
    os.kill(ranks[0].pid, signal.SIGKILL)
    with pytest.raises(ConfigError, match="num_host_blocks: rank 0: its process ended"):
        RankTransport(ranks).open(4, verify=False, deliver=lambda completion: None, env=Env())


@forked
def test_a_rank_that_speaks_out_of_turn_is_killed() -> None:
    """Who sends what no rank says is not trusted with anything else."""
    ranks = spawn_ranks(builds.speaking, 1, START_S)
    with pytest.raises(ConfigError, match="rank 0: it sent an invalid frame: a rank does not send Open"):
        RankTransport(ranks).open(4, verify=False, deliver=lambda completion: None, env=Env())
    with pytest.raises(ProcessLookupError):
        os.kill(ranks[0].pid, 0)


@forked
def test_a_copy_that_hangs_is_over_when_closing_has_killed_its_rank(
    start: Callable[..., Processes], gates: tuple[Connection, Connection]
) -> None:
    """Closing takes no longer than it may, and what the killed rank had begun is told as failed, so proven over."""
    ours, theirs = gates
    pools = [builds.plain(rank, 2).share_memory_() for rank in range(2)]
    processes = start(partial(builds.held, pools, theirs), 2)
    processes.load(1, [0, 1], [2, 3])
    assert ours.poll(GUARD_S)
    os.kill(processes.ranks[1].pid, signal.SIGSTOP)  # or it would end by itself when it is told to
    assert processes.transport.close(0)
    assert processes.next().outcome is Outcome.FAILED
    processes.assert_gone()


@forked
def test_commands_do_not_wait_for_a_rank_that_reads_nothing(start: Callable[..., Processes]) -> None:
    """A stopped process fills its socket and a queue of bounded length; the event loop is never held up."""
    processes = start(builds.plain)
    os.kill(processes.ranks[0].pid, signal.SIGSTOP)

    def commit_often() -> None:
        for _ in range(100_000):
            processes.transport.record_fence()

    with pytest.raises(TransferRefused, match="has not read its last 8192 commands"):
        commit_often()


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the system has no huge pages")
def test_host_memory_is_asked_for_in_huge_pages() -> None:
    """A killed rank counts as dead when its memory is taken apart: of many gigabytes in small pages, seconds later."""
    memory = anonymous_memory(64, 2**20)
    address = memory.ctypes.data
    regions = Path("/proc/self/smaps").read_text().split("VmFlags:")
    heads = [re.search(r"^([0-9a-f]+)-([0-9a-f]+) ", region, re.MULTILINE) for region in regions]
    (flags,) = [
        after.splitlines()[0]
        for head, after in zip(heads, regions[1:], strict=False)
        if head is not None and int(head[1], 16) <= address < int(head[2], 16)
    ]
    assert "hg" in flags.split()


DECIDER = """
import os, sys
from functools import partial
import builds
from aoffload.transport import Env
from aoffload.ranks import RankTransport

if __name__ == "__main__":
    transport = RankTransport.spawn(partial(builds.present, sys.argv[1]), 2)
    transport.open(4, verify=False, deliver=print, env=Env())
    if os.fork() == 0:  # a child that keeps our ends of the sockets open
        sys.stdin.read()
        os._exit(0)
    print("ready", flush=True)
    sys.stdin.read()
"""
STOPPED = """
import os, sys, threading
from functools import partial
import builds
from aoffload._transfer.ranks.process import spawn_ranks

if __name__ == "__main__":
    ranks = []
    start = lambda: ranks.extend(spawn_ranks(partial(builds.present, sys.argv[1]), 2, 120))
    if sys.argv[2] == "another thread":  # which ends before the process does
        thread = threading.Thread(target=start)
        thread.start()
        thread.join()
    else:
        start()
    print(*(rank.pid for rank in ranks), flush=True)
    sys.stdin.read()
"""


def is_stopped(pid: int) -> bool:
    """Whether every thread of the process has stopped."""
    try:
        found = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:  # a thread has ended meanwhile
        return False
    return bool(found) and all(stat.rpartition(")")[2].split()[0] == "T" for stat in found)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems look for stopped orphans in other ways")
@pytest.mark.parametrize("how", ["the main thread", "another thread"])
def test_a_stopped_rank_ends_with_its_parent(how: str, tmp_path: Path) -> None:
    """It can't notice that its parent was killed; the system sees to it. Until then it lives, whoever started it."""
    pipe, script = tmp_path / "alive", tmp_path / "decider.py"
    os.mkfifo(pipe)
    script.write_text(STOPPED)
    alive = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    decider = subprocess.Popen(
        [sys.executable, str(script), str(pipe), how],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert decider.stdin is not None and decider.stdout is not None
    with decider.stdin, decider.stdout:
        pids = [int(pid) for pid in decider.stdout.readline().split()]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        until_s = time.monotonic() + GUARD_S
        while not all(map(is_stopped, pids)):  # the system tells a process that stops later nothing of its parent
            assert time.monotonic() < until_s, "the ranks do not stop"
            os.sched_yield()
        assert not wait([alive], 0)
        decider.kill()
        decider.wait(GUARD_S)
        has_ended = bool(wait([alive], GUARD_S))
        for pid in () if has_ended else pids:
            os.kill(pid, signal.SIGKILL)
        assert has_ended, "the ranks live on"
    os.close(alive)


def test_ranks_end_when_the_deciding_process_is_killed(tmp_path: Path) -> None:
    """Also if a child that it forked still holds its ends of the sockets: no rank outlives who decides for it."""
    pipe, script = tmp_path / "alive", tmp_path / "decider.py"
    os.mkfifo(pipe)
    script.write_text(DECIDER)
    alive = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    decider = subprocess.Popen(
        [sys.executable, str(script), str(pipe)],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert decider.stdin is not None and decider.stdout is not None
    with decider.stdin, decider.stdout:
        assert decider.stdout.readline() == b"ready\n"
        assert not wait([alive], 0)
        decider.kill()
        decider.wait(GUARD_S)
        assert wait([alive], GUARD_S), "the ranks live on"
        assert os.read(alive, 1) == b""
    os.close(alive)
