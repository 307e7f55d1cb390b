"""The kernel: pure and synchronous. Nothing in here waits, logs, moves a byte, or has a clock of its own. `README.md`
is its theory of operation."""
