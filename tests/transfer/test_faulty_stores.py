"""Stores that return invalid answers, raise any exception, or reuse their memory; threads that cannot be started. Each
job ends, no thread is lost, and a store that has recovered is used again."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("xxhash", reason="the extra `remote` is not installed")
from copies import GUARD_S
from remotes import BLOCK, CELL, RemoteCopies, Waiting, cell

from aoffload._kernel.states import Outcome
from aoffload._tiers.remote.calls import ASK_THREADS, LOAD_THREADS, STORE_THREADS
from aoffload.errors import TransferRefused
from aoffload.testing import SimulatedStore, StoreFault
from aoffload.transport import Env

Open = Callable[..., RemoteCopies]
NUM_TRIES = 6
"""More than any use has threads."""
AFTER_TRIALS_S = 60.0


@pytest.fixture
def open_remote() -> Iterator[Open]:
    opened: list[RemoteCopies] = []

    def open_one(store: Any, **options: Any) -> RemoteCopies:
        opened.append(RemoteCopies(store, **options))
        return opened[-1]

    yield open_one
    for copies in opened:
        assert copies.close()


class Panic(BaseException):
    """What a library in Rust raises."""


class Unshowable(Exception):  # noqa: N818
    def __repr__(self) -> str:
        raise self

    __str__ = __repr__


class Wrong(SimulatedStore):
    """`kind` of its calls raises or answers `what`, until it is None."""

    def __init__(self, kind: str, what: object) -> None:
        super().__init__()
        self.kind, self.what = kind, what

    def _is_wrong(self, kind: str) -> bool:
        if kind == self.kind and isinstance(self.what, BaseException):
            raise self.what
        return kind == self.kind

    def exist(self, keys: Any, timeout_s: float) -> Any:
        return self.what if self._is_wrong("exist") else super().exist(keys, timeout_s)

    def get(self, key: bytes, timeout_s: float) -> Any:
        return self.what if self._is_wrong("get") else super().get(key, timeout_s)

    def put(self, key: bytes, value: memoryview, timeout_s: float) -> None:
        self._is_wrong("put")
        super().put(key, value, timeout_s)

    def remove(self, key: bytes, timeout_s: float) -> None:
        self._is_wrong("remove")
        super().remove(key, timeout_s)


class Nameless:
    """A simulated store; the names of its nodes are `what`."""

    def __init__(self, what: object) -> None:
        self._store, self._what = SimulatedStore(), what

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def node_of(self, key: bytes) -> Any:
        if isinstance(self._what, BaseException):
            raise self._what
        return self._what


RAISED = [Panic(), asyncio.CancelledError(), SystemExit(1), StopIteration(), GeneratorExit(), Unshowable()]


def named(what: object) -> str:
    return type(what).__name__


# -- answers and exceptions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", [5, "abc", [], memoryview(bytearray(1000))[::2], *RAISED], ids=named)
def test_whatever_get_does_is_a_miss(open_remote: Open, what: object) -> None:
    """More often than there are threads, and the load that follows brings the cell."""
    store = Wrong("", what)
    copies = open_remote(store)
    copies.store(cell(0))
    store.kind = "get"
    for _ in range(NUM_TRIES):
        assert copies.load(cell(0)).outcome is Outcome.FAILED
        copies.clock.seconds += AFTER_TRIALS_S  # type: ignore[attr-defined]
    store.kind = ""
    is_object = isinstance(what, memoryview)  # with the wrong bytes: the cell is wrong, and not the node
    assert copies.remote.statistics().num_failures == (0 if is_object else NUM_TRIES)
    copies.clock.seconds += AFTER_TRIALS_S  # type: ignore[attr-defined]
    assert copies.load(cell(0)).outcome is Outcome.LANDED


@pytest.mark.parametrize("what", [5, None, [True] * 2, [], [Unshowable], *RAISED], ids=named)
def test_whatever_exist_does_is_a_no(open_remote: Open, what: object) -> None:
    """Of a question: it is answered at once. Of a store: it fails, unless the answer is a yes."""
    store = Wrong("", what)
    copies = open_remote(store)
    copies.store(cell(0))
    store.kind = "exist"
    for number in range(NUM_TRIES):
        copies.ask([cell(0)])
        copies.store(cell(number + 1))
        copies.clock.seconds += AFTER_TRIALS_S  # type: ignore[attr-defined]
    store.kind = ""
    copies.forget_memories()
    assert copies.ask([cell(0)]) == 1
    assert copies.store(cell(9)).outcome is Outcome.LANDED


@pytest.mark.parametrize("what", RAISED, ids=named)
@pytest.mark.parametrize("kind", ["put", "remove"])
def test_whatever_a_write_raises_is_a_failure(open_remote: Open, kind: str, what: object) -> None:
    """The thread goes on to the next job, and to the next removal."""
    store = Wrong(kind, what)
    copies = open_remote(store)
    copies.remote.forget([cell(100)])
    for number in range(NUM_TRIES):
        found = copies.store(cell(number))
        assert found.outcome is (Outcome.FAILED if kind == "put" else Outcome.LANDED) or "suspended" in found.error
        copies.clock.seconds += AFTER_TRIALS_S  # type: ignore[attr-defined]
    store.kind = ""
    if "suspended" in copies.store(cell(8)).error:  # a removal that had begun before has failed since
        copies.clock.seconds += AFTER_TRIALS_S  # type: ignore[attr-defined]
    assert copies.store(cell(9)).outcome is Outcome.LANDED
    assert copies.close() and copies.remote.statistics().cells_removed == 1


@pytest.mark.parametrize("what", [[], None, 5, {}, *RAISED[:2]], ids=named)
def test_a_node_that_has_no_name_is_one_of_all(open_remote: Open, what: object) -> None:
    """What nobody can tell apart is left alone together."""
    copies = open_remote(Nameless(what))
    for number in range(NUM_TRIES):
        assert copies.store(cell(number)).outcome is Outcome.LANDED
        copies.forget_memories()
        assert copies.ask([cell(number)]) == 1
        assert copies.load(cell(number)).outcome is Outcome.LANDED


def test_an_interrupt_while_a_node_is_named_is_the_process_s(open_remote: Open) -> None:
    """It reaches the thread that launches, and is no failure of the store's."""
    copies = open_remote(Nameless(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        copies.launch_load(cell(0))


def test_too_little_memory_ends_one_job(open_remote: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else goes wrong on the way of a job, it has its completion, and the thread goes on."""
    copies = open_remote(SimulatedStore())
    lanes = copies.remote._lanes
    assert lanes is not None
    copies.store(cell(0))
    for error in (MemoryError(), ValueError("a mistake of ours")):
        with monkeypatch.context() as patched:
            patched.setattr(lanes.memory, "note_seen", _raises(error))
            for _ in range(LOAD_THREADS + 1):
                assert type(error).__name__ in copies.load(cell(0)).error
            copies.forget_memories()
            for _ in range(ASK_THREADS + 1):
                assert copies.ask([cell(0)]) == 0
        assert copies.load(cell(0)).outcome is Outcome.LANDED
        copies.forget_memories()
        assert copies.ask([cell(0)]) == 1


def _raises(error: Exception) -> Callable[..., None]:
    def raise_it(*_: object) -> None:
        raise error

    return raise_it


def test_a_clock_that_goes_back_costs_a_duration(open_remote: Open) -> None:
    """And neither the completion nor the thread."""

    class Back(Env):
        seconds = 1e6

        def now(self) -> float:
            self.seconds -= 1.0
            return self.seconds

    copies = open_remote(SimulatedStore(), env=Back())
    for number in range(STORE_THREADS + 1):
        found = copies.store(cell(number))
        assert (found.outcome, found.duration_s) == (Outcome.LANDED, 0.0)


# -- memory of the store ----------------------------------------------------------------------------------------------


def test_memory_that_a_store_uses_again_is_never_loaded(open_remote: Open) -> None:
    """What is copied to host memory is what was proved, whatever the store does with its buffer meanwhile."""

    class Reuses(SimulatedStore):
        def get(self, key: bytes, timeout_s: float) -> Any:
            buffer[:] = super().get(key, timeout_s) or b""
            return memoryview(buffer)

    class Scribbles:
        """Host memory; before it is written to, the buffer has something else."""

        def __getattr__(self, name: str) -> Any:
            return getattr(host, name)

        def copy_in(self, *args: Any) -> None:
            buffer[:] = bytes(len(buffer))
            host.copy_in(*args)

    copies = open_remote(Reuses())
    lanes = copies.remote._lanes
    assert lanes is not None
    buffer, host = bytearray(lanes.cells.object_bytes), lanes._host
    lanes._host = Scribbles()  # type: ignore[assignment]
    copies.store(cell(0))
    assert copies.load(cell(0)).outcome is Outcome.LANDED
    assert (copies.host[8:12] == copies.host[:4]).all()
    assert not any(buffer)


@pytest.mark.parametrize("make", [bytes, bytearray, memoryview, lambda found: memoryview(found).cast("I")])
def test_an_object_may_come_in_any_memory(open_remote: Open, make: Callable[[bytes], object]) -> None:
    """Whatever has the right bytes, one after the other."""

    class Other(SimulatedStore):
        def get(self, key: bytes, timeout_s: float) -> Any:
            return make(super().get(key, timeout_s) or b"")

    copies = open_remote(Other())
    copies.store(cell(0))
    assert copies.load(cell(0)).outcome is Outcome.LANDED
    assert (copies.host[8:12] == copies.host[:4]).all()


# -- what is left alone -----------------------------------------------------------------------------------------------


def test_what_would_fail_at_once_is_not_wanted(open_remote: Open) -> None:
    """Cells of a node that is left alone, until it is tried again; those of others are."""
    store = SimulatedStore(num_nodes=2)
    copies = open_remote(store)
    labels = [cell(number) for number in range(20)]
    bad = [label for label in labels if store.node_of(copies.name(label)) == "node-0"]
    good = [label for label in labels if label not in bad]
    store.fault = lambda call: StoreFault.ERROR if call.node == "node-0" else None
    for label in (*bad[:2], good[0]):
        copies.store(label)
    assert not any(copies.remote.is_wanted(label) for label in bad)
    assert all(copies.remote.is_wanted(label) for label in good[1:])
    copies.clock.seconds = 0.6  # type: ignore[attr-defined]
    assert all(copies.remote.is_wanted(label) for label in bad)


def test_a_store_says_what_it_may_have_written(open_remote: Open) -> None:
    """Nothing if it never came so far, and all of it if the write itself failed."""
    store = SimulatedStore()
    copies = open_remote(store)
    for kind, num_bytes in (("exist", 0), ("put", CELL * BLOCK)):
        store.fault = lambda call, kind=kind: StoreFault.ERROR if call.kind == kind else None
        found = copies.store(cell(0))
        assert (found.outcome, found.num_bytes) == (Outcome.FAILED, num_bytes)
    refused = copies.store(cell(0))
    assert "suspended" in refused.error and refused.num_bytes == 0, "a store that is full and answers all the same"
    assert copies.remote.statistics().bytes_stored == 0


def test_questions_that_hang_are_failures(open_remote: Open) -> None:
    """Two of them, however long they hang: nobody waits for the next one, nor for one that is late already, and nothing
    grows. The store is asked again when it is back."""
    store = SimulatedStore()
    copies = open_remote(store)
    for number in range(4):
        store.objects[copies.name(cell(number))] = b""
    waiting = Waiting(store, lambda call: call.kind == "exist")
    late: queue.SimpleQueue[int] = queue.SimpleQueue()
    try:
        copies.remote.ask([cell(0)], late.put)
        waiting.wait_for(1)
        copies.clock.seconds = 1.0  # type: ignore[attr-defined]
        assert copies.ask([cell(0)]) == 0, "the same question, which is late"
        copies.remote.ask([cell(1)], late.put)
        waiting.wait_for(1)
        assert copies.remote.statistics().num_failures == 1
        copies.clock.seconds = 2.0  # type: ignore[attr-defined]
        num_calls = store.num_calls
        for number in range(4):
            assert copies.ask([cell(number)]) == 0
        assert (store.num_calls, copies.remote.statistics().num_failures) == (num_calls, 2)
        assert late.empty()
    finally:
        waiting.resume()
    for _ in range(2):
        late.get(timeout=GUARD_S)
    copies.forget_memories()
    assert copies.ask([cell(2)]) == 0, "it is left alone"
    copies.clock.seconds = 3.0  # type: ignore[attr-defined]
    assert copies.ask([cell(2)]) == 1


def test_answers_that_come_late_are_failures(open_remote: Open) -> None:
    """A store that takes its time is left alone like one that fails."""
    store = SimulatedStore()
    copies = open_remote(store)

    def wait(call: object) -> None:
        copies.clock.seconds += 0.1  # type: ignore[attr-defined]

    store.fault, store.wait = (lambda call: StoreFault.SLOW), wait
    for number in range(5):
        copies.ask([cell(number)])
    assert (store.num_calls, copies.remote.statistics().num_failures) == (2, 2)


# -- threads that cannot be started -----------------------------------------------------------------------------------


NAMES = [
    f"aoffload-remote-{use}-{number}"
    for use, count in (("load", LOAD_THREADS), ("store", STORE_THREADS), ("ask", ASK_THREADS))
    for number in range(count)
]


@pytest.mark.parametrize("name", NAMES)
def test_a_thread_that_cannot_be_started_leaves_none(name: str) -> None:
    """The error is typed and says which; what had been started is over when it is raised."""
    started: list[threading.Thread] = []

    class Few(Env):
        def start_thread(self, target: Callable[[], None], name_of_it: str) -> threading.Thread:
            if name_of_it == name:
                raise RuntimeError("can't start new thread")
            started.append(super().start_thread(target, name_of_it))
            return started[-1]

    with pytest.raises(TransferRefused, match=name):
        RemoteCopies(SimulatedStore(), env=Few())
    assert not [thread for thread in started if thread.is_alive()]
    assert len(started) == NAMES.index(name) + 2, "and the two of the device"
