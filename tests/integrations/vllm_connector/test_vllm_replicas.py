"""Workers of an MLA model hold the same latents, and store them once in host memory that they share."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
from engine_doubles import PAGE_BYTES, TEXT, Request
from small_engine import SmallEngine, replicas_of, to_rest
from vllm_configs import kv_cache_config, vllm_config
from vllm_doubles import vllm_importable

from aoffload._transfer import shared_memory
from aoffload._vllm.replicas import WorkerReplicas, num_replicas_of
from aoffload.errors import ConfigError

BLOCK_BYTES = 2 * PAGE_BYTES


def served(**options: Any) -> tuple[SmallEngine, int]:
    """An engine that has computed a prompt, lost it, and loaded it again. And the bytes that its workers stored."""
    engine = SmallEngine(num_ranks=2, verify=True, **options)
    engine.run(Request("first", TEXT))
    to_rest(engine)
    stored = sum(worker._open_transport().statistics().bytes_stored for worker in engine.workers)
    for memory in engine.memories:
        memory.zero_()
    engine.manager.evict_all()
    again = Request("again", TEXT)
    engine.run(again)
    to_rest(engine)
    assert not engine.wrong, "a worker has read other bytes than were stored"
    return engine, stored


def test_workers_with_latents_store_them_once_and_all_load_them() -> None:
    """Each worker stores a part of the jobs, and loads all of them, verified by the checksums of the others."""
    engine, stored = served(has_latents=True, max_job_bytes=1)
    other, twice = served(max_job_bytes=1)
    assert stored * 2 == twice
    by_worker = [worker._open_transport().statistics() for worker in engine.workers]
    assert all(one.num_stores for one in by_worker), "they take turns"
    assert by_worker[0].blocks_verified == by_worker[1].blocks_verified > 0
    for each in (engine, other):
        each.close()


@pytest.mark.parametrize(("has_latents", "num_host_blocks"), [(True, 8), (False, 4)])
def test_host_bytes_give_twice_the_blocks_if_two_workers_share(has_latents: bool, num_host_blocks: int) -> None:
    """`host_bytes` is for the whole server: two workers that share their memory have twice the blocks."""
    engine = SmallEngine(num_ranks=2, has_latents=has_latents, num_host_blocks=None, host_bytes=8 * BLOCK_BYTES)
    assert engine.connector.ledger.statistics().host.num_blocks == num_host_blocks
    engine.close()


@pytest.mark.parametrize(
    ("fields", "number"),
    [
        ({}, 4),
        ({"distributed_executor_backend": "ray"}, 1),
        ({"nnodes": 2}, 1),
        ({"decode_context_parallel_size": 2}, 1),
    ],
)
def test_only_workers_of_one_machine_that_hold_all_tokens_share(fields: dict[str, Any], number: int) -> None:
    """Ray may place workers on other machines, and context parallelism gives each worker other tokens."""
    config = vllm_config(4)
    vars(config.parallel_config).update(fields)
    with vllm_importable():
        assert num_replicas_of(config, kv_cache_config(9, has_latents=True)) == number
        assert num_replicas_of(config, kv_cache_config(9, (0, 12), has_latents=True)) == 1, "a window of heads"
        assert num_replicas_of(config, kv_cache_config(9)) == 1


def test_a_transport_that_cannot_share_is_refused() -> None:
    """A program's own `make_transport` must return a transport that can share host memory."""
    replicas = WorkerReplicas(1, 2, lambda text: ["", ""])
    transport: Any = SimpleNamespace(block_bytes=8)
    with (
        pytest.raises(ConfigError, match="make_transport: must return a transport that can share host memory"),
        replicas.sharing(transport, 4),
    ):
        pass


@attrs.define(eq=False)
class Shares:
    """A transport that opens, or raises one of these errors."""

    block_bytes: int = 8
    share_error: Exception | None = None
    open_error: Exception | None = None
    is_open: bool = False

    def share_host_memory(self, path: str) -> None:
        assert path.startswith("/proc/")
        if self.share_error is not None:
            raise self.share_error

    def open(self) -> None:
        if self.open_error is not None:
            raise self.open_error
        self.is_open = True

    def close(self, timeout_s: float) -> bool:
        self.is_open = False
        return True


def opened(transports: list[Any], num_host_blocks: int = 4) -> list[Exception | None]:
    """What each of these workers raises, which open their transports at the same time."""
    replicas = replicas_of(len(transports))

    def work(rank: int) -> Exception | None:
        try:
            with replicas[rank].sharing(transports[rank], num_host_blocks):
                transports[rank].open()
        except Exception as error:  # noqa: BLE001 - what the test is about
            return error
        return None

    with ThreadPoolExecutor(len(transports)) as workers:
        return list(workers.map(work, range(len(transports))))


def test_every_worker_hears_that_the_memory_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker 0 makes it. The others wait for its path, and get the reason instead."""
    assert opened([Shares(), Shares()]) == [None, None]
    first, second = opened([Shares(), Shares()], num_host_blocks=2**60)
    for error in (first, second):
        assert isinstance(error, ConfigError) and "the system refuses" in error.problem
    assert first.argument == "num_host_blocks" and second.problem.startswith("worker 0: num_host_blocks: ")
    monkeypatch.delattr(shared_memory.os, "memfd_create")
    needs = "make_transport: sharing host memory needs Linux (memfd_create)"
    assert [str(error) for error in opened([Shares(), Shares()])] == [needs, f"make_transport: worker 0: {needs}"]


OPEN_ERRORS: dict[str, tuple[dict[str, Exception], str]] = {
    "cannot share": (
        {"share_error": ConfigError("num_replicas", "a tier below the host cannot share host memory")},
        "make_transport: a tier below the host cannot share host memory",
    ),
    "no memory": ({"open_error": ConfigError("num_host_blocks", "too much")}, "num_host_blocks: too much"),
    "another error": ({"open_error": RuntimeError("no device")}, "RuntimeError: no device"),
}


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(("errors", "reason"), OPEN_ERRORS.values(), ids=OPEN_ERRORS)
def test_every_worker_hears_that_one_could_not_open(errors: dict[str, Any], reason: str, number: int) -> None:
    """The worker raises its own error, and the others `ConfigError` with its number. No transport stays open."""
    transports = [Shares(), Shares()]
    transports[number] = Shares(**errors)
    found = opened(transports)
    own, other = found[number], found[1 - number]
    assert reason.endswith(str(own)) and type(own) is type(next(iter(errors.values())))
    assert isinstance(other, ConfigError) and str(other) == f"make_transport: worker {number}: {reason}"
    assert not any(each.is_open for each in transports)


def test_a_worker_whose_transport_cannot_share_tells_the_others() -> None:
    """Workers may get different transports from a program's own `make_transport`."""
    found = opened([Shares(), SimpleNamespace(block_bytes=8)])
    assert all(isinstance(error, ConfigError) for error in found)
    assert "worker 1: make_transport: must return a transport" in str(found[0])
