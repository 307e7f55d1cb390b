"""Tests of behaviour over vLLM's block pool, in place of vLLM's tests that read the internals of its manager.

Run by `proof.vllm.upstream_tests`, with pytest and the plugin `proof.vllm.adapter`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from .adapter import Adapter
from .transfers import OURS

BLOCK = 16
PAGE_BYTES = BLOCK * 16 * 2 * 2
NUM_DEVICE = 16

init_none_hash(sha256)
register_all_kvcache_specs(vllm_config=None)


@pytest.fixture(scope="module")
def config() -> VllmConfig:
    model = ModelConfig(model="facebook/opt-125m", dtype="float16", seed=0)
    scheduler = SchedulerConfig(
        max_num_seqs=16, max_num_batched_tokens=64, max_model_len=2048, is_encoder_decoder=False
    )
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
    transfer = KVTransferConfig(**OURS)
    return VllmConfig(
        model_config=model, scheduler_config=scheduler, cache_config=cache, kv_transfer_config=transfer,
        device_config=DeviceConfig("cpu"),
    )  # fmt: skip


class World:
    """vLLM's block pool and requests around the scheduler's half of the connector."""

    def __init__(self, config: VllmConfig, num_host: int = 8, num_groups: int = 1, chunk: int = 0) -> None:
        """`chunk`: tokens of a chunk in the second group; 0: it has windows."""
        self.num_groups, self.pool = num_groups, BlockPool(NUM_DEVICE, True, BLOCK)
        specs = [_spec(number, chunk) for number in range(num_groups)]
        tensors = [
            KVCacheTensor(
                size=PAGE_BYTES * NUM_DEVICE, layers=[f"l{number}"], layer_stride=PAGE_BYTES * NUM_DEVICE,
                block_stride=PAGE_BYTES,
            )
            for number in range(num_groups)
        ]  # fmt: skip
        groups = [KVCacheGroupSpec([f"l{number}"], spec) for number, spec in enumerate(specs)]
        cache = KVCacheConfig(num_blocks=NUM_DEVICE, kv_cache_tensors=tensors, kv_cache_groups=groups)
        self.half = Adapter(config, cache, PAGE_BYTES * (num_host + 1))
        self.half.bind_gpu_block_pool(self.pool)
        self.num_requests = 0

    def request(self, text: int, num_blocks: int = 2, **options: Any) -> Request:
        """A request for the first blocks of a text, and one token more."""
        self.num_requests += 1
        return Request(
            request_id=f"r{self.num_requests}", sampling_params=SamplingParams(max_tokens=1, **options),
            prompt_token_ids=list(range(text * 1000, text * 1000 + num_blocks * BLOCK + 1)), pooling_params=None,
            block_hasher=get_request_block_hasher(BLOCK, sha256),
        )  # fmt: skip

    def allocate(self, request: Request, num_blocks: int, num_external: int = 0) -> KVCacheBlocks:
        blocks = KVCacheBlocks(tuple(self.pool.get_new_blocks(num_blocks) for _ in range(self.num_groups)))
        self.half.update_state_after_alloc(request, blocks, num_external)
        return blocks

    def step(self, scheduled: Sequence[tuple[Request, KVCacheBlocks, int]] = ()) -> Any:
        """A step that computes each request up to so many tokens."""
        numbers = {}
        for request, _, stop in scheduled:
            numbers[request.request_id] = stop - request.num_computed_tokens
            request.num_computed_tokens = stop
        new = [SimpleNamespace(req_id=one.request_id, block_ids=held.get_block_ids()) for one, held, _ in scheduled]
        none = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set())
        return self.half.build_connector_meta(
            SimpleNamespace(
                scheduled_new_reqs=new, scheduled_cached_reqs=none, num_scheduled_tokens=numbers,
                preempted_req_ids=set(),
            )
        )  # fmt: skip

    def compute(self, text: int, num_blocks: int = 2) -> tuple[Request, KVCacheBlocks, Any]:
        request = self.request(text, num_blocks)
        held = self.allocate(request, num_blocks)
        return request, held, self.step([(request, held, num_blocks * BLOCK)])

    def end(self, request: Request, held: KVCacheBlocks) -> None:
        self.half.request_finished_all_groups(request, held.get_block_ids())
        for blocks in held.blocks:
            self.pool.free_blocks(blocks)

    def stored(self, done: Any) -> None:
        events = SimpleNamespace(completed_store_events={done.store_event: 1})
        self.half.update_connector_output(SimpleNamespace(kv_connector_worker_meta=events, finished_recving=None))

    def loaded(self, request: Request) -> None:
        told = SimpleNamespace(kv_connector_worker_meta=None, finished_recving={request.request_id})
        self.half.update_connector_output(told)

    def store(self, text: int, num_blocks: int = 2) -> None:
        request, held, done = self.compute(text, num_blocks)
        self.stored(done)
        self.end(request, held)
        last = self.step()  # what a window needs is stored when the request ends
        if last.store_event >= 0:
            self.stored(last)

    def load(self, text: int) -> tuple[Request, KVCacheBlocks]:
        """A request whose load is under way."""
        request = self.request(text)
        hit, _ = self.half.get_num_new_matched_tokens(request, 0)
        assert hit == 2 * BLOCK
        held = self.allocate(request, 2, hit)
        assert len(self.step().load_gpu_blocks) == 2 * self.num_groups
        return request, held

    def hit(self, text: int, num_blocks: int = 2, num_local: int = 0, **options: Any) -> int | None:
        """What a request finds after `num_local` tokens of vLLM's own, that ends at once."""
        request = self.request(text, num_blocks, **options)
        found, _ = self.half.get_num_new_matched_tokens(request, num_local)
        self.half.request_finished_all_groups(request, ([],) * self.num_groups)
        return found

    @property
    def num_free(self) -> int:
        return self.pool.get_num_free_blocks()

    @property
    def num_pinned(self) -> int:
        found = self.half.ledger.statistics()
        return int(found.host.num_pinned + found.device.num_pinned)


def _spec(number: int, chunk: int) -> Any:
    fields: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 16, "dtype": torch.float16}
    if number == 0:
        return FullAttentionSpec(**fields)
    if chunk:
        return ChunkedLocalAttentionSpec(**fields, attention_chunk_size=chunk)
    return SlidingWindowSpec(**fields, sliding_window=4 * BLOCK)


def test_prompt_logprobs_read_nothing(config: VllmConfig) -> None:
    """Every token of such a prompt is computed; nothing is pinned for it."""
    world = World(config)
    world.store(1)
    assert (world.hit(1), world.hit(1, prompt_logprobs=1), world.num_pinned) == (2 * BLOCK, 0, 0)


def test_what_ends_in_one_step_is_stored(config: VllmConfig) -> None:
    """Stores of several requests go together, and all of them can be found."""
    world = World(config)
    requests = [world.request(text) for text in (1, 2)]
    held = [world.allocate(request, 2) for request in requests]
    done = world.step([(request, blocks, 2 * BLOCK) for request, blocks in zip(requests, held, strict=True)])
    for request, blocks in zip(requests, held, strict=True):
        world.end(request, blocks)
    assert len(done.store_gpu_blocks) == 4
    world.stored(done)
    assert (world.hit(1), world.hit(2)) == (2 * BLOCK, 2 * BLOCK)


def test_stores_keep_the_engine_stepping(config: VllmConfig) -> None:
    """Also when no request is left; and no longer."""
    world = World(config)
    request, held, done = world.compute(1)
    world.end(request, held)
    assert world.half.has_pending_stores()
    world.stored(done)
    assert not world.half.has_pending_stores()


def test_all_groups_are_stored(config: VllmConfig) -> None:
    """A prefix is found when every group has what it needs of it."""
    world = World(config, num_groups=2)
    request, held, done = world.compute(1)
    world.end(request, held)
    last = world.step()
    assert len(done.store_gpu_blocks) + len(last.store_gpu_blocks) == 4
    world.stored(done)
    assert world.hit(1) == 0
    world.stored(last)
    assert world.hit(1) == 2 * BLOCK


def test_what_is_under_way_is_not_stored_again(config: VllmConfig) -> None:
    """Another request that shares the blocks takes no room in the host, neither before the copy is over nor after."""
    world = World(config)
    _, held, done = world.compute(1)
    for _ in range(2):
        other = world.request(1)
        world.half.update_state_after_alloc(other, held, 0)
        assert world.step([(other, held, 2 * BLOCK)]).store_gpu_blocks == []
        world.stored(done)
    assert world.half.ledger.statistics().host.num_cached == 2


def test_the_oldest_goes_first(config: VllmConfig) -> None:
    """Where the host is full."""
    world = World(config, num_host=4)
    for text in (1, 2, 3):
        world.store(text)
    assert [world.hit(text) for text in (1, 2, 3)] == [0, 2 * BLOCK, 2 * BLOCK]


def test_what_was_read_again_stays(config: VllmConfig) -> None:
    """A load makes its blocks the youngest."""
    world = World(config, num_host=4)
    world.store(1)
    world.store(2)
    request, held = world.load(1)
    world.loaded(request)
    world.end(request, held)
    world.store(3)
    assert [world.hit(text) for text in (1, 2, 3)] == [2 * BLOCK, 0, 2 * BLOCK]


@pytest.mark.parametrize("copy", ["load", "store"])
def test_an_end_while_copying_leaves_nothing(copy: str, config: VllmConfig) -> None:
    """The copy holds what it writes or reads until it is over, then nobody does."""
    world = World(config)
    if copy == "load":
        world.store(1)
        request, held = world.load(1)
        over = partial(world.loaded, request)
    else:
        request, held, done = world.compute(1)
        over = partial(world.stored, done)
    world.end(request, held)
    assert world.num_free == NUM_DEVICE - 1 - 2
    over()
    assert (world.num_free, world.num_pinned) == (NUM_DEVICE - 1, 0)


def test_a_chunk_stores_what_is_new(config: VllmConfig) -> None:
    """From the blocks that the request has by then."""
    world = World(config)
    request = world.request(1, 4)
    held = world.allocate(request, 4)
    first = world.step([(request, held, 2 * BLOCK)])
    second = world.step([(request, held, 4 * BLOCK)])
    ids = held.get_block_ids()[0]
    assert (first.store_gpu_blocks, second.store_gpu_blocks) == (ids[:2], ids[2:])


def test_a_reset_forgets_stores_under_way(config: VllmConfig) -> None:
    """They end without being found, and hold nothing."""
    world = World(config)
    request, held, done = world.compute(1)
    world.end(request, held)
    assert world.half.reset()
    world.stored(done)
    assert (world.hit(1), world.num_free, world.num_pinned) == (0, NUM_DEVICE - 1, 0)


@pytest.mark.parametrize("num_groups", [1, 2])
def test_a_reset_forgets_hits(num_groups: int, config: VllmConfig) -> None:
    """Who has asked before finds nothing afterwards, and pins nothing once it is over."""
    world = World(config, num_groups=num_groups)
    world.store(1)
    asked = world.request(1)
    assert world.half.get_num_new_matched_tokens(asked, 0)[0] == 2 * BLOCK
    assert world.half.reset()
    assert world.hit(1) == 0
    world.half.request_finished_all_groups(asked, ([],) * num_groups)
    assert world.num_pinned == 0


def test_a_reset_lets_loads_end(config: VllmConfig) -> None:
    """They hold their blocks until they are over."""
    world = World(config)
    world.store(1)
    request, held = world.load(1)
    assert world.half.reset()
    world.loaded(request)
    world.end(request, held)
    assert (world.hit(1), world.num_free, world.num_pinned) == (0, NUM_DEVICE - 1, 0)


@pytest.mark.parametrize("num_local", [0, 1, 4])
def test_chunks_begin_at_the_start_of_the_prompt(config: VllmConfig, num_local: int) -> None:
    """A hit after some blocks of vLLM's own ends where it ends without them, because chunks are not counted from these
    blocks. A prompt that ends within the second chunk needs that chunk alone in the chunked group."""
    world = World(config, num_host=16, num_groups=2, chunk=4 * BLOCK)
    world.store(1, 5)
    assert world.hit(1, 5, num_local * BLOCK) == (5 - num_local) * BLOCK
    assert world.num_pinned == 0
