"""Frames over a socket between two processes, each of which notices when the other is gone."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from multiprocessing.connection import Connection, wait

from .frames import Frame
from .wire import MAX_FRAME_BYTES, decode, encode


class Channel:
    """One end of a socket pair. Any thread may `send`; one thread calls `receive` and `close`.

    The peer is gone when its end is closed, or when its process has ended: a process that it forked may keep its end
    open. Both are noticed without a timeout.
    """

    def __init__(self, connection: Connection, peer_pid: int) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._peer = _process_fd(peer_pid)
        """Descriptor that is readable when the peer's process has ended. Empty if not supported, and after the end."""

    def send(self, frame: Frame) -> bool:
        """Send `frame`. Returns whether the peer was still there. Blocks while the peer does not read."""
        return self.send_encoded(encode(frame))

    def send_encoded(self, data: bytes) -> bool:
        """As `send`, for a frame that is already encoded."""
        try:
            with self._sending:
                self._connection.send_bytes(data)
        except OSError:  # the peer is gone, and `receive` says so, too
            return False
        return True

    def receive(self) -> Frame | None:
        """The next frame; None if the peer is gone and all it sent was read. `WireError` for any other bytes."""
        while self._peer and self._connection not in wait([self._connection, *self._peer]):
            self._hang_up()
        try:
            return decode(self._connection.recv_bytes(MAX_FRAME_BYTES))
        except (EOFError, OSError):
            return None

    def poll(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds until `receive` would return at once. Returns whether it would."""
        return bool(wait([self._connection, *self._peer], timeout_s))

    def cut(self) -> None:
        """Shut the connection down. A blocked `send` returns; data that has arrived can still be read."""
        with suppress(OSError):  # the peer has closed it before
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
    except (AttributeError, OSError):  # other system, old kernel, or no such process: then only the socket tells
        return ()
