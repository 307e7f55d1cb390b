"""Weights of the calls of a program over the runtime, and arguments that are never valid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import attrs

__all__ = ["ENGINE_ODDS", "RUNTIME_ODDS", "Odds"]

Weights: TypeAlias = tuple[tuple[str, int], ...]


@attrs.frozen
class Odds:
    """How calls are drawn."""

    next: Mapping[str, Weights]
    """Weights of the next call, by how far the client's request has come if all went well."""
    becomes: Mapping[str, str]
    """How far a request comes by a call, if all goes well."""
    keeping: Weights
    """For `keep`: pins and transfers beside requests."""
    whole: Weights
    """For `whole`: calls about the whole runtime."""
    any: tuple[str, ...]
    """For `any`: calls that may fit in no state."""
    wrong: tuple[dict[str, Any], ...]
    wrong_states: tuple[dict[str, Any], ...]
    """More of them, for a model with a recurrent state."""


NEXT: dict[str, tuple[tuple[str, int], ...]] = {
    "none": (("request", 60), ("serve", 14), ("keep", 16), ("whole", 14), ("any", 3)),
    "entered": (("allocate", 66), ("allocate_nowait", 14), ("leave", 4), ("keep", 6), ("whole", 4), ("any", 8)),
    "allocated": (
        ("load", 42), ("load_nowait", 22), ("extend", 8), ("extend_nowait", 6), ("step", 4), ("commit", 3),
        ("preempt_nowait", 3), ("leave", 3), ("keep", 3), ("whole", 3), ("any", 5),
    ),
    "loading": (
        ("wait", 50), ("early", 26), ("load", 5), ("preempt_nowait", 4), ("leave", 3), ("whole", 5), ("any", 6),
    ),
    "running": (
        ("step", 30), ("commit", 30), ("extend", 7), ("extend_nowait", 5), ("end_step", 6), ("commit_step", 4),
        ("invalidate", 11), ("preempt", 5), ("preempt_nowait", 4), ("leave", 9), ("keep", 4), ("whole", 4), ("any", 5),
    ),
    "preempted": (("resume", 62), ("leave", 6), ("keep", 6), ("whole", 5), ("any", 6)),
}  # fmt: skip
BECOMES = {
    "request": "entered", "allocate": "allocated", "allocate_nowait": "allocated", "load": "running",
    "load_nowait": "loading", "wait": "running", "preempt": "preempted", "preempt_nowait": "preempted",
    "resume": "running", "leave": "none", "commit": "running",
}  # fmt: skip
KEEPING = (
    ("pin", 30), ("unpin", 12), ("prefetch", 16), ("begin_prefetch", 10), ("demote", 14), ("begin_demote", 8),
    ("transfer_wait", 6), ("transfer_cancel", 6), ("client_hint", 20),
)  # fmt: skip
WHOLE = (
    ("flush", 18), ("reset_device", 30), ("evict_prompt", 24), ("reset", 8), ("reset_host", 8), ("lookup", 8),
    ("statistics", 4), ("report_queue", 4), ("report_compute", 4), ("integrity", 6), ("pause", 20),
)  # fmt: skip
ANY = (
    "allocate", "allocate_nowait", "extend", "extend_nowait", "load", "load_nowait", "wait", "step", "end_step",
    "commit", "commit_step", "invalidate", "preempt", "preempt_nowait", "resume", "abort", "abort", "abort", "wrong",
    "wrong",
)  # fmt: skip
WRONG_ANYWHERE: tuple[dict[str, Any], ...] = (
    {"call": "request", "tokens": ()},
    {"call": "request", "tokens": (1, -1)},
    {"call": "request", "tokens": (1, 2), "spans": ((1, 3, b"x"),)},
    {"call": "request", "tokens": (1, 2), "alignment": 0},
    {"call": "request", "tokens": (1,), "salt": 3},
    {"call": "request", "tokens": (1, 2), "store": "some"},
    {"call": "request", "tokens": (1,), "max_hit": -1},
    {"call": "load", "max_tokens": -1},
    {"call": "load", "max_tokens": 1.5},
    {"call": "invalidate", "num": -1},
    {"call": "invalidate", "num": 10**9},
    {"call": "pin", "tokens": (1, 2), "ttl_s": 0},
    {"call": "pin", "tokens": (), "ttl_s": 1.0},
    {"call": "client_hint", "tokens": (1, 2), "verb": "pin", "ttl_s": 0},
    {"call": "client_hint", "tokens": (1, 2), "verb": "returns", "ttl_s": "soon"},
    {"call": "client_hint", "tokens": (), "verb": "done"},
    {"call": "reset", "tier": "DISK"},
    {"call": "reset", "timeout_s": -1.0},
    {"call": "lookup", "tokens": ()},
    {"call": "report_queue", "num_tokens": -1},
    {"call": "report_compute", "num_tokens": 1.5, "seconds": 1.0},
    {"call": "report_compute", "num_tokens": 1, "seconds": -1.0},
)
WRONG = (
    *WRONG_ANYWHERE,
    {"call": "allocate", "num": 0},
    {"call": "allocate", "num": "3"},
    {"call": "allocate_nowait", "num": 10**9},
    {"call": "extend", "num": True},
    {"call": "extend_nowait", "num": -3},
    {"call": "extend", "num": 10**9},
    {"call": "commit", "num": 10**9},
    {"call": "commit", "num": -1},
    {"call": "commit", "num": None},
    {"call": "commit", "new": (-5,)},
    {"call": "prefetch", "tokens": ()},
    {"call": "begin_demote", "tokens": "ab"},
    {"call": "resume", "num": 10**9},
    {"call": "resume", "num": 0},
)
WRONG_CHECKPOINTS: tuple[Any, ...] = ((10**6,), (-1,), (0,), (True,), ("x",), 3)
RUNTIME_ODDS = Odds(
    NEXT, BECOMES, KEEPING, WHOLE, ANY, WRONG,
    tuple({"call": "commit", "checkpoints": checkpoints} for checkpoints in WRONG_CHECKPOINTS),
)  # fmt: skip

ENGINE_ODDS = Odds(
    {
        "none": (("request", 60), ("serve", 14), ("same_prompt", 10), ("keep", 8), ("whole", 14), ("any", 3)),
        "pending": (("match_again", 70), ("match_again_nowait", 8), ("leave", 4), ("whole", 5), ("any", 5)),
        "entered": (
            ("load", 50), ("load_nowait", 18), ("match_again_nowait", 6), ("match_again", 3), ("step", 8), ("leave", 4),
            ("keep", 3), ("whole", 5), ("any", 5),
        ),
        "loading": (("wait", 50), ("load", 12), ("leave", 6), ("step", 3), ("whole", 6), ("any", 6)),
        "running": (
            ("step", 36), ("offer", 34), ("end_step", 6), ("invalidate", 9), ("leave", 10), ("keep", 3), ("whole", 5),
            ("any", 5),
        ),
    },
    {
        "request": "entered", "match_again": "entered", "match_again_nowait": "entered", "load": "running",
        "load_nowait": "loading", "wait": "running", "leave": "none", "offer": "running",
    },
    (("pin", 30), ("unpin", 14), ("client_hint", 20)),
    (
        ("evict", 36), ("offer_deferred", 30), ("evict_prompt", 16), ("flush", 16), ("reset", 6), ("reset_host", 8),
        ("reset_device", 2), ("lookup", 8), ("statistics", 4), ("report_queue", 4), ("report_compute", 4),
        ("integrity", 6), ("pause", 20),
    ),
    (
        "match_again", "match_again_nowait", "load", "load_nowait", "wait", "step", "end_step", "offer", "invalidate",
        "abort", "abort", "abort", "wrong", "wrong",
    ),
    (
        *WRONG_ANYWHERE, {"call": "request", "tokens": (1,), "salt": 3, "fewer": 9}, {"call": "offer", "num": 10**9},
        {"call": "offer", "num": -1}, {"call": "offer", "num": None}, {"call": "offer", "new": (-5,)},
    ),
    ({"call": "offer", "checkpoints": (3,)}, {"call": "offer", "checkpoints": 3}),
)  # fmt: skip
