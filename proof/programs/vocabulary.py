"""Which calls a program may make, and with which arguments: any others are refused before anything runs.

Arguments that are handed on to the package (a number of tokens, a time) may be anything: the package has to refuse
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from aoffload._common.arguments import shown
from aoffload._config.config import OffloadConfig
from aoffload.errors import InvalidArgument
from aoffload.testing.faults import FAULTS

__all__ = [
    "VERBS",
    "ENGINE_CALLS",
    "ENGINE_RUNTIME_CALLS",
    "LEDGER_CALLS",
    "RUNTIME_CALLS",
    "Words",
    "calls_of",
    "check_call",
]


@attrs.frozen
class Words:
    """The arguments of a call: those it needs, and those it may have."""

    needed: frozenset[str]
    allowed: frozenset[str]

    @classmethod
    def of(cls, text: str) -> Words:
        """From a text: "who! num_tokens"."""
        words = text.split()
        needed = frozenset(word.removesuffix("!") for word in words if word.endswith("!"))
        return cls(needed, frozenset(word.removesuffix("!") for word in words))

    def __str__(self) -> str:
        optional = self.allowed - self.needed
        return f"needs {', '.join(sorted(self.needed)) or '-'}; may have {', '.join(sorted(optional)) or '-'}"


def _table(rows: Mapping[str, str]) -> dict[str, Words]:
    return {name: Words.of(text) for name, text in rows.items()}


KEY = "tokens! salt"
LEDGER_CALLS = _table({
    "admit": f"who! {KEY} spans max_hit_tokens hit_alignment reads_cache store max_store_tokens",
    "allocate": "who! num_tokens", "queue": "who! num_tokens", "accept": "who!", "withdraw": "who!",
    "extend": "who! num_tokens!", "queue_extension": "who! num_tokens!",
    "load": "who! max_tokens max_job_bytes", "abandon": "who!", "begin_again": "who!",
    "compute": "who! stop! new most", "commit": "who! num_computed_tokens!", "invalidate": "who! from_token!",
    "begin": "step! who! arriving", "end": "step! commits new most",
    "preempt": "who!", "resume": "who! num_tokens", "fork": "who! child! num_tokens", "release": "who! reason",
    "launch": "job!", "settle": "job! outcome at", "land": "who", "discard": "job!", "late": "job!", "stray": "job!",
    "again": "job!",
    "pin": f"name! {KEY} expires_at", "unpin": "name!", "lapse": "now!", "drop_pins": "",
    "hint": f"{KEY} expires_at! category", "client_hint": f"{KEY} verb! ttl_s now",
    "prefetch": f"name! {KEY}", "demote": f"name! {KEY}", "cancel": "name!", "cancel_cache_transfers": "",
    "reset": "tier", "weights": "epoch!",
    "watermark": "", "lookup": KEY, "serve": f"{KEY} new", "evict": "num_tokens! token!",
    "wrong": "method! who! num_tokens num_computed_tokens from_token max_tokens",
    "write_behind": "most! is_idle only_requested_twice", "idle": "most! only_requested_twice", "disk_flush": "most!",
    "fetch": f"name! {KEY} told",
    "match_fetched": "who!", "restart": "at most", "survive": "most!",
    "remote_stores": "most! blind", "lose_cell": "at!", "poison_cell": "at!", "arrive": "at!",
    "end_remote": "outcome! at",
})  # fmt: skip

AS_ON_A_LEDGER = (
    "launch", "settle", "land", "discard", "late", "stray", "again", "pin", "unpin", "lapse", "drop_pins", "reset",
    "weights",
    "hint", "client_hint", "lookup", "serve", "write_behind", "idle", "disk_flush", "fetch", "match_fetched", "cancel",
    "cancel_cache_transfers", "remote_stores", "lose_cell", "poison_cell", "arrive", "end_remote",
)  # fmt: skip
ENGINE_CALLS = {name: LEDGER_CALLS[name] for name in AS_ON_A_LEDGER} | _table({
    "admit": f"who! {KEY} spans fewer max_hit_tokens hit_alignment reads_cache store max_store_tokens",
    "ask": "who! fewer", "load": "who! max_tokens sparse", "compute": "who! stop! new offers is_last most also",
    "decline": "who! from_token!", "offer": "who! is_last", "offer_deferred": "", "invalidate": "who! from_token!",
    "release": "who! reason", "evict": "", "tick": "seconds!",
    "wrong": "method! who! num_computed_tokens from_token max_tokens into block_ids num_device_tokens",
})  # fmt: skip

CLIENT = "who! of hurry give_up_s"
IDENTITY = "tokens! salt adapter spans"
ASK = f"{IDENTITY} name max_hit alignment reads_cache store max_store deadline_s"
FORWARD = "num drafts style early most"
WORLD = (
    "groups", "num_host_blocks", "store_policy", "max_job_bytes", "max_pinned_share", "max_prefetch_share", "disk",
    "max_fetch_share", "eviction", "max_hint_pinned_share", "max_hint_pin_s",
)  # fmt: skip
OPTIONS = [field.name for field in attrs.fields(OffloadConfig) if field.name not in WORLD]
RUNTIME_CALLS = _table({
    "configure": " ".join(OPTIONS), "fault": "kind! at lasting", "cancel": "who! how! after", "close": "",
    "request": f"{CLIENT} {ASK}", "serve": f"{CLIENT} {ASK} new", "leave": f"{CLIENT} how record",
    "allocate": f"{CLIENT} num by", "allocate_nowait": f"{CLIENT} num by", "extend": f"{CLIENT} num by",
    "extend_nowait": f"{CLIENT} num by", "load": f"{CLIENT} max_tokens", "load_nowait": f"{CLIENT} max_tokens",
    "wait": CLIENT, "step": f"{CLIENT} {FORWARD}", "end_step": CLIENT, "commit": f"{CLIENT} num back new checkpoints",
    "commit_step": f"{CLIENT} of! new", "invalidate": f"{CLIENT} num back", "preempt": CLIENT,
    "preempt_nowait": CLIENT, "resume": f"{CLIENT} num by", "abort": f"{CLIENT} how",
    "client_hint": f"{CLIENT} {IDENTITY} verb! ttl_s",
    "pin": f"{CLIENT} {IDENTITY} ttl_s!", "unpin": CLIENT, "prefetch": f"{CLIENT} {IDENTITY}",
    "begin_prefetch": f"{CLIENT} {IDENTITY}", "demote": f"{CLIENT} {IDENTITY}",
    "begin_demote": f"{CLIENT} {IDENTITY}", "transfer_wait": CLIENT, "transfer_cancel": CLIENT,
    "flush": CLIENT, "reset": f"{CLIENT} tier timeout_s", "weights": f"{CLIENT} epoch!",
    "lookup": f"{CLIENT} {IDENTITY}", "statistics": CLIENT,
    "report_queue": f"{CLIENT} num_tokens!", "report_compute": f"{CLIENT} num_tokens! seconds!",
    "integrity": CLIENT, "pause": f"{CLIENT} s!",
    "fetch": f"{CLIENT} {IDENTITY}", "begin_fetch": f"{CLIENT} {IDENTITY}", "request_fetch": CLIENT,
    "restored": CLIENT, "restart": "how",
})  # fmt: skip

AS_ON_A_RUNTIME = (
    "configure", "fault", "cancel", "close", "leave", "wait", "end_step", "invalidate", "abort", "pin", "unpin",
    "client_hint", "flush", "reset", "weights", "lookup", "statistics", "integrity", "pause", "fetch", "begin_fetch",
    "request_fetch", "report_queue", "report_compute", "restored", "restart", "transfer_wait", "transfer_cancel",
)  # fmt: skip
ENGINE_RUNTIME_CALLS = {name: RUNTIME_CALLS[name] for name in AS_ON_A_RUNTIME} | _table({
    "request": f"{CLIENT} {ASK} fewer", "serve": f"{CLIENT} {ASK} new fewer",
    "match_again": f"{CLIENT} fewer", "match_again_nowait": f"{CLIENT} fewer",
    "load": f"{CLIENT} max_tokens sparse", "load_nowait": f"{CLIENT} max_tokens sparse",
    "step": f"{CLIENT} {FORWARD} also",
    "offer": f"{CLIENT} num back new checkpoints is_last", "offer_deferred": CLIENT, "evict": CLIENT,
})  # fmt: skip

VERBS = ("pin", "prefetch", "demote", "returns", "done")
"""Of hints that clients give."""
CHOICES: Mapping[tuple[str, str], tuple[object, ...]] = {
    ("settle", "outcome"): ("landed", "failed", "corrupt", "unproven"),
    ("restart", "how"): ("closed", "killed"),
    ("client_hint", "verb"): VERBS,
    ("cancel", "how"): ("scope", "request", "native"),
    ("abort", "how"): ("request", "runtime"),
    ("leave", "how"): ("error",),
    ("step", "style"): ("inline", "thread", "held"),
    ("fault", "kind"): tuple(FAULTS),
}
"""The values of arguments that the program itself interprets."""
COUNTS = ("after", "at", "back", "fewer", "token", "stop", "most", "told", "also")
FLAGS = (
    "hurry", "early", "record", "lasting", "commits", "sparse", "offers", "is_last", "is_idle", "only_requested_twice",
    "blind",
)  # fmt: skip
SECONDS = ("give_up_s", "s", "seconds")
NAMES = ("who", "name", "child", "step", "job", "method")


def calls_of(face: str) -> Mapping[str, Words]:
    """The calls that programs of a face may make, each with the arguments that it needs and may have."""
    faces = {
        "ledger": LEDGER_CALLS, "states": LEDGER_CALLS, "kernel": LEDGER_CALLS, "meddled": LEDGER_CALLS,
        "engine": ENGINE_CALLS, "engine-states": ENGINE_CALLS, "meddled-engine": ENGINE_CALLS,
        "asyncio": RUNTIME_CALLS, "trio": RUNTIME_CALLS, "asyncio-states": RUNTIME_CALLS, "trio-states": RUNTIME_CALLS,
        "engine-asyncio": ENGINE_RUNTIME_CALLS, "engine-trio": ENGINE_RUNTIME_CALLS,
        "engine-asyncio-states": ENGINE_RUNTIME_CALLS, "engine-trio-states": ENGINE_RUNTIME_CALLS,
    }  # fmt: skip
    if not isinstance(face, str) or face not in faces:
        raise InvalidArgument("face", f"must be one of {', '.join(faces)}, got {shown(face)}")
    return faces[face]


def check_call(face: str, call: Any) -> None:
    """Raise `InvalidArgument` unless `face` knows the `Call` and its arguments, and these are plain data."""
    table = calls_of(face)
    words = table.get(call.name)
    if words is None:
        raise InvalidArgument("calls", f"no {face} program has a call {call.name!r}: {', '.join(sorted(table))}")
    if missing := words.needed - call.args.keys():
        raise InvalidArgument("calls", f"{call} lacks {', '.join(sorted(missing))}")
    if unknown := call.args.keys() - words.allowed:
        known = ", ".join(sorted(words.allowed)) or "no argument"
        raise InvalidArgument("calls", f"{call} has {', '.join(sorted(map(str, unknown)))}, and takes {known}")
    for name, value in call.args.items():
        is_tier = (
            (call.name, name) != ("reset", "tier")
            or face not in ("ledger", "states", "kernel", "meddled", "engine", "engine-states", "meddled-engine")
            or value in (None, "DEVICE", "HOST", "DISK", "REMOTE")
        )
        if not (is_tier and _is_plain(value) and _may_be(call.name, name, value)):
            raise InvalidArgument("calls", f"{call}: this cannot be its {name}")


def _is_plain(value: object) -> bool:
    """Whether a printed test reproduces the value."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str, bytes)


def _may_be(call: str, name: str, value: object) -> bool:
    if (call, name) in CHOICES:
        return value in CHOICES[call, name]
    if name in FLAGS:
        return isinstance(value, bool)
    if name in COUNTS:
        return type(value) is int and value >= 0
    if name in SECONDS and call != "report_compute":
        return value is None or (type(value) in (int, float) and value >= 0)  # type: ignore[operator]
    if name in NAMES and (call, name) != ("begin", "who"):
        return isinstance(value, str)
    return True
