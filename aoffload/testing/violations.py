"""The error that an oracle raises when a law is broken."""

from __future__ import annotations

__all__ = ["Violation"]


class Violation(AssertionError):  # noqa: N818 - what it is, not an error of the caller
    """`oracle` names the law. The message says how it was broken."""

    def __init__(self, oracle: str, message: str) -> None:
        super().__init__(f"{oracle}: {message}")
        self.oracle = oracle
        self.message = message
