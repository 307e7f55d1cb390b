"""The core: pure and synchronous. Nothing in here waits, logs, reads a clock or moves a byte."""
