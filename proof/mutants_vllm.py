"""Mutants of the connector for vLLM, by the hook that they break.

Their tests run where vLLM is not installed, over stand-ins for its classes.
"""

from __future__ import annotations

from .planting import Mutant, Patch

__all__ = ["VLLM_MUTANTS"]

OURS = "aoffload.integrations.vllm"
SCHEDULER, REQUESTS, CONNECTOR = f"{OURS}.scheduler", f"{OURS}.requests", f"{OURS}.connector"
OUTBOX, WORKER, MESSAGES, GUARD = f"{OURS}.outbox", f"{OURS}.worker", f"{OURS}.messages", f"{OURS}.guard"
BLOCKS, GROUPS, REGIONS, KEYS = f"{OURS}.blocks", f"{OURS}.groups", f"{OURS}.regions", f"{OURS}.keys"
COUNTS, STATISTICS, SETTINGS = f"{OURS}.counts", f"{OURS}.statistics", f"{OURS}.settings"

TESTS = "tests/integrations/vllm_connector/test_vllm"
ASKED, STEPS, LOST = f"{TESTS}_matching.py::", f"{TESTS}_steps.py::", f"{TESTS}_lost_loads.py::"
PREEMPTED, ERRORS, WHOLE = f"{TESTS}_preemption.py::", f"{TESTS}_guard.py::", f"{TESTS}_connector.py::"
OF_GROUPS, LAYOUTS, OF_KEYS = f"{TESTS}_groups.py::", f"{TESTS}_regions.py::", f"{TESTS}_keys.py::"
METRICS, STARTS, EXTRA = f"{TESTS}_metrics.py::", f"{TESTS}_plugin.py::", f"{TESTS}_settings.py::"

MATCHES = (
    Mutant(
        "vLLM: computes what another is loading",
        SCHEDULER,
        "        if match.is_pending:\n            return None\n",
        "",
        "who needs what another request is loading is told to ask again",
        test=f"{ASKED}test_one_of_many_loads_what_they_share",
    ),
    Mutant(
        "vLLM: a try begins anew each time",
        REQUESTS,
        "        if holding is not None and self.is_asking:\n",
        "        if holding is not None and self.is_running:\n",
        "no hang: a request waits for another's load only so long, however often vLLM asks",
        test=f"{ASKED}test_who_waits_for_anothers_load_does_not_wait_for_long",
    ),
    Mutant(
        "vLLM: pins end with the step",
        SCHEDULER,
        "        plans = (*self._loads, *self._plan_stores(output.num_scheduled_tokens))\n",
        "        for found in self._requests.values():\n"
        "            if found.is_asking and found.request_id not in output.num_scheduled_tokens:\n"
        '                found.leave(self.ledger, "not scheduled")\n'
        "        plans = (*self._loads, *self._plan_stores(output.num_scheduled_tokens))\n",
        "what was found is there when vLLM has blocks for it, in whatever step that is",
        test=f"{ASKED}test_what_was_found_stays_while_there_is_no_room",
    ),
    Mutant(
        "vLLM: blocks in a later step find nothing pinned",
        SCHEDULER,
        "        for found in self._take_over():\n            self._tell(found)\n        return self._commands()\n",
        "        for found in self._take_over():\n            self._tell(found)\n"
        "        for found in self._requests.values():\n"
        "            if found.is_asking:\n"
        '                found.leave(self.ledger, "not scheduled")\n'
        "        return self._commands()\n",
        "vLLM 0.33 asks in one step and allocates in another",
        test=f"{ASKED}test_blocks_may_come_in_a_later_step",
    ),
    Mutant(
        "vLLM: the first answer for every try",
        REQUESTS,
        "            ledger.match_again(holding, num_device_tokens=num_local)\n",
        "            ledger.match_again(holding, num_device_tokens=holding.match.num_device_tokens)\n",
        "each try is answered behind the hit that vLLM has then",
        test=f"{ASKED}test_each_try_is_answered_behind_vllms_own_hit",
    ),
    Mutant(
        "vLLM: tokens read at every try",
        SCHEDULER,
        "        found = self._requests.get(request.request_id) or self._new(request)\n",
        "        prefix_of(self._roots, request)\n"
        "        found = self._requests.get(request.request_id) or self._new(request)\n",
        "a long prompt is read once, however often vLLM asks",
        test=f"{ASKED}test_retries_do_not_read_the_tokens_again",
    ),
    Mutant(
        "vLLM: promises while nothing is copied",
        SCHEDULER,
        " if self._queue.is_accepting else 0\n",
        "\n",
        "what cannot be loaded is no hit",
        test=f"{ASKED}test_nothing_is_promised_while_loads_are_refused",
    ),
    Mutant(
        "vLLM: a load taken for a hit of its own",
        CONNECTOR,
        "        return found, bool(found)\n",
        "        return found, False\n",
        "nobody computes on what is still being loaded",
        test=f"{ASKED}test_a_hit_is_loaded_while_others_compute",
    ),
    Mutant(
        "vLLM: a request loads what it must compute",
        REQUESTS,
        "            reads_cache=not self.engine.skip_reading_prefix_cache,\n",
        "",
        "log-probabilities of a prompt need every token computed",
        test=f"{ASKED}test_who_shall_not_read_the_cache_finds_nothing",
    ),
    Mutant(
        "vLLM: a lost load promised again",
        SCHEDULER,
        "        found.wait, found.max_hit_tokens = Wait.TOLD, found.holding.retry_max_hit_tokens\n",
        "        found.wait = Wait.TOLD\n",
        "no hang: the same load would be lost again",
        test=f"{ASKED}test_a_load_that_was_lost_is_not_promised_again",
    ),
    Mutant(
        "vLLM: a lost load forgotten with a preemption",
        REQUESTS,
        '        self.leave(ledger, "preempted")\n',
        '        self.leave(ledger, "preempted")\n        self.max_hit_tokens = None\n',
        "no hang: the same load would be lost again",
        test=f"{ASKED}test_a_request_that_lost_a_load_loads_nothing_when_it_is_preempted_later",
    ),
)

ALLOCATIONS = (
    Mutant(
        "vLLM: a hit that is gone leaves the request waiting",
        SCHEDULER,
        "        else:  # the hit is gone\n            self._over.append(found)\n",
        "",
        "no hang: vLLM hears of the end of each load that it waits for",
        test=f"{ASKED}test_a_hit_that_is_gone_when_there_are_blocks",
    ),
    Mutant(
        "vLLM: a load of as many tokens as it brings",
        SCHEDULER,
        "found.num_local + num_external, Wait.LOAD\n",
        "num_external, Wait.LOAD\n",
        "a load ends where vLLM goes on",
        test=f"{WHOLE}test_what_the_engine_has_is_not_loaded",
    ),
    Mutant(
        "vLLM: a load planned with the step only",
        SCHEDULER,
        "        plans = self.ledger.plan_load(found.holding, found.promised, wake, into=tables)\n"
        "        if plans:\n            self._loads += plans\n",
        "        self._later.append((found, tables, wake))\n        plans = ()\n        if True:\n            pass\n",
        "a prefix that is to be loaded in this step is not loaded twice",
        also=(
            Patch(
                SCHEDULER,
                "        plans = (*self._loads, *self._plan_stores(output.num_scheduled_tokens))\n",
                "        for one, into, wake in self._later:\n"
                "            self._loads += self.ledger.plan_load(one.holding, one.promised, wake, into=into)\n"
                "        self._later.clear()\n"
                "        plans = (*self._loads, *self._plan_stores(output.num_scheduled_tokens))\n",
            ),
            Patch(
                SCHEDULER,
                "        self._reports: list[LoadReport] = []\n",
                "        self._reports: list[LoadReport] = []\n        self._later: list[Any] = []\n",
            ),
        ),
        test=f"{ASKED}test_one_of_many_loads_what_they_share",
    ),
    Mutant(
        "vLLM: a request without a load waits for one",
        SCHEDULER,
        "        if not num_external:\n            return\n",
        "",
        "a request whose prompt nobody has stored is computed at once",
        test=f"{STEPS}test_each_chunk_is_offered_in_its_step",
    ),
)

STEP = (
    Mutant(
        "vLLM: offers up to what was computed before",
        SCHEDULER,
        "min(engine.num_computed_tokens + num_scheduled, engine.num_tokens)\n",
        "min(engine.num_computed_tokens, engine.num_tokens)\n",
        "an offer means: when the forward of this step is over",
        test=f"{STEPS}test_each_chunk_is_offered_in_its_step",
    ),
    Mutant(
        "vLLM: stores begin with the loads",
        CONNECTOR,
        "        self._copying.start(self._commands.loads)\n",
        "        self._copying.start((*self._commands.loads, *self._commands.stores))\n",
        "a store copies what the forward has written",
        also=(
            Patch(
                CONNECTOR,
                "        self._copying.start(self._commands.stores)\n",
                "        self._copying.start(())\n",
            ),
        ),
        test=f"{STEPS}test_stores_begin_behind_the_forward_and_loads_before_it",
    ),
    Mutant(
        "vLLM: tokens offered that were known before",
        REQUESTS,
        "        self.num_known += len(found)\n",
        "",
        "what is stored is found by its own tokens",
        test=f"{STEPS}test_generated_tokens_are_offered",
    ),
    Mutant(
        "vLLM: plans leave with every step",
        OUTBOX,
        "        self._loads.clear()\n",
        "",
        "each copy is made once",
        test=f"{STEPS}test_loads_and_stores_go_to_the_workers_once",
    ),
    Mutant(
        "vLLM: blocks offered in the middle of one",
        SCHEDULER,
        "            if num_computed // self._unit > found.offered_stop:\n",
        "            if num_computed // self._unit >= found.offered_stop:\n",
        "most steps cost nothing",
        test=f"{STEPS}test_a_step_that_fills_no_block_reads_no_table",
    ),
    Mutant(
        "vLLM: reports said in every step",
        SCHEDULER,
        "        reports, self._reports = tuple(self._reports), []\n",
        "        reports = tuple(self._reports)\n",
        "vLLM is told once that a load is over",
        test=f"{LOST}test_every_worker_says_that_a_load_is_over",
    ),
)

PREEMPTIONS = (
    Mutant(
        "vLLM: a preempted request kept",
        SCHEDULER,
        "        for request_id in output.preempted_req_ids or ():\n",
        "        for request_id in ():\n",
        "nobody waits for a request that vLLM has preempted",
        test=f"{PREEMPTED}test_a_preempted_request_is_let_go_of",
    ),
    Mutant(
        "vLLM: a preempted request loses its new load",
        REQUESTS,
        "        return self.is_asking or self.wait is Wait.LOAD\n",
        "        return self.is_asking\n",
        "no hang: a request that vLLM preempts between steps may load in the next",
        test=f"{PREEMPTED}test_a_load_of_the_step_that_tells_of_a_preemption",
    ),
    Mutant(
        "vLLM: comes back with its prompt only",
        REQUESTS,
        "        self.prefix = grown(self.prefix, self.engine, len(self.prefix.tokens) // 4)\n",
        "",
        "what a request had generated before it was preempted is found again",
        test=f"{PREEMPTED}test_what_it_had_generated_is_found_again",
    ),
    Mutant(
        "vLLM: comes back and offers nothing",
        REQUESTS,
        "self.num_known, self.offered_stop = len(self.prefix.tokens) // 4, -1\n",
        "self.num_known = len(self.prefix.tokens) // 4\n",
        "a request that was preempted begins again",
        test=f"{PREEMPTED}test_a_preempted_request_offers_again",
    ),
    Mutant(
        "vLLM: sources of a copy not held",
        BLOCKS,
        "        self.pool.touch([blocks[block_id] for block_id in block_ids])\n",
        "        del blocks\n",
        "vLLM frees and reuses blocks at once: copies hold those that they touch",
        test=f"{OF_GROUPS}test_a_copy_holds_what_it_touches",
    ),
)

ENDS = (
    Mutant(
        "vLLM: finished requests keep their blocks",
        CONNECTOR,
        "        return False, None\n",
        "        return self.has_pending_push_work(), None\n",
        "only copies keep blocks, and vLLM frees the others at once",
        test=f"{STEPS}test_nothing_is_kept_when_a_request_is_over",
    ),
    Mutant(
        "vLLM: stops stepping over its stores",
        SCHEDULER,
        "        return self.has_reports or bool(self.ledger.jobs.unsettled)\n",
        "        return self.has_reports\n",
        "the engine steps until every copy has given its blocks back",
        test=f"{STEPS}test_nothing_is_kept_when_a_request_is_over",
    ),
    Mutant(
        "vLLM: stops stepping over its reports",
        SCHEDULER,
        "        return self.has_reports or bool(self.ledger.jobs.unsettled)\n",
        "        return bool(self.ledger.jobs.unsettled)\n",
        "vLLM frees the blocks of an aborted load when it hears of its end",
        test=f"{STEPS}test_reports_keep_the_engine_stepping",
    ),
    Mutant(
        "vLLM: a finished request not let go of",
        SCHEDULER,
        '        found.leave(self.ledger, "closed_early")\n',
        "",
        "nothing of a request is kept when it is over",
        test=f"{STEPS}test_nothing_is_kept_when_a_request_is_over",
    ),
    Mutant(
        "vLLM: no last offer",
        SCHEDULER,
        "            self._offer_last(found, self._groups.tables(block_ids))\n",
        "            pass\n",
        "a policy that counts hears of the end of each request",
        test=f"{STEPS}test_a_last_offer_has_what_no_step_has_offered",
    ),
    Mutant(
        "vLLM: a last offer like any other",
        SCHEDULER,
        ", found.new_tokens(), is_last=True))\n",
        ", found.new_tokens()))\n",
        "a window is stored at the end of a request",
        test=f"{OF_GROUPS}test_what_is_stored_of_a_window_is_found",
    ),
    Mutant(
        "vLLM: offers blocks that a preempted request has lost",
        SCHEDULER,
        "        if num_computed >= found.holding.num_computed_tokens:\n",
        "        if num_computed <= found.holding.num_computed_tokens:\n",
        "what is over others' blocks is not stored",
        test=f"{STEPS}test_a_preempted_request_that_is_aborted_offers_nothing",
    ),
    Mutant(
        "vLLM: an aborted load not reported",
        SCHEDULER,
        "        if found is not None and found.wait is Wait.LOAD:\n            self._reports.append",
        "        if found is None:\n            self._reports.append",
        "vLLM frees the blocks of an aborted load when it hears of its end",
        test=f"{STEPS}test_an_aborted_load_that_has_not_started_is_over",
    ),
    Mutant(
        "vLLM: a reset that forgets nothing",
        CONNECTOR,
        "        self._deciding.reset()\n",
        "",
        "what was computed with other weights is never loaded",
        test=f"{WHOLE}test_a_reset_forgets_the_host",
    ),
)

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
        "        return found.holding is not None and found.holding.num_computed_tokens >= found.promised\n",
        "        return found.holding is not None\n",
        "what has not landed is not told as landed",
        test=f"{LOST}test_a_load_that_brought_nothing_is_lost_whole",
    ),
    Mutant(
        "vLLM: loads that hang are waited for",
        SCHEDULER,
        "            self._queue.give_up_late()\n",
        "",
        "no hang: a load that does not end is given up",
        test=f"{WHOLE}test_a_load_that_hangs_is_given_up",
    ),
)

WORKERS = (
    Mutant(
        "vLLM: over when one rank has it",
        OUTBOX,
        "        self._tally = JobTally(num_ranks)\n",
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
        WORKER,
        "tuple([self._over.popleft() for _ in range(len(self._over))])",
        "tuple(self._over)",
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
        "                self._over.append(Completion(plan.job_id, Outcome.FAILED, error=str(error)))\n",
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
        "        return [block_tables[number] for number in self.ids]\n",
        "        return [block_tables[number] for number in range(len(self.ids))]\n",
        "only groups whose blocks can be found are cached",
        test=f"{OF_GROUPS}test_only_groups_whose_blocks_can_be_found_are_cached",
    ),
    Mutant(
        "vLLM: a window taken for full attention",
        GROUPS,
        "        attention = SlidingWindow(get_kv_cache_spec_sliding_window(spec))\n",
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
        "vLLM: recurrent state cached",
        GROUPS,
        "        if kv_cache_config.has_mamba_layers:\n",
        "        if kv_cache_config.has_mamba_layers and not ids:\n",
        "what cannot be cached is refused at the start",
        test=f"{OF_GROUPS}test_what_cannot_be_cached_is_refused",
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

KEYED = (
    Mutant(
        "vLLM: salts share",
        KEYS,
        "roots.of(request.cache_salt or None, ",
        "roots.of(None, ",
        "what belongs to one tenant is never found by another",
        test=f"{WHOLE}test_two_salts_share_nothing",
    ),
    Mutant(
        "vLLM: adapters by name",
        KEYS,
        '{len(lora.lora_name)}:{lora.lora_name}{lora.lora_path}"',
        '{len(lora.lora_name)}:{lora.lora_name}"',
        "an adapter that was loaded under an old name never hits",
        test=f"{OF_KEYS}test_values_are_told_apart",
    ),
    Mutant(
        "vLLM: adapters by path",
        KEYS,
        '{len(lora.lora_name)}:{lora.lora_name}{lora.lora_path}"',
        '{lora.lora_path}"',
        "two adapters of one path never hit each other",
        test=f"{OF_KEYS}test_values_are_told_apart",
    ),
    Mutant(
        "vLLM: adapters do not count",
        KEYS,
        ", _adapter_key(request.lora_request))",
        ", None)",
        "KV of an adapter is never found without it",
        test=f"{OF_KEYS}test_what_else_identifies_kv_enters",
    ),
    Mutant(
        "vLLM: images do not count",
        KEYS,
        ", request.all_token_ids[:], _spans(request.mm_features))",
        ", request.all_token_ids[:], ())",
        "another image in the same place never hits",
        test=f"{OF_KEYS}test_values_are_told_apart",
    ),
    Mutant(
        "vLLM: sound for a picture",
        KEYS,
        'f"{feature.modality}:{feature.identifier}".encode()',
        "str(feature.identifier).encode()",
        "inputs of two kinds never hit each other",
        test=f"{OF_KEYS}test_values_are_told_apart",
    ),
    Mutant(
        "vLLM: embeddings cached",
        KEYS,
        "    if request.prompt_embeds is not None or request.resumable:\n",
        "    if request.resumable:\n",
        "what is computed of embeddings has no key",
        test=f"{OF_KEYS}test_what_has_no_key_is_not_cached",
    ),
    Mutant(
        "vLLM: sessions cached",
        KEYS,
        "    if request.prompt_embeds is not None or request.resumable:\n",
        "    if request.prompt_embeds is not None:\n",
        "a session takes tokens back",
        test=f"{OF_KEYS}test_what_has_no_key_is_not_cached",
    ),
    Mutant(
        "vLLM: types of KV share",
        CONNECTOR,
        "/{model.dtype}/{vllm_config.cache_config.cache_dtype}",
        "/{model.dtype}",
        "KV of another type is never loaded",
        test=f"{STARTS}test_what_the_model_is_enters_every_key",
    ),
)

COUNTED = (
    Mutant(
        "vLLM: counts of all intervals in each",
        COUNTS,
        "        self._counted.clear()\n",
        "",
        "a counter grows by what has happened since",
        test=f"{METRICS}test_copies_are_counted_by_direction_and_end",
    ),
    Mutant(
        "vLLM: gauges summed",
        STATISTICS,
        "value if is_gauge else self.data.get(name, 0) + value\n",
        "self.data.get(name, 0) + value\n",
        "of a gauge the last value counts",
        test=f"{METRICS}test_statistics_add_up",
    ),
    Mutant(
        "vLLM: gauges that only grow",
        STATISTICS,
        "                metric.set(value)\n",
        "                metric.inc(value)\n",
        "a gauge follows its value",
        test=f"{METRICS}test_vllms_endpoint_shows_all_that_is_counted",
    ),
    Mutant(
        "vLLM: one engine's counts for all",
        STATISTICS,
        "labels(*self.per_engine_labelvalues[engine_idx], ",
        "labels(*self.per_engine_labelvalues[0], ",
        "each engine has counts of its own",
        test=f"{METRICS}test_vllms_endpoint_shows_all_that_is_counted",
    ),
    Mutant(
        "vLLM: lost tokens not counted",
        SCHEDULER,
        "        self.counts.lost(found.promised - ready)\n",
        "",
        "what is computed because a load was lost is counted",
        test=f"{METRICS}test_lost_loads_are_counted",
    ),
    Mutant(
        "vLLM: stalls not said",
        COUNTS,
        '        self._counted[f"overdue_jobs|{_hop(source, destination)}"] += num_jobs\n',
        '        self._counted[f"overdue_jobs|{_hop(destination, source)}"] += num_jobs\n',
        "a copy that takes too long is counted where it hangs",
        test=f"{METRICS}test_copies_that_take_too_long_are_counted",
    ),
)

SLEEP = (
    Mutant(
        "vLLM: copies while tensors have no memory",
        WORKER,
        "            self._asleep, self._transport = self._transport, None\n",
        "            self._asleep = self._transport\n",
        "nothing is copied while the engine sleeps",
        test=f"{WHOLE}test_a_sleeping_worker_copies_nothing",
    ),
    Mutant(
        "vLLM: sleeps on",
        WORKER,
        "            self._transport, self._asleep = self._asleep, None\n",
        "            self._asleep = None\n",
        "what the host holds is there when the engine wakes",
        test=f"{WHOLE}test_a_sleeping_worker_copies_nothing",
    ),
    Mutant(
        "vLLM: asked to sleep twice",
        WORKER,
        "        if self._transport is not None:\n            self._asleep, ",
        "        if True:\n            self._asleep, ",
        "what the host holds is there when the engine wakes",
        test=f"{WHOLE}test_a_sleeping_worker_copies_nothing",
    ),
    Mutant(
        "vLLM: stopped while it sleeps, keeps its threads",
        WORKER,
        "= self._transport or self._asleep, None, None\n",
        "= self._transport, None, None\n",
        "nothing is left of a worker that was stopped",
        test=f"{WHOLE}test_a_worker_may_stop_while_it_sleeps",
    ),
)

GUARDED = (
    Mutant(
        "vLLM: an error ends the scheduler",
        GUARD,
        "                return self.half.match(request, num_local)\n            except Exception as error:",
        "                return self.half.match(request, num_local)\n            except OSError as error:",
        "a cache never takes the engine down",
        test=f"{ERRORS}test_an_error_in_any_hook_turns_the_cache_off[match]",
    ),
    Mutant(
        "vLLM: an error at the end of a request ends the scheduler",
        GUARD,
        "                self.half.finished(request, block_ids)\n            except Exception as error:",
        "                self.half.finished(request, block_ids)\n            except OSError as error:",
        "a cache never takes the engine down",
        test=f"{ERRORS}test_an_error_in_any_hook_turns_the_cache_off[finished]",
    ),
    Mutant(
        "vLLM: an error in a reset ends the scheduler",
        GUARD,
        "                self.half.reset()\n            except Exception as error:",
        "                self.half.reset()\n            except OSError as error:",
        "a cache never takes the engine down",
        test=f"{ERRORS}test_an_error_in_a_reset_turns_the_cache_off",
    ),
    Mutant(
        "vLLM: off, and blocks of copies under way held",
        GUARD,
        "        self.half.settle(reports)\n",
        "",
        "vLLM gets its blocks back, whatever the connector has run into",
        test=f"{ERRORS}test_an_error_in_any_hook_turns_the_cache_off",
    ),
    Mutant(
        "vLLM: off, and blocks of the last report held",
        SCHEDULER,
        "        joined, self._joined = [*self._joined, *self._outbox.joined(reports)], []\n",
        "        joined = self._outbox.joined(reports)\n",
        "vLLM gets its blocks back, whatever the connector has run into",
        test=f"{ERRORS}test_an_error_in_the_ledger_turns_the_cache_off",
    ),
    Mutant(
        "vLLM: off, and blocks of queued copies held",
        GUARD,
        "        self.half.discard_queued()\n",
        "",
        "vLLM gets its blocks back, whatever the connector has run into",
        test=f"{ERRORS}test_an_error_in_any_hook_turns_the_cache_off",
    ),
    Mutant(
        "vLLM: off, and who waits for a load waits on",
        SCHEDULER,
        "                self._reports.append(LoadReport(found.request_id, is_lost=True))\n",
        "                pass\n",
        "no hang: whoever waits for a load computes",
        test=f"{ERRORS}test_an_error_in_any_hook_turns_the_cache_off",
    ),
    Mutant(
        "vLLM: off, and a promise kept by nobody",
        GUARD,
        "        self.half.refuse(request, num_external)\n",
        "",
        "no hang: a load that was promised before the error is lost",
        test=f"{ERRORS}test_a_load_that_was_promised_before_an_error_is_lost",
    ),
    Mutant(
        "vLLM: off, and reports not carried",
        GUARD,
        "        return self.half.has_reports if self.off_reason else self.half.is_busy\n",
        "        return not self.off_reason and self.half.is_busy\n",
        "vLLM frees the blocks of an aborted load when it hears of its end",
        test=f"{ERRORS}test_an_aborted_load_is_over_behind_an_error",
    ),
)

STARTED = (
    Mutant(
        "vLLM: a load that fails may fail its request",
        CONNECTOR,
        '    if transfer.kv_load_failure_policy != "recompute":\n',
        "    if not transfer.kv_load_failure_policy:\n",
        "a cache does not fail a request",
        test=f"{STARTS}test_what_cannot_work_is_refused",
    ),
    Mutant(
        "vLLM: an unknown key means its default",
        SETTINGS,
        "        if key not in KEYS:\n",
        "        if not key:\n",
        "an unknown key is an error that names it",
        test=f"{EXTRA}test_an_unknown_key_is_named",
    ),
    Mutant(
        "vLLM: host memory of the server on every rank",
        SETTINGS,
        " // num_ranks)\n",
        ")\n",
        "the ranks of a server share the host memory that it was given",
        test=f"{EXTRA}test_bytes_are_those_of_the_server",
    ),
)

VLLM_MUTANTS = (
    MATCHES + ALLOCATIONS + STEP + PREEMPTIONS + ENDS + RESULTS + WORKERS + GROUPED + PLACED + KEYED + COUNTED + SLEEP
    + GUARDED + STARTED
)  # fmt: skip
