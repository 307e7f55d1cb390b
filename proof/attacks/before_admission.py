"""Resources that clients can use before admission: descriptors, headers, bodies, unread answers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from .clients import Known, crowd, head
from .figures import Figure
from .victims import more_files, serving

__all__ = ["bodies", "connections", "echoes", "headers"]

READ_TIMEOUT_S = 3
"""Given to a server that has the option."""
MEGABYTE = 1_000_000


def connections(tree: Path) -> Iterator[Figure]:
    """More idle connections than the server may have descriptors."""
    attack = "142 idle connections, 120 descriptors"
    with serving(tree, num_files=120) as victim:
        known = Known(victim.port)
        known.mean_s(3)
        alone_s = known.mean_s()
        with crowd(victim.port) as idle:
            idle.connect(142)
            began_s = time.monotonic()
            ratio = known.mean_s() / alone_s
            time.sleep(max(0.0, began_s + 5.0 - time.monotonic()))
            num_written = len(victim.stderr_text)
    yield Figure("A1", attack, "a connected client's answer, times as long", ratio, 2.0)
    yield Figure("A1", attack, "written on stderr in 5 s", num_written / 1e3, 10.0, "kB")


def headers(tree: Path) -> Iterator[Figure]:
    """Headers that never end."""
    num = min(3000, more_files(4000) - 200)
    attack = f"{num:,} half-sent headers"
    with serving(tree, f"--read-timeout={READ_TIMEOUT_S}") as victim:
        before = victim.num_sockets
        with crowd(victim.port) as halves:
            halves.connect(num, head()[:-2] + b"x: ")
            Known(victim.port).answer_s()  # all have been accepted
            most = victim.num_sockets - before
            time.sleep(2 * READ_TIMEOUT_S)
            left = victim.num_sockets - before
    yield Figure("A2", attack, "connections at once", most, 1024 + 1)
    yield Figure("A2", attack, f"connections {2 * READ_TIMEOUT_S} s later, at --read-timeout 3", left, 0)


def bodies(tree: Path) -> Iterator[Figure]:
    """Bodies that never end."""
    num = min(1500, more_files(4000) - 200)
    attack = f"{num:,} unfinished bodies of 1 MB"
    with serving(tree, f"--read-timeout={READ_TIMEOUT_S}") as victim:
        before = victim.mb
        with crowd(victim.port) as halves:
            halves.connect(num, head("/v1/completions", f"content-length: {MEGABYTE + 1}") + bytes(MEGABYTE))
            Known(victim.port).answer_s()  # what has arrived was read
            grown = victim.peak_mb - before
    yield Figure("A3", attack, "memory at most", grown, 300.0, "MB")


def echoes(tree: Path) -> Iterator[Figure]:
    """Long names of fields that come back, to clients that do not read."""
    attack = "300 unknown names of 1 MB, answers not read"
    body = b'{"model": "tiny", "prompt": "x", "' + "\u00e9".encode() * (MEGABYTE // 2) + b'": 1}'
    with serving(tree) as victim:
        before = victim.mb
        with crowd(victim.port) as readers:
            readers.connect(300, head("/v1/completions", f"content-length: {len(body)}") + body)
            readers.wait_answered(300)
            time.sleep(2)  # a farewell of a second is over
            kept, grown = victim.mb - before, victim.peak_mb - before
    yield Figure("A4", attack, "memory at most", grown, 100.0, "MB")
    yield Figure("A4", attack, "memory 2 s after the last answer", kept, 60.0, "MB")
