"""Planted defects of pins, prefetches and demotions."""

from __future__ import annotations

from .planting import Mutant

__all__ = ["KEEPING_MUTANTS"]

KEEPING, CACHE_TRANSFERS, ADMISSION = (
    "aoffload._extensions.pins",
    "aoffload._extensions.prefetch",
    "aoffload._kernel.waiting",
)
LEDGER, WORKER, SHELL = "aoffload._kernel.ledger", "aoffload._runtime.worker", "aoffload._runtime.pins"

TRANSFERS_AMONG_REQUESTS = ("keeping", "pinned_full", "kept_windows")

KEEPING_MUTANTS = (
    Mutant(
        "demotion evicts what is hit in the host",
        "aoffload._extensions.prefetch",
        "kept = self._keep_hit(sequence)",
        "kept = None",
        "a demotion loses nothing that could hit",
        test="tests/core/test_pins.py::test_a_demotion_does_not_evict_what_is_hit_in_the_host",
    ),
    Mutant(
        "pins in the way of the line",
        ADMISSION,
        "            if device.pool.num_free == before and not self.yield_pin():\n",
        "            if device.pool.num_free == before:\n",
        "no request is starved by pins",
    ),
    Mutant(
        "pins yield too early",
        ADMISSION,
        "            if self.others_hold_room():\n                break\n            # Only waiters and pins",
        "            # Only waiters and pins",
        "a pin ends for a request only where nobody else will make room",
        scenarios=TRANSFERS_AMONG_REQUESTS,
    ),
    Mutant(
        "extension fails before pins yield",
        ADMISSION,
        "            if self.yield_pin():\n                continue",
        "            if False:\n                continue",
        "no request is starved by pins",
        test="tests/core/test_pins.py::test_a_pin_yields_before_an_extension_fails",
    ),
    Mutant(
        "pin yields for nothing",
        KEEPING,
        "            if any(part in kept for lease in leases[pin] for part in pinned_parts(lease)):\n",
        "            if any(True for lease in leases[pin] for part in pinned_parts(lease)):\n",
        "what a pin shares with a request is no room",
        test="tests/core/test_pins.py::test_a_pin_yields_before_an_extension_fails",
    ),
    Mutant(
        "pin keeps the device only",
        KEEPING,
        "        elif (host_stop := held_stop(cache.layout, hit.path, BELOW, 0, hit.stop)) > 0:\n",
        "        elif (host_stop := held_stop(cache.layout, hit.path, BELOW, 0, hit.stop)) < 0:\n",
        "what is cached stays where it is cached",
        scenarios=TRANSFERS_AMONG_REQUESTS,
    ),
    Mutant(
        "window of a shorter hit not kept",
        KEEPING,
        "            again = find_hit(cache.index, sequence, cache.layout, limit)\n",
        "            again = hit\n",
        "a pin of a prompt serves the same prompt again",
        test="tests/core/test_pins.py::test_a_pin_of_a_window_serves_the_same_prompt_and_longer_ones",
    ),
    Mutant(
        "share of pins not looked at",
        KEEPING,
        "            if num_kept + added > bound:\n",
        "            if added > bound:\n",
        "all pins together keep at most their share",
        scenarios=TRANSFERS_AMONG_REQUESTS,
    ),
    Mutant(
        "wrong blocks stay pinned",
        KEEPING,
        "            if any(part.tombstones for lease in pin.leases for part in pinned_parts(lease)):\n",
        "            if False:\n",
        "what turned out to be wrong takes no room",
        test="tests/core/test_pins.py::test_a_pin_does_not_keep_what_turned_out_to_be_wrong",
    ),
    Mutant(
        "reset leaves pins",
        LEDGER,
        "            self._pins.end_all(PinState.DROPPED)\n        if tier is None:\n",
        "            pass\n        if tier is None:\n",
        "a reset leaves nothing pinned that nobody reads",
        scenarios=("kept_windows",),
    ),
    Mutant(
        "nobody served when a pin ends",
        LEDGER,
        "            self._pins.end(pin, PinState.RELEASED)\n            self.admission.serve_queue()\n",
        "            self._pins.end(pin, PinState.RELEASED)\n",
        "everything that changes room serves the line",
    ),
    Mutant(
        "lapse not watched for",
        "aoffload._transfer.copy_queue",
        "due = self.ledger.next_lapse\n",
        "due = math.inf\n",
        "a pin ends when its time is over",
        scenarios=TRANSFERS_AMONG_REQUESTS,
    ),
    Mutant(
        "later pin delays an earlier deadline",
        WORKER,
        "        if deadline < self._looks_at:\n            self._looks_at = self._sleep.deadline = deadline\n",
        "        self._sleep.deadline = deadline\n",
        "a pin ends when its time is over, and so does a copy",
        scenarios=TRANSFERS_AMONG_REQUESTS,
    ),
    Mutant(
        "prefetch past a line",
        CACHE_TRANSFERS,
        "            if request.hit_stop <= request.published or not self.admission.queue.is_empty:\n",
        "            if request.hit_stop <= request.published:\n",
        "a prefetch takes nothing while somebody waits for room",
        scenarios=TRANSFERS_AMONG_REQUESTS,
    ),
    Mutant(
        "budget of prefetches not shared",
        CACHE_TRANSFERS,
        "        share = int(self.admission.capacity * self.max_share) - taken\n",
        "        share = int(self.admission.capacity * self.max_share)\n",
        "all prefetches together take at most their share",
        scenarios=TRANSFERS_AMONG_REQUESTS,
    ),
    Mutant(
        "prefetch beyond the room",
        CACHE_TRANSFERS,
        "        return wanted - min(share, self.admission.num_available)\n",
        "        return wanted - share\n",
        "a prefetch takes only room that is there",
        scenarios=TRANSFERS_AMONG_REQUESTS,
    ),
    Mutant(
        "cancelled prefetch stays under way",
        CACHE_TRANSFERS,
        "        settled = self.loads.abandon(transfer.request)\n"
        "        self._end(transfer, CacheTransferState.CANCELLED)\n",
        "        settled = self.loads.abandon(transfer.request)\n"
        "        self.moves.cache_transfer(transfer, CacheTransferState.CANCELLED)\n",
        "a budget goes back however a prefetch ends",
        scenarios=TRANSFERS_AMONG_REQUESTS,
    ),
    Mutant(
        "prefetch keeps its pins",
        CACHE_TRANSFERS,
        "        self.request_leases.let_go(transfer.request)\n",
        "        self.request_leases.end_host_lease(transfer.request)\n",
        "what was prefetched is cached, and pinned by nobody",
    ),
    Mutant(
        "prefetch that nobody wants is launched",
        CACHE_TRANSFERS,
        "        settled = self.loads.abandon(transfer.request)\n",
        "        settled: list[Job] = []\n",
        "a load lives as long as one waiter does",
        scenarios=TRANSFERS_AMONG_REQUESTS,
    ),
    Mutant(
        "read blocks sent away",
        CACHE_TRANSFERS,
        "            if agreed < run.stop or run.num_after > bool(found) or is_needed:\n",
        "            if agreed < run.stop or run.num_after > bool(found):\n",
        "what somebody reads stays",
    ),
    Mutant(
        "shared prefix sent away",
        CACHE_TRANSFERS,
        "            if agreed < run.stop or run.num_after > bool(found) or is_needed:\n",
        "            if agreed < run.stop or is_needed:\n",
        "what other cached prompts go on from stays",
    ),
    Mutant(
        "sent away without a copy",
        CACHE_TRANSFERS,
        "        if host_stop < hit.stop or not _is_known_by(self.stores.destination, hit):\n            return\n",
        "",
        "a demotion loses nothing",
        scenarios=TRANSFERS_AMONG_REQUESTS,
    ),
    Mutant(
        "old demotion frees a new epoch",
        CACHE_TRANSFERS,
        "        if transfer.request.epoch != cache.epoch:\n            return\n",
        "",
        "what was asked for before a reset changes nothing after it",
        test="tests/core/test_pins.py::test_a_demotion_from_before_a_reset_frees_nothing_after_it",
    ),
    Mutant(
        "whoever waits is not told of a close",
        SHELL,
        "            self._session.check_usable()\n\n\nclass PendingPrefetch",
        "            pass\n\n\nclass PendingPrefetch",
        "who waits hears that the runtime was closed",
        test="tests/shell/test_pin_scopes.py::test_a_close_with_all_three_in_flight[asyncio-True]",
    ),
    Mutant(
        "pin outlives its block",
        SHELL,
        "        if pin is not None:\n            self._session.leave_in_loop(",
        "        if pin is not None and error is None:\n            self._session.leave_in_loop(",
        "a pin is released by its scope, however it is left",
        scenarios=TRANSFERS_AMONG_REQUESTS,
    ),
)
