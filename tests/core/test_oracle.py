"""The ledger against the naive model: the same hits, whatever happens to requests on the way.

`python tests/core/test_oracle.py 50000` does the full number of admissions and prints what it has met.
"""

from __future__ import annotations

import os
import random
import sys
from collections import Counter
from collections.abc import Sequence

import attrs
import pytest
from naive_lockstep import Client, Lockstep

from aoffload._common.prefix import KeySpan, Root
from aoffload._kernel.states import RequestState as State
from aoffload.ledger import is_compiled

ROOTS = (Root("m"), Root("m", cache_salt="a"), Root("m", adapter_key="a"))


@attrs.frozen
class Shape:
    """What a scenario is like. `unit` tokens are one index unit."""

    block_sizes: tuple[int, ...]
    num_device: int
    num_host: int
    num_clients: int
    num_able: int
    """Another client comes as long as fewer than this many can do something: wait for neither room nor copies."""
    max_units: int
    vocabulary: int = 2
    roots: Sequence[Root] = ROOTS[:1]
    span_rate: float = 0.0
    copy_rate: float = 0.25


SHAPES = {
    "minimal": Shape((1,), 3, 4, 3, 2, 3),
    "tiny": Shape((1,), 6, 12, 5, 2, 4),
    "tiny, no host": Shape((2,), 6, 0, 5, 2, 5),
    "tiny host": Shape((2,), 9, 4, 4, 3, 6),
    "slow copies": Shape((1,), 12, 60, 8, 4, 5, copy_rate=0.1),
    "one conversation": Shape((1,), 14, 12, 8, 4, 6, 1, copy_rate=0.1),
    "crowded": Shape((1,), 12, 24, 10, 4, 7),
    "long": Shape((2,), 40, 90, 6, 3, 24),
    "roots and spans": Shape((2,), 10, 20, 5, 3, 6, 1, ROOTS, 0.4),
    "two groups": Shape((2, 4), 24, 40, 5, 3, 6),
}


def _is_able(client: Client) -> bool:
    return client.state is not State.LOADING and (client.waiter is None or client.waiter.is_over)


class Scenario:
    """Random calls, mostly legal for the state that a request is in, on prompts that share prefixes by design."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape = shape
        self.random = random.Random(seed)
        self.pair = Lockstep(shape.block_sizes, shape.num_device, shape.num_host)
        self.num_admitted = 0
        self.past: list[tuple[list[int], tuple[KeySpan, ...]]] = [([], ())]
        self.stepping: list[Client] = []
        self.calls = {
            State.PINNED: self.on_pinned,
            State.ALLOCATED: self.on_allocated,
            State.RUNNING: self.on_running,
        }

    def run(self, num_admissions: int) -> Counter[str]:
        while self.num_admitted < num_admissions:
            self.turn()
        self.wind_down()
        return self.pair.seen

    def turn(self) -> None:
        pair, chance = self.pair, self.random.random()
        able = [client for client in pair.clients if _is_able(client)]
        if chance < self.shape.copy_rate and pair.jobs:
            self.copy()
        elif len(able) < self.shape.num_able and len(pair.clients) < self.shape.num_clients:
            self.admit()
        elif chance > 0.92 and self.stepping:
            pair.end_step(self.stepping.pop(self.random.randrange(len(self.stepping))))
        elif chance > 0.91 and pair.clients:
            pair.release(self.random.choice(pair.clients), "cancelled")
        elif chance > 0.9 and (waiting := [c for c in pair.clients if c.waiter and not c.waiter.is_over]):
            pair.withdraw(self.random.choice(waiting))
        elif able:
            client = self.random.choice(able)
            self.calls[client.state](client)

    def wind_down(self) -> None:
        """Everybody leaves, everything lands: nothing may be left pinned."""
        for client in list(self.pair.clients):
            self.pair.release(client, "closed_early")
        for client in self.stepping:
            self.pair.end_step(client)
        while self.pair.jobs:
            self.copy()
        statistics = self.pair.ledger.statistics()
        assert statistics.device.num_pinned == statistics.host.num_pinned == 0

    # -- prompts --------------------------------------------------------------------------------------------------

    def prompt(self) -> tuple[list[int], tuple[KeySpan, ...]]:
        """A prefix of an earlier prompt, and a few tokens of its own; often exactly to the end of a unit."""
        choice, limit = self.random, self.shape.max_units * self.pair.unit
        tokens, spans = choice.choice(self.past)
        if self.past[-1][0] and choice.random() < 0.4:
            return self.past[-1]  # once more, while the one before is still on its way
        if tokens and choice.random() < 0.3:
            return tokens, spans
        cut = choice.randint(0, min(len(tokens), limit - 1))
        fresh = choice.randint(0 if cut else 1, limit - cut)
        tokens = tokens[:cut] + [choice.randrange(self.shape.vocabulary) for _ in range(fresh)]
        if choice.random() < 0.4 and len(tokens) > self.pair.unit:
            del tokens[len(tokens) // self.pair.unit * self.pair.unit :]
        spans = tuple(span for span in spans if span.stop <= len(tokens))
        start = choice.randint(spans[-1].stop if spans else 0, len(tokens))
        if start < len(tokens) and choice.random() < self.shape.span_rate:
            spans += (KeySpan(start, choice.randint(start + 1, len(tokens)), choice.choice((b"x", b"y"))),)
        return tokens, spans

    def admit(self) -> None:
        choice, (tokens, spans) = self.random, self.prompt()
        max_hit = choice.randint(0, len(tokens)) if choice.random() < 0.1 else None
        alignment = choice.choice((2, 3)) if choice.random() < 0.1 else 1
        self.pair.admit(choice.choice(self.shape.roots), tokens, spans, max_hit, alignment)
        self.num_admitted += 1
        self.past = [*self.past[-12:], (tokens, spans)]

    # -- what may happen to a client ------------------------------------------------------------------------------

    def on_pinned(self, client: Client) -> None:
        if client.waiter is not None:
            return self.on_waiting(client)
        num_tokens = len(client.tokens)
        if self.random.random() < 0.2:
            num_tokens = max(1, num_tokens + self.random.randint(-4, 4))
        return self.pair.allocate(client, num_tokens, waits=self.random.random() < 0.8)

    def on_waiting(self, client: Client) -> None:
        assert client.waiter is not None
        if self.random.random() < 0.1:
            self.pair.withdraw(client)
        else:
            self.pair.accept(client)

    def on_allocated(self, client: Client) -> None:
        if client.waiter is not None:
            self.on_waiting(client)
        elif client.step is None and self.random.random() < 0.8:
            max_tokens = self.random.randint(0, len(client.tokens)) if self.random.random() < 0.15 else None
            self.pair.load(client, max_tokens)
        else:
            self.on_running(client)

    def on_running(self, client: Client) -> None:
        choice = self.random.random()
        if client.waiter is not None:
            self.on_waiting(client)
        elif choice < 0.6:
            self.compute(client)
        elif choice < 0.68:
            table = len(client.record.table) // self.pair.width * self.pair.unit
            self.pair.allocate(client, table + self.random.randint(1, 3), waits=self.random.random() < 0.6)
        elif choice < 0.75 and client.step is None:
            self.pair.enter_step(client)
            self.stepping.append(client)
        elif client.record.num_computed_tokens >= len(client.tokens) // 2:
            self.pair.release(client, "closed_early")

    def compute(self, client: Client) -> None:
        room = len(client.record.table) // self.pair.width * self.pair.unit
        new = [self.random.randrange(self.shape.vocabulary) for _ in range(self.random.choice((0, 0, 1, 1, 2, 5)))]
        stop = min(room, len(client.tokens) + len(new))
        first = client.record.num_computed_tokens
        if first <= stop:
            upto = stop if self.random.random() < 0.5 else self.random.randint(first, stop)
            self.pair.commit(client, upto, new)

    def copy(self) -> None:
        """Launch the next queued job, or let one that was launched land: any of them."""
        queued = [job_id for job_id, job in self.pair.jobs.items() if not job.launched]
        launched = [job_id for job_id, job in self.pair.jobs.items() if job.launched and not job.landed]
        if queued and (not launched or self.random.random() < 0.5):
            self.pair.launch(queued[0])
        elif launched:
            self.pair.land(self.random.choice(launched))
        for client in self.pair.clients:
            if client.state is State.LOADING and self.random.random() < 0.05:
                self.pair.load(client, None)  # a second call while the first one is under way changes nothing


def explore(name: str, seed: int, num_admissions: int) -> Counter[str]:
    scenario = Scenario(SHAPES[name], seed)
    try:
        return scenario.run(num_admissions)
    except Exception as error:
        error.add_note(f"{name!r}, seed {seed}, admission {scenario.num_admitted}")
        raise


INTERESTING = (
    "splits", "merges", "evicted DEVICE", "evicted HOST", "shared loads", "duplicates", "waits", "out of blocks",
    "device hits", "host hits", "loads", "out of order", "decoded", "failed extensions",
    *(f"left {state.name}" for state in (State.PINNED, State.ALLOCATED, State.LOADING, State.RUNNING)),
)  # fmt: skip

INSIDE = ("splits", "merges", "evicted DEVICE", "evicted HOST")
"""Events that are counted in methods of the core, which only the pure one lets a test replace."""


def explore_all(num_admissions: int) -> Counter[str]:
    """`num_admissions` over all shapes, in scenarios of 250."""
    seen: Counter[str] = Counter()
    for number in range(-(-num_admissions // 250)):
        seed, shape = divmod(number, len(SHAPES))
        seen += explore(list(SHAPES)[shape], seed, 250)
    return seen


def test_same_hits_as_the_naive_model() -> None:
    """What the ledger does by runs is exactly what is to be done by blocks: the same hits at every admission, the same
    blocks free, cached, private and in flight after every call, and every block in one hand."""
    seen = explore_all(int(os.environ.get("ORACLE_ADMISSIONS", "2500")))
    wanted = [event for event in INTERESTING if event not in INSIDE or not is_compiled]
    assert not [event for event in wanted if not seen[event]], "the test has become vacuous"


def test_same_hits_where_long_runs_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """That a run has a longest length changes no hit, and no block's place in the order."""
    monkeypatch.setattr("aoffload._kernel.tokens.MAX_RUN_TOKENS", 12)
    monkeypatch.setattr("aoffload._kernel.leases.MAX_GROWN_BYTES", 16)
    assert explore_all(1500)["merges"] or is_compiled


def test_same_hits_where_runs_share_the_memory_of_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of long prompts do."""
    monkeypatch.setattr("aoffload._kernel.tokens.LONG_BYTES", 1)
    assert explore_all(1500)["merges"] or is_compiled


def main(num_admissions: int) -> None:
    seen = explore_all(num_admissions)
    print(f"{num_admissions} admissions, the same hits as the naive model, integrity after every call")
    for event in INTERESTING:
        print(f"{seen[event]:>10} {event}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 50_000)
