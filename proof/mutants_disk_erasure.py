"""Planted defects of erasure on the disk: after a failed forward, and in a reset."""

from __future__ import annotations

from .planting import Mutant, Patch

__all__ = ["DISK_ERASURE_MUTANTS"]

TIERS, WORK, SLOTS = "aoffload._tiers.disk.rules", "aoffload._tiers.disk.loop", "aoffload._tiers.disk.slots"
FREED = "tests/core/test_disk_stores.py::test_slots_that_were_freed_may_hold_what_is_taken_back"
RUNTIME, PROGRAMS = "tests/shell/test_disk_runtime.py", "tests/proof/test_disk_programs.py"
PROMISE = "no restart finds what a failed forward wrote"


def _mutant(name: str, module: str, old: str, new: str, promise: str, test: str = "", **options: object) -> Mutant:
    return Mutant(f"disk proof: {name}", module, old, new, promise, test=test, **options)  # type: ignore[arg-type]


DISK_ERASURE_MUTANTS: tuple[Mutant, ...] = (
    _mutant(
        "given up, stored all the same",
        SLOTS,
        "        self._sums.forget(to)\n        if is_given_up():\n",
        "        self._sums.forget(to)\n        if False:\n",
        "a store that was given up does not label what was written over its source",
        "tests/transfer/test_disk_slots.py::test_a_store_that_is_given_up_meanwhile_records_nothing",
        also=(
            Patch(SLOTS, "while not is_given_up():", "while done < len(to):"),
            Patch(
                SLOTS,
                "        sums, encoded = records()\n        if is_given_up():\n",
                "        sums, encoded = records()\n        if False:\n",
            ),
        ),
    ),
    _mutant(
        "a late load forgets another's slot",
        SLOTS,
        "for at in corrupt if self._sums.is_still(source[at], expected[at])]",
        "for at in corrupt]",
        "a load that was given up harms nobody",
        "tests/transfer/test_disk_slots.py::test_a_load_that_is_late_forgets_nothing_of_others",
    ),
    _mutant(
        "slots that were freed keep what was wrong",
        TIERS,
        "        self.forgotten.extend(sorted(self.used))\n",
        "",
        PROMISE,
        FREED,
    ),
    _mutant(
        "the end of a quarantine erases nothing",
        TIERS,
        "        TierBlocks.end_quarantine(self, block_ids)\n        self.forgotten.extend(block_ids)\n",
        "        TierBlocks.end_quarantine(self, block_ids)\n",
        PROMISE,
        FREED,
    ),
    _mutant(
        "a reset of the disk keeps what was freed",
        TIERS,
        "        TierBlocks.count_reset(self)\n        self.used.clear()  # no restart finds what these held\n",
        "        TierBlocks.count_reset(self)\n",
        "nothing is erased that no restart could find",
        FREED,
    ),
    _mutant(
        "what is taken back goes on being stored",
        WORK,
        "        self.worker.copies.invalidate_sources(plan.job_id for plan in wrong)\n",
        "",
        PROMISE,
        f"{RUNTIME}::test_what_is_being_stored_while_it_is_taken_back_is_found_by_nobody",
    ),
    _mutant(
        "a store that has just ended is not erased",
        WORK,
        "*self.ledger.disk.take_forgotten(), *on_their_way]",
        "*self.ledger.disk.take_forgotten()]",
        PROMISE,
        f"{PROGRAMS}::test_what_went_wrong_once_goes_right",
    ),
    _mutant(
        "given up in the middle, and kept",
        SLOTS,
        "        if done and is_given_up():  # meanwhile",
        "        if False:  # meanwhile",
        "a store that was given up leaves nothing",
        "tests/transfer/test_disk_transport.py::test_what_is_given_up_while_it_is_recorded_is_taken_back",
    ),
    _mutant(
        "a reset that the disk never hears of",
        "aoffload._runtime.runtime",
        "            await work.reset(tier, min(seconds, self.config.transfer_timeout_s))\n",
        "            pass\n",
        "no restart finds what was there before a reset",
        scenarios=("reset_with_a_disk",),
    ),
)
