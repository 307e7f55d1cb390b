"""The command line."""

from __future__ import annotations

import argparse
import enum
import math
from collections.abc import Sequence
from pathlib import Path

import attrs

from .._common.commands import check_goes_with, count, number
from .._reference.engine.models import MODEL_NAMES

MAX_BLOCKS = 1_000_000
SHARE = number("a number in [0, 1]", lambda value: 0 <= value <= 1)
SPEED = number("a positive number of gigabytes a second", lambda value: 0 < value < math.inf)
STORE_POLICIES = ("eager", "lazy", "selective", "off")
"""Choices for `OffloadConfig.store_policy`, which checks whether the policy exists."""
EVICTIONS = ("lru", "learned")
LOAD_CHOICES = ("always", "cost")
"""Choices for `OffloadConfig.load_choice`."""


class Corrupt(enum.Enum):
    """The moment at which `--corrupt` exchanges two loaded blocks."""

    BOTH = "both"
    CHECKSUM = "checksum"
    """Before they are verified. The checksum has to catch it."""
    LOGITS = "logits"
    """After they were verified. Only the logits can show it."""


@attrs.frozen(kw_only=True)
class DemoOptions:
    backend: str = "asyncio"
    num_requests: int = 32
    num_device_blocks: int | None = None
    """None: a number that suits the model."""
    num_host_blocks: int | None = None
    device: str = "cpu"
    cancel_rate: float = 0.0
    model: str = "tiny"
    store: str = "eager"
    load: str = "always"
    host_gbs: float | None = None
    """Speed of loads from host memory. None: not limited."""
    eviction: str = "lru"
    seed: int = 0
    log: Path | None = None
    record: Path | None = None
    json: Path | None = None
    corrupt: Corrupt | None = None
    layered: bool = False
    disk: Path | None = None
    """The directory of a disk tier. A second demo can use its contents."""
    remote: str | None = None
    """The URL of a store, which demos on other machines may share."""
    remote_secret: Path | None = None
    """A file with the secret for the store's contents."""


def make_parser() -> argparse.ArgumentParser:
    default = DemoOptions()
    parser = argparse.ArgumentParser(
        prog="aoffload demo",
        description="Serve the same conversations three times: on a device pool with space for all of them, on a small "
        "pool without offload, and on the small pool with offload. Compare answers, logits and times.",
        epilog="Exit status: 0 for success; 1 if answers differ, a block is corrupt or a pin is left; 2 for a wrong "
        "option; 130 after Ctrl-C.",
    )
    add = parser.add_argument
    add("--backend", choices=("asyncio", "trio"), default=default.backend, help="the event loop (default: %(default)s)")
    add("--requests", dest="num_requests", type=count(1, 100_000), default=default.num_requests, metavar="N",
        help="the number of turns in all conversations (default: %(default)s)")  # fmt: skip
    add("--device-blocks", dest="num_device_blocks", type=count(1, MAX_BLOCKS), metavar="N",
        help="the number of blocks of the small device pool (default: 128, or as many as a model with "
        "windows needs)")  # fmt: skip
    add("--host-blocks", dest="num_host_blocks", type=count(1, MAX_BLOCKS), metavar="N",
        help="the number of blocks in host memory (default: 2048 for each group of layers)")  # fmt: skip
    add("--device", choices=("cpu", "cuda"), default=default.device, help="where the model runs (default: %(default)s)")
    add("--cancel-rate", type=SHARE, default=default.cancel_rate, metavar="P",
        help="the share of clients that disconnect at random points, in the run with offload (default: 0)")  # fmt: skip
    add("--model", default=default.model, metavar="|".join((*MODEL_NAMES, "DIR")),
        help="the name of a small model with random weights, or a directory with a model (default: "
        "%(default)s)")  # fmt: skip
    add("--store", choices=STORE_POLICIES, default=default.store,
        help="which blocks are copied to host memory, in the run with offload (default: %(default)s)")  # fmt: skip
    add("--load", choices=LOAD_CHOICES, default=default.load,
        help="which hits are loaded from host memory, in the run with offload: all, or only those that "
        "load faster than they are computed (default: %(default)s)")  # fmt: skip
    add("--host-gbs", type=SPEED, metavar="GB/S",
        help="slow loads from host memory down to this speed, in the run with offload")  # fmt: skip
    add("--eviction", choices=EVICTIONS, default=default.eviction,
        help="which blocks are evicted first, in the run with offload (default: %(default)s)")  # fmt: skip
    add("--seed", type=count(0, 2**63 - 1), default=default.seed, metavar="N",
        help="the seed of weights and workload (default: %(default)s)")  # fmt: skip
    add("--log", type=Path, metavar="FILE", help="write each event as a line of JSON to this file")
    add("--record", type=Path, metavar="FILE",
        help="record the requests of the run with offload in this new file, as a trace for aoffload plan")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write the result to this file")
    add("--corrupt", type=_corrupt, nargs="?", const=Corrupt.BOTH, metavar="both|checksum|logits",
        help="exchange two loaded blocks on purpose, before and after their checksums are compared")  # fmt: skip
    add("--layered", action="store_true",
        help="add a fourth run, with offload, which starts to compute a prompt while its prefix is loaded "
        "layer by layer")  # fmt: skip
    add("--disk", type=Path, metavar="DIR",
        help="add a disk tier of 1 GiB in this directory to the run with offload; the next demo finds its "
        "blocks there")  # fmt: skip
    add("--remote", metavar="URL",
        help="add a store that servers share, such as redis://localhost, to the run with offload; other "
        "demos find its blocks there")  # fmt: skip
    add("--remote-secret", type=Path, metavar="FILE",
        help="a file with the secret that encrypts the blocks in the store")  # fmt: skip
    return parser


def parse_options(arguments: Sequence[str] | None = None) -> DemoOptions:
    """The options. For invalid ones, it prints a message and exits with status 2."""
    parser = make_parser()
    found = parser.parse_args(arguments)
    check_goes_with(parser, found, {"remote_secret": "remote"})
    options = DemoOptions(**vars(found))
    if options.host_gbs is not None and options.corrupt is not None:
        parser.error("argument --host-gbs: cannot be combined with --corrupt, which uses its own copy backend")
    return options


def _corrupt(text: str) -> Corrupt:
    try:
        return Corrupt(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be 'both', 'checksum' or 'logits', got {text!r}") from None
