"""Latents of MLA are on every worker: stored once for all of them, in memory that they share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from engine_doubles import PAGE_BYTES, TEXT, Request
from small_engine import SmallEngine, to_rest
from vllm_configs import kv_cache_config, vllm_config
from vllm_doubles import vllm_importable

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
def test_the_bytes_of_the_server_hold_more_of_them(has_latents: bool, num_host_blocks: int) -> None:
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
    """A `make_transport` of the program's own has to return one that can."""
    replicas = WorkerReplicas(1, 2, lambda text: ["", ""])
    transport: Any = SimpleNamespace(block_bytes=8)
    with pytest.raises(ConfigError, match="make_transport: must be a LocalTransport"), replicas.sharing(transport, 4):
        pass
