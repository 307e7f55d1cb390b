"""Planted defects of engine-owned blocks: blocks held by jobs, stores, and requests that wait for each other."""

from __future__ import annotations

from .planting import Mutant

__all__ = ["ENGINE_MUTANTS"]

ENGINE, JOBS = "aoffload._host_cache.host_cache", "aoffload._kernel.jobs"
MATCHES, BLOCKS = "aoffload._host_cache.matches", "aoffload._host_cache.matches"
ARRIVALS, OFFERS = "aoffload._host_cache.matches", "aoffload._host_cache.offers"
OWNED = "tests/core/test_engine_owned.py::"
PENDING = "tests/core/test_engine_pending.py::"
INVALIDATION = "tests/core/test_engine_invalidation.py::"
CALLS, SESSION, WORKER = "aoffload._runtime.request", "aoffload._runtime.session", "aoffload._runtime.worker"
RUNTIME = "tests/shell/test_engine_runtime.py::"
LOST = "tests/core/test_engine_failed_loads.py::"
REFUSALS = "tests/core/test_engine_refusals.py::"

ENGINE_MUTANTS = (
    Mutant(
        "sources of a store not held",
        JOBS,
        "                from_tier.hold(held)\n",
        "                pass\n",
        "a copy reads blocks that stay what they are, whatever becomes of the request",
        test=f"{OWNED}test_the_sources_of_a_store_are_held_from_the_plan_to_the_end",
    ),
    Mutant(
        "destinations of an engine's given back unproven",
        JOBS,
        "        elif not is_unproven:\n            destination.unhold",
        "        else:\n            destination.unhold",
        "a copy that may still be writing keeps its blocks until late proof",
        test=f"{OWNED}test_the_destinations_of_an_unproven_load_are_held_until_late_proof",
    ),
    Mutant(
        "each question begins the wait anew",
        ARRIVALS,
        "self.clock() if before is None else before.since",
        "self.clock()",
        "no hang: pending ends by the clock, however often an engine asks",
        test=f"{PENDING}test_pending_ends_by_the_clock",
    ),
    Mutant(
        "nobody woken by a load that brought nothing",
        ENGINE,
        "        return self.arrivals.fell_short(request, ready)\n",
        "        self.arrivals.fell_short(request, ready)\n        return []\n",
        "who waits for what never comes is told so",
        test=f"{PENDING}test_pending_ends_when_nothing_of_the_load_has_come",
    ),
    Mutant(
        "null blocks stored",
        OFFERS,
        "                    num_units = blocks.index(0) // full.width\n",
        "                    num_units = len(blocks) // full.width\n",
        "what an engine's table does not name is not stored",
        test=f"{OWNED}test_the_spine_is_stored_up_to_the_first_null_block",
    ),
    Mutant(
        "queued stores launched after all was taken back",
        ENGINE,
        "        queued = self._queued_after(wrong)\n",
        "        queued = list[Job]()\n",
        "what a failed forward has written is not copied any more",
        test=f"{INVALIDATION}test_queued_stores_of_what_is_taken_back_are_discarded",
    ),
    Mutant(
        "launched stores publish what was taken back",
        ENGINE,
        "self.cache.withdraw_all(wrong, self.jobs.unsettled.values())",
        "self.cache.withdraw_all([run for run in wrong if run.parts[BELOW].blocks], self.jobs.unsettled.values())",
        "what a failed forward has written is never found",
        test=f"{INVALIDATION}test_launched_stores_of_what_is_taken_back_never_publish",
    ),
    Mutant(
        "who has read what was wrong stores on",
        ENGINE,
        "            other.epoch = NoEpoch.INVALIDATED\n",
        "            other.hit_stop = 0\n",
        "what was computed on wrong bytes is never found",
        test=f"{INVALIDATION}test_who_may_have_read_it_is_told_and_stores_nothing_any_more",
    ),
    Mutant(
        "tokens of a refused offer kept",
        ENGINE,
        "            request.sequence.drop_after(known)\n",
        "",
        "a refusal changes nothing",
        test=f"{REFUSALS}test_wrong_tables_are_refused_by_name",
    ),
    Mutant(
        "a window taken for there where none was brought",
        ENGINE,
        "< min(brought, stop):\n                return arrival.start\n",
        "< min(brought, stop):\n                return stop\n",
        "computing goes on where every group has what it reads",
        test=f"{OWNED}test_with_a_window_a_load_comes_whole_or_not_at_all",
    ),
    Mutant(
        "stores queued without bound",
        OFFERS,
        "            taken = self._bounded(offer)\n",
        "            taken = offer\n",
        "what is in flight is bounded, also for a synchronous engine",
        test=f"{OWNED}test_beyond_the_bound_in_flight_nothing_is_queued",
    ),
    Mutant(
        "a hit loaded as it was matched",
        MATCHES,
        "        return max(start, held_stop(self.cache.layout, path, BELOW, start, stop, given=start))\n",
        "        return max(start, stop)\n",
        "what was found corrupt since the match is not loaded",
        test=f"{OWNED}test_what_was_matched_and_is_corrupt_by_now_is_not_loaded",
    ),
    Mutant(
        "a next try loads what was lost",
        ENGINE,
        "        request.retry_max_hit_tokens = ready * unit\n",
        "",
        "no hang: an engine that asks again after a lost load comes to an end",
        test=f"{LOST}test_an_engine_that_tries_again_comes_to_an_end",
    ),
    Mutant(
        "loads go on whatever is in quarantine",
        BLOCKS,
        "        return self.num_quarantined <= self.max_quarantined\n",
        "        return self.num_quarantined <= self.num_quarantined + self.max_quarantined\n",
        "copies that cannot be proven over do not take the engine's pool",
        test=f"{LOST}test_above_the_share_nothing_is_loaded",
    ),
    Mutant(
        "a pause said at every copy",
        BLOCKS,
        "        if could_load and not self.may_load:\n",
        "        if could_load or not self.may_load:\n",
        "each turn is said once",
        test=f"{LOST}test_each_crossing_is_said_once",
    ),
    Mutant(
        "pins kept for what is not loaded",
        MATCHES,
        "BELOW not in request.leases or not self.device.may_load:",
        "BELOW not in request.leases:",
        "what was pinned is not loaded while too much is in quarantine",
        test=f"{LOST}test_above_the_share_nothing_is_loaded",
    ),
    Mutant(
        "a load given up counts as whole",
        ENGINE,
        "            if done is None or done.outcome is not LANDED:\n",
        "            if done is not None and done.outcome is not LANDED:\n",
        "of a load that nobody waits for any more only what has landed counts",
        test=f"{LOST}test_giving_up_a_load_leaves_its_blocks_to_the_copies",
    ),
    Mutant(
        "a wait for another's load without a bound",
        CALLS,
        "bound_s = session.ledger.pending_until(self._live()) - session.now()",
        "bound_s = math.inf",
        "no hang: pending ends after pending_timeout_s",
        test=f"{RUNTIME}test_pending_is_bounded",
    ),
    Mutant(
        "an earlier alarm behind a later one",
        WORKER,
        "min(self._alarms.values(), default=math.inf)",
        "next(iter(self._alarms.values()), math.inf)",
        "no hang: each wait ends at its own time",
        test=f"{RUNTIME}test_pending_is_bounded",
    ),
    Mutant(
        "who waits for another's load not woken",
        CALLS,
        "num_device_tokens=num_device_tokens, wake=wake)",
        "num_device_tokens=num_device_tokens)",
        "who waits for another's load is woken by its first offer",
        test=f"{RUNTIME}test_requests_for_one_prompt_load_it_once",
    ),
    Mutant(
        "an answer that only its own task hears",
        CALLS,
        "                self._wake()  # another task may wait for this answer\n",
        "                pass\n",
        "no hang: an answer to one task ends the waits of others in the same request",
        test=f"{RUNTIME}test_an_answer_to_one_task_ends_the_wait_of_another_one",
    ),
    Mutant(
        "a question keeps its request alive",
        CALLS,
        "        wake = weak_wake(self)  # the ledger",
        "        wake = self._wake  # the ledger",
        "nothing leaks: a request that was abandoned while it waited is noticed",
        test=f"{RUNTIME}test_an_abandoned_request_that_waits_for_another_is_noticed",
    ),
    Mutant(
        "an engine's stores before their forward",
        SESSION,
        "            self.worker.submit(plans, fence)\n",
        "            self.worker.submit(plans)\n",
        "a copy reads what is computed",
        test=f"{RUNTIME}test_an_offer_waits_for_its_forward",
    ),
    Mutant(
        "what was taken back is waited for",
        ENGINE,
        "        call_all(iter(self.arrivals.invalidated(request, start)))\n",
        "",
        "no wait without a need: a request takes back what it has loaded, and nothing brings it any more",
        test=f"{PENDING}test_pending_ends_when_what_was_loaded_is_taken_back",
    ),
    Mutant(
        "asked again without end once the worker has ended",
        CALLS,
        "            if session.worker.has_alarms:\n",
        "            if session.worker is not None:\n",
        "an engine that asks again lets time pass, also after its copy worker has ended",
        test=f"{RUNTIME}test_a_wait_for_what_others_bring_outlasts_the_copy_worker",
    ),
)
