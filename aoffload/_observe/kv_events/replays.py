"""Missed batches: kept for a while, and sent again to those who ask, as fast as they read."""

from __future__ import annotations

from collections import deque
from typing import Any

import attrs
import zmq

__all__ = ["END", "ReplayBuffer", "Replays", "Sent", "frame_of"]

END = (-1).to_bytes(8, "big", signed=True)
"""Sent in place of a sequence number when a replay is over."""
MAX_UNREAD_ANSWERS = 1000
"""Answers that may wait for one peer. It is told that an answer is read a moment after the peer has read it."""


@attrs.frozen
class Sent:
    number: int
    payload: bytes


@attrs.define
class ReplayBuffer:
    """The last batches, bounded in number and bytes."""

    max_batches: int
    max_bytes: int
    num_bytes: int = 0
    _sent: deque[Sent] = attrs.field(factory=deque)

    def keep(self, sent: Sent) -> None:
        self._sent.append(sent)
        self.num_bytes += len(sent.payload)
        while len(self._sent) > self.max_batches or (self.num_bytes > self.max_bytes and len(self._sent) > 1):
            self.num_bytes -= len(self._sent.popleft().payload)

    def has_all_from(self, number: int) -> bool:
        return not self._sent or self._sent[0].number <= number

    def from_number(self, number: int) -> list[Sent]:
        return [sent for sent in self._sent if sent.number >= number]


@attrs.frozen
class _Answer:
    tracker: Any
    """Says whether the last frame has left the queue of its peer."""
    num_bytes: int


@attrs.define(eq=False)
class Replays:
    """Answers requests for batches: one replay at a time a peer, and no more than a bound of unread bytes in all.

    A request beyond that is answered with the end alone: there is nothing for now, and the peer may ask again.
    """

    socket: zmq.Socket[bytes]
    """A ROUTER."""
    buffer: ReplayBuffer
    topic: bytes
    _unread: dict[bytes, list[_Answer]] = attrs.field(factory=dict, init=False)

    @property
    def max_messages(self) -> int:
        """Messages that may wait for one peer."""
        return self.buffer.max_batches + MAX_UNREAD_ANSWERS

    @property
    def num_unread_bytes(self) -> int:
        return sum(answer.num_bytes for answers in self._unread.values() for answer in answers)

    def answer(self, peer: bytes, start: int) -> None:
        """Send the batches from number `start` on, as far as they are kept."""
        self._forget_read()
        answers = self._unread.setdefault(peer, [])
        if len(answers) >= MAX_UNREAD_ANSWERS:
            return  # it asks without reading
        batches = [] if any(answer.num_bytes for answer in answers) else self.buffer.from_number(start)
        num_bytes = sum(len(sent.payload) for sent in batches)
        if num_bytes and self.num_unread_bytes + num_bytes > self.most_unread_bytes:
            batches, num_bytes = [], 0
        for sent in batches:
            self.socket.send_multipart([peer, b"", self.topic, frame_of(sent.number), sent.payload])
        self.socket.send_multipart([peer, b"", b""], zmq.SNDMORE)
        end = zmq.Frame(END, track=True, copy=False, copy_threshold=0)
        answers.append(_Answer(self.socket.send(end, zmq.SNDMORE, copy=False, track=True), num_bytes))
        self.socket.send(b"")

    @property
    def most_unread_bytes(self) -> int:
        """Room for two peers that ask for all there is."""
        return 2 * max(self.buffer.max_bytes, self.buffer.num_bytes)

    def _forget_read(self) -> None:
        for peer, answers in list(self._unread.items()):
            while answers and answers[0].tracker.done:
                del answers[0]
            if not answers:
                del self._unread[peer]


def frame_of(number: int) -> bytes:
    return number.to_bytes(8, "big")
