"""A digest of all that a ledger is, equal in every process and with every build of the core.

It walks what is reachable, and into objects of the core only: of observers, clocks and clients it says the class. It is
taken after each call of a program, so it names no field.
"""

from __future__ import annotations

import enum
import hashlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from functools import cache
from operator import attrgetter
from typing import Any

from .fingerprint import names_of, slots_of

__all__ = ["state_digest"]

ATOMS = frozenset({bool, bytes, float, int, str, type(None)})
"""Written as they are: True is not 1, and 1.0 is not either."""
WALKED = tuple(
    f"aoffload.{package}"
    for package in ("_kernel.", "_extensions.", "_eviction.", "_host_cache.", "_tiers.", "_config.")
)


def state_digest(*roots: object) -> str:
    """A hash of the values and references reachable from `roots`. Which equal tuples are one object is the build's
    affair, and so is what makes a function."""
    numbers: dict[int, int] = {}
    waiting: list[object] = [list(roots)]

    def encoded(value: Any) -> object:
        """What is no atom: its number, or what is inside of it."""
        number = numbers.get(id(value))
        if number is None:
            kind: Any = type(value)
            if kind is tuple:
                return tuple([one if type(one) in ATOMS else encoded(one) for one in value])
            if _reader(kind) is _nothing:
                return "function" if callable(value) else kind.__name__
            number = numbers[id(value)] = len(numbers)
            waiting.append(value)
        return [number]

    found: list[object] = []
    for thing in waiting:  # grows while it is read
        kind: Any = type(thing)
        inside = _reader(kind)(thing)
        found.append((kind.__name__, [value if type(value) in ATOMS else encoded(value) for value in inside]))
    return hashlib.blake2b(repr(found).encode(), digest_size=8).hexdigest()


@cache
def _reader(kind: Any) -> Callable[[Any], Iterable[object]]:
    """How the values inside of an object of `kind` are read."""
    for kinds, read in READERS.items():
        if issubclass(kind, kinds):
            return read
    if hasattr(kind, "hexdigest"):
        return lambda thing: (thing.hexdigest(),)
    if not kind.__module__.startswith(WALKED):
        return _nothing
    if kind.__dictoffset__:
        return lambda thing: [getattr(thing, name) for name in names_of(thing)]
    return _fields(slots_of(kind))


def _fields(names: tuple[str, ...]) -> Callable[[Any], Iterable[object]]:
    if len(names) < 2:
        return lambda thing: [getattr(thing, name) for name in names]
    return attrgetter(*names)


def _nothing(thing: object) -> Iterable[object]:
    return ()


READERS: dict[Any, Callable[[Any], Iterable[object]]] = {
    Callable: _nothing,  # a compiled lambda has a class in the core
    dict: lambda thing: [*thing.keys(), *thing.values()],
    (set, frozenset): lambda thing: sorted(thing, key=str),
    (list, tuple, deque): iter,
    (array, bytearray): lambda thing: (bytes(thing),),
    range: lambda thing: (thing.start, thing.stop, thing.step),
    enum.Enum: lambda thing: (thing.name,),
}
