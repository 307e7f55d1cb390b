"""Over real sockets: sequence numbers, gaps and their healing, late subscribers, and who listens where."""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
import zmq
from event_subscriber import EventSubscriber, cached_blocks
from random_walk import Walk
from test_kv_event_format import ledger_of, serve

from aoffload import (
    ConfigError,
    InvalidArgument,
    KVCacheGroup,
    Ledger,
    OffloadConfig,
    OffloadRuntime,
    RuntimeClosed,
)
from aoffload._observe.kv_events.format import Digests
from aoffload._observe.kv_events.publisher import END, ReplayBuffer, Sent
from aoffload.kv_events import KVEventPublisher
from aoffload.ledger import Prefix, Root

ANY_PORT = "tcp://127.0.0.1:*"
GUARD_MS = 60_000
"""Never waited for in full unless something hangs that must not."""


class Subscriber:
    """Follows as routers do: by number, and a gap is filled by asking. Drops what it is told to drop."""

    def __init__(self, context: zmq.Context[Any], publisher: KVEventPublisher, topic: str = "") -> None:
        self.follower = EventSubscriber()
        self.next_number = 0
        self.num_gaps = 0
        self.dropped: set[int] = set()
        self.sub, self.replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        self.sub.rcvtimeo = self.replay.rcvtimeo = GUARD_MS
        self.sub.rcvhwm = self.replay.rcvhwm = 0
        self.sub.connect(publisher.endpoint)
        self.sub.subscribe(topic.encode())
        if publisher.replay_endpoint:
            self.replay.connect(publisher.replay_endpoint)

    def close(self) -> None:
        self.sub.close(linger=0)
        self.replay.close(linger=0)

    def receive(self) -> None:
        """One batch, and what is missing before it."""
        _, number, payload = self.sub.recv_multipart()
        self.take(int.from_bytes(number, "big"), payload)

    def take(self, number: int, payload: bytes) -> None:
        if number in self.dropped:
            self.dropped.discard(number)
            return
        if number > self.next_number:
            self.num_gaps += 1
            self.ask()
        if number == self.next_number:
            self.follower.apply(payload)
            self.next_number += 1

    def ask(self) -> None:
        """Whatever there is from the number that comes next."""
        self.replay.send_multipart([b"", self.next_number.to_bytes(8, "big")])
        while True:
            empty, _, number, payload = self.replay.recv_multipart()
            assert empty == b""
            if number == END:
                assert payload == b""
                return
            found = int.from_bytes(number, "big")
            if found < self.next_number:
                continue
            self.next_number = found + 1
            self.follower.apply(payload)

    def catch_up(self, publisher: KVEventPublisher, ledger: Ledger) -> None:
        """Everything that was told by now; then it must know what is cached."""
        sent = wait_until_idle(publisher)
        while self.next_number < sent:
            if self.sub.poll(0):
                self.receive()
            else:
                self.ask()
        assert self.follower.cached == cached_blocks(ledger)


def wait_until_idle(publisher: KVEventPublisher) -> int:
    """How many batches there are once all was published that was told."""
    context = zmq.Context()
    with closing(context.socket(zmq.DEALER)) as socket:
        socket.rcvtimeo, socket.linger = GUARD_MS, 0
        socket.connect(publisher.replay_endpoint)
        is_idle = False
        while not is_idle:
            # Read before the request: the thread may have taken the changes and not published them yet. It answers
            # after that.
            is_idle = not publisher._changes._told and not publisher._changes._is_signalled
            socket.send_multipart([b"", (2**60).to_bytes(8, "big")])
            assert socket.recv_multipart()[2] == END
    context.term()
    return publisher.num_batches


@contextmanager
def subscribed(publisher: KVEventPublisher, **options: Any) -> Iterator[Subscriber]:
    context = zmq.Context()
    subscriber = Subscriber(context, publisher, **options)
    try:
        yield subscriber
    finally:
        subscriber.close()
        context.term()


def published(ledger: Ledger, **options: Any) -> KVEventPublisher:
    return KVEventPublisher(ledger, **{"bind": ANY_PORT, "replay": ANY_PORT, **options})


@pytest.mark.parametrize("with_windows", [False, True], ids=["full attention", "windows"])
def test_a_subscriber_with_gaps_ends_with_exactly_what_is_cached(with_windows: bool) -> None:
    """Random traffic over sockets; the subscriber comes late and loses a third of the batches. It notices by the
    numbers, asks for what is missing, and knows in the end exactly the blocks of each tier."""
    num_gaps = 0
    for seed in range(6):
        walk = Walk(seed, with_windows=with_windows)
        with published(walk.ledger) as publisher:
            walk.run(60)
            with subscribed(publisher) as subscriber:
                for _ in range(12):
                    subscriber.dropped = {n for n in range(subscriber.next_number, 500) if (n + seed) % 3 == 0}
                    walk.run(15)
                    subscriber.catch_up(publisher, walk.ledger)
                num_gaps += subscriber.num_gaps
    assert num_gaps > 0


def test_a_gap_is_seen_by_its_number_and_healed_by_replay() -> None:
    """One batch is lost: the next one does not follow, what is asked for again begins with the one that was lost."""
    ledger = ledger_of()
    with published(ledger) as publisher, subscribed(publisher) as subscriber:
        wait_until_idle(publisher)
        subscriber.ask()
        subscriber.dropped = {1}
        serve(ledger, Prefix.of(Root("m"), range(8)))
        wait_until_idle(publisher)
        serve(ledger, Prefix.of(Root("m"), range(50, 58)))
        subscriber.catch_up(publisher, ledger)
        assert len(subscriber.follower.cached) == 8


def test_numbers_follow_each_other_and_topics_are_heard() -> None:
    """Frames are topic, number (8 bytes, big-endian) and batch; who subscribes to another topic hears nothing."""
    ledger = ledger_of()
    with published(ledger, topic="kv@pod@model") as publisher, subscribed(publisher, topic="kv@pod") as subscriber:
        with subscribed(publisher, topic="other") as deaf:
            wait_until_idle(publisher)
            while not subscriber.sub.poll(20):  # it takes its time to be known to the publisher
                publisher.tell_anew()
            for prompt in range(3):
                serve(ledger, Prefix.of(Root("m", str(prompt)), range(8)))
                wait_until_idle(publisher)
            frames = [subscriber.sub.recv_multipart()]
            while int.from_bytes(frames[-1][1], "big") < publisher.num_batches - 1:
                frames.append(subscriber.sub.recv_multipart())
            assert not deaf.sub.poll(0)
    assert {topic for topic, _, _ in frames} == {b"kv@pod@model"}
    assert all(len(number) == 8 for _, number, _ in frames)
    numbers = [int.from_bytes(number, "big") for _, number, _ in frames]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) and len(numbers) >= 4


def test_who_missed_more_than_is_kept_is_told_anew() -> None:
    """Two batches are kept, ten are missed: with the next change comes all that is cached."""
    ledger = ledger_of()
    with published(ledger, replay_batches=2) as publisher, subscribed(publisher) as subscriber:
        for prompt in range(10):
            serve(ledger, Prefix.of(Root("m", str(prompt)), range(8)))
            wait_until_idle(publisher)
        subscriber.follower._store = lambda event: None  # type: ignore[method-assign] - what came before is unknown
        subscriber.ask()
        del subscriber.follower._store  # type: ignore[method-assign]
        serve(ledger, Prefix.of(Root("m", "last"), range(8)))
        subscriber.catch_up(publisher, ledger)


def test_the_last_batch_says_that_nothing_is_left() -> None:
    """A router must not send anybody to a cache that is gone; and the port is free again."""
    ledger, context = ledger_of(), zmq.Context()
    with published(ledger) as publisher:
        subscriber = Subscriber(context, publisher)
        serve(ledger, Prefix.of(Root("m"), range(8)))
        while not subscriber.sub.poll(20):  # until the publisher knows of it: afterwards there is no asking
            publisher.tell_anew()
        subscriber.catch_up(publisher, ledger)
        assert subscriber.follower.cached
    while subscriber.follower.cached:
        subscriber.receive()
    subscriber.close()
    context.term()
    with published(ledger, bind=publisher.endpoint, replay=publisher.replay_endpoint) as again:
        assert again.endpoint == publisher.endpoint


async def _serve_and_follow() -> None:
    config = OffloadConfig(groups=[KVCacheGroup("all", block_size=4)], num_host_blocks=16)
    async with OffloadRuntime(config, torch.zeros(9, 8)) as runtime:
        with published(runtime.ledger) as publisher, subscribed(publisher) as subscriber:
            for prompt in (range(16), range(100, 116), range(200, 216), range(16)):
                async with runtime.request(prompt) as request:
                    await request.allocate()
                    await request.load()
                    request.commit(16)
                await runtime.flush()
            subscriber.catch_up(publisher, runtime.ledger)
            media = {medium for medium, _, _ in subscriber.follower.cached}
            assert media == {"GPU", "CPU"}


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_runtime_is_followed_too(backend: str) -> None:
    """On real tensors, in a running event loop, with copies in their threads."""
    anyio.run(_serve_and_follow, backend=backend)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_the_program_of_the_page_publishes(backend: str) -> None:
    """docs/kv_events.md shows a whole function, and its table every option there is."""
    page = (Path(__file__).parents[2] / "docs/kv_events.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    code = code.replace("tcp://127.0.0.1:5558", ANY_PORT).replace("runtime.ledger,", "runtime.ledger, bind=ANY_PORT,")
    code = code.replace("...  # your engine", "seen.append(runtime.ledger.cache.tiers[0].watcher)")
    seen: list[object] = []
    namespace: dict[str, Any] = {"ANY_PORT": ANY_PORT, "seen": seen}
    exec(compile(code, "kv_events.md", "exec"), namespace)
    config = OffloadConfig(groups=[KVCacheGroup("all", block_size=4)], num_host_blocks=16)
    anyio.run(namespace["serve"], config, torch.zeros(9, 8), backend=backend)
    assert seen[0] is not None
    documented = {
        name for row in re.findall(r"^(?:\| )?(`.*?) \|", page, re.MULTILINE) for name in re.findall(r"`(\w+)", row)
    }
    options = set(inspect.signature(KVEventPublisher).parameters) - {"ledger", "clock"}
    assert options <= documented


def test_nothing_listens_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made, a publisher has no socket; opened without an address, it is on loopback, and replays nothing."""
    bound: list[str] = []
    bind = zmq.Socket.bind
    monkeypatch.setattr(zmq.Socket, "bind", lambda self, at: (bound.append(at), bind(self, at.replace("5557", "*")))[1])
    publisher = KVEventPublisher(ledger_of())
    assert bound == []
    with publisher:
        assert [address for address in bound if not address.startswith("inproc:")] == ["tcp://127.0.0.1:5557"]
        assert publisher.replay_endpoint == ""


def test_a_router_may_listen_itself() -> None:
    """With `connect`, the publisher goes to the router, which has one address for many of them."""
    context = zmq.Context()
    with closing(context.socket(zmq.SUB)) as router:
        router.subscribe(b"")
        router.rcvtimeo, router.linger = GUARD_MS, 0
        router.bind(ANY_PORT)
        address = router.last_endpoint.decode()
        ledger = ledger_of()
        with KVEventPublisher(ledger, connect=address, topic="kv@a@m") as publisher:
            while not router.poll(20):
                publisher.tell_anew()
            assert router.recv_multipart()[0] == b"kv@a@m"
    context.term()


def test_what_cannot_be_opened_is_refused_by_name() -> None:
    """A port that is taken, an address that is none, two addresses in place of one: before anything is watched."""
    ledger = ledger_of()
    with published(ledger) as publisher:
        with pytest.raises(ConfigError, match="bind"):
            KVEventPublisher(ledger_of(), bind=publisher.endpoint).__enter__()
        with pytest.raises(ConfigError, match="bind"):
            KVEventPublisher(ledger_of(), bind="nonsense").__enter__()
        with pytest.raises(RuntimeClosed):
            publisher.__enter__()
    with pytest.raises(ConfigError, match="connect"):
        KVEventPublisher(ledger, bind=ANY_PORT, connect="tcp://127.0.0.1:1")


def test_two_publishers_of_one_ledger() -> None:
    """Each tells all of it, and goes on if the other ends."""
    ledger = ledger_of()
    with published(ledger) as first:
        with published(ledger) as second, subscribed(first) as one, subscribed(second) as other:
            serve(ledger, Prefix.of(Root("m"), range(8)))
            one.catch_up(first, ledger)
            other.catch_up(second, ledger)
        with subscribed(first) as one:
            serve(ledger, Prefix.of(Root("m"), range(50, 58)))
            one.catch_up(first, ledger)
    assert ledger.cache.tiers[0].watcher is None


def test_what_is_no_request_is_not_answered() -> None:
    """Odd frames on the replay port harm nobody."""
    ledger = ledger_of()
    with published(ledger) as publisher, subscribed(publisher) as subscriber:
        for frames in ([b""], [b"", b"", b"x"], [b"x", bytes(8)], [b"", b"short"], [b"", bytes(9)]):
            subscriber.replay.send_multipart(frames)
        serve(ledger, Prefix.of(Root("m"), range(8)))
        subscriber.catch_up(publisher, ledger)


def test_what_is_kept_for_replay_is_bounded() -> None:
    """In batches and in bytes; the last batch is kept however large it is."""
    buffer = ReplayBuffer(max_batches=3, max_bytes=100)
    for number in range(6):
        buffer.keep(Sent(number, bytes(10)))
    assert [sent.number for sent in buffer.from_number(0)] == [3, 4, 5]
    assert buffer.has_all_from(3) and not buffer.has_all_from(2)
    buffer.keep(Sent(6, bytes(1000)))
    assert [sent.number for sent in buffer.from_number(0)] == [6]
    assert buffer.num_bytes == 1000


def test_the_thread_of_the_ledger_only_hands_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """No digest and no byte is made in the ledger's thread."""
    threads: set[int] = set()
    make = Digests._hash
    monkeypatch.setattr(
        Digests, "_hash", lambda self, *args: (threads.add(threading.get_ident()), make(self, *args))[1]
    )
    ledger = ledger_of()
    with published(ledger) as publisher:
        serve(ledger, Prefix.of(Root("m"), range(40)))
        wait_until_idle(publisher)
    assert threads and threading.get_ident() not in threads


@pytest.mark.parametrize(
    "wrong",
    [
        {"data_parallel_rank": -1},
        {"data_parallel_rank": "x"},
        {"data_parallel_rank": 2**64},
        {"max_changes": 0},
        {"max_unsent": 2**40},
        {"replay_batches": -1},
        {"replay_bytes": -1},
    ],
    ids=str,
)
def test_a_number_out_of_range_is_refused_by_name(wrong: dict[str, Any]) -> None:
    """Before a thread is there that could end of it."""
    with pytest.raises(InvalidArgument, match=next(iter(wrong))):
        KVEventPublisher(ledger_of(), **wrong)


def test_a_thread_that_has_ended_holds_nobody_up() -> None:
    """Whatever goes wrong while publishing, the ledger goes on, and leaving waits for nobody."""

    def broken() -> float:
        raise RuntimeError("no clock")

    ledger = ledger_of()
    with KVEventPublisher(ledger, bind=ANY_PORT, clock=broken) as publisher:
        assert publisher._thread is not None
        publisher._thread.join(GUARD_MS / 1000)
        for name in range(5):
            serve(ledger, Prefix.of(Root(str(name)), range(8)))
    assert isinstance(publisher.failure, RuntimeError)
    ledger.check_integrity()


def test_who_is_opened_after_a_reset_hears_of_what_comes() -> None:
    """Made before a reset or after it: what is cached from then on is told."""
    ledger = ledger_of()
    publisher = KVEventPublisher(ledger, bind=ANY_PORT, replay=ANY_PORT)
    ledger.reset()
    with publisher, subscribed(publisher) as subscriber:
        serve(ledger, Prefix.of(Root("m"), range(8)))
        subscriber.catch_up(publisher, ledger)


def test_closing_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that does not release a connection is no reason for an engine not to end."""
    monkeypatch.setattr("aoffload._observe.kv_events.publisher.CLOSE_TIMEOUT_S", 0.01)
    publisher = published(ledger_of()).__enter__()
    context, lets_go, has_ended = publisher._context, threading.Event(), threading.Event()

    class Stuck:
        def term(self) -> None:
            lets_go.wait(GUARD_MS / 1000)
            context.term()
            has_ended.set()

    monkeypatch.setattr(publisher, "_context", Stuck())
    publisher.__exit__(None, None, None)
    assert not has_ended.is_set()
    lets_go.set()
    assert has_ended.wait(GUARD_MS / 1000)
