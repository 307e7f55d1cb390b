"""examples/async_engine.py where every third load goes wrong: its outputs stay those of a run without blocks."""

from __future__ import annotations

import asyncio
import re
import runpy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from clocks import LeapingLoop

from aoffload.env import Env
from aoffload.ledger import Completion, Direction, Outcome, TransferPlan
from aoffload.transport import Fence, LocalTransport, TransferRefused

EXAMPLE = Path(__file__).parents[2] / "examples/async_engine.py"
LOAD_TIMEOUT_S = 30.0


class EveryThirdLoad(LocalTransport):
    """Of the bytes in memory; every third load goes wrong in a way of the subclass."""

    wrong: ClassVar[Counter[str]] = Counter()

    def open(self, num_host_blocks: int, *, verify: bool, deliver: Callable[[Completion], None], env: Env) -> None:
        super().open(num_host_blocks, verify=verify, deliver=deliver, env=env)
        self._tell, self._num_loads = deliver, 0

    def launch(self, plan: TransferPlan, after: Fence | None) -> None:
        self._num_loads += plan.direction is Direction.LOAD
        if plan.direction is Direction.LOAD and self._num_loads % 3 == 1:
            self.wrong[type(self).__name__] += 1
            self.go_wrong(plan, after)
        else:
            super().launch(plan, after)

    def go_wrong(self, plan: TransferPlan, after: Fence | None) -> None:
        raise NotImplementedError


class Fails(EveryThirdLoad):
    def go_wrong(self, plan: TransferPlan, after: Fence | None) -> None:
        self._tell(Completion(plan.job_id, Outcome.FAILED, 0, error="broken"))


class IsRefused(EveryThirdLoad):
    def go_wrong(self, plan: TransferPlan, after: Fence | None) -> None:
        raise TransferRefused("refused")


class IsUnproven(EveryThirdLoad):
    """Nobody can say whether it goes on; it does, over blocks that nobody else may have."""

    def go_wrong(self, plan: TransferPlan, after: Fence | None) -> None:
        self._tell(Completion(plan.job_id, Outcome.UNPROVEN, error="lost"))
        asyncio.get_running_loop().call_later(0.01, lambda: LocalTransport.launch(self, plan, after))


class Hangs(EveryThirdLoad):
    """Longer than a request waits, then it writes all the same."""

    def go_wrong(self, plan: TransferPlan, after: Fence | None) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(LOAD_TIMEOUT_S + 0.5, lambda: LocalTransport.launch(self, plan, after))
        loop.call_soon(self._leap, loop)

    def _leap(self, loop: Any) -> None:
        loop.leapt_s += LOAD_TIMEOUT_S + 1  # outside of any task, where `clocks.leap` knows no loop


@pytest.mark.parametrize("transport", [LocalTransport, Fails, IsRefused, IsUnproven, Hangs])
def test_its_outputs_are_right_whatever_becomes_of_loads(
    transport: type[LocalTransport], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Among preemptions and native cancels; and in the end it has all its blocks again."""
    num_threads = torch.get_num_threads()
    example = runpy.run_path(str(EXAMPLE))
    torch.set_num_threads(num_threads)
    monkeypatch.setattr("aoffload.runtime.LocalTransport", transport)
    monkeypatch.setattr(EveryThirdLoad, "wrong", Counter())
    with asyncio.Runner(loop_factory=LeapingLoop) as runner:
        engine: Any = runner.run(example["main"]())
    printed = capsys.readouterr().out
    assert "22 requests: 18 answered, 4 hung up on" in printed
    assert re.search(r"like those of a run without blocks: (\d+) of \1\n", printed), printed
    assert engine.counts["preempted"] and engine.counts["loaded"]
    assert transport is LocalTransport or EveryThirdLoad.wrong[transport.__name__] >= 2
    assert len(engine.pool.free) == example["NUM_ROWS"] - 1 and not any(engine.pool.num_holders)


def test_it_notices_bytes_that_never_came(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An engine that believes the match instead of the load gives other answers."""
    num_threads = torch.get_num_threads()
    example = runpy.run_path(str(EXAMPLE))
    torch.set_num_threads(num_threads)
    monkeypatch.setattr("aoffload.runtime.LocalTransport", Fails)
    load = example["Request"].load

    async def load_and_believe(request: Any, *args: Any, **options: Any) -> int:
        await load(request, *args, **options)
        return int(request.match.num_tokens)

    monkeypatch.setattr(example["Request"], "load", load_and_believe)
    with asyncio.Runner(loop_factory=LeapingLoop) as runner:
        runner.run(example["main"]())
    found = re.search(r"blocks: (\d+) of (\d+)\n", capsys.readouterr().out)
    assert found and int(found[1]) < int(found[2])
