"""Planted defects in the handling of lower tiers by vLLM, and in reports on these tiers."""

from __future__ import annotations

from .planting import Mutant

__all__ = ["TIER_REPORT_MUTANTS"]

DISK = "aoffload._vllm.disk"
FETCHES = "aoffload._vllm.lower"
REMOTE = "aoffload._vllm.remote"
WORKER_REMOTE = "aoffload._vllm.worker"
STORE_TESTS = "tests/integrations/vllm_connector/test_vllm_remote.py::"
TESTS = "tests/integrations/vllm_connector/test_vllm_disk.py::"
TIERS = "tests/trace/test_trace_tiers.py::"
SEEN = "tests/shell/test_tier_reports.py::"

TIER_REPORT_MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "vLLM disk: a fetch without an end",
        FETCHES,
        "        is_late = self.clock() >= found.fetch_until\n",
        "        is_late = False\n",
        "a request waits for the disk for fetch_timeout_s at most",
        test=f"{TESTS}test_a_fetch_that_takes_too_long_is_not_waited_for",
    ),
    Mutant(
        "vLLM disk: a failing disk is asked again and again",
        DISK,
        "            move = breaker.failed(self.clock(), completion.error)\n",
        "            move = breaker.succeeded(self.clock())\n",
        "a disk that fails is left alone for a while",
        test=f"{TESTS}test_a_disk_that_fails_is_left_alone",
    ),
    Mutant(
        "vLLM disk: a fetch without free blocks counts as one that loaded nothing",
        FETCHES,
        "        found.num_tried = self._num_loads_over\n",
        "        found.num_tried, found.num_fetched = self._num_loads_over, match.num_tokens\n",
        "a request waits for the fetches that take the share of host memory",
        test=f"{TESTS}test_a_fetch_without_free_blocks_is_tried_again",
    ),
    Mutant(
        "vLLM disk: a burst loads each for itself",
        FETCHES,
        "            match = found.ask_behind_fetch(self.ledger, self.counts.num_failed)\n",
        "            found.fetch, match = None, found.request.match\n",
        "prompts that share a prefix load it once, also behind a fetch",
        test=f"{TESTS}test_prompts_that_share_a_prefix_load_it_once",
    ),
    Mutant(
        "vLLM disk: more than a day allows",
        DISK,
        "            self.budget.spend(num_blocks * self.block_bytes, self.clock())\n",
        "            pass\n",
        "no more than daily_writes is written within a day",
        test=f"{TESTS}test_no_more_is_written_than_a_day_allows",
    ),
    Mutant(
        "vLLM disk: a reset stays in the scheduler",
        DISK,
        "            self.outbox.reset(self._num_resets)\n",
        "            self._num_resets_over = self._num_resets\n",
        "no restart finds what was forgotten",
        test=f"{TESTS}test_a_reset_reaches_the_disk",
    ),
    Mutant(
        "vLLM disk: nothing is flushed at the end",
        "aoffload._vllm.guard",
        "        may_be_more = disk.flush()\n",
        "        may_be_more = False\n",
        "the next engine finds what was only in host memory",
        test=f"{TESTS}test_an_engine_that_starts_anew_finds_what_was_there",
    ),
    Mutant(
        "vLLM disk: any layout of a block will do",
        "aoffload._vllm.worker",
        '\\n{identity.text()}\\n{strides}"',
        '\\n{identity.text()}"',
        "KV with heads and tokens in another order is not used",
        test=f"{TESTS}test_another_engine_finds_nothing",
    ),
    Mutant(
        "vLLM disk: any weights will do",
        "aoffload._vllm.worker",
        "        return f\"{self.given or ' '.join(map(fingerprint, self.models))}\\n{self.others}\"\n",
        "        return f\"{self.given or ' '.join(self.models)}\\n{self.others}\"\n",
        "other weights in the same place are another model",
        test=f"{TESTS}test_a_local_model_needs_no_namespace",
    ),
    Mutant(
        "vLLM disk: given-up stores go on",
        "aoffload._vllm.worker",
        "                transport.give_up(job_id)\n",
        "                pass\n",
        "a store that was given up records nothing: its source may be overwritten",
        test=f"{TESTS}test_what_is_given_up_is_told_to_the_disk",
    ),
    Mutant(
        "vLLM remote: a store that says nothing is waited for",
        WORKER_REMOTE,
        "        now = self._clock() if self._asked else 0.0\n",
        "        now = 0.0\n",
        "what a store does not say in time it does not have",
        test=f"{STORE_TESTS}test_a_store_that_does_not_answer_is_not_waited_for",
    ),
    Mutant(
        "vLLM remote: a worker that says nothing is waited for",
        FETCHES,
        "            return asked.num_cells is None and self.clock() < asked.until\n",
        "            return asked.num_cells is None\n",
        "nobody waits longer than fetch_timeout_s for an answer",
        test=f"{STORE_TESTS}test_a_worker_that_says_nothing_is_not_waited_for",
    ),
    Mutant(
        "vLLM remote: a store that fails is asked again and again",
        WORKER_REMOTE,
        "        if refusing != self._refusing:\n",
        "        if False:\n",
        "a store that fails is left alone for a while",
        test=f"{STORE_TESTS}test_a_store_that_fails_is_left_alone",
    ),
    Mutant(
        "vLLM remote: what was stored before a reset is found",
        REMOTE,
        "            self.is_on = False\n",
        "",
        "after a reset nothing of before is used",
        test=f"{STORE_TESTS}test_a_reset_ends_the_use_of_the_store",
    ),
    Mutant(
        "vLLM remote: a given-up load writes on",
        "aoffload._tiers.remote.lanes",
        "        if not job.unless_given_up(lambda: self._host.copy_in(job.plan, blocks[first:])):\n",
        "        if not self._host.copy_in(job.plan, blocks[first:]):\n",
        "a load that was given up touches no host memory",
        test=f"{STORE_TESTS}test_a_load_that_is_given_up_touches_no_host_memory",
    ),
    Mutant(
        "vLLM: what is computed sooner is fetched",
        FETCHES,
        "        return fetch_bound_s(num_tokens, self.speed.tokens_per_s, offer.seconds, self.most_s)\n",
        "        return self.most_s\n",
        "a fetch competes with computing",
        test=f"{STORE_TESTS}test_what_is_computed_sooner_is_not_fetched",
    ),
    Mutant(
        "vLLM: a step counts from its begin, though another one ran",
        "aoffload._vllm.computing",
        '        self.speed.begins([""], max(begun, self._last_end))\n',
        '        self.speed.begins([""], begun)\n',
        "steps that overlap count once",
        test=f"{STORE_TESTS}test_the_speed_is_that_of_steps_that_overlap",
    ),
    Mutant(
        "trace: stores to the disk fill the host",
        "aoffload.trace.book",
        "        there = job.link.destination\n",
        "        there = min(job.link.destination, job.link.source)\n",
        "a copy fills the tier that it goes to",
        test=f"{TIERS}test_copies_fill_the_tier_that_they_go_to",
    ),
    Mutant(
        "trace: a fetch is a wait for room",
        "aoffload.trace.book",
        "        if waiter:\n",
        "        if not waiter:\n",
        "who waits for a fetch does not wait for room",
        test=f"{TIERS}test_a_wait_for_a_fetch_is_told_as_one",
    ),
    Mutant(
        "metrics: all links of a direction together",
        "aoffload._observe.metrics.observer",
        "max(job.plan.link)), job.completion\n",
        "Tier.HOST), job.completion\n",
        "copies of each pair of tiers are counted apart",
        test=f"{SEEN}test_a_request_that_waits_for_the_disk_says_so",
    ),
    Mutant(
        "explain: a fetch is nobody's",
        "aoffload._extensions.explain",
        "        if fetch is not None and place is None:\n",
        "        if fetch is None and place is not None:\n",
        "a request that waits for a fetch says so",
        test=f"{SEEN}test_a_request_that_waits_for_the_disk_says_so",
    ),
)
