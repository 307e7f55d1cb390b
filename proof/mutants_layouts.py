"""Planted defects of model layouts: the groups and regions of a configuration, and ranks that hold the same bytes."""

from __future__ import annotations

from .planting import Mutant

__all__ = ["LAYOUT_MUTANTS"]

RANKS, LANE, LOCAL = "aoffload._transfer.ranks.transport", "aoffload._transfer.lane", "aoffload._transfer.local"
OF_REPLICAS, OF_GROUPS = "tests/transfer/test_rank_replicas.py::", "tests/test_model_groups.py::"
OF_WORKERS = "tests/integrations/vllm_connector/test_vllm_replicas.py::"
OF_BYTES, OF_STATES = "tests/transfer/test_model_layouts.py::", "tests/test_model_states.py::"
HYBRIDS = "aoffload._config.hybrid_models"
FAMILIES, LAYOUT, REGION = (
    "aoffload._config.model_families", "aoffload._config.model_layout", "aoffload._transfer.region"
)  # fmt: skip

LAYOUT_MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "every replica stores",
        RANKS,
        "if is_store and index % self.num_replicas != plan.job_id % self.num_replicas:",
        "if False:",
        "replicas store their bytes once",
        test=OF_REPLICAS + "test_every_rank_loads_blocks_that_another_rank_stored",
    ),
    Mutant(
        "only one replica loads",
        RANKS,
        "if is_store and index % self.num_replicas",
        "if index % self.num_replicas",
        "every rank loads what one of them has stored",
        test=OF_REPLICAS + "test_every_rank_loads_blocks_that_another_rank_stored",
    ),
    Mutant(
        "only the first group of replicas stores",
        RANKS,
        "if is_store and index % self.num_replicas != plan.job_id % self.num_replicas:",
        "if is_store and index != plan.job_id % self.num_replicas:",
        "each group of replicas stores its own part",
        test=OF_REPLICAS + "test_groups_of_replicas_have_memories_of_their_own",
    ),
    Mutant(
        "replicas with checksums of their own",
        LOCAL,
        "digests = map_checksums(path, num_host_blocks, self.block_bytes) if path else None",
        "digests = None",
        "a rank verifies what another one has stored",
        test=OF_REPLICAS + "test_every_rank_loads_blocks_that_another_rank_stored",
    ),
    Mutant(
        "`block_bytes` counts every replica",
        RANKS,
        "self.block_bytes = sum(rank.block_bytes for rank in self.ranks[:: self.num_replicas])",
        "self.block_bytes = sum(rank.block_bytes for rank in self.ranks)",
        "host memory is sized for one copy",
        test=OF_REPLICAS + "test_a_runtime_over_replicas_hits_with_the_right_bytes",
    ),
    Mutant(
        "shared memory counted against the limit once a rank",
        "aoffload._transfer.backends.cuda.page_locked",
        "already_allocated = allocated_bytes(shared_path) if shared_path else 0",
        "already_allocated = 0",
        "a limit that is enough for one copy is enough",
        test="tests/transfer/test_cuda_memory.py::test_memory_that_ranks_share_is_locked_by_each_and_counts_once",
    ),
    Mutant(
        "vLLM: every worker with latents stores",
        "aoffload._vllm.replicas",
        "return plan.direction is Direction.LOAD or plan.job_id % self.number == self.index",
        "return True",
        "latents are stored once for all workers",
        test=OF_WORKERS + "test_workers_with_latents_store_them_once_and_all_load_them",
    ),
    Mutant(
        "vLLM: workers with KV heads share memory",
        "aoffload._vllm.replicas",
        "if kinds <= set(_LATENT_KINDS) else 1",
        "",
        "only workers that hold the same bytes share memory",
        test=OF_WORKERS + "test_only_workers_of_one_machine_that_hold_all_tokens_share",
    ),
    Mutant(
        "vLLM: workers of another executor than mp share memory",
        "aoffload._vllm.replicas",
        'if is_split or parallel.distributed_executor_backend != "mp":',
        "if is_split:",
        "only workers that vLLM starts on one machine share memory",
        test=OF_WORKERS + "test_only_workers_of_one_machine_that_hold_all_tokens_share",
    ),
    Mutant(
        "vLLM: a worker that cannot open its memory tells nobody",
        "aoffload._vllm.replicas",
        "_Message(text, _problem(failure))",
        "_Message(text)",
        "no worker serves with memory that another one lacks",
        test=OF_WORKERS + "test_every_worker_hears_that_one_could_not_open",
    ),
    Mutant(
        "a missing region is accepted",
        REGION,
        "            if spec.name not in kv_caches:\n",
        "            if spec.name not in kv_caches and parts:\n                continue\n"
        "            if spec.name not in kv_caches:\n",
        "KV without one of its regions is refused",
        test=OF_BYTES + "test_a_forgotten_region_is_named",
    ),
    Mutant(
        "the identity ignores the order of axes in memory",
        REGION,
        "(str(region.tensor.dtype), *_shape_in_memory(region), region.block_bytes)",
        "(str(region.tensor.dtype), tuple(region.block_shape), region.block_bytes)",
        "KV of another layout is a miss, also after a restart",
        test=OF_BYTES + "test_a_view_of_another_layout_is_a_miss",
    ),
    Mutant(
        "a fingerprint without windows and block sizes",
        LAYOUT,
        "content = repr((1, head, attentions, shapes, views))",
        "content = repr((1, head, shapes, views))",
        "all that decides the bytes of a block changes the fingerprint",
        test=OF_BYTES + "test_every_change_of_the_bytes_changes_the_fingerprint",
    ),
    Mutant(
        "an indexer key without its scale",
        "aoffload._config.kv_formats",
        'LayerPart("indexer keys", index_size + 4 * (index_size // 128), "uint8")',
        'LayerPart("indexer keys", index_size, "uint8")',
        "blocks have the bytes that an engine stores",
        test=OF_GROUPS + "test_formats_of_latents",
    ),
    Mutant(
        "a field that may decide what is cached is ignored",
        FAMILIES,
        "    reader.check_all_read()\n    return layers\n",
        "    return layers\n",
        "a configuration that is not understood is refused",
        test=OF_GROUPS + "test_a_config_that_groups_of_does_not_understand_is_refused",
    ),
    Mutant(
        "ranks with the same latents and other states are replicas",
        LAYOUT,
        "attrs.evolve(region, num_replicas=1, is_replicated=False) for",
        "region for",
        "every rank stores its own heads of a state",
        test=OF_STATES + "test_no_region_with_states_has_replicas",
    ),
    Mutant(
        "a checkpoint without its last block",
        LAYOUT,
        "num_rows = -(-(states[-1].offset + states[-1].num_bytes) // block_bytes)",
        "num_rows = max(1, (states[-1].offset + states[-1].num_bytes) // block_bytes)",
        "the blocks of a checkpoint hold all of it",
        test=OF_STATES + "test_the_group_of_states",
    ),
    Mutant(
        "a fingerprint without states",
        LAYOUT,
        "        content += repr((rows, ",
        "        repr((rows, ",
        "all that decides the bytes of a checkpoint changes the fingerprint",
        test=OF_STATES + "test_every_change_of_a_checkpoint_changes_the_fingerprint",
    ),
    Mutant(
        "a token counts a checkpoint",
        LAYOUT,
        "stored = [group for group in self.groups if not group.is_recurrent]",
        "stored = self.groups",
        "the bytes of a token are those of its KV",
        test=OF_STATES + "test_the_group_of_states",
    ),
    Mutant(
        "layers with attention are counted by themselves",
        LAYOUT,
        "    numbers = tuple(stored)\n",
        "    numbers = tuple(range(len(stored)))\n    stored = dict(enumerate(stored.values()))\n",
        "a view names the layer of the model",
        test=OF_STATES + "test_layers_have_their_own_numbers",
    ),
    Mutant(
        "one group of Mamba heads is divided among ranks",
        HYBRIDS,
        'own_groups = 1 if groups == 1 else states.share("groups of Mamba heads", groups)',
        'own_groups = states.share("groups of Mamba heads", groups)',
        "each rank has the group that its heads read",
        test=OF_STATES + "test_ranks_divide_states",
    ),
    Mutant(
        "a convolution that keeps its whole kernel",
        HYBRIDS,
        "StatePart(CONVOLUTION, (kernel - 1, channels), self.conv_dtype)",
        "StatePart(CONVOLUTION, (kernel, channels), self.conv_dtype)",
        "checkpoints have the bytes that an engine stores",
        test=OF_STATES + "test_sizes_of_known_models",
    ),
    Mutant(
        "states in the dtype of the model",
        HYBRIDS,
        'return found.pop() if found else "float32"',
        "return found.pop() if found else str(reader.dtype())",
        "checkpoints have the bytes that an engine stores",
        test=OF_STATES + "test_dtypes_of_states",
    ),
    Mutant(
        "convolution inputs in the dtype of quantized KV",
        HYBRIDS,
        "conv = form.dtype if form.dtype in STATE_DTYPES else reader.dtype()",
        "conv = form.dtype",
        "a model with quantized KV keeps its convolution inputs as they are",
        test=OF_STATES + "test_dtypes_of_states",
    ),
    Mutant(
        "rows of a checkpoint that the root does not name",
        "aoffload._config.config",
        'return f":{group.num_rows}" if isinstance(group, KVCacheGroup) and group.is_recurrent else ""',
        'return ""',
        "checkpoints of another number of blocks are never found",
        test="tests/test_config.py::test_the_blocks_of_a_checkpoint_are_in_the_root",
    ),
)
