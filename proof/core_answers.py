"""Prints the observable behaviour of this process's build of the core, one line for each check.

Run `python -P proof/core_answers.py` with a folder in `PYTHONPATH` that contains `proof`. `--third=NUMBER` leaves out
two thirds of the situations in which arguments are invalid. If the folder contains
`aoffload` as well, the checks use that package, otherwise the installed one. The checks pass invalid arguments to every
call of a ledger in several states, copy, compare, pickle and modify its values and records, and run plug-ins.
"""

from __future__ import annotations

import copy
import enum
import inspect
import json
import pickle
import sys
import typing
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import aoffload
import aoffload.ledger as public
from aoffload import Ledger, Tier
from aoffload._kernel.extension import HOOKS
from aoffload.ledger import (
    Completion,
    DoneHint,
    GivenHint,
    HintAnswer,
    HintOutcome,
    HintVerb,
    LedgerExtension,
    Outcome,
    PinHint,
    Prefix,
    is_compiled,
)
from proof.core_ledgers import LEDGERS, ODD_VALUES, ROOT, SITUATIONS, TOKENS, outcome_of
from proof.core_plugins import plug_ins
from proof.programs.state_digest import state_digest

# -- arguments --------------------------------------------------------------------------------------------------------


def odd_arguments(situations: Sequence[tuple[str, str]] = SITUATIONS) -> Iterator[tuple[str, str]]:
    """Every call of a ledger, with each odd value as each argument. What is refused has changed nothing."""
    for world, state in situations:
        made, before = None, ""
        for name, parameters in public_calls(Ledger):
            call = attrgetter(name)
            needed = [one.name for one in parameters if one.default is one.empty]
            for odd, (number, value) in ((one.name, odd) for one in parameters for odd in enumerate(ODD_VALUES)):
                ledger, record = made or getattr(LEDGERS[world], state)()
                before = before or state_digest(ledger)
                given = {one: usual(one, ledger, record) for one in needed} | {odd: value}
                outcome, after = outcome_of(partial(called, call, ledger, given)), state_digest(ledger)
                yield f"{world} {state} {name} {odd} {number}", f"{outcome} {after}"
                made, before = ((ledger, record), after) if after == before else (None, "")


FOR_EXTENSIONS = {
    "add_once", "end_call", "enrol", "find", "has_begun", "hold", "invalidated", "match_all_again", "new_name", "own",
    "pending_wakes", "plans_of", "possible_publishers", "rematch", "report_errors", "sequence_of", "waits_for",
}  # fmt: skip
"""Calls of a ledger that its extensions make."""
FOR_HANDLES = {
    "invalidation": {"forget", "has_read", "keep", "remember"},
    "pins": {"check_share", "end_all", "grow"},
    "preemption": {"may_preempt"},
    "reports": {"fetching", "oldest_by_state", "oldest_step_s", "oldest_wait_s", "step", "wait_for_room"},
    "quotas": {"all_cleared", "ceiling", "max_pinned", "num_left", "number_of", "part_changed"},
    "transfers": {"begin", "hit_of", "leaving", "new_request", "over", "wait_for_jobs"},
    "weights": {"begin_again", "is_findable", "root_of"},
}
"""Calls of handles that other modules of the package make."""


def public_calls(kind: type) -> Iterator[tuple[str, list[inspect.Parameter]]]:
    """The calls of a ledger and of its handles, such as `commit` and `pins.hold`."""
    yield from calls_of(kind, FOR_EXTENSIONS)
    for name, handle in inspect.getmembers(kind, lambda member: isinstance(member, property)):
        returned = typing.get_type_hints(handle.fget)["return"]
        if isinstance(returned, type) and issubclass(returned, LedgerExtension):
            for verb, parameters in calls_of(returned, {*HOOKS, *FOR_HANDLES.get(name, ())}):
                yield f"{name}.{verb}", parameters


def calls_of(kind: type, left_out: Container[str]) -> Iterator[tuple[str, list[inspect.Parameter]]]:
    for name, call in inspect.getmembers(kind, callable):
        if not name.startswith("_") and name not in left_out:
            taken = list(inspect.signature(call).parameters.values())[1:]
            options = [one for one in taken if one.kind is not one.VAR_KEYWORD]
            if options != taken:  # of `admit`
                options += [
                    one.replace(name=key, kind=one.KEYWORD_ONLY, default=None)
                    for one in taken[-1:]
                    for key in public.RequestOptions.__annotations__
                ]
            yield name, options


def called(call: Callable[[Ledger], Any], ledger: Ledger, given: dict[str, Any]) -> Any:
    """The handle may be missing, so it is looked up here."""
    found = call(ledger)(**given)
    if hasattr(found, "__enter__"):
        with found:
            return "entered"
    return found


def usual(name: str, ledger: Ledger, record: Any) -> Any:
    values = {
        "request": record, "prefix": Prefix.of(ROOT, TOKENS), "requests": [record], "num_tokens": 44, "job_id": 0,
        "num_computed_tokens": 40, "from_token": 8, "expires_at": 3.0, "now": 2.0, "arriving": [],
        "epoch": "step-7", "max_blocks": 9, "is_wanted": bool, "num_remote_tokens": 0, "watcher": None,
        "waiter": record.waiter, "completion": Completion(0, Outcome.LANDED, 1), "plans": [], "pin": None,
        "transfer": None, "run": None, "readers": (), "wakes": (), "commits": [(record, 40, ())],
        "hint": PinHint(3.0), "given": [GivenHint.of(DoneHint())],
        "answer": HintAnswer(HintVerb.PIN, HintOutcome.ACCEPTED),
        "sequence": record.sequence, "among": [], "max_share": 0.5, "argument": "max_pinned_share", "tier": Tier.HOST,
        "number": 0, "part": None, "first": 0, "stop": 1,
    }  # fmt: skip
    return values[name]


def odd_pool_sizes() -> Iterator[tuple[str, str]]:
    """A ledger that is made with odd values."""
    for name in list(inspect.signature(Ledger).parameters)[2:]:
        for number, value in enumerate(ODD_VALUES):
            given = {"num_device_blocks": 24, name: value}
            yield f"Ledger {name} {number}", outcome_of(lambda: Ledger(LEDGERS["plain"].config, **given))  # noqa: B023


# -- values -----------------------------------------------------------------------------------------------------------


def things() -> Iterator[tuple[str, Any]]:
    """What the calls of a ledger hand out, by the names of their classes."""
    world = LEDGERS["plain"]
    ledger, record = world.running()
    found: dict[str, Any] = {}
    pin, prefix = ledger.pins.hold(Prefix.of(ROOT, TOKENS[:16])), Prefix.of(ROOT, TOKENS[:12])
    other = ledger.admit(Prefix.of(ROOT, TOKENS[:30]))
    fork = ledger.forks.fork(record, "child")
    extension, waiter = ledger.extend_nowait(record, 44), ledger.queue_extension(fork.request, 80)
    made = [
        ledger,
        record,
        pin,
        other,
        fork,
        extension,
        waiter,
        record.match,
        ledger.statistics(),
        *ledger.reports.requests(),
    ]
    made += [
        *ledger.reports.holders(),
        ledger.transfers.prefetch(prefix),
        ledger.transfers.demote(prefix),
        ledger.lookup(prefix),
        prefix,
        ROOT,
    ]
    with ledger.step([record]):
        made += ledger.steps.values()
    made += [world.allocated()[0].admit(Prefix.of(ROOT, TOKENS)).match, world.allocated()[0].plan_load]
    ledger, record = world.allocated()
    made += [ledger.loadable(record), *ledger.plan_load(record), record.load, Completion(0, Outcome.LANDED, 1)]
    made += [public.LoadOffer(2, 8, 16, 1, None), public.CostChoice()]
    made += [world.preempted()[1].match, public.LearnedEviction(), *public.PinState, *public.JobState, *aoffload.Tier]
    for one in made:
        found.setdefault(type(one).__name__, one)
    yield from sorted(found.items())


ASKED: dict[str, Callable[[Any], Any]] = {
    "repr": repr, "str": str, "equals itself": lambda one: one == copy.copy(one),
    "is hashable": lambda one: bool(hash(one) or 1),
    "equals another": lambda one: one == object(), "less": lambda one: one < one, "len": len, "truth": bool,
    "copied": lambda one: repr(copy.copy(one)), "deep": lambda one: repr(copy.deepcopy(one)),
    "pickled": lambda one: repr(pickle.loads(pickle.dumps(one))),  # noqa: S301
    "module": lambda one: (type(one).__module__, type(one).__qualname__), "doc": lambda one: type(one).__doc__,
    "bases": lambda one: [kind.__name__ for kind in type(one).__mro__], "made of nothing": lambda one: type(one)(),
    "signature": lambda one: str(inspect.signature(type(one))), "fields": lambda one: sorted(fields_of(one)),
    "new attribute": lambda one: setattr(one, "something", 1),
}  # fmt: skip
"""What is asked of a value."""


def fields_of(thing: Any) -> list[str]:
    return [] if isinstance(thing, enum.Enum) else sorted(getattr(type(thing), "__annotations__", {}))


def values() -> Iterator[tuple[str, str]]:
    """Text, equality, hash, copies, pickles, and what can be written."""
    for name, thing in things():
        for word, ask in ASKED.items():
            yield f"{name} {word}", outcome_of(partial(ask, thing))
        for field in fields_of(thing):
            if hasattr(thing, field):
                yield f"{name}.{field}", outcome_of(partial(getattr, thing, field))
                yield f"{name}.{field} deleted", outcome_of(partial(deleted, thing, field))
                for value in (None, "x", 1.5, True):
                    yield f"{name}.{field} = {value!r}", outcome_of(partial(written, thing, field, value))


def written(thing: Any, field: str, value: Any) -> str:
    before = getattr(thing, field)
    setattr(thing, field, value)
    setattr(thing, field, before)
    return "was written"


def deleted(thing: Any, field: str) -> str:
    before = getattr(thing, field)
    delattr(thing, field)
    setattr(thing, field, before)
    return "was deleted"


THIRD = "--third="
PARTS: dict[str, Callable[[], Iterator[tuple[str, str]]]] = {
    "arguments": odd_arguments,
    "rooms": odd_pool_sizes,
    "values": values,
    "plug-ins": plug_ins,
}


def main(*words: str) -> None:
    print(json.dumps({"is_compiled": is_compiled}))
    parts = [word for word in words if word in PARTS]
    thirds = [int(word.removeprefix(THIRD)) for word in words if word.startswith(THIRD)]
    for part in parts or PARTS:
        lines = odd_arguments(SITUATIONS[thirds[0] :: 3]) if part == "arguments" and thirds else PARTS[part]()
        for line in lines:
            print(json.dumps([part, *line]))


if __name__ == "__main__":
    main(*sys.argv[1:])
