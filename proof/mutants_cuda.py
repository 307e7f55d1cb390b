"""Planted defects of copies on a GPU: concurrent copies, and access to blocks during a copy."""

from __future__ import annotations

from .planting import Mutant

__all__ = ["CUDA_MUTANTS"]

BACKEND, KERNEL = "aoffload._transfer.backends.cuda.backend", "aoffload._transfer.backends.cuda.kernel"
EVENTS, PAGE_LOCKED = "aoffload._transfer.backends.cuda.events", "aoffload._transfer.backends.cuda.page_locked"

CUDA_MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "batches without a bound",
        BACKEND,
        "            while len(lane.batches) >= options.max_batches:\n",
        "            while False:\n",
        "few batches are under way: some drivers hang otherwise",
        test="tests/transfer/test_cuda.py::test_batches_under_way_are_few",
    ),
    Mutant(
        "batches bounded by those that were forgotten",
        BACKEND,
        "                self.driver.synchronize_event(oldest.event)\n",
        "",
        "few batches are under way: some drivers hang otherwise",
        test="tests/transfer/test_cuda.py::test_batches_under_way_are_few",
    ),
    Mutant(
        "table written while a kernel reads it",
        KERNEL,
        "        self.fence.synchronize()\n",
        "",
        "a copy reads and writes what its job names",
        test="tests/transfer/test_cuda_kernel.py::test_a_table_is_written_again_only_when_no_kernel_reads_it",
    ),
    Mutant(
        "fence of a table recorded before its kernel",
        KERNEL,
        "            self._module.launch(grid, table.fill(part), len(part), alignment, TILE_BYTES)\n"
        "            table.fence = record()\n",
        "            filled = table.fill(part)\n"
        "            table.fence = record()\n"
        "            self._module.launch(grid, filled, len(part), alignment, TILE_BYTES)\n",
        "a copy reads and writes what its job names",
        test="tests/transfer/test_cuda_kernel.py::test_a_table_is_written_again_only_when_no_kernel_reads_it",
    ),
    Mutant(
        "single blocks read on the stream of loads",
        BACKEND,
        "self.driver.on_stream(self._single_blocks):\n            block:",
        "self.driver.on_stream(self._lanes[Direction.LOAD].stream):\n            block:",
        "verification waits for no later copy",
        test="tests/transfer/test_cuda.py::test_single_blocks_do_not_wait_for_copies",
    ),
    Mutant(
        "event of a late fence never destroyed",
        EVENTS,
        "        if self._is_over:\n",
        "        if False:\n",
        "what was made for copies is destroyed with them",
        test="tests/transfer/test_cuda_events.py::test_events_that_nobody_uses_are_destroyed_with_the_pool",
    ),
    Mutant(
        "cgroup not asked before memory is page-locked",
        PAGE_LOCKED,
        "    _check_cgroup(max(0, host_size(num_blocks, block_bytes) - already_allocated))\n",
        "",
        "a pool that cannot be had is refused, and kills nobody",
        test="tests/transfer/test_cuda_memory.py::test_a_pool_for_which_the_process_would_be_killed_is_refused",
    ),
)
