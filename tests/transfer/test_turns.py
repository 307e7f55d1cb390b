"""Copies beside a loop that is never idle: the interpreter lock reaches the copy threads, and nothing of it remains."""

from __future__ import annotations

import select
import sys
import time
from array import array
from collections.abc import Iterator
from queue import SimpleQueue

import pytest
import torch

from aoffload.core.plan import Completion, Outcome, Tier, TransferPlan
from aoffload.env import Env
from aoffload.errors import TransferRefused
from aoffload.transfer.local import LocalTransport
from aoffload.transfer.turns import SWITCH_S, Turns

USUAL_S = 5e-3


@pytest.fixture(autouse=True)
def usual_interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(USUAL_S)
    yield
    sys.setswitchinterval(before)


def interval() -> float:
    return round(sys.getswitchinterval(), 6)


def test_short_while_anything_is_under_way() -> None:
    """From the first launch to the last end, and as it was afterwards."""
    turns = Turns()
    turns.begin()
    turns.begin()
    turns.end()
    assert interval() == SWITCH_S
    turns.end()
    assert interval() == USUAL_S


def test_two_transports_share_the_process() -> None:
    """One that ends first may put the interval back; the other one shortens it again with its next copy."""
    first, second = Turns(), Turns()
    first.begin()
    second.begin()
    first.end()
    assert interval() == USUAL_S
    second.begin()
    assert interval() == SWITCH_S
    second.end()
    second.end()
    assert interval() == USUAL_S


def test_what_a_program_has_set_meanwhile_stays() -> None:
    """Whoever asks for another interval while copies run keeps it."""
    turns = Turns()
    turns.begin()
    sys.setswitchinterval(0.02)
    turns.end()
    assert interval() == 0.02


def test_an_interval_that_is_short_already_is_left_alone() -> None:
    sys.setswitchinterval(5e-5)
    turns = Turns()
    turns.begin()
    assert interval() == 5e-5
    turns.end()
    assert interval() == 5e-5


def test_a_copy_that_hangs_keeps_nothing_short() -> None:
    """After closing, the interval is the usual one whatever never ended; a late end changes nothing."""
    turns = Turns()
    turns.begin()
    turns.close()
    assert interval() == USUAL_S
    turns.end()
    assert interval() == USUAL_S


@pytest.fixture
def transport() -> Iterator[tuple[LocalTransport, SimpleQueue[Completion]]]:
    completions: SimpleQueue[Completion] = SimpleQueue()
    found = LocalTransport(torch.zeros(40, 2**18))
    found.open(32, verify=False, deliver=completions.put, env=Env())
    yield found, completions
    found.close(timeout_s=10)


def plan(number: int, first: int = 1) -> TransferPlan:
    return TransferPlan(number, Tier.DEVICE, Tier.HOST, array("i", range(first, first + 32)), array("i", range(32)))


def test_a_refused_launch_leaves_nothing_short(transport: tuple[LocalTransport, SimpleQueue[Completion]]) -> None:
    """Refused for its ids, or because the transport is closed."""
    under_test, _ = transport
    with pytest.raises(TransferRefused):
        under_test.launch(plan(1, first=20), None)
    under_test.close(timeout_s=10)
    with pytest.raises(TransferRefused):
        under_test.launch(plan(2), None)
    assert interval() == USUAL_S


def test_copies_go_on_beside_a_loop_that_is_never_idle(
    transport: tuple[LocalTransport, SimpleQueue[Completion]],
) -> None:
    """Turns of 300 µs that only give the lock up for a moment, as a busy event loop does at each look for events."""
    under_test, completions = transport
    for number in range(8):
        under_test.launch(plan(number), None)
    missing, deadline = 8, time.perf_counter() + 10
    while missing and time.perf_counter() < deadline:
        end = time.perf_counter() + 300e-6
        while time.perf_counter() < end:
            pass
        select.select([], [], [], 0)
        while not completions.empty():
            assert completions.get().outcome is Outcome.LANDED
            missing -= 1
    assert missing == 0
    assert interval() == USUAL_S
