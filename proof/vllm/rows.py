"""The result of a scenario: a row of the report, and its verdict."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .outputs import Answer, compare, digest

__all__ = ["HEAD", "Row", "judge", "read", "table", "write"]

HEAD = ("Verdict", "Scenario", "Outputs", "Digest", "Cached tokens", "Free blocks", "Held", "Took", "Found")


@dataclass(frozen=True)
class Row:
    """Empty cells do not apply. `problems` are why the verdict is MISSED."""

    name: str
    outputs: str = ""
    digest: str = ""
    cached: str = ""
    free: str = ""
    held: str = ""
    took_s: float = 0.0
    found: str = ""
    problems: tuple[str, ...] = ()
    was_run: bool = True

    @property
    def is_met(self) -> bool:
        return self.was_run and not self.problems

    @property
    def verdict(self) -> str:
        return "not run" if not self.was_run else "MISSED" if self.problems else "met"

    def cells(self) -> tuple[str, ...]:
        about = "; ".join(part for part in (self.found, *self.problems) if part)
        took = f"{self.took_s:.1f} s" if self.was_run else ""
        return (
            self.verdict, self.name, self.outputs, self.digest, self.cached, self.free, self.held, took, about,
        )  # fmt: skip

    def missed(self, *problems: str) -> Row:
        """The same with more problems; empty ones are none."""
        return replace(self, problems=(*self.problems, *(each for each in problems if each)))


def judge(
    name: str,
    answers: Mapping[str, Answer],
    reference: Mapping[str, Answer],
    *,
    num_blocks: int,
    num_free: int,
    took_s: float,
    found: str = "",
    may_differ: bool = False,
) -> Row:
    """The row of a run that has come to rest. Its answers have to be those of `reference`, unless they may differ; and
    all blocks have to be free."""
    comparison, num_held = compare(answers, reference), num_blocks - num_free
    problems = []
    if not comparison.is_equal and not may_differ:
        problems.append("other outputs than the reference")
    if num_held:
        problems.append(f"{num_held} blocks are still held")
    cached = sum(answer.num_cached_tokens for answer in answers.values())
    prompt = sum(answer.num_prompt_tokens for answer in answers.values())
    return Row(
        name, str(comparison), digest(answers), f"{cached:,} of {prompt:,}", f"{num_free} of {num_blocks}",
        str(num_held), took_s, found, tuple(problems),
    )  # fmt: skip


def table(rows: Iterable[Row]) -> str:
    """A table in markdown, one line per row."""
    lines = [HEAD, ("---",) * len(HEAD), *(row.cells() for row in rows)]
    return "\n".join(
        "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def write(rows: Sequence[Row], file: Path) -> None:
    """Write `rows` to `file`, as a whole or not at all."""
    written = file.with_suffix(".new")
    written.write_text(json.dumps([asdict(row) for row in rows]))
    written.replace(file)


def read(file: Path) -> list[Row]:
    """What `write` has written. `ValueError` for anything else."""
    try:
        found: list[dict[str, Any]] = json.loads(file.read_text())
        return [Row(**{**row, "problems": tuple(row["problems"])}) for row in found]
    except (LookupError, TypeError) as error:
        raise ValueError(f"{file} holds no rows: {error!r}") from error
