"""Planted defects of eviction that learns, and of its hints."""

from __future__ import annotations

from .planting import Mutant

__all__ = ["LEARNED_EVICTION_MUTANTS"]

ORDER, RETURNS, IDLE = "aoffload._eviction.learned", "aoffload._eviction.returns", "aoffload._eviction.idle"
COUNTS, EXTENSION = "aoffload._eviction.counts", "aoffload._eviction.extension"
TESTS = "tests/core/test_learned_eviction.py::test_"
SWITCH = "a_switch_of_the_ruling_order_is_told_once_and_evictions_are_counted_by_it"


def _met_by(test: str, name: str, module: str, old: str, new: str, promise: str) -> Mutant:
    return Mutant(f"learned: {name}", module, old, new, promise, test=TESTS + test)


LEARNED_EVICTION_MUTANTS: tuple[Mutant, ...] = (
    _met_by(
        "worth_rises_to_the_time_of_return_and_falls_after_it",
        "a worth without a look ahead",
        RETURNS,
        "        while stretches and stretches[-1][0] * held > returns * stretches[-1][1]:\n",
        "        while False:\n",
        "a block is worth the more the nearer its return is",
    ),
    _met_by(
        "a_prediction_counts_as_far_as_it_comes_true",
        "one bucket for all categories",
        RETURNS,
        "        key = (category, None if in_s is None else _octave(in_s))\n",
        '        key = ("", None if in_s is None else _octave(in_s))\n',
        "the lies of one category are not those of another",
    ),
    _met_by(
        "what_has_not_returned_is_at_risk_in_each_bin_that_it_reached",
        "those still waiting are not counted",
        RETURNS,
        "            came = np.maximum(asked[number], 0.0) * left\n",
        "            came = all_returned[:, number:].sum(1)\n",
        "a prefix that has not returned counts for each age that it reached",
    ),
    _met_by(
        "buckets_are_bounded",
        "a new bucket with the counts of an old one",
        RETURNS,
        "                self._asked[found] = 0.0\n",
        "",
        "a category that is new has no counts",
    ),
    _met_by(
        "without_a_clock_the_time_is_the_number_of_units",
        "a clock that goes back",
        RETURNS,
        "max(self.now + 1, int(seconds * TICKS))",
        "int(seconds * TICKS)",
        "time never goes back",
    ),
    _met_by(
        "the_leaf_that_is_worth_least_is_found",
        "the oldest leaf of a bucket, whatever it is worth",
        IDLE,
        "            if worth[number] < least:\n",
        "            if least == float('inf'):\n",
        "the leaf that is worth least goes first",
    ),
    _met_by(
        "the_leaf_that_is_worth_least_is_found",
        "a node that stays no leaf when its last child is gone",
        IDLE,
        "            del self._children[parent]\n            self._changed[parent] = None\n",
        "            del self._children[parent]\n",
        "every end of a path can be evicted",
    ),
    _met_by(
        "changes_without_a_question_take_no_memory",
        "changes that are kept until somebody asks",
        IDLE,
        "        if len(changed) > MAX_CHANGED:\n",
        "        if False:\n",
        "a tier that is never full takes no more memory",
    ),
    _met_by(
        "a_prefix_loses_its_tail_before_its_head",
        "a head that is evicted while its tail is cached",
        IDLE,
        "            key = None if entry is None or node in children else entry[:3]\n",
        "            key = None if entry is None else entry[:3]\n",
        "a prefix loses its tail before its head",
    ),
    _met_by(
        "a_prefix_loses_its_tail_before_its_head",
        "a tail that does not know its new head",
        ORDER,
        "            self._idle.reparent(than, part)\n",
        "            pass\n",
        "a prefix loses its tail before its head",
    ),
    _met_by(
        "a_prefix_loses_its_tail_before_its_head",
        "a merged run that its prefix does not know",
        ORDER,
        "        if part.blocks and not part.num_references:\n",
        "        if False:\n",
        "a prefix loses its tail before its head",
    ),
    _met_by(
        "it_remembers_what_was_evicted",
        "counts that go with the blocks",
        ORDER,
        "most = REMEMBERED * max(units.values()) * layout.unit_tokens",
        "most = layout.unit_tokens",
        "counts outlive eviction",
    ),
    _met_by(
        "while_the_last_use_rules_it_evicts_as_lru",
        "hints that count while the last use rules",
        ORDER,
        "self._idle.least_worth() if self._guard.is_learned else self._idle.oldest()",
        "self._idle.least_worth()",
        "the last use rules where the guard says so",
    ),
    _met_by(
        "merged_runs_of_the_history_count_as_before",
        "runs merged that were requested at different times",
        COUNTS,
        "head.last_asked == run.last_asked\n            and ",
        "",
        "merging loses no count",
    ),
    _met_by(
        "merged_runs_of_the_history_count_as_before",
        "a run merged into one of those after it",
        COUNTS,
        "            and head.num_after == 1\n",
        "",
        "merging loses no count",
    ),
    _met_by(
        "a_path_is_continued_or_walked_again",
        "a path that is continued although it has changed",
        COUNTS,
        " or not self._are_present(before)",
        "",
        "the history has each unit once",
    ),
    _met_by(
        "the_last_use_rules_where_it_hits_more",
        "a guard that never gives way",
        ORDER,
        "        self.is_learned = self.learned_hits > self.last_used_hits * (1.0 if was_learned else 1 + LEAD)\n",
        "        self.is_learned = was_learned or self.learned_hits > self.last_used_hits * (1 + LEAD)\n",
        "what was learned is never worse than the last use",
    ),
    _met_by(
        "simulated_caches_hold_what_their_orders_keep",
        "a simulated cache that holds more than it has room for",
        ORDER,
        "            self._evict(self.num_held - self.capacity)\n",
        "            self._evict((self.num_held - self.capacity) // 2)\n",
        "the guard compares what the tier would hit",
    ),
    _met_by(
        "a_request_ends_a_hint",
        "hints that reach the history alone",
        ORDER,
        "            if current.parts[Tier.HOST].rank != bucket:  # in all tiers and components\n",
        "            if False:\n",
        "a hint is about the cached blocks",
    ),
    _met_by(
        "a_request_that_fails_is_idle_again",
        "what was never idle returns",
        ORDER,
        "            if counted.idle_since:\n",
        "            if True:\n",
        "a return is the end of an idle time",
    ),
    _met_by(
        "a_request_ends_a_hint",
        "a hint that goes on after the return",
        ORDER,
        "            counted.bucket = num_uses - 1 if num_uses < NUM_CLASSES else NUM_CLASSES - 1\n",
        "            counted.bucket = counted.bucket or min(num_uses, NUM_CLASSES) - 1\n",
        "a hint is about the next time",
    ),
    _met_by(
        "a_hint_is_about_its_own_path",
        "a hint about the prefixes that others use",
        ORDER,
        "            if counted.idle_since == since and counted.bucket != bucket:\n",
        "            if counted.bucket != bucket:\n",
        "a hint is about its own path",
    ),
    _met_by(
        "a_request_that_fails_is_idle_again",
        "a request that is cancelled is live for ever",
        EXTENSION,
        "        if is_last and self.learning.is_live(request):  # it is not done\n",
        "        if False:\n",
        "what is released is idle",
    ),
    _met_by(
        SWITCH,
        "a switch that is told to nobody",
        ORDER,
        "        return self.is_learned is not was_learned\n",
        "        return False\n",
        "a switch of the ruling order is told once",
    ),
    _met_by(
        SWITCH,
        "evictions that count for the wrong order",
        ORDER,
        "        ruled.num_before = num_evicted\n",
        "",
        "evictions are counted by the order that chose them",
    ),
)
