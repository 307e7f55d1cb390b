"""Planted defects of the choice between loading and computing."""

from __future__ import annotations

from .planting import Mutant

__all__ = ["LOAD_CHOICE_MUTANTS"]

RULE, COSTS, RATES = "aoffload._extensions.load_choice", "aoffload._runtime.costs", "aoffload._transfer.rates"
TESTS, SHELL = "tests/core/test_load_choice.py", "tests/shell/test_load_costs.py"
VLLM, IN_VLLM = "aoffload._vllm.computing", "tests/integrations/vllm_connector/test_vllm_choice.py"
HOST_CACHE = "aoffload._host_cache.host_cache"


def _mutant(name: str, module: str, old: str, new: str, promise: str, test: str) -> Mutant:
    return Mutant(f"load or compute: {name}", module, old, new, promise, test=test)


LOAD_CHOICE_MUTANTS: tuple[Mutant, ...] = (
    _mutant(
        "what computes delays nobody",
        RULE,
        "hit_s + NUM_BEHIND * queue_s / (queue_s + IDLE_S) * hit_s",
        "hit_s",
        "computing takes time from those behind",
        f"{TESTS}::test_what_is_queued_to_be_computed_makes_computing_dear",
    ),
    _mutant(
        "what loads delays nobody",
        RULE,
        "late_s + NUM_BEHIND * wait_s / (wait_s + IDLE_S) * load_s",
        "late_s",
        "a slow link does not fill up with loads that each seem worth it",
        f"{TESTS}::test_what_is_queued_to_be_copied_makes_loading_dear",
    ),
    _mutant(
        "everybody measures",
        RULE,
        "return 0 if offer.queued_bytes else num_units",
        "return num_units",
        "an unknown link is measured by one load",
        f"{TESTS}::test_what_is_not_known",
    ),
    _mutant(
        "a deadline is none",
        RULE,
        "        if offer.left_s is not None:\n",
        "        if False:\n",
        "what meets a deadline goes before what costs less",
        f"{TESTS}::test_a_deadline_goes_before_the_cost",
    ),
    _mutant(
        "what is declined is in the match",
        HOST_CACHE,
        '        request.hit_limit = check_int("from_token", from_token, 0)',
        '        _ = check_int("from_token", from_token, 0)',
        "an engine is told what it is to load",
        f"{TESTS}::test_what_is_declined_is_computed",
    ),
    _mutant(
        "what others bring is counted again",
        RULE,
        "layout.num_blocks(there, start, stop)",
        "layout.num_blocks(start, start, stop)",
        "a load of which another one brings the blocks costs nothing more",
        f"{TESTS}::test_what_a_load_would_bring",
    ),
    _mutant(
        "what is computed stays queued",
        COSTS,
        "            self._sum_queued -= num_tokens\n",
        "            pass\n",
        "what is computed is queued no longer",
        f"{SHELL}::test_what_is_queued_is_counted",
    ),
    _mutant(
        "a slow link is tried with all there is",
        RULE,
        "int(num_units * min(1.0, TRIAL * offer.age_s / (offer.latency_s + load_s)))",
        "num_units if TRIAL * offer.age_s else 0",
        "to measure a slow link again costs little",
        f"{TESTS}::test_what_was_slow_is_tried_again",
    ),
    _mutant(
        "a small job says all",
        RATES,
        "            self._has_become(num_bytes, took_s)\n",
        "            self._num_jobs = self._num_bytes = self._seconds = 0.0\n",
        "the share of latency is kept by what measures again",
        "tests/test_fetch_gate.py::test_a_small_job_shows_how_fast_large_ones_have_become",
    ),
    _mutant(
        "what hangs is as fast as ever",
        RATES,
        "        if known is None or not in_flight or known * (now - self.since_s) <= in_flight:\n",
        "        if True:\n",
        "what is in flight and does not end makes a link slow",
        "tests/test_fetch_gate.py::test_what_does_not_end_makes_a_rate_small",
    ),
    _mutant(
        "latency is bandwidth",
        RATES,
        "self.latency_s, self._bytes_per_s = latency_s, mean_bytes / (mean_s - latency_s)",
        "self.latency_s, self._bytes_per_s = 0.0, mean_bytes / mean_s",
        "what a job takes besides its bytes is known",
        "tests/test_fetch_gate.py::test_latency_is_told_from_bandwidth",
    ),
    _mutant(
        "vLLM is told of what is declined",
        VLLM,
        "        found.chosen = found.record.match\n",
        "        found.chosen = match\n",
        "what is computed is no hit for vLLM",
        f"{IN_VLLM}::test_what_is_computed_sooner_is_not_loaded",
    ),
    _mutant(
        "what vLLM computes stays queued",
        VLLM,
        "                self.costs.computed(request_id, number)\n",
        "                pass\n",
        "what is computed is queued no longer",
        f"{IN_VLLM}::test_what_is_queued_to_be_computed_counts",
    ),
    _mutant(
        "who has gone stays queued in vLLM",
        VLLM,
        "            self.costs.forget(request_id)\n",
        "            pass\n",
        "a request that is over is queued no longer",
        f"{IN_VLLM}::test_what_is_queued_to_be_computed_counts",
    ),
)
