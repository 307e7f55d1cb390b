"""Planted defects of bounds in flight that follow the link, and of blocks that offers defer."""

from __future__ import annotations

from .planting import Mutant

__all__ = ["IN_FLIGHT_MUTANTS"]

OFFERS, HOST_CACHE = "aoffload._host_cache.offers", "aoffload._host_cache.host_cache"
HOPS, QUEUE = "aoffload._transfer.copy_queue", "aoffload._transfer.copy_queue"
VLLM = "aoffload._vllm"

_DEFERRED = "a deferred block is stored only if it still holds what it held"
_STEP = "all that a step computes is stored, and a load needs no more steps than its copies"

_TESTS, _STEPS = "tests/core/test_engine_deferred.py::test_", "tests/ledger/test_copy_queue.py::test_"
_VLLM_TESTS = "tests/integrations/vllm_connector/test_vllm_"

IN_FLIGHT_MUTANTS = (
    Mutant(
        "deferred KV is wrong, and only its own request is asked",
        OFFERS,
        "            if old.request.sequence.begins_alike(wrong, num_tokens):\n",
        "            if old.request.sequence is wrong:\n",
        _DEFERRED,
        test=f"{_TESTS}nothing_computed_from_wrong_kv_is_stored_later",
    ),
    Mutant(
        "deferred blocks of an earlier request with the same id",
        HOST_CACHE,
        "        self.offers.deferred.pop(request.request_id, None)  # left by an earlier request with this id\n",
        "",
        _DEFERRED,
        test=f"{_TESTS}a_new_request_with_the_same_id_is_not_the_old_one",
    ),
    Mutant(
        "deferred blocks stored after a reset",
        OFFERS,
        "        if request.epoch != self.cache.epoch:\n            return Wanted([])\n        ids",
        "        ids",
        _DEFERRED,
        test=f"{_TESTS}after_a_reset_nothing_old_is_stored",
    ),
    Mutant(
        "deferred block read while a load writes to it",
        OFFERS,
        "        if not named.are_distinct or named.shared_with(self.jobs.ids_being_written(DEVICE)):\n",
        "        if not named.are_distinct:\n",
        _DEFERRED,
        test=f"{_TESTS}a_block_that_a_copy_may_still_write_to_is_not_read",
    ),
    Mutant(
        "what was deferred is never stored",
        OFFERS,
        "        if num_left and self.device.finds:\n",
        "        if False:\n",
        _STEP,
        test=f"{_TESTS}what_was_deferred_is_stored_after_its_request_has_ended",
    ),
    Mutant(
        "deferred requests without a bound",
        OFFERS,
        "            if len(self.deferred) > MOST_DEFERRED:\n",
        "            if False:\n",
        "what is kept of requests that are over is bounded",
        test=f"{_TESTS}the_number_of_requests_with_deferred_blocks_is_bounded",
    ),
    Mutant(
        "a step's blocks exceed the bound",
        OFFERS,
        "        self._step_blocks = max(self._step_blocks, min(self._computed_blocks, self.max_step_blocks))\n",
        "",
        _STEP,
        test=f"{_TESTS}what_one_step_computes_is_in_flight_at_once",
    ),
    Mutant(
        "a step holds most of the engine's blocks",
        OFFERS,
        "min(self._computed_blocks, self.max_step_blocks)",
        "self._computed_blocks",
        "copies never hold most of an engine's blocks",
        test=f"{_TESTS}copies_never_hold_most_of_the_engine_s_blocks",
    ),
    Mutant(
        "a step's jobs exceed the bound",
        QUEUE,
        "        self._step_bytes = max(self._step_bytes, computed_bytes)\n",
        "",
        _STEP,
        test=f"{_STEPS}all_that_a_step_computes_is_in_flight_at_once",
    ),
    Mutant(
        "a link that idles gets no more",
        HOPS,
        "self.max_bytes = less if self.in_flight else 2 * self.max_bytes",
        "self.max_bytes = less",
        _STEP,
        test=f"{_STEPS}a_link_that_idles_while_jobs_wait_gets_twice_as_much",
    ),
    Mutant(
        "a copy late because others went before it",
        HOPS,
        "        return max(next(iter(self.in_flight.values())).deadline, self.first_since + self.timeout_s)\n",
        "        return next(iter(self.in_flight.values())).deadline\n",
        "how much is in flight does not decide which copy is given up",
        test=f"{_STEPS}a_job_is_late_only_once_it_is_the_first",
    ),
    Mutant(
        "vLLM: what was deferred dies with its request",
        f"{VLLM}.scheduler",
        "            self._ended[found.request_id] = found.engine.block_hashes\n",
        "            pass\n",
        _STEP,
        test=f"{_VLLM_TESTS}steps.py::test_what_exceeds_the_bound_is_stored_by_later_steps",
    ),
    Mutant(
        "vLLM: the engine rests while blocks are deferred",
        f"{VLLM}.scheduler",
        "        is_waiting = bool(self._reports or jobs or self.ledger.deferred_requests) or",
        "        is_waiting = bool(self._reports or jobs) or",
        _STEP,
        test=f"{_VLLM_TESTS}steps.py::test_what_exceeds_the_bound_is_stored_by_later_steps",
    ),
    Mutant(
        "vLLM: a small bound stores a part of each step",
        f"{VLLM}.settings",
        "max(config.bytes_in_flight, step_bytes)",
        "config.bytes_in_flight",
        _STEP,
        test=f"{_VLLM_TESTS}settings.py::test_a_step_is_in_flight_at_once_whatever_is_configured",
    ),
)
