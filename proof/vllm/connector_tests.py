"""The connector's own tests over vLLM's own classes: elsewhere they run over stand-ins, which could drift from them."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

from .rows import Row, write
from .verdicts import Case

__all__ = ["cases_of", "main", "row_of"]

OUT = Path("build/vllm")
FOLDER = OUT / "connector_tests"
TESTS = Path("tests/integrations/vllm_connector")
INI = """[pytest]
addopts = -q --strict-markers --strict-config
filterwarnings = error
markers =
    vllm: needs vLLM
"""
"""Not this repository's, which configures plugins that are not installed beside vLLM."""
TESTS_S = 240.0
MOST_SAID = 5


def run(folder: Path) -> Path:
    """Run the tests; the file of their results. `TimeoutExpired` if they do not end."""
    folder.mkdir(parents=True, exist_ok=True)
    ini, results = folder / "pytest.ini", folder / "results.xml"
    ini.write_text(INI)
    results.unlink(missing_ok=True)
    words = ("-c", str(ini), f"--rootdir={Path.cwd()}", f"--confcutdir={TESTS}", f"--junitxml={results}")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words, str(TESTS)]
    path = os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, check=False, timeout=TESTS_S)
    return results


def cases_of(results: Path) -> list[Case]:
    """What became of each test, as pytest has written it. `OSError` or `ValueError` if there are no results."""
    try:
        return [_case(found) for found in ElementTree.parse(results).iter("testcase")]
    except ElementTree.ParseError as error:
        raise ValueError(f"{results}: {error}") from error


def _case(found: ElementTree.Element) -> Case:
    name, ends = found.get("name", ""), {"failure": "failed", "error": "failed", "skipped": "skipped"}
    for what, outcome in ends.items():
        if (why := found.find(what)) is not None:
            return Case(name, outcome, " ".join(why.get("message", "").split()))
    return Case(name, "passed")


def row_of(cases: list[Case], took_s: float) -> Row:
    """Every test has to pass: with vLLM installed, none has a reason to be skipped."""
    counted = Counter(case.outcome for case in cases)
    others = [f"{case.name} {case.outcome}: {case.why}" for case in cases if case.outcome != "passed"]
    more = len(others) - MOST_SAID
    found = f"{len(cases)} run: " + ", ".join(f"{number} {outcome}" for outcome, number in counted.most_common())
    row = Row("the connector's tests over vLLM's classes", took_s=took_s, found=found)
    return row.missed(*others[:MOST_SAID], f"and {more} more" if more > 0 else "", "" if cases else "no test was run")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, default=OUT / "rows.json")
    parser.add_argument("--short", action="store_true")
    given = parser.parse_args()
    began_s = time.monotonic()
    row = row_of(cases_of(run(FOLDER)), time.monotonic() - began_s)
    print(" | ".join(row.cells()), flush=True)
    write([row], given.json)


if __name__ == "__main__":
    main()
