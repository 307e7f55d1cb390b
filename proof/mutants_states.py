"""Planted defects of checkpoints of a recurrent state."""

from __future__ import annotations

from .planting import Mutant

__all__ = ["STATE_MUTANTS"]

COMMITS, LEASES, LOADS = "aoffload._kernel.commits", "aoffload._kernel.leases", "aoffload._kernel.loads"
CACHE, INDEX, JOBS = "aoffload._kernel.cache", "aoffload._kernel.index", "aoffload._kernel.jobs"
WAITING, INVALIDATION = "aoffload._kernel.waiting", "aoffload._extensions.invalidation"
ORDER = "aoffload._eviction.checkpoints"
ORDER_TEST = "tests/core/test_checkpoint_order.py::"
HOST_CACHE, OFFERS = "aoffload._host_cache.host_cache", "aoffload._host_cache.offers"
TEST = "tests/core/test_checkpoints.py::"
PROGRAMS = TEST + "test_random_programs_with_states[states]"
ENGINE_PROGRAMS = TEST + "test_random_programs_with_states[engine-states]"

STATE_MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "a checkpoint wherever a commit passes a planned one",
        COMMITS,
        "            for position in written:\n",
        "            planned = request.checkpoints.planned if request.checkpoints is not None else {}\n"
        "            for position in sorted(at for at in planned if at <= num_units):\n",
        "only named checkpoints are found",
        test=TEST + "test_only_a_named_checkpoint_is_found",
    ),
    Mutant(
        "a checkpoint of another position",
        LEASES,
        "if not part.enter(position - 1, position, checkpoints.planned[position]):",
        "if not part.enter(position - 1, position, checkpoints.planned[max(checkpoints.planned)]):",
        "a hit continues from the state at its end",
        test=PROGRAMS,
    ),
    Mutant(
        "a checkpoint one unit later",
        LEASES,
        "return held_ids(request.device_run, DEVICE, cache.layout.recurrent.number, position - 1, position)",
        "return held_ids(request.device_run, DEVICE, cache.layout.recurrent.number, position, position + 1)",
        "a hit continues from the state at its end",
        test=PROGRAMS,
    ),
    Mutant(
        "a checkpoint under the prefix of another prompt",
        LEASES,
        "    checkpoints, lease, recurrent = request.checkpoints, request.leases[DEVICE], cache.layout.recurrent\n"
        "    assert checkpoints is not None and recurrent is not None\n"
        "    run = next(run for run, _, _ in stretches(lease.run, position - 1, position))\n",
        "    checkpoints, lease, recurrent = request.checkpoints, request.leases[DEVICE], cache.layout.recurrent\n"
        "    assert checkpoints is not None and recurrent is not None\n"
        "    run = next(run for run, _, _ in stretches(lease.run, position - 1, position))\n"
        "    run = next((r for r in cache.index.runs.values() if r.start < position <= r.stop), run)\n",
        "a checkpoint belongs to one prefix",
        test=PROGRAMS,
    ),
    Mutant(
        "KV without a checkpoint is a hit",
        INDEX,
        "        for component in layout.partial:\n",
        "        for component in layout.windows:\n",
        "a hit needs its checkpoint",
        test=TEST + "test_only_a_named_checkpoint_is_found",
    ),
    Mutant(
        "a checkpoint from before a reset is published",
        COMMITS,
        "            for position in written:\n                publish_checkpoint(self.cache, request, position)\n",
        "            pass\n"
        "        if DEVICE in request.leases:\n"
        "            for position in written:\n"
        "                publish_checkpoint(self.cache, request, position)\n"
        "        if is_current:\n",
        "nothing from before a reset is found",
        test=PROGRAMS,
    ),
    Mutant(
        "a checkpoint that has landed in part is published",
        JOBS,
        "else completion.num_landed // width",
        "else (completion.num_landed + width - 1) // width",
        "a torn checkpoint is no checkpoint",
        test=PROGRAMS,
    ),
    Mutant(
        "the checkpoint of a hit is not pinned",
        CACHE,
        "pinned[-1] = run.start  # its checkpoint",
        "pinned[-1] = run.stop  # its checkpoint",
        "a checkpoint stays until its request has continued",
        test=TEST + "test_the_checkpoint_of_a_hit_is_pinned_until_the_request_has_computed",
    ),
    Mutant(
        "a request goes on from the checkpoint before its load",
        LOADS,
        "            request.checkpoints.resume = checkpoint_ids(self.cache, request, ready)\n",
        "            pass\n",
        "a hit continues from the state at its end",
        test=PROGRAMS,
    ),
    Mutant(
        "a load ends without its checkpoint",
        INDEX,
        "    return accepted(layout, path, stop, (tier,), alignment, given=given)",
        "    return stop",
        "a load that lacks its checkpoint falls short",
        test=TEST + "test_a_load_without_its_checkpoint_counts_for_nothing",
    ),
    Mutant(
        "a written checkpoint stays pinned",
        LEASES,
        "        cache.unpin_all(lease, recurrent)\n\n",
        "        pass\n\n",
        "a live request keeps no room for what it has written",
        test=TEST + "test_a_published_checkpoint_is_cached_and_not_pinned",
    ),
    Mutant(
        "blocks of a checkpoint that was left out are kept",
        LEASES,
        "for position in [at for at in checkpoints.planned if at * unit <= request.num_computed_tokens]:",
        "for position in [at for at in checkpoints.planned if at * unit < 0]:",
        "what is left out goes back",
        test=TEST + "test_blocks_of_a_checkpoint_that_was_left_out_are_free",
    ),
    Mutant(
        "the step that wrote a checkpoint is forgotten",
        LEASES,
        "cache.last_uses.gave_up(request, checkpoints.resume + checkpoints.written)",
        "cache.last_uses.gave_up(request, checkpoints.resume)",
        "a load waits for the forward that used its blocks",
        test=TEST + "test_a_load_waits_for_the_step_that_has_written_a_checkpoint",
    ),
    Mutant(
        "the step that read a checkpoint is forgotten",
        LEASES,
        "cache.last_uses.gave_up(request, checkpoints.resume + checkpoints.written)",
        "cache.last_uses.gave_up(request, checkpoints.written)",
        "a load waits for the forward that used its blocks",
        test=TEST + "test_a_load_waits_for_the_step_that_has_written_a_checkpoint",
    ),
    Mutant(
        "no checkpoint at a branch",
        LEASES,
        "for position in (end, request.checkpoints.branch_stop):",
        "for position in (end,):",
        "the third prompt with a prefix hits",
        test=TEST + "test_the_branch_is_planned_where_the_kv_goes_further_than_the_states",
    ),
    Mutant(
        "checkpoints are planned where they do not fit",
        LEASES,
        "            found += max(0, min(num_planned, room // width)) * width\n",
        "            found += num_planned * width\n",
        "a request that fits without checkpoints is admitted",
        test=TEST + "test_fewer_checkpoints_are_planned_where_all_do_not_fit",
    ),
    Mutant(
        "a hit that takes the room of its request",
        WAITING,
        "        if self._hit_is_too_large(request, num_units):\n            missing, gained",
        "        if False:\n            missing, gained",
        "a request that fits without its hit is admitted",
        test=TEST + "test_a_request_does_without_a_hit_whose_checkpoint_takes_its_room",
    ),
    Mutant(
        "a preempted request leaves its checkpoint to eviction",
        "aoffload._extensions.preemption",
        "                starts[-1] = cache.last_checkpoint(host, run)\n",
        "                starts[-1] = run.stop\n",
        "a preempted request continues from its last checkpoint",
        test=TEST + "test_a_preempted_request_continues_from_its_last_checkpoint",
    ),
    Mutant(
        "a fork begins with the initial state",
        "aoffload._extensions.forks",
        "            child.checkpoints.resume = parent.checkpoints.resume[:]\n",
        "",
        "a fork continues where its parent does",
        test=TEST + "test_a_fork_continues_where_its_parent_does",
    ),
    Mutant(
        "an invalidation leaves a checkpoint beside KV of another request",
        INVALIDATION,
        "            self._withdraw_checkpoints(sources)\n",
        "            pass\n",
        "no checkpoint of a failed forward is found",
        test=TEST + "test_an_invalidation_finds_a_checkpoint_beside_kv_of_another_request",
    ),
    Mutant(
        "who has continued from a wrong checkpoint is not told",
        INVALIDATION,
        "                read += self._checkpoints_read_by(other, sources)\n",
        "",
        "whoever has read wrong bytes is told",
        test=TEST + "test_an_invalidation_finds_a_checkpoint_beside_kv_of_another_request",
    ),
    Mutant(
        "a request goes back behind its running state",
        INVALIDATION,
        "and not is_back",
        "",
        "a running state cannot go back",
        test=TEST + "test_a_request_cannot_go_back_behind_its_running_state",
    ),
    Mutant(
        "a checkpoint that is being copied outlives its invalidation",
        CACHE,
        "            if is_of_it and any(",
        "            if False and any(",
        "a copy of wrong bytes publishes nothing",
        test=TEST + "test_an_invalidation_finds_a_checkpoint_beside_kv_of_another_request",
    ),
    Mutant(
        "an engine's load without its checkpoint counts",
        HOST_CACHE,
        "            return arrival.start  # only the checkpoint at the planned end was loaded\n",
        "            return stop\n",
        "a load that lacks its checkpoint falls short",
        test="tests/core/test_engine_failed_loads.py::test_a_load_that_lacks_its_checkpoint_or_kv_counts_for_nothing",
    ),
    Mutant(
        "an engine's checkpoint is stored one unit late",
        OFFERS,
        "                yield Offer(recurrent, position - 1, position, ids)\n",
        "                if position < stop:\n"
        "                    yield Offer(recurrent, position, position + 1, ids)\n",
        "a hit continues from the state at its end",
        test=ENGINE_PROGRAMS,
    ),
    Mutant(
        "a checkpoint wherever cached KV ends",
        LEASES,
        "hit.full_stop if is_branch else 0",
        "hit.full_stop",
        "the end of an answer is no branch",
        test=TEST + "test_the_end_of_an_answer_is_no_branch",
    ),
    Mutant(
        "checkpoints inside a path count in full",
        ORDER,
        "INNER = 0.02",
        "INNER = 1.0",
        "prompts continue at the end of a path",
        test=ORDER_TEST + "test_a_checkpoint_inside_a_path_goes_before_an_older_one_at_an_end",
    ),
    Mutant(
        "KV without a checkpoint is evicted last",
        ORDER,
        "return self._oldest_tail() or self._least() or self._kv.oldest()",
        "return self._least() or self._oldest_tail() or self._kv.oldest()",
        "KV that brings no hit goes first",
        test=ORDER_TEST + "test_kv_after_the_last_checkpoint_goes_first",
    ),
    Mutant(
        "a checkpoint outlives its KV",
        ORDER,
        "            return USELESS\n",
        "            return 99\n",
        "a checkpoint without KV goes first",
        test=ORDER_TEST + "test_a_checkpoint_whose_kv_is_gone_goes_before_all_else",
    ),
    Mutant(
        "the bytes of a checkpoint do not count",
        ORDER,
        "(stop - before) * max(1, full.width) / freed))",
        "(stop - before) * max(1, full.width)))",
        "a checkpoint that frees more goes first",
        test=ORDER_TEST + "test_every_eviction_is_that_of_the_rule",
    ),
)
