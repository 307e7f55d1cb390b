"""examples/async_engine.py where every third load goes wrong: its outputs stay those of a run without blocks."""

from __future__ import annotations

import asyncio
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from clocks import LeapingLoop

from aoffload import DiskTier
from aoffload.host_cache import EngineRequest
from aoffload.ledger import Direction, TransferPlan
from aoffload.testing import FaultyTransport, JobFault
from aoffload.transport import Fence, LocalTransport

EXAMPLE = Path(__file__).parents[2] / "examples/async_engine.py"
LOAD_TIMEOUT_S = 30.0


class LoadsFail(FaultyTransport):
    """Every third load. A copy that hangs is given up at once: the clock leaps past its deadline."""

    def __init__(self, kv: torch.Tensor, fault: JobFault) -> None:
        # Else in the next turn: what is unproven is proven before the end.
        late_s = LOAD_TIMEOUT_S + 0.5 if fault is JobFault.HANG else 0.0
        super().__init__(LocalTransport(kv), fault, every=3, direction=Direction.LOAD, late_s=late_s)

    def launch(self, plan: TransferPlan, after: Fence | None) -> None:
        num_before = self.num_faults[JobFault.HANG]
        super().launch(plan, after)
        if self.num_faults[JobFault.HANG] > num_before:
            loop: Any = asyncio.get_running_loop()
            loop.call_soon(self._leap, loop)

    @staticmethod
    def _leap(loop: Any) -> None:
        loop.leapt_s += LOAD_TIMEOUT_S + 1  # outside of any task, where `clocks.leap` knows no loop


def run(
    fault: JobFault | None, monkeypatch: pytest.MonkeyPatch, tiers: dict[str, Any] | None = None, **replaced: Any
) -> tuple[Any, LoadsFail | None]:
    """The engine of the example, above these `tiers`, and the transport that it ran on."""
    made: list[LoadsFail] = []

    class Faulty(LocalTransport):
        def __new__(cls, kv: torch.Tensor, **_: None) -> Any:
            assert fault is not None
            made.append(LoadsFail(kv, fault))
            return made[0]

    num_threads = torch.get_num_threads()
    example = runpy.run_path(str(EXAMPLE))
    torch.set_num_threads(num_threads)
    if fault is not None:
        monkeypatch.setattr("aoffload._runtime.runtime.LocalTransport", Faulty)
    for name, method in replaced.items():
        monkeypatch.setattr(EngineRequest, name, method(getattr(EngineRequest, name)))
    with asyncio.Runner(loop_factory=LeapingLoop) as runner:
        return runner.run(example["main"](**tiers or {})), made[0] if made else None


@pytest.mark.parametrize("fault", [None, *JobFault])
def test_its_outputs_are_right_whatever_becomes_of_loads(
    fault: JobFault | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Among preemptions and native cancels; and in the end it has all its blocks again."""
    engine, transport = run(fault, monkeypatch)
    printed = capsys.readouterr().out
    assert "22 requests: 18 answered, 4 hung up on" in printed
    assert re.search(r"like those of a run without blocks: (\d+) of \1\n", printed), printed
    assert engine.counts["preempted"] and engine.counts["loaded"]
    assert transport is None or transport.num_faults.total() >= 2
    assert not any(engine.pool.num_holders) and len(engine.pool.free) == len(engine.kv) - 1


def test_it_loads_what_an_earlier_process_left_on_the_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its requests fetch: without that nothing below the host is ever read."""
    pytest.importorskip("xxhash", reason="the extra `disk` is not installed")
    tiers = {"namespace": "test", "disk": DiskTier(tmp_path / "disk", size=1 << 20)}
    for is_first in (True, False):
        engine, _ = run(None, monkeypatch, tiers)
        fetched = engine.runtime.statistics().disk_transfers.num_loads
        assert bool(fetched) is not is_first
        assert "like those of a run without blocks: 22 of 22\n" in capsys.readouterr().out


def test_it_notices_bytes_that_never_came(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An engine that believes the match instead of the load gives other answers."""

    def assuming_success(load: Any) -> Any:
        async def load_assuming_success(request: Any, *args: Any, **options: Any) -> int:
            await load(request, *args, **options)
            return int(request.match.num_tokens)

        return load_assuming_success

    run(JobFault.FAIL, monkeypatch, load=assuming_success)
    found = re.search(r"blocks: (\d+) of (\d+)\n", capsys.readouterr().out)
    assert found and int(found[1]) < int(found[2])
