"""Planted defects of the shell's promises to careless and hostile users: abandoned runtimes, other threads, errors that
say what to do, and mistakes that would be silent."""

from __future__ import annotations

from .planting import Mutant

__all__ = ["SHELL_REGRESSION_MUTANTS"]

LIFE, OPENING, RUNTIME = "aoffload._runtime.runtime", "aoffload._runtime.runtime", "aoffload._runtime.runtime"
SESSION_LIFE, BLOCK, REQUEST = "aoffload._runtime.session", "aoffload._runtime.request", "aoffload._runtime.request"
STEPS, PINS, LIFECYCLE = "aoffload._runtime.steps", "aoffload._runtime.handles", "aoffload._kernel.states"
CLAIMS = "aoffload._transfer.region"
PREEMPTION = "aoffload._extensions.preemption"

_ABANDONED = "a runtime that nobody leaves ends its threads and frees its directory"
_THREADS = "a call in another thread is refused, or right"
_SAYS = "an error says what to do instead"
_SILENT = "a mistake is not silent"
_PREEMPT = "preempting what has ended harms nobody"
_TESTS = "tests/shell/test_abandoned_runtimes.py::test_"
_ELSEWHERE = "tests/shell/test_other_threads.py::test_"
_ERRORS = "tests/shell/test_error_messages.py::test_"

_RUNTIMES = (
    Mutant(
        "abandoned runtime left open",
        LIFE,
        "        if opening is not None and opening.is_open and not self._session.is_in_fork:\n",
        "        if False:\n",
        _ABANDONED,
        test=f"{_TESTS}an_abandoned_runtime_ends_its_threads_and_frees_its_directory",
    ),
    Mutant(
        "abandoned runtime whose threads go on",
        OPENING,
        "            _thread.start_new_thread(self.close, (timeout_s,))\n",
        "            pass\n",
        _ABANDONED,
        test=f"{_TESTS}a_runtime_is_abandoned_while_its_loop_goes_on",
    ),
    Mutant(
        "task of an abandoned runtime goes on",
        OPENING,
        "        session.worker.call_soon(session.worker.end)\n",
        "",
        _ABANDONED,
        test=f"{_TESTS}a_runtime_is_abandoned_while_its_loop_goes_on",
    ),
    Mutant(
        "clock of a ledger keeps its runtime alive",
        LIFE,
        "lambda: sessions[0].now())",
        "lambda: self._session.now())",
        _ABANDONED,
        test=f"{_TESTS}an_abandoned_runtime_over_an_engines_blocks_is_collected",
    ),
    Mutant(
        "runtime collected under its request",
        RUNTIME,
        "        request._runtime = self\n",
        "",
        "a request keeps its runtime open",
        test=f"{_TESTS}a_runtime_is_abandoned_while_its_loop_goes_on",
    ),
    Mutant(
        "runtime collected under its pin",
        PINS,
        "        return PinScope(self._session, self._runtime, prefix",
        "        return PinScope(self._session, None, prefix",
        "a pin keeps its runtime open",
        test=f"{_TESTS}a_handle_keeps_its_runtime_open_and_so_does_a_pin",
    ),
    Mutant(
        "runtime that waits in another loop",
        LIFE,
        "        if self.env.running_loop() is not session.loop:\n",
        "        if False:\n",
        _ABANDONED,
        test=f"{_TESTS}a_runtime_whose_loop_was_closed_is_left_without_a_wait",
    ),
    Mutant(
        "request entered in another loop",
        BLOCK,
        "        session.check_loop()\n",
        "",
        "nothing waits in a loop where nobody wakes it",
        test=f"{_TESTS}a_runtime_whose_loop_was_closed_is_left_without_a_wait",
    ),
    Mutant(
        "runtime left in another thread",
        LIFE,
        "        if session.is_elsewhere:\n",
        "        if False:\n",
        _THREADS,
        test=f"{_TESTS}a_runtime_is_not_left_in_another_thread",
    ),
    Mutant(
        "forked child that closes the runtime",
        LIFE,
        "        if session.is_in_fork:\n            return\n",
        "",
        "a forked child harms nobody",
        test=f"{_TESTS}a_forked_child_leaves_all_blocks_and_harms_nobody",
    ),
    Mutant(
        "forked child that ends steps and pins",
        SESSION_LIFE,
        "        if os.getpid() == self._process_id:\n            self.call_in_loop(function)\n",
        "        self.call_in_loop(function)\n",
        "a forked child harms nobody",
        test=f"{_TESTS}a_forked_child_leaves_all_blocks_and_harms_nobody",
    ),
)

_OTHER_THREADS = (
    Mutant(
        "looks at a ledger that changes in another thread",
        SESSION_LIFE,
        "        if self._process_id and not self.is_over and not self.is_here:\n",
        "        if self.is_in_fork:\n",
        _THREADS,
        test=f"{_ELSEWHERE}every_public_call_in_another_thread_is_refused_or_right",
    ),
    Mutant(
        "closed runtime answers one thread only",
        SESSION_LIFE,
        "        if self._process_id and not self.is_over and not",
        "        if self._process_id and not",
        _THREADS,
        test=f"{_ELSEWHERE}before_opening_and_after_closing_every_thread_may_look",
    ),
    Mutant(
        "pin ended in another thread",
        PINS,
        "            self._session.leave_in_loop(lambda: self._session.ledger.pins.release(pin))\n",
        "            if not self._session.is_elsewhere:\n                self._session.ledger.pins.release(pin)\n",
        _THREADS,
        test=f"{_ELSEWHERE}a_block_that_is_left_in_another_thread_ends_in_the_loop",
    ),
    Mutant(
        "request released in another thread",
        BLOCK,
        "        if not self._session.is_here:\n",
        "        if False:\n",
        _THREADS,
        test=f"{_ELSEWHERE}a_request_that_is_left_in_another_thread_ends_in_the_loop",
    ),
    Mutant(
        "forward told to call the loop",
        SESSION_LIFE,
        "        if get_ident() in self.step_threads:\n",
        "        if False:\n",
        _SAYS,
        test=f"{_ELSEWHERE}a_forward_that_reads_block_ids_is_told_to_read_them_before",
    ),
)

_PREEMPTING = (
    Mutant(
        "preempting a request that has ended raises",
        REQUEST,
        "        if not self._session.ledger.preemption.may_preempt(record):\n",
        "        if record.num_steps < 0:\n",
        _PREEMPT,
        test="tests/test_snippets.py::test_each_block_of_a_page_runs_as_it_stands",
    ),
    Mutant(
        "preempting a request that waits for room raises",
        PREEMPTION,
        "        return has_blocks and not waits and not request.is_over\n",
        "        return has_blocks and not request.is_over\n",
        _PREEMPT,
        test="tests/shell/test_preempting.py::test_a_request_that_waits_for_more_blocks_keeps_those_that_it_has",
    ),
)

_ERRORS_SAY = (
    Mutant(
        "refusal that names no call",
        LIFECYCLE,
        "        advice = instead or _instead(call, entity.state, states)\n",
        "        advice = instead\n",
        _SAYS,
        test=f"{_ERRORS}a_call_that_comes_too_early_names_the_one_that_is_missing",
    ),
    Mutant(
        "refusal that advises a preemption",
        LIFECYCLE,
        "            if new is not _R.PREEMPTED and new not in reached:\n",
        "            if new not in reached:\n",
        _SAYS,
        test=f"{_ERRORS}a_call_that_comes_too_early_names_the_one_that_is_missing",
    ),
    Mutant(
        "commit of a step that names no request",
        STEPS,
        'raise type(error)(error.argument, f"{error.problem} ({record})") from error',
        "raise",
        _SAYS,
        test=f"{_ERRORS}a_refused_commit_of_a_step_names_the_request",
    ),
    Mutant(
        "host pool of more blocks than there can be",
        "aoffload._config.config",
        "        if num_blocks > MAX_BLOCKS:\n",
        "        if num_blocks > 2 * MAX_BLOCKS**2:\n",
        _SAYS,
        test=f"{_ERRORS}a_host_pool_of_an_impossible_size_says_what_is_possible",
    ),
    Mutant(
        "match that hides the disk",
        "aoffload._kernel.plans",
        'if self.num_lower_tokens else ""',
        'if self.num_lower_tokens < 0 else ""',
        _SAYS,
        test=f"{_ERRORS}a_match_shows_what_only_the_disk_has",
    ),
)

_NOT_SILENT = (
    Mutant(
        "block table of a request without blocks",
        BLOCK,
        "        require(record, call, *WITH_TABLES)\n",
        "        pass\n",
        _SILENT,
        test=f"{_ERRORS}a_call_that_comes_too_early_names_the_one_that_is_missing",
    ),
    Mutant(
        "negative deadline taken without a word",
        RUNTIME,
        "        if seconds is not None and seconds < 0:",
        "        if seconds is not None and seconds < -1e300:",
        _SILENT,
        test="tests/shell/test_cancellation.py::test_a_deadline_that_is_over_on_entry",
    ),
    Mutant(
        "odd part of a prompt taken without a word",
        REQUEST,
        "        if num_tokens % layout.unit_tokens:\n",
        "        if num_tokens < 0:\n",
        _SILENT,
        test=f"{_ERRORS}a_part_of_a_prompt_that_ends_inside_of_a_block_is_a_warning",
    ),
    Mutant(
        "pin that nobody enters",
        PINS,
        "            if not self._was_entered and self._session.is_open:\n",
        "            if False:\n",
        _SILENT,
        test=f"{_ERRORS}a_pin_and_a_step_that_nobody_enters_are_warnings",
    ),
    Mutant(
        "step that nobody enters",
        STEPS,
        "            if not self._was_entered and self._session.is_open:\n",
        "            if False:\n",
        _SILENT,
        test=f"{_ERRORS}a_pin_and_a_step_that_nobody_enters_are_warnings",
    ),
    Mutant(
        "abandoned step holds its blocks for ever",
        STEPS,
        "            self._session.call_later(partial(_end, self._session, step))  # before the warning, "
        "which may raise\n",
        "",
        "a step that is thrown away ends",
        test=f"{_ERRORS}a_step_that_is_abandoned_ends_in_the_loop",
    ),
    Mutant(
        "two runtimes over one tensor",
        CLAIMS,
        "            if any(one.device == other.device and share_memory(one, other) for one in regions):\n",
        "            if False:\n",
        _SILENT,
        test=f"{_ERRORS}two_runtimes_over_one_tensor_are_refused",
    ),
    Mutant(
        "tensor of a closed runtime stays claimed",
        OPENING,
        "            if self.session.transport.close(timeout_s):\n                unclaim(self._regions)\n",
        "            self.session.transport.close(timeout_s)\n",
        "a tensor is free once its runtime has closed",
        test=f"{_ERRORS}two_runtimes_over_one_tensor_are_refused",
    ),
    Mutant(
        "option that nobody reads",
        "aoffload._common.commands",
        "        if is_given and getattr(found, other) == parser.get_default(other):\n",
        "        if False:\n",
        _SILENT,
        test=f"{_ERRORS}an_option_without_the_one_that_it_is_about_is_refused",
    ),
)

SHELL_REGRESSION_MUTANTS = _RUNTIMES + _OTHER_THREADS + _PREEMPTING + _ERRORS_SAY + _NOT_SILENT
