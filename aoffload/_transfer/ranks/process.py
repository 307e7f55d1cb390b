"""A rank in its own process, as the deciding process sees it. A rank is one set of KV tensors and its host memory."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from queue import SimpleQueue

import torch.multiprocessing

from ..._common.env import Env
from ..._kernel.plans import Completion, TransferPlan
from ...errors import ConfigError, DeviceGone, TransferRefused, WireError, WrongState
from ..transport import TransferStatistics
from .serving import Build, rank_main
from .wire import (
    Channel,
    Close,
    Closed,
    Completed,
    Frame,
    Launch,
    Lost,
    Open,
    Opened,
    Ready,
    RecordFence,
    Refused,
    ReleaseFence,
    encode,
)

_KILL_S = 5.0
"""Maximum wait for the end of a killed process."""

_MAX_UNSENT = 8192
"""Maximum unsent commands of a rank. Further ones are refused, so that the queue of a stuck rank stays bounded."""


class ProcessRank:
    """Starts a process that calls `build(rank, num_ranks)` for its tensors and executes commands in order.

    `build` is a function that can be imported or pickled, or the string `"module:function"`. It is pickled to start the
    process; after that, nothing is pickled. `ConfigError` if it cannot be sent to a process.

    The process is a daemon (so it has no `multiprocessing` children), ignores Ctrl-C, and ends by itself when this
    process is gone. One thread reads its reports, and only that thread reaps it; another thread writes, so that no
    command blocks the event loop.
    """

    def __init__(self, build: Build | str, rank: int, num_ranks: int) -> None:
        self.rank = rank
        self._ready: Ready | None = None
        self._reader: threading.Thread | None = None
        self._writer: threading.Thread | None = None
        self._refusal = ""
        """Why launches are refused; empty while they are not."""
        self._loss = ""
        """Why its device is lost while its process lives; empty otherwise."""
        self._has_ended = False
        """Whether the rank has reported that every copy has ended."""
        self._error: Refused | None = None
        self._statistics = TransferStatistics()
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()  # reentrant: finalisers put into it
        self._answered = threading.Event()
        self._deliver: Callable[[Completion], None] = lambda completion: None
        self._lost: Callable[[str], None] = lambda reason: None
        self._process, self._channel = _start(build, rank, num_ranks)

    def __repr__(self) -> str:
        return f"<ProcessRank {self.rank} pid={self.pid} {self._refusal or 'alive'}>"

    @property
    def pid(self) -> int:
        """The process id. The system may give it to another process once the rank has ended."""
        return self._process.pid or 0

    @property
    def num_device_blocks(self) -> int:
        return self._capacity().num_device_blocks

    @property
    def block_bytes(self) -> int:
        return self._capacity().block_bytes

    # -- start ----------------------------------------------------------------------------------------------------

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until `build` has returned. May block. `ConfigError` if `build` raised, ended its process, or took
        longer than `timeout_s` seconds; the process is gone then."""
        if self._ready is not None:
            return
        if self._refusal:
            raise ConfigError("build", f"rank {self.rank}: {self._refusal}")
        in_time = self._channel.poll(timeout_s)
        frame = self._channel.receive() if in_time else None
        if isinstance(frame, Ready):
            self._ready = frame
            return
        self._kill()
        if isinstance(frame, Refused):
            raise ConfigError(frame.argument, frame.problem)
        code = self._process.exitcode
        problem = "its process ended before it was ready" if in_time else f"not ready after {timeout_s:g} s"
        hint = '; the main module needs `if __name__ == "__main__":`' if in_time and code == 1 else ""
        raise ConfigError("build", f"rank {self.rank}: {problem} (exit code {code}){hint}")

    def open(
        self,
        num_host_blocks: int,
        *,
        verify: bool,
        deliver: Callable[[Completion], None],
        lost: Callable[[str], None],
        env: Env,
        memory: str = "",
    ) -> None:
        if self._reader is not None or self._refusal:
            raise WrongState("this rank was opened or closed before; make another one")
        self._capacity()
        self._deliver, self._lost = deliver, lost
        self._outbox.put(encode(Open(num_host_blocks, verify, memory)))
        self._writer = env.start_thread(self._write, f"aoffload-rank-{self.rank}-out")
        self._reader = env.start_thread(self._read, f"aoffload-rank-{self.rank}-in")

    def wait_open(self, timeout_s: float) -> None:
        if not self._answered.wait(timeout_s):
            raise ConfigError("num_host_blocks", f"rank {self.rank}: no host memory after {timeout_s:g} s")
        if self._error is not None:
            raise ConfigError(self._error.argument, self._error.problem)
        if self._refusal:
            raise ConfigError("num_host_blocks", f"rank {self.rank}: {self._refusal}")

    def _capacity(self) -> Ready:
        if self._ready is None:
            raise WrongState(f"rank {self.rank} is not ready: call wait_ready first")
        return self._ready

    # -- commands -------------------------------------------------------------------------------------------------

    def record_fence(self, number: int) -> None:
        self._post(RecordFence(number))

    def release_fence(self, number: int) -> None:
        self._outbox.put(encode(ReleaseFence(number)))

    def launch(self, plan: TransferPlan, after: int | None) -> None:
        self._post(Launch(plan, after or 0))

    def _post(self, frame: Frame) -> None:
        if self._refusal:
            raise TransferRefused(f"rank {self.rank}: {self._refusal}")
        if self._loss:
            raise DeviceGone(self._loss)
        if self._outbox.qsize() >= _MAX_UNSENT:
            raise TransferRefused(f"rank {self.rank} has not read its last {_MAX_UNSENT} commands")
        try:
            self._outbox.put(encode(frame))
        except WireError as error:
            raise TransferRefused(f"rank {self.rank}: {error}") from error

    def stop(self, timeout_s: float) -> None:
        self._refusal = self._refusal or "closed"
        self._outbox.put(encode(Close(max(0.0, timeout_s))))

    def join(self, timeout_s: float) -> bool:
        """Whether every copy is over. Kills the process if it has not ended within `timeout_s` seconds."""
        if self._reader is None:
            self._kill()
            return not self._process.is_alive()
        self._reader.join(max(0.0, timeout_s))
        if self._reader.is_alive():
            self._process.kill()
            self._reader.join(_KILL_S)
        return self._has_ended or not self._reader.is_alive()

    def statistics(self) -> TransferStatistics:
        return self._statistics

    # -- threads --------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        while (data := self._outbox.get()) is not None:
            if not self._channel.send_encoded(data):
                return

    def _read(self) -> None:
        reason = "its process ended"
        try:
            while (frame := self._channel.receive()) is not None:
                self._take(frame)
        except WireError as error:
            reason = f"it sent an invalid frame: {error}"
        finally:
            self._end(reason)

    def _take(self, frame: Frame) -> None:
        if isinstance(frame, Completed):
            self._statistics = frame.statistics
            self._deliver(frame.completion)
        elif isinstance(frame, Lost):
            self._loss = frame.reason
        elif isinstance(frame, Closed):
            self._has_ended = frame.has_ended
        elif isinstance(frame, (Opened, Refused)):
            self._error = frame if isinstance(frame, Refused) else None
            self._answered.set()
        else:
            raise WireError(f"a rank does not send {type(frame).__name__}")

    def _end(self, reason: str) -> None:
        """Make sure that the process is gone, which proves its copies over, and then report the rank as lost."""
        self._refusal = self._refusal or reason
        if self._refusal != "closed" or not self._has_ended:
            self._process.kill()
        self._process.join()
        self._lost(f"{reason} (exit code {self._process.exitcode})")
        self._answered.set()
        self._channel.cut()
        self._outbox.put(None)
        if self._writer is not None:
            self._writer.join()  # otherwise it might write to a reused descriptor
        self._channel.close()

    def _kill(self) -> None:
        self._refusal = self._refusal or "closed"
        self._process.kill()
        self._process.join(_KILL_S)
        self._channel.close()


def _start(build: Build | str, rank: int, num_ranks: int) -> tuple[BaseProcess, Channel]:
    # Not fork: neither the threads nor the device context of this process would work in the child.
    context = torch.multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=True)
    with theirs:  # close this copy, or `ours` would never see the end of the process
        is_main = threading.current_thread() is threading.main_thread()
        arguments = (theirs, os.getpid(), is_main, rank, num_ranks, build)
        process = context.Process(target=rank_main, args=arguments, name=f"aoffload-rank-{rank}", daemon=True)
        try:
            process.start()
        except Exception as error:  # any error of pickling the caller's function
            ours.close()
            raise ConfigError("build", f"cannot be sent to a process: {error!r}") from error
    return process, Channel(ours, process.pid or 0)


def spawn_ranks(build: Build | str, num_ranks: int, timeout_s: float) -> Sequence[ProcessRank]:
    """Start `num_ranks` processes together. `ConfigError` names a rank that does not get ready; all are ended then.

    May block for `timeout_s`.
    """
    deadline_s = time.monotonic() + timeout_s
    ranks: list[ProcessRank] = []
    try:
        for rank in range(num_ranks):
            ranks.append(ProcessRank(build, rank, num_ranks))
        for one in ranks:
            one.wait_ready(max(0.0, deadline_s - time.monotonic()))
    except BaseException:
        for one in ranks:
            one.join(0.0)
        raise
    return ranks
