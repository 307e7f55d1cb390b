"""The proof: what the promise is measured by. `python -m proof`."""
