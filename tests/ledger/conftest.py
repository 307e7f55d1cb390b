"""Fixtures of a program that drives a `Ledger`. Drivers and readers are those of other tests."""

import sys
from pathlib import Path

for neighbour in ("core", "events", "metrics", "trace"):
    sys.path.insert(0, str(Path(__file__).parents[1] / neighbour))
