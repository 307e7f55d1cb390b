"""Planted defects of steps that overlap a load: reads before the load is over, and commits."""

from __future__ import annotations

from .planting import Mutant

__all__ = ["OVERLAP_MUTANTS"]

EARLY, COPIES = "aoffload._extensions.overlap", "aoffload._transfer.copy_queue"
TEST = "tests/core/test_overlap.py::"

OVERLAP_MUTANTS = (
    Mutant(
        "a load taken for landed, however it ended",
        EARLY,
        "        for component in self._cache.layout.paged:\n            first, table",
        "        for component in ():\n            first, table",
        "what was computed on bytes that never came is never committed",
        test=f"{TEST}test_a_load_that_is_waited_for_no_longer_refutes",
    ),
    Mutant(
        "only the first block compared",
        EARLY,
        "if table.at(first, overlap.stop) != overlap.tables[component.number][first * component.width :]:",
        "if table.at(first, first + 1)[:1] != overlap.tables[component.number][first * component.width :][:1]:",
        "what was read of blocks that were somebody else's by then is never committed",
        test=f"{TEST}test_a_load_that_is_waited_for_no_longer_refutes",
    ),
    Mutant(
        "compared only when all of the load is over",
        EARLY,
        "        if lacking:\n",
        "        if not overlap.tables:\n",
        "what was read of a block that came back with other bytes is never committed",
        test=f"{TEST}test_a_block_that_comes_back_to_its_place_refutes",
    ),
    Mutant(
        "committed on a load that fell short",
        EARLY,
        "        if num_computed_tokens > ready:\n",
        "        if num_computed_tokens < ready:\n",
        "commit refuses what stood on a load that failed",
        scenarios=("early_starts",),
    ),
    Mutant(
        "counted again before anybody has heard",
        EARLY,
        "if overlap is not None and overlap.state is OverlapState.ACKNOWLEDGED:",
        "if overlap is not None and overlap.state is not OverlapState.SPECULATIVE:",
        "slice after slice on a load that failed: none of them counts",
        scenarios=("early_starts",),
    ),
    Mutant(
        "room given back under an early forward",
        "aoffload._kernel.loads",
        "        if request.num_steps:\n            if request.load",
        "        if not request.tables:\n            if request.load",
        "a step holds what it touches, also when the load of its request fails",
        test="tests/core/test_overlap.py::test_a_forward_keeps_what_it_writes_when_there_is_no_room_to_go_on",
    ),
    Mutant(
        "a failed load kept when its step is over",
        "aoffload._kernel.ledger",
        "        elif request.state is DRAINING and",
        "        elif request.state is LOADING and",
        "no hang: who had to wait for its own forward goes on when that ends",
        scenarios=("early_starts",),
    ),
    Mutant(
        "expected where another branch goes on",
        EARLY,
        'array("i", [held or block_id for held, block_id in zip(there, brought, strict=True)])',
        "brought",
        "a forward reads the blocks of its own prefix",
        test=f"{TEST}test_a_shared_job_of_another_branch_brings_only_what_both_have",
    ),
    Mutant(
        "regions of a settled load left open",
        COPIES,
        "            self.regions.settle(completion)\n",
        "",
        "whoever waits for a region hears how the load ended",
        scenarios=("early_starts",),
    ),
    Mutant(
        "regions of an unwanted load left open",
        COPIES,
        '                    self.regions.end(job_id, "no request waits for it any more")\n',
        '                    if after is not None:\n                        self.regions.end(job_id, "")\n',
        "whoever waits for a region hears that nobody brings it any more",
        test="tests/shell/test_pending_loads.py::test_a_queued_load_that_nobody_wants_any_more_ends_its_regions",
    ),
    Mutant(
        "regions of a load given up left open",
        COPIES,
        "            self.regions.settle(given_up)\n",
        "",
        "a forward that waits for a copy that hangs goes on",
        scenarios=("early_starts",),
    ),
)
