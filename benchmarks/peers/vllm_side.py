"""vLLM's scheduler side, one request at a time, driven from here: `KVCacheManager` and the offloading connector's
scheduler with its CPU manager, built from a configuration as in its own tests. It has no worker, no bytes and no
`Scheduler`. Every transfer is reported finished at once."""

from __future__ import annotations

import gc
import itertools
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import line
import numpy as np
import torch
import vllm_fs
from vllm import SamplingParams
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

BLOCK_SIZE = 16
MODEL = tempfile.TemporaryDirectory(prefix="vllm_side_")
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 100_000,
    "max_position_embeddings": 2**20, "torch_dtype": "float32",
}  # fmt: skip


def config_of(num_device: int, num_host: int) -> VllmConfig:
    where = Path(MODEL.name)
    (where / "config.json").write_text(json.dumps(LLAMA))
    model = ModelConfig(model=str(where), tokenizer=str(where), skip_tokenizer_init=True, dtype="float32", seed=0)
    scheduler = SchedulerConfig(
        max_num_seqs=16, max_num_batched_tokens=2**20, max_model_len=2**20, is_encoder_decoder=False
    )
    extra = {"cpu_bytes_to_use": num_host * CPUOffloadingSpec.BLOCK_SIZE_ALIGNMENT, "spec_name": "CPUOffloadingSpec"}
    cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True)
    transfer = KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=extra)
    config = VllmConfig(model_config=model, cache_config=cache, scheduler_config=scheduler, kv_transfer_config=transfer)
    config.cache_config.num_gpu_blocks = num_device
    return config


class SchedulerSide:
    """A device pool, a host pool, and requests that are served one after the other."""

    def __init__(self, num_device: int, num_host: int) -> None:
        config = config_of(num_device, num_host)
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
        groups = KVCacheConfig(
            num_blocks=num_device, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        )
        self.manager = KVCacheManager(
            groups, max_model_len=2**20, scheduler_block_size=BLOCK_SIZE, hash_block_size=BLOCK_SIZE
        )
        self.connector = OffloadingConnector(config, KVConnectorRole.SCHEDULER, groups)
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        self.num_requests = 0
        self.num_device_hits = self.num_host_hits = 0

    def request(self, prompt: list[int]) -> Request:
        """The request, with the digests of all its blocks."""
        self.num_requests += 1
        return Request(
            request_id=str(self.num_requests), prompt_token_ids=prompt, sampling_params=SamplingParams(max_tokens=2),
            pooling_params=None, block_hasher=self.hasher,
        )  # fmt: skip

    def serve(self, request: Request, *, decodes: bool = False) -> None:
        """Serve a request, from match to release: prefill, perhaps a decode step, one more token, all its stores."""
        connector, manager = self.connector, self.manager
        connector.on_new_request(request)
        computed, num_local, _ = manager.get_computed_blocks(request)
        num_external, _ = connector.get_num_new_matched_tokens(request, num_local)
        assert num_external is not None
        self.num_device_hits += num_local // BLOCK_SIZE
        self.num_host_hits += num_external // BLOCK_SIZE
        num_cached = num_local + num_external
        num_left = request.num_tokens - num_cached
        if num_external:
            blocks = manager.allocate_slots(
                request, 0, num_local, computed, num_external_computed_tokens=num_external, delay_cache_blocks=True
            )
            assert blocks is not None
            connector.update_state_after_alloc(request, manager.get_blocks(request.request_id), num_external)
            self.finish(connector.build_connector_meta(self.output()))
            request.num_computed_tokens = num_cached
            manager.cache_blocks(request, num_cached)
            blocks = manager.allocate_slots(request, num_left)
        else:
            blocks = manager.allocate_slots(request, num_left, num_local, computed)
            connector.update_state_after_alloc(request, blocks, 0)
            request.num_computed_tokens = num_local
        assert blocks is not None
        request.status = RequestStatus.RUNNING
        new = NewRequestData.from_request(request, manager.get_block_ids(request.request_id))
        self.finish(connector.build_connector_meta(self.output(new=[new], num={request.request_id: num_left})))
        request.num_computed_tokens = request.num_tokens
        request.append_output_token_ids(7)
        if decodes:
            self.decode(request)
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        connector.request_finished(request, manager.get_block_ids(request.request_id)[0])
        self.finish(connector.build_connector_meta(self.output(finished={request.request_id})))
        manager.free(request)

    def decode(self, request: Request) -> None:
        """One decode step: slots for the token that was sampled and for the next one."""
        blocks = self.manager.allocate_slots(request, 1)
        assert blocks is not None
        cached = CachedRequestData(
            req_ids=[request.request_id], resumed_req_ids=set(), new_token_ids=[], all_token_ids={},
            new_block_ids=[blocks.get_block_ids(allow_none=True)], num_computed_tokens=[request.num_computed_tokens],
            num_output_tokens=[1],
        )  # fmt: skip
        self.finish(self.connector.build_connector_meta(self.output(cached=cached, num={request.request_id: 1})))
        request.num_computed_tokens += 1
        request.append_output_token_ids(8)

    def output(self, new: Any = (), num: Any = None, finished: Any = (), cached: Any = None) -> SchedulerOutput:
        return SchedulerOutput(
            scheduled_new_reqs=list(new), scheduled_cached_reqs=cached or CachedRequestData.make_empty(),
            num_scheduled_tokens=num or {}, total_num_scheduled_tokens=sum((num or {}).values()),
            scheduled_spec_decode_tokens={}, scheduled_encoder_inputs={}, num_common_prefix_blocks=[0],
            finished_req_ids=set(finished), free_encoder_mm_hashes=[],
        )  # fmt: skip

    def finish(self, meta: Any) -> None:
        """Report all transfers of `meta` as landed, in the worker's place."""
        jobs = [*meta.load_jobs, *meta.store_jobs]
        if jobs:
            found = OffloadingWorkerMetadata(completed_jobs=dict.fromkeys(jobs, 1))
            self.connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=found))


SIDES: dict[int, tuple[SchedulerSide, list[list[int]]]] = {}


def prepare_cycle(num_blocks: int) -> dict[str, int]:
    """Two prompts that take turns on a device pool that holds one of them. Both are in host memory."""
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, 100_000, num_blocks * BLOCK_SIZE + 1).tolist() for _ in range(2)]
    side = SchedulerSide(num_blocks + 2, 2 * num_blocks + 2)
    for prompt in (*prompts, *prompts):
        side.serve(side.request(prompt))
    before = side.num_host_hits
    side.serve(side.request(prompts[0]))
    prompts.reverse()  # the next request finds the other prompt on the device
    SIDES[num_blocks] = side, prompts
    return {"num_host_hits": side.num_host_hits - before}


def cycle(num_blocks: int, least_s: float, hashes: bool) -> dict[str, float]:
    """Requests on a host hit, one after the other, with or without computing the digests of their tokens."""
    side, prompts = SIDES[num_blocks]
    turns = itertools.cycle(prompts)
    if hashes:
        return line.timed(lambda: side.serve(side.request(next(turns))), least_s)
    took = {"wall_s": 0.0, "cpu_s": 0.0}
    number = 0
    while number % 2 or took["wall_s"] < least_s:
        request = side.request(next(turns))
        one = line.timed_once(lambda request=request: side.serve(request))
        took = {name: took[name] + one[name] for name in took}
        number += 1
    return {name: seconds / number for name, seconds in took.items()}


def match(num_blocks: int, least_s: float) -> dict[str, float]:
    """Look-ups, from token ids to the cached part of them. Nothing is precomputed, and no blocks are allocated."""
    side, prompts = SIDES[num_blocks]
    turns = itertools.cycle(prompts)
    found: list[int] = []

    def once() -> None:
        request = side.request(next(turns))
        _, num_local, _ = side.manager.get_computed_blocks(request)
        side.connector.on_new_request(request)
        num_external, _ = side.connector.get_num_new_matched_tokens(request, num_local)
        found.append(num_local + (num_external or 0))
        side.connector.connector_scheduler._req_status.clear()  # no transfer was begun

    took = line.timed(once, least_s)
    assert min(found) == num_blocks * BLOCK_SIZE, found
    return took


STORES: dict[int, SchedulerSide] = {}


def store(num_blocks: int, number: int, has_room: bool) -> dict[str, float]:
    """Serve and store `number` uncached prompts, one after the other. Their digests are made before. The host is new
    (`has_room`), or each prompt replaces an older one. Returns the time of one, and the host hits of the last but
    one."""
    gc.unfreeze()
    side = None if has_room else STORES.get(num_blocks)
    if side is None:
        num_kept = number + 1 if has_room else 2
        side = SchedulerSide(num_blocks + 2, num_kept * num_blocks)
        for _ in range(1 if has_room else 2):
            side.serve(side.request(_new_prompt(num_blocks)))
    if not has_room:
        STORES[num_blocks] = side
    took = {"wall_s": 0.0, "cpu_s": 0.0}
    prompts = [_new_prompt(num_blocks) for _ in range(number)]
    gc.collect()
    gc.freeze()  # as on the other side, so that no later collection keeps a core busy while that side is timed
    for prompt in prompts:
        request = side.request(prompt)
        one = line.timed_once(lambda request=request: side.serve(request))
        took = {name: took[name] + one[name] for name in took}
    before = side.num_host_hits
    side.serve(side.request(prompts[-2]))
    return {name: seconds / number for name, seconds in took.items()} | {"num_host_hits": side.num_host_hits - before}


FRESH = itertools.count()


def _new_prompt(num_blocks: int) -> list[int]:
    return [next(FRESH), *range(num_blocks * BLOCK_SIZE)]


REPLAYS: dict[str, list[list[int]]] = {}


def prepare_replay(path: str, limit: int) -> int:
    """Read the prompts of a trace: each id is a block, and one more token follows."""
    with open(path) as lines:
        found = [json.loads(text)["hash_ids"] for text in itertools.islice(lines, limit)]
    REPLAYS[path] = [[*(number for number in ids for _ in range(BLOCK_SIZE)), 0] for ids in found]
    return len(found)


def replay(path: str, num_device: int, num_host: int, hashes: bool) -> dict[str, float]:
    """Serve all prompts one after the other, on empty pools. Returns seconds for one request, with or without computing
    the digests of its tokens, and the blocks that hit."""
    side, prompts = SchedulerSide(num_device + 1, num_host), REPLAYS[path]
    took = {"wall_s": 0.0, "cpu_s": 0.0}
    gc.collect()
    for prompt in prompts:
        request = None if hashes else side.request(prompt)
        one = line.timed_once(lambda: side.serve(request or side.request(prompt), decodes=True))  # noqa: B023
        took = {name: took[name] + one[name] for name in took}
    hits = {"num_device_hits": side.num_device_hits, "num_host_hits": side.num_host_hits}
    return {name: seconds / len(prompts) for name, seconds in took.items()} | hits


CALLS: dict[str, Callable[..., Any]] = {
    "prepare_cycle": prepare_cycle, "cycle": cycle, "match": match, "prepare_replay": prepare_replay, "replay": replay,
    "store": store, **vllm_fs.CALLS,
}  # fmt: skip

if __name__ == "__main__":
    line.serve(CALLS)
