"""Run the benchmarks: `python -m benchmarks [NAME ...]`. Each row is printed and saved as soon as it is measured.

The rows are saved in build/bench, and printed as one table at the end. An interrupted benchmark keeps the rows that it
had. Peers run in environments of their own (`make bench-peers`). Without a peer, rows are compared with a limit that
needs none.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from .harness import Row, calibrate
from .peer import MissingPeerError, Peer

BENCHMARKS = (
    "cycle", "eager_store", "tokens_in", "api", "tiers", "replay", "copy", "disk", "disk_start", "disk_hung",
    "disk_replay", "disk_slow", "remote", "link_steps", "against_lmcache", "cuda_ceilings", "cuda_sweep",
    "cuda_loads", "cuda_copy", "cuda_interference", "cuda_ttft", "cuda_regions", "cuda_busy", "cuda_latency",
    "cuda_choice", "cuda_pinning", "cuda_overlap", "cuda_fitting", "cuda_stress", "lag", "switching", "growth",
    "memory", "cost", "serving", "trace_page", "plan", "load_choice", "eviction", "states", "tenants",
)  # fmt: skip
"""Modules of this package. Each has `run(vllm)`, which yields rows."""
HEADING = ("what", "value", "unit", "10%-90%", "beside it", "value", "ratio", "wanted")
OUT = Path("build/bench")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(BENCHMARKS)}; all, if none is named")
    parser.add_argument("--json", type=Path, metavar="FILE", help=f"write the rows there (default: in {OUT})")
    given = parser.parse_args(arguments)
    names = given.names or BENCHMARKS
    kept = KeptRows(given.json or OUT / f"{'_'.join(names)}.json", calibrate())
    with ExitStack() as stack:
        for row in collect(names, _vllm(stack)):
            kept.add(row)
            print(as_line(row), flush=True)
    after = calibrate()
    kept.end(after)
    print(as_table(kept.rows))
    before = kept.before
    print("this machine, before and after: " + ", ".join(f"{key} {before[key]:.3g}/{after[key]:.3g}" for key in before))


class KeptRows:
    """The rows of a run, in a JSON file that is replaced after each of them, so that an interrupted run keeps its
    rows."""

    def __init__(self, file: Path, before: dict[str, float]) -> None:
        self.rows: list[Row] = []
        self.before = before
        self._file = file
        self._write(None)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self._write(None)

    def end(self, after: dict[str, float]) -> None:
        self._write(after)

    def _write(self, after: dict[str, float] | None) -> None:
        """Replace the whole file, because the run may be interrupted at any point. `after` is None until the end."""
        found = {"rows": [row.as_dict() for row in self.rows], "before": self.before, "after": after}
        self._file.parent.mkdir(parents=True, exist_ok=True)
        written = self._file.with_name(f"{self._file.name}.new")
        written.write_text(json.dumps(found, indent=1))
        written.replace(self._file)


def _vllm(stack: ExitStack) -> Peer | None:
    try:
        return stack.enter_context(Peer("vllm"))
    except MissingPeerError as missing:
        print(missing, file=sys.stderr)
        return None


def collect(names: Iterable[str], vllm: Peer | None) -> Iterator[Row]:
    """The rows of every benchmark in `names`, in order, each as soon as it is measured. Exits with a message if a
    benchmark is missing."""
    for name in names:
        module = f"{__package__}.{name}"
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
            raise SystemExit(f"benchmarks: there is no {module}, so there is nothing to run for {name!r}") from None
        print(f"running {name} ...", file=sys.stderr, flush=True)
        yield from found.run(vllm)


def as_line(row: Row) -> str:
    """One row on a line of its own, before the widths of the table are known."""
    what, value, unit, spread, against, limit, ratio, verdict = _cells(row)
    spread = f" ({spread})" if spread else ""
    return f"{what}: {value} {unit}{spread}; {against}: {limit}; ratio {ratio}{'; ' if verdict else ''}{verdict}"


def as_table(rows: Iterable[Row]) -> str:
    """One line per row, with names to the left and figures to the right."""
    cells = [HEADING, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEADING))]
    return "\n".join(_line(line, widths) for line in cells)


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.name, _figure(row.value), row.unit, row.spread, row.against, _figure(row.limit), f"{row.ratio:.3g}",
        row.verdict,
    )  # fmt: skip


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = zip(cells, "<><><>><", widths, strict=True)
    return "  ".join(f"{cell:{side}{width}}" for cell, side, width in padded).rstrip()


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


if __name__ == "__main__":
    main()
