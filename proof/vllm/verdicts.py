"""What became of vLLM's own tests, and what that means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["OTHERWISE", "READS", "REFUSED", "SAID_AGAIN", "Case", "count", "missed", "table"]

READS = "reads"
"""A test that failed because it reads an attribute that only vLLM's manager has."""
REFUSED = "refused"
"""A test that configures what the connector refuses."""

SAID_AGAIN: Mapping[str, str] = {
    "test_prompt_logprobs_skip_cpu_cache_lookup": "test_prompt_logprobs_read_nothing",
    "test_finished_eager_stores_are_batched": "test_what_ends_in_one_step_is_stored",
    "test_finished_eager_store_is_reported_pending_before_metadata_build": "test_stores_keep_the_engine_stepping",
    "test_finished_eager_store_caches_all_groups": "test_all_groups_are_stored",
    "test_eager_in_flight_store_dedup_across_steps": "test_what_is_under_way_is_not_stored_again",
    "test_lru_eviction_order": "test_the_oldest_goes_first",
    "test_touched_blocks_survive_eviction": "test_what_was_read_again_stays",
    "test_preemption_no_cpu_block_leak": "test_an_end_while_copying_leaves_nothing",
    "test_inflight_finish_deferred_cleanup": "test_an_end_while_copying_leaves_nothing",
    "test_eager_store_preemption_cleanup": "test_an_end_while_copying_leaves_nothing",
    "test_chunked_prefill_reads_live_block_ids": "test_a_chunk_stores_what_is_new",
    "test_reset_pending_eager_stores": "test_a_reset_forgets_stores_under_way",
    "test_reset_releases_pending_cpu_hits": "test_a_reset_forgets_hits",
    "test_reset_pending_loads": "test_a_reset_lets_loads_end",
    "test_chunked_local_cpu_lookup_requires_chunk_aligned_prefix": "test_chunks_begin_at_the_start_of_the_prompt",
}
"""Maps each test that reads attributes of vLLM's manager to the test of `proof.vllm.manager_behaviour` for it."""

OF_DRAFTS: Mapping[str, str] = {
    "test_eager_store_matches_gpu_cacheable_prefix": "test_drafts_of_a_group_hit_as_far_as_in_vllms_own_cache",
}
"""Maps each test that expects vLLM's own number of tokens to the test of `proof.vllm.draft_behaviour` for it: we find
more."""

OTHERWISE: Mapping[str, str] = {
    "test_eager_store_preserves_secondary_block_hashes": "what is stored is found by the ledger's keys, not by hashes",
    "test_cp_block_size_scaling": "test_cp_effective_block_size_store_and_load passes",
    "test_cp_lazy_target_blocks_scaling": "is about lazy stores",
    "test_lazy_target_blocks_ignore_non_prefix_cacheable_groups": "is about lazy stores",
    "test_scheduler_uses_worker_aligned_num_cpu_blocks": "is about host blocks that its workers align",
    "test_hybrid_store_uses_resolved_group_block_sizes": "our own test_ranks_that_share_a_block is about these sizes",
    "test_qsa_ring_group_is_never_stored_or_loaded": "test_scratch_group_excluded_from_store_and_load passes",
}
"""Those that need not be said again, and why."""


@dataclass(frozen=True)
class Case:
    name: str
    outcome: str
    """As pytest says it: "passed", "failed" or "skipped"."""
    why: str = ""

    @property
    def function(self) -> str:
        return self.name.partition("[")[0]

    @property
    def verdict(self) -> str:
        """ "passed"; "attributes", "refused", "not asked" and "otherwise" for reasons that are said; else "FAILED"."""
        if self.outcome == "passed":
            return "passed"
        if self.outcome == "skipped":
            return "not asked"
        if self.why.startswith(READS):
            is_again = self.function in SAID_AGAIN or self.function in OF_DRAFTS
            return "said again" if is_again else "otherwise" if self.function in OTHERWISE else "FAILED"
        if self.why.startswith(REFUSED):
            return "refused"
        return "said again" if self.function in OF_DRAFTS else "FAILED"

    @property
    def reason(self) -> str:
        if self.verdict not in ("said again", "otherwise"):
            return self.why
        said = (SAID_AGAIN | OF_DRAFTS).get(self.function) or OTHERWISE[self.function]  # type: ignore[operator]
        return f"{self.why}; {said}"


def count(cases: list[Case]) -> str:
    """How many cases there are of each verdict."""
    found = Counter(case.verdict for case in cases)
    return f"{len(cases)} run: " + ", ".join(f"{number} {verdict}" for verdict, number in found.most_common())


def missed(cases: list[Case]) -> list[str]:
    """The names of cases that failed for no reason that is said here."""
    return [case.name for case in cases if case.verdict == "FAILED"]


def table(cases: list[Case]) -> str:
    """A table in markdown, one line per case."""
    lines = ["| Case | Verdict | Why |", "| --- | --- | --- |"]
    for case in cases:
        reason = " ".join(case.reason.split()).replace("|", "\\|")
        lines.append(f"| `{case.name}` | {case.verdict} | {reason} |")
    return "\n".join(lines)
