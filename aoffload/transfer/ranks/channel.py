"""Frames over a socket between two processes, and how each notices that the other is gone."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from multiprocessing.connection import Connection, wait

from .frames import Frame
from .wire import MAX_FRAME_BYTES, decode, encode

__all__ = ["Channel"]


class Channel:
    """One end of a socket pair. `send` from any thread, `receive` from one, which also closes.

    The peer is gone when its end is closed, or when its process has ended: a process that it forked may hold its end
    open for as long as it likes. Neither needs a timeout.
    """

    def __init__(self, connection: Connection, peer_pid: int) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._peer = _process_fd(peer_pid)
        """Readable when the peer's process has ended; empty where the system cannot say, and once it has."""

    def send(self, frame: Frame) -> bool:
        """Whether there was somebody to send to. Blocks while the peer does not read."""
        return self.send_encoded(encode(frame))

    def send_encoded(self, data: bytes) -> bool:
        """`send`, of what `encode` has written."""
        try:
            with self._sending:
                self._connection.send_bytes(data)
        except OSError:  # the peer is gone, and `receive` says so, too
            return False
        return True

    def receive(self) -> Frame | None:
        """The next frame, or None when the peer is gone and everything it sent was read. `WireError` for garbage."""
        while self._peer and self._connection not in wait([self._connection, *self._peer]):
            self._hang_up()
        try:
            return decode(self._connection.recv_bytes(MAX_FRAME_BYTES))
        except (EOFError, OSError):
            return None

    def poll(self, timeout_s: float) -> bool:
        """Whether `receive` would return at once, within `timeout_s`."""
        return bool(wait([self._connection, *self._peer], timeout_s))

    def cut(self) -> None:
        """Nothing goes through any more, and who is blocked in `send` returns. What had arrived can still be read."""
        with suppress(OSError):  # the peer was faster
            with socket.socket(fileno=os.dup(self._connection.fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()
        self._forget_peer()

    def _hang_up(self) -> None:
        self._forget_peer()
        self.cut()

    def _forget_peer(self) -> None:
        for descriptor in self._peer:
            os.close(descriptor)
        self._peer = ()


def _process_fd(pid: int) -> tuple[int, ...]:
    try:
        return (os.pidfd_open(pid),)
    except (AttributeError, OSError):  # another system, an old kernel, or nobody of that id: then the socket says it
        return ()
