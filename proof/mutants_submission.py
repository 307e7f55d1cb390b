"""Planted defects of submission: fences of copies, the order of completions, and concurrent copies."""

from __future__ import annotations

from .planting import Mutant, Patch

__all__ = ["SUBMISSION_MUTANTS"]

LANE, LOCAL = "aoffload._transfer.lane", "aoffload._transfer.local"
QUEUE = "aoffload._transfer.copy_queue"
SESSION, FENCES = "aoffload._runtime.session", "aoffload._transfer.fences"
USES, COMMITS = "aoffload._kernel.pools", "aoffload._kernel.commits"

_OWN_STEPS = "a load leaves its destination alone until its last reader is over"
_ORDER = "completions of a lane come in launch order"
_TURN = "a copy that is made at once is settled in the next turn"

_STEPS = (
    Mutant(
        "load waits for no step",
        SESSION,
        "None if fences is None else fences.before_load(self.last_step(plans))",
        "None if fences is None else OnlyAfter()",
        _OWN_STEPS,
        also=(
            Patch(
                SESSION,
                "from .._transfer.fences import Fence, StepFences,",
                "from .._transfer.fences import Fence, OnlyAfter, StepFences,",
            ),
        ),
        test="tests/shell/test_step_fences.py::test_a_load_waits_for_the_step_that_used_its_blocks",
    ),
    Mutant(
        "step's fence noted for the step after",
        "aoffload._runtime.steps",
        "session.step_fences.ended(session.ledger.num_steps_ended + 1, session.fence_after(None))",
        "session.step_fences.ended(session.ledger.num_steps_ended + 2, session.fence_after(None))",
        _OWN_STEPS,
        test="tests/shell/test_step_fences.py::test_a_load_waits_for_the_step_that_used_its_blocks",
    ),
    Mutant(
        "load waits for one step of several",
        FENCES,
        "if step <= number:",
        "if step == number:",
        _OWN_STEPS,
        test="tests/shell/test_step_fences.py::test_a_step_without_a_fence_is_waited_for_with_all_others",
    ),
    Mutant(
        "step without a fence taken for over",
        FENCES,
        "                if fence is None:\n                    return None\n",
        "                if fence is None:\n                    continue\n",
        _OWN_STEPS,
        test="tests/shell/test_step_fences.py::test_a_step_without_a_fence_is_waited_for_with_all_others",
    ),
    Mutant(
        "freed block forgets its step",
        "aoffload._kernel.leases",
        "            self.cache.last_uses.gave_up(request, table.ids)\n",
        "            pass\n",
        _OWN_STEPS,
        test="tests/core/test_load_fences.py::test_no_step_is_missed",
    ),
    Mutant(
        "load into blocks of its own forward in vain",
        "aoffload._kernel.loads",
        "        if request.last_step:  # a step whose results",
        "        if False:  # a step whose results",
        _OWN_STEPS,
        test="tests/core/test_load_fences.py::test_a_forward_in_vain_is_waited_for_by_the_load_of_its_own_request",
    ),
    Mutant(
        "step whose fence raises taken for over",
        FENCES,
        "if not 0 < number <= self._last:",
        "if not 0 < number:",
        _OWN_STEPS,
        test="tests/shell/test_step_fences.py::test_a_step_whose_fence_raises_is_not_taken_for_over",
    ),
    Mutant(
        "block that left a window forgets its step",
        "aoffload._kernel.leases",
        "        cache.last_uses.gave_up(request, table.at(table.start, start))\n",
        "",
        _OWN_STEPS,
        test="tests/core/test_load_fences.py::test_no_step_is_missed",
    ),
    Mutant(
        "shared block has the step of whoever let go last",
        USES,
        "                if of_block[block_id] < number:\n                    of_block",
        "                if True:\n                    of_block",
        _OWN_STEPS,
        test="tests/core/test_load_fences.py::test_a_step_that_shares_blocks_counts_for_whoever_frees_them_first",
    ),
    Mutant(
        "request that was in no step taken for idle",
        USES,
        "        number, of_block = request.last_step or self.num_ended + 1, self._of_block\n",
        "        number, of_block = request.last_step, self._of_block\n",
        _OWN_STEPS,
        test="tests/core/test_load_fences.py::test_what_was_never_in_a_step_waits_for_the_next_one",
    ),
    Mutant(
        "next step's fence taken for recorded",
        USES,
        "        return number if number <= self.num_ended else 0\n",
        "        return number\n",
        _OWN_STEPS,
        test="tests/core/test_load_fences.py::test_what_was_never_in_a_step_waits_for_the_next_one",
    ),
    Mutant(
        "compute outside of steps not noticed",
        COMMITS,
        "            self.cache.last_uses.are_covered = False  # no step covers this commit\n",
        "            pass\n",
        _OWN_STEPS,
        test="tests/core/test_load_fences.py::test_a_commit_that_no_step_covers_ends_it_for_good",
    ),
    Mutant(
        "copies of a fork not noticed",
        "aoffload._extensions.forks",
        "        parent.last_step = 0  # the engine copies from its blocks, outside of steps\n",
        "",
        _OWN_STEPS,
        test="tests/core/test_load_fences.py::test_a_fork_copies_outside_of_steps",
    ),
)

_LANES = (
    Mutant(
        "submission waits for the copy before",
        LANE,
        "                    self._pass_on(self._submitted(job))\n",
        "                    end = self._submitted(job)\n"
        "                    while self._num_over != end.number:\n"
        "                        time.sleep(1e-4)\n"
        "                    self._pass_on(end)\n",
        "a job reaches the device while an earlier copy runs",
        test="tests/transfer/test_lane_threads.py::test_a_burst_is_delivered_in_launch_order",
    ),
    Mutant(
        "copy that is over overtakes one that is not",
        LANE,
        "        if self._num_over == end.number and end.is_over and not self._completing_ended:\n",
        "        if end.is_over and not self._completing_ended:\n",
        _ORDER,
        test="tests/transfer/test_lane_threads.py::test_a_burst_is_delivered_in_launch_order",
    ),
    Mutant(
        "completion told before its fence has passed",
        LANE,
        "            fence.synchronize()\n        except Exception as error:  # noqa: BLE001 - a lost device",
        "            pass\n        except Exception as error:  # noqa: BLE001 - a lost device",
        "a completion is told when the copy is proven over",
        test="tests/transfer/test_copy_completions.py::test_several_jobs_run_at_once_and_end_in_order",
    ),
    Mutant(
        "job in the hands of a dying thread forgotten",
        LANE,
        "        if died_with is not None:\n            self._pass_on(",
        "        if False:\n            self._pass_on(",
        "every job has an end",
        test="tests/transfer/test_copy_completions.py::test_a_dead_thread_leaves_no_job_without_an_end",
    ),
    Mutant(
        "what a dying thread was to complete forgotten",
        LANE,
        "        self._deliver_all([*self._completed, *doubts])\n",
        "",
        "every job has an end",
        test="tests/transfer/test_lane_threads.py::test_a_completing_thread_that_dies_leaves_no_job_without_an_end",
    ),
)

_AT_ONCE = (
    Mutant(
        "small copy settled inside launch",
        QUEUE,
        "                    if self._inbox and self._inbox[-1].job_id == job_id:  # copied by `launch` itself\n",
        "                    if self._inbox and self._inbox[-1].job_id == job_id:\n"
        "                        self.settle_delivered()\n",
        _TURN,
        test="tests/ledger/test_copy_queue.py::test_what_is_copied_at_once_is_settled_in_the_next_turn",
    ),
    Mutant(
        "small load keeps the loop",
        "aoffload._runtime.loading",
        "                await anyio.lowlevel.checkpoint()\n",
        "",
        "the event loop goes on",
        test="tests/shell/test_worker.py::test_a_small_load_gives_others_one_turn[asyncio]",
    ),
    Mutant(
        "an observer calls the ledger in the middle of a change",
        "aoffload._kernel.moves",
        'before, hooks.calling = hooks.calling, "wants_move"',
        'before, hooks.calling = hooks.calling, ""',
        "code of a program never meets a change that is half done",
        test="tests/metrics/test_observers.py::test_an_observer_that_is_asked_for_its_wishes_must_not_call_the_ledger",
    ),
    Mutant(
        "small load begins a turn for copies",
        QUEUE,
        "        self._settle_inbox()\n        self._dispatch()\n",
        "        self._settle_inbox()\n        self._begin_turn()\n        self._dispatch()\n",
        _TURN,
        test="tests/ledger/test_copy_queue.py::test_what_is_copied_at_once_may_be_settled_in_its_turn",
    ),
    Mutant(
        "small copy overtakes the lane",
        LANE,
        "                if self._num_over != self._num_launched or not all(",
        "                if not all(",
        _ORDER,
        test="tests/transfer/test_lane_threads.py::test_a_small_copy_waits_for_its_fence_and_its_turn",
    ),
    Mutant(
        "small copy waits for no fence",
        LANE,
        "or not all(map(is_known_to_have_passed, before)):",
        "or False:",
        "a store waits for the compute before it",
        test="tests/transfer/test_lane_threads.py::test_a_small_copy_waits_for_its_fence_and_its_turn",
    ),
    Mutant(
        "copies at once without a bound for a turn",
        LOCAL,
        "                self._left_bytes -= num_bytes\n",
        "",
        "the event loop goes on",
        test="tests/transfer/test_lane_threads.py::test_small_copies_are_made_at_once_within_the_bounds_of_a_turn",
    ),
    Mutant(
        "backend of a program copies in the event loop",
        LOCAL,
        "        if type(self.backend) is CpuBackend and not verify:\n",
        "        if isinstance(self.backend, CpuBackend) and not verify:\n",
        "the event loop goes on",
        test="tests/transfer/test_lane_threads.py::test_a_backend_of_the_program_copies_in_threads",
    ),
    Mutant(
        "interrupted copy has no end",
        LANE,
        '                    completion = _never_started(plan, "the copy was interrupted")\n',
        "",
        "every job has an end",
        test="tests/transfer/test_lane_threads.py::test_a_small_copy_that_is_interrupted_has_an_end",
    ),
)

SUBMISSION_MUTANTS = _STEPS + _LANES + _AT_ONCE
