"""What the bookkeeping and the copying cost, each next to the limit it is measured against. `python -m benchmarks`."""
