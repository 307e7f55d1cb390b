"""Planted defects of the remote store in the core: stores, loads, and invalidation."""

from __future__ import annotations

from .planting import Mutant, Patch

__all__ = ["REMOTE_CORE_MUTANTS"]

CELLS, STORES, FETCHES, JOBS = (
    "aoffload._tiers.remote.rules",
    "aoffload._tiers.remote.rules",
    "aoffload._tiers.fetch.rules",
    "aoffload._kernel.jobs",
)
TOKENS, EXTENSION = "aoffload._kernel.tokens", "aoffload._tiers.remote.extension"
INVALIDATION = "aoffload._extensions.invalidation"
OF_STORES = "tests/core/test_remote_stores.py::test_"
OF_FETCHES = "tests/core/test_remote_fetches.py::test_"


def _met_by(test: str, name: str, module: str, old: str, new: str, promise: str, *also: Patch) -> Mutant:
    return Mutant(f"remote: {name}", module, old, new, promise, also=also, test=test)


_CELLS = (
    _met_by(
        OF_FETCHES + "cells_are_whole_aligned_and_leave_a_token_to_compute",
        "a prompt that is hit as a whole",
        CELLS,
        "(sequence.num_tokens - 1) // unit_tokens, cell_units)",
        "sequence.num_tokens // unit_tokens, cell_units)",
        "one token is always computed",
    ),
    _met_by(
        OF_FETCHES + "cells_are_whole_aligned_and_leave_a_token_to_compute",
        "half a cell at the end",
        CELLS,
        "range(0, stop - cell_units + 1, cell_units)",
        "range(0, stop, cell_units)",
        "a cell is whole",
    ),
    _met_by(
        OF_FETCHES + "a_cell_is_told_by_everything_before_its_end",
        "cells of their own tokens alone",
        CELLS,
        "hasher = sequence.hash_on(hasher, start, start + cell_units)",
        "hasher = sequence.hash_on(sequence.root.hasher, start, start + cell_units)",
        "a cell is told by all that is before its end",
    ),
    _met_by(
        OF_FETCHES + "a_cell_is_told_by_everything_before_its_end",
        "images without a name",
        TOKENS,
        "hash_run(hasher, self.stretch(start, end), self.spans_at(start), self._unit_bytes)",
        "hash_run(hasher, self.stretch(start, end), (), self._unit_bytes)",
        "key spans enter the digest of a cell",
    ),
    _met_by(
        OF_FETCHES + "a_digest_is_that_of_the_index",
        "a span that ends within a cell",
        TOKENS,
        "            end = self._uniform_stop(start, stop)\n            hasher",
        "            end = stop\n            hasher",
        "a cell's digest does not depend on how runs are cut",
    ),
    _met_by(
        OF_FETCHES + "a_load_begins_in_the_middle_of_a_cell",
        "places counted from what is loaded",
        CELLS,
        "[at % num_blocks for at in range(start * width, stop * width)]",
        "[at % num_blocks for at in range((stop - start) * width)]",
        "a block lies at its own place of the cell",
    ),
    _met_by(
        OF_FETCHES + "a_load_begins_in_the_middle_of_a_cell",
        "jobs that begin with their load, and not with a cell",
        JOBS,
        "range(start - start % most if payloads else start, stop, most)",
        "range(start, stop, most)",
        "a job copies units of one cell",
    ),
    _met_by(
        OF_STORES + "the_source_is_what_the_host_has",
        "a store that no match will find counts as on its way",
        JOBS,
        "            if not is_use and not to_tier.is_outside:\n",
        "            if not is_use:\n",
        "blocks that stores under way read are counted",
    ),
)

_FETCHES = (
    _met_by(
        OF_FETCHES + "only_what_was_told_is_loaded",
        "loads that nobody was told of",
        FETCHES,
        "min(limit, remote_stop, start + left // layout.width)",
        "min(limit, start + left // layout.width)",
        "only cells that the store is said to have are loaded",
    ),
    _met_by(
        OF_FETCHES + "only_what_was_told_is_loaded",
        "loads beyond the prompt",
        FETCHES,
        "min(limit, remote_stop, start + left // layout.width)",
        "min(remote_stop, start + left // layout.width)",
        "a fetch reaches no further than its prompt",
        Patch(FETCHES, "self._in_host(sequence, min(limit, remote_stop))", "self._in_host(sequence, remote_stop)"),
    ),
    _met_by(
        OF_FETCHES + "two_fetches_share_their_copies",
        "the same cell loaded twice",
        FETCHES,
        "stop = min(covered(run.parts[Tier.HOST])[1], agreed)",
        "stop = min(run.parts[Tier.HOST].stop, agreed)",
        "two fetches share their loads",
    ),
    _met_by(
        OF_FETCHES + "no_half_of_a_cell_is_fetched",
        "loads of half a cell",
        FETCHES,
        "start + left // layout.width)",
        "start + 10**6)",
        "no cell is loaded whose end has no room",
    ),
    _met_by(
        OF_FETCHES + "the_disk_goes_first",
        "the disk's part loaded once more",
        FETCHES,
        "            start = max(start, self._in_host(sequence, min(limit, remote_stop)))\n",
        "            start = self._in_host(sequence, min(limit, remote_stop))\n",
        "a store is for what is behind the disk",
    ),
    _met_by(
        OF_FETCHES + "a_longer_device_hit_needs_no_store",
        "loads of what is on the device",
        FETCHES,
        "        if stop > hit:\n",
        "        if stop:\n",
        "what hits anyway is not loaded",
    ),
    _met_by(
        OF_STORES + "a_fetch_takes_no_cell_that_is_to_be_removed",
        "wrong cells loaded before they are removed",
        FETCHES,
        "tuple(found[: wrong[0]] if wrong else found)",
        "tuple(found)",
        "what was taken back does not hit",
    ),
    _met_by(
        OF_FETCHES + "a_cell_that_is_gone_ends_the_hit",
        "a corrupt cell forgotten in the wrong tier",
        JOBS,
        "plan.direction is LOAD and job.source_lease is not None\n",
        "plan.direction is LOAD\n",
        "a cell that does not verify is a miss",
    ),
)

_STORES = (
    _met_by(
        OF_STORES + "what_was_asked_for_once_stays",
        "asked for once is enough",
        STORES,
        "self.counts.requested_stop(sequence, sequence.num_tokens // self.cache.layout.unit_tokens)",
        "sequence.num_tokens // self.cache.layout.unit_tokens",
        "only what was asked for twice is stored",
    ),
    _met_by(
        OF_STORES + "another_prompt_in_the_host_is_not_taken_for_it",
        "another prompt's blocks stored",
        STORES,
        "present_stop(path, Tier.HOST, 0, walked[-1][1])",
        "present_stop(path, Tier.HOST, 0, stop)",
        "a cell holds the KV of its own tokens",
    ),
    _met_by(
        OF_STORES + "a_cell_under_way_is_not_stored_twice",
        "a cell stored twice at a time",
        STORES,
        "cell.digest not in self._tried and (under_way is None or under_way.is_settled)",
        "cell.digest not in self._tried",
        "a cell under way is not stored again",
    ),
    _met_by(
        OF_STORES + "what_the_store_has_is_not_stored",
        "stored whatever is there",
        STORES,
        "if is_free and is_wanted(cell):",
        "if is_free:",
        "what the store has is not stored",
    ),
    _met_by(
        OF_STORES + "what_was_asked_for_last_goes_first",
        "a bound that is no bound",
        STORES,
        "if len(chosen) == most or self._is_full or cell.digest in self.forgotten:",
        "if self._is_full or cell.digest in self.forgotten:",
        "no more is stored than was allowed",
    ),
    _met_by(
        OF_STORES + "what_is_not_in_the_host_yet_goes_later",
        "stores that come too early are forgotten",
        STORES,
        "            if there + self.cell_units <= asked:\n",
        "            if there < 0:\n",
        "what is not in the host yet is stored later",
    ),
    _met_by(
        OF_STORES + "looking_again_is_cheap",
        "looked at all over again",
        STORES,
        "if not left or self._num_seen >= len(recent):",
        "if not left:",
        "while nothing changes, nobody is asked",
        Patch(STORES, "            if there + self.cell_units <= asked:\n", "            if asked:\n"),
        Patch(STORES, "min(len(recent) - self._num_seen, MAX_SCANNED)", "min(len(recent), MAX_SCANNED)"),
    ),
    _met_by(
        OF_STORES + "what_has_failed_has_no_second_turn[4]",
        "what has failed is planned at once",
        STORES,
        "cell.digest not in self._tried and ",
        "",
        "what has failed is not planned again before anything changes",
    ),
    _met_by(
        OF_STORES + "whoever_is_asked_may_raise",
        "jobs that nobody launches",
        STORES,
        "                chosen[cell] = run\n",
        "                chosen[cell] = run\n                self._store(run, cell)\n",
        "whoever is asked may raise, and nothing is left behind",
    ),
    _met_by(
        OF_STORES + "a_store_that_fails_quarantines_nothing",
        "a quarantine of nothing",
        JOBS,
        "if outcome is UNPROVEN and not TIERS[plan.destination].leaves_doubt:",
        "if outcome is UNPROVEN and not TIERS[plan.source].leaves_doubt:",
        "a store without a destination quarantines nothing",
    ),
)

_INVALIDATION = (
    _met_by(
        OF_STORES + "cells_of_a_failed_forward_are_taken_back",
        "nothing taken back",
        STORES,
        "        own, number = cells_before(sequence, max(first, stop), self.cell_units), first // self.cell_units\n",
        "        if first >= 0:\n"
        "            return []\n"
        "        own, number = cells_before(sequence, max(first, stop), self.cell_units), first // self.cell_units\n",
        "what a failed forward has left is removed from the store",
    ),
    _met_by(
        OF_STORES + "cells_of_a_failed_forward_are_taken_back",
        "taken back from the next cell on",
        STORES,
        "own, number = cells_before(sequence, max(first, stop), self.cell_units), first // self.cell_units\n",
        "own, number = cells_before(sequence, max(first, stop), self.cell_units), -(-first // self.cell_units)\n",
        "the cell that holds the first wrong token is removed",
    ),
    _met_by(
        OF_STORES + "cells_of_a_later_request_go_with_those_that_it_read",
        "what follows wrong KV stays",
        STORES,
        "        waiting = [before, *wrong]\n",
        "        waiting = list[bytes]()\n",
        "what was computed from wrong KV is removed with it",
    ),
    _met_by(
        OF_STORES + "what_was_there_already_hands_the_wrong_on",
        "cells of others break the chain",
        STORES,
        "            self._known[cell.digest] = _Known(cell, before, ticket)\n",
        "            if is_wanted(cell):\n                self._known[cell.digest] = _Known(cell, before, ticket)\n",
        "what was computed from wrong KV is removed with it",
    ),
    _met_by(
        OF_STORES + "a_store_under_way_is_waited_for",
        "removed before it arrives",
        STORES,
        "found = [digest for digest in self.forgotten if digest not in under_way]",
        "found = list(self.forgotten)",
        "a cell is removed behind the store that brings it",
    ),
    _met_by(
        OF_STORES + "a_queued_store_is_given_up",
        "wrong KV stored after it was taken back",
        STORES,
        "return [job for job in stores if job.state is JobState.QUEUED]",
        "return []",
        "a queued store of wrong KV does not begin",
    ),
    _met_by(
        OF_STORES + "it_is_stored_again_once_it_is_right",
        "stored before the wrong one is removed",
        STORES,
        "if len(chosen) == most or self._is_full or cell.digest in self.forgotten:",
        "if len(chosen) == most or self._is_full:",
        "what is removed is not what was stored meanwhile",
    ),
    _met_by(
        OF_STORES + "memory_lasts_as_long_as_somebody_may_take_back",
        "everything remembered for ever",
        STORES,
        "known[first := next(iter(known))].ticket <= oldest:",
        "known[first := next(iter(known))].ticket < 0:",
        "memory is bounded",
    ),
    _met_by(
        OF_STORES + "memory_lasts_as_long_as_somebody_may_take_back",
        "forgotten while somebody is live",
        EXTENSION,
        "oldest = next(iter(ledger.live_requests.values())).ticket if ledger.live_requests else ticket",
        "oldest = ticket",
        "what a live request may take back is remembered",
    ),
    _met_by(
        OF_STORES + "beyond_the_memory_nothing_is_stored",
        "stored beyond the memory",
        STORES,
        "return len(self._known) + len(self.forgotten) >= MAX_KNOWN",
        "return False",
        "what could not be taken back is not stored",
    ),
    _met_by(
        OF_STORES + "a_reset_in_between_changes_nothing",
        "tokens of after the failure",
        INVALIDATION,
        "            sequence = sequence.copy()\n",
        "            sequence = sequence.copy()\n            published = min(published, 0)\n",
        "what a failed forward has left is removed, also after a reset",
    ),
)

REMOTE_CORE_MUTANTS = _CELLS + _FETCHES + _STORES + _INVALIDATION
