"""Planted defects that need certain sequences of calls, which programs make and scenarios do not: fixes taken out."""

from __future__ import annotations

from .planting import Mutant, Patch

__all__ = ["CALL_SEQUENCE_MUTANTS"]

ADMISSION, PINS, LOADS = "aoffload._kernel.waiting", "aoffload._kernel.leases", "aoffload._kernel.loads"
INVALIDATION = "aoffload._extensions.invalidation"
COPIES = "tests/core/test_invalidated_copies.py"

OWN_RUNS_ONLY = """\
        own = published_by(self.cache, request, start)
        for component, run in own:
            for tier in self.cache.tiers:
                self.cache.withdraw_part(run.part(tier.tier, component.number))
        heads = {run for _, run in own}
        runs = [run for run in self.cache.index.runs.values() if not heads.isdisjoint(run.path())]
        for run in runs:
            if run not in heads:
                for part in run.parts:
                    self.cache.withdraw_part(part)
        for run in runs:
            self.cache.tidy(run)
"""
"""Withdraws the runs after those that `request` has published, and of the latter only the components that it
published."""

LOOKED_AT_FIRST = """\
        missing, gained = self.request_leases.without_islands(request, num_units)
        if missing > self.num_available + gained:
            return False
        self.request_leases.match_again(request, islands=False)
        return self.num_missing(request, num_units) <= self.num_available
"""
MATCHED_TO_LOOK = """\
        self.request_leases.match_again(request, islands=False)
        if self.num_missing(request, num_units) <= self.num_available:
            return True
        self.request_leases.match_again(request)
        return False
"""

LINE_LEFT = """\
                allocating.pop(0)
                needed = self.num_needed(request, waiter.num_units)
                waiter.error = OutOfBlocks(needed, capacity, retryable=False)
                over.append(waiter)
"""
WAITS_ON = """\
                self.request_leases.match_again(request)
                break
"""

CALL_SEQUENCE_MUTANTS = (
    Mutant(
        "matched again to see whether there is room",
        ADMISSION,
        LOOKED_AT_FIRST,
        MATCHED_TO_LOOK,
        "an allocation that is refused changes nothing",
        programs=True,
    ),
    Mutant(
        "matched again under its block tables",
        ADMISSION,
        "            error = self._never_fits(request, num_units)\n            if error is None:\n",
        "            self.request_leases.match_again(request)\n"
        "            error = self._never_fits(request, num_units)\n            if error is None:\n",
        "an extension that is refused changes nothing",
        also=(Patch(PINS, '        assert request.may_match_again, "matched again under its block tables"\n', ""),),
        test="tests/core/test_components.py::test_a_refused_extension_keeps_what_the_load_would_adopt",
    ),
    Mutant(
        "copy of an earlier load publishes what was invalidated",
        "aoffload._kernel.cache",
        "        for job in unsettled:\n            brought",
        "        for job in {part.incoming for run in withdrawn for part in run.parts if part.incoming}:\n"
        "            brought",
        "what turns out to be wrong is published by no copy under way",
        test=f"{COPIES}::test_no_copy_under_way_publishes_what_was_invalidated",
    ),
    Mutant(
        "copy of an earlier load publishes after a reset of its tier",
        "aoffload._kernel.cache",
        "if job.plan.destination is tier and job.epoch == self.epoch:",
        "if job in {part.incoming for run in self.index.runs.values() for part in run.parts_in(tier)}:",
        "a reset of a tier reaches every copy to it",
        test=f"{COPIES}::test_no_copy_under_way_publishes_what_was_invalidated",
    ),
    Mutant(
        "another's part of a wrong run left findable",
        INVALIDATION,
        "        self.cache.withdraw_all(wrong, self.jobs.unsettled.values())\n",
        OWN_RUNS_ONLY,
        "what was computed on wrong bytes is a miss, in models of windows alone, too",
        also=(Patch(INVALIDATION, "\n        if component.width\n", "\n"),),
        programs=True,
    ),
    Mutant(
        "only who is pinned matched again",
        ADMISSION,
        "[request for request in requests if request.may_match_again]",
        "[request for request in requests if request.state is PINNED]",
        "a grant that is not accepted yet holds without the hit that it was counted with",
        test="tests/core/test_transfers.py::test_a_grant_after_a_failed_load_is_for_what_is_still_found",
    ),
    Mutant(
        "a fork that has not committed taken for unread",
        INVALIDATION,
        "        tainted = self._taint(wrong, others, sources)\n",
        "        read = [other for other in others if other.num_units or other.has_committed]\n"
        "        tainted = self._taint(wrong, read, sources)\n",
        "whoever has read what a failed forward wrote is told",
        programs=True,
    ),
    Mutant(
        "a pin asked to yield what the first in line matches",
        ADMISSION,
        "            self._forget_match(request)\n"
        "            if device.pool.num_free == before and not self._ask_blocks():\n" + LINE_LEFT,
        "            if self._ask_blocks():\n                continue\n"
        "            self._forget_match(request)\n            if device.pool.num_free == before:\n" + WAITS_ON,
        "pins promise nothing to whom nobody else can make room",
        test="tests/core/test_program_regressions.py::test_who_can_never_fit_hears_so_though_its_hit_made_it_seem_to",
    ),
    Mutant(
        "who can never fit waits",
        ADMISSION,
        LINE_LEFT,
        WAITS_ON,
        "who is first in line and alone gets its room, or hears that there is none",
        test="tests/core/test_program_regressions.py::test_who_can_never_fit_hears_so_though_its_hit_made_it_seem_to",
    ),
    Mutant(
        "a bad entry kept after a reset of the device",
        "aoffload._kernel.jobs",
        "is_bad and job.run.epoch == self.cache.epoch",
        "is_bad and job.epoch == self.cache.epoch",
        "a content failure forgets the bad entry",
        programs=True,
    ),
    Mutant(
        "windows not moved on where a load falls short under a step",
        LOADS,
        "            slide_windows(self.cache, request, after_load=True)\n        if num_missing:",
        "            pass\n        if num_missing:",
        "a table names what its request leases",
        also=(
            Patch(
                LOADS,
                "        return [load.wake]\n",
                "        slide_windows(self.cache, request, after_load=True)\n        return [load.wake]\n",
            ),
        ),
        test="tests/core/test_overlap.py::test_windows_are_moved_on_where_a_load_falls_short_under_a_step",
    ),
    Mutant(
        "blocks under a step taken back with their author",
        INVALIDATION,
        "        shared = read_by(readers, published)\n",
        "        shared = []\n",
        "a block is given to somebody else once every job and step has let go",
        programs=True,
    ),
)
