"""Planted defects of components of limited reach, of preemption, and of resets of one tier."""

from __future__ import annotations

from .planting import Mutant

__all__ = ["WINDOW_MUTANTS"]

GROUPS, MATCHING, WINDOWS = "aoffload._config.groups", "aoffload._kernel.index", "aoffload._kernel.leases"
CACHE, PINS = "aoffload._kernel.cache", "aoffload._kernel.leases"
LOADS, ADMISSION, PREEMPTION = "aoffload._kernel.loads", "aoffload._kernel.waiting", "aoffload._extensions.preemption"
RECORDS, BASE = "aoffload._kernel.records", "aoffload._kernel.base"
CACHE_TRANSFERS, INVALIDATION = "aoffload._extensions.prefetch", "aoffload._extensions.invalidation"
INVALIDATION_TESTS = "tests/core/test_invalidation.py"

SHARED = "tests/core/test_shared_prefixes.py::"
COMMITS, OFFERS = "aoffload._kernel.commits", "aoffload._host_cache.offers"
_SHARED_PREFIXES = (
    Mutant(
        "no window at branch points",
        COMMITS,
        "ends = branch_points(run, first, stop)",
        "ends = list[int]()",
        "the third user of a prefix hits all of it",
        test=SHARED + "test_the_third_user_of_a_prefix_hits_all_of_it",
    ),
    Mutant(
        "the window one unit after the branch point",
        COMMITS,
        "[end - end % request.hit_alignment for end in ends]",
        "[min(stop, end + 1 - end % request.hit_alignment) for end in ends]",
        "the third user of a prefix hits all of it",
        test=SHARED + "test_random_prompts_hit_exactly_what_the_rule_says",
    ),
    Mutant(
        "the window of a branch point one unit short",
        COMMITS,
        "component, units.start, units.stop)",
        "component, units.start + 1, units.stop)",
        "the third user of a prefix hits all of it",
        test=SHARED + "test_random_prompts_hit_exactly_what_the_rule_says",
    ),
    Mutant(
        "the window of a branch point ignores `hit_alignment`",
        COMMITS,
        "[end - end % request.hit_alignment for end in ends]",
        "ends",
        "a hit that has to be aligned needs the window before it",
        test=SHARED + "test_windows_are_stored_where_aligned_hits_end",
    ),
    Mutant(
        "a branch point where a step begins is missed",
        "aoffload._kernel.index",
        "while before is not None and before.stop >= first:",
        "while before is not None and before.stop > first:",
        "wherever steps end, the third user hits",
        test=SHARED + "test_the_third_user_of_a_prefix_hits_all_of_it",
    ),
    Mutant(
        "a window wherever a run ends",
        "aoffload._kernel.index",
        "if before.num_after > 1 and before.stop < stop:",
        "if before.stop < stop:",
        "a prefix that nobody shares costs no window",
        test=SHARED + "test_random_prompts_hit_exactly_what_the_rule_says",
    ),
    Mutant(
        "no window where the policy ends",
        COMMITS,
        "        if first <= stop < request.published:\n            ends.append(stop)\n",
        "",
        "selective hits from the third request on",
        test=SHARED + "test_the_window_where_the_policy_ends_is_stored_while_the_request_has_it",
    ),
    Mutant(
        "an engine's window is not stored at branch points",
        OFFERS,
        "ends = _branch_points(path, first, limit)",
        "ends = list[int]()",
        "the third user of a prefix hits all of it",
        test=SHARED + "test_the_third_user_of_a_prefix_hits_all_of_it",
    ),
    Mutant(
        "an engine's window one unit short",
        OFFERS,
        "ranges = needed_at(component, [end - end % request.hit_alignment for end in ends])",
        "ranges = [range(each.start + 1, each.stop) for each in needed_at(component, ends)]",
        "the third user of a prefix hits all of it",
        test=SHARED + "test_random_prompts_hit_exactly_what_the_rule_says",
    ),
    Mutant(
        "an engine's prompt diverges only where more is computed",
        OFFERS,
        "limit = min(stop + 1, request.sequence.num_tokens // layout.unit_tokens)",
        "limit = stop",
        "wherever an offer ends, the third user hits",
        test=SHARED + "test_wherever_an_offer_ends_an_engine_s_window_is_stored",
    ),
    Mutant(
        "deferred windows that evict each other",
        OFFERS,
        "if left is not None and left.num_blocks >= old.num_blocks and left.num_evicted != old.num_evicted:",
        "if False:",
        "an engine at rest copies nothing",
        test="tests/core/test_engine_deferred.py::test_deferred_windows_that_evict_each_other_are_given_up",
    ),
    Mutant(
        "blocks before a window stay unwritten after a failed load",
        "aoffload._host_cache.host_cache",
        "        self._ready(request, ready)\n        self._written_from(request, ready)\n",
        "        self._ready(request, ready)\n",
        "a request that computes all of a prompt may invalidate any of it",
        test="tests/core/test_engine_failed_loads.py::"
        "test_after_a_load_that_failed_a_window_is_computed_by_the_request",
    ),
    Mutant(
        "an engine's window is not stored where the policy ends",
        OFFERS,
        "        if first <= stop < request.published:\n            ends.append(stop)\n",
        "",
        "selective hits from the third request on",
        test=SHARED + "test_selective_hits_a_shared_prefix_from_the_third_request_on",
    ),
    Mutant(
        "no window at an interval where an offer ends",
        "aoffload._kernel.jobs",
        "range((first // interval + 1) * interval, stop + 1, interval) if interval",
        "range((first // interval + 1) * interval, stop, interval) if interval",
        "windows are stored at each multiple of the interval",
        test=SHARED + "test_random_prompts_hit_exactly_what_the_rule_says",
    ),
    Mutant(
        "an interval rounded down",
        "aoffload._kernel.base",
        "-(-config.window_interval_tokens // self.layout.unit_tokens)",
        "config.window_interval_tokens // self.layout.unit_tokens",
        "an interval of one token is one block",
        test=SHARED + "test_the_second_user_hits_up_to_a_multiple_of_the_interval",
    ),
    Mutant(
        "windows of close ends joined one unit short",
        "aoffload._kernel.jobs",
        "found[-1] = range(found[-1].start, end)",
        "found[-1] = range(found[-1].start, end - 1)",
        "what a hit needs of a window is stored",
        test=SHARED + "test_random_prompts_hit_exactly_what_the_rule_says",
    ),
    Mutant(
        "lazy stores no window",
        COMMITS,
        "jobs = self._window_stores(request, lease.run, first, stop, is_last) if layout.windows else []",
        "jobs = list[Job]()",
        "lazy has the window of a shared prefix",
        test=SHARED + "test_lazy_has_the_window_of_a_shared_prefix",
    ),
    Mutant(
        "the disk stores no window inside a path",
        "aoffload._tiers.lower.rules",
        "most, ledger.layout.components, max(1, most // STEPS)",
        "most, (ledger.layout.full,), max(1, most // STEPS)",
        "the disk has the window of a shared prefix",
        test=SHARED + "test_the_disk_has_the_window_of_a_shared_prefix",
    ),
    Mutant(
        "lazy's watermark does not follow requests",
        "aoffload._extensions.store_policies",
        "        self._recent.append(stop * self._width)\n",
        "        pass\n",
        "lazy loses nothing to one long prompt after another",
        test="tests/core/test_policies.py::test_the_default_watermark_follows_the_length_of_requests",
    ),
)

_WINDOWS = (
    Mutant(
        "window one block short",
        GROUPS,
        "return range(max(0, hit_end - self.window + 1) // block_size",
        "return range((max(0, hit_end - self.window + 1) + block_size) // block_size",
        "what attention reads before a position is there",
        scenarios=("mixed_windows",),
    ),
    Mutant(
        "match ignores the windows",
        "aoffload._kernel.index",
        "        for component in layout.windows:\n            lower",
        "        for component in ():\n            lower",
        "a hit ends where every group has what it needs",
        scenarios=("mixed_windows",),
    ),
    Mutant(
        "window in the host counts as on the device",
        MATCHING,
        "return Hit(accepted(layout, path, min(device_stop, stop), (Tier.DEVICE,)), stop, path)",
        "return Hit(accepted(layout, path, min(device_stop, stop), HIT_TIERS), stop, path)",
        "a device hit needs no load",
        scenarios=("mixed_windows",),
    ),
    Mutant(
        "private window blocks leak",
        WINDOWS,
        "        cache.give(Tier.DEVICE, table.private(request.published, table.start, start))\n",
        "",
        "nothing leaks: what has left a window is free",
        scenarios=("mixed_windows",),
    ),
    Mutant(
        "slid window stays pinned",
        WINDOWS,
        "            cache.unpin_before(lease, component, start)\n",
        "            pass\n",
        "what has left a window is room for others",
        scenarios=("stale_window",),
    ),
    Mutant(
        "window let go of under another reader",
        "aoffload._kernel.cache",
        "            if not part.num_references:\n"
        "                unpinned.append(current)\n                blocks.make_unpinned(part)\n",
        "            unpinned.append(current)\n            blocks.make_unpinned(part)\n",
        "a block is free when everybody has let go",
        scenarios=("mixed_windows",),
    ),
    Mutant(
        "border moved under another's pin",
        "aoffload._kernel.cache",
        "                if (front.num_references, back.num_references) != (0, 1):\n",
        "                if front.num_references:\n",
        "nobody else's pins move with a window",
        scenarios=("mixed_windows",),
    ),
    Mutant(
        "what the load would adopt is not pinned",
        PINS,
        "                    request.reserve = cache.lease(Tier.DEVICE, last)\n",
        "                    pass\n",
        "a hit that was matched stays until it is loaded",
        test="tests/core/test_components.py::test_what_a_load_would_adopt_stays",
    ),
    Mutant(
        "own pins keep a request waiting",
        ADMISSION,
        "        if request.reserve is None:\n            return False\n",
        "        return False\n",
        "no request waits for what it pins itself",
        test="tests/core/test_call_sequences.py::test_a_pin_yields_whatever_the_first_in_line_has_matched",
    ),
    Mutant(
        "window stored from where its run begins",
        "aoffload._kernel.cache",
        "max(start, part.first), min(stop, part.stop)",
        "max(start, current.start), min(stop, part.stop)",
        "a store names only what is there",
        scenarios=("stale_window", "mixed_windows"),
    ),
    Mutant(
        "holes not filled when nothing is loaded",
        LOADS,
        "if load is None and (has_holes(request) or",
        "if load is None and (not request.tables or",
        "whatever becomes of a load, what is computed has blocks",
        scenarios=("mixed_windows",),
    ),
    Mutant(
        "room of a reserve not granted again",
        ADMISSION,
        "        if missing > self.num_available + gained:\n            return False\n"
        "        self.request_leases.match_again(request, islands=False)\n",
        "        self.request_leases.match_again(request, islands=False)\n"
        "        if missing > self.num_available:\n            return False\n",
        "refusing changes nothing: the match is as it was",
        test="tests/core/test_components.py::test_a_refusal_keeps_what_the_load_would_adopt",
    ),
)

_PREEMPTION = (
    Mutant(
        "preempted request keeps its pins",
        PREEMPTION,
        "            self._request_leases.lease_device_to(request, None)\n",
        "            pass\n",
        "preemption gives up every device block",
        scenarios=("preemption_storm", "preempted_windows"),
    ),
    Mutant(
        "preempted request keeps its tables",
        PREEMPTION,
        "        self._request_leases.give_up_tables(request)\n",
        "",
        "preemption gives up every device block",
        scenarios=("preemption_storm", "preempted_windows"),
    ),
    Mutant(
        "preempted progress stored too late",
        PREEMPTION,
        "            jobs = self._stores.offer_with_windows(request, run, published, stop)\n",
        "            pass\n",
        "the progress of a preempted request is kept in host memory",
        test="tests/core/test_preemption.py::test_progress_comes_back_from_the_host",
    ),
    Mutant(
        "preemption stores although the policy stores nothing",
        PREEMPTION,
        " and not self._stores_nothing",
        "",
        "a policy that stores nothing stores nothing",
        test="tests/core/test_transfers.py::test_a_policy_that_stores_nothing_stores_nothing_at_preemption",
    ),
    Mutant(
        "preempted although a step runs",
        PREEMPTION,
        "        if request.num_steps:\n            raise",
        "        if request.num_steps < 0:\n            raise",
        "a step holds what it touches",
        test="tests/core/test_illegal_calls.py::test_what_the_table_does_not_allow_is_refused",
    ),
    Mutant(
        "reset of a tier leaves it findable",
        CACHE,
        "            for part in run.parts_in(tier):\n                self.withdraw",
        "            for part in ():\n                self.withdraw",
        "what was reset is never found again",
        scenarios=("tier_resets",),
    ),
)

_INVALIDATION = (
    Mutant(
        "tombstones stay with the tail",
        "aoffload._kernel.records",
        "            front.tombstones, self.tombstones = divided(self.tombstones, self.width, at)\n",
        "            pass\n",
        "whoever runs keeps its blocks, whatever is reset",
        scenarios=("failed_in_turmoil",),
    ),
    Mutant(
        "what others have computed since is thrown away",
        RECORDS,
        "        self.tombstones = tuple([unit for unit in units if unit.ids[0] not in ids])",
        "        self.tombstones = ()",
        "every block is in one hand",
        test=f"{INVALIDATION_TESTS}::test_what_two_have_computed_is_taken_back_by_the_first_after_a_reset",
    ),
    Mutant(
        "who was resumed keeps a match that was taken back",
        INVALIDATION,
        "[other for other in others if other in tainted or _leases_any(other, wrong)]",
        "[other for other in others if other not in tainted and _leases_any(other, wrong)]",
        "every block is in one hand",
        test=f"{INVALIDATION_TESTS}::test_who_was_resumed_has_all_its_room_when_its_match_is_taken_back",
    ),
    Mutant(
        "what was read before a preemption is forgotten",
        INVALIDATION,
        "                read += self._read_before_of(other, sources)\n",
        "",
        "who has read what was wrong hears of it",
        scenarios=("failed_in_turmoil",),
    ),
    Mutant(
        "who waits to begin its load again is not told of a preemption",
        PREEMPTION,
        "            wakes.append(request.waiter.wake)\n",
        "            pass\n",
        "nobody sleeps on what is over",
        scenarios=("preempted_by_another",),
    ),
    Mutant(
        "woken in the middle of a preemption",
        PREEMPTION,
        "            wakes += self._jobs.end_claims(self._jobs.abandon(load))\n            wakes += load.conclude()\n",
        "            self._ledger.end_call(self._jobs.end_claims(self._jobs.abandon(load)) + load.conclude())\n",
        "a block is given to somebody else once every job and step has let go",
        test="tests/core/test_preemption.py::test_a_wake_finds_the_preemption_done",
    ),
    Mutant(
        "whoever was preempted may read everything",
        PREEMPTION,
        "max(request.hit_limit, request.num_computed_tokens // unit_tokens)",
        "request.sequence.num_tokens",
        "who may use no hit gets back what it has computed itself",
        test=f"{INVALIDATION_TESTS}::test_its_own_progress_is_not_more_than_it_may_read",
    ),
    Mutant(
        "a reset clears who has read what was wrong",
        BASE,
        "if request.num_units and request.epoch == self.cache.epoch:",
        "if request.num_units:",
        "who has to be aborted stays so",
        test=f"{INVALIDATION_TESTS}::test_a_reset_does_not_clear_who_has_read_what_was_wrong",
    ),
    Mutant(
        "resumed before it is refused",
        PREEMPTION,
        "        if num_tokens is not None:\n            self._admission",
        "        if num_tokens is None:\n            self._admission",
        "a refusal changes nothing",
        test=f"{INVALIDATION_TESTS}::test_a_refused_resume_changes_nothing[0]",
    ),
    Mutant(
        "what hits without bytes sent away",
        CACHE_TRANSFERS,
        "        if hit.stop and not any(",
        "        if False and not any(",
        "a demotion loses nothing",
        test="tests/core/test_pins.py::test_what_hits_without_a_byte_in_the_host_stays",
    ),
)

_INSIDE_UNITS = (
    Mutant(
        "a window that begins inside a unit needs all of it",
        "aoffload._host_cache.host_cache",
        "component.before_window(stop) if first == needed else []",
        "[]",
        "an engine loads a window although it has no blocks before it",
        test="tests/core/test_engine_owned.py::test_a_window_that_begins_inside_a_unit_has_null_blocks_before_it",
    ),
    Mutant(
        "a null block inside a window is loaded",
        "aoffload._kernel.layout",
        "range(at, at + needed // block_size)",
        "range(at, at + self.unit_tokens // block_size)",
        "what computing reads is loaded",
        test="tests/core/test_engine_owned.py::test_a_window_that_begins_inside_a_unit_has_null_blocks_before_it",
    ),
)

WINDOW_MUTANTS = (*_INSIDE_UNITS, *_SHARED_PREFIXES, *_WINDOWS, *_PREEMPTION, *_INVALIDATION)
