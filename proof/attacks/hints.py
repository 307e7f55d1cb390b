"""Clients that send hints as no client should: of other types, sizes and times, and about prompts of others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from .figures import Figure
from .victims import PROGRAMS, ended

__all__ = ["NUM_HINTS", "hints"]

NUM_HINTS = 10_000


def hints(tree: Path) -> Iterator[Figure]:
    """Hostile hints, to a runtime on each loop and to the connector for vLLM."""
    for face in ("asyncio", "trio", "vllm"):
        attack = f"{NUM_HINTS:,} hostile payloads of hints, {face}"
        done = ended(tree, str(PROGRAMS / "hostile_hints.py"), face, str(NUM_HINTS), timeout_s=600.0)
        if done.returncode:
            raise RuntimeError(done.stderr.decode()[-300:])
        found = json.loads(done.stdout.decode().splitlines()[-1])
        yield Figure("H1", attack, "errors of calls and requests", found["errors"], 0)
        yield Figure("H1", attack, "blocks pinned beyond the share of hints", found["beyond"], 0)
        yield Figure("H1", attack, "looks at which the victim had changed", found["touched"], 0)
        yield Figure("H1", attack, "answers", found["answers"], NUM_HINTS, "", True)
