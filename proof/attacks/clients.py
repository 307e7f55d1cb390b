"""Clients of the HTTP server, in order and not."""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection
from statistics import mean
from typing import Any

__all__ = ["JSON", "Answer", "Crowd", "Known", "ask", "crowd", "head", "raw"]

TIMEOUT_S = 60.0
JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class Answer:
    """`status` is 0 if the connection was closed without one."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def ask(port: int, path: str, fields: Any = None, headers: Mapping[str, str] = JSON, method: str = "") -> Answer:
    """One request on a connection of its own. `fields`: of its body, or the body itself; None: it has none."""
    body = fields if fields is None or isinstance(fields, bytes) else json.dumps(fields).encode()
    connection = HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        names = {name.lower() for name in headers}
        connection.putrequest(method or ("GET" if body is None else "POST"), path, skip_host="host" in names)
        for name, value in headers.items():
            connection.putheader(name, value)
        if body is not None:
            connection.putheader("content-length", str(len(body)))
        connection.endheaders(body)
        response = connection.getresponse()
        return Answer(response.status, dict(response.getheaders()), response.read())
    except OSError:
        return Answer(0)
    finally:
        connection.close()


def head(path: str = "/v1/completions", *lines: str) -> bytes:
    """The head of a POST, with these lines more."""
    about = [f"POST {path} HTTP/1.1", "host: 127.0.0.1", "content-type: application/json", *lines, "", ""]
    return "\r\n".join(about).encode("latin-1")


def raw(port: int, data: bytes, timeout_s: float = TIMEOUT_S) -> bytes:
    """All that the server answers to these bytes until it closes, or says nothing for so long."""
    found = b""
    with socket.create_connection(("127.0.0.1", port), timeout_s) as client:
        with suppress(OSError):
            client.sendall(data)
            while part := client.recv(65536):
                found += part
    return found


@dataclass
class Known:
    """A client that was there before the attack, and stays on its connection."""

    port: int
    _connection: HTTPConnection | None = None

    def answer_s(self) -> float:
        """How long one answer takes; infinite if there is none."""
        began_s = time.perf_counter()
        fields = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 8, "ignore_eos": True}
        try:
            self._connection = self._connection or HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
            self._connection.request("POST", "/v1/completions", json.dumps(fields), JSON)
            response = self._connection.getresponse()
            response.read()
        except OSError:
            self._connection = None
            return float("inf")
        return time.perf_counter() - began_s if response.status == 200 else float("inf")

    def mean_s(self, most: int = 12, for_s: float = 20.0) -> float:
        """Of so many answers, or of fewer where they take longer than that together."""
        until_s, found = time.monotonic() + for_s, [self.answer_s()]
        while len(found) < most and time.monotonic() < until_s:
            found.append(self.answer_s())
        return mean(found)


@dataclass
class Crowd:
    """Many connections at once."""

    port: int
    sockets: list[socket.socket] = field(default_factory=list)

    def connect(self, num: int, data: bytes = b"") -> None:
        """Connect, and say the same thing on each connection as far as the server takes it."""
        for _ in range(num):
            client = socket.socket()
            self.sockets.append(client)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(TIMEOUT_S)
            with suppress(OSError):  # the server has closed it
                client.connect(("127.0.0.1", self.port))
                client.sendall(data)

    def wait_answered(self, num: int, for_s: float = 60.0) -> None:
        """Wait until so many of them could read something. Nothing is read."""
        until_s, poller = time.monotonic() + for_s, select.poll()
        for client in self.sockets:
            poller.register(client, select.POLLIN)
        while num > 0 and (left_s := until_s - time.monotonic()) > 0:
            for descriptor, _ in poller.poll(1000 * left_s):
                poller.unregister(descriptor)
                num -= 1

    def first_bytes(self) -> Iterator[bytes]:
        """Of each answer."""
        for client in self.sockets:
            try:
                yield client.recv(4096)
            except OSError:
                yield b""


@contextmanager
def crowd(port: int) -> Iterator[Crowd]:
    found = Crowd(port)
    try:
        yield found
    finally:
        for client in found.sockets:
            client.close()
