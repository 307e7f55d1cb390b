"""Who is connected to a listening socket: counted, and cut off where there are too many or one asks for too much."""

from __future__ import annotations

import os
import socket as sockets
from contextlib import suppress
from typing import Any

import attrs
import zmq
from zmq.utils.monitor import recv_monitor_message

STALL_MS = 30_000
"""A connection whose peer takes nothing for so long is closed by the system, where that can be asked for (Linux)."""
LEAST_FRAME_BYTES = 1024
MAX_SUBSCRIPTIONS = 16
"""Of one peer, different ones. It needs one."""
NEWS_AT_A_TIME = 256
"""Subscriptions that are counted before anything else has its turn."""


@attrs.define(eq=False)
class Peers:
    """The connections that `socket` accepts, by descriptor. Used in one thread.

    ZeroMQ closes a connection that was shut down from here, and forgets all that it kept for that peer. A peer that is
    in order connects again by itself.
    """

    socket: zmq.Socket[bytes]
    max_peers: int
    num_cut: int = attrs.field(default=0, init=False)
    monitor: Any = attrs.field(init=False)
    """Readable when peers have come or gone."""
    _open: dict[int, int] = attrs.field(factory=dict, init=False)
    """The number of subscriptions by descriptor, in the order of their coming."""
    _port: str = attrs.field(default="", init=False)

    def __attrs_post_init__(self) -> None:
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)

    def __len__(self) -> int:
        return len(self._open)

    @staticmethod
    def bound_frames(socket: zmq.Socket[bytes], most_bytes: int) -> None:
        """Refuse frames that are longer than anything that a peer has to say, and peers that stand still."""
        socket.maxmsgsize = max(LEAST_FRAME_BYTES, most_bytes)
        with suppress(zmq.ZMQError):  # another system
            socket.setsockopt(zmq.TCP_MAXRT, STALL_MS)

    def listen_at(self, address: str) -> str:
        """Bind the socket; returns its address, with the port that the system has chosen if that was left to it."""
        self.socket.bind(address)
        found = str(self.socket.getsockopt_string(zmq.LAST_ENDPOINT))
        self._port = found.rpartition(":")[2]
        return found

    def take_news(self) -> None:
        """Take note of who has come and gone; whoever is too much is cut off."""
        with suppress(zmq.Again):
            while True:
                told = recv_monitor_message(self.monitor, zmq.NOBLOCK)
                if told["event"] == zmq.EVENT_DISCONNECTED:
                    self._open.pop(int(told["value"]), None)
                elif told["event"] == zmq.EVENT_ACCEPTED:
                    self._open[int(told["value"])] = 0
        for descriptor in list(self._open)[self.max_peers :]:
            self._cut(descriptor)

    def count_subscriptions(self) -> None:
        """For an XPUB, which keeps any number of subscriptions. Whoever has too many is cut off, and nobody else."""
        with suppress(zmq.Again):
            for _ in range(NEWS_AT_A_TIME):
                told = self.socket.recv(zmq.NOBLOCK, copy=False)
                with suppress(zmq.ZMQError):  # the end of one whose peer is gone: nobody has sent it
                    self._count(bytes(told.buffer[:1]), int(told.get(zmq.SRCFD)))

    def _count(self, what: bytes, descriptor: int) -> None:
        if descriptor not in self._open:
            self.take_news()
        num_subscriptions = self._open.get(descriptor)
        if num_subscriptions is None:
            return  # gone by now, or a router that this socket has connected to
        self._open[descriptor] = max(0, num_subscriptions + {b"\x01": 1, b"\x00": -1}.get(what, 0))
        if self._open[descriptor] > MAX_SUBSCRIPTIONS:
            self.take_news()  # the descriptor may have another peer by now
            if self._open.get(descriptor, 0) > MAX_SUBSCRIPTIONS:
                self._cut(descriptor)

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)

    def _cut(self, descriptor: int) -> None:
        # The descriptor may be somebody else's by now, but never is one at our port that is not a peer's.
        with suppress(OSError), sockets.socket(fileno=os.dup(descriptor)) as connection:
            if str(_port_of(connection.getsockname())) == self._port:
                connection.shutdown(sockets.SHUT_RDWR)
                self.num_cut += 1


def _port_of(address: Any) -> Any:
    """The port of an address of the internet; the path of a local one."""
    return address[1] if isinstance(address, tuple) else f"//{address}"
