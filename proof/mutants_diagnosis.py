"""Planted defects of diagnosis: reports on stalled requests. Each names a test, because these defects change no
outcome."""

from __future__ import annotations

from .planting import Mutant

__all__ = ["DIAGNOSIS_MUTANTS"]

SLOW, SITUATION = "aoffload._runtime.worker", "aoffload._extensions.explain"
HANGS = "tests/trace/test_hanging_programs.py"
WAITS = "tests/core/test_diagnosis.py"

DIAGNOSIS_MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "slow wait is looked at too early",
        SLOW,
        "        return max(0.0, waiter.joined_s + slow_s - self.now())\n",
        "        return max(0.0, waiter.joined_s + slow_s / 2 - self.now())\n",
        "a wait is long after slow_wait_s",
        test=f"{HANGS}::test_what_is_slow_is_said_once",
    ),
    Mutant(
        "worker does not look at steps",
        "aoffload._runtime.worker",
        "        slow = math.inf if self.slow is None else self.slow.next_deadline\n",
        "        slow = math.inf\n",
        "a long step is said",
        test=f"{HANGS}::test_a_step_behind_another_one_is_said_in_time",
    ),
    Mutant(
        "sources of a copy in doubt shown as held",
        SITUATION,
        "        if not is_in_doubt:  # the",
        "        if not is_in_doubt or job.plan.num_blocks:  # the",
        "only what is held is said to be",
        test=f"{WAITS}::test_pins_and_jobs_hold_blocks_too",
    ),
    Mutant(
        "a job holds nothing of its prefix",
        SITUATION,
        "num_blocks += len(_pinned(job.leases()))\n",
        "num_blocks += job.plan.num_blocks if job.plan.source is Tier.DEVICE else 0\n",
        "what is pinned has a holder",
        test=f"{WAITS}::test_what_is_pinned_once_its_request_is_over_has_a_holder",
    ),
    Mutant(
        "a request holds its own copies alone",
        SITUATION,
        "    return len(found.union(_pinned(request.all_leases()), granted or ()))\n",
        "    return len(found.union((() if request.tables else _pinned(request.all_leases())), granted or ()))\n",
        "what is pinned has a holder",
        test=f"{WAITS}::test_what_another_request_has_cached_first_is_held_beside_the_own_copy",
    ),
    Mutant(
        "steps of requests that are over are not shown",
        SITUATION,
        "        yield from map(self.step, self.steps)\n",
        "        yield from (self.step(one) for one in self.steps if not one.requests[0].is_over)\n",
        "what a step still holds is shown",
        test=f"{HANGS}::test_holders_name_the_step_of_a_request_that_is_over",
    ),
    Mutant(
        "a waiter is told of itself",
        SITUATION,
        '        if (holder.kind, holder.name) != ("request", request_id) and holder.request_ids != (request_id,):\n',
        "        if True:\n",
        "what a waiter holds itself is not what it waits for",
        test=f"{WAITS}::test_who_extends_stands_before_who_begins",
    ),
    Mutant(
        "a wait that begins again is young",
        "aoffload._kernel.waiting",
        "        if waiter.joined_s is None and self.moves.clock is not None:\n",
        "        if self.moves.clock is not None:\n",
        "a wait is as old as its first place in line",
        test=f"{WAITS}::test_a_wait_that_begins_again_is_as_old_as_before",
    ),
    Mutant(
        "what is open ends with its runtime",
        "aoffload.trace.scan",
        "            self.book.runtime_over(runtime, self.last_s if runtime.closed_s is None else None)\n",
        "            self.book.runtime_over(runtime)\n",
        "what is not over is open until now",
        test=f"{HANGS}::test_the_log_alone_names_the_step_that_hangs",
    ),
)
"""Events, requests(), holders() and the trace of a log."""
