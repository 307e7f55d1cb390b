"""Attacks on all that listens, over real sockets and processes: what each of them costs, beside a limit. Linux only."""
