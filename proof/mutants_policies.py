"""Planted defects of the store policies, and of a request's own limits on stores."""

from __future__ import annotations

from .planting import Mutant

__all__ = ["POLICY_MUTANTS"]

WATERMARK, HIT_COUNTS = "aoffload._extensions.watermark", "aoffload._eviction.counts"
CACHE, COMMITS = "aoffload._kernel.cache", "aoffload._kernel.commits"

HOST_THRASHING = "tests/core/test_host_thrashing.py::"

POLICY_MUTANTS = (
    Mutant(
        "evicted prefixes stored at every commit",
        COMMITS,
        "            if has_evicted and any(",
        "            if False and any(",
        "a host that is too small evicts, and copies no more for that",
        test=f"{HOST_THRASHING}test_nothing_is_stored_again_and_again",
    ),
    Mutant(
        "evicted prefixes never stored again",
        COMMITS,
        "        if missing and first and not is_last:\n",
        "        if missing and first:\n",
        "the end of a request stores what a later one can hit",
        test=f"{HOST_THRASHING}test_the_last_commit_stores_what_was_evicted_meanwhile",
    ),
    Mutant(
        "evicted prefixes stored at every offer",
        "aoffload._host_cache.offers",
        " and not is_last and self._evicts(request):",
        " and False:",
        "a host that is too small evicts, and copies no more for that",
        test=f"{HOST_THRASHING}test_nothing_is_stored_again_and_again",
    ),
    Mutant(
        "watermark a part too far",
        WATERMARK,
        "            if num_blocks <= 0:",
        "            if num_blocks < 0:",
        "a lazy store stores what the next blocks of the watermark evict, and no more",
    ),
    Mutant(
        "watermark at the hot end",
        WATERMARK,
        "self.lacking(source.order, left, wanted)",
        "self.lacking(reversed(list(source.order)), left, wanted)",
        "what is about to be evicted is stored before it is lost",
    ),
    Mutant(
        "stored after eviction",
        WATERMARK,
        "left = self.num_blocks - source",
        "left = source.num_evicted and self.num_blocks - source",
        "what is about to be evicted is stored before it is lost",
    ),
    Mutant(
        "being stored is a use",
        CACHE,
        "manager.pin(blocks, run, start, is_use)",
        "manager.pin(blocks, run, start, False)",
        "what is used becomes the newest, even if it was being stored meanwhile",
    ),
    Mutant(
        "stored moves to the hot end",
        "aoffload._kernel.pools",
        "        if part.last_use:\n            self.order.add_back(part)",
        "        if part.last_use < 0:\n            self.order.add_back(part)",
        "being stored makes nobody hot",
    ),
    Mutant(
        "a count that never grows",
        HIT_COUNTS,
        "        self.num_uses += 1\n",
        "        self.num_uses = 1\n",
        "what was asked for often enough is stored",
    ),
    Mutant(
        "a count that ages though it is asked for",
        HIT_COUNTS,
        "        self._runs.move_to_end(run.key)\n",
        "",
        "what was asked for longest ago is forgotten first",
        test="tests/core/test_policies.py::test_what_was_asked_for_longest_ago_is_forgotten_first",
    ),
    Mutant(
        "counts without bound",
        HIT_COUNTS,
        "while self.num_tokens > self._max_tokens:",
        "while self.num_tokens > 1000 * self._max_tokens:",
        "memory for counts is bounded",
    ),
    Mutant(
        "not to be stored, and stored",
        "aoffload._kernel.commits",
        "        if stop > request.store_limit:\n            stop = request.store_limit\n",
        "",
        "what a request does not want stored is not stored on its account",
    ),
    Mutant(
        "stored with what was not offered",
        WATERMARK,
        "        return min(run.offered_stop, run.stop)\n",
        "        return run.stop\n",
        "what a request does not want stored is not stored later on either",
    ),
    Mutant(
        "what must not be stored counts as offered",
        "aoffload._kernel.index",
        "        head.num_after, head.offered_stop = 1, min(at, run.offered_stop)",
        "        head.num_after, head.offered_stop = 1, at",
        "what a request does not want stored is not stored later on either",
    ),
)
