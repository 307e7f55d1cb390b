"""The number of Python calls for a request with one group of full attention."""

from __future__ import annotations

import gc
import sys
from types import FrameType

import pytest
from driving import Driven, prompt

from aoffload._kernel.plans import Completion
from aoffload._kernel.states import Outcome

MOST_CALLS = 180
"""Calls of Python functions of this package that a request may make which loads 64 blocks and computes one token."""


COUNTS = "counts calls of Python functions"


class CallCounter:
    """Counts the calls of Python functions of this package while it is entered; of those called `name`, if given."""

    def __init__(self, name: str = "") -> None:
        self.num_calls = 0
        self._name = name

    def __enter__(self) -> CallCounter:
        gc.disable()  # a finalizer would count
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        gc.enable()

    def _look(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        is_ours = "aoffload" in code.co_filename or code.co_filename == "<string>"
        self.num_calls += event == "call" and is_ours and self._name in ("", code.co_name)


@pytest.mark.pure(COUNTS)
def test_a_host_hit_makes_few_calls() -> None:
    """No corner that is off is asked for on the way of a plain request: so many calls, and not one more."""
    driven = Driven(65, 256)
    for name in (1, 2):
        driven.on_host_only(prompt(name, 257))
    ledger, tokens = driven.ledger, prompt(1, 257)
    with CallCounter() as counter:
        request = ledger.admit(driven.prefix(tokens))
        ledger.allocate_nowait(request)
        (plan,) = ledger.plan_load(request)
        ledger.launch(plan.job_id)
        ledger.settle(Completion(plan.job_id, Outcome.LANDED))
        ledger.commit(request, len(tokens))
        ledger.release(request)
    assert request.match.num_host_tokens == 256
    assert counter.num_calls <= MOST_CALLS


@pytest.mark.pure(COUNTS)
def test_the_head_of_the_line_is_matched_again_only_if_it_could_matter() -> None:
    """The head of the wait queue is not looked up again while nothing has come to the device and there is no more
    room."""
    driven = Driven(6, 12)
    driven.on_host_only(prompt(3, 13))
    busy = driven.running(prompt(1, 12))
    (store,) = driven.commit(busy)
    driven.allocated(prompt(2, 4))
    head = driven.ledger.queue_allocation(driven.admit(prompt(3, 13)))
    with CallCounter("find_hit") as counter:
        for request in [driven.admit(prompt(name, 4)) for name in (4, 5)]:
            driven.release(request, "cancelled")
        driven.land([store])
        assert counter.num_calls == 2, "those of the two that were admitted"
        driven.release(busy)
        assert counter.num_calls == 3
    assert head.granted is not None
