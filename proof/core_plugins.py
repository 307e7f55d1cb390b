"""Plug-ins that raise or return unusual values, for `proof/core_answers.py`."""

from __future__ import annotations

import traceback
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aoffload
from aoffload import Ledger
from aoffload._kernel.extension import HOOKS
from aoffload.ledger import LedgerExtension, Prefix

from .core_ledgers import ADDRESS, LEDGERS, ODD_VALUES, ROOT, TOKENS, land, outcome_of, serve
from .programs.state_digest import state_digest

HERE = Path(__file__).parent


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
    does += [(f"gives {number}", lambda *_, odd=odd: odd) for number, odd in enumerate(ODD_VALUES)]
    for what, value in does:
        yield f"clock {what}", outcome_of(partial(Ledger, LEDGERS["plain"].config, 24, clock=value))
        for state in ("pinned", "running", "waiting"):
            ledger, record = getattr(LEDGERS["plain"], state)()
            yield f"wake {what} {state}", f"{traced(partial(_woken, ledger, record, value))} {_left(ledger)}"
            for call in ("num_free", "num_blocks", "take", "give", "free_ids"):
                ledger, record = getattr(LEDGERS["plain"], state)(device_pool=Pool())
                yield f"pool {call} {what} {state}", _plugged(ledger, record, ledger.cache.tiers[0].pool, call, value)
            for call in ("part_changed", "all_cleared"):
                ledger, record = getattr(LEDGERS["plain"], state)()
                ledger.watch(watcher := Watcher())
                yield f"watcher {call} {what} {state}", _plugged(ledger, record, watcher, call, value)
            for hook in HOOKS:
                kind = type("Plugged", (LedgerExtension,), {hook: staticmethod(value)})
                yield f"extension {hook} {what} {state}", traced(partial(_extended, kind, state))


def _plugged(ledger: Ledger, record: Any, thing: Any, call: str, value: Any) -> str:
    with replaced(thing, call, property(value) if call.startswith("num_") else value):
        outcome = traced(partial(_served, ledger, record))
    return f"{outcome} {_left(ledger)}"


def _served(ledger: Ledger, record: Any) -> str:
    """The rest of a request's life, and another one."""
    if record.state is aoffload.RequestState.PINNED:
        ledger.allocate_nowait(record)
        land(ledger, ledger.plan_load(record))
        ledger.commit(record, len(TOKENS))
    ledger.release(record)
    serve(ledger, [7] * 30)
    return str(ledger.statistics())


def _extended(kind: type[LedgerExtension], state: str) -> str:
    """What is left of a ledger with that extension."""
    ledger, record = getattr(LEDGERS["plain"], state)(extensions=[kind()])
    return f"{traced(partial(_served, ledger, record))} {ledger.next_lapse} {_left(ledger)}"


def _woken(ledger: Ledger, record: Any, wake: Callable[..., Any]) -> str:
    other = ledger.admit(Prefix.of(ROOT, [9] * 60))
    ledger.queue_allocation(other, 90, wake)
    ledger.release(record)
    return str(other)


def traced(make: Callable[[], Any]) -> str:
    """What it says; with an error, where that came through: lines and functions of the package."""
    try:
        return ADDRESS.sub("", repr(make()))
    except BaseException as error:  # noqa: BLE001
        frames = traceback.extract_tb(error.__traceback__)
        through = [f"{_file(one.filename)}:{one.lineno} {one.name}" for one in frames if _is_of_package(one.filename)]
        return ADDRESS.sub("", f"{type(error).__name__}: {error}") + "\n  " + "\n  ".join(through)


def _is_of_package(name: str) -> bool:
    """Whether a file is one of the package. The path of the clone may have its name, too."""
    return "aoffload/" in name and Path(name).parent != HERE


def _file(name: str) -> str:
    return name[name.rindex("aoffload/") :]


def _left(ledger: Ledger) -> str:
    """What the ledger is afterwards."""
    return f"{outcome_of(ledger.check_integrity)} {outcome_of(lambda: state_digest(ledger))}"
