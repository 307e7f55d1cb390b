"""The fingerprint of a ledger: everything that is reachable from it, as one value that can be compared.

It names no field (except those that it leaves out), so a new field of the ledger is included without a change here:
pools, orders, runs with parts and references, jobs, the line, records, counters.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterator
from functools import cache
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

__all__ = ["changes", "fingerprint", "names_of", "slots_of", "with_handles"]

MEMOS = frozenset({"_hash_after", "_firsts", "_worths"})
"""Fields computed on demand from other fields: reading may fill them in."""
MEMOS_OF = {
    "CheckpointOrder": frozenset({"_buckets", "_changed", "_checkpoints", "_split", "_tails"}),
    "TokenSequence": frozenset({"keys"}),
}
"""The same, for one class only. `CheckpointOrder` computes them when it is asked for the next part to evict,
`TokenSequence` when the index looks up a key."""
PLAIN = (int, float, str, bytes, type(None))
FUNCTIONS = (BuiltinFunctionType, FunctionType, MethodType, type)
LAYOUTS = ("__slots__", "__mypyc_attrs__")
"""Where a class names its fields: a compiled one has no slots."""


def fingerprint(*roots: object) -> dict[str, object]:
    """Each object reachable from `roots`, field by field. Objects are named in the order they are met, so two
    fingerprints are equal if and only if both have the same values and the same references between objects."""
    names: dict[int, str] = {}
    waiting: list[object] = []

    def refer(thing: object) -> object:
        if isinstance(thing, enum.Enum):
            return thing.name
        if isinstance(thing, PLAIN):
            return type(thing).__name__, thing  # True is not 1, and 1.0 is not either
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
    for name in names_of(thing):
        yield name, getattr(thing, name)


def names_of(thing: Any) -> tuple[str, ...]:
    """The fields of an object, as a compiled class would have them, too."""
    kind: Any = type(thing)
    names, own = slots_of(kind), getattr(thing, "__dict__", None)
    return _without_memos(kind, (*names, *own)) if own else names


@cache
def slots_of(kind: Any) -> tuple[str, ...]:
    """The fields that a class declares."""
    found = {name for base in kind.__mro__ for layout in LAYOUTS for name in getattr(base, layout, ())}
    return _without_memos(kind, tuple(found - {"__weakref__", "__dict__"}))


@cache
def _without_memos(kind: Any, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted({*names} - MEMOS - MEMOS_OF.get(kind.__name__, MEMOS)))


def changes(before: dict[str, object], after: dict[str, object]) -> list[str]:
    """What differs, as readable lines; empty if nothing does."""
    if before == after:
        return []
    return [
        f"{name}: {before.get(name)} -> {after.get(name)}"
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name)
    ]


HANDLES = ("pins", "transfers", "hints", "reports", "forks", "preemption", "invalidation", "overlap", "weights")
"""Handles whose features are made when they are read first."""


def with_handles(ledger: Any) -> Any:
    """`ledger`, with all features that it makes only when they are used: a refused call makes no other one."""
    for name in HANDLES:
        getattr(ledger, name, None)
    return ledger
