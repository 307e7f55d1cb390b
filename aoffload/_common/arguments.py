"""Argument checks: each raises a typed error that names the argument, before any state changes.

Arguments may be arbitrary objects, including objects that raise when they are compared, iterated or printed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from ..errors import InvalidArgument

Kind = TypeVar("Kind")

SHOWN = 80
"""Maximum characters of a rejected value in an error message."""


def shown(value: object) -> str:
    """A short text of `value` for an error message, even if its `repr` raises."""
    try:
        return f"{value!r:.{SHOWN}}"
    except Exception:  # noqa: BLE001 - `repr` may run any code; the error to report is another one
        return f"a {type(value).__name__}"


def check_int(
    name: str, value: object, minimum: int, maximum: float = math.inf, error: type[InvalidArgument] = InvalidArgument
) -> int:
    if type(value) is int and minimum <= value <= maximum:  # no subclass: bool, or one with other comparisons
        return value
    raise error(name, f"must be an integer in [{minimum}, {maximum}], got {shown(value)}")


def number_of(value: object) -> float | None:
    """`value` as a plain float; None for other types, integers too large for a float, and NaN."""
    if type(value) is not int and not isinstance(value, float):
        return None
    try:
        found = float.__float__(value) if isinstance(value, float) else float(value)
    except OverflowError:
        return None
    return None if math.isnan(found) else found


def check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidArgument(name, f"must be True or False, got {shown(value)}")


def check_text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidArgument(name, f"must be a string, got {shown(value)}")
    return str.__str__(value)  # plain: a subclass may override `__hash__`


def check_callable(name: str, value: object, error: type[InvalidArgument] = InvalidArgument) -> None:
    if not callable(value):
        raise error(name, f"must be callable, got {shown(value)}")


def check_type(name: str, value: object, kind: type[Kind], error: type[InvalidArgument] = InvalidArgument) -> Kind:
    if not isinstance(value, kind):
        raise error(name, f"must be {_a(kind.__name__)}, got {shown(value)}")
    return value


def _a(noun: str) -> str:
    return f"{'an' if noun[:1] in 'AEIOaeio' else 'a'} {noun}"


def check_has(
    name: str, value: object, kind: str, attributes: str, error: type[InvalidArgument] = InvalidArgument
) -> None:
    """Raise unless `value` has the `attributes` of the protocol `kind`. Classes are refused even if they have them."""
    problem = ", a class: call it" if isinstance(value, type) else ""
    try:
        lacking = [attribute for attribute in attributes.split() if not hasattr(value, attribute)]
    except Exception:  # noqa: BLE001 - an object whose attributes raise is no `kind`
        lacking = attributes.split()
    if lacking or problem:
        if lacking and len(lacking) < len(attributes.split()):
            problem += f", which lacks {', '.join(lacking)}"
        raise error(name, f"must be {_a(kind)} ({attributes.replace(' ', ', ')}), got {shown(value)}{problem}")


def check_names(call: str, given: Mapping[str, object], known: type) -> None:
    """Refuse an option of `call` that the TypedDict `known` does not have, with the error that Python raises."""
    unknown = given.keys() - known.__annotations__.keys()
    if unknown:
        raise TypeError(f"{call}() got an unexpected keyword argument {min(unknown)!r}")


def as_tuple(
    name: str, value: Iterable[Any], of: str, error: type[InvalidArgument] = InvalidArgument
) -> tuple[Any, ...]:
    """The items of `value`. Raises `error` if it is text or cannot be iterated."""
    if isinstance(value, (str, bytes)):
        raise error(name, f"must be a sequence of {of}, got {shown(value)}")
    try:
        return tuple(value)
    except Exception as reason:
        problem = f"must be a sequence of {of}, got {shown(value)} ({type(reason).__name__})"
        raise error(name, problem) from reason
