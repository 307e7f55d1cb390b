"""The proof: measures whether the package keeps its promises. `python -m proof`."""
