"""The share of a long run that one change has to pass. The commit chooses it, so that some commits together run all."""

from __future__ import annotations

import argparse
import subprocess

__all__ = ["add_share", "number_of_commit", "share_of"]


def number_of_commit() -> int:
    """The checked-out commit as a number. 0 without a repository."""
    found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return int(found.stdout.strip() or "0", 16)


def add_share(parser: argparse._ActionsContainer, name: str, num_shares: int, about: str) -> None:
    """The option `--NAME` for a share: empty for everything, `auto`, or a number below `num_shares`."""
    numbers = map(str, range(num_shares))
    parser.add_argument(f"--{name}", default="", choices=["auto", *numbers], help=f"of {about}; auto: by the commit")


def share_of(given: str, num_shares: int, what: str) -> int | None:
    """Which share to run: the one that was given, or the commit's for `auto`. It is printed. None: everything."""
    if not given:
        return None
    share = number_of_commit() % num_shares if given == "auto" else int(given)
    print(f"{what}: share {share} of {num_shares}", flush=True)
    return share
