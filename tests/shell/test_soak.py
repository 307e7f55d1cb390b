"""The soak: real threads, real bytes, cancelled requests. It passes, and it detects planted defects."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aoffload import Request, WrongState
from aoffload._kernel.leases import RequestLeases
from aoffload._kernel.plans import TransferPlan
from aoffload._kernel.records import LedgerRequest
from aoffload._kernel.states import Direction
from aoffload._transfer.backends.cpu import CpuBackend
from proof import soak as soak_module
from proof.soak import Length, soak
from proof.soak_result import Sample, SoakResult
from proof.soak_workload import Workload

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory is read from /proc")

MB = 10**6
SHORT = Length(num_clients=40, num_sessions=2, num_rests=2)
CROWDED = Length(num_clients=300, num_sessions=1, num_rests=1)


def only_once(at: int) -> Callable[[], bool]:
    """True at the call of that number, counted from 1."""
    calls = iter(range(1, 1_000_000_000))
    return lambda: next(calls) == at


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "length"), [("trio", SHORT), ("asyncio", CROWDED)])
def test_a_short_soak_passes(backend: str, length: Length) -> None:
    """Every block is right, nothing is pinned at rest, no descriptor too many, in a run in which all of it happens."""
    result = soak(backend, 1, length)
    assert result.has_passed, result.table()
    assert result.max_pinned_at_rest == 0
    assert result.num_done > result.num_requests / 2
    assert result.num_ended_early
    assert json.loads(result.as_json())["has_passed"]


def test_requests_are_to_be_ended_in_every_way() -> None:
    """Whether a request is over before it is struck is up to the threads; that each way is tried is not."""
    num_sessions = SHORT.num_clients * SHORT.num_sessions * SHORT.num_rests
    workload = Workload(1)
    tickets = [ticket for number in range(num_sessions) for ticket in workload.session(number)]
    kinds = {ticket.interruption.kind for ticket in tickets if ticket.interruption is not None}
    assert kinds == {"native", "scope", "request", "runtime"}
    assert any(ticket.deadline_s is not None for ticket in tickets)


def test_a_release_that_is_skipped_fails_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request of hundreds keeps its pins: the next rest says so."""
    release_all, skips = RequestLeases.release_all, only_once(at=150)

    def forgetful(self: RequestLeases, record: LedgerRequest) -> None:
        if not record.table or not skips():  # who never had room may have nothing to let go of
            release_all(self, record)

    monkeypatch.setattr(RequestLeases, "release_all", forgetful)
    monkeypatch.setattr(soak_module, "PATIENCE_S", 0.2)  # what was forgotten stays for ever
    result = soak("asyncio", 1, SHORT)
    assert not result.has_passed
    assert result.max_pinned_at_rest > 0
    assert "pinned" in result.problems[0]


def test_one_corrupted_byte_fails_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single bit of a single block of a load is wrong: the request that reads the block reports it."""
    copy, spared = CpuBackend.copy, iter(range(20))

    def careless(self: CpuBackend, plan: TransferPlan) -> Any:
        fence = copy(self, plan)
        # Every load behind the twentieth: nobody may ever be told of a single one, its request being cancelled.
        if plan.direction is Direction.LOAD and next(spared, None) is None:
            self._rows[0][plan.destination_ids[0], 7] ^= 1
        return fence

    monkeypatch.setattr(CpuBackend, "copy", careless)
    result = soak("asyncio", 1, SHORT)
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
    result = soak("asyncio", 1, SHORT)
    assert any("broken on purpose" in problem for problem in result.problems)
    assert result.num_rests == 1 and result.num_requests < 160


def test_tickets_follow_from_the_seed() -> None:
    """What is asked for can be asked for again; another seed asks for something else."""

    def asked(seed: int) -> list[Any]:
        workload = Workload(seed)
        tickets = [ticket for number in range(50) for ticket in workload.session(number)]
        return [(t.conversation.name, t.prompt.tolist(), t.home, t.forward_s, t.interruption) for t in tickets]

    assert asked(7) == asked(7)
    assert asked(7) != asked(8)


def made_up(rss_bytes: list[int], num_fds: list[int]) -> SoakResult:
    """Four thousand requests, in which all that was there is these figures, at equal distances."""
    step = 4000 // (len(rss_bytes) - 1)
    samples = [Sample(i * step, rss_bytes[i], num_fds[i], 5) for i in range(len(rss_bytes))]
    counts = dict.fromkeys(("num_done", "max_waiting", "num_failed_forwards", "num_resets"), 1)
    counts |= {f"blocks_{name}": 1 for name in ("checked", "loaded", "stored", "verified", "evicted")}
    return SoakResult(
        backend="asyncio", seed=0, wall_s=60.0, num_requests=4000, num_ended_early={}, num_rests=1, found=[],
        max_pinned_at_rest=0, samples=samples, **counts,
    )  # fmt: skip


def test_memory_is_judged_by_its_slope() -> None:
    """What the first quarter takes is warm-up; 200 bytes a request after it are a leak, and its slope is right."""
    warm = [100 * MB, 150 * MB] + [200 * MB] * 7
    assert made_up(warm, [9] * 9).has_passed
    leaking = [100 * MB + 2 * MB * i // 8 for i in range(9)]
    assert made_up(leaking, [9] * 9).slope == pytest.approx(0.5)
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
