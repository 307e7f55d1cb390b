"""Shares of a long run: a change runs one share. The commit chooses which one, so that over time all shares run."""

from __future__ import annotations

import argparse
import subprocess

__all__ = ["add_share", "number_of_commit", "share_of"]


def number_of_commit() -> int:
    """The checked-out commit as a number. 0 without a repository."""
    found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return int(found.stdout.strip() or "0", 16)


def add_share(parser: argparse._ActionsContainer, name: str, num_shares: int, about: str) -> None:
    """Add the option `--NAME`: a number below `num_shares`, or `auto`. Without it, everything runs."""
    numbers = map(str, range(num_shares))
    parser.add_argument(
        f"--{name}",
        default="",
        choices=["auto", *numbers],
        help=f"run one share of {about}: its number, or auto (the commit chooses)",
    )


def share_of(given: str, num_shares: int, what: str) -> int | None:
    """The number of the share to run, which is also printed; None: run everything. `auto`: the commit chooses."""
    if not given:
        return None
    share = number_of_commit() % num_shares if given == "auto" else int(given)
    print(f"{what}: share {share} of 0 to {num_shares - 1}", flush=True)
    return share
