"""Peers of KV events that ask for more than they read, or say more than anybody has to."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import zmq

from .figures import Figure
from .victims import PROGRAMS, Victim, started

__all__ = ["frames", "replays", "subscriptions"]

GUARD_MS = 30_000
FRAME_BYTES = 1_500_000_000


def replays(tree: Path) -> Iterator[Figure]:
    """Replays of everything, again and again, to peers that read nothing."""
    attack = "50 replay requests each of 20 peers that do not read"
    with _publishing(tree) as (victim, _, replay), _peers(zmq.DEALER, replay, 20) as peers:
        before = victim.mb
        for _ in range(50):
            for peer in peers:
                peer.send_multipart([b"", bytes(8)], zmq.NOBLOCK)
        time.sleep(8)
        grown = victim.peak_mb - before
        answer_s = _asked(replay)
    yield Figure("A9", attack, "memory at most", grown, 300.0, "MB")
    yield Figure("A9", attack, "another peer's replay meanwhile", answer_s, 5.0, "s")


def subscriptions(tree: Path) -> Iterator[Figure]:
    """Different subscriptions, each of which is kept."""
    attack = "300,000 subscriptions of 100 bytes"
    with _publishing(tree) as (victim, endpoint, _), _peers(zmq.SUB, endpoint, 1) as (other,):
        other.subscribe(b"")
        lost = other.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        with _speaking(endpoint, b"SUB") as peer:
            before = victim.mb
            with suppress(OSError):  # it was cut off
                for first in range(0, 300_000, 1000):
                    peer.sendall(b"".join(map(_subscription, range(first, first + 1000))))
            time.sleep(3)
            is_well = _is_followed(victim, endpoint)  # the library takes subscriptions when there is something to send
            grown, num_lost = victim.peak_mb - before, lost.poll(0)
        other.disable_monitor()
        lost.close(linger=0)
    yield Figure("A9", attack, "memory at most", grown, 100.0, "MB")
    yield Figure("A9", attack, "connections lost by a peer that was there", num_lost, 0, "")
    yield Figure("A9", attack, "a subscriber in order hears on", is_well, 1, "", True)


def frames(tree: Path) -> Iterator[Figure]:
    """One frame that is longer than anything that there is to say."""
    with _publishing(tree) as (victim, _, replay), _peers(zmq.DEALER, replay, 1) as (peer,):
        before = victim.mb
        peer.send_multipart([b"", bytes(FRAME_BYTES)], copy=False)
        time.sleep(5)
        grown, answer_s = victim.peak_mb - before, _asked(replay)
    yield Figure("A9", "a frame of 1.5 GB", "memory at most", grown, 50.0, "MB")
    yield Figure("A9", "a frame of 1.5 GB", "another peer's replay meanwhile", answer_s, 5.0, "s")


@contextmanager
def _publishing(tree: Path) -> Iterator[tuple[Victim, str, str]]:
    with started(tree, [str(PROGRAMS / "publisher.py")]) as victim:
        if not victim.first_line:
            victim.process.wait()
            raise RuntimeError(victim.stderr_text)
        endpoint, replay = victim.first_line.split()
        yield victim, endpoint, replay


@contextmanager
def _speaking(address: str, kind: bytes) -> Iterator[socket.socket]:
    """A peer without a library, which would bound or keep what it sends: ZMTP 3.0 up to READY."""
    host, port = address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), GUARD_MS / 1000) as peer:
        peer.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
        with peer.makefile("rb", buffering=0) as stream:
            stream.read(64)
        ready = b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
        peer.sendall(b"\x04" + bytes([len(ready)]) + ready)
        peer.recv(256)  # its own: from here on messages are taken
        yield peer


def _subscription(number: int) -> bytes:
    return b"\x00\x65\x01" + number.to_bytes(4, "big") + bytes(96)


@contextmanager
def _peers(kind: int, address: str, num: int) -> Iterator[list[Any]]:
    """Sockets that are connected and read nothing by themselves, each with a context of its own."""
    context = zmq.Context()
    found = [context.socket(kind) for _ in range(num)]
    try:
        for each in found:
            each.linger, each.rcvhwm, each.rcvbuf, each.sndhwm = 0, 1, 4096, 0
            each.connect(address)
        yield found
    finally:
        context.destroy(linger=0)


def _asked(replay: str) -> float:
    """Seconds until another peer has its answer; infinite if it has none."""
    began_s = time.monotonic()
    with _peers(zmq.DEALER, replay, 1) as (peer,):
        peer.rcvtimeo = GUARD_MS
        peer.send_multipart([b"", (2**60).to_bytes(8, "big")])
        try:
            peer.recv_multipart()
        except zmq.Again:
            return float("inf")
    return time.monotonic() - began_s


def _is_followed(victim: Victim, endpoint: str) -> bool:
    """Whether a subscriber hears what is published from now on."""
    with _peers(zmq.SUB, endpoint, 1) as (subscriber,):
        subscriber.rcvhwm = 0
        subscriber.subscribe(b"")
        for _ in range(20):
            victim.stdin.write(b"\n")
            victim.stdin.flush()
            if victim.next_line().strip() != "None":
                return False
            if subscriber.poll(1000):
                return True
    return False
