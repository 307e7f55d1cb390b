"""Hints of clients about the prompts of their requests, and the reader of hint payloads.

Verb | payload | meaning
--- | --- | ---
`pin` | `ttl_s` | keep the cached part of the prompt for `ttl_s` seconds
`prefetch` | | bring the cached part of the prompt up one tier now
`demote` | | move the prompt down one tier now
`returns` | `in_s`, `category` | the prompt will be requested again, in `in_s` seconds; `retain` is the same
`done` | | the prompt will never be requested again

A payload is an envelope in the format of vLLM's `kv_hints`, a list of actions, or one action:

    {"protocol_version": "1", "message_id": "...", "actions": [
        {"action_id": "a", "action_type": "pin", "action_version": "1", "payload": {"ttl_s": 300}}]}

Payloads come from clients, so `read_hints` takes any object and raises nothing. It reads only plain dicts, lists,
strings and numbers, never calls a method of another object, and reads at most `MAX_ACTIONS` actions. No field of a
payload names tokens, a salt or an adapter: a hint is always about the prompt of the request that carries it.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from typing import Any, TypeAlias, TypeGuard

import attrs

from ..errors import InvalidArgument
from .arguments import check_text, number_of, shown

MAX_ACTIONS = 16
"""Maximum actions of a payload. Further actions are ignored; together they get one answer."""
MAX_HINT_SECONDS = 1e9
MAX_CATEGORY = 256
"""Maximum characters of a category, because the ledger keeps it."""
MAX_ACTION_ID = 64
"""Maximum characters of an action id that an answer repeats. The answer has an empty id in place of a longer one."""
MAX_FIELDS = 64
"""Maximum fields of an object. An object with more is read as an empty one."""
MAX_NAME = 32
"""Maximum characters of a type or version that is looked up. Longer ones are unknown."""
VERSIONS = ("", "1", "1.0", "v1")
"""Versions of the protocol, and of an action, that are read. Empty: none was given."""


class HintVerb(enum.Enum):
    """The kind of a hint."""

    PIN = "pin"
    PREFETCH = "prefetch"
    DEMOTE = "demote"
    RETURNS = "returns"
    DONE = "done"
    UNKNOWN = "unknown"
    """The verb of an action that could not be read."""


class HintReason(enum.Enum):
    """Why a hint was clipped or rejected."""

    NONE = ""
    """The hint was accepted unchanged."""
    TTL_LIMIT = "ttl_limit"
    """The time to live is above `max_hint_pin_s`."""
    NO_ROOM = "no_room"
    """A share or a quota is used up, or there are too few free blocks."""
    TOO_MANY_PINS = "too_many_pins"
    NOTHING_CACHED = "nothing_cached"
    ALREADY_THERE = "already_there"
    """The prompt is already in the tier that a prefetch would bring it to."""
    IN_USE = "in_use"
    """Other prompts, requests or pins use the blocks."""
    NO_LOWER_TIER = "no_lower_tier"
    """No tier below has the blocks, so freeing them would lose them."""
    NOT_LEARNED = "eviction_not_learned"
    """Only `eviction="learned"` uses predicted returns."""
    MALFORMED = "malformed"
    """A value of the payload has a wrong type, or is out of range."""
    UNKNOWN = "unknown"
    """The action's type, the action's version or the protocol's version is unknown."""
    TOO_MANY_ACTIONS = "too_many_actions"
    NOT_CACHEABLE = "not_cacheable"
    """The KV of the request that carries the hint is not cached at all."""
    NOT_FINISHED = "not_finished"
    """The request that carries the hint was aborted, so only `done` counts."""


def _seconds(name: str, value: object) -> float:
    seconds = number_of(value)
    if seconds is None or not 0 < seconds <= MAX_HINT_SECONDS:
        raise InvalidArgument(name, f"must be a positive number of seconds up to 1e9, got {shown(value)}")
    return seconds


def _check_seconds(_: object, attribute: Any, value: Any) -> None:
    _seconds(attribute.name, value)


def _check_category(_: object, __: Any, value: Any) -> None:
    if len(check_text("category", value)) > MAX_CATEGORY:
        raise InvalidArgument("category", f"must have at most {MAX_CATEGORY} characters, got {len(str(value)):,}")


@attrs.frozen
class PinHint:
    """Keep the cached part of the prompt for `ttl_s` seconds."""

    ttl_s: float = attrs.field(validator=_check_seconds)


@attrs.frozen
class PrefetchHint:
    """Bring the cached part of the prompt up one tier."""


@attrs.frozen
class DemoteHint:
    """Move the prompt down one tier."""


@attrs.frozen
class ReturnsHint:
    """The prompt will be requested again, such as after the tool call of an agent."""

    in_s: float | None = attrs.field(default=None, validator=attrs.validators.optional(_check_seconds))
    """Seconds until the prompt is requested again; None if unknown."""
    category: str = attrs.field(default="", validator=_check_category)
    """The kind of the pause, such as the name of the tool. Use few categories: after 150 combinations of category and
    predicted time, the category of a new combination is ignored."""


@attrs.frozen
class DoneHint:
    """The prompt will never be requested again."""


Hint: TypeAlias = PinHint | PrefetchHint | DemoteHint | ReturnsHint | DoneHint
VERBS: Mapping[type, HintVerb] = {
    PinHint: HintVerb.PIN,
    PrefetchHint: HintVerb.PREFETCH,
    DemoteHint: HintVerb.DEMOTE,
    ReturnsHint: HintVerb.RETURNS,
    DoneHint: HintVerb.DONE,
}


def is_hint(value: object) -> TypeGuard[Hint]:
    """Whether `value` is a hint. Compares classes by identity, because a class may have a metaclass of its own."""
    return any(type(value) is kind for kind in VERBS)


@attrs.frozen
class GivenHint:
    """One action of a payload: its hint, or the reason why the action is ignored."""

    verb: HintVerb
    hint: Hint | None
    """None if the action is ignored."""
    reason: HintReason = HintReason.NONE
    action_id: str = ""

    @classmethod
    def of(cls, hint: Hint, action_id: str = "") -> GivenHint:
        return cls(VERBS[type(hint)], hint, action_id=action_id)


def read_hints(payload: object) -> list[GivenHint]:
    """The actions of `payload`: an envelope in the format of vLLM's `kv_hints`, the list of its actions, or one action.
    `retain` is another name of the verb `returns`, and `duration_s` of its field `in_s`. At most 16 actions are read.

    Raises nothing, whatever `payload` is. The list is empty only if `payload` is None or has an empty list of
    actions."""
    if payload is None:
        return []
    actions: object = payload
    if type(payload) is dict:
        fields = _fields(payload)
        actions = fields.get("actions", fields)  # an envelope, or one action
        if not _is_known(fields.get("protocol_version", "")):
            return [GivenHint(HintVerb.UNKNOWN, None, HintReason.UNKNOWN)]
    if type(actions) is dict:
        return [_read_action(actions)]
    if type(actions) is not list:
        return [GivenHint(HintVerb.UNKNOWN, None, HintReason.MALFORMED)]
    found = [_read_action(action) for action in actions[:MAX_ACTIONS]]
    if len(actions) > MAX_ACTIONS:
        found.append(GivenHint(HintVerb.UNKNOWN, None, HintReason.TOO_MANY_ACTIONS))
    return found


def _read_action(action: object) -> GivenHint:
    if type(action) is GivenHint:  # a program has read it before
        return action
    if type(action) is not dict:
        return GivenHint(HintVerb.UNKNOWN, None, HintReason.MALFORMED)
    action = _fields(action)
    action_id = _read_id(action.get("action_id"))
    kind = action.get("action_type")
    if type(kind) is not str:
        return GivenHint(HintVerb.UNKNOWN, None, HintReason.MALFORMED, action_id)
    read = _READERS.get(kind) if len(kind) <= MAX_NAME else None
    if read is None or not _is_known(action.get("action_version", "")):
        return GivenHint(HintVerb.UNKNOWN, None, HintReason.UNKNOWN, action_id)
    verb, make = read
    values = action.get("payload", {})
    try:
        hint = make(_fields(values)) if type(values) is dict else None
    except InvalidArgument:
        hint = None
    return GivenHint(verb, hint, HintReason.MALFORMED if hint is None else HintReason.NONE, action_id)


def _fields(values: dict[Any, Any]) -> dict[str, Any]:
    """The fields that have a value: null is the same as leaving a field out. Keys of other classes than `str` are left
    out, because they may have methods of their own."""
    if len(values) > MAX_FIELDS:
        return {}
    return {key: value for key, value in values.items() if type(key) is str and value is not None}


def _is_known(version: object) -> bool:
    return type(version) is str and len(version) <= MAX_NAME and version in VERSIONS


def _read_id(value: object) -> str:
    """An id that can be written to any log, and to JSON."""
    return value if type(value) is str and len(value) <= MAX_ACTION_ID and value.isprintable() else ""


def _bounded(name: str, value: object) -> float:
    """Read a number of seconds. A time above `MAX_HINT_SECONDS` becomes `MAX_HINT_SECONDS`. Infinity is refused."""
    if type(value) not in (int, float):  # `isinstance` would read an attribute of the value
        raise InvalidArgument(name, "must be a number of seconds")
    seconds = number_of(value)
    return _seconds(name, value if seconds is None or math.isinf(seconds) else min(seconds, MAX_HINT_SECONDS))


def _pin(values: dict[Any, Any]) -> PinHint:
    return PinHint(_bounded("ttl_s", values.get("ttl_s")))


def _returns(values: dict[Any, Any]) -> ReturnsHint:
    in_s, category = values.get("in_s", values.get("duration_s")), values.get("category")
    if type(category) not in (str, type(None)):
        raise InvalidArgument("category", "must be a string")
    return ReturnsHint(None if in_s is None else _bounded("in_s", in_s), category or "")


_READERS: Mapping[str, tuple[HintVerb, Any]] = {
    "pin": (HintVerb.PIN, _pin),
    "prefetch": (HintVerb.PREFETCH, lambda _: PrefetchHint()),
    "demote": (HintVerb.DEMOTE, lambda _: DemoteHint()),
    "returns": (HintVerb.RETURNS, _returns),
    "retain": (HintVerb.RETURNS, _returns),
    "done": (HintVerb.DONE, lambda _: DoneHint()),
}
