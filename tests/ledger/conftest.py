"""What a program around a `Ledger` sees of it. Drivers and readers are those of other tests."""

import sys
from pathlib import Path

for neighbour in ("core", "events", "metrics", "trace"):
    sys.path.insert(0, str(Path(__file__).parents[1] / neighbour))
