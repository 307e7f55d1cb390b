"""The peers of a listening socket. They are counted. Peers beyond the bound are disconnected, and so are peers with too
many subscriptions."""

from __future__ import annotations

import os
import socket as sockets
from contextlib import suppress
from typing import Any

import attrs
import zmq
from zmq.utils.monitor import recv_monitor_message

STALL_MS = 30_000
"""Milliseconds after which the system (only Linux) closes a connection whose peer has read nothing."""
LEAST_FRAME_BYTES = 1024
MAX_SUBSCRIPTIONS = 16
"""Different subscriptions per peer. A peer needs one."""
NEWS_AT_A_TIME = 256
"""Subscriptions that are counted before other sockets have their turn."""


@attrs.define(eq=False)
class Peers:
    """The connections that `socket` accepts, by descriptor. Used in one thread.

    ZeroMQ closes a connection that was shut down here, and drops everything that it queued for that peer. A correct
    peer reconnects by itself.
    """

    socket: zmq.Socket[bytes]
    max_peers: int
    num_cut: int = attrs.field(default=0, init=False)
    monitor: Any = attrs.field(init=False)
    """Readable when peers have connected or disconnected."""
    _open: dict[int, int] = attrs.field(factory=dict, init=False)
    """Number of subscriptions by descriptor, in order of connection."""
    _port: str = attrs.field(default="", init=False)

    def __attrs_post_init__(self) -> None:
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)

    def __len__(self) -> int:
        return len(self._open)

    @staticmethod
    def bound_frames(socket: zmq.Socket[bytes], most_bytes: int) -> None:
        """Refuse frames that are longer than any valid request, and disconnect peers that read nothing."""
        socket.maxmsgsize = max(LEAST_FRAME_BYTES, most_bytes)
        with suppress(zmq.ZMQError):  # not on Linux
            socket.setsockopt(zmq.TCP_MAXRT, STALL_MS)

    def listen_at(self, address: str) -> str:
        """Bind the socket. Returns its address, with the port that the system has chosen if the address left it
        open."""
        self.socket.bind(address)
        found = str(self.socket.getsockopt_string(zmq.LAST_ENDPOINT))
        self._port = found.rpartition(":")[2]
        return found

    def take_news(self) -> None:
        """Record which peers have connected and disconnected. Disconnect peers beyond the bound."""
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
        """For an XPUB, which keeps any number of subscriptions. Only peers with too many are disconnected."""
        with suppress(zmq.Again):
            for _ in range(NEWS_AT_A_TIME):
                told = self.socket.recv(zmq.NOBLOCK, copy=False)
                with suppress(zmq.ZMQError):  # the unsubscription of a disconnected peer: no peer has sent it
                    self._count(bytes(told.buffer[:1]), int(told.get(zmq.SRCFD)))

    def _count(self, what: bytes, descriptor: int) -> None:
        if descriptor not in self._open:
            self.take_news()
        num_subscriptions = self._open.get(descriptor)
        if num_subscriptions is None:
            return  # disconnected, or a router that this socket has connected to
        self._open[descriptor] = max(0, num_subscriptions + {b"\x01": 1, b"\x00": -1}.get(what, 0))
        if self._open[descriptor] > MAX_SUBSCRIPTIONS:
            self.take_news()  # the descriptor may belong to another peer by now
            if self._open.get(descriptor, 0) > MAX_SUBSCRIPTIONS:
                self._cut(descriptor)

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)

    def _cut(self, descriptor: int) -> None:
        # The descriptor may belong to another socket by now. But a socket at our port always belongs to a peer.
        with suppress(OSError), sockets.socket(fileno=os.dup(descriptor)) as connection:
            if str(_port_of(connection.getsockname())) == self._port:
                connection.shutdown(sockets.SHUT_RDWR)
                self.num_cut += 1


def _port_of(address: Any) -> Any:
    """The port of an internet address, or the path of a local one."""
    return address[1] if isinstance(address, tuple) else f"//{address}"
