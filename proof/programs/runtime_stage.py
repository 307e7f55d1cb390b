"""The stage of a program: one runtime in a simulated loop, and the checks of the calls that clients make."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

import anyio
import attrs

from aoffload._common.prefix import KeySpan
from aoffload._common.tiers import Tier
from aoffload._extensions.assembly import Ledger
from aoffload._extensions.preemption import Preemption
from aoffload._kernel.records import LedgerRequest
from aoffload._kernel.states import RequestState
from aoffload._runtime.request import Request
from aoffload.errors import AoffloadError, IntegrityError, OutOfBlocks
from aoffload.testing.asks import Ask
from aoffload.testing.simulation import Simulation
from aoffload.testing.slots import Slots
from aoffload.testing.violations import Violation

from .ledger_recorder import Recorder
from .load_choice import RANDOM, RandomLoadChoice
from .program import EPOCHS, Program
from .runtime_bytes import ProgramEngine
from .runtime_requests import Served
from .runtime_state import RecordedEvents, picture
from .state_digest import state_digest

__all__ = ["Role", "Stage"]

Found = TypeVar("Found")
STRIDE = 4
"""The full laws are checked once in so many changes of the ledger."""
MOST_ASKS = 6
"""Prompts that are looked up at rest."""


@attrs.define(eq=False)
class Role:
    """The part of a client that the stage uses."""

    name: str
    served: Served | None = attrs.field(default=None, kw_only=True)
    """The client's request."""
    was_struck: bool = attrs.field(default=False, init=False)
    """Whether its request was cancelled from outside."""


class Stage:
    """Makes the public calls of a program's clients, and judges their results."""

    SERVED: ClassVar[type[Served]] = Served

    def __init__(self, program: Program, simulation: Simulation) -> None:
        self.program = program
        self.simulation = simulation
        self.slots: Slots | None = None
        """What an earlier runtime has left on the disk."""
        self.epoch = ""
        """The weights' epoch."""
        self.engine = self.begin()
        self.actors: Mapping[str, Role] = {}
        self.live: dict[Served, None] = {}
        self.features: set[str] = set()
        self.num_calls = self.num_invalidations = 0
        self.was_closed = False
        self.taken: list[str] | None = None
        """With a list: what each call said, and a digest of all that the ledger was when it had said it."""
        self._hash = hashlib.sha256()

    def begin(self) -> ProgramEngine:
        """A runtime of its own, on what is on the disk."""
        self.events, self.recorder = RecordedEvents(), Recorder()
        self.engine = engine = self._engine()
        self.events.answered, engine.met = engine.answered, self.met
        self.runtime = engine.runtime
        self.recorder.calls_to(engine.runtime.ledger)
        self.runtime.ledger.watch(self.events)
        self._note_calls()
        self.simulation.oracles[-1].stride = STRIDE
        return engine

    def begin_again(self) -> None:
        """The runtime was closed, or killed: another one takes its place."""
        self.check_end()
        before = self.engine
        self.begin().follow(before)

    def _engine(self, **options: Any) -> ProgramEngine:
        world = self.program.world
        options_of = _options_of(self.program)
        config = world.config(namespace="simulated", weights_epoch=self.epoch, **options_of)
        engine = self.simulation.engine_of(
            config,
            world.num_device_blocks - 1,
            observers=[self.events, self.recorder],
            kind=ProgramEngine,
            slots=self.slots,
            **options,
        )
        assert isinstance(engine, ProgramEngine)
        return engine

    @property
    def digest(self) -> str:
        self._hash.update(self.simulation.scheduler.digest.encode())
        return self._hash.hexdigest()

    def met(self, feature: str) -> None:
        self.features.add(feature)

    def note(self, *words: object) -> None:
        """Add something observable to the digest."""
        self._hash.update(repr(words).encode())
        if self.taken is not None:
            self.taken.append(f"{words} {state_digest(self.runtime.ledger)}")

    # -- calls ----------------------------------------------------------------------------------------------------

    def attempt(self, what: str, call: Callable[[], Found]) -> Found | None:
        """Make a public call, and return its result; None if it is refused, which must change nothing."""
        self.num_calls += 1
        before = picture(self.runtime.ledger)
        with self._judged(what, lambda error: before):
            found = call()
            self.note(what, _seen(found))
            return found
        return None

    def make(self, what: str, call: Callable[[], object]) -> bool:
        """Like `attempt`, for a call that returns nothing: whether it was made."""

        def made() -> bool:
            call()
            return True

        return self.attempt(what, made) is True

    async def attempt_async(
        self,
        what: str,
        call: Callable[[], Awaitable[Found]],
        give_up_s: float | None = None,
    ) -> Found | None:
        """Like `attempt`, for a call that may wait; None, too, if the wait is given up after `give_up_s`."""
        self.num_calls += 1
        before, step = picture(self.runtime.ledger), self.simulation.scheduler.step

        def unchanged(error: AoffloadError) -> Any:
            # A request that is refused room was in the line, if only for a moment, and was matched again there.
            is_at_once = step == self.simulation.scheduler.step and not isinstance(error, OutOfBlocks)
            return before if is_at_once else None

        with self._judged(what, unchanged):
            if give_up_s is None:
                found: Found | None = await call()
            else:
                found = None
                with anyio.move_on_after(give_up_s) as scope:
                    found = await call()
                if scope.cancelled_caught:
                    self.met("call scope")
            self.note(what, _seen(found))
            return found
        return None

    @contextmanager
    def _judged(self, what: str, unchanged: Callable[[AoffloadError], Any]) -> Iterator[None]:
        """Around a call that may be refused: only with a typed error, and with the `picture` that `unchanged` gives."""
        try:
            yield
        except AoffloadError as error:
            self._refused(what, error, unchanged(error))
        except Violation:
            raise
        except Exception as error:
            raise Violation("a raw error", f"{what}: {error!r}") from error

    def _refused(self, what: str, error: AoffloadError, before: Any) -> None:
        if isinstance(error, IntegrityError):
            raise Violation("conservation", str(error))
        self.note(what, type(error).__name__, str(error))
        self.met(f"refused: {type(error).__name__}")
        if before is not None and picture(self.runtime.ledger) != before:
            raise Violation("a refusal changed something", f"{what}: {error!r}")

    def open(self, name: str, args: Any) -> Request:
        runtime: Any = self.runtime
        request: Request = runtime.request(
            args["tokens"], name, deadline_s=args.get("deadline_s"), **self.options(args)
        )
        return request

    def options(self, args: Any) -> dict[str, Any]:
        names = {
            "max_hit": "max_hit_tokens", "alignment": "hit_alignment", "reads_cache": "reads_cache", "store": "store",
            "max_store": "max_store_tokens",
        }  # fmt: skip
        found = {option: args[name] for name, option in names.items() if name in args}
        return {**found, **self.identity(args)}

    @staticmethod
    def identity(args: Any) -> dict[str, Any]:
        """What identifies KV besides the tokens."""
        spans = tuple(KeySpan(*span) for span in args.get("spans", ()))
        return {"cache_salt": args.get("salt"), "adapter_key": args.get("adapter"), "key_spans": spans}

    def admitted(self, request: Request, args: Any) -> Served:
        """Register a request that was entered."""
        ask = _ask_of(args)
        engine = self.engine
        assert request._record is not None
        engine.know(request._record.sequence.root)
        chain = engine.chain((ask.salt, ask.adapter), ask.tokens, ask.key_spans)
        served = self.SERVED(engine, request, ask, list(ask.tokens), chain, engine.num_resets)
        self.live[served] = None
        if len(self.simulation.asks) < MOST_ASKS:
            self.simulation.asks.append(ask)
        self._met_ask(ask)
        return served

    def left(self, served: Served) -> None:
        """Forget a request whose block was left."""
        self.live.pop(served)

    def _met_ask(self, ask: Ask) -> None:
        self.met("request")
        for name, is_used in (
            ("salt", ask.salt), ("adapter", ask.adapter), ("span", ask.key_spans),
            ("deadline", ask.deadline_s is not None), ("no cache", not ask.reads_cache),
            ("max_hit", ask.max_hit_tokens is not None), ("alignment", ask.hit_alignment > 1),
            ("store", ask.store != "all" or ask.max_store_tokens is not None),
        ):  # fmt: skip
            if is_used:
                self.met(name)

    def struck(self, served: Served) -> None:
        for actor in self.actors.values():
            if actor.served is served:
                actor.was_struck = True

    def reasons(self, actor: Role, served: Served) -> set[str]:
        """The reasons for which a request may have been aborted."""
        found = {"closed_early", "error: ClientEnded"}
        if actor.was_struck:
            found |= {"injected", "cancelled"}
        if served.ask.deadline_s is not None:
            found.add("deadline")
        if self.num_invalidations:
            found.add("prefix_invalidated")
        if self.was_closed:
            found.add("runtime_closed")
        return found

    # -- judging --------------------------------------------------------------------------------------------------

    def check_told(self) -> None:
        """Requests that have computed on invalidated tokens were told, and nothing invalidated can be found."""
        for served in self.live:
            if served.has_wrong_input and not served.must_end:
                raise Violation("not told", f"{served.name} has computed on what was taken back")
        self.engine.check_findable()

    def _note_calls(self) -> None:
        """Record resets and preemptions at the moment they happen: their caller may learn of them later."""
        ledger: Any = self.runtime.ledger
        reset, plan_load = ledger.reset, ledger.plan_load
        preempt = ledger.preemption.preempt if isinstance(ledger, Ledger) else None

        def planned(record: LedgerRequest, *args: Any, **kwargs: Any) -> Any:
            before = record.state
            plans = plan_load(record, *args, **kwargs)
            if record.state is not before and record.state is RequestState.RUNNING:
                self.engine.answered(record)
            return plans

        def preempted(record: LedgerRequest) -> Preemption:
            assert preempt is not None
            found: Preemption = preempt(record)
            for served in self.live:
                if served.name == record.request_id:
                    served.start_again()
            self.met("preempt")
            return found

        def noted(tier: Tier | None = None) -> None:
            reset(tier)
            if tier is None:
                self.engine.forget_everything()
            else:
                self.engine.num_resets_of_tiers += 1

        set_epoch = ledger.weights.set

        def changed(epoch: str) -> None:
            if epoch in EPOCHS:  # before the requests that are matched again get their answers
                self.engine.set_epoch(epoch)
            set_epoch(epoch)
            self.epoch = epoch
            for served in self.live:
                record = served.request._record
                if record is not None and record.epoch == ledger.cache.epoch:  # it was matched again
                    served.born = self.engine.num_resets

        ledger.reset, ledger.plan_load, ledger.weights.set = noted, planned, changed
        if preempt is not None:
            ledger.preemption.preempt = preempted

    def check_end(self) -> None:
        """The laws at rest."""
        self.engine.check_findable()
        self.events.check(self.runtime)
        if self.recorder.problem or self.runtime.observers.num_failures != self.recorder.num_events():
            raise Violation("told otherwise", self.recorder.problem or "an observer failed")
        if self.runtime.ledger.moves.unreported:
            raise Violation("told otherwise", f"not reported: {list(self.runtime.ledger.moves.unreported)}")
        if self.runtime.statistics().num_loads_declined:
            self.met("declined")
        if self.events.states:
            raise Violation("told otherwise", f"not told to be over: {list(self.events.states)}")
        if left := [served.name for served in self.live]:
            raise Violation("a leak", f"still served: {left}")


def _options_of(program: Program) -> dict[str, Any]:
    """The options that the program's `configure` calls set."""
    found = {name: value for call in program.calls if call.name == "configure" for name, value in call.args.items()}
    if found.get("load_choice") == RANDOM:
        found["load_choice"] = RandomLoadChoice(random.Random(f"load choice {program.seed}"))
    return found


def _seen(found: object) -> str:
    """The part of a result that is the same in every process."""
    return repr(found) if isinstance(found, (int, str, tuple, bool)) else type(found).__name__


def _ask_of(args: Any) -> Ask:
    """What a call asks for, as an `Ask`."""
    spans = tuple(KeySpan(*span) for span in args.get("spans", ()))
    return Ask(
        tokens=tuple(args["tokens"]), salt=args.get("salt"), adapter=args.get("adapter"), key_spans=spans,
        max_hit_tokens=args.get("max_hit"), hit_alignment=args.get("alignment", 1),
        reads_cache=args.get("reads_cache", True), store=args.get("store", "all"),
        max_store_tokens=args.get("max_store"), deadline_s=args.get("deadline_s"),
    )  # fmt: skip
