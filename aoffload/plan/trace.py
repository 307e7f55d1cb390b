"""A trace: the time and the blocks of each request. Blocks are equal where prefixes are equal.

One JSON object per line, in a file that may be compressed (`.gz`): `timestamp` in ms, `input_length`, `output_length`,
`hash_ids`, one for each block of the prompt, of which the last may be partly filled. `Recorder` writes such files, and
public traces have this form. An id counts together with all ids before it, so it need not be chained itself.

Three more fields are optional. `stop`, text: why the answer ended, such as `tool_use`. `returns_s`: seconds until the
next request of the same session; null: there is none. `tenant`, text: the tenant that the request belongs to.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

import attrs
import numpy as np
from numpy.typing import NDArray

from .._common.arguments import number_of
from ..errors import AoffloadError
from .recorder import FORMAT, MAX_TEXT

DEFAULT_BLOCK_TOKENS = 512
MAX_LENGTH = 2**31 - 1
LATEST_MS = 1e15
"""The largest timestamp, some 30,000 years."""
Blocks = NDArray[np.int32]


class TraceError(AoffloadError):
    """A file that is no trace. The message names the file and the line number."""


@attrs.frozen(eq=False)
class TracedRequest:
    at_s: float
    num_tokens: int
    """Tokens of the prompt."""
    num_output_tokens: int
    blocks: Blocks
    """Blocks of the prompt, then those that the answer has completed. Each has a number that stands for the prefix."""
    num_prompt_blocks: int
    stop: str | None = None
    """Why the answer ended. None: the trace does not say."""
    returns_s: float | None = None
    """Seconds until the next request of the session; infinite if there is none. None: the trace does not say."""
    tenant: str | None = None
    """None: of no tenant that the trace names."""


@attrs.frozen(eq=False)
class Trace:
    name: str
    requests: tuple[TracedRequest, ...]
    """The requests, in the order of their times."""
    block_tokens: int
    num_blocks: int
    """Number of different blocks. Their numbers are below this."""
    num_dropped: int = 0
    """Requests that the recorder dropped."""

    @property
    def num_asked(self) -> int:
        """Blocks of all prompts."""
        return sum(request.num_prompt_blocks for request in self.requests)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(request.num_tokens for request in self.requests)

    @property
    def duration_s(self) -> float:
        return self.requests[-1].at_s - self.requests[0].at_s

    @property
    def tenants(self) -> tuple[str, ...]:
        """The tenants that requests name, in the order of their names."""
        return tuple(sorted({request.tenant for request in self.requests if request.tenant is not None}))

    @property
    def most_blocks(self) -> int:
        """Blocks of the largest request."""
        return max(len(request.blocks) for request in self.requests)


def read_trace(path: Path, block_tokens: int | None = None, limit: int | None = None) -> Trace:
    """The first `limit` requests of the file, which is compressed if its name ends with `.gz`. `block_tokens`: tokens
    of a block, if the file does not say; by default 512. Raises `TraceError`, or `OSError`."""
    try:
        with _opened(path) as lines:
            return parse_trace(path.name, lines, block_tokens, limit)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path.name} is no complete gzip file: {error}") from error


def parse_trace(name: str, lines: Iterable[str], block_tokens: int | None = None, limit: int | None = None) -> Trace:
    """The same from lines that are not in a file. `name` is the name of the trace in messages."""
    reader = _Reader(name, block_tokens)
    for number, line in enumerate(lines, 1):
        if limit is not None and len(reader.requests) >= limit:
            break
        if line.strip():
            reader.take(number, line)
    return reader.finish()


def _opened(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", errors="replace")
    return path.open(encoding="utf-8", errors="replace")


def _is_unicode(text: str) -> bool:
    """Whether `text` has no lone surrogate, which JSON allows."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


class _Reader:
    def __init__(self, name: str, block_tokens: int | None) -> None:
        self.name = name
        self.requests: list[TracedRequest] = []
        self._block_tokens = block_tokens or DEFAULT_BLOCK_TOKENS
        self._is_told = block_tokens is not None
        self._is_ours = False
        self._numbers: dict[tuple[int, int | str], int] = {}
        """The number of a block, by the number of the block before it and its own id."""
        self._tenants: dict[str | None, int] = {None: 0}
        self._num_dropped = 0

    def take(self, number: int, line: str) -> None:
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise self._wrong(number, "is no JSON") from error
        if not isinstance(fields, dict):
            raise self._wrong(number, "is no JSON object")
        if "aoffload_plan" in fields:
            self._take_heading(number, fields)
        elif "num_dropped" in fields:
            self._num_dropped += self._count(number, fields, "num_dropped", 0)
        else:
            self.requests.append(self._request(number, fields))

    def _take_heading(self, number: int, fields: dict[str, Any]) -> None:
        if fields["aoffload_plan"] != FORMAT:
            raise self._wrong(number, f"is of another version than {FORMAT}")
        block_tokens = self._count(number, fields, "block_tokens", 1)
        if (self.requests or self._is_told) and block_tokens != self._block_tokens:
            raise self._wrong(number, f"says blocks of {block_tokens} tokens, not of {self._block_tokens}")
        self._block_tokens, self._is_told, self._is_ours = block_tokens, True, True

    def _request(self, number: int, fields: dict[str, Any]) -> TracedRequest:
        if "event" in fields:
            raise self._wrong(number, "is an event of a log; aoffload.plan.Recorder writes what can be planned")
        at_ms = number_of(fields.get("timestamp"))
        if at_ms is None or not abs(at_ms) <= LATEST_MS:
            raise self._wrong(number, "has no timestamp in ms")
        num_tokens = self._count(number, fields, "input_length", 1)
        num_output_tokens = self._count(number, fields, "output_length", 0) if "output_length" in fields else 0
        prompt = self._ids(number, fields, "hash_ids")
        beyond = len(prompt) - num_tokens // self._block_tokens
        if beyond > 1 or (beyond < 0 and not self._is_ours):  # our files have only committed blocks, which may be fewer
            problem = f"has {len(prompt)} hash_ids for {num_tokens} tokens: are blocks of {self._block_tokens} tokens?"
            raise self._wrong(number, problem)
        output = self._ids(number, fields, "output_hash_ids") if "output_hash_ids" in fields else []
        tenant = self._text(number, fields, "tenant")
        blocks = np.fromiter(self._numbered([*prompt, *output], tenant), np.int32)
        return TracedRequest(
            at_ms / 1e3, num_tokens, num_output_tokens, blocks, len(prompt),
            self._text(number, fields, "stop"), self._returns_s(number, fields), tenant,
        )  # fmt: skip

    def _text(self, number: int, fields: dict[str, Any], name: str) -> str | None:
        value = fields.get(name)
        if value is None:
            return None
        if not isinstance(value, str) or len(value) > MAX_TEXT or not _is_unicode(value):
            raise self._wrong(number, f"needs text of at most {MAX_TEXT} characters as {name}")
        return value

    def _returns_s(self, number: int, fields: dict[str, Any]) -> float | None:
        if "returns_s" not in fields:
            return None
        value = fields["returns_s"]
        seconds = math.inf if value is None else number_of(value)
        if seconds is None or seconds < 0 or (seconds == math.inf and value is not None):
            raise self._wrong(number, "needs returns_s, seconds from 0 on, or null")
        return seconds

    def _ids(self, number: int, fields: dict[str, Any], name: str) -> list[int | str]:
        ids = fields.get(name)
        if not isinstance(ids, list) or not set(map(type, ids)) <= {int, str}:
            raise self._wrong(number, f"has no list of ids as {name}")
        return ids

    def _numbered(self, ids: Iterable[int | str], tenant: str | None) -> Iterable[int]:
        """Tenants share no block, because the tenant is the salt."""
        numbers, before = self._numbers, -1 - self._tenants.setdefault(tenant, len(self._tenants))
        for each in ids:
            before = numbers.setdefault((before, each), len(numbers))
            yield before

    def _count(self, number: int, fields: dict[str, Any], name: str, least: int) -> int:
        value = fields.get(name)
        if type(value) is not int or not least <= value <= MAX_LENGTH:
            raise self._wrong(number, f"needs {name}, an integer of at least {least}")
        return value

    def _wrong(self, number: int, problem: str) -> TraceError:
        return TraceError(f"{self.name}, line {number}: {problem}")

    def finish(self) -> Trace:
        if not self.requests:
            raise TraceError(f"{self.name}: no request in it")
        requests = tuple(sorted(self.requests, key=lambda request: request.at_s))
        return Trace(self.name, requests, self._block_tokens, len(self._numbers), self._num_dropped)
