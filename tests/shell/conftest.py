"""What a runtime says of its lower tiers is scraped as the metrics' own tests do it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "metrics"))
