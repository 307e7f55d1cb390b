"""Scrapes of a runtime with lower tiers, with the readers of the metrics tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "metrics"))
