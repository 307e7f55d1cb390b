"""The fingerprint of a ledger: everything that is reachable from it, as one value that can be compared.

It names no field (except those that it leaves out), so a new field of the ledger is included without a change here:
pools, orders, runs with parts and references, jobs, the line, holdings, counters.
"""

from __future__ import annotations

import enum
import hashlib
from array import array
from collections.abc import Iterator
from functools import cache
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

__all__ = ["changes", "fingerprint", "state_digest"]

MEMOS = frozenset({"_hash_after", "_firsts"})
"""Fields computed on demand from other fields: reading may fill them in."""
PLAIN = (int, float, str, bytes, type(None))
FUNCTIONS = (BuiltinFunctionType, FunctionType, MethodType, type)
LAYOUTS = ("__slots__", "__mypyc_attrs__")
"""Where a class names its fields: a compiled one has no slots."""


def fingerprint(*roots: object, names_functions: bool = True) -> dict[str, object]:
    """Each object reachable from `roots`, field by field. Objects are named in the order they are met, so two
    fingerprints are equal if and only if both have the same values and the same references between objects."""
    names: dict[int, str] = {}
    waiting: list[object] = []

    def refer(thing: object) -> object:
        if isinstance(thing, enum.Enum):
            return thing.name
        if isinstance(thing, PLAIN):
            return type(thing).__name__, thing  # True is not 1, and 1.0 is not either
        if not names_functions and callable(thing):  # a compiled lambda is an object of its own class
            return "function"
        if not names_functions and isinstance(thing, tuple):  # which equal tuples are one object is the build's affair
            return tuple(map(refer, thing))
        if isinstance(thing, FUNCTIONS):
            return thing.__qualname__, hash(thing)
        if id(thing) not in names:
            names[id(thing)] = f"{type(thing).__name__} {len(names)}"
            waiting.append(thing)
        return names[id(thing)]

    found: dict[str, object] = {"roots": [refer(root) for root in roots]}
    for thing in waiting:  # grows while it is read
        found[names[id(thing)]] = [(name, refer(value)) for name, value in _inside(thing)]
    return found


def state_digest(*roots: object) -> str:
    """A hash of the same values and references, equal in every process and in a compiled core: of functions it knows
    only that they are there, and what they are bound to is reached in another way."""
    found = fingerprint(*roots, names_functions=False)
    return hashlib.blake2b(repr(found).encode(), digest_size=8).hexdigest()


def _inside(thing: Any) -> Iterator[tuple[object, object]]:
    if hasattr(thing, "hexdigest"):
        yield "digest", thing.hexdigest()
    elif isinstance(thing, (array, range, bytearray)):
        yield "values", repr(thing)
    elif isinstance(thing, dict):
        for key, value in thing.items():
            yield "key", key
            yield "value", value
    elif isinstance(thing, (set, frozenset)):
        yield from enumerate(sorted(thing, key=str))
    elif isinstance(thing, (list, tuple)):
        yield from enumerate(thing)
    else:
        yield from _fields(thing)


def _fields(thing: object) -> Iterator[tuple[str, object]]:
    kind: Any = type(thing)
    names = _slots_of(kind)
    if own := getattr(thing, "__dict__", None):
        names = tuple(sorted({*names, *own} - MEMOS))
    for name in names:
        yield name, getattr(thing, name)


@cache
def _slots_of(kind: type) -> tuple[str, ...]:
    found = {name for base in kind.__mro__ for layout in LAYOUTS for name in getattr(base, layout, ())}
    return tuple(sorted(found - MEMOS - {"__weakref__", "__dict__"}))


def changes(before: dict[str, object], after: dict[str, object]) -> list[str]:
    """What differs, as readable lines; empty if nothing does."""
    if before == after:
        return []
    return [
        f"{name}: {before.get(name)} -> {after.get(name)}"
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name)
    ]
