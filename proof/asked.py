"""What a program can see of a core beside its answers, as the core that this process has shows it: a line each.

`python -P proof/asked.py`: imports nothing of the clone. Odd arguments to every call of a ledger, in several states;
its values and records, copied, compared, pickled and written to; plug-ins that raise, and that return odd values.
"""

from __future__ import annotations

import copy
import decimal
import enum
import inspect
import json
import math
import pickle
import re
import sys
import traceback
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

import aoffload
import aoffload.ledger as public
from aoffload import DiskTier, KVCacheGroup, Ledger, OffloadConfig, RemoteTier, SlidingWindow
from aoffload.ledger import Completion, Outcome, Prefix, Root, is_compiled
from aoffload.testing.programs.state_digest import state_digest

ADDRESS = re.compile(r"(?: at|@) 0x[0-9a-f]+|<function [^>]+(>+)|<[^<>]*mypyc_lambda[^<>]*>|<built-in [^>]+>|<Run .*")
"""What differs from process to process. Of several runs that are wrong, any is named."""
ROOT = Root("asked")
TOKENS = list(range(40))


class Small(int):
    """An integer of another class."""


class Count(enum.IntEnum):
    TWO = 2


class Said(str):
    """A text of another class."""


ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 5, 17, 40, 41, 2**31, 2**63, 2**70, -(2**70), Small(4), Count.TWO, np.int64(4),
    np.bool_(True), 1.0, 1.5, -0.0, math.nan, math.inf, np.float64(2.5), decimal.Decimal(3), 4j, "", "4", "prompt", Said("all"), b"",
    b"4", (), [], [3], (1, 2), [[1, 2]], [[1.5]], [1.5], [True], [2**40], {}, {1}, range(3), array("i", [7]), np.arange(3),
    object, object(), len, Root("other"), Prefix.of(ROOT, TOKENS), aoffload.Tier.HOST, ...,
)  # fmt: skip


class Nowhere:
    """A store that nobody asks: a ledger does not."""

    def _unasked(self, *_: object) -> Any:
        raise NotImplementedError

    exist = get = put = remove = node_of = close = _unasked


class Worlds:
    """Ledgers in one state each, with a request."""

    def __init__(self, **options: Any) -> None:
        groups = [KVCacheGroup("full", block_size=4)]
        if options.pop("windows", False):
            groups.append(KVCacheGroup("window", SlidingWindow(8), block_size=4))
        self.options = options
        self.config = OffloadConfig(groups=groups, num_host_blocks=24, **options)

    def ledger(self, **plugged: Any) -> Ledger:
        return Ledger(self.config, 24, **plugged)

    def pinned(self, **plugged: Any) -> tuple[Ledger, Any]:
        """Of its prompt, the host has a part."""
        ledger = self.ledger(**plugged)
        serve(ledger, TOKENS[:24])
        ledger.reset(aoffload.Tier.DEVICE)
        return ledger, ledger.admit(Prefix.of(ROOT, TOKENS), request_id="asked")

    def allocated(self, **plugged: Any) -> tuple[Ledger, Any]:
        ledger, holding = self.pinned(**plugged)
        ledger.allocate_nowait(holding)
        return ledger, holding

    def loading(self, **plugged: Any) -> tuple[Ledger, Any]:
        ledger, holding = self.allocated(**plugged)
        ledger.plan_load(holding)
        return ledger, holding

    def running(self, **plugged: Any) -> tuple[Ledger, Any]:
        ledger, holding = self.allocated(**plugged)
        land(ledger, ledger.plan_load(holding))
        ledger.commit(holding, len(TOKENS))
        return ledger, holding

    def preempted(self, **plugged: Any) -> tuple[Ledger, Any]:
        ledger, holding = self.running(**plugged)
        ledger.preempt_nowait(holding)
        return ledger, holding

    def waiting(self, **plugged: Any) -> tuple[Ledger, Any]:
        ledger, holding = self.running(**plugged)
        ledger.queue_extension(holding, 80)
        return ledger, holding

    def over(self, **plugged: Any) -> tuple[Ledger, Any]:
        ledger, holding = self.running(**plugged)
        ledger.release(holding)
        return ledger, holding


STATES = ("pinned", "allocated", "loading", "running", "preempted", "waiting", "over")
RICH = ("pinned", "running")
WORLDS = {
    "plain": Worlds(),
    "windows": Worlds(windows=True),
    "learned": Worlds(
        eviction="learned",
        disk=DiskTier("/none", size=1 << 20),
        remote=RemoteTier(Nowhere(), cell_bytes=2),
        namespace="asked",
    ),
}
SITUATIONS = [("plain", state) for state in STATES] + [
    (world, state) for world in ("windows", "learned") for state in RICH
]


def land(ledger: Ledger, plans: Any) -> None:
    for plan in plans:
        if ledger.launch(plan.job_id):
            ledger.settle(Completion(plan.job_id, Outcome.LANDED, plan.num_blocks))


def serve(ledger: Ledger, tokens: list[int]) -> None:
    holding = ledger.admit(Prefix.of(ROOT, tokens))
    ledger.allocate_nowait(holding)
    land(ledger, ledger.plan_load(holding))
    land(ledger, ledger.commit(holding, len(tokens)))
    land(ledger, ledger.release(holding))


def said(make: Callable[[], Any]) -> str:
    """What a call answers, or how it refuses."""
    try:
        found = make()
    except BaseException as error:  # noqa: BLE001
        found = f"{type(error).__name__}: {error}"
        if error.__cause__ is not None:
            found += f" from {error.__cause__!r}"
        return ADDRESS.sub("", found)
    return ADDRESS.sub("", repr(found))


# -- arguments --------------------------------------------------------------------------------------------------------


def odd_arguments() -> Iterator[tuple[str, str]]:
    """Every call of a ledger, with each odd value as each argument. What is refused has changed nothing."""
    for world, state in SITUATIONS:
        made, before = None, ""
        for name, parameters in public_calls(Ledger):
            needed = [one.name for one in parameters if one.default is one.empty]
            for odd, (number, value) in ((one.name, odd) for one in parameters for odd in enumerate(ODD)):
                ledger, holding = made or getattr(WORLDS[world], state)()
                before = before or state_digest(ledger)
                given = {one: usual(one, ledger, holding) for one in needed} | {odd: value}
                outcome, after = said(partial(called, getattr(ledger, name), given)), state_digest(ledger)
                yield f"{world} {state} {name} {odd} {number}", f"{outcome} {after}"
                made, before = ((ledger, holding), after) if after == before else (None, "")


def public_calls(kind: type) -> Iterator[tuple[str, list[inspect.Parameter]]]:
    for name, call in inspect.getmembers(kind, callable):
        if not name.startswith("_"):
            yield name, list(inspect.signature(call).parameters.values())[1:]


def called(call: Callable[..., Any], given: dict[str, Any]) -> Any:
    found = call(**given)
    if hasattr(found, "__enter__"):
        with found:
            return "entered"
    return found


def usual(name: str, ledger: Ledger, holding: Any) -> Any:
    values = {
        "holding": holding, "prefix": Prefix.of(ROOT, TOKENS), "holdings": [holding], "num_tokens": 44, "job_id": 0,
        "num_computed_tokens": 40, "from_token": 8, "expires_at": 3.0, "now": 2.0, "block_ids": [[1, 2]],
        "num_device_tokens": 0, "max_blocks": 9, "is_wanted": bool, "num_remote_tokens": 0, "watcher": None,
        "waiter": holding.waiter, "completion": Completion(0, Outcome.LANDED, 1), "pin": None, "transfer": None,
        "run": None,
    }  # fmt: skip
    return values[name]


def odd_rooms() -> Iterator[tuple[str, str]]:
    """A ledger that is made with odd values."""
    for name in list(inspect.signature(Ledger).parameters)[2:]:
        for number, value in enumerate(ODD):
            given = {"num_device_blocks": 24, name: value}
            yield f"Ledger {name} {number}", said(lambda: Ledger(WORLDS["plain"].config, **given))  # noqa: B023


# -- values -----------------------------------------------------------------------------------------------------------


def things() -> Iterator[tuple[str, Any]]:
    """What the calls of a ledger hand out, by the names of their classes."""
    world = WORLDS["plain"]
    ledger, holding = world.running()
    found: dict[str, Any] = {}
    pin, prefix = ledger.pin(Prefix.of(ROOT, TOKENS[:16])), Prefix.of(ROOT, TOKENS[:12])
    other = ledger.admit(Prefix.of(ROOT, TOKENS[:30]))
    fork = ledger.fork(holding, "child")
    extension, waiter = ledger.extend_nowait(holding, 44), ledger.queue_extension(fork.holding, 80)
    made = [
        ledger,
        holding,
        pin,
        other,
        fork,
        extension,
        waiter,
        holding.match,
        ledger.statistics(),
        *ledger.requests(),
    ]
    made += [*ledger.holders(), ledger.prefetch(prefix), ledger.demote(prefix), ledger.lookup(prefix), prefix, ROOT]
    with ledger.step([holding]):
        made += ledger.steps.values()
    made += [world.allocated()[0].admit(Prefix.of(ROOT, TOKENS)).match, world.allocated()[0].plan_load]
    ledger, holding = world.allocated()
    made += [ledger.loadable(holding), *ledger.plan_load(holding), holding.load, Completion(0, Outcome.LANDED, 1)]
    made += [public.TierOffer(2, 8), public.LoadOffer(4, [public.TierOffer(2, 8)], 1, 2.0), public.CostChoice()]
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
            yield f"{name} {word}", said(partial(ask, thing))
        for field in fields_of(thing):
            if hasattr(thing, field):
                yield f"{name}.{field}", said(partial(getattr, thing, field))
                yield f"{name}.{field} deleted", said(partial(deleted, thing, field))
                for value in (None, "x", 1.5, True):
                    yield f"{name}.{field} = {value!r}", said(partial(written, thing, field, value))


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


# -- plug-ins ---------------------------------------------------------------------------------------------------------


class Failing(BaseException):
    """What no handler expects."""


ERRORS: tuple[type[BaseException], ...] = (ValueError, MemoryError, KeyboardInterrupt, Failing, StopIteration)


class Pool:
    """Hands out the lowest ids."""

    def __init__(self, num_rows: int = 24) -> None:
        self.free = list(range(1, num_rows))
        self.size = num_rows - 1

    @property
    def num_blocks(self) -> Any:
        return self.size

    @property
    def num_free(self) -> Any:
        return len(self.free)

    def take(self, num_blocks: int) -> Any:
        taken, self.free = self.free[:num_blocks], self.free[num_blocks:]
        return array("i", taken)

    def give(self, block_ids: Any) -> Any:
        self.free = sorted([*self.free, *block_ids])

    def free_ids(self) -> Any:
        return list(self.free)


class Watcher:
    def part_changed(self, part: Any, first: Any, stop: Any) -> Any:
        pass

    def all_cleared(self, epoch: Any) -> Any:
        pass


@contextmanager
def replaced(thing: Any, name: str, value: Any) -> Iterator[None]:
    kind = type(f"{type(thing).__name__}", (type(thing),), {name: value})
    before, thing.__class__ = type(thing), kind
    try:
        yield
    finally:
        thing.__class__ = before


def _raising(error: type[BaseException]) -> Callable[..., Any]:
    def fails(*_: Any, **__: Any) -> Any:
        raise error("plugged in")

    return fails


def plug_ins() -> Iterator[tuple[str, str]]:
    """One call of each plug-in raises, or returns an odd value, while a request is served."""
    does: list[tuple[str, Any]] = [(error.__name__, _raising(error)) for error in ERRORS]
    does += [(f"gives {number}", lambda *_, odd=odd: odd) for number, odd in enumerate(ODD)]
    for what, value in does:
        yield f"clock {what}", said(partial(Ledger, WORLDS["plain"].config, 24, clock=value))
        for state in ("pinned", "running", "waiting"):
            ledger, holding = getattr(WORLDS["plain"], state)()
            yield f"wake {what} {state}", f"{traced(partial(_woken, ledger, holding, value))} {_left(ledger)}"
            for call in ("num_free", "num_blocks", "take", "give", "free_ids"):
                ledger, holding = getattr(WORLDS["plain"], state)(device_pool=Pool())
                yield f"pool {call} {what} {state}", _plugged(ledger, holding, ledger.cache.tiers[0].pool, call, value)
            for call in ("part_changed", "all_cleared"):
                ledger, holding = getattr(WORLDS["plain"], state)()
                ledger.watch(watcher := Watcher())
                yield f"watcher {call} {what} {state}", _plugged(ledger, holding, watcher, call, value)


def _plugged(ledger: Ledger, holding: Any, thing: Any, call: str, value: Any) -> str:
    with replaced(thing, call, property(value) if call.startswith("num_") else value):
        outcome = traced(partial(_served, ledger, holding))
    return f"{outcome} {_left(ledger)}"


def _served(ledger: Ledger, holding: Any) -> str:
    """The rest of a request's life, and another one."""
    if holding.state is aoffload.RequestState.PINNED:
        ledger.allocate_nowait(holding)
        land(ledger, ledger.plan_load(holding))
        ledger.commit(holding, len(TOKENS))
    ledger.release(holding)
    serve(ledger, [7] * 30)
    return str(ledger.statistics())


def _woken(ledger: Ledger, holding: Any, wake: Callable[..., Any]) -> str:
    other = ledger.admit(Prefix.of(ROOT, [9] * 60))
    ledger.queue_allocation(other, 90, wake)
    ledger.release(holding)
    return str(other)


def traced(make: Callable[[], Any]) -> str:
    """What it says; with an error, where that came through: functions of the package with their lines of source."""
    try:
        return ADDRESS.sub("", repr(make()))
    except BaseException as error:  # noqa: BLE001
        frames = traceback.extract_tb(error.__traceback__)
        through = [
            f"{_file(one.filename)}:{one.lineno} {one.name}: {one.line}" for one in frames if "aoffload" in one.filename
        ]
        return ADDRESS.sub("", f"{type(error).__name__}: {error}") + "\n  " + "\n  ".join(through)


def _file(name: str) -> str:
    return name[name.rindex("aoffload/") :]


def _left(ledger: Ledger) -> str:
    """What the ledger is afterwards."""
    return f"{said(ledger.check_integrity)} {said(lambda: state_digest(ledger))}"


PARTS = {"arguments": odd_arguments, "rooms": odd_rooms, "values": values, "plug-ins": plug_ins}


def main(*parts: str) -> None:
    print(json.dumps({"is_compiled": is_compiled}))
    for part in parts or PARTS:
        for line in PARTS[part]():
            print(json.dumps([part, *line]))


if __name__ == "__main__":
    main(*sys.argv[1:])
