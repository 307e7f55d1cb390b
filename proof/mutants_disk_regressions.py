"""Planted defects of the disk: failing writes that safety depends on, stores that never come to an end, and forks."""

from __future__ import annotations

from .planting import Mutant

__all__ = ["DISK_REGRESSION_MUTANTS"]

DISK = "aoffload._tiers.disk"
FORGETTING, TABLE, SLOTS = f"{DISK}.plans", f"{DISK}.table", f"{DISK}.slots"
LANES, POSIX = f"{DISK}.lanes", f"{DISK}.files"
ON_DISK, ROOM = "tests/transfer/test_disk_invalidation.py", "tests/transfer/test_disk_space.py"
STORIES = "tests/proof/test_disk_stories.py::test_no_story_in_which_erasures_fail_breaks_a_law"
IDLE = "tests/core/test_disk_stores.py::test_an_idle_ledger_comes_to_rest"

_FOUND = "what was taken back is found by no restart"
_ONE_PROCESS = "one process has a directory, and a child of it has not"
_REST = "an idle runtime leaves its disk alone"

_ERASURES = (
    Mutant(
        "disk: erasure that fails is taken for one that succeeds",
        FORGETTING,
        "        except OSError as error:\n            reason",
        "        except OSError as error:\n            return None\n            reason",
        _FOUND,
        test=STORIES,
    ),
    Mutant(
        "disk: erasure that is cut short is taken for a whole one",
        TABLE,
        "        if self._file.write(offset, [data]) != len(data):\n",
        "        if self._file.write(offset, [data]) < 0:\n",
        _FOUND,
        test=STORIES,
    ),
    Mutant(
        "disk: erasure that is not synced",
        TABLE,
        "            self.erase(slots[at.start], at.stop - at.start)\n        self._file.sync()\n",
        "            self.erase(slots[at.start], at.stop - at.start)\n",
        _FOUND,
        test=f"{ON_DISK}::test_an_erasure_outlives_a_loss_of_power",
    ),
    Mutant(
        "disk: records that cannot be erased are left there",
        FORGETTING,
        "    for empty, is_off in ((raise_generation, False), (drop, True)):\n",
        "    for empty, is_off in ():\n",
        _FOUND,
        test=f"{ON_DISK}::test_what_cannot_be_erased_takes_all_with_it",
    ),
    Mutant(
        "disk: table stays though no generation can be written",
        FORGETTING,
        "((raise_generation, False), (drop, True))",
        "((raise_generation, False),)",
        _FOUND,
        test=f"{ON_DISK}::test_a_disk_that_takes_no_writes_is_emptied_and_used_no_more",
    ),
    Mutant(
        "disk: what a store was to replace is not forgotten",
        LANES,
        "                if plan.direction is Direction.STORE and num_forgets != self._num_forgets:\n",
        "                if False:\n",
        _FOUND,
        test=f"{ON_DISK}::test_what_a_store_under_way_was_to_replace_is_forgotten_with_the_rest",
    ),
    Mutant(
        "disk: record that could not be written is not erased later",
        SLOTS,
        "            self._stale.update(slots)\n",
        "            pass\n",
        _FOUND,
        test=f"{ON_DISK}::test_records_that_could_not_be_written_are_erased_with_the_rest",
    ),
    Mutant(
        "disk: stores go on in a generation that was given up",
        LANES,
        "                self._first_generation = (self.slots.generation - self._num_resets) % GENERATIONS\n",
        "                pass\n",
        "what is stored after the records were dropped is found by a restart",
        test=f"{ON_DISK}::test_what_cannot_be_erased_takes_all_with_it",
    ),
    Mutant(
        "disk: used on though it cannot forget",
        LANES,
        "            if trouble.is_off:\n                self.turn_off(trouble.reason)\n",
        "",
        "a disk that cannot forget is used no more",
        test=f"{ON_DISK}::test_a_disk_on_which_nothing_works_is_used_no_more",
    ),
    Mutant(
        "disk: runtime does not hear that the disk cannot forget",
        "aoffload._tiers.disk.loop",
        "        if trouble.is_off:\n            self._fail(trouble.reason)\n",
        "        if trouble.is_off:\n            return\n",
        "a disk that cannot forget is used no more, and the log says so",
        test="tests/shell/test_disk_runtime.py::test_what_a_failed_forward_wrote_is_found_by_nobody_whatever_fails",
    ),
    Mutant(
        "disk: opened though it takes no writes",
        SLOTS,
        "            table.replace(known)  # a disk that refuses writes could forget nothing: do not open it\n",
        "",
        "a disk that takes no writes is not opened",
        test=f"{ON_DISK}::test_a_disk_on_which_nothing_works_is_used_no_more",
    ),
)

_FORKS = (
    Mutant(
        "disk: a forked child keeps the directory",
        POSIX,
        ", after_in_child=self._let_go)",
        ")",
        _ONE_PROCESS,
        test=f"{ROOM}::test_a_fork_does_not_keep_the_directory",
    ),
    Mutant(
        "disk: a child forked by another thread keeps the directory",
        POSIX,
        "            if num_forks == self._num_forks:\n",
        "            if True:\n",
        _ONE_PROCESS,
        test=f"{ROOM}::test_a_fork_while_the_directory_is_locked_does_not_keep_it",
    ),
    Mutant(
        "disk: a forked child gives back what is its own",
        POSIX,
        "        if lock in self._held:\n            self._held.remove(lock)\n",
        "        if True:\n            self._held.discard(lock)\n",
        _ONE_PROCESS,
        test=f"{ROOM}::test_a_fork_closes_nothing_of_its_own",
    ),
)

_IDLE = (
    Mutant(
        "disk: what was evicted meanwhile is stored again",
        "aoffload._tiers.lower.rules",
        "            if left_of(most, jobs) < least:\n                return jobs\n",
        "            if left_of(most, jobs) < least:\n                self._came_to = ()\n"
        "                return jobs\n",
        _REST,
        test=IDLE,
    ),
    Mutant(
        "disk: a store evicts what its own turn has stored",
        "aoffload._tiers.lower.rules",
        "            self._turns = {run: turn for run, turn in self._turns.items() if turn and run in runs}\n",
        "            pass\n",
        _REST,
        test=IDLE,
    ),
    Mutant(
        "disk: turns that change their order",
        "aoffload._tiers.lower.rules",
        "        for run in list(self._turns):\n",
        "        for run in [run for run in self.watermark.about_to_lose(wanted) if run in self._turns]:\n",
        _REST,
        test="tests/core/test_program_regressions.py::test_turns_of_stores_keep_the_order_of_the_scan",
    ),
)

DISK_REGRESSION_MUTANTS = _ERASURES + _FORKS + _IDLE
