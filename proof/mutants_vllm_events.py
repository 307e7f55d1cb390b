"""Mutants of the connector for vLLM: KV events, and the tiers that hits come from."""

from __future__ import annotations

from .planting import Mutant

__all__ = ["VLLM_EVENT_MUTANTS"]

EVENTS, REQUESTS = "aoffload._vllm.kv_events", "aoffload._vllm.requests"
VIEWS = "tests/events/test_router_views.py::"
CONNECTOR = "tests/integrations/vllm_connector/test_vllm_events.py::"
EVERYTHING = f"{VIEWS}test_both_routers_see_what_is_cached_after_ten_thousand_random_steps"

VLLM_EVENT_MUTANTS = (
    Mutant(
        "vLLM events: a reset takes nothing back",
        EVENTS,
        "                self._leaving, self._units, self._num_unnamed = self._units, {}, 0\n",
        "                self._units, self._num_unnamed = {}, 0\n",
        "a router sees what is cached",
        test=EVERYTHING,
    ),
    Mutant(
        "vLLM events: vLLM's own reset goes unnoticed",
        EVENTS,
        "            self._changes.tell_anew()\n        self._learn",
        "            pass\n        self._learn",
        "a router sees what is cached, also after vLLM has published that all is cleared",
        test=EVERYTHING,
    ),
    Mutant(
        "vLLM events: two sets of weights under one name are two blocks",
        EVENTS,
        "                if self._twins[place, found.hashes[-1]] > 1:\n",
        "                if False:\n",
        "a block is stored once before it is removed once",
        test=EVERYTHING,
    ),
    Mutant(
        "vLLM events: hashes are dropped before the changes that need them",
        EVENTS,
        "                if found.hashes:\n                    self._learned[digest] = found\n",
        "",
        "every block that a request has stored has events",
        test=EVERYTHING,
    ),
    Mutant(
        "vLLM events: a request is forgotten before its stores have ended",
        EVENTS,
        "        storing = {job.request_id for job in ledger.jobs.unsettled.values()} | set(",
        "        storing = {job.request_id for job in ()} | set(",
        "every block that a request has stored has events",
        test=EVERYTHING,
    ),
    Mutant(
        "vLLM events: the parent is the block itself",
        EVENTS,
        "                parent = hashes[first - 1] if first else None\n",
        "                parent = hashes[first] if first else None\n",
        "a router sees what is cached",
        test=EVERYTHING,
    ),
    Mutant(
        "vLLM events: all of it in one step",
        EVENTS,
        "                left -= change.stop - change.start\n",
        "",
        "the work of a step is bounded",
        test=f"{VIEWS}test_a_step_does_not_do_it_all",
    ),
    Mutant(
        "vLLM events: an error leaves routers with old blocks",
        EVENTS,
        "        self._leaving, self._units = {**self._leaving, **self._units}, {}\n",
        "",
        "no router counts on blocks of which it hears no more",
        test=f"{VIEWS}test_an_error_takes_back_what_was_named",
    ),
    Mutant(
        "vLLM events: matches teach nothing",
        EVENTS,
        "            self._matched.append(",
        "            list[object]().append(",
        "what a restart has found gets its hashes from the first request that hits it",
        test=f"{VIEWS}test_what_a_restart_has_found_is_named_once_somebody_asks",
    ),
    Mutant(
        "vLLM hits: all of a hit is the disk's if some of it is",
        REQUESTS,
        "            found[tier] += max(0, min(stop, (at + 1) * unit) - max(start, at * unit))\n",
        "            found[tier] = num_tokens\n",
        "hits by tier are exact",
        test=f"{CONNECTOR}test_only_what_the_fetch_has_brought_counts_for_the_disk",
    ),
)
