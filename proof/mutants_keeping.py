"""Planted defects of what programs ask for beside their requests: pins, prefetches and demotions."""

from __future__ import annotations

from .planting import Mutant

__all__ = ["KEEPING_MUTANTS"]

KEEPING, ERRANDS, ADMISSION = "aoffload.core.keeping", "aoffload.core.errands", "aoffload.core.admission"
LEDGER, WORKER, SHELL = "aoffload.core.ledger", "aoffload.worker", "aoffload.keeping"

KEEPING_MUTANTS = (
    Mutant(
        "pins in the way of the line",
        ADMISSION,
        "        return not self.others_hold_room() and self.yield_pin()\n",
        "        return False\n",
        "no request is starved by pins",
    ),
    Mutant(
        "pins yield too early",
        ADMISSION,
        "        return not self.others_hold_room() and self.yield_pin()\n",
        "        return self.yield_pin()\n",
        "a pin ends for a request only where nobody else will make room",
    ),
    Mutant(
        "extension fails before pins yield",
        ADMISSION,
        "        if self.yield_pin():\n            return True",
        "        if False:\n            return True",
        "no request is starved by pins",
    ),
    Mutant(
        "pin yields for nothing",
        KEEPING,
        "            if any(kept[part] == part.num_references for part in _counted(pin)):\n",
        "            if any(True for part in _counted(pin)):\n",
        "what a pin shares with a request is no room",
    ),
    Mutant(
        "pin keeps the device only",
        KEEPING,
        "        elif (host_stop := held_alone(cache, hit, Tier.HOST)) > 0:\n",
        "        elif (host_stop := held_alone(cache, hit, Tier.HOST)) < 0:\n",
        "what is cached stays where it is cached",
    ),
    Mutant(
        "window of a shorter hit not kept",
        KEEPING,
        "        again = (sequence.num_tokens - 1) // cache.layout.unit_tokens\n",
        "        again = limit\n",
        "a pin of a prompt serves the same prompt again",
    ),
    Mutant(
        "share of pins not looked at",
        KEEPING,
        "            if num_kept + added > bound:\n",
        "            if added > bound:\n",
        "all pins together keep at most their share",
    ),
    Mutant(
        "wrong blocks stay pinned",
        KEEPING,
        "            if any(part.condemned is not None for lease in pin.leases for part in _parts(lease)):\n",
        "            if False:\n",
        "what turned out to be wrong takes no room",
    ),
    Mutant(
        "reset leaves pins",
        LEDGER,
        "        self._keeping.end_all(PinState.DROPPED)\n        if tier is None:\n",
        "        if tier is None:\n",
        "a reset leaves nothing pinned that nobody reads",
    ),
    Mutant(
        "nobody served when a pin ends",
        LEDGER,
        "            self._keeping.end(pin, PinState.RELEASED)\n            self.admission.pump()\n",
        "            self._keeping.end(pin, PinState.RELEASED)\n",
        "everything that changes room serves the line",
    ),
    Mutant(
        "lapse not watched for",
        WORKER,
        "        return min(transfers, self.ledger.next_lapse)\n",
        "        return transfers\n",
        "a pin ends when its time is over",
    ),
    Mutant(
        "later pin delays an earlier deadline",
        WORKER,
        "        if deadline < self._sleep.deadline:\n            self._sleep.deadline = deadline\n",
        "        self._sleep.deadline = deadline\n",
        "a pin ends when its time is over, and so does a copy",
    ),
    Mutant(
        "prefetch past a line",
        ERRANDS,
        "            if holding.hit_stop <= holding.published or not self.admission.line.is_empty:\n",
        "            if holding.hit_stop <= holding.published:\n",
        "a prefetch takes nothing while somebody waits for room",
    ),
    Mutant(
        "budget of prefetches not shared",
        ERRANDS,
        "        share = int(self.admission.capacity * self.max_share) - taken\n",
        "        share = int(self.admission.capacity * self.max_share)\n",
        "all prefetches together take at most their share",
    ),
    Mutant(
        "prefetch beyond the room",
        ERRANDS,
        "        return wanted - min(share, self.admission.room)\n",
        "        return wanted - share\n",
        "a prefetch takes only room that is there",
    ),
    Mutant(
        "cancelled prefetch stays under way",
        ERRANDS,
        "        settled = self.loads.abandon(errand.holding)\n        self._end(errand, _S.CANCELLED)\n",
        "        settled = self.loads.abandon(errand.holding)\n        self.moves.errand(errand, _S.CANCELLED)\n",
        "a budget goes back however a prefetch ends",
    ),
    Mutant(
        "prefetch keeps its pins",
        ERRANDS,
        "        self.pins.let_go(errand.holding)\n",
        "        self.pins.end_host_lease(errand.holding)\n",
        "what was prefetched is cached, and pinned by nobody",
    ),
    Mutant(
        "prefetch that nobody wants is launched",
        ERRANDS,
        "        settled = self.loads.abandon(errand.holding)\n",
        "        settled: list[Job] = []\n",
        "a load lives as long as one waiter does",
    ),
    Mutant(
        "read blocks sent away",
        ERRANDS,
        "            if agreed < run.stop or run.num_after > bool(found) or is_needed:\n",
        "            if agreed < run.stop or run.num_after > bool(found):\n",
        "what somebody reads stays",
    ),
    Mutant(
        "shared prefix sent away",
        ERRANDS,
        "            if agreed < run.stop or run.num_after > bool(found) or is_needed:\n",
        "            if agreed < run.stop or is_needed:\n",
        "what other cached prompts go on from stays",
    ),
    Mutant(
        "sent away without a copy",
        ERRANDS,
        "        if held_alone(cache, hit, Tier.HOST) < hit.stop:\n            return\n",
        "",
        "a demotion loses nothing",
    ),
    Mutant(
        "old demotion frees a new epoch",
        ERRANDS,
        "        if errand.holding.epoch != cache.epoch:\n            return\n",
        "",
        "what was asked for before a reset changes nothing after it",
    ),
    Mutant(
        "whoever waits is not told of a close",
        SHELL,
        "            self._runtime._check_usable()\n\n\nclass PendingPrefetch",
        "            pass\n\n\nclass PendingPrefetch",
        "who waits hears that the runtime was closed",
    ),
    Mutant(
        "pin outlives its block",
        SHELL,
        "        if self._pin is not None:\n            self._runtime.ledger.unpin(self._pin)\n",
        "        if self._pin is not None and error is None:\n            self._runtime.ledger.unpin(self._pin)\n",
        "a pin is released by its scope, however it is left",
    ),
)
