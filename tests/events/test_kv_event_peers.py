"""Memory that a peer can use in the publisher: unread replays, subscriptions, frames, connections."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import pytest
import zmq
from test_kv_event_format import ledger_of

from aoffload._observe.kv_events.peers import MAX_SUBSCRIPTIONS
from aoffload._observe.kv_events.publisher import END, MAX_UNREAD_ANSWERS, ReplayBuffer, Replays, Sent
from aoffload.kv_events import KVEventPublisher

ANY_PORT = "tcp://127.0.0.1:*"
GUARD_MS = 60_000
"""Never waited for in full unless something hangs that must not."""


@attrs.define
class Tracker:
    done: bool = False


@attrs.define(eq=False)
class Queue:
    """Stands for a ROUTER: what waits for which peer, and when it was read."""

    sent: list[list[bytes]] = attrs.field(factory=list)
    trackers: list[Tracker] = attrs.field(factory=list)
    _frames: list[bytes] = attrs.field(factory=list)

    def send_multipart(self, frames: list[bytes], flags: int = 0) -> None:
        for frame in frames[:-1]:
            self.send(frame, zmq.SNDMORE)
        self.send(frames[-1], flags)

    def send(self, frame: Any, flags: int = 0, copy: bool = True, track: bool = False) -> Tracker | None:
        self._frames.append(bytes(frame))
        if not flags & zmq.SNDMORE:
            self.sent.append(self._frames)
            self._frames = []
        if track:
            self.trackers.append(Tracker())
        return self.trackers[-1] if track else None

    def take(self) -> list[int]:
        """The numbers of the batches sent since the last call; -1: the end."""
        found = [int.from_bytes(frames[3], "big", signed=True) for frames in self.sent]
        self.sent.clear()
        return found


def replays_of(num_batches: int, max_bytes: int) -> tuple[Replays, Queue]:
    buffer, queue = ReplayBuffer(100, max_bytes), Queue()
    for number in range(num_batches):
        buffer.keep(Sent(number, bytes(10)))
    return Replays(queue, buffer, b"topic"), queue  # type: ignore[arg-type]


def test_a_peer_has_one_replay_at_a_time() -> None:
    """The next request is answered with the end alone, until it has read; other peers have replays of their own."""
    replays, queue = replays_of(3, 1000)
    replays.answer(b"a", 1)
    assert queue.sent[0] == [b"a", b"", b"topic", (1).to_bytes(8, "big"), bytes(10)]
    assert queue.sent[-1] == [b"a", b"", b"", END, b""]
    assert queue.take() == [1, 2, -1]
    replays.answer(b"a", 0)
    assert queue.take() == [-1]
    replays.answer(b"b", 0)
    assert queue.take() == [0, 1, 2, -1]
    for tracker in queue.trackers:
        tracker.done = True
    replays.answer(b"a", 0)
    assert queue.take() == [0, 1, 2, -1]
    assert replays.num_unread_bytes == 30


def test_unread_replays_are_bounded_in_sum() -> None:
    """Peers that read nothing leave room for two replays of everything; nothing is remembered of who has read."""
    replays, queue = replays_of(10, 100)
    for peer in range(5):
        replays.answer(bytes([peer]), 0)
    assert queue.take() == 2 * [*range(10), -1] + 3 * [-1]
    assert replays.num_unread_bytes == 200
    for tracker in queue.trackers:
        tracker.done = True
    replays._forget_read()
    assert (replays.num_unread_bytes, replays._unread) == (0, {})


def test_who_only_asks_is_not_answered_any_more() -> None:
    """Ends wait for a peer, too; there are only so many."""
    replays, queue = replays_of(1, 100)
    for _ in range(2 * MAX_UNREAD_ANSWERS):
        replays.answer(b"a", 0)
    assert len(queue.sent) == 1 + MAX_UNREAD_ANSWERS


@contextmanager
def connected(kind: int, address: str) -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """A socket, and one that tells when its connection was closed."""
    context = zmq.Context()
    socket = context.socket(kind)
    socket.linger, socket.rcvtimeo, socket.sndhwm = 0, GUARD_MS, 0
    closed = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    socket.connect(address)
    try:
        yield socket, closed
    finally:
        socket.disable_monitor()
        closed.close(linger=0)
        socket.close()
        context.term()


def ask(socket: zmq.Socket[bytes]) -> bytes:
    """The last number of a replay."""
    socket.send_multipart([b"", (2**60).to_bytes(8, "big")])
    return socket.recv_multipart()[2]


@pytest.fixture
def publisher() -> Iterator[KVEventPublisher]:
    with KVEventPublisher(ledger_of(), bind=ANY_PORT, replay=ANY_PORT, max_peers=2) as found:
        yield found
    assert found.failure is None


def test_a_frame_longer_than_any_request_is_not_taken(publisher: KVEventPublisher) -> None:
    """Its peer is cut off before the frame is read; the others are answered."""
    with connected(zmq.DEALER, publisher.replay_endpoint) as (hostile, closed):
        hostile.send_multipart([b"", bytes(2000)])
        assert closed.poll(GUARD_MS)
        with connected(zmq.DEALER, publisher.replay_endpoint) as (other, _):
            assert ask(other) == END


def test_one_peer_too_many_is_cut_off(publisher: KVEventPublisher) -> None:
    """Those who were there before are answered on; where one of them goes, there is room again."""
    with connected(zmq.DEALER, publisher.replay_endpoint) as (first, _):
        with connected(zmq.DEALER, publisher.replay_endpoint) as (second, _):
            assert [ask(first), ask(second)] == [END, END]
            with connected(zmq.DEALER, publisher.replay_endpoint) as (_, closed):
                assert closed.poll(GUARD_MS)
            assert [ask(first), ask(second)] == [END, END]
        with connected(zmq.DEALER, publisher.replay_endpoint) as (again, _):
            while not again.poll(20):  # the end of the other one may not have been heard of
                again.send_multipart([b"", bytes(8)])


def hears(publisher: KVEventPublisher, subscriber: zmq.Socket[bytes]) -> bool:
    while not subscriber.poll(20):
        publisher.tell_anew()
    return len(subscriber.recv_multipart()) == 3


@pytest.mark.parametrize("num_floods", [1, 5])
def test_who_subscribes_without_end_is_cut_off_and_nobody_else(num_floods: int, publisher: KVEventPublisher) -> None:
    """ZeroMQ keeps every subscription. A peer that comes back and floods again harms nobody either: who was there
    before, with as many subscriptions as a peer may have, hears on over the same connection."""
    with connected(zmq.SUB, publisher.endpoint) as (subscriber, lost):
        for number in range(MAX_SUBSCRIPTIONS):
            subscriber.subscribe(bytes(number))
        assert hears(publisher, subscriber)
        for _ in range(num_floods):
            with connected(zmq.XSUB, publisher.endpoint) as (hostile, closed):
                for number in range(20 * MAX_SUBSCRIPTIONS):
                    hostile.send(b"\x01" + number.to_bytes(4, "big"))
                assert closed.poll(GUARD_MS)
        while subscriber.poll(0):
            subscriber.recv_multipart()
        assert hears(publisher, subscriber)
        assert not lost.poll(0), "its connection was closed"


def test_what_another_peer_has_subscribed_to_counts_too(publisher: KVEventPublisher) -> None:
    """Each peer answers for all of its own: who follows another one's subscriptions may have as many as that one."""
    with (
        connected(zmq.SUB, publisher.endpoint) as (first, lost),
        connected(zmq.XSUB, publisher.endpoint) as (second, closed),
    ):
        for number in range(MAX_SUBSCRIPTIONS):
            first.subscribe(bytes(number))
        assert hears(publisher, first)
        for number in range(MAX_SUBSCRIPTIONS + 1):
            second.send(b"\x01" + bytes(number))
        assert closed.poll(GUARD_MS)
        assert not lost.poll(0)


def test_who_changes_its_mind_is_not_cut_off(publisher: KVEventPublisher) -> None:
    """Only what it is subscribed to counts, whatever it was subscribed to before."""
    with connected(zmq.SUB, publisher.endpoint) as (subscriber, lost):
        subscriber.subscribe(b"")
        for number in range(20 * MAX_SUBSCRIPTIONS):
            subscriber.subscribe(b"topic %d" % number)
            subscriber.unsubscribe(b"topic %d" % number)
        assert hears(publisher, subscriber)
        assert not lost.poll(0)
