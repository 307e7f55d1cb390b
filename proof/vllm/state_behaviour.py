"""Recurrent layers of Mamba 2 under vLLM's own scheduler and cache manager, with a model that keeps track of states.

vLLM's CPU kernels cannot run Mamba 2. Here the scheduler, the block tables, the prefix cache and the connector's
scheduler side are the real ones. The worker is a model of vLLM's: every state and every token of KV is a digest of the
tokens before it, copies run some steps late, and a read of anything else fails. Run by `proof.vllm.upstream_tests`.
"""

from __future__ import annotations

import copy
import hashlib
import random
from collections import deque
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, MambaSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from aoffload._vllm.connector import StepReports
from aoffload._vllm.messages import Reports
from aoffload._vllm.worker import lost_requests
from aoffload.ledger import Completion, Direction, Outcome, TransferPlan

from .manager_behaviour import config as config  # a fixture
from .transfers import OURS

BLOCK = 64
MAX_LATE = 4
"""Steps after which a copy has ended."""
NUM_STATE_GROUPS = 2
PATIENCE = 3_000
"""A scheduler that needs more steps hangs."""
STATE = MambaSpec(
    block_size=BLOCK, shapes=((3, 64), (2, 16, 16)), dtypes=(torch.bfloat16, torch.float32), mamba_cache_mode="align",
    num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=1,
)  # fmt: skip
"""That of a Mamba 2 layer: the last inputs of its convolution, and two heads of 16 by 16. Mamba 2 writes the state of
the prompt's last whole block from inside a chunk; a gated delta net has its chunk end there instead."""
HEADS: dict[str, Any] = {"num_kv_heads": 1, "head_size": 16, "dtype": torch.float16}
PAGE_BYTES = BLOCK * 16 * 2 * 2
assert STATE.page_size_bytes <= PAGE_BYTES

Content: TypeAlias = Any
"""Of a block: a state, which is its position and the digest of all tokens before, or the digests of the tokens up to
each one in the block."""


class World:
    """vLLM's scheduler with `num_blocks`, two groups of Mamba 2 layers and one of full attention."""

    def __init__(
        self,
        config: VllmConfig,
        num_blocks: int,
        *,
        seed: int = 0,
        interval: int | None = 0,
        hash_block_size: int = BLOCK,
        most_tokens: int = 256,
        fails: bool = False,
        num_context_ranks: int = 1,
        cuts: bool = False,
        **extra: Any,
    ) -> None:
        """`hash_block_size`: smaller than a block, vLLM's own cache hits inside blocks. `fails`: every second load.
        `num_context_ranks`: ranks that share a block of full attention, so that it has so many times the tokens.
        `cuts`: layers as those of a gated delta net."""
        self.rng, self.fails = random.Random(seed), fails
        config = copy.deepcopy(config)
        config.kv_transfer_config = type(config.kv_transfer_config)(
            **OURS | {"kv_connector_extra_config": {"num_host_blocks": 600, **extra}}
        )
        config.parallel_config.decode_context_parallel_size = num_context_ranks
        self.full_size = BLOCK * num_context_ranks
        cache = config.cache_config
        cache.block_size, cache.mamba_block_size, cache.mamba_cache_mode = BLOCK, BLOCK, "align"
        cache.prefix_cache_retention_interval, cache.num_gpu_blocks = interval, num_blocks
        config.scheduler_config.max_num_batched_tokens = most_tokens
        config.scheduler_config.max_num_scheduled_tokens = most_tokens
        self.spec = padded = replace(STATE, page_size_padded=PAGE_BYTES)
        if cuts:
            self.spec = padded = replace(padded, num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None)
        self.hash_block_size = hash_block_size
        specs = [*[padded] * NUM_STATE_GROUPS, FullAttentionSpec(block_size=BLOCK, **HEADS)]
        stride = PAGE_BYTES * num_blocks
        tensors = [
            KVCacheTensor(size=stride, layers=[f"l{number}"], layer_stride=stride, block_stride=PAGE_BYTES)
            for number in range(len(specs))
        ]
        groups = [KVCacheGroupSpec([f"l{number}"], spec) for number, spec in enumerate(specs)]
        described = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=tensors, kv_cache_groups=groups)
        described.prefix_cache_retention_interval = interval
        self.scheduler = Scheduler(
            config,
            described,
            StructuredOutputManager(config),
            block_size=self.full_size,
            hash_block_size=hash_block_size,
        )
        self.hasher = get_request_block_hasher(hash_block_size, sha256)
        self.connector = self.scheduler.connector
        self.memory: dict[int, Content] = {}
        """The content of each block: a state, or KV."""
        self.host: dict[int, Content] = {}
        self.digests: dict[str, list[bytes]] = {}
        self.late: deque[tuple[int, TransferPlan]] = deque()
        self.columns: dict[str, int] = {}
        """By request, the place of its running state in its tables."""
        self.num_steps = self.num_loads = self.num_preemptions = self.num_checkpoints = 0
        self.cached: dict[str, int] = {}

    # -- requests -------------------------------------------------------------------------------------------------

    def request(self, name: str, tokens: list[int], num_new: int = 4) -> Request:
        params = SamplingParams(max_tokens=num_new, ignore_eos=True)
        return Request(
            request_id=name, prompt_token_ids=list(tokens), sampling_params=params, pooling_params=None,
            block_hasher=self.hasher,
        )  # fmt: skip

    def serve(self, prompts: dict[str, list[int]], num_new: int = 4) -> list[int]:
        """Run these requests to their end. Returns the tokens that each of them has found cached."""
        for name, tokens in prompts.items():
            self.scheduler.add_request(self.request(name, tokens, num_new))
        self.run()
        return [self.cached[name] for name in prompts]

    def run(self) -> None:
        begun = self.num_steps
        while self.scheduler.has_requests() or self.connector.has_pending_push_work() or self.late:
            self.step()
            assert self.num_steps < begun + PATIENCE, "the scheduler hangs"

    def forget(self) -> None:
        """Empty vLLM's own cache."""
        assert self.scheduler.reset_prefix_cache(), "blocks are held"

    def step(self) -> None:
        self.num_steps += 1
        output = self.scheduler.schedule()
        self.num_preemptions += len(output.preempted_req_ids or ())
        commands = output.kv_connector_metadata.commands
        resumed = output.scheduled_cached_reqs.resumed_req_ids
        for name in (*output.finished_req_ids, *(output.preempted_req_ids or ()), *resumed):
            self.columns.pop(name, None)
        for copied in output.kv_cache_block_copies or ():
            self.memory[copied.dst_block_id] = self.memory[copied.src_block_id]
        sampled = []
        for new in output.scheduled_new_reqs:
            self.cached.setdefault(new.req_id, new.num_computed_tokens)
        for name, number in output.num_scheduled_tokens.items():
            sampled.append(self._compute(self.scheduler.requests[name], number))
        for plan in (*commands.loads, *commands.stores):
            self.late.append((self.num_steps + self.rng.randrange(MAX_LATE), plan))
        landed = self._land()
        lost = lost_requests(commands.reports)
        told = KVConnectorOutput(
            finished_recving={report.request_id for report in commands.reports}, failed_recving=lost,
            kv_connector_worker_meta=StepReports(Reports({0: landed})) if landed else None,
        )  # fmt: skip
        names = list(output.num_scheduled_tokens)
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names, req_id_to_index={name: at for at, name in enumerate(names)}, sampled_token_ids=sampled,
                kv_connector_output=told,
            ),
        )  # fmt: skip
        assert not self.connector.off_reason, self.connector.off_reason

    # -- the model ------------------------------------------------------------------------------------------------

    def _compute(self, request: Request, number: int) -> list[int]:
        """What vLLM's worker does for a request, and the token that it samples after its last one."""
        name, stop = request.request_id, request.num_computed_tokens  # the scheduler has counted this step
        start, digests = stop - number, self._digests_of(request)
        *states, full = self.scheduler.kv_cache_manager.get_block_ids(name)
        before = self.columns.get(name, (start - 1) // BLOCK)
        after = self.columns[name] = -(-stop // BLOCK) - 1
        for table in states:
            if before >= 0:
                assert self.memory.get(table[before]) == (start, digests[start]), f"{name} reads a wrong state"
            self.memory[table[after]] = (stop, digests[stop])
            self._write_checkpoint(table, start, stop, digests)
        size = self.full_size
        for first in range(0, stop, size):
            block_id, num_old = full[first // size], max(0, min(start - first, size))
            of_block = digests[first + 1 : min(first + size, stop) + 1]
            if num_old:
                assert self.memory[block_id][:num_old] == of_block[:num_old], f"{name} reads wrong KV"
            if num_old < len(of_block):
                self.memory[block_id] = of_block
        return [digests[stop][0]] if stop == request.num_tokens else []

    def _write_checkpoint(self, table: list[int], start: int, stop: int, digests: list[bytes]) -> None:
        """The state from inside the chunk, where vLLM's own rule for the worker has it."""
        (offset,), (column,) = compute_mamba_prefill_checkpoints(
            [stop], [stop - start], self.hash_block_size, BLOCK, self.spec.prefill_checkpoint_alignment, False,
            self.scheduler.kv_cache_manager.coordinator._cache_hit_alignment_tokens,
        )  # fmt: skip
        if offset and table[column]:
            self.memory[table[column]] = (start + offset, digests[start + offset])
            self.num_checkpoints += 1

    def _digests_of(self, request: Request) -> list[bytes]:
        """For each token, the digest of all tokens up to it; one before the first."""
        found = self.digests.setdefault(request.request_id, [b""])
        for token in request.all_token_ids[len(found) - 1 :]:
            found.append(hashlib.blake2b(found[-1] + token.to_bytes(4), digest_size=8).digest())
        return found

    def _land(self) -> tuple[Completion, ...]:
        """Make the copies that end with this step: they read and write now, however long ago they were begun."""
        landed = []
        for due, plan in [each for each in self.late if each[0] <= self.num_steps]:
            self.late.remove((due, plan))
            is_load = plan.direction is Direction.LOAD
            self.num_loads += is_load
            if is_load and self.fails and self.num_loads % 2:
                landed.append(Completion(plan.job_id, Outcome.FAILED, error="failed on purpose"))
                continue
            for source, destination in zip(plan.source_ids, plan.destination_ids, strict=True):
                if is_load:
                    self.memory[destination] = self.host[source]
                else:
                    self.host[destination] = self.memory[source]
            landed.append(Completion(plan.job_id, Outcome.LANDED, plan.num_blocks))
        return tuple(landed)


def words(seed: str, number: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(500) for _ in range(number)]


@pytest.mark.parametrize("cuts", [False, True])
@pytest.mark.parametrize("interval", [0, None])
def test_a_state_returns_from_host_memory(config: VllmConfig, interval: int | None, cuts: bool) -> None:
    """With the KV before it, up to the last whole block of the prompt."""
    world = World(config, 200, interval=interval, cuts=cuts)
    first = words("first", 1000)
    assert world.serve({"first": first}) == [0]
    world.forget()
    assert world.serve({"again": first, "on": [*first, *words("on", 100)]}) == [960, 960]
    assert world.num_loads


@pytest.mark.parametrize("cuts", [False, True])
def test_prompts_that_part_hit_what_they_share(config: VllmConfig, cuts: bool) -> None:
    """Host memory knows the shared tokens of the first prompt, and no state at their end. The second prompt leaves a
    state there, although vLLM's own cache has forgotten the first."""
    world, shared = World(config, 200, cuts=cuts), words("shared", 700)
    hits = []
    for number in range(4):
        hits += world.serve({f"user {number}": [*shared, *words(f"{number}", 300)]})
        world.forget()
    assert hits == [0, 0, 640, 640]
    assert bool(world.num_checkpoints) != cuts


def test_no_state_is_read_that_belongs_to_other_tokens(config: VllmConfig) -> None:
    """A prompt that parts inside the last block before a state does not hit the state."""
    world, first = World(config, 200), words("first", 1000)
    world.serve({"first": first})
    world.forget()
    assert world.serve({"other": [*first[:950], *words("other", 100)]}) == [0]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(("hash_block_size", "num_context_ranks"), [(BLOCK, 1), (16, 1), (BLOCK, 2)])
@pytest.mark.parametrize("interval", [0, 2 * BLOCK, None])
def test_every_read_finds_its_own_state(
    config: VllmConfig, interval: int | None, hash_block_size: int, num_context_ranks: int, fails: bool
) -> None:
    """Conversations at once in a pool so small that they preempt each other, while copies run late."""
    num_cached = num_loads = num_preemptions = 0
    for seed in range(4):
        world = World(
            config, 45, seed=seed, interval=interval, hash_block_size=hash_block_size, fails=fails, most_tokens=192,
            num_context_ranks=num_context_ranks, cuts=seed == 3,
        )  # fmt: skip
        said = {talk: words(f"{seed} {talk % 3}", 150 + 90 * (talk % 3)) for talk in range(6)}
        for turn in range(4):
            prompts = {}
            for talk in said:
                said[talk] = [*said[talk], *words(f"{seed} {talk} {turn}", world.rng.randrange(20, 200))]
                prompts[f"{talk}.{turn}"] = said[talk]
            num_cached += sum(world.serve(prompts, num_new=world.rng.randrange(2, 90)))
            if turn % 2:
                world.forget()
        num_loads, num_preemptions = num_loads + world.num_loads, num_preemptions + world.num_preemptions
        pool = world.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == len(pool.blocks) - 1, "blocks are held at rest"
        world.connector.ledger.check_integrity()
    assert num_cached and num_loads and num_preemptions


def test_modes_without_checkpoints_are_refused(config: VllmConfig) -> None:
    """With a way out."""
    from aoffload import ConfigError
    from aoffload._vllm.groups import CachedGroups

    for change, argument in (
        ({"mamba_cache_mode": "none"}, "mamba_cache_mode"),
        ({"num_speculative_blocks": 1}, "speculative_config"),
    ):
        spec = replace(STATE, **change)
        described = SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)], prefix_cacheable_group_ids=(0,)
        )
        with pytest.raises(ConfigError, match=r"Start with") as caught:
            CachedGroups.of(described, 1)
        assert caught.value.argument == argument
