"""Planted defects of the fetch gate, and of a remote store in a runtime."""

from __future__ import annotations

from .planting import Mutant

__all__ = ["REMOTE_SHELL_MUTANTS"]

GATE, RATES, RATE = "aoffload._runtime.costs", "aoffload._transfer.rates", "aoffload._tiers.write_rate"
WORK, FETCHING, TABLES = (f"aoffload.{name}" for name in ("_tiers.remote.loop", "_tiers.fetch.loop", "_config.sources"))
GATE_TESTS, GATING, TESTS = (
    "tests/test_fetch_gate.py",
    "tests/shell/test_fetch_gating.py",
    "tests/shell/test_remote_runtime.py",
)
SOURCES = "tests/test_config_sources.py"


ALONE = "tests/shell/test_tier_breakers.py::test_a_store_that_fails_is_one_line_in_the_log_and_so_is_its_end"


def _mutant(name: str, module: str, old: str, new: str, promise: str, test: str) -> Mutant:
    return Mutant(f"remote runtime: {name}", module, old, new, promise, test=test)


REMOTE_SHELL_MUTANTS: tuple[Mutant, ...] = (
    _mutant(
        "what is computed sooner is fetched",
        GATE,
        "    return compute_s if fetch_s < WORTH * compute_s else 0.0\n",
        "    return compute_s\n",
        "a fetch is begun only where it beats computing",
        f"{GATE_TESTS}::test_what_is_computed_sooner_is_not_fetched",
    ),
    _mutant(
        "a fetch is waited for longer than computing takes",
        GATE,
        "    compute_s = most_s if tokens_per_s is None else min(most_s, num_tokens / tokens_per_s)\n",
        "    compute_s = most_s\n",
        "a tier that hangs costs a request no more than computing",
        f"{GATING}::test_a_disk_that_hangs_is_waited_for_as_long_as_computing_takes",
    ),
    _mutant(
        "what decodes is a slow prefill",
        GATE,
        "        if step is None or num_tokens < LEAST_TOKENS:\n",
        "        if step is None:\n",
        "the speed of computing is that of prompts",
        f"{GATE_TESTS}::test_the_speed_of_an_engine",
    ),
    _mutant(
        "each request of a step has its own time",
        GATE,
        "        if step.is_counted:\n",
        "        if False:\n",
        "the tokens of all requests of a step count over its time, once",
        f"{GATE_TESTS}::test_the_speed_of_an_engine",
    ),
    _mutant(
        "a hang is not slow",
        "aoffload._transfer.copy_queue",
        "        return (now - rate.since_s) * all_bytes / in_flight if in_flight else 0.0\n",
        "        return 0.0\n",
        "while one request waits for a tier that hangs, others do not begin to",
        f"{GATING}::test_what_hangs_keeps_the_next_request_no_time",
    ),
    _mutant(
        "slow for ever",
        RATES,
        "        return now - self.ended_s >= FRESH_S\n",
        "        return self._seconds <= 0\n",
        "a tier that was slow once is tried again",
        f"{GATING}::test_a_slow_disk_is_not_fetched_from",
    ),
    _mutant(
        "the gate is not asked",
        FETCHING,
        "        if not bound_s:\n            self._declined(stop, fetch_s)\n            return None\n",
        "        bound_s = bound_s or 1e6\n",
        "a fetch is begun only where it beats computing",
        f"{GATING}::test_a_slow_disk_is_not_fetched_from",
    ),
    _mutant(
        "what the request may not hit is fetched",
        FETCHING,
        "first_tokens(self.prefix, min(limit_tokens, self.prefix.num_tokens - 1))",
        "first_tokens(self.prefix, self.prefix.num_tokens - 1)",
        "a request that wants less fetches less",
        f"{TESTS}::test_a_request_that_wants_less_fetches_less",
    ),
    _mutant(
        "cells are counted from the hit",
        FETCHING,
        "labels[num_cells - 1].stop * self.request",
        "num_cells * remote.ledger.remote.cell_units * self.request",
        "what is behind a local hit is fetched from its own place",
        f"{TESTS}::test_whole_cells_hit",
    ),
    _mutant(
        "a question without an end",
        WORK,
        "        question.stop_timer = self.env.call_at(",
        "        question.stop_timer = (lambda *_: lambda: None)(",
        "a store that does not answer costs a request `ask_timeout_s`",
        f"{TESTS}::test_a_question_that_hangs_is_waited_for_no_longer_than_said",
    ),
    _mutant(
        "a store that fails is asked on",
        WORK,
        "        is_off = not self.is_on or not copies.is_accepting or self.remote.refuses(Direction.LOAD)\n",
        "        is_off = not self.is_on\n",
        "a store that fails is left alone",
        f"{TESTS}::test_a_store_that_fails_is_left_alone",
    ),
    _mutant(
        "what is wrong stays in the store",
        WORK,
        "            self.remote.forget(cells)\n",
        "            pass\n",
        "nobody hits what a failed forward wrote",
        f"{TESTS}::test_what_a_failed_forward_wrote_is_removed_from_the_store",
    ),
    _mutant(
        "writes without a rate",
        WORK,
        "        self._rate.spend_up_to(copies.link(Tier.HOST, Tier.REMOTE).bytes_begun, now)\n",
        "",
        "no more than `max_write_rate` is written a second",
        f"{TESTS}::test_no_more_is_written_a_second_than_said",
    ),
    _mutant(
        "debts are forgiven",
        RATE,
        "        self._left -= num_bytes - self._spent\n",
        "        self._left = max(0.0, self._left - (num_bytes - self._spent))\n",
        "no more than `max_write_rate` is written a second",
        "tests/test_write_rate.py::test_the_smallest_thing_may_be_larger_than_a_second",
    ),
    _mutant(
        "what was not written is charged",
        "aoffload._transfer.copy_queue",
        "        self.bytes_over += completion.num_bytes\n",
        "        self.bytes_over += self.in_flight[completion.job_id].num_bytes\n",
        "what was not written is not charged",
        "tests/shell/test_remote_faults.py::test_what_was_not_written_is_not_charged",
    ),
    _mutant(
        "a store outlives a reset",
        WORK,
        "        if tier is None and self.is_on:\n",
        "        if False:\n",
        "what a reset has dropped does not come back from the store",
        f"{TESTS}::test_a_reset_ends_the_use_of_the_store",
    ),
    _mutant(
        "an answer of before a reset",
        FETCHING,
        "        if not remote.is_on:\n            return 0",
        "        if False:\n            return 0",
        "what a reset has dropped does not come back from the store",
        "tests/shell/test_remote_invalidation.py::test_an_answer_that_comes_after_a_reset_is_of_before",
    ),
    _mutant(
        "what is wrong outlives a runtime that closes",
        WORK,
        "        self._forget()  # also when it is off: others use the store\n",
        "        if self.is_on:\n            self._forget()\n",
        "nobody hits what a failed forward wrote",
        "tests/shell/test_remote_invalidation.py::test_a_store_that_ends_while_the_runtime_closes_leaves_nothing_wrong",
    ),
    _mutant(
        "a password in an error",
        TABLES,
        """f"must begin with one of {', '.join(f'{name}://' for name in STORES)}")""",
        'f"is of no known store: {url}")',
        "no error shows what is in a URL",
        f"{SOURCES}::test_what_is_wrong_with_a_remote_store_is_named",
    ),
    _mutant(
        "a line's end in a secret",
        TABLES,
        '            return file.read().rstrip(b"\\r\\n")\n',
        "            return file.read()\n",
        "who writes the secret with another editor shares the store",
        f"{SOURCES}::test_a_remote_store_is_a_table",
    ),
    _mutant(
        "a refused job is a warning",
        "aoffload._observe.log",
        "completion.outcome is Outcome.REFUSED",
        "False",
        "a log is not flooded while a store is left alone",
        "tests/ledger/test_ledger_log.py::test_a_job_that_a_disabled_storage_refuses_is_no_warning",
    ),
    _mutant(
        "nobody tells that a store is left alone",
        WORK,
        "            self.telemetry.storage_moved(move)\n",
        "            pass\n",
        "one line when it is left alone, one when it is back",
        ALONE,
    ),
    _mutant(
        "a question that cannot be asked is begun",
        "aoffload._tiers.remote.lanes",
        "(Use.ASK, Use.LOAD) if direction",
        "(Use.LOAD,) if direction",
        "a fetch from a store that is left alone is skipped, and counted",
        "tests/shell/test_tier_breakers.py::test_a_store_that_answers_no_question_is_not_asked",
    ),
)
