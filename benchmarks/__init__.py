"""The cost of bookkeeping and copying, each beside the limit that it is compared with. `python -m benchmarks`."""
