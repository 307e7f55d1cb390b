"""examples/continuous_batching.py where copies go wrong and clients hang up: each answer is right as far as it goes."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from aoffload import Request
from aoffload.testing import FaultyTransport, JobFault
from aoffload.transport import LocalTransport

EXAMPLE = Path(__file__).parents[2] / "examples/continuous_batching.py"
GUARD_S = 60.0


@pytest.fixture
def example() -> dict[str, Any]:
    num_threads = torch.get_num_threads()
    found = runpy.run_path(str(EXAMPLE))
    torch.set_num_threads(num_threads)
    return found


def run(example: dict[str, Any], backend: str) -> Any:
    async def main() -> Any:
        with anyio.fail_after(GUARD_S):
            return await example["main"]()

    return anyio.run(main, backend=backend)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("fault", [*JobFault])
def test_its_answers_are_right_whatever_becomes_of_copies(
    fault: JobFault,
    backend: str,
    example: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every other one goes wrong, of what is stored at a preemption and of what is loaded after it; a copy that hangs
    or is in doubt comes a little later."""
    made: list[FaultyTransport] = []

    class Faulty(LocalTransport):
        def __new__(cls, kv: torch.Tensor, **_: None) -> Any:
            made.append(FaultyTransport(LocalTransport(kv), fault, every=2, late_s=0.01))
            return made[0]

    monkeypatch.setattr("aoffload._runtime.runtime.LocalTransport", Faulty)
    engine = run(example, backend)
    printed = capsys.readouterr().out
    assert "as if each had the device alone: 12\n" in printed
    no_room = engine.counts["error: OutOfBlocks"]
    answered, gone = map(int, re.findall(r"(\d+) (?:answered|hung)", printed))
    assert answered + gone + no_room == 12 and (no_room or gone == 2)
    assert not no_room or fault is JobFault.UNPROVEN, "only blocks in doubt are no room for anybody"
    assert made[0].num_faults.total() > 2
    assert engine.counts["preempted"] and not engine.batch


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_clients_may_hang_up_wherever_their_task_waits(
    backend: str, example: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the line, in the batch, in a resume, while another one preempts it: the others are answered all the same."""
    num_waits, waits = 0, Request._wait

    async def wait_and_be_cancelled(request: Request, *args: Any) -> bool:
        nonlocal num_waits
        num_waits += 1
        if num_waits % 5 == 0:
            request.cancel("client_gone")
        return await waits(request, *args)

    monkeypatch.setattr(Request, "_wait", wait_and_be_cancelled)
    run(example, backend)
    printed = capsys.readouterr().out
    answered, gone = map(int, re.findall(r"(\d+) (?:answered|hung)", printed))
    assert answered + gone == 12 and answered and gone > 2, printed
    assert "as if each had the device alone: 12\n" in printed
    assert "left on the device: 0 blocks" in printed


def test_it_notices_bytes_that_never_came(
    example: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One wrong number in a block that was loaded, and the answer is another one."""
    resume: Callable[..., Any] = Request.resume

    async def resume_and_spoil(request: Request, num_tokens: int | None = None) -> int:
        num_ready: int = await resume(request, num_tokens)
        if num_ready:
            request._session.transport.regions[0].tensor[request.block_ids[0][0], 1] += 1  # type: ignore[attr-defined]
        return num_ready

    monkeypatch.setattr(Request, "resume", resume_and_spoil)
    run(example, "asyncio")
    found = re.search(r"alone: (\d+)\n", capsys.readouterr().out)
    assert found and int(found[1]) < 12
