"""Where the time of a host hit goes: 64 requests at a time through the runtime, with hits of 64 and of 8 blocks.

Samples divide the time of one request among parts of the package. A timer interrupts the main thread, and the stack
says which part was running. Time in anyio, asyncio or trio counts as "tasks, scopes, turns of the loop", whoever called
it. Time in any other library counts for the part of the package that called it.

The same rounds also measure two baselines: the same requests through the `Ledger` alone, and a bare task that enters a
cancel scope and waits for an event. Every runtime that has a task for each request pays for such a bare task. The last
row of each table is the time that the runtime adds to its ledger, also as a multiple of the bare task.
"""

from __future__ import annotations

import itertools
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import anyio
import torch

import aoffload
from aoffload import KVCacheGroup, Ledger, OffloadConfig, OffloadRuntime
from aoffload._common.env import Env
from aoffload.ledger import Completion, LedgerRequest, Outcome, Prefix, TransferPlan

from .api import FLOATS_PER_BLOCK, NUM_AT_A_TIME, batch
from .cycle import BLOCK_SIZE, ROOT, Tokens, prompts_of
from .harness import Measured, Rounds, Row, Sample
from .peer import Peer

__all__ = ["run"]

SIZES = (64, 8)
BACKENDS = ("asyncio", "trio")
SECONDS_PER_TABLE = 6.0
SAMPLE_EVERY_S = 0.0005
MOST_TIMES = 2.0
VERBS = {
    "admit": "ledger: match", "allocate_nowait": "ledger: allocate", "queue_allocation": "ledger: allocate",
    "accept": "ledger: allocate", "plan_load": "ledger: plan the load", "launch": "ledger: launch",
    "settle": "ledger: settle", "commit": "ledger: commit", "release": "ledger: release",
}  # fmt: skip
"""The row of each verb of the ledger."""
ROW_OF_PATH = (
    ("_observe", "log and observers"), ("_kernel/moves.py", "log and observers"), ("_kernel", "ledger: elsewhere"),
    ("_extensions", "ledger: elsewhere"), ("_common/prefix.py", "prompt: copy and check"),
    ("_common/arguments.py", "argument checks"), ("_common/env.py", "events and wake-ups"),
    ("_transfer/copy_queue.py", "jobs and completions"), ("_transfer", "the copy itself"),
    ("_runtime/worker.py", "events and wake-ups"), ("_runtime", "the request's own calls"),
    ("", "package: elsewhere"),
)  # fmt: skip
"""The row of a file, by the beginning of its path in the package. The first match counts."""
TASKS = "tasks, scopes, turns of the loop"
REST = "the benchmark"


def run(vllm: Peer | None = None) -> Iterator[Row]:
    """A table for each size of the hit and each event loop."""
    for num_blocks in SIZES:
        for backend in BACKENDS:
            yield from anyio.run(table, num_blocks, backend, backend=backend)


async def table(num_blocks: int, backend: str, seconds: float = SECONDS_PER_TABLE) -> list[Row]:
    prompts = prompts_of(num_blocks, 2 * NUM_AT_A_TIME)
    groups = [KVCacheGroup("full", block_size=BLOCK_SIZE)]
    config = OffloadConfig(groups=groups, num_host_blocks=len(prompts) * num_blocks)
    num_device_blocks = NUM_AT_A_TIME * (num_blocks + 1) + 1
    sets = itertools.cycle((prompts[:NUM_AT_A_TIME], prompts[NUM_AT_A_TIME:]))
    ledger_sets = itertools.cycle((prompts[:NUM_AT_A_TIME], prompts[NUM_AT_A_TIME:]))
    ledger = Ledger(config, num_device_blocks)
    wakes = Wakes()
    where: Counter[str] = Counter()
    async with OffloadRuntime(config, torch.zeros(num_device_blocks, FLOATS_PER_BLOCK)) as runtime:
        for _ in range(2):
            await batch(runtime, next(sets))
            await runtime.flush()
            through_ledger(ledger, next(ledger_sets))
        rounds = Rounds(("runtime", "sampled", "ledger", "bare"), seconds=seconds)
        for name in rounds:
            if name == "ledger":
                prompts_now = next(ledger_sets)
                rounds.add(name, _share(lambda given=prompts_now: through_ledger(ledger, given)))  # type: ignore[misc]
                continue
            cpu, wall = time.thread_time(), time.perf_counter()
            if name == "bare":
                await wakes.batch()
            elif name == "sampled":
                with sampled(where):
                    await batch(runtime, next(sets))
            else:
                await batch(runtime, next(sets))
            number = NUM_AT_A_TIME
            rounds.add(name, Sample((time.perf_counter() - wall) / number, (time.thread_time() - cpu) / number))
    return _rows(f"{num_blocks} blocks, {backend}", rounds.measured(), where)


def _rows(about: str, found: dict[str, Measured], where: Counter[str]) -> list[Row]:
    """One row for each part of the package, one for the `Ledger` alone, and one for the time that the runtime adds."""
    whole, ledger, bare = found["runtime"], found["ledger"], found["bare"]
    num_samples, whole_us = where.total(), whole.median_s * 1e6
    rows = [
        Row(
            name=f"{about}: {name}", value=whole_us * count / num_samples, unit="us", against="whole request",
            limit=whole_us, ratio=count / num_samples,
        )
        for name, count in where.most_common()
    ]  # fmt: skip
    added_s = whole.median_s - ledger.median_s
    rows.append(
        Row(
            name=f"{about}: Ledger alone", value=ledger.median_s * 1e6, unit="us", against="whole request",
            limit=whole_us, ratio=ledger.median_s / whole.median_s, spread=ledger.spread,
        )
    )  # fmt: skip
    rows.append(
        Row(
            name=f"{about}: runtime minus ledger", value=added_s * 1e6, unit="us",
            against="bare task, scope, event, wake-up", limit=bare.median_s * 1e6, ratio=added_s / bare.median_s,
            wanted=MOST_TIMES, is_at_most=True, spread=whole.spread,
        )
    )  # fmt: skip
    return rows


def _share(work: Callable[[], object]) -> Sample:
    cpu, wall = time.thread_time(), time.perf_counter()
    work()
    return Sample((time.perf_counter() - wall) / NUM_AT_A_TIME, (time.thread_time() - cpu) / NUM_AT_A_TIME)


# -- the three subjects ------------------------------------------------------------------------------------------------


def through_ledger(ledger: Ledger, prompts: list[Tokens]) -> None:
    """The ledger's calls of the same requests, in the same order, without tasks and copies."""

    def land(plans: tuple[TransferPlan, ...]) -> None:
        for plan in plans:
            ledger.launch(plan.job_id)
            ledger.settle(Completion(plan.job_id, Outcome.LANDED))

    requests: list[LedgerRequest] = []
    planned: list[tuple[TransferPlan, ...]] = []
    for prompt in prompts:
        requests.append(request := ledger.admit(Prefix.of(ROOT, prompt)))
        ledger.allocate_nowait(request)
        planned.append(ledger.plan_load(request))
    for plans in planned:
        land(plans)
    for request, prompt in zip(requests, prompts, strict=True):
        land(ledger.commit(request, len(prompt)))
        land(ledger.release(request))


class Wakes:
    """Bare tasks: each enters a cancel scope and waits for an event. One wake-up of the loop sets the events of all."""

    def __init__(self) -> None:
        self._events: list[anyio.Event] = []
        self._wake = Env().loop_waker(self._set_all)

    def _set_all(self) -> None:
        events, self._events = self._events, []
        for event in events:
            event.set()

    async def _task(self) -> None:
        with anyio.CancelScope():
            self._events.append(event := anyio.Event())
            if len(self._events) == NUM_AT_A_TIME:
                self._wake()
            await event.wait()

    async def batch(self) -> None:
        async with anyio.create_task_group() as clients:
            for _ in range(NUM_AT_A_TIME):
                clients.start_soon(self._task)


# -- samples -----------------------------------------------------------------------------------------------------------

PACKAGE = str(Path(aoffload.__file__).parent) + "/"
HERE = str(Path(__file__))


def row_of(frame: FrameType | None) -> str:
    """The row of `frame`: that of the innermost frame in the package; inside of the ledger, that of the verb that was
    called. `TASKS` if anyio or an event loop is further inside."""
    row = ""
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(PACKAGE):
            row = row or next((row for start, row in ROW_OF_PATH if path.startswith(PACKAGE + start)), "")
            if not row.startswith("ledger"):
                return row or REST
            verb = VERBS.get(frame.f_code.co_name)
            if verb is not None and path.endswith(("/ledger.py", "/base.py", "/copy_queue.py")):
                return verb
        elif not row and path == HERE:
            return REST
        elif not row and ("/asyncio/" in path or "/trio/" in path or "/anyio/" in path):
            return TASKS
        frame = frame.f_back
    return row or TASKS


@contextmanager
def sampled(where: Counter[str]) -> Iterator[None]:
    """Count in `where`, each half millisecond of the process's CPU time, the row of what the main thread runs."""

    def note(_: int, frame: FrameType | None) -> None:
        where[row_of(frame)] += 1

    before = signal.signal(signal.SIGPROF, note)
    signal.setitimer(signal.ITIMER_PROF, SAMPLE_EVERY_S, SAMPLE_EVERY_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


if __name__ == "__main__":
    sys.exit("python -m benchmarks cost")
