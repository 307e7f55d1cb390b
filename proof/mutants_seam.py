"""Planted defects of the seam between the kernel and its extensions."""

from __future__ import annotations

from .planting import Mutant

__all__ = ["SEAM_MUTANTS"]

HOOKS, LEDGER, COMMITS = "aoffload._kernel.hooks", "aoffload._kernel.ledger", "aoffload._kernel.commits"
TESTS = "tests/core/test_extensions.py::test_"

SEAM_MUTANTS = (
    Mutant(
        "error of a hook breaks the change off",
        HOOKS,
        "            if self._name in MAY_RAISE:\n                raise\n",
        "            raise\n",
        "a change is completed, whatever a program's extension does in the middle of it",
        test=f"{TESTS}an_error_in_a_hook_names_it_and_harms_nobody",
    ),
    Mutant(
        "error of a hook is never raised",
        HOOKS,
        "            if hooks.error is None:\n",
        "            if hooks.error is not None:\n",
        "a mistake is not silent",
        test=f"{TESTS}an_error_in_a_hook_names_it_and_harms_nobody",
    ),
    Mutant(
        "verb of a ledger called in a hook",
        HOOKS,
        "        if self.calling:\n            raise",
        "        if self.calling is None:\n            raise",
        "no call begins in the middle of another",
        test=f"{TESTS}an_error_in_a_hook_names_it_and_harms_nobody",
    ),
    Mutant(
        "answer of a hook is taken as it is",
        HOOKS,
        "            if self._is_wrong(answer):\n",
        "            if False:\n",
        "an answer of another type is an error of the extension",
        test=f"{TESTS}an_answer_of_the_wrong_type_is_an_error_of_the_extension",
    ),
    Mutant(
        "request that nobody got stays live",
        LEDGER,
        '            self.release(request, "error: ExtensionError")  # nobody gets the request\n',
        "            self._fail()\n",
        "a request that was not handed out is over",
        test=f"{TESTS}a_request_that_was_not_handed_out_is_over",
    ),
    Mutant(
        "last extension decides what is stored",
        COMMITS,
        "            stop = min(stop, ask(request))\n",
        "            stop = ask(request)\n",
        "each extension may lower what is stored, and none may raise it",
        test=f"{TESTS}the_lowest_store_stop_counts",
    ),
)
