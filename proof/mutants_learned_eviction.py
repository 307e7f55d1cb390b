"""Planted defects of eviction that learns, and of hints."""

from __future__ import annotations

from .planting import Mutant

__all__ = ["LEARNED_EVICTION_MUTANTS"]

ORDER, HINTS, SHADOWS = "aoffload._eviction.learned", "aoffload._eviction.hints", "aoffload._eviction.learned"
TESTS = "tests/core/test_learned_eviction.py::test_"
SWITCH = "a_switch_of_the_ruling_order_is_told_once_and_evictions_are_counted_by_it"


def _met_by(test: str, name: str, module: str, old: str, new: str, promise: str) -> Mutant:
    return Mutant(f"learned: {name}", module, old, new, promise, test=TESTS + test)


LEARNED_EVICTION_MUTANTS: tuple[Mutant, ...] = (
    _met_by(
        "worth_falls_with_age_and_rises_with_use",
        "a class that is worth less than the one below it",
        "aoffload._eviction.learned",
        "[max(least, worth) for least, worth in ",
        "[worth for _, worth in ",
        "a prefix is worth at least as much as what is behind it",
    ),
    _met_by(
        "a_prefix_loses_its_tail_before_its_head",
        "a head in another class than its tail",
        "aoffload._kernel.records",
        "front.last_use, front.rank = self.last_use, self.rank",
        "front.last_use = self.last_use",
        "a prefix loses its tail before its head",
    ),
    _met_by(
        "it_remembers_what_was_evicted",
        "counts that go with the blocks",
        "aoffload._eviction.learned",
        "most = REMEMBERED * max(units.values()) * layout.unit_tokens",
        "most = layout.unit_tokens",
        "counts outlive eviction",
    ),
    _met_by(
        "merged_runs_of_the_history_count_as_before",
        "runs merged that were requested at different times",
        "aoffload._eviction.counts",
        "head.last_asked == run.last_asked\n            and ",
        "",
        "merging loses no count",
    ),
    _met_by(
        "merged_runs_of_the_history_count_as_before",
        "a run merged into one of those after it",
        "aoffload._eviction.counts",
        "            and head.num_after == 1\n",
        "",
        "merging loses no count",
    ),
    _met_by(
        "the_last_use_rules_where_it_hits_more",
        "a guard that never gives way",
        SHADOWS,
        "            self.is_learned = self.learned_hits >= self.last_used_hits * (1 - BEHIND)\n",
        "            pass\n",
        "what was learned is never much worse than the last use",
    ),
    _met_by(
        "a_hint_spares_until_it_expires",
        "a hint that spares for ever",
        HINTS,
        "        self._change(hint.last, -1)\n",
        "",
        "what a hint spares is like all else once it has expired",
    ),
    _met_by(
        "a_hint_never_pins",
        "hints that pin",
        ORDER,
        " or self._first_of([ring.first for ring in self._spared])",
        "",
        "where only spared blocks could make room, they go",
    ),
    _met_by(
        "a_hint_ends_when_it_has_come_true",
        "a hint that goes on when it has come true",
        HINTS,
        "            self._end(hint, HintEnd.TRUE)\n",
        "",
        "a hint is about the next time",
    ),
    _met_by(
        "hints_that_never_come_true_spare_nothing",
        "hints that are believed for ever",
        HINTS,
        "        if self._record(category).is_good:\n",
        "        if self._record(category):\n",
        "what seldom comes true spares nothing",
    ),
    _met_by(
        SWITCH,
        "a switch that is told with each request",
        "aoffload._eviction.learned",
        "        self._learned = learned\n",
        "",
        "a switch of the ruling order is told once",
    ),
    _met_by(
        SWITCH,
        "evictions that count for the wrong order",
        "aoffload._eviction.learned",
        "        ruled.num_before = num_evicted\n",
        "",
        "evictions are counted by the order that chose them",
    ),
    _met_by(
        "what_becomes_of_hints_is_told",
        "hints that a reset ends without a word",
        HINTS,
        "            self._moves.note(HintEnded(hint.hint_id, hint.category, HintEnd.DROPPED))\n",
        "            pass\n",
        "each hint has an end",
    ),
    _met_by(
        "a_hint_ends_for_what_it_has_spared",
        "a hint that ends for what another one spares",
        HINTS,
        "        self._change(hint.last, -1)\n",
        "        self._change(hint.last and self._last_cached(TokenSequence.of_path(hint.last), 99), -1)\n",
        "no tail is spared longer than its head",
    ),
)
