"""The command: from arguments to exit status."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from .._common.commands import INTERRUPTED, check_goes_with, complain, count, ended_by, number, print_any_name
from .._config.quotas import Quota
from .._config.tiers import parse_bytes
from ..errors import ConfigError, InvalidArgument
from .forecast import EVICTIONS, STORES, Forecast, Prices, Sizes, Speeds
from .page import write_page
from .replay import HINTS
from .report import as_json, as_text
from .trace import TraceError, read_trace

NAME = "plan"
HOST_GBS, DISK_GBS = 25.0, 3.5
GOES_WITH = {
    "host_gbs": "prefill_tokens_per_s",
    "disk_gbs": "prefill_tokens_per_s",
    "decode_tokens_per_s": "prefill_tokens_per_s",
    "disk_price_per_gib_month": "price_per_gib_month",
}
"""Options that have an effect only with another one, by name."""
POSITIVE = number("a number from 1e-9 on", lambda value: 1e-9 <= value < 1e15)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0: printed; 2: no such file, no trace, or an impossible size; 130: Ctrl-C."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    check_goes_with(parser, options, GOES_WITH)
    print_any_name()
    try:
        _run(options)
        sys.stdout.flush()
    except OSError as error:
        return ended_by(NAME, error)
    except ConfigError as error:
        return complain(NAME, f"argument --{error.argument.replace('_', '-')}: {error.problem}")
    except (TraceError, InvalidArgument) as error:
        return complain(NAME, str(error))
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="aoffload plan",
        description="What host memory and disk are worth buying: what a trace would have hit, moved and cost.",
        epilog="Sizes: 64GiB, 1TiB. Exit status: 0 good; 2 no such file, no trace or a bad size; 130 Ctrl-C.",
    )
    add = parser.add_argument
    add("trace", type=Path, metavar="TRACE", help="of aoffload.plan.Recorder, or a public one (docs/plan.md)")
    add("--kv-bytes-per-token", type=_size, required=True, metavar="N", help="of all layers together")
    add(
        "--device", type=_size, required=True, metavar="B", help="device memory for KV that requests leave to the cache"
    )
    add("--host", type=_sizes, default=(), metavar="B,B", help="sizes of host memory (the device's, doubled)")
    add("--disk", type=_sizes, default=(), metavar="B,B", help="sizes of a disk behind each of them, eager stores only")
    add(
        "--block-tokens",
        type=count(1, 2**31 - 1),
        metavar="N",
        help="tokens of a block of the trace (what it says, or 512)",
    )
    add("--limit", type=count(1, 2**31 - 1), metavar="N", help="only so many requests, from the first line on")
    add("--prefill-tokens-per-s", type=POSITIVE, metavar="C", help="what computes prompts: adds times to first token")
    add("--decode-tokens-per-s", type=POSITIVE, default=math.inf, metavar="D",
        help="what computes answers, all together (they take no time from prompts)")  # fmt: skip
    add("--host-gbs", type=POSITIVE, default=HOST_GBS, metavar="G", help="GB/s from the host (%(default)s)")
    add("--disk-gbs", type=POSITIVE, default=DISK_GBS, metavar="G", help="GB/s from the disk (%(default)s)")
    add("--price-per-gib-month", type=POSITIVE, metavar="P", help="of host memory: adds what it costs")
    add("--disk-price-per-gib-month", type=POSITIVE, metavar="P", help="of the disk")
    add("--store", type=_names(STORES), default=("eager",), metavar="S,S", help=f"{', '.join(STORES)} (eager)")
    add("--eviction", type=_names(EVICTIONS), default=("lru",), metavar="E,E", help=f"{', '.join(EVICTIONS)} (lru)")
    add("--hints", type=_names(HINTS), default=("none",), metavar="H,H",
        help="what --eviction learned is told at the end of each request: none; stop: why it ended, as the category; "
        "returns: the true time of the return, an upper bound on the gain of hints (none)")  # fmt: skip
    add(
        "--quota",
        type=_quota,
        action="append",
        default=[],
        metavar="NAME=FLOOR:CEILING",
        help="host memory of a tenant of the trace: adds rows with all quotas; either size may be empty; repeatable",
    )
    add("--html", type=Path, metavar="FILE", help="a picture, and the table, as one page")
    add("--json", action="store_true", help="print JSON in place of the table")
    return parser


def _run(options: argparse.Namespace) -> None:
    trace = read_trace(options.trace, options.block_tokens, options.limit)
    sizes = Sizes(options.kv_bytes_per_token, options.device, options.host, options.disk)
    forecast = Forecast(
        trace, sizes, _speeds(options), _prices(options), options.store, options.eviction, options.hints,
        _quotas(options),
    )  # fmt: skip
    if options.html is not None:  # before the table, because the output may be cut off after the table's beginning
        print(write_page(forecast, options.trace, options.html), file=sys.stderr)
    if options.json:
        print(json.dumps(as_json(forecast), indent=1))
    else:
        for line in as_text(forecast):
            print(line)


def _speeds(options: argparse.Namespace) -> Speeds | None:
    if options.prefill_tokens_per_s is None:
        return None
    return Speeds(
        prefill_tokens_per_s=options.prefill_tokens_per_s,
        host_gbs=options.host_gbs,
        disk_gbs=options.disk_gbs,
        decode_tokens_per_s=options.decode_tokens_per_s,
    )


def _prices(options: argparse.Namespace) -> Prices | None:
    host, disk = options.price_per_gib_month, options.disk_price_per_gib_month
    if host is None:
        return None
    if options.disk and disk is None:
        raise ConfigError("disk_price_per_gib_month", "is needed, too")
    return Prices(host, disk or 0.0)


def _quotas(options: argparse.Namespace) -> dict[str, Quota]:
    found = dict[str, Quota]()
    for name, quota in options.quota:
        if name in found:
            raise ConfigError("quota", f"was given twice for {name!r:.80}")
        found[name] = quota
    return found


def _quota(text: str) -> tuple[str, Quota]:
    name, _, bounds = text.rpartition("=")
    floor, colon, ceiling = bounds.partition(":")
    if not name or not colon or bounds == ":":
        raise argparse.ArgumentTypeError(f"must be NAME=FLOOR:CEILING, such as team-a=8GiB:, got {text!r:.80}")
    try:
        return name, Quota(host_floor=_size(floor) if floor else None, host_ceiling=_size(ceiling) if ceiling else None)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(f"the floor {error.problem}") from None


def _size(text: str) -> int:
    try:
        found = parse_bytes("size", text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(error.problem) from None
    if not found:
        raise argparse.ArgumentTypeError(f"must be at least a byte, got {text!r:.80}")
    return found


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(sorted({_size(part) for part in text.split(",")}))


def _names(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        wanted = text.split(",")
        if not set(wanted) <= set(known):
            raise argparse.ArgumentTypeError(f"must be of {', '.join(known)}, got {text!r:.80}")
        return tuple(name for name in known if name in wanted)

    return parse
