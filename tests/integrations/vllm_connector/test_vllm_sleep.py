"""Sleep mode: the memory of vLLM's KV tensors goes away, and comes back at the same addresses without its contents."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable
from typing import Any

from engine_doubles import TEXT, Request
from small_engine import SmallEngine, counted, held

from aoffload import Tier
from aoffload._vllm.worker import RankCopies
from aoffload.ledger import Completion, Outcome, TransferPlan

OTHER = list(range(100, 130))
PATIENCE_S = 30.0
IDS = array("i", [1])


class Gate:
    """The copies of a worker begin, and end once the gate is open."""

    def __init__(self, engine: SmallEngine, rank: int = 0) -> None:
        transport: Any = engine.workers[rank]._transport
        self._copy, transport.backend.copy = transport.backend.copy, self._wait
        self.begun: list[TransferPlan] = []
        self.is_open, self._has_begun = threading.Event(), threading.Event()

    def _wait(self, plan: TransferPlan) -> Any:
        self.begun.append(plan)
        self._has_begun.set()
        assert self.is_open.wait(PATIENCE_S)
        return self._copy(plan)

    def wait_for_copy(self) -> None:
        assert self._has_begun.wait(PATIENCE_S)


def sleeps(engine: SmallEngine, *seconds: float, rank: int = 0, gate: Gate | None = None) -> None:
    """Put a rank to sleep, and forget what was in its tensors. Its clock says `seconds`, one by one, and the last of
    them from then on; `gate` opens when it says that, with the worker in its wait."""
    said = list(seconds)

    def clock() -> float:
        if len(said) > 1:
            return said.pop(0)
        if gate is not None:
            gate.is_open.set()
        return said[0]

    engine.workers[rank].copies.clock = clock
    engine.copiers[rank].unregister_kv_caches()
    engine.memories[rank].zero_()


def wakes(engine: SmallEngine, rank: int = 0) -> None:
    """Before it schedules anything, vLLM forgets its prefix cache."""
    engine.manager.evict_all()
    engine.copiers[rank].restore_kv_caches()


def to_rest(engine: SmallEngine) -> None:
    """Step until late proofs have given all blocks back."""
    for _ in range(20_000):
        engine.step()
        if not held(engine) and not engine.connector.ledger.statistics().host.num_quarantined:
            return
    raise AssertionError("blocks stay in doubt")


def test_a_sleeping_worker_copies_nothing(warm: Callable[..., SmallEngine]) -> None:
    """Its tensors have no memory then. What the host holds is there when it wakes."""
    engine = warm()
    engine.copiers[0].unregister_kv_caches()
    engine.copiers[0].unregister_kv_caches()
    engine.run(Request("again", TEXT))
    assert counted(engine, "jobs|load|host|failed") == 1
    engine.copiers[0].restore_kv_caches()
    engine.copiers[0].restore_kv_caches()
    engine.manager.evict_all()
    engine.run(Request("once more", TEXT))
    assert counted(engine, "copied_blocks|load|host") == 7


def test_a_worker_may_stop_while_it_sleeps(warm: Callable[..., SmallEngine]) -> None:
    """Its copy threads end, and its host memory goes."""
    engine = warm()
    transport = engine.workers[0]._transport
    assert transport is not None
    close, closed = transport.close, list[float]()
    transport.close = lambda timeout_s: (closed.append(timeout_s), close(timeout_s))[1]  # type: ignore[method-assign]
    engine.copiers[0].unregister_kv_caches()
    engine.copiers[0].shutdown()
    assert len(closed) == 1
    engine.copiers[0].restore_kv_caches()
    engine.run(Request("again", TEXT))
    assert counted(engine, "jobs|load|host|failed") == 1


def test_a_load_that_ends_as_the_engine_goes_to_sleep_is_lost(warm: Callable[..., SmallEngine]) -> None:
    """The worker waits for it. What it has brought is gone with the memory, so nobody computes after it."""
    engine = warm(num_blocks=40)
    gate = Gate(engine)
    engine.submit(Request("again", TEXT))
    engine.step()
    gate.wait_for_copy()
    sleeps(engine, 0.0, 1.0, gate=gate)
    wakes(engine)
    engine.run()
    assert counted(engine, "jobs|load|host|failed") == 1 and counted(engine, "lost_tokens") == 28
    engine.manager.evict_all()
    engine.run(Request("once more", TEXT))
    assert counted(engine, "jobs|load|host|landed") == 1 and not engine.connector.off_reason


def test_a_store_that_ends_as_the_engine_goes_to_sleep_counts(warm: Callable[..., SmallEngine]) -> None:
    """The worker waits for it, so it has read its blocks before their memory went."""
    engine = warm(num_blocks=40)
    gate = Gate(engine)
    engine.submit(Request("other", OTHER))
    engine.step()
    gate.wait_for_copy()
    sleeps(engine, 0.0, 1.0, gate=gate)
    wakes(engine)
    engine.run(Request("again", OTHER))
    assert counted(engine, "copied_blocks|store|host") == 14
    engine.manager.evict_all()
    engine.run(Request("once more", OTHER))
    assert counted(engine, "copied_blocks|load|host") >= 7


def test_a_copy_that_hangs_delays_sleep_no_longer_than_its_time(warm: Callable[..., SmallEngine]) -> None:
    """Then it is in doubt: the blocks that it writes to are kept until it ends. What waits after it never starts,
    whenever it ends, and the cache is off, since nobody knows whether the host memory is released."""
    engine = warm(num_blocks=60, num_host_blocks=40, transfer_timeout_s=30)
    engine.run(Request("other", OTHER))
    engine.manager.evict_all()
    engine.may_be_off, gate = True, Gate(engine)
    engine.submit(Request("again", TEXT), Request("another", OTHER))
    engine.step()
    gate.wait_for_copy()
    sleeps(engine, 0.0, 30.0)
    wakes(engine)
    for _ in range(100):
        if engine.waiting or engine.running:
            engine.step()
    assert not engine.waiting and "did not end" in engine.connector.off_reason
    assert counted(engine, "jobs|load|host|unproven") == 2
    assert held(engine) == engine.connector.ledger.statistics().device.num_quarantined == 14
    gate.is_open.set()
    to_rest(engine)
    assert len(gate.begun) == 1
    engine.run(Request("last", TEXT))
    assert engine.connector.get_num_new_matched_tokens(Request("never", TEXT), 0) == (0, False)


def test_one_rank_that_hangs_in_sleep_ends_the_copies_of_all(warm: Callable[..., SmallEngine]) -> None:
    """A block without a part on every rank is none. The other rank wakes as ever."""
    engine = warm(num_ranks=2, num_blocks=40)
    engine.may_be_off, gate = True, Gate(engine, 1)
    engine.submit(Request("other", OTHER))
    engine.step()
    gate.wait_for_copy()
    for rank, seconds in ((0, (0.0, 1.0)), (1, (0.0, 30.0))):
        sleeps(engine, *seconds, rank=rank)
    for rank in range(2):
        wakes(engine, rank)
    engine.step()
    assert "rank 1" in engine.connector.off_reason
    gate.is_open.set()
    engine.run(Request("again", TEXT))
    to_rest(engine)


def test_what_is_in_doubt_is_awaited() -> None:
    """A copy that was reported as UNPROVEN may still run. It is over with its proof."""
    seconds = iter(range(100))
    copies, plan = RankCopies(lambda: float(next(seconds))), TransferPlan(7, Tier.DEVICE, Tier.HOST, IDS, IDS)
    copies.begin(plan)
    copies.end(Completion(plan.job_id, Outcome.UNPROVEN))
    assert not copies.wait(1.0)
    copies.end(Completion(plan.job_id, Outcome.FAILED))
    assert copies.wait(1.0)
