"""Mutants of the connector for vLLM: hooks of the scheduler, in the order in which a request meets them."""

from __future__ import annotations

from .planting import Mutant, Patch

__all__ = ["VLLM_SCHEDULER_MUTANTS"]

OURS = "aoffload._vllm"
SCHEDULER, REQUESTS, CONNECTOR = f"{OURS}.scheduler", f"{OURS}.requests", f"{OURS}.connector"
OUTBOX, BLOCKS, COUNTS = f"{OURS}.messages", f"{OURS}.blocks", f"{OURS}.counts"
TESTS = "tests/integrations/vllm_connector/test_vllm"
ASKED, STEPS, LOST = f"{TESTS}_matching.py::", f"{TESTS}_steps.py::", f"{TESTS}_lost_loads.py::"
PREEMPTED, WHOLE, OF_GROUPS = f"{TESTS}_preemption.py::", f"{TESTS}_connector.py::", f"{TESTS}_groups.py::"

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
        "        if record is not None and self.is_asking:\n",
        "        if record is not None and self.is_running:\n",
        "no hang: a request waits for another's load only so long, however often vLLM asks",
        test=f"{ASKED}test_who_waits_for_anothers_load_does_not_wait_for_long",
    ),
    Mutant(
        "vLLM: pins end with the step",
        SCHEDULER,
        "        plans += self._plan_stores(output)\n",
        "        for found in self.requests.values():\n"
        "            if found.is_asking and found.request_id not in output.num_scheduled_tokens:\n"
        '                found.leave(self.ledger, "not scheduled")\n'
        "        plans += self._plan_stores(output)\n",
        "what was found is there when vLLM has blocks for it, in whatever step that is",
        test=f"{ASKED}test_what_was_found_stays_while_there_is_no_room",
    ),
    Mutant(
        "vLLM: blocks in a later step find nothing pinned",
        SCHEDULER,
        "        for found in self._take_over():\n            self._tell(found)\n        return self.end_step()\n",
        "        for found in self._take_over():\n            self._tell(found)\n"
        "        for found in self.requests.values():\n"
        "            if found.is_asking:\n"
        '                found.leave(self.ledger, "not scheduled")\n'
        "        return self.end_step()\n",
        "vLLM 0.33 asks in one step and allocates in another",
        test=f"{ASKED}test_blocks_may_come_in_a_later_step",
    ),
    Mutant(
        "vLLM: the first answer for every try",
        REQUESTS,
        "            ledger.match_again(record, num_device_tokens=num_device_tokens, wake=self.ask_now)\n",
        "            ledger.match_again(\n"
        "                record, num_device_tokens=record.match.num_device_tokens, wake=self.ask_now\n"
        "            )\n",
        "each try is answered behind the hit that vLLM has then",
        test=f"{ASKED}test_each_try_is_answered_behind_vllms_own_hit",
    ),
    Mutant(
        "vLLM: nobody wakes who was told to ask again",
        REQUESTS,
        "    def ask_now(self) -> None:\n        self.ask_at = -math.inf\n",
        "    def ask_now(self) -> None:\n        pass\n",
        "who waits for another request's load is answered when it is over",
        test=f"{ASKED}test_who_waits_for_anothers_load_is_answered_once_it_is_over",
    ),
    Mutant(
        "vLLM: tokens read at every try",
        SCHEDULER,
        "        num_failed = self.counts.num_failed\n",
        "        self._keys.prefix_of(request)\n        num_failed = self.counts.num_failed\n",
        "a long prompt is read once, however often vLLM asks",
        test=f"{ASKED}test_retries_do_not_read_the_tokens_again",
    ),
    Mutant(
        "vLLM: an answer that outlives a failed copy",
        COUNTS,
        "            self.num_failed += not has_landed\n",
        "",
        "what cannot be loaded is no hit",
        test=f"{ASKED}test_an_answer_does_not_outlive_what_it_is_about[quarantine]",
    ),
    Mutant(
        "vLLM: promises while nothing is copied",
        SCHEDULER,
        " and self._queue.is_accepting else 0\n",
        " else 0\n",
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
        "        found.wait, found.max_hit_tokens = Wait.TOLD, found.record.retry_max_hit_tokens\n",
        "        found.wait = Wait.TOLD\n",
        "no hang: the same load would be lost again",
        test=f"{ASKED}test_a_load_that_was_lost_is_not_promised_again",
    ),
    Mutant(
        "vLLM: a lost load forgotten with a preemption",
        REQUESTS,
        '            self.leave(ledger, "preempted")\n',
        '            self.leave(ledger, "preempted")\n            self.max_hit_tokens = None\n',
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
        "        plans = self.ledger.plan_load(\n"
        "            found.record, found.promised, wake, into=self._groups.tables(tables),\n"
        "            into_checkpoint=self._groups.checkpoint_at(tables, found.promised),\n"
        "        )  # fmt: skip\n"
        "        if plans:\n            self._note(found, plans)\n            self._loads += plans\n"
        "            found.has_to_be_compared = found.use is not None\n",
        "        self._later.append((found, self._groups.tables(tables), wake))\n"
        "        plans = ()\n        if True:\n            pass\n",
        "a prefix that is to be loaded in this step is not loaded twice",
        also=(
            Patch(
                SCHEDULER,
                "        plans, self._loads = self._loads, []\n",
                "        for one, into, wake in self._later:\n"
                "            self._loads += self.ledger.plan_load(one.request, one.promised, wake, into=into)\n"
                "        self._later.clear()\n"
                "        plans, self._loads = self._loads, []\n",
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
        "a request that is not cached is no error",
        test=f"{WHOLE}test_a_request_without_a_key_is_served",
    ),
)

STEP = (
    Mutant(
        "vLLM: offers up to what was computed before",
        SCHEDULER,
        "            num_computed = engine.num_computed_tokens + num_scheduled\n",
        "            num_computed = engine.num_computed_tokens\n",
        "an offer means: when the forward of this step is over",
        test=f"{STEPS}test_each_chunk_is_offered_in_its_step",
    ),
    Mutant(
        "vLLM: offers a block too late",
        REQUESTS,
        "(stop + 1) * unit + self.keys.drafts.num_ahead\n",
        "(stop + 1) * unit + self.keys.drafts.num_ahead + 1\n",
        "a block is offered in the step that fills it",
        test=f"{STEPS}test_a_block_is_offered_in_the_step_that_fills_it",
    ),
    Mutant(
        "vLLM: stores begin with the loads",
        CONNECTOR,
        "        self._copying.load(self._commands)\n",
        "        self._copying.load(self._commands)\n        self._copying.start([*self._commands.stores])\n",
        "a store copies what the forward has written",
        also=(
            Patch(
                CONNECTOR,
                "        self._copying.start(self._commands.stores, self._commands.uses)\n",
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
        "            if num_computed // self._unit > found.offered_stop or checkpoints:\n",
        "            if num_computed // self._unit >= found.offered_stop:\n",
        "most steps cost nothing",
        also=(
            Patch(
                SCHEDULER,
                "            if num_computed < found.next_offer and not checkpoints:\n",
                "            if False:\n",
            ),
        ),
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
        "        self.prefix = prefix = self.keys.grown(self.prefix, self.engine)\n        self.num_known, self",
        "        prefix = self.prefix\n        self.num_known, self",
        "what a request had generated before it was preempted is found again",
        test=f"{PREEMPTED}test_what_it_had_generated_is_found_again",
    ),
    Mutant(
        "vLLM: comes back and offers nothing",
        REQUESTS,
        "self.num_known, self.offered_stop, self.next_offer = self.keys.num_known(prefix), -1, 0\n",
        "self.num_known = self.keys.num_known(prefix)\n",
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
        "        return False, self._deciding.finished(request, block_ids)\n",
        "        return self.has_pending_push_work(), self._deciding.finished(request, block_ids)\n",
        "only copies keep blocks, and vLLM frees the others at once",
        test=f"{STEPS}test_nothing_is_kept_when_a_request_is_over",
    ),
    Mutant(
        "vLLM: stops stepping over its stores",
        SCHEDULER,
        "bool(self._reports or jobs or self.ledger",
        "bool(self._reports or self.ledger",
        "the engine steps until every copy has given its blocks back",
        test=f"{STEPS}test_nothing_is_kept_when_a_request_is_over",
    ),
    Mutant(
        "vLLM: stops stepping over its reports",
        SCHEDULER,
        "bool(self._reports or jobs or self.ledger",
        "bool(jobs or self.ledger",
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
        ", found.new_tokens(), is_last=True)\n",
        ", found.new_tokens())\n",
        "a window is stored at the end of a request",
        test=f"{OF_GROUPS}test_what_is_stored_of_a_window_is_found",
    ),
    Mutant(
        "vLLM: offers blocks that a preempted request has lost",
        SCHEDULER,
        "        if found.engine.num_computed_tokens >= found.record.num_computed_tokens:\n",
        "        if found.engine.num_computed_tokens <= found.record.num_computed_tokens:\n",
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

VLLM_SCHEDULER_MUTANTS = MATCHES + ALLOCATIONS + STEP + PREEMPTIONS + ENDS
