"""The rank process: builds its tensors, executes commands, and reports completions."""

from __future__ import annotations

import ctypes
import os
import pkgutil
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

from ..._common.env import Env
from ..._kernel.plans import Completion
from ..._kernel.states import Outcome
from ...errors import ConfigError, DeviceGone, TransferRefused, WireError
from ..local import LocalTransport
from .rank import LocalRank
from .wire import (
    Channel,
    Close,
    Closed,
    Completed,
    Launch,
    Lost,
    Open,
    Opened,
    Ready,
    RecordFence,
    Refused,
    ReleaseFence,
)

# -- orphans ---------------------------------------------------------------------------------------------------------
#
# A rank ends with the process that started it, even if the rank is stopped, or stuck in a driver.

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent_pid: int, *, main_thread_started_it: bool) -> None:
    """Make this process end with its parent. Called first in a rank's process.

    The rank gets a process group of its own: if its parent ends while the rank is stopped, POSIX has the system send
    SIGHUP and SIGCONT. That needs a parent outside of the group and in the same session, which `multiprocessing`
    provides. On Linux, a signal is also sent at the end of the parent. It comes at the end of the *thread* that started
    the process, so it is requested only if that was the main thread, and not for the child of a fork server.
    """
    with suppress(OSError, AttributeError):  # already the leader of a session; or a system without groups
        os.setpgid(0, 0)
    if main_thread_started_it and sys.platform == "linux" and os.getppid() == parent_pid:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:
            os._exit(1)  # the parent has already ended


# -- serving ---------------------------------------------------------------------------------------------------------

Build: TypeAlias = Callable[[int, int], Any]
"""`build(rank, num_ranks)`, called once in the rank's process. Returns its KV caches, as `OffloadRuntime` takes them,
or a `LocalTransport` over them."""


def rank_main(
    connection: Connection,
    decider_pid: int,
    main_thread_started_it: bool,
    rank: int,
    num_ranks: int,
    build: Build | str,
) -> None:
    """The main function of a rank process. It ends on `Close`, or when the deciding process is gone."""
    end_with_parent(decider_pid, main_thread_started_it=main_thread_started_it)
    # Ctrl-C reaches every process of a terminal. The deciding process closes the ranks when it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(connection, decider_pid)
    try:
        local = LocalRank(_transport(build, rank, num_ranks))
    except Exception as error:  # noqa: BLE001 - the caller's own function: the deciding process raises its error
        channel.send(Refused("build", f"rank {rank}: {error!r}"))
        return
    channel.send(Ready(local.num_device_blocks, local.block_bytes))
    if not _Server(channel, local, rank).serve():
        # The deciding process is gone. Threads of `build` must not keep this process, and its device memory, alive.
        os._exit(1)


def _transport(build: Build | str, rank: int, num_ranks: int) -> LocalTransport:
    function = pkgutil.resolve_name(build) if isinstance(build, str) else build
    made = function(rank, num_ranks)
    return made if isinstance(made, LocalTransport) else LocalTransport(made)


class _Server:
    """Executes commands from the channel on the rank's transport, in order."""

    def __init__(self, channel: Channel, local: LocalRank, rank: int) -> None:
        self._channel = channel
        self._local = local
        self._rank = rank
        self._is_lost = False
        self._reporting = threading.Lock()
        self._handlers: dict[type, Callable[[Any], None]] = {
            Open: self._open,
            RecordFence: self._record_fence,
            ReleaseFence: lambda frame: self._local.release_fence(frame.number),
            Launch: self._launch,
        }

    def serve(self) -> bool:
        """Serve until `Close`, or until the peer is gone or sends an invalid frame. Returns whether it was `Close`."""
        try:
            while (frame := self._channel.receive()) is not None:
                if isinstance(frame, Close):
                    self._channel.send(Closed(self._local.join(frame.timeout_s)))
                    return True
                if type(frame) not in self._handlers:
                    raise WireError(f"{type(frame).__name__} is not a command")
                self._handlers[type(frame)](frame)
        except WireError:
            return False  # the peer does not speak the protocol: end
        return False

    def _open(self, frame: Open) -> None:
        try:
            self._local.open(
                frame.num_host_blocks, verify=frame.verify, deliver=self._deliver, lost=lambda reason: None, env=Env(),
                memory=frame.memory,
            )  # fmt: skip
        except ConfigError as error:
            self._channel.send(Refused(error.argument, f"rank {self._rank}: {error.problem}"))
        else:
            self._channel.send(Opened())

    def _record_fence(self, frame: RecordFence) -> None:
        try:
            self._local.record_fence(frame.number)
        except TransferRefused as error:  # the launch that names it is refused: nothing is copied without its fence
            self._look_at(error)

    def _launch(self, frame: Launch) -> None:
        end = partial(Completion, frame.plan.job_id)
        try:
            self._local.launch(frame.plan, frame.after or None)
        except TransferRefused as error:
            self._look_at(error)
            self._deliver(end(Outcome.FAILED, error=str(error)))
        except Exception as error:  # noqa: BLE001 - a driver error: the copy may have been started
            self._deliver(end(Outcome.UNPROVEN, error=repr(error)))

    def _look_at(self, error: TransferRefused) -> None:
        """Send `Lost`, once, if the error is a `DeviceGone`."""
        if isinstance(error, DeviceGone) and not self._is_lost:
            self._is_lost = True
            self._channel.send(Lost(str(error)))

    def _deliver(self, completion: Completion) -> None:
        """Called in any thread of the transport; blocks only while the deciding process does not read."""
        with self._reporting:  # the last counts that are sent have to be the newest
            self._channel.send(Completed(completion, self._local.statistics()))
