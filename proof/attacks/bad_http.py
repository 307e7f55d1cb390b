"""Clients that speak HTTP in ways that no client has to: pipelining, endless parts, halves, two meanings at once."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from .clients import Crowd, Known, ask, crowd, head, raw
from .figures import Figure
from .victims import Victim, serving

__all__ = ["endless", "pipelines", "smuggled"]

READ_TIMEOUT_S = 3
NUM_PIPELINES = 30
NEVER = float("inf")
BODY = b'{"model": "tiny", "prompt": "x", "max_tokens": 1}'
LENGTH = f"content-length: {len(BODY)}"


def pipelines(tree: Path) -> Iterator[Figure]:
    """Clients that ask on and on, read nothing, and take every connection that there is."""
    attack = f"{NUM_PIPELINES} clients pipeline and read nothing, 20 may connect"
    asked = b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" * 20_000
    with serving(tree, f"--read-timeout={READ_TIMEOUT_S}", "--max-connections=20") as victim:
        before = victim.mb
        with crowd(victim.port) as clients:
            clients.connect(NUM_PIPELINES)
            _push(clients, asked)
            time.sleep(3 * READ_TIMEOUT_S)
            answer_s, grown = Known(victim.port).answer_s(), victim.peak_mb - before
    yield Figure("E1", attack, "a new client is answered", answer_s < NEVER, 1, "", True)
    yield Figure("E1", attack, "memory at most", grown, 100.0, "MB")


def _push(clients: Crowd, data: bytes) -> None:
    """Say as much of it on each connection as goes without waiting, again and again for some seconds."""
    until_s, sent = time.monotonic() + 6.0, dict.fromkeys(clients.sockets, 0)
    while time.monotonic() < until_s:
        for client in clients.sockets:
            client.setblocking(False)
            with suppress(OSError):
                sent[client] += client.send(data[sent[client] % 45 :])
        time.sleep(0.01)


def endless(tree: Path) -> Iterator[Figure]:
    """Parts of a request that never end: extensions, trailers, bodies in small parts, a first line."""
    chunked = head("/v1/completions", "transfer-encoding: chunked")
    parts = {
        "a chunk's extension": (chunked + b"1;x=", b"x" * 4096),
        "a body in parts of a byte": (chunked, b"1\r\nx\r\n" * 16),
        "a trailer": (chunked + b"1\r\nx\r\n0\r\n", b"x: y\r\n" * 512),
        "a header": (head()[:-2] + b"x: ", b"x" * 4096),
        "the first line": (b"GET /", b"x" * 4096),
        "many headers": (head()[:-2], b"x: y\r\n" * 512),
    }
    with serving(tree, f"--read-timeout={READ_TIMEOUT_S}") as victim:
        before = victim.mb
        longest_s = max(_until_cut_s(victim, *data) for data in parts.values())
        grown = victim.peak_mb - before
        status = ask(victim.port, "/v1/completions", BODY).status
    attack = f"{len(parts)} parts of a request without end"
    yield Figure("E2", attack, "until the last one is cut off", longest_s, 4 * READ_TIMEOUT_S, "s")
    yield Figure("E2", attack, "memory at most", grown, 60.0, "MB")
    yield Figure("E2", attack, "a new client is answered", status == 200, 1, "", True)


def _until_cut_s(victim: Victim, begin: bytes, more: bytes) -> float:
    """Seconds until the server does not take any more; infinite if it does for long."""
    began_s = time.monotonic()
    with socket.create_connection(("127.0.0.1", victim.port), 5.0) as client:
        with suppress(OSError):
            client.sendall(begin)
            while time.monotonic() < began_s + 6 * READ_TIMEOUT_S:
                client.sendall(more)
                time.sleep(0.005)
            return NEVER
    return time.monotonic() - began_s


def smuggled(tree: Path) -> Iterator[Figure]:
    """Requests that a proxy may read in another way than the server does."""
    hidden = b"GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
    cases = [
        head("/v1/completions", LENGTH, f"content-length: {len(BODY) + len(hidden)}") + BODY + hidden,
        head("/v1/completions", "transfer-encoding: chunked, identity") + b"0\r\n\r\n" + hidden,
        head("/v1/completions", "transfer-encoding: xchunked", LENGTH) + BODY + hidden,
        head("/v1/completions", "content-length: +5") + BODY + hidden,
        head("/v1/completions", "content-length : 5") + BODY + hidden,
        head("/v1/completions", LENGTH, "host: evil.example") + BODY,
        head("/v1/completions", LENGTH, "content-type: text/plain") + BODY,
        b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\n" + LENGTH.encode() + b"\r\n\r\n" + BODY,
    ]
    with serving(tree) as victim:
        served = sum(b"200 OK" in raw(victim.port, data, 2.0) for data in cases)
        status = ask(victim.port, "/v1/completions", BODY).status
    yield Figure("E3", f"{len(cases)} requests of two meanings", "served", served, 0)
    yield Figure("E3", f"{len(cases)} requests of two meanings", "a new client is answered", status == 200, 1, "", True)
