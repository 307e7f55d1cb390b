"""Mutants of the connector for vLLM: lost loads, the workers, groups and layouts."""

from __future__ import annotations

from .planting import Mutant, Patch

__all__ = ["VLLM_COPY_MUTANTS"]

OURS = "aoffload._vllm"
SCHEDULER, CONNECTOR, OUTBOX = f"{OURS}.scheduler", f"{OURS}.connector", f"{OURS}.messages"
WORKER, MESSAGES, BLOCKS, COPIES = f"{OURS}.worker", f"{OURS}.messages", f"{OURS}.blocks", f"{OURS}.worker"
GROUPS, REGIONS, STATES = f"{OURS}.groups", f"{OURS}.blocks", f"{OURS}.states"
TESTS = "tests/integrations/vllm_connector/test_vllm"
STEPS, LOST, WHOLE = f"{TESTS}_steps.py::", f"{TESTS}_lost_loads.py::", f"{TESTS}_connector.py::"
OF_GROUPS, LAYOUTS, OF_STATES = f"{TESTS}_groups.py::", f"{TESTS}_regions.py::", f"{TESTS}_states.py::"

RESULTS = (
    Mutant(
        "vLLM: blocks told with several groups",
        SCHEDULER,
        "if len(self._manager.get_blocks(found.request_id).blocks) > 1 or not ready:\n",
        "if not ready:\n",
        "vLLM refuses ids that may belong to any group",
        test=f"{LOST}test_with_several_groups_a_load_is_lost_whole",
    ),
    Mutant(
        "vLLM: blocks told that have landed",
        SCHEDULER,
        "[ready // size : found.promised // size]\n",
        "[: found.promised // size]\n",
        "computing goes on behind what has landed",
        test=f"{LOST}test_with_one_group_what_has_landed_counts",
    ),
    Mutant(
        "vLLM: one block told too late",
        SCHEDULER,
        "[ready // size : found.promised // size]\n",
        "[ready // size + 1 : found.promised // size]\n",
        "nobody computes on a block that was not loaded",
        test=f"{LOST}test_with_one_group_what_has_landed_counts",
    ),
    Mutant(
        "vLLM: blocks told that a copy may write to",
        SCHEDULER,
        "        return tuple(invalid) if all(map(self._pool.is_private, invalid)) else ()\n",
        "        return tuple(invalid)\n",
        "vLLM never computes into a block that a copy may still write to",
        test=f"{LOST}test_blocks_that_a_copy_may_still_write_to_are_never_told",
    ),
    Mutant(
        "vLLM: a held block taken for private",
        BLOCKS,
        "        return bool(self.pool.blocks[block_id].ref_cnt == 1)\n",
        "        return bool(self.pool.blocks[block_id].ref_cnt >= 1)\n",
        "vLLM never computes into a block that a copy may still write to",
        test=f"{LOST}test_blocks_that_a_copy_may_still_write_to_are_never_told",
    ),
    Mutant(
        "vLLM: no block is private",
        BLOCKS,
        "        return bool(self.pool.blocks[block_id].ref_cnt == 1)\n",
        "        return bool(self.pool.blocks[block_id].ref_cnt == 0)\n",
        "what has landed of a load is not computed again",
        test=f"{LOST}test_with_one_group_what_has_landed_counts",
    ),
    Mutant(
        "vLLM: a lost load told as landed",
        WORKER,
        "    return {report.request_id for report in reports if report.is_lost}\n",
        "    return set()\n",
        "nobody computes on what was not loaded",
        test=f"{LOST}test_a_load_that_brought_nothing_is_lost_whole",
    ),
    Mutant(
        "vLLM: invalid blocks not told",
        WORKER,
        "for report in reports for block_id in report.invalid_block_ids}\n",
        "for report in reports if report.is_lost for block_id in report.invalid_block_ids}\n",
        "nobody computes on what was not loaded",
        test=f"{LOST}test_with_one_group_what_has_landed_counts",
    ),
    Mutant(
        "vLLM: a lost load not told as over",
        CONNECTOR,
        "        over = {report.request_id for report in reports}\n",
        "        over = {report.request_id for report in reports if not report.is_lost}\n",
        "no hang: vLLM hears of the end of each load that it waits for",
        test=f"{LOST}test_every_worker_says_that_a_load_is_over",
    ),
    Mutant(
        "vLLM: what lands late is over at once",
        SCHEDULER,
        "        has_all = found.record is not None and found.record.num_computed_tokens >= found.promised\n",
        "        has_all = found.record is not None\n",
        "what has not landed is not told as landed",
        test=f"{LOST}test_a_load_that_brought_nothing_is_lost_whole",
    ),
    Mutant(
        "vLLM: loads that hang are waited for",
        SCHEDULER,
        "            self._queue.give_up_late()\n            self._check()\n",
        "            self._check()\n",
        "no hang: a load that does not end is given up",
        test=f"{WHOLE}test_a_load_that_hangs_is_given_up",
    ),
)

WORKERS = (
    Mutant(
        "vLLM: over when one rank has it",
        OUTBOX,
        "        self._tally = JobTally(num_ranks) if num_ranks > 1 else OneRank()\n",
        "        self._tally = JobTally(1)\n",
        "a load is over when every rank has its part",
        also=(Patch(OUTBOX, "self._tally.report(rank, completion)", "self._tally.report(0, completion)"),),
        test=f"{STEPS}test_a_load_is_over_when_every_rank_has_it",
    ),
    Mutant(
        "vLLM: ranks that are heard last replace the others",
        MESSAGES,
        "            by_rank[rank] = by_rank.get(rank, ()) + completions\n",
        "            by_rank[rank] = completions\n",
        "no end of a copy is lost",
        test=f"{STEPS}test_reports_of_several_ranks_and_steps_add_up",
    ),
    Mutant(
        "vLLM: ends reported again and again",
        COPIES,
        "            self._over.clear()\n",
        "",
        "each end is reported once",
        test=f"{STEPS}test_a_worker_reports_each_end_once",
    ),
    Mutant(
        "vLLM: a refused plan ends the worker",
        WORKER,
        "            except (TransferRefused, DeviceGone) as error:\n",
        "            except DeviceGone as error:\n",
        "what a worker cannot copy is a miss",
        test=f"{WHOLE}test_a_plan_that_a_worker_refuses_is_a_lost_load",
    ),
    Mutant(
        "vLLM: a refused plan not reported",
        WORKER,
        "                self.copies.end(Completion(plan.job_id, Outcome.FAILED, error=str(error)))\n",
        "                _log.warning(str(error))\n",
        "no hang: each plan has an end",
        test=f"{STEPS}test_a_load_counts_as_far_as_every_rank_has_it",
    ),
    Mutant(
        "vLLM: what has landed waits for another step",
        CONNECTOR,
        "            connector_output.finished_recving = {*(connector_output.finished_recving or ()), *landed}\n",
        "            connector_output.finished_recving = landed or None\n",
        "the ends that workers report are not lost over those that the scheduler sees",
        test=f"{STEPS}test_ends_of_both_kinds_in_one_step",
    ),
)

GROUPED = (
    Mutant(
        "vLLM: all groups cached",
        GROUPS,
        "            () if group.is_recurrent else block_tables[number]\n"
        "            for number, group in zip(self.ids, self.groups, strict=True)\n",
        "            () if group.is_recurrent else block_tables[number]\n"
        "            for number, group in enumerate(self.groups)\n",
        "only groups whose blocks can be found are cached",
        test=f"{OF_GROUPS}test_only_groups_whose_blocks_can_be_found_are_cached",
    ),
    Mutant(
        "vLLM: a window taken for full attention",
        GROUPS,
        "        attention = SlidingWindow(get_kv_cache_spec_sliding_window(spec) + layer.extra_retained_tokens)\n",
        "        attention = FullAttention()\n",
        "of a window only what is before the end of a hit is loaded",
        test=f"{OF_GROUPS}test_kinds_of_attention",
    ),
    Mutant(
        "vLLM: block sizes without the ranks that share them",
        GROUPS,
        "spec.block_size * (num_context_ranks if spec.dcp_sharded else 1)\n",
        "spec.block_size\n",
        "a block has the tokens of all ranks that share it",
        test=f"{OF_GROUPS}test_ranks_that_share_a_block",
    ),
    Mutant(
        "vLLM: states cached in modes without checkpoints",
        GROUPS,
        '    if mode != "align":\n',
        "    if not mode:\n",
        "what cannot be cached is refused at the start",
        test=f"{OF_STATES}test_what_cannot_work_with_states_is_refused_before_the_weights",
    ),
    Mutant(
        "vLLM: a checkpoint that one group lacks",
        GROUPS,
        "all(at in of for of in of_groups)",
        "any(at in of for of in of_groups)",
        "a checkpoint has the states of all layers",
        test=f"{OF_STATES}test_a_store_reads_only_blocks_that_hold_checkpoints",
    ),
    Mutant(
        "vLLM: a checkpoint inside a block taken for that of the block",
        GROUPS,
        "if not at % unit and at <= most",
        "if at <= most",
        "a state is stored under its own position, and a running state never",
        test=f"{OF_STATES}test_a_checkpoint_inside_a_block_is_left_out",
    ),
    Mutant(
        "vLLM: the junction of host memory forgets vLLM's own",
        STATES,
        "        request.shared_prefix_boundary = max(request.shared_prefix_boundary, planned[0])\n",
        "        request.shared_prefix_boundary = planned[0]\n",
        "prompts that part hit what they share",
        test=f"{OF_STATES}test_the_deepest_junction_is_where_the_next_checkpoint_is_made",
    ),
    Mutant(
        "vLLM: looks for window blocks in the first group",
        BLOCKS,
        "self.hashes_of(request_id), [self.group_ids[group]]\n",
        "self.hashes_of(request_id), [self.group_ids[0]]\n",
        "a block of one group is never taken for one of another",
        test=f"{OF_GROUPS}test_blocks_that_left_a_window_are_found_in_vllms_cache",
    ),
    Mutant(
        "vLLM: looks for larger blocks by their first hash",
        BLOCKS,
        "            last = (at + 1) * per_block - 1\n",
        "            last = at * per_block\n",
        "a block is found by the hash of all its tokens",
        test=f"{OF_GROUPS}test_a_block_is_found_by_the_hash_of_its_last_tokens",
    ),
    Mutant(
        "vLLM: the beginning of a prefix evicted first",
        BLOCKS,
        "for block_id in reversed(block_ids)])",
        "for block_id in block_ids])",
        "vLLM evicts a prefix from its end",
        test=f"{OF_GROUPS}test_a_copy_holds_what_it_touches",
    ),
)

PLACED = (
    Mutant(
        "vLLM: layers that lie over one another copied twice",
        REGIONS,
        "tuple(dict.fromkeys(place for tensor in tensors for place in _placements(tensor, num_blocks)))",
        "tuple(place for tensor in tensors for place in _placements(tensor, num_blocks))",
        "memory that groups share is copied once",
        test=f"{LAYOUTS}test_groups_that_lie_over_one_another_are_copied_once",
    ),
    Mutant(
        "vLLM: layers all at the first one's place",
        REGIONS,
        "        start = tensor.offset + number * tensor.layer_stride\n",
        "        start = tensor.offset\n",
        "every layer of a block is copied",
        test=f"{LAYOUTS}test_each_layer_is_a_region",
    ),
    Mutant(
        "vLLM: half of each layer copied",
        REGIONS,
        "        for plane in range(tensor.layer_stride // plane_bytes):",
        "        for plane in range(1):",
        "heads that lie before blocks are all copied",
        test=f"{LAYOUTS}test_heads_before_blocks_are_regions_of_their_own",
    ),
    Mutant(
        "vLLM: gaps between layers ignored",
        REGIONS,
        "    if tensor.layer_stride % plane_bytes:\n",
        "    if tensor.layer_stride < plane_bytes:\n",
        "a layout that is not understood is refused",
        test=f"{LAYOUTS}test_a_gap_is_refused",
    ),
    Mutant(
        "vLLM: memory that is too small",
        REGIONS,
        "        if len(raw) < stop:\n",
        "        if len(raw) < place.offset:\n",
        "what vLLM registers is checked by what it has described",
        test=f"{LAYOUTS}test_other_memory_is_refused",
    ),
)

VLLM_COPY_MUTANTS = RESULTS + WORKERS + GROUPED + PLACED
