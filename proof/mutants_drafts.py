"""Defects planted in the identity of KV with draft layers."""

from __future__ import annotations

from .planting import Mutant

__all__ = ["DRAFT_MUTANTS"]

REQUESTS, SCHEDULER, DRAFTS = "aoffload._vllm.requests", "aoffload._vllm.scheduler", "aoffload._vllm.drafts"
FOLDER = "tests/integrations/vllm_connector"
TESTS, OF_KEYS = f"{FOLDER}/test_vllm_drafts.py::", f"{FOLDER}/test_vllm_keys.py::"

DRAFT_MUTANTS = (
    Mutant(
        "vLLM drafts: published one token early",
        DRAFTS,
        "        return cls(vllm_config.num_prefill_lookahead_tokens,",
        "        return cls(vllm_config.num_prefill_lookahead_tokens - 1,",
        "prompts that part at the end of a block do not share it",
        test=f"{TESTS}test_prompts_that_part_at_the_end_of_a_block_do_not_share_it",
    ),
    Mutant(
        "vLLM drafts: the first token does not count",
        REQUESTS,
        "        before = encoded(request.all_token_ids[: self.drafts.num_ahead])\n",
        "        before = b'first'\n",
        "the first token is part of the identity",
        test=f"{OF_KEYS}test_a_draft_layer_reads_one_token_more",
    ),
    Mutant(
        "vLLM drafts: drafts that are not verified are stored",
        REQUESTS,
        "min(num_computed, self.engine.num_tokens) - num_ahead",
        "num_computed - num_ahead",
        "a rejected draft is never stored",
        test=f"{TESTS}test_drafts_of_any_request_are_never_stored",
    ),
    Mutant(
        "vLLM drafts: stored before the next token is known",
        REQUESTS,
        "self.engine.num_tokens) - num_ahead",
        "self.engine.num_tokens)",
        "a block is stored one token later",
        test=f"{TESTS}test_a_block_is_stored_one_token_later",
    ),
    Mutant(
        "vLLM drafts: an image is where it was",
        REQUESTS,
        "start = feature.mm_position.offset - num_ahead\n",
        "start = feature.mm_position.offset\n",
        "the KV at the token before an image depends on the image",
        test=f"{OF_KEYS}test_an_image_is_read_ahead_too",
    ),
    Mutant(
        "vLLM drafts: loads the block that vLLM drops",
        SCHEDULER,
        "self._unit + 1 if self.drafts.are_dropped else 1",
        "1",
        "a block that vLLM drops is computed with the rest of the prompt",
        test=f"{TESTS}test_a_block_that_vllm_drops_is_not_loaded",
    ),
    Mutant(
        "vLLM drafts: counts go back behind a load",
        REQUESTS,
        "        return max(found, record.num_computed_tokens, record.engine_tokens)\n",
        "        return found\n",
        "modules that read several tokens ahead know fewer tokens than they have loaded",
        test=f"{TESTS}test_a_step_may_compute_less_than_is_read_ahead",
    ),
    Mutant(
        "vLLM drafts: any draft layers will do",
        DRAFTS,
        "    found = [vllm_config.model_config, draft_model_of(vllm_config)]\n",
        "    found = [vllm_config.model_config]\n",
        "a disk knows the weights of the draft layers",
        test=f"{TESTS}test_a_disk_knows_the_draft_layers",
    ),
    Mutant(
        "vLLM drafts: events name the tokens of the index",
        "aoffload._vllm.kv_events",
        "[*first.first, *token_ids][: len(token_ids)]",
        "[*token_ids]",
        "events have the tokens of vLLM's blocks",
        test=f"{FOLDER}/test_vllm_events.py::test_events_with_drafts_have_the_tokens_of_vllms_blocks",
    ),
    Mutant(
        "vLLM drafts: events are cut before the tokens of the index",
        "aoffload._vllm.kv_events",
        "[*first.first, *token_ids][: len(token_ids)]",
        "[*first.first, *token_ids[: len(token_ids) - self._num_ahead]]",
        "events have the tokens of vLLM's blocks, also if drafts read ahead further than a block",
        test=f"{FOLDER}/test_vllm_events.py::test_events_have_the_tokens_of_their_own_blocks",
    ),
    Mutant(
        "vLLM drafts: blocks of one hash are removed together",
        "aoffload._vllm.kv_events",
        "found.owner.lora_name is not None or self._num_ahead > 0",
        "found.owner.lora_name is not None",
        "a block is removed for a router when the last copy of its tokens goes",
        test=f"{FOLDER}/test_vllm_events.py::test_two_blocks_of_one_hash_are_one_for_a_router",
    ),
    Mutant(
        "vLLM drafts: a window as if nothing was computed again",
        "aoffload._vllm.groups",
        "get_kv_cache_spec_sliding_window(spec) + layer.extra_retained_tokens",
        "get_kv_cache_spec_sliding_window(spec)",
        "a load brings all that is read after it",
        test=f"{FOLDER}/test_vllm_groups.py::test_a_window_has_what_is_computed_again",
    ),
)
