"""Load or compute: times to first token of a trace over links that are fast, slow, or stall, and the cost of a choice.

A simulated clock drives the real ledger, copy queue, estimates and rule. A link copies one job after the other, each up
to a fifth faster or slower than the link, and an engine computes one prompt after the other. Many requests of the trace
arrive at the same time. So the arrivals are spread over its ticks, and slowed down until an engine without cache is
busy most of the time. Stores have a link of their own. `TRACE=FILE` names the trace. Without one, only the cost of a
choice is measured.
"""

from __future__ import annotations

import heapq
import json
import os
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from aoffload import KVCacheGroup, Ledger, OffloadConfig, Tier
from aoffload._extensions.load_choice import CostChoice
from aoffload.ledger import Completion, CopyQueue, LedgerRequest, LoadCosts, LoadOffer, Outcome, Prefix, TransferPlan

from .cycle import ROOT
from .harness import SAMPLE_S, Row, interleave, timed
from .peer import Peer
from .pools import serve

__all__ = ["run"]

BLOCK_TOKENS, TOKEN_BYTES = 512, 128 * 2**10
BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES
TOKENS_PER_S = 25_000.0
NUM_DEVICE, NUM_HOST = 1000, 20_000
TICK_S, SLOWED_DOWN = 3.0, 2.7
JITTER = 0.2
STORES_GBS = 25.0
MOST_US, MOST_ERROR = 3.0, 0.25


@attrs.frozen
class Link:
    name: str
    gbs: float
    stalls: bool = False
    """Whether it has only 1 % of its rate for the last 20 of every 120 seconds."""

    def took_s(self, num_bytes: float, begun_s: float) -> float:
        """Duration of a copy."""
        now, left = begun_s, num_bytes
        while True:
            at, rate = now % 120.0, self.gbs * 1e9
            if self.stalls and at >= 100.0:
                rate *= 0.01
            ends_s = now + (120.0 - at if at >= 100.0 else 100.0 - at)
            if not self.stalls or left <= rate * (ends_s - now):
                return now + left / rate - begun_s
            left, now = left - rate * (ends_s - now), ends_s + 1e-9


LINKS = (
    Link("50 GB/s", 50), Link("25 GB/s", 25), Link("25 GB/s, 20 of 120 s at 1 %", 25, True), Link("1.5 GB/s", 1.5),
    Link("0.3 GB/s", 0.3), Link("0.1 GB/s", 0.1),
)  # fmt: skip
USELESS_GBS = 0.5
"""Computing is faster than a load over a link that is slower than this."""


class Never:
    """A choice that computes everything."""

    def stop(self, offer: LoadOffer) -> int:
        return 0


@attrs.define(eq=False)
class Noting:
    """The choice by cost, which also records its inputs."""

    choice: CostChoice = attrs.field(factory=CostChoice)
    offer: LoadOffer | None = None
    """The last offer."""

    def stop(self, offer: LoadOffer) -> int:
        self.offer = offer
        return self.choice.stop(offer)


@attrs.define(eq=False)
class Served:
    """A request in progress."""

    request: LedgerRequest
    num_tokens: int
    arrived_s: float
    expected_s: float | None = None
    """The estimated end of its load."""
    loading_s: float = 0.0


@attrs.define(eq=False, slots=False)
class Simulation:
    link: Link
    choice: Any
    now: float = 0.0
    first_token_s: list[float] = attrs.field(factory=list)
    errors: list[float] = attrs.field(factory=list)
    """Relative errors of the estimates of loads."""
    _events: list[tuple[float, int, Callable[[], None]]] = attrs.field(factory=list)
    _numbers: count[int] = attrs.field(factory=count)
    _free_s: dict[bool, float] = attrs.field(factory=lambda: {True: 0.0, False: 0.0})
    _ready: deque[Served] = attrs.field(factory=deque)
    _is_computing: bool = False
    _draw: random.Random = attrs.field(factory=lambda: random.Random(0))

    def __attrs_post_init__(self) -> None:
        groups = [KVCacheGroup("full", block_size=BLOCK_TOKENS)]
        config = OffloadConfig(groups=groups, num_host_blocks=NUM_HOST, load_choice=self.choice)
        self.ledger = Ledger(config, NUM_DEVICE + 1, block_bytes=BLOCK_BYTES)
        self.queue = CopyQueue(self.ledger, self, config, clock=lambda: self.now, block_bytes=BLOCK_BYTES)
        self.costs = LoadCosts(self.ledger, self.queue)

    def _at(self, at_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), act))

    def serve(self, requests: Sequence[tuple[float, Prefix]]) -> None:
        for arrives_s, prefix in requests:
            self._at(arrives_s, lambda prefix=prefix: self._arrives(prefix))  # type: ignore[misc]
        while self._events:
            self.now, _, act = heapq.heappop(self._events)
            act()
        self.ledger.check_integrity()
        assert len(self.first_token_s) == len(requests)

    # -- the link -------------------------------------------------------------------------------------------------

    def launch(self, plan: TransferPlan, after: object) -> None:
        is_load = plan.destination is Tier.DEVICE
        begun = max(self.now, self._free_s[is_load])
        num_bytes = plan.num_blocks * BLOCK_BYTES * self._draw.uniform(1 - JITTER, 1 + JITTER)
        took = self.link.took_s(num_bytes, begun) if is_load else num_bytes / STORES_GBS / 1e9
        self._free_s[is_load] = begun + took
        self._at(begun + took, lambda: self._landed(plan))

    def _landed(self, plan: TransferPlan) -> None:
        self.queue.deliver(Completion(plan.job_id, Outcome.LANDED))
        self.queue.advance()

    # -- the engine -----------------------------------------------------------------------------------------------

    def _arrives(self, prefix: Prefix) -> None:
        served = Served(self.ledger.admit(prefix), prefix.num_tokens, self.now)
        waiter = self.ledger.queue_allocation(served.request, None, lambda: self._at(self.now, lambda: granted()))

        def granted() -> None:
            if waiter.granted is not None:
                self.ledger.accept(waiter)
                self._load(served)

    def _load(self, served: Served) -> None:
        request, found = served.request, self.ledger.loadable(served.request)
        max_tokens = self.costs.limit(request)
        if isinstance(self.choice, Noting) and found is not None and max_tokens is None:
            assert self.choice.offer is not None
            served.expected_s = self.choice.offer.arrives_s or None
        served.loading_s = self.now
        plans = self.ledger.plan_load(request, max_tokens, lambda: self._loaded(served))
        if request.is_loading:
            self.queue.submit(plans)
        else:
            self._loaded(served)

    def _loaded(self, served: Served) -> None:
        took_s = self.now - served.loading_s
        if served.expected_s is not None and took_s:
            self.errors.append(abs(served.expected_s / took_s - 1))
        self._ready.append(served)
        self._at(self.now, self._compute)

    def _compute(self) -> None:
        if self._is_computing or not self._ready:
            return
        served, self._is_computing = self._ready.popleft(), True
        num_tokens = served.num_tokens - served.request.num_computed_tokens
        self._at(self.now + num_tokens / TOKENS_PER_S, lambda: self._computed(served, num_tokens))

    def _computed(self, served: Served, num_tokens: int) -> None:
        request = served.request
        self.first_token_s.append(self.now - served.arrived_s)
        self.costs.report_compute(num_tokens, num_tokens / TOKENS_PER_S)
        self.costs.computed(request.request_id, num_tokens)
        self.queue.submit(self.ledger.commit(request, served.num_tokens))
        self.queue.submit(self.ledger.release(request))
        self.costs.forget(request.request_id)
        self._is_computing = False
        self._compute()


def run(vllm: Peer | None = None) -> Iterator[Row]:
    yield from _on_trace()
    yield _choosing()


def _requests(path: Path) -> list[tuple[float, Prefix]]:
    draw, found = random.Random(1), list[tuple[float, Prefix]]()
    for line in path.read_text().splitlines():
        one = json.loads(line)
        ids = np.repeat(np.array(one["hash_ids"], np.int32), BLOCK_TOKENS)[: one["input_length"]]
        found.append(((one["timestamp"] / 1e3 + draw.random() * TICK_S) * SLOWED_DOWN, Prefix.of(ROOT, ids)))
    return sorted(found, key=lambda each: each[0])


def _on_trace() -> Iterator[Row]:
    named = os.environ.get("TRACE")
    if named is None:
        print("load_choice: TRACE=FILE names the trace to serve", file=sys.stderr)
        return
    requests, errors = _requests(Path(named)), list[float]()
    for link in LINKS:
        times = {}
        for name, choice in (("never", Never()), ("always", "always"), ("cost", Noting())):
            simulation = Simulation(link, choice)
            simulation.serve(requests)
            errors += simulation.errors
            times[name] = np.mean(simulation.first_token_s), *np.percentile(simulation.first_token_s, (99, 50))
            about = f"mean {times[name][0]:.2f} s, p50 {times[name][2]:.2f} s, p99 {times[name][1]:.1f} s"
            about += f", {simulation.costs.num_declined} declined"
            print(f"load_choice: {link.name}, {name}: {about}", file=sys.stderr)
        yield from _rows(link, times)
    error = statistics.median(errors)
    yield Row(
        name="estimates of loads, median error", value=100 * error, unit="% off", against="what they took", limit=0.0,
        ratio=error, wanted=MOST_ERROR, is_at_most=True,
    )  # fmt: skip


def _rows(link: Link, times: dict[str, tuple[Any, ...]]) -> Iterator[Row]:
    def row(figure: int, other: str, wanted: float) -> Row:
        name, (value, limit) = ("mean", "p99", "p50")[figure], (times[one][figure] for one in ("cost", other))
        return Row(
            name=f"first token over {link.name}, {name}", value=value, unit="s", against=other, limit=limit,
            ratio=value / limit, wanted=wanted, is_at_most=True,
        )  # fmt: skip

    if link.stalls:
        yield row(1, "always", 0.85)
    elif link.gbs >= 25:
        yield from (row(figure, "always", 1.01) for figure in (0, 1))
    elif link.gbs < USELESS_GBS:
        yield from (row(figure, "never", 1.02) for figure in (0, 2))
    else:
        yield row(0, min(("never", "always"), key=lambda name: times[name][0]), 0.93)


# -- cost of a choice --------------------------------------------------------------------------------------------------


class _Landing:
    """A queue that launches nothing."""

    def launch(self, plan: TransferPlan, after: object) -> None:
        raise AssertionError(plan)


def _choosing() -> Row:
    """CPU time of one choice, including the inspection of the available blocks and of the link, for 16 blocks in the
    host."""
    config = OffloadConfig(groups=[KVCacheGroup("full", block_size=16)], num_host_blocks=64, load_choice="cost")
    ledger = Ledger(config, 65, block_bytes=BLOCK_BYTES)
    queue = CopyQueue(ledger, _Landing(), config, clock=time.monotonic, block_bytes=BLOCK_BYTES)
    costs, prompt = LoadCosts(ledger, queue), np.arange(257, dtype=np.int32)
    serve(ledger, prompt)
    ledger.reset(Tier.DEVICE)
    link = queue.link(Tier.HOST, Tier.DEVICE)
    link.begin(1, BLOCK_BYTES, time.monotonic() - 0.001)
    link.end(Completion(1, Outcome.LANDED), time.monotonic())
    costs.report_compute(2500, 0.1)
    costs.report_queue(1000)
    request = ledger.admit(Prefix.of(ROOT, prompt))
    ledger.allocate_nowait(request)
    assert costs.limit(request) is None and ledger.loadable(request) is not None
    took = interleave({"choice": lambda: timed(lambda: costs.limit(request), SAMPLE_S)}, seconds=2.0)["choice"]
    return Row(
        name="a choice for 16 blocks, CPU", value=took.cpu_s * 1e6, unit="us", against="its aim", limit=MOST_US,
        ratio=took.cpu_s * 1e6 / MOST_US, wanted=1.0, is_at_most=True, spread=took.spread,
    )  # fmt: skip
