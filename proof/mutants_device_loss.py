"""Planted defects of the handling of a lost device, and of an opening that is given up."""

from __future__ import annotations

from .planting import Mutant

__all__ = ["DEVICE_LOSS_MUTANTS"]

OPENING, SESSION, COPIES = "aoffload._runtime.runtime", "aoffload._runtime.session", "aoffload._transfer.copy_queue"

DEVICE_LOSS_MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "device not asked when a copy is in doubt",
        COPIES,
        "                self._check_device()\n",
        "                pass\n",
        "a lost device turns the cache off",
        test="tests/shell/test_device_loss.py::test_the_cache_is_off_as_soon_as_a_copy_is_in_doubt",
    ),
    Mutant(
        "final refusal taken for any other",
        COPIES,
        "                    if isinstance(error, DeviceGone):\n                        self.turn_off(str(error))\n",
        "",
        "a lost device is asked nothing any more",
        test="tests/shell/test_device_loss.py::test_a_load_that_is_refused_for_good_turns_the_cache_off",
    ),
    Mutant(
        "cache turned off in silence",
        COPIES,
        "            self._report(CacheTurnedOff(reason))\n",
        "",
        "a lost device turns the cache off, which is told once",
        scenarios=("lost_device",),
    ),
    Mutant(
        "cache that is off asks for fences",
        SESSION,
        "        if not self.worker.copies.is_accepting:\n            return None\n        try:\n",
        "        try:\n",
        "a lost device is asked nothing any more",
        test="tests/shell/test_device_loss.py::test_a_load_that_is_refused_for_good_turns_the_cache_off",
    ),
    Mutant(
        "abandoned thread leaves its transport open",
        OPENING,
        "                self.close(timeout_s)\n\n        try:\n",
        "                pass\n\n        try:\n",
        "who gives up opening leaves nothing open",
        test="tests/shell/test_opening.py::test_a_task_that_is_cancelled_natively_while_it_opens",
    ),
    Mutant(
        "transport opened in vain stays open",
        OPENING,
        "                self.close(timeout_s)\n            if isinstance",
        "                pass\n            if isinstance",
        "who gives up opening leaves nothing open",
        test="tests/shell/test_opening.py::test_a_task_that_is_cancelled_natively_when_its_thread_is_through",
    ),
)
