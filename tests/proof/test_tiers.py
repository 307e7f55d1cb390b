"""The long proof of the disk tier can fail: its checks detect planted failures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("xxhash", reason="the extra `disk` is not installed")

from aoffload._kernel.states import Outcome
from aoffload._tiers.disk.slots import DiskOutcome, DiskSlots
from proof.disk.simulated_disk import DiskFault
from proof.tiers import kills
from proof.tiers.engine import WrongBytes
from proof.tiers.failing_calls import KINDS, one_run
from proof.tiers.server import SIZE_BYTES


@pytest.mark.parametrize("kind", KINDS)
def test_requests_go_on_whatever_call_fails(kind: DiskFault) -> None:
    """A few calls of each kind; `make tiers` fails each of them."""
    for number, backend in ((3, "asyncio"), (12, "trio"), (25, "asyncio")):
        num_calls, _ = one_run(kind, number, backend)
        assert num_calls > number


def test_wrong_bytes_from_the_disk_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes whatever it reads for what was stored there."""
    load = DiskSlots.load

    def assuming_success(self: DiskSlots, slots: Any, host_ids: Any) -> DiskOutcome:
        load(self, slots, host_ids)
        return DiskOutcome(Outcome.LANDED, len(slots))

    monkeypatch.setattr(DiskSlots, "load", assuming_success)

    def lose_one_write_after_another() -> None:
        for number in range(40):
            one_run(DiskFault.LOST, number, "asyncio")

    with pytest.raises(WrongBytes, match="tokens that hit"):
        lose_one_write_after_another()


HELD = {"0": 100, "1": 50}


def life(found: dict[str, int], *held: tuple[float, dict[str, int]], more: Any = ()) -> list[list[Any]]:
    looks = [["held", when, what] for when, what in held]
    return [["found", 0.0, found], *looks, ["compared", 1.0, 7], *more, ["killed", 10.0, None]]


def judged(monkeypatch: pytest.MonkeyPatch, *lives: list[list[Any]], num_bytes: int = SIZE_BYTES) -> list[str]:
    """The lines that are not met."""
    following = iter(lives)

    def one_life(place: Path, seed: int) -> list[list[Any]]:
        return next(following)

    monkeypatch.setattr(kills, "_one_life", one_life)
    monkeypatch.setattr(kills, "_du", lambda place: num_bytes)
    return [line.what for line in kills.kills(len(lives) - 1) if not line.is_met]


def test_what_was_there_a_second_before_has_to_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine tenths of it; what was evicted since, or published since, does not count."""
    before = life({}, (8.0, {"0": 100, "1": 50}), (9.5, {"0": 100, "1": 20, "2": 900}))
    empty = {"0": 0, "1": 0, "2": 0}
    assert judged(monkeypatch, before, life({"0": 100, "1": 20, "2": 0})) == []
    assert judged(monkeypatch, before, life({"0": 90, "1": 20, "2": 500})) == []
    assert judged(monkeypatch, before, life({"0": 80, "1": 20})) == ["published a second before a kill, and hits again"]
    assert judged(monkeypatch, before, life(empty)) == ["published a second before a kill, and hits again"]


def test_a_wrong_byte_a_crash_and_too_large_files_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each on its own line."""
    before, after = life({}, (8.0, HELD), (9.9, HELD)), life(HELD)
    wrong = life(HELD, more=[["wrong", 2.0, "block 3"]])
    crash = life(HELD, more=[["ended", 2.0, "RuntimeError()"]])
    assert judged(monkeypatch, before, wrong) == ["wrong bytes after a kill"]
    assert judged(monkeypatch, before, crash) == ["kills"]
    assert judged(monkeypatch, before, after, num_bytes=int(SIZE_BYTES * 1.02)) == ["space on the disk"]
    assert "kills" in judged(monkeypatch, before, [["killed", 10.0, None]])
