"""Mutants of the connector for vLLM: waiting for copies instead of preempting."""

from __future__ import annotations

from .planting import Mutant

__all__ = ["VLLM_FREES_MUTANTS"]

FREES, GUARD = "aoffload._vllm.frees", "aoffload._vllm.guard"
TESTS = "tests/integrations/vllm_connector/test_vllm_frees.py::"

VLLM_FREES_MUTANTS = (
    Mutant(
        "vLLM frees: a wait without an end",
        FREES,
        "        if now - since <= WAIT_S or step - first_step < MIN_STEPS:\n",
        "        if now >= since:\n",
        "a copy that hangs does not keep a request from its blocks",
        test=f"{TESTS}test_a_store_that_hangs_is_waited_for_once",
    ),
    Mutant(
        "vLLM frees: a copy is waited for again and again",
        FREES,
        " and job_id > self._last_vain:\n",
        ":\n",
        "vLLM waits once for a copy that hangs",
        test=f"{TESTS}test_a_store_that_hangs_is_waited_for_once",
    ),
    Mutant(
        "vLLM frees: one slow step ends a wait",
        FREES,
        " or step - first_step < MIN_STEPS:\n",
        ":\n",
        "a copy may begin with the first step of a wait, and is reported with a later one",
        test=f"{TESTS}test_a_wait_lasts_some_steps_even_if_they_are_slow",
    ),
    Mutant(
        "vLLM frees: one wait for the life of the engine",
        FREES,
        "            self._since = None\n        self._step = step\n",
        "            pass\n        self._step = step\n",
        "a later wait has a time of its own",
        test=f"{TESTS}test_a_later_wait_has_a_time_of_its_own",
    ),
    Mutant(
        "vLLM frees: blocks that others have count",
        FREES,
        "        return any(map(self.pool.is_private, block_ids))\n",
        "        return bool(block_ids)\n",
        "vLLM does not wait for blocks that a running request keeps",
        test=f"{TESTS}test_blocks_of_a_running_request_do_not_come_back",
    ),
    Mutant(
        "vLLM frees: a copy in the queue is near",
        FREES,
        "job.state is JobState.LAUNCHED and job_id",
        "job_id",
        "a copy that waits for others to end is not waited for",
        test=f"{TESTS}test_a_copy_that_was_not_launched_is_not_near",
    ),
    Mutant(
        "vLLM frees: a stalled link is near",
        FREES,
        " and not self.queue.is_stalled(*plan.link):\n",
        ":\n",
        "vLLM does not wait for copies on a link that is stalled",
        test=f"{TESTS}test_a_stalled_link_is_not_waited_for",
    ),
    Mutant(
        "vLLM frees: a new request takes the blocks",
        "aoffload._vllm.scheduler",
        "        if self._frees.waits_in == self._num_steps:\n            return None",
        "        if self._frees.waits_in == self._num_steps:\n            pass",
        "the blocks that come back are for the request that waits",
        test=f"{TESTS}test_nobody_takes_the_blocks_that_a_request_waits_for",
    ),
    Mutant(
        "vLLM frees: asked behind an error",
        GUARD,
        "                return self.half.frees_soon()\n"
        "            except Exception as error:  # noqa: BLE001\n"
        "                self._turn_off(error)\n"
        "        return False\n",
        "                return self.half.frees_soon()\n"
        "            except Exception as error:  # noqa: BLE001\n"
        "                self._turn_off(error)\n"
        "        return True\n",
        "after an error nothing is waited for",
        test=f"{TESTS}test_an_error_means_that_nothing_is_waited_for",
    ),
    Mutant(
        "vLLM frees: vLLM is never told",
        "aoffload._vllm.connector",
        "        return self._deciding.frees_soon()\n",
        "        return False\n",
        "a store that ends soon is waited for instead of a preemption",
        test=f"{TESTS}test_a_store_that_ends_soon_is_waited_for",
    ),
)
