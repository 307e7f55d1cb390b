"""`Moves`: the only code that changes the state of a request or a job, and the queue of events that are not reported
yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import IllegalTransition
from .events import Event, JobMoved, Observer, RequestMoved, StepBegun, StepEnded
from .hooks import Hooks
from .records import Job, LedgerRequest, Step, do_nothing
from .states import ALLOCATED, JOB_MOVES, REQUEST_MOVES, JobState, RequestState, State, Stateful


def _no_hooks() -> Hooks:
    return Hooks(do_nothing)


@dataclass(slots=True, eq=False)
class Moves:
    """Moves states as their tables allow, and notes each move for the observer. An illegal move raises and changes
    nothing."""

    observer: Observer | None
    clock: Callable[[], float] | None = None
    """The clock for the ages of states. None: ages are not measured."""
    hooks: Hooks = field(default_factory=_no_hooks)
    """While an observer answers `wants_move`, verbs are refused as they are in a hook."""
    unreported: deque[Event] = field(default_factory=deque, init=False)
    """Events that are not reported yet. Each call of the ledger reports them when its change is complete."""
    _wants_move: Any = field(init=False)
    """The method `wants_move` of the observer; None: it has none, and wants all moves."""
    _is_reporting: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._wants_move = getattr(self.observer, "wants_move", None)

    def _is_wanted(self, kind: type[Event], state: State) -> bool:
        """Whether the observer wants an event of a move to `state`."""
        if self._wants_move is None:
            return True
        hooks = self.hooks
        before, hooks.calling = hooks.calling, "wants_move"  # verbs are refused: the change is not complete
        try:
            return bool(self._wants_move(kind, state))
        except BaseException:  # noqa: BLE001 - as for `observe`: the caller of the ledger has to get its answer
            return True
        finally:
            hooks.calling = before

    def request(self, request: LedgerRequest, state: RequestState) -> None:
        old = request.state
        if state not in REQUEST_MOVES[old]:
            raise _illegal(request, state)
        if self.clock is not None:
            request.since_s = self.clock()
        request.state = state
        if self.observer is not None and self._is_wanted(RequestMoved, state):
            num_blocks = request.num_blocks if state is ALLOCATED else 0
            computed, lost = request.num_computed_tokens, request.num_lost_tokens
            moved = RequestMoved(request, old, state, request.reason, request.match, num_blocks, computed, lost)
            self.unreported.append(moved)

    def job(self, job: Job, state: JobState, reason: str = "") -> None:
        old = job.state
        if state not in JOB_MOVES[old]:
            raise _illegal(job, state)
        if self.clock is not None:
            job.since_s = self.clock()
        job.state = state
        if self.observer is not None and self._is_wanted(JobMoved, state):
            self.unreported.append(JobMoved(job, old, state, reason))

    def other(self, entity: Stateful, state: State, moves: Mapping[State, frozenset[State]]) -> Any:
        """Move the state of an extension's entity as the table `moves` allows. Returns the old state; the extension
        notes the event."""
        old = entity.state
        if state not in moves[old]:
            raise _illegal(entity, state)
        entity.state = state
        return old

    def step_begun(self, step: Step) -> None:
        if self.clock is not None:
            step.begun_s = self.clock()
        if self.observer is not None:
            num_blocks = 0
            for request in step.requests:
                num_blocks += request.num_blocks
            self.unreported.append(StepBegun(step, num_blocks))

    def step_ended(self, step: Step) -> None:
        if self.observer is not None:
            over = tuple([request.request_id for request in step.requests if request.is_over])
            self.unreported.append(StepEnded(step, over))

    def note(self, event: Event) -> None:
        """Note an event for the observer, if there is one."""
        if self.observer is not None:
            self.unreported.append(event)

    def report(self) -> None:
        """Report the noted events to the observer, in order. Each call of the ledger does it once its change is
        complete, before it wakes waiters.

        An observer may call the ledger. The events of such a call are reported after the earlier ones."""
        unreported, observer = self.unreported, self.observer
        if not unreported or observer is None or self._is_reporting:
            return
        self._is_reporting = True
        observe = observer.observe
        while unreported:
            try:  # noqa: SIM105 - `suppress` would cost as much as an observer
                observe(unreported.popleft())
            except BaseException:  # noqa: BLE001 - the caller of the ledger has to get its answer; `Observers` counts errors
                pass
        self._is_reporting = False


def _illegal(entity: Stateful, new: State) -> IllegalTransition:
    return IllegalTransition(str(entity), entity.state.name, new.name)
