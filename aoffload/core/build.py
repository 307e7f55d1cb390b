"""Which build of the core runs: the source as it is, or the same source compiled by mypyc."""

from __future__ import annotations

__all__ = ["is_compiled"]

is_compiled: bool = not __file__.endswith((".py", ".pyc"))
