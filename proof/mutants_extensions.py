"""Planted defects of the seam between the kernel and its extensions."""

from __future__ import annotations

from .planting import Mutant

__all__ = ["EXTENSION_MUTANTS"]

BASE, HOOKS, LEDGER, COMMITS = (f"aoffload._kernel.{package}" for package in ("base", "hooks", "ledger", "commits"))
TESTS = "tests/core/test_extensions.py::test_"

EXTENSION_MUTANTS = (
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
        "        elif self.error is None:\n",
        "        elif self.error is not None:\n",
        "a mistake is not silent",
        test=f"{TESTS}an_error_in_a_hook_names_it_and_harms_nobody",
    ),
    Mutant(
        "eviction order that has failed is still used",
        HOOKS,
        "        self._order = None\n        self._hooks.failed",
        "        self._hooks.failed",
        "a mistake of an eviction order harms nobody",
        test=f"{TESTS}an_eviction_order_that_fails_is_not_used_any_more",
    ),
    Mutant(
        "answer of an eviction order believed",
        HOOKS,
        "if isinstance(found, Part) and found in self._parts:",
        "if found is not None:",
        "a mistake of an eviction order harms nobody",
        test=f"{TESTS}an_eviction_order_that_fails_is_not_used_any_more",
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
        "runtime raises the errors of extensions",
        "aoffload._runtime.session",
        "        self.ledger.report_errors()\n",
        "",
        "an extension that fails harms no task",
        test="tests/shell/test_program_extensions.py::test_no_call_of_a_runtime_raises_the_error_of_an_extension",
    ),
    Mutant(
        "waiter that nobody got stays in the queue",
        LEDGER,
        "            self.admission.withdraw(waiter)\n",
        "",
        "a waiter that was not handed out has left the queue",
        test=f"{TESTS}a_waiter_that_was_not_handed_out_has_left_the_queue",
    ),
    Mutant(
        "undone commits leave the error of a hook",
        "aoffload._kernel.commits",
        "            self.hooks.take_error()  # of a hook that was asked about a commit that is undone\n",
        "",
        "an error is that of the call that it belongs to",
        test=f"{TESTS}commits_that_are_undone_leave_no_error",
    ),
    Mutant(
        "refused request counts as admitted",
        LEDGER,
        "        for ask in reversed(self.hooks.ask_admit):",
        "        for ask in self.hooks.ask_admit:",
        "a refused call changes nothing",
        test=f"{TESTS}a_request_that_an_extension_refuses_is_not_counted",
    ),
    Mutant(
        "answer of a hook is taken as it is",
        HOOKS,
        "            if not self._is_wrong(answer):\n",
        "            if True:\n",
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
        "copies of a failed call stay queued",
        BASE,
        "            if job.job_id in self.jobs.unsettled and job.state is JobState.QUEUED:\n",
        "            if False:\n",
        "a call that has raised leaves no copy that nobody launches",
        test=f"{TESTS}an_error_in_a_hook_names_it_and_harms_nobody",
    ),
    Mutant(
        "readers of a failed invalidation are lost",
        BASE,
        "            error.readers = readers\n",
        "            del readers\n",
        "a request that may have read wrong KV is aborted, whatever a hook does",
        test=f"{TESTS}an_invalidation_is_complete_whatever_a_hook_answers",
    ),
    Mutant(
        "job that a hook names is discarded in any state",
        BASE,
        "                if self.jobs.unsettled.get(job.job_id) is job and job.state is JobState.QUEUED:\n",
        "                if job is not None:\n",
        "only a queued job is discarded",
        test=f"{TESTS}jobs_that_are_not_queued_are_not_discarded",
    ),
    Mutant(
        "error of next_lapse waits for another call",
        BASE,
        "        if (error := self.hooks.take_error()) is not None:  # nothing",
        "        if (error := None) is not None:  # nothing",
        "a call gets no error of another one",
        test=f"{TESTS}an_error_of_next_lapse_is_its_own",
    ),
    Mutant(
        "misspelt hook is accepted",
        "aoffload._kernel.extension",
        "        if name not in HOOKS:\n",
        "        if name is None:\n",
        "a hook that would never be called is refused",
        test=f"{TESTS}a_misspelt_and_an_async_hook_are_refused",
    ),
    Mutant(
        "extension in two ledgers",
        "aoffload._kernel.extension",
        "    if extension.is_attached:\n",
        "    if extension is None:\n",
        "the state of an extension is about one ledger",
        test=f"{TESTS}an_extension_belongs_to_one_ledger",
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
