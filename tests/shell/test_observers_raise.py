"""Observers and loggers of a runtime that raise anything: requests, copies and the other observers don't notice."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import pytest
from serving import BACKENDS, GUARD_S, assert_at_rest, prompt, with_bytes

from aoffload import OffloadRuntime
from aoffload._transfer.local import LocalTransport
from aoffload.ledger import Event, JobMoved, JobState

pytestmark = pytest.mark.anyio

A, B = prompt(1, 16), prompt(2, 16)


class Own(BaseException):
    """No `Exception`."""


RAISED = [ValueError, asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit, Own]


@pytest.fixture(params=BACKENDS)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


class Raises:
    """Raises at every event."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error, self.num_notified = error, 0

    def observe(self, event: Event) -> None:
        self.num_notified += 1
        raise self.error(event)


class Counts:
    num_completed = 0

    def observe(self, event: Event) -> None:
        self.num_completed += isinstance(event, JobMoved) and event.new is JobState.COMPLETED


@pytest.mark.parametrize("error", RAISED)
async def test_nothing_of_an_observers_goes_through(error: type[BaseException]) -> None:
    """Not what it raises in the task of a request, nor in the worker, nor in the thread of a copy. Every copy is
    settled, a flush ends, the observers after it are told all the same, and all is counted."""
    raises, counts = Raises(error), Counts()
    async with with_bytes(8, num_host_blocks=16) as other:
        made, blocks = other.runtime.config, other.blocks
    transport = LocalTransport(blocks.tensors)
    async with OffloadRuntime(made, transport=transport, observers=[raises, counts]) as runtime:
        engine = type(other)(runtime, blocks, 4)
        for tokens in (A, B, A):
            await engine.serve(tokens)
        with anyio.fail_after(GUARD_S):
            await runtime.flush()
        assert await engine.serve([*A, 1]) == 16
        with anyio.fail_after(GUARD_S):
            await runtime.reset()
        assert counts.num_completed > 1
        assert runtime.observers.num_failures == raises.num_notified > 20
        assert runtime.statistics().off_reason == ""
        await assert_at_rest(runtime)


@pytest.mark.parametrize("error", RAISED)
async def test_nothing_of_a_loggers_goes_through(error: type[BaseException]) -> None:
    """The same for a processor of the log."""

    class Logger:
        num_notified = 0

        def bind(self, **fields: object) -> Logger:
            return self

        def __getattr__(self, name: str) -> Any:
            def log(event: str, **fields: object) -> None:
                type(self).num_notified += 1
                raise error(event)

            return log

    async with with_bytes(8, num_host_blocks=16, logger=Logger()) as engine:
        for tokens in (A, B, A):
            await engine.serve(tokens)
        with anyio.fail_after(GUARD_S):
            await engine.runtime.flush()
        assert await engine.serve([*A, 1]) == 16
        assert Logger.num_notified > 20
        await assert_at_rest(engine.runtime)
