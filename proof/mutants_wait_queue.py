"""Planted defects of the wait queue and of the ledger around it: hold-and-wait, lost wake-ups, steps."""

from __future__ import annotations

from .planting import Mutant, Patch

__all__ = ["WAIT_QUEUE_MUTANTS"]

ADMISSION, WAITING, BASE = "aoffload._kernel.waiting", "aoffload._kernel.waiting", "aoffload._kernel.base"
INVALIDATION = "aoffload._extensions.invalidation"

_LINE = (
    Mutant(
        "who has lost room to its own load waits in vain",
        ADMISSION,
        "self.capacity, self.num_least(waiter))",
        "self.capacity)",
        "no hang: who can never fit hears so at once, wherever in the line",
        test="tests/core/test_rare_paths.py::test_who_can_never_fit_after_its_own_load_hears_so_behind_others",
    ),
    Mutant(
        "hold and wait",
        ADMISSION,
        "        if head is not waiter:\n            self._forget_match(request)\n",
        "",
        "only the head of the line keeps pins while it waits",
    ),
    Mutant(
        "overtaken head keeps its pins",
        ADMISSION,
        "        if head is not before:\n            self._forget_match(before.request)\n",
        "",
        "only the head of the line keeps pins while it waits",
        scenarios=("retries",),
    ),
    Mutant(
        "head without room blocks an extension",
        ADMISSION,
        "                self._forget_match(allocating[0].request)",
        "                pass",
        "who has nothing yet must not block who has",
        programs=True,
    ),
    Mutant(
        "who waits keeps what it matched first",
        "aoffload._kernel.leases",
        "            if is_same and wanted == {tier: lease.run for tier, lease in request.leases.items()}:\n",
        "            if True:\n",
        "who waited matches again in the step that grants",
    ),
    Mutant(
        "what has come to the device meanwhile does not count",
        ADMISSION,
        "if waiter.changes_seen != device.num_changes or",
        "if waiter.changes_seen < 0 or",
        "who waited matches again in the step that grants",
    ),
    Mutant(
        "who has let go of its match is not looked at",
        ADMISSION,
        "            request.waiter.changes_seen = -1\n",
        "            pass\n",
        "only the head of the line keeps pins while it waits",
        test="tests/core/test_oracle.py::test_same_hits_as_the_naive_model",
    ),
    Mutant(
        "no match at the grant",
        ADMISSION,
        "                self.request_leases.refresh_match(request)  # in the step that grants\n",
        "",
        "who waited matches again in the step that grants",
    ),
    Mutant(
        "refused without its match",
        ADMISSION,
        "            if request.state is PINNED:\n"
        "                self.request_leases.match_again(request)\n            elif",
        "            if",
        "who was refused may try again with what is cached",
        scenarios=("second_try",),
    ),
    Mutant(
        "withdrawn without its match",
        ADMISSION,
        "        self.leave(waiter)\n"
        "        if request.state is PINNED:\n"
        "            self.request_leases.match_again(request)\n",
        "        self.leave(waiter)\n",
        "a cancelled allocate leaves PINNED and may be tried again",
        scenarios=("retries",),
    ),
    Mutant(
        "unused grant kept",
        ADMISSION,
        "            self.cache.give(DEVICE, waiter.granted)\n            waiter.granted = array",
        "            waiter.granted = array",
        "a cancelled waiter returns an unused grant",
        scenarios=("retries",),
    ),
    Mutant(
        "fast path ignores the line",
        ADMISSION,
        "would_overtake = bool(self.queue.allocating or self.queue.extending)",
        "would_overtake = False",
        "the fast path checks that nobody waits",
    ),
    Mutant(
        "extension behind allocations",
        ADMISSION,
        "would_overtake, before = bool(self.queue.extending)",
        "would_overtake, before = bool(self.queue.allocating or self.queue.extending)",
        "extend goes before allocate",
        programs=True,
    ),
    Mutant(
        "allocation overtakes an extension",
        ADMISSION,
        "while allocating and not extending:",
        "while allocating:",
        "extend goes before allocate",
        programs=True,
    ),
    Mutant(
        "only waiters hold room and nobody fails",
        ADMISSION,
        "            if self.others_hold_blocks():\n                break\n            if self._ask_blocks",
        "            if waiter.num_units:\n                break\n            if self._ask_blocks",
        "when only waiters hold room the youngest extend fails",
    ),
    Mutant(
        "oldest extension fails",
        ADMISSION,
        "youngest = extending.pop()",
        "youngest = extending.pop(0)",
        "the youngest extend is the one to fail",
        scenarios=("growing",),
    ),
    Mutant(
        "requeued at the end",
        WAITING,
        "        insort(allocating, waiter, key=_ticket)",
        "        allocating.append(waiter)",
        "who had to let go of everything gets its old place back",
        scenarios=("retries",),
    ),
    Mutant(
        "quarantine fails nobody",
        ADMISSION,
        "        if capacity < self._promised:",
        "        if False:",
        "room lost to quarantine fails who can no longer fit",
        scenarios=("second_try",),
    ),
    Mutant(
        "what can never fit waits",
        ADMISSION,
        "if needed > self.capacity else None",
        "if needed > self.capacity + 1 else None",
        "no hang: what can never fit is refused",
        test="tests/core/test_leases.py::test_what_can_never_fit_says_so",
    ),
    Mutant(
        "room taken in part",
        ADMISSION,
        "                raise OutOfBlocks(missing, 0 if would_overtake",
        "                self.cache.take(DEVICE, min(missing, self.num_available))\n"
        "                raise OutOfBlocks(missing, 0 if would_overtake",
        "all or nothing: refusing changes no count",
    ),
    Mutant(
        "host lease ends at allocation",
        ADMISSION,
        "        self.request_leases.start_tables(request, num_units, self.cache.take(DEVICE, missing))\n",
        "        self.request_leases.start_tables(request, num_units, self.cache.take(DEVICE, missing))\n"
        "        self.request_leases.end_host_lease(request)\n",
        "a hit that was matched is there to be loaded (I1)",
    ),
)

_GRANT = """\
                    waiter.granted = self.cache.take(DEVICE, self.num_missing(request, waiter.num_units))
"""
_MORE = """\
                waiter.granted = self.cache.take(DEVICE, missing)
"""

_WAKING = (
    Mutant(
        "no wake-up with a grant",
        ADMISSION,
        f"{_GRANT}                    allocating.pop(0)\n                    over.append(waiter)\n",
        f"{_GRANT}                    allocating.pop(0)\n",
        "no hang: whoever is granted room is woken",
    ),
    Mutant(
        "woken before the grant is there",
        ADMISSION,
        _GRANT,
        f"                    waiter.wake()\n{_GRANT}",
        "the grant is in the waiter before anybody is woken",
        also=(Patch(ADMISSION, _MORE, f"                waiter.wake()\n{_MORE}"),),
        test="tests/core/test_wait_queue.py::test_the_grant_is_there_before_anybody_is_woken",
    ),
    Mutant(
        "no wake-up with a failure",
        ADMISSION,
        "                        waiter.error = OutOfBlocks(needed, capacity, retryable=False)\n"
        "                        over.append(waiter)\n",
        "                        waiter.error = OutOfBlocks(needed, capacity, retryable=False)\n",
        "no hang: whoever can no longer fit is woken",
    ),
    Mutant(
        "a store that arrived wrong takes its source away",
        "aoffload._kernel.jobs",
        "is_bad = outcome is CORRUPT and plan.direction is LOAD and",
        "is_bad = outcome is CORRUPT and",
        "what requests read stays theirs, however a copy of it ends",
        test="tests/core/test_transfers.py::test_a_store_that_arrived_wrong_harms_nobody_who_reads_its_source",
    ),
    Mutant(
        "no pump after a release",
        "aoffload._kernel.ledger",
        "            self.end_call(self.jobs.end_claims(settled) if settled else ())\n",
        "            if settled:\n                self.end_call(self.jobs.end_claims(settled))\n",
        "everything that changes room serves the line",
    ),
    Mutant(
        "head keeps what nobody finds any more",
        ADMISSION,
        "if device.pool.num_free == before and not self._ask_blocks():",
        "if not self._ask_blocks():",
        "who is first is never kept waiting by its own pins",
        test="tests/core/test_wait_queue.py::test_who_is_first_lets_go_of_what_nobody_finds_any_more",
    ),
    Mutant(
        "no pump after the head is cancelled",
        "aoffload._kernel.ledger",
        "        self.admission.withdraw(waiter)\n        self.end_call()\n",
        "        self.admission.withdraw(waiter)\n",
        "a cancelled waiter's close serves the line",
        scenarios=("retries",),
    ),
    Mutant(
        "no pump after quarantine",
        BASE,
        "        self.end_call(self.jobs.end_claims(self.jobs.settle(completion)))\n",
        "        jobs = self.jobs.settle(completion)\n"
        "        wakes = self.jobs.end_claims(jobs)\n"
        "        if not any(job.job_id in self.jobs.quarantined for job in jobs):\n"
        "            self.end_call()\n"
        "        for wake in wakes:\n"
        "            wake()\n",
        "quarantine serves the line",
    ),
    Mutant(
        "no pump after late proof",
        BASE,
        "        self.end_call(self.jobs.end_claims(self.jobs.settle(completion)))\n",
        "        if jobs := self.jobs.settle(completion):\n            self.end_call(self.jobs.end_claims(jobs))\n",
        "room that comes back serves the line",
        scenarios=("late_room",),
    ),
    Mutant(
        "no pump after a step",
        "aoffload._kernel.ledger",
        "            self.moves.step_ended(step)\n            self.end_call(wakes)\n",
        "            self.moves.step_ended(step)\n            for wake in wakes:\n                wake()\n",
        "the end of a step serves the line",
        scenarios=("overlapping_steps",),
    ),
    Mutant(
        "grant kept over an invalidated match",
        INVALIDATION,
        "[other for other in others if other in tainted or _leases_any(other, wrong)]",
        "[other for other in others if other in tainted]",
        "a table names the blocks it was granted for",
        scenarios=("failed_forwards",),
    ),
    Mutant(
        "lost load tried again",
        "aoffload._kernel.leases",
        "        if request.state is REQUEUED:\n",
        '        if request.reason == "lost load":\n',
        "a failed load is not retried for ever",
        programs=True,
    ),
    Mutant(
        "no pump after a commit",
        "aoffload._kernel.ledger",
        "num_computed_tokens, new_token_ids, checkpoints)\n        self.end_call()\n",
        "num_computed_tokens, new_token_ids, checkpoints)\n        self.moves.report()\n",
        "who is first in line may need less room after a commit",
        programs=True,
    ),
    Mutant(
        "shared load wakes only the first",
        BASE,
        "        self.end_call(self.jobs.end_claims(self.jobs.settle(completion)))\n",
        "        self.end_call(self.jobs.end_claims(self.jobs.settle(completion))[:1])\n",
        "no hang: a load wakes all who wait for it",
        scenarios=("two_tasks",),
    ),
)

_STEPS = (
    Mutant(
        "step holds no blocks",
        "aoffload._kernel.ledger",
        "            if request.num_steps:\n"
        "                self.closing.add(request)\n"
        "            else:\n"
        "                self.request_leases.release_all(request)\n",
        "            self.request_leases.release_all(request)\n",
        "a step holds what it touches",
    ),
    Mutant(
        "first of two steps lets go",
        "aoffload._kernel.ledger",
        "                if request.num_steps:  # another step still touches its blocks\n",
        "                if False:\n",
        "a block is free when request, jobs and every step have let go",
        scenarios=("overlapping_steps",),
    ),
    Mutant(
        "step keeps the blocks",
        "aoffload._kernel.ledger",
        "                    self.closing.discard(request)\n                    self._give_back(request)\n",
        "                    self.closing.discard(request)\n",
        "nothing leaks behind a step",
    ),
    Mutant(
        "request id used twice",
        BASE,
        "            if name in self.live_requests:\n                raise",
        "            if name in self.live_requests and not name:\n                raise",
        "a request id used twice is rejected by name",
        scenarios=("bad_input",),
    ),
    Mutant(
        "illegal move made",
        "aoffload._kernel.moves",
        "            raise _illegal(request, state)\n",
        "            return\n",
        "an illegal move raises",
        test="tests/core/test_lifecycle.py::test_an_illegal_move_raises_and_changes_nothing",
    ),
    Mutant(
        "stores of a finished request not handed out",
        "aoffload._kernel.ledger",
        "return self._commits.offer_last(request) if done and request.epoch == self.cache.epoch else ()",
        "return (self._commits.offer_last(request) if done and request.epoch == self.cache.epoch else ()) and ()",
        "what was planned is launched or discarded",
    ),
)

WAIT_QUEUE_MUTANTS: tuple[Mutant, ...] = _LINE + _WAKING + _STEPS
