"""Planted defects of the disk in the core: stores, fetches, and restores after a restart."""

from __future__ import annotations

from .planting import Mutant, Patch

__all__ = ["DISK_CORE_MUTANTS"]

STORES, FETCHES, RESTORES = "aoffload._tiers.lower.rules", "aoffload._tiers.fetch.rules", "aoffload._tiers.disk.rules"
MATCHING, LABELS, INDEX = "aoffload._kernel.index", "aoffload._tiers.disk.rules", "aoffload._kernel.index"
EXTENSION = "aoffload._tiers.disk.extension"
OF_STORES = "tests/core/test_disk_stores.py::test_"
OF_FETCHES = "tests/core/test_disk_fetches.py::test_"
OF_RESTORES = "tests/core/test_restores.py::test_"


def _met_by(test: str, name: str, module: str, old: str, new: str, promise: str, *also: Patch) -> Mutant:
    return Mutant(name, module, old, new, promise, also=also, test=test)


_STORES = (
    _met_by(
        OF_STORES + "units_that_a_span_touches_have_no_label",
        "disk: a label for what an image stands for",
        LABELS,
        "        if stretch[0].spans:\n",
        "        if not stretch:\n",
        "what tokens alone do not prove is not found after a restart",
    ),
    _met_by(
        OF_STORES + "a_store_behind_another_has_the_labels_of_its_place",
        "disk: labels that begin with their job",
        LABELS,
        "hasher = hash_run(run.hash_before, run.tokens[:first], (), unit_bytes)",
        "hasher = run.hash_before.copy()",
        "a label is that of its place in the prompt",
    ),
    _met_by(
        OF_STORES + "a_plan_says_how_often_the_disk_was_reset",
        "disk: a reset that nobody counts",
        "aoffload._kernel.cache",
        "        self.tiers[tier].count_reset()\n",
        "",
        "what was planned before a reset stays of before",
    ),
    _met_by(
        OF_STORES + "what_lies_behind_a_corrupt_block_is_not_stored",
        "disk: what nobody could find is written again and again",
        STORES,
        "            if reached < current.stop:\n                return reached\n",
        "",
        "the disk holds nothing whose front it lacks",
    ),
    _met_by(
        OF_STORES + "an_idle_disk_evicts_nothing",
        "disk: an idle disk goes round",
        STORES,
        "num_free = self._there.pool.num_free",
        "num_free = self._there.num_available",
        "what is written while the disk is idle evicts nothing",
    ),
    _met_by(
        OF_STORES + "a_flush_keeps_what_was_used_last",
        "disk: a flush that evicts itself",
        STORES,
        "            left -= min(num_blocks, fits)\n",
        "            left -= 0\n",
        "a flush keeps what was used last",
    ),
    _met_by(
        OF_STORES + "a_flush_writes_each_block_once",
        "disk: a flush that does not know what is on its way",
        STORES,
        "runs = [run for job in jobs for run in job.run.path()] + [part.run for part in parts]",
        "runs = [part.run for part in parts]",
        "a flush writes each block once",
    ),
    _met_by(
        OF_STORES + "a_flush_writes_each_block_once",
        "disk: a flush that goes round with what does not fit whole",
        STORES,
        "            stops[run] = run.stop if num_blocks <= fits else run.start + fits // width",
        "            stops[run] = run.stop",
        "a flush writes each block once",
    ),
    _met_by(
        OF_STORES + "only_what_was_asked_for_twice",
        "disk: asked for once is enough",
        STORES,
        "wanted = self._requested_stop if only_requested_twice else self._whole_stop",
        "wanted = self._whole_stop",
        "with little budget left, only what was asked for twice is written",
    ),
    _met_by(
        OF_STORES + "a_budget_cuts_the_end_off_not_the_front",
        "disk: a budget that is spent twice",
        "aoffload._kernel.jobs",
        "num_units = min(wanted, fit, allowed)",
        "num_units = min(wanted, fit)",
        "no more is written than was allowed",
    ),
    _met_by(
        OF_STORES + "a_budget_cuts_the_end_off_not_the_front",
        "disk: what a budget has cut off is forgotten",
        STORES,
        "            if left_of(most, jobs) < least:\n                return jobs\n",
        "            if left_of(most, jobs) < least:\n                break\n",
        "what did not fit into a budget goes down with the next one",
    ),
    _met_by(
        OF_STORES + "the_front_of_what_was_used_together_goes_down_where_its_tail_has_nothing_to_store",
        "disk: a tail that stands for its front",
        STORES,
        "if scanned.get(part) == part.last_use:",
        "if part.last_use in scanned.values():",
        "what was used together is looked at together",
    ),
)
_INVALIDATION = (
    _met_by(
        OF_STORES + "what_a_failed_forward_has_left_there_is_told",
        "disk: wrong KV that a restart finds",
        "aoffload._kernel.cache",
        "            for part in run.parts:\n                self.tiers[part.tier].invalidated(part.blocks)\n",
        "            for part in run.parts:\n",
        "what a failed forward has computed is not found after a restart",
    ),
    _met_by(
        OF_STORES + "what_a_failed_forward_has_left_there_is_told",
        "disk: wrong KV that a store has written later",
        "aoffload._kernel.jobs",
        "                    tier.invalidated(brought)\n",
        "                    pass\n",
        "what a failed forward has computed is not found after a restart",
    ),
)
_FETCHES = (
    _met_by(
        OF_FETCHES + "fetches_take_no_more_than_their_share_of_the_host",
        "disk: a share for each fetch",
        FETCHES,
        "if isinstance(transfer, Fetch))",
        "if not isinstance(transfer, Fetch))",
        "all fetches together take a share of the host",
    ),
    _met_by(
        OF_FETCHES + "what_was_fetched_stays_while_its_request_waits_for_room",
        "disk: read in vain for who waits for room",
        FETCHES,
        "        self._keep(request)\n",
        "",
        "what was fetched is there once there is room",
    ),
    _met_by(
        OF_FETCHES + "requests_in_line_keep_no_more_than_the_share_of_all_fetches",
        "disk: a share for each request in line",
        FETCHES,
        "        if sum(kept.num_blocks for kept in self._kept.values()) + num_blocks <= most:\n",
        "        if num_blocks <= most:\n",
        "what requests in line keep has a share of the host",
    ),
    _met_by(
        OF_FETCHES + "a_fetch_with_windows_has_all_that_a_hit_needs",
        "disk: a fetch without its window",
        FETCHES,
        "source.offer_with_windows(request, run, 0, indexed",
        "source.offer(request, run, self.cache.layout.full, 0, indexed",
        "what is fetched hits",
    ),
    _met_by(
        OF_FETCHES + "two_fetches_share_their_copies",
        "disk: a fetch that waits for its own copies only",
        FETCHES,
        "            self.transfers.wait_for_jobs(transfer)\n",
        "            over = partial(self.transfers.over, transfer)\n"
        "            request.load = Load(stop, wake, over, request.ticket, jobs)\n",
        "two fetches of one prefix end with both of what they brought",
        Patch(
            FETCHES,
            "records import Job, Lease, LedgerRequest, Run, do_nothing\n",
            "records import Job, Lease, LedgerRequest, Load, Run, do_nothing\n",
        ),
    ),
    _met_by(
        OF_FETCHES + "a_request_in_line_is_not_matched_by_a_fetch",
        "disk: matched again in the line",
        FETCHES,
        "        if request.waiter is not None:\n            raise",
        "        if request.waiter is None and not request:\n            raise",
        "behind the head of the line nobody keeps pins",
    ),
    _met_by(
        OF_FETCHES + "a_corrupt_block_is_forgotten_on_the_disk",
        "disk: what the device lacks counts as on the disk",
        MATCHING,
        "stop = min(max([run.parts[tier].stop for tier in below]), agreed) if has_full else agreed",
        "stop = agreed",
        "a match says what a fetch can bring",
    ),
)
_RESTORES = (
    _met_by(
        OF_RESTORES + "wrong_tokens_are_left_out",
        "disk: a restart that trusts its digests",
        RESTORES,
        "if root.digest != found.root or hasher.digest() != found.digest:",
        "if root.digest != found.root:",
        "what is found after a restart is what its tokens say",
    ),
    _met_by(
        OF_RESTORES + "nothing_is_restored_over_what_was_stored_since",
        "disk: restored over a store",
        EXTENSION,
        "            self._restores = None  # the stores may write to slots that an earlier process has left\n",
        "            pass\n",
        "a slot that was written since is not taken for what it held",
    ),
    _met_by(
        OF_RESTORES + "nothing_is_restored_after_a_reset",
        "disk: restored after a reset",
        EXTENSION,
        "            self._restores = None\n",
        "            pass\n",
        "what was forgotten stays forgotten",
    ),
    _met_by(
        OF_RESTORES + "slots_that_are_taken_are_left_out",
        "disk: a slot with two owners",
        RESTORES,
        "        if not self.pool.are_free([",
        "        if not found and not self.pool.are_free([",
        "a slot has one owner",
    ),
    _met_by(
        OF_RESTORES + "what_is_restored_is_evicted_first_and_from_its_tail",
        "disk: what is restored is evicted head first",
        "aoffload._tiers.disk.rules",
        "                self.order.remove(oldest)\n                self.order.add_newer(oldest, part)\n",
        "                self.order.remove(part)\n                self.order.add(part)\n",
        "a prefix loses its tail before its head",
    ),
    _met_by(
        OF_RESTORES + "requests_may_run_meanwhile",
        "disk: a merged run is lost to what follows it",
        INDEX,
        "            head.before = run  # a path from a reference to a head leads to the run that has its units now\n",
        "            pass\n",
        "what was given is found in the end, whatever requests did meanwhile",
    ),
    _met_by(
        OF_RESTORES + "what_was_stored_is_found_after_a_restart",
        "disk: what is restored is counted as pinned",
        "aoffload._tiers.disk.rules",
        "            self.num_cached += len(block_ids)\n        self.part_changed",
        "        self.part_changed",
        "blocks by state add up",
    ),
)

DISK_CORE_MUTANTS: tuple[Mutant, ...] = _STORES + _INVALIDATION + _FETCHES + _RESTORES
