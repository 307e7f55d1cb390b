"""Traces drawn from a seed: conversations that grow turn by turn after common prefixes. Some return later."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from aoffload.plan.trace import Trace, TracedRequest, read_trace

BLOCK_TOKENS = 8
MOST_BLOCKS = 60
"""Longer conversations are over."""
Prompt = list[int]


def conversations(seed: int, num_requests: int, num_open: int = 40) -> list[Prompt]:
    """Prompts in blocks. Ids are chained, as in public traces: equal ids have equal ids before them."""
    draw, names = random.Random(seed), dict[tuple[int, int], int]()

    def longer(prompt: Sequence[int], count: int, what: int) -> Prompt:
        found = list(prompt)
        for _ in range(count):
            found.append(names.setdefault((found[-1] if found else -1, what), len(names)))
        return found

    beginnings = [longer((), draw.randint(1, 12), -1 - number) for number in range(4)]
    talks: list[Prompt] = []
    asked: list[Prompt] = []
    for number in range(num_requests):
        if len(talks) < num_open or draw.random() < 0.2:
            talks.append(longer(draw.choice(beginnings), draw.randint(1, 20), number))
        at = int(len(talks) * draw.random() ** 3)  # those at the front come back more often
        asked.append(talks[at])
        talks[at] = longer(talks[at], draw.randint(0, 4), number)
        if len(talks[at]) > MOST_BLOCKS or draw.random() < 0.05:
            del talks[at]
    return asked


def lines(prompts: Iterable[Prompt], gap_ms: int = 500) -> list[str]:
    """Each prompt has one token more than its blocks."""
    return [
        json.dumps({
            "timestamp": number * gap_ms, "input_length": len(ids) * BLOCK_TOKENS + 1, "output_length": 3,
            "hash_ids": ids,
        })
        for number, ids in enumerate(prompts)
    ]  # fmt: skip


def write_trace(path: Path, prompts: Iterable[Prompt], gap_ms: int = 500) -> Path:
    path.write_text("\n".join(lines(prompts, gap_ms)) + "\n")
    return path


def agents(seed: int, num_requests: int, **fields: Any) -> list[str]:
    """Sessions of agents, a request each second. A session calls tools, whose turns return within seconds, then asks a
    person, and then is over. Its answers say which of these ended them."""
    draw, found, sessions = random.Random(seed), list[dict[str, Any]](), list[tuple[int, int, list[int]]]()
    last: dict[int, dict[str, Any]] = {}
    for number in range(num_requests):
        due = [session for session in sessions if session[0] <= number]
        if due:
            session = min(due)
            sessions.remove(session)
            _, name, ids = session
        else:
            name, ids = number, []
        ids = [*ids, *(1000 * name + len(ids) + at for at in range(draw.randint(1, 3)))]
        if name in last:
            last[name]["returns_s"] = float(number - last[name]["timestamp"] / 1000)
        stop = draw.choices(("tool_use", "question", "end"), (6, 1, 2))[0] if len(ids) < MOST_BLOCKS else "end"
        last[name] = {
            "timestamp": number * 1000, "input_length": len(ids) * BLOCK_TOKENS + 1, "output_length": 3,
            "hash_ids": ids, "stop": stop, "returns_s": None, **fields,
        }  # fmt: skip
        found.append(last[name])
        if stop != "end":
            sessions.append((number + (draw.randint(5, 15) if stop == "tool_use" else 200), name, ids))
    return [json.dumps(each) for each in found]


def made(tmp_path: Path, seed: int, num_requests: int) -> Trace:
    return read_trace(write_trace(tmp_path / f"{seed}.jsonl", conversations(seed, num_requests)), BLOCK_TOKENS)


Request = tuple[int, list[int], int]
"""Which earlier request it continues, if there is one of this number; what its prompt adds, in blocks; and how many
blocks its answer completes, which are its own."""


def trace_of(requests: list[Request]) -> Trace:
    """Prompts as paths in a tree: a block is a number together with all those before it."""
    numbers: dict[tuple[int, ...], int] = {}
    paths: list[tuple[int, ...]] = []
    found = []
    for at, (before, added, num_answered) in enumerate(requests):
        prompt = (*(paths[before] if before < at and len(paths[before]) < 5 else ()), *added)
        path = (*prompt, *(100 * at + 10 + number for number in range(num_answered)))
        paths.append(path)
        blocks = [numbers.setdefault(path[: stop + 1], len(numbers)) for stop in range(len(path))]
        found.append(TracedRequest(float(at * at), len(prompt) * 8 + 1, 0, np.array(blocks, np.int32), len(prompt)))
    return Trace("made", tuple(found), 8, len(numbers))


_REQUEST = st.tuples(st.integers(0, 30), st.lists(st.integers(0, 2), max_size=4), st.integers(0, 2))
REQUESTS = st.lists(_REQUEST, min_size=1, max_size=14)
MOST_OF_ONE = 10
"""The most blocks of one of these requests."""
