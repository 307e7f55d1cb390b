"""The results of runs in a folder: the status and the output of each part, and the report made from these files.

A run of other parts adds to the folder, so the report has the figures of earlier runs, too. Every file is replaced as a
whole, because the run may be killed at any moment.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .parts import PARTS, Part
from .readings import Reading
from .report import PartReport, Report
from .running import Ends

__all__ = ["ARCHIVE", "REPORT", "Results", "saving"]

REPORT = "report.md"
ARCHIVE = "gpu.tgz"
RUNS = "runs.json"
WAITING = "its turn has not come"
RUNNING = "it has not ended"
EVERY_S = 10.0
"""How often the report and the archive are replaced while a part runs."""


@dataclass(frozen=True)
class Went:
    """How a part went."""

    problem: str
    """Empty: it has passed."""
    took_s: float | None = None
    """None: it has not run."""


class Results:
    """`work` has a file for each part. `out`, if it is given, has two files only: the report, and an archive of all."""

    def __init__(
        self,
        work: Path,
        about: str,
        environment: Mapping[str, str] | None = None,
        out: Path | None = None,
        known: Sequence[Part] = PARTS,
    ) -> None:
        self.work, self.about, self.out = work, about, out
        self._environment = {} if environment is None else dict(environment)
        self._known = known
        self._went = self._earlier()

    def _earlier(self) -> dict[str, Went]:
        """How parts went before on this device. Those of another device, or of other packages, are not shown."""
        try:
            found = json.loads((self.work / RUNS).read_text())
            is_same = found["about"] == self.about
            return {name: Went(**went) for name, went in found["parts"].items()} if is_same else {}
        except (OSError, ValueError, LookupError, TypeError):  # none, or of another version
            return {}

    def expect(self, parts: Sequence[Part]) -> None:
        """Parts that have never run say that their turn has not come; the others keep what they have until it comes."""
        for part in parts:
            self._went.setdefault(part.name, Went(WAITING))
        self.keep()

    def begin(self, part: Part) -> Path:
        """The part runs now. Returns the file for what it finds, which has nothing of an earlier run."""
        file = self.file(part)
        file.unlink(missing_ok=True)
        self._went[part.name] = Went(RUNNING)
        self.keep()
        return file

    def end(self, part: Part, problem: str, took_s: float | None = None) -> PartReport:
        """The part is over. What it wrote is read and kept."""
        self._went[part.name] = Went(problem, took_s)
        self.keep()
        return self._report_of(part)

    def refuse(self, part: Part, problem: str) -> PartReport:
        """The part will not run. The figures of an earlier run, if there are any, stay."""
        if self._went[part.name].took_s is None:
            self._went[part.name] = Went(problem)
        self.keep()
        return PartReport(part, None, problem)

    def file(self, part: Part) -> Path:
        return self.work / f"{part.name}.json"

    def log(self, part: Part) -> Path:
        return self.work / f"{part.name}.log"

    def keep(self) -> None:
        """Write the report, and the archive if there is a place for it."""
        self.work.mkdir(parents=True, exist_ok=True)
        parts = {name: asdict(went) for name, went in self._went.items()}
        runs = {"about": self.about, "environment": self._environment, "parts": parts}
        _replace(self.work / RUNS, lambda file: file.write_text(json.dumps(runs, indent=1)))
        markdown = self.report().markdown()
        _replace(self.work / REPORT, lambda file: file.write_text(markdown))
        if self.out is not None:
            self.out.mkdir(parents=True, exist_ok=True)
            _replace(self.out / ARCHIVE, self._pack)
            _replace(self.out / REPORT, lambda file: file.write_text(markdown))

    def report(self) -> Report:
        """The report on all parts that have run, or are to run, on this device."""
        parts = [self._report_of(part) for part in self._known if part.name in self._went]
        return Report(self.about, parts, self._environment)

    def _report_of(self, part: Part) -> PartReport:
        went = self._went[part.name]
        found = PartReport(part, went.took_s, went.problem)
        try:
            found.readings = self._read(part)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            found.problem = found.problem or f"its output cannot be read: {error!r}"
        return found

    def _read(self, part: Part) -> Mapping[str, Reading]:
        file = self.file(part)
        return part.read(file.read_text()) if file.exists() else {}

    def _pack(self, file: Path) -> None:
        with tarfile.open(file, "w:gz") as archive:
            for each in sorted(self.work.iterdir()):
                if each.suffix in (".json", ".log", ".md"):
                    archive.add(each, arcname=f"gpu/{each.name}")


def _replace(file: Path, write: Callable[[Path], Any]) -> None:
    written = file.with_name(f"{file.name}.new")
    write(written)
    written.replace(file)


def saving(keep: Callable[[], object], ends: Ends, every_s: float = EVERY_S) -> Ends:
    """`ends`, and a call of `keep` after each `every_s` that the process runs on."""

    def wait(process: Any, seconds: float) -> bool:
        while seconds > every_s:
            if ends(process, every_s):
                return True
            keep()
            seconds -= every_s
        return ends(process, seconds)

    return wait
