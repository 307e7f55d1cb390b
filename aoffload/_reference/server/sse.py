"""Server-sent events, as the streams of this API use them: one line of JSON each, and `[DONE]` as the last one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["DONE", "HEADERS", "event"]

HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
DONE = b"data: [DONE]\n\n"


def event(value: Mapping[str, Any]) -> bytes:
    """One event. JSON in ASCII has no line break and no partial character, whatever the text holds."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode("ascii") + b"\n\n"
