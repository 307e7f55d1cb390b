"""What may stand for `eviction` in a configuration: a name, eviction that learns, or a factory of orders."""

from __future__ import annotations

from typing import Any

import attrs

from .arguments import check_bool, check_has, shown
from .errors import ConfigError

__all__ = ["LearnedEviction", "check_eviction", "new_order"]

NAMES = ("lru", "learned")
ORDER = "add add_newer add_back remove oldest __iter__"
"""What orders of a program must have: they are not told what is `asked`, since nothing is counted for them."""


def _is_bool(_: object, attribute: Any, value: object) -> None:
    check_bool(attribute.name, value)


@attrs.frozen
class LearnedEviction:
    """Eviction that learns, in the host and on the disk; `device`: also on the device."""

    device: bool = attrs.field(default=False, validator=_is_bool)


def check_eviction(value: object) -> None:
    """Raise `ConfigError("eviction")` for what cannot be meant. A factory makes an order here, to be looked at."""
    if type(value) is str:
        if value not in NAMES:
            raise ConfigError("eviction", f"must be one of {', '.join(NAMES)}, got {shown(value)}")
    elif not isinstance(value, LearnedEviction):
        new_order(value)


def new_order(factory: object) -> Any:
    """An order that `factory` makes. `ConfigError("eviction")` if it makes none."""
    if not callable(factory):
        problem = f"must be 'lru', 'learned', a LearnedEviction or a factory of eviction orders, got {shown(factory)}"
        raise ConfigError("eviction", problem)
    try:
        order = factory()
    except Exception as error:
        raise ConfigError("eviction", f"made no order: {type(error).__name__}: {error}") from error
    check_has("eviction", order, "factory of eviction orders", ORDER, ConfigError)
    return order
