"""Copies beside a busy event loop: copy threads get the interpreter lock, and the switch interval is restored."""

from __future__ import annotations

import ctypes
import select
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import pytest
import torch
from copies import Copies

from aoffload._common.tiers import Tier
from aoffload._kernel.plans import Completion, TransferPlan
from aoffload._kernel.states import Outcome
from aoffload._transfer.backends.cpu import CpuBackend
from aoffload._transfer.local import LocalTransport
from aoffload._transfer.turns import SWITCH_S, Turns
from aoffload.errors import TransferRefused
from aoffload.transport import Env

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
    """An interval that a program sets while copies run stays."""
    turns = Turns()
    turns.begin()
    sys.setswitchinterval(0.02)
    turns.end()
    assert interval() == 0.02


def test_an_interval_that_is_short_already_is_left_alone() -> None:
    sys.setswitchinterval(5e-6)
    turns = Turns()
    turns.begin()
    assert interval() == 5e-6
    turns.end()
    assert interval() == 5e-6


def test_a_copy_that_hangs_keeps_nothing_short() -> None:
    """After closing, the interval is the usual one whatever never ended; a late end changes nothing."""
    turns = Turns()
    turns.begin()
    turns.close()
    assert interval() == USUAL_S
    turns.end()
    assert interval() == USUAL_S


GET_TIMER_SLACK = 30


def timer_slack_ns() -> int:
    return int(ctypes.CDLL(None).prctl(GET_TIMER_SLACK, 0, 0, 0, 0))


class SlackBackend(CpuBackend):
    """Looks how late its thread's waits may end."""

    found_ns = 0

    def after_copy(self, plan: TransferPlan) -> None:
        self.found_ns = timer_slack_ns()


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of Linux")
def test_copy_threads_wait_precisely_and_nobody_else_does(open_copies: Callable[..., Copies]) -> None:
    """Waits for the lock end when the interval is over. The loop's thread keeps what it had, and so do its timers."""
    before_ns = timer_slack_ns()
    copies = open_copies(torch.zeros(4, 8), 4, SlackBackend)
    assert copies.store([1], [0]).outcome is Outcome.LANDED
    assert copies.transport.backend.found_ns == 1  # type: ignore[attr-defined]
    assert timer_slack_ns() == before_ns > 1


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


@pytest.mark.parametrize("turn_s", [300e-6, 50e-6])
def test_copies_go_on_beside_a_loop_that_is_never_idle(
    transport: tuple[LocalTransport, SimpleQueue[Completion]], turn_s: float
) -> None:
    """Turns that only give the lock up for a moment, as a busy event loop does at each look for events."""
    under_test, completions = transport
    for number in range(8):
        under_test.launch(plan(number), None)
    missing, deadline = 8, time.perf_counter() + 60
    while missing and time.perf_counter() < deadline:
        end = time.perf_counter() + turn_s
        while time.perf_counter() < end:
            pass
        select.select([], [], [], 0)
        while not completions.empty():
            assert completions.get().outcome is Outcome.LANDED
            missing -= 1
    assert missing == 0
    assert interval() == USUAL_S
