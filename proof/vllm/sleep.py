"""Sleep mode with vLLM 0.33: tiers survive it when the weights do.

vLLM has no sleep on CPUs. So the worker of this part does what vLLM's worker for GPUs does: it calls the connector, and
discards the contents of its tensors. All above the worker is vLLM's: the pause, the resets, the order of calls.
"""

from __future__ import annotations

import random
from typing import Any

from aoffload._vllm.internals import tells_of_sleep

from .bench import Bench, Scenario, Talks, run_part
from .engines import Engine
from .models import DENSE
from .rows import Row
from .transfers import OURS

__all__ = ["SCENARIOS"]

LARGE_POOL = 1200
LAST_TURN = 3
KEPT = 0.9
"""Share of the tokens that the reference run finds cached, found after sleep."""
OTHER_WEIGHTS = 1.5


class Sleeper:
    """Sleep of vLLM's worker, in this process."""

    def __init__(self, engine: Engine) -> None:
        self.worker = engine.engine.engine_core.engine_core.model_executor.driver_worker.worker
        self.connector = engine.worker_connector
        self.memories = self.worker.model_runner.kv_caches
        self.saved = {name: each.clone() for name, each in self._weights().items()}
        self.calls: list[str] = []
        self.worker.sleep, self.worker.wake_up = self.sleep, self.wake_up
        self.factor = 1.0
        """By which the weights differ after sleep."""

    def _weights(self) -> dict[str, Any]:
        return dict(self.worker.get_model().named_parameters())

    def sleep(self, level: int = 1) -> None:
        self.calls.append(f"sleep {level}")
        self.connector.unregister_kv_caches()
        drawn = random.Random("sleep")
        for memory in self.memories:
            memory.fill_(drawn.random())
        for each in self._weights().values() if level == 2 else ():
            each.data.zero_()

    def wake_up(self, tags: Any = None) -> None:
        self.calls.append("wake up")
        for name, each in self._weights().items():
            each.data.copy_(self.saved[name] * self.factor if each.dim() > 1 else self.saved[name])
        self.connector.restore_kv_caches()


def _slept(bench: Bench, name: str, level: int, factor: float, *, has_reset: bool = False) -> Row:
    """All turns but the last, sleep, and the last one. The engine's own cache is empty then."""
    if not tells_of_sleep():
        return Row(name, found="this version of vLLM does not tell connectors of sleep", was_run=False)
    with bench.engine(LARGE_POOL, OURS) as engine:
        sleeper = Sleeper(engine)
        for turn in range(LAST_TURN):
            engine.serve(bench.turn(turn), bench.talks.num_new_tokens)
        engine.rest()
        if has_reset:
            engine.engine.reset_prefix_cache(reset_connector=True)
        sleeper.factor = factor
        engine.engine.sleep(level)
        engine.engine.wake_up()
        before = dict(engine.served.answers)
        engine.serve(bench.turn(LAST_TURN), bench.talks.num_new_tokens)
        last = {name: engine.served.answers[name] for name in bench.turn(LAST_TURN)}
        served = engine.rest()
    cached = sum(answer.num_cached_tokens for answer in last.values())
    wanted = sum(bench.reference.answers[name].num_cached_tokens for name in last)
    is_same = factor == 1.0
    row = bench.judge(name, served, f"{cached:,} of {wanted:,} tokens from before the sleep", may_differ=not is_same)
    is_kept = is_same and not has_reset
    return row.missed(
        "" if sleeper.calls == [f"sleep {level}", "wake up"] else f"the worker was told {sleeper.calls}",
        "" if not is_kept or cached >= KEPT * wanted else "the tiers have forgotten",
        "" if is_kept or not cached else "KV from before the sleep was used",
        "" if len(before) else "nothing was served",
    )


def level_1(bench: Bench) -> Row:
    return _slept(bench, "sleep at level 1", 1, 1.0)


def level_2(bench: Bench) -> Row:
    return _slept(bench, "sleep at level 2, the same weights loaded again", 2, 1.0)


def other_weights(bench: Bench) -> Row:
    return _slept(bench, "sleep at level 1, other weights loaded meanwhile", 1, OTHER_WEIGHTS)


def reset(bench: Bench) -> Row:
    return _slept(bench, "a reset, then sleep at level 1", 1, 1.0, has_reset=True)


SCENARIOS = (
    Scenario("level 1", level_1, is_short=True),
    Scenario("level 2", level_2, is_short=True),
    Scenario("other weights", other_weights, is_short=True),
    Scenario("reset", reset, is_short=True),
)

if __name__ == "__main__":
    from unittest import mock

    from vllm.platforms import current_platform

    with mock.patch.object(type(current_platform), "is_sleep_mode_available", return_value=True):
        run_part(DENSE, SCENARIOS, Talks(number=6), enable_sleep_mode=True)
