"""A remote store below the host memory of the connector: what another engine has computed is found there, or a miss."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest
from engine_doubles import TEXT, Request
from small_engine import SmallEngine, counted, held
from vllm_configs import kv_cache_config, vllm_config
from vllm_doubles import AoffloadConnector, KVConnectorRole, vllm_importable

from aoffload import ConfigError, Tier
from aoffload._config.sources import STORES
from aoffload._runtime.costs import PrefillSpeed
from aoffload._vllm.computing import Computing
from aoffload._vllm.messages import Commands
from aoffload._vllm.remote import RemoteSide
from aoffload.ledger import Direction, TransferPlan
from aoffload.testing import SimulatedStore, StoreCall, StoreFault

FETCH = (Tier.REMOTE, Tier.HOST)
CELLS = {"url": "simulated://", "cell_bytes": 64, "ask_timeout_s": 600}
"""Cells of two blocks. An answer comes in time, however slow the machine is."""


@pytest.fixture
def store() -> SimulatedStore:
    return SimulatedStore()


@pytest.fixture
def remote(
    engines: Callable[..., SmallEngine], store: SimulatedStore, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., SmallEngine]:
    """Engines that share `store`."""
    monkeypatch.setitem(STORES, "simulated", lambda url: store)

    def make(**options: Any) -> SmallEngine:
        given = {"namespace": "weights 1", "max_fetch_share": 1.0, "num_blocks": 40, "remote": CELLS}
        return engines(**given | options)

    return make


@pytest.fixture
def filled(remote: Callable[..., SmallEngine], store: SimulatedStore) -> Callable[..., SmallEngine]:
    """Engines after one that was asked for TEXT twice, and has stored its three cells."""
    first = remote()
    for name in ("once", "twice"):
        run(first, Request(name, TEXT))
    assert store.num_puts == 3
    return remote


class Gate:
    """Calls of a store that wait until it opens."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.is_reached = threading.Event()

    def __call__(self, call: StoreCall) -> None:
        self.is_reached.set()
        self.is_open.wait(600.0)


@pytest.fixture
def gate(store: SimulatedStore) -> Iterator[Gate]:
    """It is open at the end, so that no thread is left behind."""
    store.wait = found = Gate()
    yield found
    found.is_open.set()


def step_until(engine: SmallEngine, is_so: Callable[[], bool], most_s: float = 60.0) -> None:
    """Threads of the store take their time."""
    until = time.monotonic() + most_s
    while not is_so():
        engine.step()
        assert time.monotonic() < until, "not yet"


def settle(engine: SmallEngine) -> None:
    """Step until the connector is at rest."""
    step_until(
        engine, lambda: not (engine.connector.has_pending_push_work() or engine.waiting or engine.running), most_s=20.0
    )


def run(engine: SmallEngine, *requests: Request) -> None:
    engine.submit(*requests)
    settle(engine)


def side(engine: SmallEngine) -> RemoteSide:
    assert engine.half.lower is not None and engine.half.lower.remote is not None
    return engine.half.lower.remote


def loaded(engine: SmallEngine, tier: str) -> float:
    return counted(engine, f"copied_blocks|load|{tier}")


def on(kind: str, fault: StoreFault) -> Callable[[StoreCall], StoreFault | None]:
    return lambda call: fault if call.kind == kind else None


def test_an_engine_finds_what_another_one_has_computed(filled: Callable[..., SmallEngine]) -> None:
    """Whole cells: six of the seven blocks that a request for TEXT may hit. The bytes are right."""
    second = filled()
    run(second, Request("there", TEXT))
    assert (loaded(second, "remote"), loaded(second, "host")) == (6, 6)
    assert counted(second, "fetches") == 1 and held(second) == 0


def test_what_is_asked_for_once_is_not_stored(remote: Callable[..., SmallEngine], store: SimulatedStore) -> None:
    """A store is shared: what nobody asks for again would take the room of what is."""
    engine = remote()
    run(engine, Request("once", TEXT), Request("other", range(100, 130)))
    assert store.num_puts == 0


@pytest.mark.parametrize("other", ["namespace", "tensors"])
def test_other_weights_or_tensors_find_nothing(
    filled: Callable[..., SmallEngine], other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another model has written, or the same one with tensors that lie otherwise, is not asked for."""
    if other == "tensors":
        monkeypatch.setattr("aoffload._vllm.worker.strides_of", lambda *_: "other strides")
    engine = filled(**({"namespace": "weights 2"} if other == "namespace" else {}))
    run(engine, Request("there", TEXT))
    assert loaded(engine, "remote") == 0 and counted(engine, "fetches") == 0


def test_an_engine_has_connected_before_its_first_request(
    remote: Callable[..., SmallEngine], store: SimulatedStore
) -> None:
    """Connecting takes longer than a question may."""
    asked: list[str] = []
    store.fault = lambda call: asked.append(call.kind)
    remote()
    assert set(asked) == {"exist"}


@pytest.mark.parametrize("fault", [StoreFault.GONE, StoreFault.POISONED, StoreFault.SHORT, StoreFault.FOREIGN])
def test_what_is_not_right_is_computed(
    filled: Callable[..., SmallEngine], store: SimulatedStore, fault: StoreFault
) -> None:
    """Evicted since it was asked for, or not what was stored: the request hits none of it, and goes on."""
    engine = filled()
    store.fault = on("get", fault)
    run(engine, Request("there", TEXT))
    assert loaded(engine, "remote") == 0


def test_a_store_that_does_not_answer_is_not_waited_for(
    filled: Callable[..., SmallEngine], store: SimulatedStore, gate: Gate
) -> None:
    """Longer than `ask_timeout_s`, by the worker's clock: the request computes. A late answer is nobody's."""
    engine = filled()
    worker_remote, seconds = engine.workers[0]._remote, 0.0
    assert worker_remote is not None
    worker_remote._clock = lambda: seconds
    store.fault = on("exist", StoreFault.SLOW)
    engine.submit(Request("there", TEXT))
    step_until(engine, gate.is_reached.is_set)
    assert engine.waiting
    seconds = 601.0
    settle(engine)
    assert counted(engine, "fetches") == 0 and loaded(engine, "remote") == 0


def test_others_go_on_while_the_store_is_asked(
    filled: Callable[..., SmallEngine], store: SimulatedStore, gate: Gate
) -> None:
    """vLLM is told to ask again for the one request, and schedules the others."""
    engine = filled()
    store.fault = on("exist", StoreFault.SLOW)
    engine.submit(Request("there", TEXT))
    engine.step()
    engine.submit(Request("short", [100, 101, 102]))
    for _ in range(3):
        engine.step()
    assert [request.request_id for request in engine.waiting] == ["there"] and not engine.running
    gate.is_open.set()
    settle(engine)
    assert loaded(engine, "remote") == 6


def test_a_worker_that_says_nothing_is_not_waited_for(filled: Callable[..., SmallEngine]) -> None:
    """Longer than `fetch_timeout_s`, by the clock of the scheduler's half."""
    engine = filled(fetch_timeout_s=2)
    engine.alter = lambda commands: attrs.evolve(commands, questions=())
    engine.submit(Request("there", TEXT))
    for _ in range(5):
        engine.step()
    assert engine.waiting, "not before its time is over"
    engine.now += 2.0
    settle(engine)
    assert counted(engine, "fetches") == 0


def test_a_load_that_is_given_up_touches_no_host_memory(
    filled: Callable[..., SmallEngine], store: SimulatedStore, gate: Gate
) -> None:
    """Its blocks are free at once, and another prompt's by the time it ends."""
    engine = filled(fetch_timeout_s=2, transfer_timeout_s=3, num_host_blocks=8)
    store.fault = on("get", StoreFault.SLOW)
    engine.submit(Request("there", TEXT))
    step_until(engine, lambda: counted(engine, "fetches") == 1)
    engine.now += 3.0
    settle(engine)
    assert counted(engine, "late_fetches") == 1
    assert engine.connector.ledger.statistics().host.num_quarantined == 0
    other = list(range(100, 130))
    run(engine, Request("other", other))
    gate.is_open.set()
    assert engine.workers[0].copies.wait(60.0), "the load is over, late"
    engine.manager.evict_all()
    run(engine, Request("again", other))
    assert loaded(engine, "host") == 7, "where the load would have written to"


class Sulking:
    """A remote tier that refuses while it is told to."""

    def __init__(self, remote: Any) -> None:
        self.remote, self.refuses_now = remote, True

    def refuses(self, direction: Direction) -> bool:
        return self.refuses_now

    def __getattr__(self, name: str) -> Any:
        return getattr(self.remote, name)


def test_a_store_that_fails_is_left_alone(filled: Callable[..., SmallEngine], store: SimulatedStore) -> None:
    """The worker says so with its next step, and says when it may be tried again."""
    engine = filled()
    worker_remote = engine.workers[0]._remote
    assert worker_remote is not None
    sulking = worker_remote._remote = Sulking(worker_remote._remote)  # type: ignore[assignment]
    engine.step()
    before = store.num_calls
    run(engine, Request("there", TEXT))
    assert store.num_calls == before and not side(engine).may_fetch, "nobody asks it"
    sulking.refuses_now = False  # type: ignore[attr-defined]
    engine.step()
    engine.manager.evict_all()
    run(engine, Request("other", [*TEXT[:16], *range(200, 214)]))
    assert store.num_calls > before


def test_a_reset_ends_the_use_of_the_store(filled: Callable[..., SmallEngine], store: SimulatedStore) -> None:
    """vLLM resets its cache when the weights are others: what is in the store is of those before."""
    engine = filled()
    engine.connector.reset_cache()
    before = store.num_calls
    for name in ("once", "twice"):
        run(engine, Request(name, TEXT))
    assert store.num_calls == before and loaded(engine, "remote") == 0
    assert counted(engine, "turned_off|remote") == 1 and side(engine).gauges()["remote_off"] == 1.0


def test_what_is_computed_sooner_is_not_fetched(filled: Callable[..., SmallEngine]) -> None:
    """By the bandwidth that was measured, and the speed of computing: it is not even asked for."""
    engine = filled(prefill_tokens_per_s=1_000_000, fetch_timeout_s=2)
    held_back: list[TransferPlan] = []

    def alter(commands: Commands) -> Commands:
        held_back.extend(plan for plan in commands.loads if plan.link == FETCH)
        return attrs.evolve(commands, loads=tuple(plan for plan in commands.loads if plan.link != FETCH))

    engine.alter = alter
    engine.submit(Request("there", TEXT))
    step_until(engine, lambda: bool(held_back))  # the first fetch is the measurement
    engine.now += 1.0
    engine.alter = lambda commands: commands
    engine.workers[0].start(held_back)
    settle(engine)
    before = counted(engine, "fetches")
    engine.submit(Request("again", [9, *TEXT]))
    engine.step()
    assert not engine.waiting, "it is computed at once"
    settle(engine)
    assert counted(engine, "fetches") == before


def test_the_speed_is_that_of_steps_that_overlap() -> None:
    """vLLM begins a step while the one before it runs: each counts from where the one before it has ended."""
    seconds = 0.0
    steps = Computing(PrefillSpeed(), lambda: seconds)
    steps.begins({"a": 1_000, "decoding": 1})
    steps.begins({"b": 1_000})
    seconds = 1.0
    steps.ends()
    assert steps.speed.tokens_per_s == 1_000
    steps.begins({"a": 1})
    seconds = 2.0
    steps.ends()
    assert steps.speed.tokens_per_s == pytest.approx(1_000)
    seconds = 9.0
    steps.ends()
    assert steps.speed.tokens_per_s == pytest.approx(1_000), "a step without prompts says nothing"


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        ({"remote": {"url": "redis://h"}}, "namespace: is needed with remote"),
        ({"remote": {"url": "ftp://h"}, "namespace": "w"}, r"remote\.url: must begin with"),
        ({"remote": {}, "namespace": "w"}, r"remote\.url: is missing"),
        ({"remote": {"url": "redis://h", "secret_file": "/nowhere"}, "namespace": "w"}, r"remote\.secret_file"),
        ({"remote": {"url": "redis://h"}, "namespace": "w", "num_ranks": 2}, "remote: supports one rank"),
    ],
)
def test_a_wrong_store_is_an_error_that_names_the_key(extra: dict[str, Any], problem: str) -> None:
    """Before anything is allocated, in the scheduler and in the worker."""
    with vllm_importable():
        for role in KVConnectorRole:
            with pytest.raises(ConfigError, match=problem):
                AoffloadConnector(vllm_config(**extra), role, kv_cache_config(24))
