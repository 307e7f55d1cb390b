"""Payloads of hints as no client should send them."""

from __future__ import annotations

import random
from typing import Any

__all__ = ["BAD_VALUES", "hostile"]


class Rude:
    """An object that raises at every use."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")

    def __hash__(self) -> int:
        raise RuntimeError("hashed")


class RudeText(str):
    def __len__(self) -> int:
        raise RuntimeError("measured")


class RudeTable(dict[Any, Any]):
    def get(self, *_: Any) -> Any:
        raise RuntimeError("read")


def nested(depth: int) -> Any:
    found: Any = []
    for _ in range(depth):
        found = [found, {"payload": found}][:1] if depth % 2 else {"actions": found}
    return found


BAD_VALUES: tuple[Any, ...] = (
    True, False, -1, 0, -0.0, 1e-320, 1e308, float("nan"), float("inf"), -float("inf"), 10**400, -(10**400), "", "5m",
    "x" * 2**20, "\ud800", "\x00\x1b[2J", b"5", [], {}, [1], {"ttl_s": 1}, 1j, Rude(), RudeText("pin"), RudeTable(),
    nested(2000), nested(2001), object, lambda: 1,
)  # fmt: skip
KINDS = ("pin", "prefetch", "demote", "returns", "retain", "done", "PIN", "unpin", "reset", "")
KEYS = (
    "ttl_s",
    "in_s",
    "duration_s",
    "category",
    "cache_salt",
    "token_ids",
    "prefix",
    "request_id",
    "tier",
    "__class__",
)


def hostile(rng: random.Random) -> Any:
    """A payload: mostly near one that counts, with wrong types, sizes, times, and with salts and tokens of others."""

    def value() -> Any:
        return rng.choice((*BAD_VALUES, 0.001, 1, 60, 3600.0, 1e9, "tool", "tenant-b", list(range(64))))

    def action() -> Any:
        found: dict[Any, Any] = {
            "action_type": rng.choice(KINDS),
            "payload": {rng.choice(KEYS): value() for _ in range(rng.randrange(4))},
        }
        if rng.random() < 0.6:
            found["payload"] = {"ttl_s": rng.choice((0.5, 30, 1e6)), "cache_salt": "tenant-b"}
        for name in ("action_id", "action_version", "action_type", "payload", "cache_salt"):
            if rng.random() < 0.1:
                found[name] = value()
        return value() if rng.random() < 0.05 else found

    actions: Any = [action() for _ in range(rng.choice((0, 1, 1, 2, 3, 20)))]
    if rng.random() < 0.02:
        actions = [{"action_type": "pin", "payload": {"ttl_s": 60}}] * 10**5
    shape = rng.randrange(8)
    if shape == 0:
        return value()
    if shape == 1:
        return {"protocol_version": value(), "actions": actions}
    if shape == 2:
        return {"actions": value()}
    if shape == 3:
        return action()
    if shape == 4:
        return actions
    return {"protocol_version": "1", "message_id": value(), "actions": actions}
