"""The publisher: a thread that hashes, encodes and sends the ledger's changes over ZeroMQ."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import attrs
import zmq

from ... import ConfigError, RuntimeClosed
from ..._common.arguments import check_int
from ..._extensions.assembly import AnyLedger, check_ledger
from .changes import Changes
from .format import EventEncoder, EventFormat
from .peers import Peers

# -- replays ---------------------------------------------------------------------------------------------------------
#
# Missed batches: the last batches are kept, and sent again on request, as fast as the peer reads.

END = (-1).to_bytes(8, "big", signed=True)
"""Sent in place of a sequence number at the end of a replay."""
MAX_UNREAD_ANSWERS = 1000
"""Unread answers per peer. ZeroMQ reports that an answer was read shortly after the peer has read it."""


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
    """Reports whether the last frame has left the queue of its peer."""
    num_bytes: int


@attrs.define(eq=False)
class Replays:
    """Answers requests for batches. It sends one replay at a time per peer, and its unread bytes are bounded over all
    peers.

    A request beyond the bound gets the end marker alone. The peer may ask again.
    """

    socket: zmq.Socket[bytes]
    """A ROUTER."""
    buffer: ReplayBuffer
    topic: bytes
    _unread: dict[bytes, list[_Answer]] = attrs.field(factory=dict, init=False)

    @property
    def max_messages(self) -> int:
        """Unread messages per peer."""
        return self.buffer.max_batches + MAX_UNREAD_ANSWERS

    @property
    def num_unread_bytes(self) -> int:
        return sum(answer.num_bytes for answers in self._unread.values() for answer in answers)

    def answer(self, peer: bytes, start: int) -> None:
        """Send the kept batches from number `start` on."""
        self._forget_read()
        answers = self._unread.setdefault(peer, [])
        if len(answers) >= MAX_UNREAD_ANSWERS:
            return  # the peer asks without reading
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
        """Enough for two peers that request all batches."""
        return 2 * max(self.buffer.max_bytes, self.buffer.num_bytes)

    def _forget_read(self) -> None:
        for peer, answers in list(self._unread.items()):
            while answers and answers[0].tracker.done:
                del answers[0]
            if not answers:
                del self._unread[peer]


def frame_of(number: int) -> bytes:
    return number.to_bytes(8, "big")


# -- publisher -------------------------------------------------------------------------------------------------------

LOOPBACK = "tcp://127.0.0.1:5557"
CHANGES_PER_BATCH = 1024
_STOP = b"stop"
MAX_COUNT = 2**31 - 1
LEAST_BETWEEN_S = 1.0
"""Least interval between two publications of the whole cache for subscribers that ask for batches no longer kept. Each
of them makes the event loop walk the whole index."""
LINGER_MS = 500
"""Milliseconds for sent batches to leave the process after the publisher is closed."""
CLOSE_TIMEOUT_S = 5.0


class KVEventPublisher:
    """Publishes the blocks that `ledger` (`runtime.ledger`) caches while its `with` block runs. Make, enter and leave
    it in the thread that calls the ledger.

    `bind` is the address that subscribers connect to. If a router listens itself, pass its address as `connect`
    instead. `replay` is the address for requests of missed batches. The publisher listens only at the addresses given;
    the default for `bind` is on loopback. The first batch says that the cache is empty, and then what it contains. The
    last batch says that it is empty.

    A message has three frames: `topic`, the number of the batch (8 bytes, big-endian, from 0), and the batch in
    msgpack: `[seconds since 1970, events, data_parallel_rank]`. To request a missing batch, send an empty frame and the
    number of the batch to `replay`. The answers have the frames empty, `topic`, number and batch, for each later batch
    that is kept; the last answer has eight bytes `ff` in place of the number. If a batch is no longer kept, the whole
    cache is published again, at most once a second.
    """

    def __init__(
        self,
        ledger: AnyLedger,
        *,
        bind: str | None = None,
        connect: str | None = None,
        replay: str | None = None,
        topic: str = "",
        form: EventFormat | None = None,
        data_parallel_rank: int = 0,
        max_changes: int = 100_000,
        max_unsent: int = 10_000,
        replay_batches: int = 10_000,
        replay_bytes: int = 2**26,
        max_peers: int = 64,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if bind is not None and connect is not None:
            raise ConfigError("connect", "give either bind or connect, not both")
        check_ledger("ledger", ledger)
        check_int("data_parallel_rank", data_parallel_rank, 0, MAX_COUNT)
        check_int("max_changes", max_changes, 1, MAX_COUNT)
        check_int("max_unsent", max_unsent, 1, MAX_COUNT)
        check_int("replay_batches", replay_batches, 1, MAX_COUNT // 4)
        check_int("replay_bytes", replay_bytes, 0)
        check_int("max_peers", max_peers, 1, MAX_COUNT)
        self._connect, self._bind = connect, LOOPBACK if bind is None and connect is None else bind
        self._replay_address = replay
        self._topic = topic.encode()
        self._max_unsent = max_unsent
        self._max_peers = max_peers
        self._clock = clock
        self._encoder = EventEncoder(ledger.layout, form or EventFormat(), data_parallel_rank)
        self._changes = Changes(ledger, max_changes, self._wake)
        self._buffer = ReplayBuffer(replay_batches, replay_bytes)
        self._thread: threading.Thread | None = None
        self._may_tell_anew_s = 0.0
        self.failure: Exception | None = None
        """The error that has ended publishing, if any. After it, nothing is sent, and the ledger continues."""
        self.num_batches = 0
        """Batches sent so far. The next batch has this number."""
        self.endpoint = connect or ""
        """The address for subscribers, after it is open, with the port that the system has chosen if the address left
        it open."""
        self.replay_endpoint = ""

    # -- start and end --------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self._thread is not None:
            raise RuntimeClosed("a publisher can be opened only once: make another one")
        self._context = zmq.Context()
        self._context.linger = LINGER_MS  # the option of a socket does not apply to connections accepted before
        try:
            self._open_sockets()
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError("bind", f"{self._bind or self._connect}, {self._replay_address}: {error}") from error
        self._thread = threading.Thread(target=self._work, name="aoffload KV events", daemon=True)
        self._thread.start()
        self._changes.begin()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._thread is not None
        self._changes.end()
        self._signal(_STOP)
        self._thread.join()
        self._waker.close(linger=0)
        # In a thread and with a time limit, because it waits for connections that may be half open, and an engine has
        # to end.
        end = threading.Thread(target=self._context.term, name="aoffload KV events, closing", daemon=True)
        end.start()
        end.join(CLOSE_TIMEOUT_S)

    def tell_anew(self) -> None:
        """Publish that the cache is empty, and then the whole cache, for a subscriber that has missed batches."""
        self._changes.tell_anew()

    def _open_sockets(self) -> None:
        self._socket = self._context.socket(zmq.XPUB)  # a PUB that reports subscriptions
        self._socket.sndhwm = self._max_unsent
        self._socket.setsockopt(zmq.XPUB_VERBOSER, 1)  # report repeated subscriptions too: each is counted
        self._socket.rcvhwm = 1  # ZeroMQ stores all queued subscriptions before it reports the first one
        self._peers = Peers(self._socket, self._max_peers)
        self._peers.bound_frames(self._socket, 2 * len(self._topic))
        if self._bind is not None:
            self.endpoint = self._peers.listen_at(self._bind)
        else:
            self._socket.connect(self._connect or "")
        self._replay = self._context.socket(zmq.ROUTER)
        self._replays = Replays(self._replay, self._buffer, self._topic)
        self._replay.sndhwm = self._replays.max_messages
        self._replay_peers = Peers(self._replay, self._max_peers)
        self._replay_peers.bound_frames(self._replay, 0)
        if self._replay_address is not None:
            self.replay_endpoint = self._replay_peers.listen_at(self._replay_address)
        self._waker, self._awake = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._awake.bind("inproc://wake")
        self._waker.connect("inproc://wake")

    def _wake(self) -> None:
        """Called in the ledger's thread, in the middle of a change."""
        self._signal(b"")

    def _signal(self, what: bytes) -> None:
        """Never blocks: at most one wake-up is pending. After the thread has ended, wake-ups are dropped."""
        with suppress(zmq.Again):
            self._waker.send(what, zmq.NOBLOCK)

    # -- the thread -----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001 - a clock, say, or a token that can't be encoded: the ledger goes on
            self.failure = error
        finally:
            self._peers.close()
            self._replay_peers.close()
            for socket in (self._socket, self._replay, self._awake):
                socket.close()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._awake, zmq.POLLIN)
        poller.register(self._replay, zmq.POLLIN)
        poller.register(self._socket, zmq.POLLIN)
        for peers in (self._peers, self._replay_peers):
            poller.register(peers.monitor, zmq.POLLIN)
        is_over = False
        while not is_over:
            ready = dict(poller.poll())
            for peers in (self._peers, self._replay_peers):
                if peers.monitor in ready:
                    peers.take_news()
            if self._replay in ready:
                self._answer()
            if self._socket in ready:
                self._peers.count_subscriptions()
            if self._awake in ready:
                is_over = self._awake.recv() == _STOP
                self._publish()

    def _publish(self) -> None:
        """Send all changes queued so far."""
        self._changes.expect()
        while told := self._changes.take(CHANGES_PER_BATCH):
            sent = Sent(self.num_batches, self._encoder.batch(told, self._clock()))
            self._buffer.keep(sent)
            self._socket.send_multipart([self._topic, frame_of(sent.number), sent.payload])
            self.num_batches += 1

    def _answer(self) -> None:
        """Answer a replay request with the batches that are still kept. Malformed requests get no answer."""
        frames = self._replay.recv_multipart()
        if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
            return
        client, start = frames[0], int.from_bytes(frames[2], "big")
        if not self._buffer.has_all_from(start) and time.monotonic() >= self._may_tell_anew_s:
            self._may_tell_anew_s = time.monotonic() + LEAST_BETWEEN_S
            self._changes.fall_behind()
        self._replays.answer(client, start)
