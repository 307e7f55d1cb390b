"""Memory of the index with two builds of the core: `python -m proof.index_memory --beside build/compiled/bin/python`.

Makes the same measurement (`benchmarks/memory.py`) with each build, each time in a process of its own. The compiled
core may need at most 5% more memory than the pure one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

MOST = 1.05
KINDS = ("alone", "branching", "records")


def measured(python: Path, kind: str, number: int, cwd: Path | None) -> float:
    """Bytes per cached block, or per request that does nothing."""
    command = [str(python), "-W", "ignore", "-m", "benchmarks.memory", kind, str(number)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=cwd)
    return float(json.loads(done.stdout)["bytes"])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m proof.index_memory", description=__doc__)
    parser.add_argument("--beside", type=Path, required=True, metavar="PYTHON", help="that has the compiled core")
    parser.add_argument("--blocks", type=int, default=10**6)
    given = parser.parse_args()
    beside = given.beside.absolute()
    tree, most = beside.parent.parent / "tree", 0.0
    for kind in KINDS:
        number = 10_000 if kind == "records" else given.blocks
        pure, compiled = measured(Path(sys.executable), kind, number, None), measured(beside, kind, number, tree)
        most = max(most, compiled / pure)
        unit = "request" if kind == "records" else "block"
        print(f"{kind}: {pure:.1f} B a {unit} pure, {compiled:.1f} B compiled, {compiled / pure:.3f}", flush=True)
    print(f"at most {most:.3f}, wanted {MOST}: {'met' if most <= MOST else 'missed'}")
    return most > MOST


if __name__ == "__main__":
    raise SystemExit(main())
