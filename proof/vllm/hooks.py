"""How long the scheduler spends in the hooks of a connector, step by step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["HOOKS", "HookTimes", "mean", "percentile"]

HOOKS = (
    "on_new_request", "get_num_new_matched_tokens", "get_loaded_kv_cache_group_ids", "get_external_cache_hit_sources",
    "update_state_after_alloc", "build_connector_meta", "update_connector_output", "request_finished",
    "request_finished_all_groups", "has_pending_block_frees", "has_pending_push_work", "take_events",
    "get_kv_connector_stats",
)  # fmt: skip
"""What vLLM's scheduler calls."""


@dataclass(frozen=True)
class Spent:
    nanoseconds: int
    is_working: bool
    """Tokens were scheduled, or blocks were allocated for a load. The others only poll."""


class HookTimes:
    """Counts the time of the calling thread, not of the clock: other processes take their share of that."""

    def __init__(self, connector: Any, clock_ns: Callable[[], int] = time.thread_time_ns) -> None:
        self._clock_ns = clock_ns
        self._depth = self._spent_ns = 0
        self._has_allocated = False
        self.steps: list[Spent] = []
        for name in HOOKS:
            if (hook := getattr(connector, name, None)) is not None:
                setattr(connector, name, self._timed(name, hook))

    def _timed(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            self._has_allocated |= name == "update_state_after_alloc"
            self._depth += 1
            began_ns = self._clock_ns()
            try:
                return hook(*arguments, **options)
            finally:
                took_ns = self._clock_ns() - began_ns
                self._depth -= 1
                if not self._depth:  # hooks may call each other
                    self._spent_ns += took_ns

        return timed

    def end_step(self, num_scheduled_tokens: int) -> None:
        """A step of the engine is over, in which that many tokens were scheduled."""
        self.steps.append(Spent(self._spent_ns, num_scheduled_tokens > 0 or self._has_allocated))
        self._spent_ns, self._has_allocated = 0, False

    def working_us(self) -> list[float]:
        """Microseconds in each step that did more than poll; what polling cost is added to the next of them."""
        found, polled = [], 0
        for step in self.steps:
            polled += step.nanoseconds
            if step.is_working:
                found.append(polled / 1e3)
                polled = 0
        if polled and found:
            found[-1] += polled / 1e3
        return found


def mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def percentile(numbers: Sequence[float], percent: float) -> float:
    """The smallest of `numbers` that at least `percent` of them do not exceed."""
    ordered = sorted(numbers)
    return ordered[max(0, -int(-len(ordered) * percent // 100) - 1)]
