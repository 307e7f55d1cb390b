"""A soak with real threads and real bytes: `python -m proof.soak --backend asyncio`.

Clients have conversations. The host has room for a quarter of their KV, and the device for less. Some requests are
cancelled natively, by a cancel scope, by `Request.cancel` or by `runtime.cancel`, and some have a deadline. Each block
that a request is told is ready is compared with the bytes of its prefix. Every forward and every copy checks that its
blocks have kept their owner. With `--device cuda`, forwards are launched on a stream, without a wait for their end.

At each rest, nothing may be pinned. Over all rests, resident memory and the number of file descriptors must not grow.
The soak ends after `--rests` rests, so on a slow machine it only takes longer. With `--seconds`, it ends at the first
rest after that time.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import itertools
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import attrs
import torch

from aoffload import OutOfBlocks, Request, RequestState
from aoffload.errors import AoffloadError, RequestAborted

from .soak_memory import DeviceMemory, HostMemory, MakeMemory, cuda_compute
from .soak_result import Sample, SoakResult
from .soak_workload import Server, Ticket, Workload, WrongBytes, turns

__all__ = ["BACKENDS", "Length", "Soak", "soak"]

BACKENDS: dict[str, tuple[str, dict[str, Any]]] = {
    "asyncio": ("asyncio", {}),
    "trio": ("trio", {}),
    "uvloop": ("asyncio", {"use_uvloop": True}),
}
NUM_THREADS = 6
"""Threads for forwards: at times fewer than forwards, so that some are cancelled before a thread has begun them."""
REQUESTS_PER_SAMPLE = 16
PATIENCE_S = 60.0
"""How long threads whose tasks are gone may take to release their blocks."""
HANG_S = 300.0
"""If no request has ended for that long, one hangs."""
PR_SET_THP_DISABLE = 41
CLIENT_GONE = "client gone"
FROM_OUTSIDE = ("cancelled", "")  # the latter before it was entered
REASONS = {"native": FROM_OUTSIDE, "scope": FROM_OUTSIDE, "request": (CLIENT_GONE,), "runtime": (CLIENT_GONE,)}
"""The reasons with which a request may end, by the kind of its interruption."""


class Alarms:
    """A logger that reports every warning and error as a problem: no fault is injected here."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report

    def bind(self, **values: Any) -> Alarms:
        return self

    def debug(self, event: str, **values: Any) -> None: ...

    info = debug

    def warning(self, event: str, **values: Any) -> None:
        self._report(f"{event}: {values}")

    error = warning


@attrs.define(eq=False)
class Attempt:
    """One request under way, and the means to interrupt it."""

    ticket: Ticket
    server: Server
    request: Request | None = None
    error: BaseException | None = None
    was_struck: bool = False
    is_over: bool = False
    cancel_task: Callable[[], object] = lambda: None
    cancel_scope: Callable[[], object] = lambda: None

    async def serve(self) -> None:
        ticket, runtime = self.ticket, self.server.runtime
        options: dict[str, Any] = {"cache_salt": ticket.conversation.salt, "deadline_s": ticket.deadline_s}
        if ticket.form == "run":
            await runtime.run(self._work, ticket.prompt, request_id=ticket.name, **options)
            return
        async with runtime.request(ticket.prompt, ticket.name, **options) as request:
            await self._work(request)

    async def _work(self, request: Request) -> None:
        self.request = request
        await self.server.serve(request, self.ticket)

    def strike(self, kind: str) -> None:
        """Cancel the request in that way, unless it is over."""
        if self.is_over:
            return
        if kind == "native":
            self.cancel_task()
        elif kind == "scope":
            self.cancel_scope()
        elif kind == "request" and self.request is not None:
            self.request.cancel(CLIENT_GONE)
        elif kind == "request" or not self.server.runtime.cancel(self.ticket.name, CLIENT_GONE):
            return
        self.was_struck = True

    def outcome(self) -> str:
        """What ended the request. Raises an error that nothing planned explains."""
        request, ticket = self.request, self.ticket
        if request is not None and request.state is RequestState.DONE and self.error is None:
            return "done"
        reason = request.reason if request is not None else ""
        if isinstance(self.error, OutOfBlocks) and self.error.retryable:
            return "gave way"
        if self.error is not None and not isinstance(self.error, (RequestAborted, asyncio.CancelledError)):
            raise self.error
        if reason == "prefix_invalidated" or (reason == "deadline" and ticket.deadline_s is not None):
            return reason
        if ticket.interruption is not None and self.was_struck and reason in REASONS[ticket.interruption.kind]:
            return ticket.interruption.kind
        raise AssertionError(f"ended without having been cancelled: {request!r}, {reason!r}, {self.error!r}")


@attrs.frozen
class Length:
    """How long a soak is: how much is done before each rest, and how often."""

    num_clients: int = 40
    """Clients at a time."""
    num_sessions: int = 6
    """Sessions of each client between two rests; most have two requests."""
    num_rests: int = 12
    seconds: float = 0.0
    """If not 0: run that long instead, and up to the next rest."""


_LENGTH = Length()


class Soak:
    """One run; ends early at the first problem."""

    def __init__(
        self,
        backend: str,
        seed: int,
        length: Length,
        memory: MakeMemory = HostMemory,
        keep: Callable[[SoakResult], object] = lambda result: None,
    ) -> None:
        self._backend, self._seed, self._length, self._keep = backend, seed, length, keep
        self._workload = Workload(seed)
        self._numbers = itertools.count()
        self._found: list[str] = []
        self._outcomes: Counter[str] = Counter()
        self._samples: list[Sample] = []
        self._num_resets = self._num_rests = self._num_sessions = self._max_waiting = self._max_pinned = 0
        alarms = Alarms(self._found.append)
        self._servers = {
            name: Server(verify=name == "verified", report=self._found.append, logger=alarms, memory=memory)
            for name in ("plain", "verified")
        }

    async def run(self) -> SoakResult:
        self._began = time.monotonic()
        _use_small_pages()
        anyio.to_thread.current_default_thread_limiter().total_tokens = NUM_THREADS
        async with AsyncExitStack() as stack:
            for server in self._servers.values():
                await stack.enter_async_context(server.runtime)
            self._sample()
            while self._is_going_on and not self._found:
                await self._work()
                await self._rest()
                self._sample()
                self._keep(self._result(time.monotonic() - self._began))
        self._found += [f"left behind: {thread.name}" for thread in threading.enumerate() if _copies(thread)]
        return self._result(time.monotonic() - self._began)

    @property
    def _is_going_on(self) -> bool:
        if self._length.seconds:
            return time.monotonic() < self._began + self._length.seconds
        return self._num_rests < self._length.num_rests

    async def _work(self) -> None:
        with anyio.move_on_after(HANG_S) as self._patience:
            async with anyio.create_task_group() as clients:
                clients.start_soon(self._reset_sometimes)
                for _ in range(self._length.num_clients):
                    clients.start_soon(self._client)
        if self._patience.cancelled_caught:
            self._found.append(f"a request hangs: {[server.runtime for server in self._servers.values()]}")

    async def _reset_sometimes(self) -> None:
        """Reset one of the caches, some time in the first half of every phase."""
        draw = random.Random(f"{self._seed} keeper {self._num_resets}")
        num_sessions = self._length.num_clients * self._length.num_sessions
        self._reset_at, self._resets = self._num_sessions + 1 + draw.randrange(max(1, num_sessions // 2)), anyio.Event()
        await self._resets.wait()
        await self._servers[draw.choice(("plain", "verified"))].runtime.reset()
        self._num_resets += 1

    async def _client(self) -> None:
        for _ in range(self._length.num_sessions):
            for ticket in self._workload.session(next(self._numbers)):
                if not self._found:
                    await self._attempt(Attempt(ticket, self._servers[ticket.server]))
                    self._look()
            self._num_sessions += 1
            if self._num_sessions == self._reset_at:
                self._resets.set()

    def _look(self) -> None:
        """At the end of each request: no request hangs yet, and some may be waiting."""
        self._patience.deadline = anyio.current_time() + HANG_S
        waiting = [server.runtime.statistics().num_waiting for server in self._servers.values()]
        self._max_waiting = max(self._max_waiting, *waiting)
        if self._outcomes.total() % REQUESTS_PER_SAMPLE == 0:
            self._sample()

    async def _attempt(self, attempt: Attempt) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(self._interrupt, attempt)
            with anyio.CancelScope() as scope:
                attempt.cancel_scope = attempt.cancel_task = scope.cancel
                await self._settle(attempt)
            attempt.is_over = True
            group.cancel_scope.cancel()
        try:
            self._outcomes[attempt.outcome()] += 1
        except WrongBytes:
            return  # reported where it was found
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody asked for it
            self._found.append(f"{attempt.ticket.name} failed: {error!r}")

    async def _settle(self, attempt: Attempt) -> None:
        if attempt.ticket.home == "plain task" and self._backend != "trio":
            await self._in_plain_task(attempt)
            return
        try:
            await attempt.serve()
        except Exception as error:  # noqa: BLE001 - judged by `outcome`
            attempt.error = error

    async def _in_plain_task(self, attempt: Attempt) -> None:
        """Serve the request in a task that anyio does not know; a scope around it can only cancel it natively."""
        task = asyncio.get_running_loop().create_task(attempt.serve())
        attempt.cancel_task = attempt.cancel_scope = task.cancel
        await asyncio.wait([task])
        attempt.error = asyncio.CancelledError() if task.cancelled() else task.exception()

    async def _interrupt(self, attempt: Attempt) -> None:
        planned = attempt.ticket.interruption
        if planned is None:
            return
        await turns(planned.num_turns)
        await anyio.sleep(planned.pause_s)
        attempt.strike(planned.kind)
        if planned.again_after_turns is not None:
            await turns(planned.again_after_turns)
            attempt.strike(planned.kind)

    async def _rest(self) -> None:
        """No request is left: nothing may be held, once threads whose tasks are gone have had time to end."""
        for name, server in self._servers.items():
            with anyio.move_on_after(PATIENCE_S):
                while _held(server):  # noqa: ASYNC110 - a forgotten thread sets no event
                    await anyio.sleep(0.01)
            server.settle()
            self._max_pinned = max(self._max_pinned, _pinned(server))
            if held := _held(server):
                self._found.append(f"at rest, {name}: {held}")
            try:
                server.runtime.check_integrity()
            except AoffloadError as error:
                self._found.append(f"at rest, {name}: {error!r}")
        gc.collect()  # cycles that wait for the collector are no leak
        self._num_rests += 1

    def _sample(self) -> None:
        self._samples.append(Sample.take(self._outcomes.total()))

    def _result(self, wall_s: float) -> SoakResult:
        servers = self._servers.values()
        transfers = [server.runtime.statistics().transfers for server in servers]
        early = {name: number for name, number in self._outcomes.items() if name != "done"}
        return SoakResult(
            backend=self._backend,
            seed=self._seed,
            wall_s=wall_s,
            num_requests=self._outcomes.total(),
            num_done=self._outcomes["done"],
            num_ended_early=early,
            blocks_checked=sum(server.num_checked for server in servers),
            blocks_loaded=sum(counts.blocks_loaded for counts in transfers),
            blocks_stored=sum(counts.blocks_stored for counts in transfers),
            blocks_verified=sum(counts.blocks_verified for counts in transfers),
            blocks_evicted=sum(server.num_evicted for server in servers),
            num_failed_forwards=sum(server.num_failed_forwards for server in servers),
            num_resets=self._num_resets,
            num_rests=self._num_rests,
            max_waiting=self._max_waiting,
            max_pinned_at_rest=self._max_pinned,
            samples=self._samples,
            found=self._found,
            memory=self._servers["plain"].memory.name,
        )


def _use_small_pages() -> None:
    """A huge page counts as resident as a whole, from the first byte on that a thread touches. A thread that is needed
    for the first time after the warm-up would look like a leak of 2 MB."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)


def _pinned(server: Server) -> int:
    found = server.runtime.statistics()
    return found.device.num_pinned + found.host.num_pinned


def _held(server: Server) -> dict[str, int]:
    """What must not be there at rest, by name."""
    found = server.runtime.statistics()
    held = {
        "requests": found.num_requests,
        "waiting": found.num_waiting,
        "unsettled": found.num_jobs,
        "pinned": _pinned(server),
        "quarantined": found.device.num_quarantined + found.host.num_quarantined,
    }
    return {name: number for name, number in held.items() if number}


def _copies(thread: threading.Thread) -> bool:
    return thread.name.startswith("aoffload-")


def soak(
    backend: str = "asyncio",
    seed: int = 0,
    length: Length = _LENGTH,
    memory: MakeMemory = HostMemory,
    keep: Callable[[SoakResult], object] = lambda result: None,
) -> SoakResult:
    """Run a soak in an event loop of that kind, on that memory. `keep` gets the result so far at every rest."""
    name, options = BACKENDS[backend]
    return anyio.run(Soak(backend, seed, length, memory, keep).run, backend=name, backend_options=options)


def cuda_memory(shape: tuple[int, int], num_tensors: int) -> DeviceMemory:
    """KV on the current CUDA device, with a compute stream of its own."""
    return DeviceMemory(shape, num_tensors, cuda_compute())


MEMORIES: dict[str, MakeMemory] = {"cpu": HostMemory, "cuda": cuda_memory}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m proof.soak", description=__doc__)
    parser.add_argument(
        "--rests", type=int, default=_LENGTH.num_rests, help="the number of times that all clients come to rest"
    )
    parser.add_argument("--seconds", type=float, default=0.0, help="end after this time, and not after --rests")
    parser.add_argument("--backend", choices=tuple(BACKENDS), default="asyncio")
    parser.add_argument("--device", choices=tuple(MEMORIES), default="cpu", help="where the KV is (default: cpu)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=_LENGTH.num_clients, help="the number of concurrent requests")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures and all samples to this file")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: not run, since torch sees no CUDA device")
    length = Length(options.clients, num_rests=options.rests, seconds=options.seconds)

    def keep(result: SoakResult) -> None:
        """Replace the file as a whole, because a soak may be cut off at any point."""
        if options.json is not None:
            written = options.json.with_name(f"{options.json.name}.new")
            written.write_text(result.as_json() + "\n")
            written.replace(options.json)

    result = soak(options.backend, options.seed, length, MEMORIES[options.device], keep)
    print(result.table())
    keep(result)
    sys.exit(not result.has_passed)


if __name__ == "__main__":
    main()
