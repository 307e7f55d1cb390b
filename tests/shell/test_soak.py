"""The soak: real threads, real bytes, requests cut short anywhere. It passes, and it notices what it is there for."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aoffload import Request, WrongState
from aoffload.core.holding import Holding
from aoffload.core.pins import Pins
from aoffload.core.plan import Direction, TransferPlan
from aoffload.transfer.backends.cpu import CpuBackend
from proof import soak as soak_module
from proof.soak import soak
from proof.soak_result import Sample, SoakResult
from proof.soak_workload import Workload

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory is read from /proc")

SECONDS = 3.0
MB = 10**6


def only_once(at: int) -> Callable[[], bool]:
    """True at the call of that number, counted from 1."""
    calls = iter(range(1, 1_000_000_000))
    return lambda: next(calls) == at


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "num_clients"), [("asyncio", 40), ("trio", 40), ("asyncio", 1000)])
def test_a_short_soak_passes(backend: str, num_clients: int) -> None:
    """Every block is right, nothing is pinned at rest, no descriptor too many, in a run in which all of it happens."""
    result = soak(SECONDS, backend, 1, num_clients)
    assert result.has_passed, result.table()
    assert result.max_pinned_at_rest == 0
    assert result.num_done > 0.8 * result.num_requests
    assert {"native", "scope", "request", "runtime", "deadline"} <= set(result.num_ended_early)
    assert json.loads(result.as_json())["has_passed"]


def test_a_release_that_is_skipped_fails_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request of hundreds keeps its pins: the next rest says so."""
    let_go, skips = Pins.let_go, only_once(at=150)

    def forgetful(self: Pins, holding: Holding) -> None:
        if not holding.table or not skips():  # who never had room may have nothing to let go of
            let_go(self, holding)

    monkeypatch.setattr(Pins, "let_go", forgetful)
    monkeypatch.setattr(soak_module, "PATIENCE_S", 0.2)
    result = soak(SECONDS, "asyncio", seed=1)
    assert not result.has_passed
    assert result.max_pinned_at_rest > 0
    assert "pinned" in result.problems[0]


def test_one_corrupted_byte_fails_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single bit of a single block of a load is wrong: whoever is told that the block is ready says so."""
    copy, spared = CpuBackend.copy, iter(range(100))

    def careless(self: CpuBackend, plan: TransferPlan) -> Any:
        fence = copy(self, plan)
        # Every load behind the hundredth: nobody may ever be told of a single one, its request being cancelled.
        if plan.direction is Direction.LOAD and next(spared, None) is None:
            self._rows[0][plan.destination_ids[0], 7] ^= 1
        return fence

    monkeypatch.setattr(CpuBackend, "copy", careless)
    result = soak(SECONDS, "asyncio", seed=1)
    assert not result.has_passed
    assert any("wrong bytes" in problem or "other bytes than were stored" in problem for problem in result.problems)


def test_a_request_that_fails_fails_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody had cancelled it: an error out of one call of one request ends the run."""
    allocate, breaks = Request.allocate, only_once(at=100)

    async def broken(self: Request, num_tokens: int | None = None) -> None:
        if breaks():
            raise WrongState("broken on purpose")
        await allocate(self, num_tokens)

    monkeypatch.setattr(Request, "allocate", broken)
    result = soak(SECONDS, "asyncio", seed=1)
    assert any("broken on purpose" in problem for problem in result.problems)
    assert result.wall_s < SECONDS


def test_tickets_follow_from_the_seed() -> None:
    """What is asked for can be asked for again; another seed asks for something else."""

    def asked(seed: int) -> list[Any]:
        workload = Workload(seed)
        tickets = [ticket for number in range(50) for ticket in workload.session(number)]
        return [(t.conversation.name, t.prompt.tolist(), t.home, t.forward_s, t.interruption) for t in tickets]

    assert asked(7) == asked(7)
    assert asked(7) != asked(8)


def made_up(rss_bytes: list[int], num_fds: list[int]) -> SoakResult:
    """A minute, in which all that was there is these figures, at equal distances."""
    step_s = 60 / (len(rss_bytes) - 1)
    samples = [Sample(i * step_s, rss_bytes[i], num_fds[i], 5) for i in range(len(rss_bytes))]
    counts = dict.fromkeys(("num_requests", "num_done", "max_waiting", "num_failed_forwards", "num_resets"), 1)
    blocks = dict.fromkeys(("checked", "loaded", "stored", "verified", "evicted"), 1)
    return SoakResult(
        backend="asyncio", seed=0, wall_s=60.0, num_ended_early={}, num_rests=1, max_pinned_at_rest=0, samples=samples,
        found=[], **counts, **{f"blocks_{name}": number for name, number in blocks.items()},
    )  # fmt: skip


def test_memory_is_judged_by_its_slope() -> None:
    """What the first quarter takes is warm-up; a megabyte a minute behind it is a leak, and its slope is right."""
    warm = [100 * MB, 150 * MB] + [200 * MB] * 7
    assert made_up(warm, [9] * 9).has_passed
    leaking = [100 * MB + 2 * MB * i // 8 for i in range(9)]
    assert made_up(leaking, [9] * 9).slope == pytest.approx(2.0)
    assert "resident memory" in made_up(leaking, [9] * 9).problems[0]


def test_descriptors_are_flat() -> None:
    """One descriptor more than after the warm-up fails the run."""
    assert "descriptors" in made_up([MB] * 9, [9] * 8 + [10]).problems[0]


@pytest.mark.parametrize(("num_fds", "code", "verdict"), [(9, 0, "passed"), (10, 1, "FAILED")])
def test_the_command_says_it_by_its_exit_code(
    num_fds: int, code: int, verdict: str, monkeypatch: Any, tmp_path: Path, capsys: Any
) -> None:
    """Zero only for a run that passed; the table and the file say the same."""
    monkeypatch.setattr(soak_module, "soak", lambda *options: made_up([MB] * 9, [9] * 8 + [num_fds]))
    monkeypatch.setattr(sys, "argv", ["soak", "--json", str(tmp_path / "soak.json")])
    with pytest.raises(SystemExit) as left:
        soak_module.main()
    assert int(left.value.code or 0) == code
    assert verdict in capsys.readouterr().out
    assert json.loads((tmp_path / "soak.json").read_text())["has_passed"] is (code == 0)
