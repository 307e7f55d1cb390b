"""Tests of draft layers in a group of their own, over vLLM's cache manager, in place of vLLM's test of them.

vLLM's test expects the hits of vLLM's manager, which drops a block of each hit. Run by `proof.vllm.upstream_tests`.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from vllm import SamplingParams
from vllm.config import SpeculativeConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from aoffload._vllm.connector import StepReports
from aoffload._vllm.messages import Reports
from aoffload.integrations.vllm import AoffloadConnector
from aoffload.ledger import Completion, Outcome

from .manager_behaviour import config as config  # a fixture

BLOCK, NUM_RANKS, NUM_BLOCKS = 64, 8, 256
UNIT = BLOCK * NUM_RANKS
"""A block of the target is sharded over the ranks, so it has as many tokens as eight blocks of a draft layer that is
not."""
WINDOWS = {"windows": UNIT, "windows that begin in a unit": UNIT + 88}
PAGE_BYTES = BLOCK * 16 * 2 * 2


class World:
    def __init__(self, config: VllmConfig, kind: str, num_ahead: int, chunk: int, interval: int | None) -> None:
        heads: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 16, "dtype": torch.float16}
        target = FullAttentionSpec(**heads, dcp_sharded=True)
        drafts: Any = FullAttentionSpec(**heads, dcp_sharded=kind == "sharded")
        if kind in WINDOWS:
            drafts = SlidingWindowSpec(
                **heads, sliding_window=WINDOWS[kind], extra_retained_tokens=num_ahead - 1, dcp_sharded=False
            )
        stride = PAGE_BYTES * NUM_BLOCKS
        tensor = KVCacheTensor(
            size=2 * stride, layers=["target", "drafts"], layer_stride=stride, block_stride=PAGE_BYTES
        )
        groups = [KVCacheGroupSpec(["target"], target), KVCacheGroupSpec(["drafts"], drafts, is_eagle_group=True)]
        cache = KVCacheConfig(num_blocks=NUM_BLOCKS, kv_cache_tensors=[tensor], kv_cache_groups=groups)
        cache.prefix_cache_retention_interval = interval
        config = copy.deepcopy(config)
        config.parallel_config.decode_context_parallel_size = NUM_RANKS
        config.cache_config.prefix_cache_retention_interval = interval
        config.speculative_config = Mock(spec=SpeculativeConfig, num_speculative_tokens=3, draft_model_config=None)
        config.speculative_config.use_eagle.return_value = True
        config.speculative_config.use_eagle_block_drop.return_value = True
        config.speculative_config.use_multi_module_mtp.return_value = num_ahead > 1
        transfer = config.kv_transfer_config
        transfer.kv_load_failure_policy = "recompute"
        transfer.kv_connector_extra_config = {"num_host_blocks": NUM_BLOCKS}
        self.manager = KVCacheManager(
            cache, max_model_len=16384, max_in_flight_tokens=chunk, scheduler_block_size=UNIT, hash_block_size=BLOCK,
            dcp_world_size=NUM_RANKS, use_eagle=True, num_prefill_lookahead=num_ahead,
        )  # fmt: skip
        self.connector = AoffloadConnector(config, KVConnectorRole.SCHEDULER, cache)
        self.connector.bind_kv_cache_manager(self.manager)
        self.chunk = chunk

    def request(self, name: str, num_tokens: int) -> Request:
        return Request(
            request_id=name, prompt_token_ids=list(range(num_tokens)), sampling_params=SamplingParams(max_tokens=2),
            pooling_params=None, block_hasher=get_request_block_hasher(BLOCK, sha256),
        )  # fmt: skip

    def step(self, scheduled: dict[str, int]) -> Any:
        """The commands of a step. Its stores land at once."""
        output = SimpleNamespace(num_scheduled_tokens=scheduled, preempted_req_ids=set())
        commands = self.connector.build_connector_meta(output).commands
        landed = tuple(Completion(plan.job_id, Outcome.LANDED, plan.num_blocks) for plan in commands.stores)
        if landed:
            told = SimpleNamespace(kv_connector_worker_meta=StepReports(Reports({0: landed})), finished_recving=set())
            self.connector.update_connector_output(told)
        return commands

    def serve(self, request: Request) -> None:
        """Compute the prompt in chunks, and one token after it."""
        assert self.connector.get_num_new_matched_tokens(request, 0) == (0, False)
        while request.num_computed_tokens <= request.num_prompt_tokens:
            if request.num_computed_tokens == request.num_prompt_tokens:
                request.append_output_token_ids([request.num_prompt_tokens])
            number = min(self.chunk, request.num_tokens - request.num_computed_tokens)
            assert self.manager.allocate_slots(request, number, num_lookahead_tokens=3) is not None
            self.step({request.request_id: number})
            request.num_computed_tokens += number
        self.connector.request_finished_all_groups(request, self.manager.get_block_ids(request.request_id))
        self.manager.free(request)
        while self.connector.has_pending_push_work():
            self.step({})


@pytest.mark.parametrize("interval", [None, 0])
@pytest.mark.parametrize(("num_ahead", "chunk"), [(1, 64), (1, 1024), (3, 1)])
@pytest.mark.parametrize("kind", [*WINDOWS, "replicated", "sharded"])
def test_drafts_of_a_group_hit_as_far_as_in_vllms_own_cache(
    config: VllmConfig, kind: str, num_ahead: int, chunk: int, interval: int | None
) -> None:
    """At least as far, because vLLM drops a block of its own hit. All blocks that vLLM keeps for the hit are loaded."""
    world = World(config, kind, num_ahead, chunk, interval)
    num_tokens = 16 * UNIT + (UNIT if kind == "sharded" else BLOCK) + num_ahead
    world.serve(world.request("first", num_tokens))
    again = world.request("again", num_tokens)
    wanted = world.manager.get_computed_blocks(again)[1]
    assert wanted >= 15 * UNIT
    assert world.manager.reset_prefix_cache(), "blocks are held"

    hit, _ = world.connector.get_num_new_matched_tokens(again, 0)
    assert hit is not None and hit >= wanted and not hit % UNIT
    more = world.manager.allocate_slots(again, 0, num_external_computed_tokens=hit, delay_cache_blocks=True)
    assert more is not None
    tables = world.manager.get_blocks("again")
    world.connector.update_state_after_alloc(again, tables, hit)
    loads = world.step({}).loads
    loaded = [block_id for plan in loads for block_id in plan.destination_ids]
    of_target, of_drafts = tables.blocks
    num_drafts = hit // (UNIT if kind == "sharded" else BLOCK)
    held = [*of_target[: hit // UNIT], *of_drafts[:num_drafts]]
    assert sorted(loaded) == sorted(block.block_id for block in held if block.block_id)
    assert not world.connector.off_reason
