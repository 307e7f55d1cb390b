"""Attacks on every listening socket and process, with the measured cost of each attack and its limit. Linux only."""
