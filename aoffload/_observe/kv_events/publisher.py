"""The publisher: a thread that hashes, encodes and sends the ledger's changes over ZeroMQ."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

import zmq

from aoffload import ConfigError, RuntimeClosed
from ..._common.arguments import check_int

from ..._extensions.assembly import AnyLedger, check_ledger
from .changes import Changes
from .format import EventEncoder, EventFormat
from .peers import Peers
from .replays import ReplayBuffer, Replays, Sent, frame_of

__all__ = ["KVEventPublisher"]

LOOPBACK = "tcp://127.0.0.1:5557"
CHANGES_PER_BATCH = 1024
_STOP = b"stop"
MAX_COUNT = 2**31 - 1
LEAST_BETWEEN_S = 1.0
"""Least interval between two publications of the whole cache for subscribers that ask for batches no longer kept: the
event loop walks the whole index for each."""
LINGER_MS = 500
"""How long sent batches may take to leave the process once the publisher is closed."""
CLOSE_TIMEOUT_S = 5.0


class KVEventPublisher:
    """Publishes what `ledger` (`runtime.ledger`) caches while its `with` block runs. Made, entered and left in the
    thread that calls the ledger.

    `bind` is the address that subscribers connect to; `connect`, in its place, that of a router that listens itself.
    `replay` is the address for requests of missed batches. It listens only at the addresses given; the default for
    `bind` is on loopback. The first batch says that nothing is cached, then what is; the last one that nothing is.
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
            raise ConfigError("connect", "give either bind or connect")
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
        """The error that has ended publishing, if one has: nothing is sent any more, and the ledger goes on."""
        self.num_batches = 0
        """Batches sent so far; the next one has this number."""
        self.endpoint = connect or ""
        """The address for subscribers, once it is open, with the port that the system chose if that was left to it."""
        self.replay_endpoint = ""

    # -- its life -------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self._thread is not None:
            raise RuntimeClosed("a publisher is opened once: make another one")
        self._context = zmq.Context()
        self._context.linger = LINGER_MS  # a socket's own does not apply to connections accepted before
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
        # In a thread, for a bounded time: it waits for connections that may be half open, and an engine has to end.
        end = threading.Thread(target=self._context.term, name="aoffload KV events, closing", daemon=True)
        end.start()
        end.join(CLOSE_TIMEOUT_S)

    def tell_anew(self) -> None:
        """Publish that nothing is cached, then all that is: for a subscriber that has missed batches."""
        self._changes.tell_anew()

    def _open_sockets(self) -> None:
        self._socket = self._context.socket(zmq.XPUB)  # a PUB that tells of subscriptions
        self._socket.sndhwm = self._max_unsent
        self._socket.setsockopt(zmq.XPUB_VERBOSER, 1)  # also of what another peer has subscribed to: each is counted
        self._socket.rcvhwm = 1  # ZeroMQ keeps all subscriptions that it has before it tells of the first one
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
        """Never blocks: at most one wake-up is pending, and once the thread has ended it is dropped."""
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
