"""Parse errors and foreign events: lines left out, counted by reason, with an example of each."""

from __future__ import annotations

import enum

import attrs

from .wording import counted, plain

__all__ = ["ParseErrors", "ParseError"]

MAX_EXAMPLE = 60


class ParseError(enum.Enum):
    """Why a line was left out, in words for `1 line ...`."""

    NOT_JSON = "no JSON"
    CUT_OFF = "cut off: the last line has no end"
    NO_EVENT = "JSON, but no event"
    NO_TIME = "without a timestamp that can be read"
    MALFORMED = "one of our events with a field missing or of another type"
    FOREIGN = "an event of another logger"


@attrs.define
class _Count:
    num_lines: int
    first_line: int
    example: str


@attrs.define(eq=False)
class ParseErrors:
    """Counts of the lines left out, in bounded memory."""

    _counts: dict[ParseError, _Count] = attrs.field(factory=dict)

    def add(self, parse_error: ParseError, line_number: int, example: str) -> None:
        """Count a line; the first of each kind is kept as the example."""
        count = self._counts.get(parse_error)
        if count is None:
            self._counts[parse_error] = _Count(1, line_number, plain(example[:MAX_EXAMPLE]))
        else:
            count.num_lines += 1

    def num_lines(self, parse_error: ParseError) -> int:
        return self._counts[parse_error].num_lines if parse_error in self._counts else 0

    def sentences(self) -> list[str]:
        """One sentence for each kind that occurred."""
        return [
            f"{counted(count.num_lines, 'line')} left out: {parse_error.value} "
            f"(first: line {count.first_line}, {example})"
            for parse_error in ParseError
            if (count := self._counts.get(parse_error)) is not None and (example := count.example or "empty")
        ]
