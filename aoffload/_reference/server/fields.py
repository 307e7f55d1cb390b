"""The fields of a body: each is read by name and type, and unread fields are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

import attrs

from .errors import ApiError, bad_field

__all__ = ["Fields", "Reader", "boolean", "integer", "is_text", "items", "text"]

MAX_SHOWN = 100
"""Characters of what a client has sent that an error repeats."""
Value = TypeVar("Value")
Default = TypeVar("Default")
Reader = Callable[[str, object], Value]
"""Takes the place of a value in the body, and the value; raises `ApiError`."""


@attrs.define(eq=False)
class Fields:
    """An object of the body. `where` is its place: "" for the body itself. null counts as missing."""

    _values: Mapping[str, object]
    _where: str = ""
    _unread: set[str] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._unread = {name for name, value in self._values.items() if value is not None}

    @classmethod
    def of_body(cls, body: bytes) -> Fields:
        try:
            found = json.loads(body, parse_constant=_refuse_constant)
        except RecursionError:
            raise ApiError(400, "the body is nested too deeply") from None
        except ValueError as error:  # not UTF-8, not JSON, or an integer of thousands of digits
            raise ApiError(400, f"the body is not JSON: {error}") from None
        if not isinstance(found, dict):
            raise ApiError(400, f"the body must be a JSON object, not {_type_name(found)}")
        return cls(found)

    @classmethod
    def inside(cls, param: str, value: object) -> Fields:
        """A `Reader` of objects inside the body."""
        if not isinstance(value, dict):
            raise bad_field(param, f"must be an object, not {_type_name(value)}")
        return cls(value, f"{param}.")

    def required(self, name: str, read: Reader[Value]) -> Value:
        if self._values.get(name) is None:
            raise bad_field(self._where + name, "is missing")
        self._unread.discard(name)
        return read(self._where + name, self._values[name])

    def optional(self, name: str, read: Reader[Value], default: Default) -> Value | Default:
        if self._values.get(name) is None:
            return default
        return self.required(name, read)

    def ignored(self, *names: str) -> None:
        """Accept fields that never change an answer, whatever they hold."""
        self._unread.difference_update(names)

    def neutral(self, name: str, *values: object) -> None:
        """Accept a field that is not supported only with one of `values`, which leave the answer as it is."""
        value = self._values.get(name)
        if value is not None and not any(_is_same(value, neutral) for neutral in values):
            known = ", ".join(json.dumps(neutral) for neutral in (*values, None))
            raise bad_field(self._where + name, f"is not supported; only {known} may stand here", "unsupported_value")
        self._unread.discard(name)

    def finish(self) -> None:
        """Refuse unread fields: each is a typing mistake, or would be ignored silently."""
        if self._unread:
            name = min(self._unread)
            shown = name if len(name) <= MAX_SHOWN else f"{name[:MAX_SHOWN]}..."
            raise bad_field(self._where + shown, "is no field of this request", "unknown_field")


def text(param: str, value: object) -> str:
    """A `Reader` of strings that are text: a lone surrogate has no bytes."""
    if not isinstance(value, str):
        raise bad_field(param, f"must be a string, not {_type_name(value)}")
    if not is_text(value):
        raise bad_field(param, "is not valid text: it holds half of a surrogate pair")
    return value


def is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def boolean(param: str, value: object) -> bool:
    """A `Reader` of booleans."""
    if not isinstance(value, bool):
        raise bad_field(param, f"must be true or false, not {_type_name(value)}")
    return value


def integer(low: int, high: int) -> Reader[int]:
    """A `Reader` of integers in `[low, high]`."""

    def read(param: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise bad_field(param, f"must be an integer, not {_type_name(value)}")
        if not low <= value <= high:
            raise bad_field(param, f"must be in [{low}, {high}], got {_short(value)}")
        return value

    return read


def items(read_one: Reader[Value], *, most: int) -> Reader[tuple[Value, ...]]:
    """A `Reader` of arrays with one to `most` items."""

    def read(param: str, value: object) -> tuple[Value, ...]:
        if not isinstance(value, list):
            raise bad_field(param, f"must be an array, not {_type_name(value)}")
        if not 0 < len(value) <= most:
            raise bad_field(param, f"must have 1 to {most} items, got {len(value)}")
        return tuple(read_one(f"{param}[{index}]", item) for index, item in enumerate(value))

    return read


def _short(value: int) -> str:
    return str(value) if abs(value) < 10**20 else "one of many digits"


def _is_same(value: object, neutral: object) -> bool:
    """1 and 1.0 are the same, 1 and true are not."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


_TYPE_NAMES: Mapping[type, str] = {
    str: "a string", bool: "a boolean", int: "an integer", float: "a number", list: "an array", dict: "an object",
    type(None): "null",
}  # fmt: skip


def _type_name(value: Any) -> str:
    return _TYPE_NAMES[type(value)]
