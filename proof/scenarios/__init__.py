"""The scenarios that are explored. Each is a small world with a hazard in it, and bystanders that it must not affect.

A scenario is an ordinary program against the public API. It checks what the general oracles of `aoffload.testing` can't
know; runs with nothing injected have to meet more of these checks than disturbed ones. Each is there for something that
random programs do not see:

- ranks: two_ranks, hours_with_a_full_host
- a device lost for good: lost_device
- a device that computes later: mixed_on_stream, computed_later, mixed
- several tasks of one request; requests dropped: two_tasks, overlapping_steps, threads_left, abandoned
- two runtimes, the package's engine, long lists: two_runtimes, paged_engine, paged_windows, long_prompts
- what has to hit, and what goes first: least_recently_used, evicted_otherwise, conversations, about_to_be_evicted,
  stored_in_time, asked_for_twice, not_to_be_stored, tenants, two_groups, stale_window
- shares and ends of pins and prefetches: keeping, pinned_full, kept_windows
- a wait, swept through each checkpoint: shared_load, branches, stored_twice, split_transfers, loads_first, retries,
  growing, second_try, late_room, stalled, rotten, run_form, sent_away_and_back
- deadlines: deadlines
- overlaps, failed forwards, preemptions: early_starts, failed_forwards, failed_in_turmoil, preemption_storm,
  preempted_windows, preempted_by_another, resumed_by_another, mixed_windows
- closing and resetting during a copy: reset_in_flight, close_in_flight, tier_resets
- a disk: only_on_disk, fetched_ahead, disk_that_hangs, evicted_while_stored, taken_back_on_disk, restarted_under_load,
  reset_with_a_disk
- a remote store: only_in_store, gone_in_between, fetched_from_store, store_that_hangs, taken_back_in_store,
  closed_on_a_store, shared_by_two, reset_with_a_store
- the same wrong call at every point: bad_input
"""

from __future__ import annotations

from . import (
    copies,
    disk,
    endings,
    invalidation,
    long,
    mixed,
    pins,
    policies,
    preemption,
    ranks,
    remote_store,
    sharing,
    tasks,
    wait_queue,
    windows,
)
from .paged import paged_engine, paged_windows
from .table import SCENARIOS, ScenarioRow, scenario

__all__ = [
    "SCENARIOS", "ScenarioRow", "copies", "disk", "endings", "invalidation", "long", "mixed", "pins", "policies",
    "preemption", "ranks", "remote_store", "sharing", "tasks", "wait_queue", "windows",
]  # fmt: skip

scenario("request_done")(paged_engine)
scenario("request_done")(paged_windows)
