"""The kernel: it decides which block holds which KV and which requests may use it. Nothing in here waits, logs, moves a
byte, or has a clock of its own. `README.md` is its theory of operation."""
