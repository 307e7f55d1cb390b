"""The scheduler: one list of everything that can happen next, one pick per step, and a clock that jumps.

Tasks, copies, threads and wake-ups are all actors. Time passes only when nothing is ready, so a wait of minutes costs
nothing. If nothing is ready and nothing ever will be, that is a deadlock. It is found at once, and needs no timeout.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Callable

import attrs

from .choosers import Chooser, Option
from .violations import Violation

__all__ = ["Decision", "Scheduler"]

FOREVER = float("inf")


@attrs.frozen
class Decision:
    """The pick of one step."""

    step: int
    time_s: float
    num_options: int
    index: int
    name: str

    def __str__(self) -> str:
        return f"{self.step:5d}  t={self.time_s:<10.4f} {self.index + 1} of {self.num_options}: {self.name}"


@attrs.define(eq=False)
class Scheduler:
    """Runs the steps of a simulation one at a time, in an order that `chooser` chooses."""

    chooser: Chooser
    max_idle_steps: int = 4000
    """More steps than this without time passing are a livelock."""
    keep_trace: bool = False
    before_step: Callable[[], None] = lambda: None
    """Called before each step, for injections."""
    after_step: Callable[[], None] = lambda: None
    """Called after each step, for the oracles."""
    before_wait: Callable[[float], None] = lambda until: None
    """Called when nothing is ready, with the time until which nothing will be ready. Here the oracles look for tasks
    that should have been woken, or should be woken before that time."""
    now: float = 0.0
    step: int = 0
    num_choices: int = 0
    """Steps with more than one option."""
    steps_of: Counter[str] = attrs.field(factory=Counter)
    """Steps taken, by name. After each of its steps, a task was suspended or has ended."""
    trace: list[Decision] = attrs.field(factory=list)
    _ready: list[Option] = attrs.field(factory=list)
    _later: list[tuple[float, int, str, Callable[[], None]]] = attrs.field(factory=list)
    _num_actors: int = 0
    _idle_since: int = 0
    _hash: hashlib._Hash = attrs.field(factory=hashlib.sha256)

    def new_actor(self) -> int:
        self._num_actors += 1
        return self._num_actors

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    @property
    def digest(self) -> str:
        """Hash of the choices made so far at steps with more than one option."""
        return self._hash.hexdigest()

    def add(self, actor: int, name: str, run: object) -> None:
        """Record that `actor` can take its next step."""
        self._ready.append(Option(actor, name, self.step, run))

    def act(self, name: str, run: Callable[[], None], delay_s: float = 0.0) -> None:
        """Schedule something outside the event loop. It is ready `delay_s` from now, and runs when it is picked."""
        if delay_s <= 0.0:
            self.add(self.new_actor(), name, run)
        else:
            heapq.heappush(self._later, (self.now + delay_s, self.new_actor(), name, run))

    def pick(self) -> Option:
        """Take one ready option off the list. Options that became ready at the same step are ordered by actor number,
        because sets order tasks by address, which no seed determines."""
        self._ready.sort(key=_by_age)
        index = 0
        if len(self._ready) > 1:
            index = self.chooser.choose(self.step, self._ready)
            self._record(index)
        option = self._ready.pop(index)
        if self.step - self._idle_since > self.max_idle_steps:
            raise Violation("livelock", f"{self.max_idle_steps} steps and no time has passed; next: {option.name}")
        self.step += 1
        self.steps_of[option.name] += 1
        return option

    def _record(self, index: int) -> None:
        chosen = self._ready[index]
        self.num_choices += 1
        self._hash.update(f"{len(self._ready)}:{chosen.name};".encode())
        if self.keep_trace:
            self.trace.append(Decision(self.step, self.now, len(self._ready), index, chosen.name))

    def advance(self, next_timer: float) -> None:
        """Let time pass until something is ready, or until the loop's next timer. Called when nothing is ready."""
        target = min(next_timer, self._later[0][0] if self._later else FOREVER)
        self.before_wait(target)
        if target == FOREVER:
            raise Violation("deadlock", "nothing can run, and nothing ever will")
        if target > self.now:
            self.now = target
            self._idle_since = self.step
        self.collect()

    def jump(self, seconds: float) -> None:
        """Make the clock leap, as after a blocked loop or a suspend of the machine."""
        self.now += seconds
        self.collect()

    def collect(self) -> None:
        """Make every actor ready that is due."""
        while self._later and self._later[0][0] <= self.now:
            _, actor, name, run = heapq.heappop(self._later)
            self.add(actor, name, run)


def _by_age(option: Option) -> tuple[int, int]:
    return option.since, option.actor
