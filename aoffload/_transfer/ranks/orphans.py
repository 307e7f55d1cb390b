"""A rank ends with the process that started it, also where it can't notice that: stopped, or stuck in a driver."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent_pid: int, *, main_thread_started_it: bool) -> None:
    """Called first in a rank's process.

    A process group of its own: where its parent ends while it is stopped, POSIX has the system send SIGHUP and SIGCONT.
    That needs a parent outside of the group and in the same session, which `multiprocessing` sees to. On Linux there is
    a signal for the parent's end as well; but it comes at the end of the *thread* that started the process, so it is
    asked for only where that was the main thread, and not for the child of a fork server.
    """
    with suppress(OSError, AttributeError):  # the leader of a session already; a system without groups
        os.setpgid(0, 0)
    if main_thread_started_it and sys.platform == "linux" and os.getppid() == parent_pid:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:
            os._exit(1)  # it ended meanwhile
