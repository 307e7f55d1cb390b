"""Mutants of the connector for vLLM: sleep mode, in which the memory of the KV tensors goes away."""

from __future__ import annotations

from .planting import Mutant

__all__ = ["VLLM_SLEEP_MUTANTS"]

OURS = "aoffload._vllm"
WORKER, COPIES, SCHEDULER, MESSAGES = f"{OURS}.worker", f"{OURS}.worker", f"{OURS}.scheduler", f"{OURS}.messages"
SLEEPS = "tests/integrations/vllm_connector/test_vllm_sleep.py::"

VLLM_SLEEP_MUTANTS = (
    Mutant(
        "vLLM: copies while tensors have no memory",
        WORKER,
        "        transport, self._transport = self._transport, None\n        if ",
        "        transport = self._transport\n        if ",
        "nothing is copied while the engine sleeps",
        test=f"{SLEEPS}test_a_sleeping_worker_copies_nothing",
    ),
    Mutant(
        "vLLM: sleeps on",
        WORKER,
        "            self._transport, self._asleep = self._asleep, None\n",
        "            self._asleep = None\n",
        "what the host holds is there when the engine wakes",
        test=f"{SLEEPS}test_a_sleeping_worker_copies_nothing",
    ),
    Mutant(
        "vLLM: asked to sleep twice",
        WORKER,
        "        if transport is None:\n            return\n        if self._weights",
        "        if self._weights",
        "what the host holds is there when the engine wakes",
        test=f"{SLEEPS}test_a_sleeping_worker_copies_nothing",
    ),
    Mutant(
        "vLLM: stopped while it sleeps, keeps its threads",
        WORKER,
        "= self._transport or self._asleep, None, None\n",
        "= self._transport, None, None\n",
        "nothing is left of a worker that was stopped",
        test=f"{SLEEPS}test_a_worker_may_stop_while_it_sleeps",
    ),
    Mutant(
        "vLLM: sleeps while copies are under way",
        WORKER,
        "        if self.copies.wait(self._config.transfer_timeout_s):\n",
        "        if self.copies.wait(0.0):\n",
        "the memory of the tensors goes when the copies that touch it are over",
        test=f"{SLEEPS}test_a_store_that_ends_as_the_engine_goes_to_sleep_counts",
    ),
    Mutant(
        "vLLM: what waits behind a copy that hangs is copied after sleep",
        WORKER,
        "        transport.close(0.0)\n",
        "",
        "nothing that was launched before the engine went to sleep begins afterwards",
        test=f"{SLEEPS}test_a_copy_that_hangs_delays_sleep_no_longer_than_its_time",
    ),
    Mutant(
        "vLLM: a copy that hangs in sleep is never told of",
        WORKER,
        "        self.copies.doubt(self._gone)\n",
        "",
        "a copy that may still run is in doubt, and its destination in quarantine",
        test=f"{SLEEPS}test_a_copy_that_hangs_delays_sleep_no_longer_than_its_time",
    ),
    Mutant(
        "vLLM: a copy that hangs in sleep has failed",
        COPIES,
        "Completion(job_id, Outcome.UNPROVEN, error=reason)",
        "Completion(job_id, Outcome.FAILED, error=reason)",
        "a copy that may still run is in doubt, and its destination in quarantine",
        test=f"{SLEEPS}test_a_copy_that_hangs_delays_sleep_no_longer_than_its_time",
    ),
    Mutant(
        "vLLM: a load counts whose memory is gone",
        COPIES,
        "            self._lost |= self._loads\n",
        "            pass\n",
        "nobody computes behind KV that went with the memory of the tensors",
        test=f"{SLEEPS}test_a_load_that_ends_as_the_engine_goes_to_sleep_is_lost",
    ),
    Mutant(
        "vLLM: what is in doubt counts as over",
        COPIES,
        "            if completion.outcome is not Outcome.UNPROVEN:\n                self._under_way",
        "            if True:\n                self._under_way",
        "the memory of the tensors goes when the copies that touch it are over",
        test=f"{SLEEPS}test_what_is_in_doubt_is_awaited",
    ),
    Mutant(
        "vLLM: a rank that copies nothing any more is asked on and on",
        SCHEDULER,
        "        if reports.gone:\n",
        "        if False:\n",
        "the cache is off once a rank copies nothing any more",
        test=f"{SLEEPS}test_a_copy_that_hangs_delays_sleep_no_longer_than_its_time",
    ),
    Mutant(
        "vLLM: only the first rank may give up",
        MESSAGES,
        "        return Reports(by_rank, self.gone or other.gone, self.said + other.said)\n",
        "        return Reports(by_rank, self.gone, self.said + other.said)\n",
        "the cache is off once a rank copies nothing any more",
        test="tests/integrations/vllm_connector/test_vllm_steps.py::"
        "test_a_rank_that_copies_nothing_any_more_is_heard_beside_any_other",
    ),
    Mutant(
        "vLLM: adapters are forgotten when the workers have answered",
        f"{OURS}.guard",
        "            self._guard.forget()\n        self._num_resets = 0\n",
        "            self._guard.reset()\n        self._num_resets = 0\n",
        "what other weights compute after KV of vLLM's own cache is cached nowhere",
        test="tests/integrations/vllm_connector/test_vllm_weights.py::"
        "test_a_reset_that_vllm_could_not_make_forgets_no_adapter",
    ),
)
