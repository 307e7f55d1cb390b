"""The command: from arguments to exit status."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from .._common.commands import (
    INTERRUPTED,
    check_goes_with,
    complain,
    count,
    ended_by,
    number,
    print_any_name,
    print_aside,
    print_lines,
)
from .._config.model_layout import groups_of
from .._config.quotas import Quota
from .._config.tiers import parse_bytes
from ..errors import ConfigError, InvalidArgument
from ..trace.output import whole_file
from .forecast import EVICTIONS, STORES, Forecast, Prices, Sizes, Speeds
from .mixes import MIXES, Made, make_mix
from .page import write_page
from .replay import HINTS
from .report import as_json, as_text
from .trace import DEFAULT_BLOCK_TOKENS, Trace, TraceError, parse_trace, read_trace

NAME = "plan"
HOST_GBS, DISK_GBS = 25.0, 3.5
SMALL = 10_000
"""A size below, without a unit, was probably meant in GiB."""
MIX_DEFAULTS = {"kv_bytes_per_token": 128 * 2**10, "device": 40 * 2**30, "prefill_tokens_per_s": 25_000.0}
"""What `--mix` assumes where the option is not given: a model of 8 billion parameters with 8 KV heads in bfloat16."""
GOES_WITH = {
    "host_gbs": "prefill_tokens_per_s",
    "disk_gbs": "prefill_tokens_per_s",
    "decode_tokens_per_s": "prefill_tokens_per_s",
    "disk_price_per_gib_month": "price_per_gib_month",
    "users": "mix",
    "save_mix": "mix",
}
"""Options that have an effect only with another one, by name."""
POSITIVE = number("a number from 1e-9 on", lambda value: 1e-9 <= value < 1e15)
DESCRIPTION = """\
Say how much host memory is worth buying for offloaded KV, from a trace of your requests. For each size, the plan has
the prompt tokens that would hit, the times to first token, the copies and the price. Without a trace, --mix plans an
invented workload.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0: printed; 2: no such file, no trace, or an impossible size; 130: Ctrl-C."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    _check(parser, options)
    try:
        print_any_name()
        _run(options)
        sys.stdout.flush()
    except OSError as error:
        return ended_by(NAME, error)
    except ConfigError as error:
        problem = error.problem + _with_unit(options, error)
        return complain(NAME, f"argument --{error.argument.replace('_', '-')}: {problem}")
    except (TraceError, InvalidArgument) as error:
        return complain(NAME, str(error))
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="aoffload plan",
        usage="aoffload plan TRACE --kv-bytes-per-token N --device B [options]\n"
        "       aoffload plan --mix MIX [options]",
        description=DESCRIPTION,
        epilog="B is a size such as 64GiB or 1TiB. Exit status: 0 success; 2 a missing file, a file that is no trace, "
        "or a bad option; 130 Ctrl-C.",
    )
    parser.add_argument("trace", type=Path, nargs="?", metavar="TRACE",
        help="a trace written by aoffload.plan.Recorder or `aoffload demo --record`, or a public trace in the same "
        "format (JSON lines; may end with .gz)")  # fmt: skip
    group = parser.add_argument_group("without a trace")
    group.add_argument("--mix", choices=tuple(MIXES), help="plan an invented workload in place of TRACE: chats, coding "
        "agents, or documents that are read once. The plan lists what the mix assumes")  # fmt: skip
    group.add_argument("--users", type=count(1, 10**6), metavar="N",
        help="users of the mix (default: as many as keep the device 70 %% busy if nothing is cached; so this number "
        "depends on --prefill-tokens-per-s)")  # fmt: skip
    group.add_argument("--save-mix", type=Path, metavar="FILE", help="also write the mix as a trace")
    _add_model(parser.add_argument_group("your model and machine"))
    _add_choices(parser.add_argument_group("what to compare"))
    _add_output(parser.add_argument_group("trace and output"))
    return parser


def _add_model(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--kv-bytes-per-token", type=_size, metavar="N",
        help="bytes of KV that a token takes in all layers together, such as 128KiB (with --mix: 128KiB)")  # fmt: skip
    add("--model", type=Path, metavar="PATH", help="config.json of the model, or its directory: computes "
        "--kv-bytes-per-token, for KV in the dtype of the weights")  # fmt: skip
    add("--device", type=_size, metavar="B",
        help="device memory for cached KV, not counting what running requests use (with --mix: 40GiB)")  # fmt: skip
    add("--prefill-tokens-per-s", type=POSITIVE, metavar="C",
        help="prompt tokens that the whole service computes in a second; adds times to first token (with --mix: "
        "25000)")  # fmt: skip
    add("--decode-tokens-per-s", type=POSITIVE, default=math.inf, metavar="D",
        help="answer tokens that the whole service computes in a second; delays prompts accordingly (default: answers "
        "do not delay prompts)")  # fmt: skip
    add("--host-gbs", type=POSITIVE, default=HOST_GBS, metavar="G",
        help="speed of copies from host memory to the device, in GB/s (default: %(default)s)")  # fmt: skip
    add("--disk-gbs", type=POSITIVE, default=DISK_GBS, metavar="G",
        help="speed of reads from the disk, in GB/s (default: %(default)s)")  # fmt: skip


def _add_choices(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--host", type=_sizes, default=(), metavar="B,B",
        help="sizes of host memory (default: the size of --device, doubled until everything fits, at most 8 sizes)",
    )  # fmt: skip
    add("--disk", type=_sizes, default=(), metavar="B,B",
        help="sizes of a disk; adds a row for each host size, only with eager stores and LRU eviction")  # fmt: skip
    add("--price-per-gib-month", type=POSITIVE, metavar="P", help="price of a GiB of host memory for a month; adds a "
        "column, and the advice names the cheapest size that is enough")  # fmt: skip
    add("--disk-price-per-gib-month", type=POSITIVE, metavar="P", help="price of a GiB of disk for a month")
    add("--store", type=_names(STORES), default=("eager",), metavar="S,S",
        help=f"store policies: {', '.join(STORES)} (default: eager)")  # fmt: skip
    add("--eviction", type=_names(EVICTIONS), default=("lru",), metavar="E,E",
        help=f"eviction orders: {', '.join(EVICTIONS)} (default: lru)")  # fmt: skip
    add("--hints", type=_names(HINTS), default=("none",), metavar="H,H",
        help="hints that learned eviction gets at the end of each request: none; stop: the reason why the answer "
        "ended, as the category; returns: the true time of the return, which is an upper bound on the gain of hints "
        "(default: none)")  # fmt: skip
    add("--quota", type=_quota, action="append", default=[], metavar="NAME=FLOOR:CEILING",
        help="host memory of a tenant of the trace; adds rows in which all quotas hold. Either size may be empty. Give "
        "the option once for each tenant")  # fmt: skip


def _add_output(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--block-tokens", type=count(1, 2**31 - 1), metavar="N",
        help="tokens in a block of the trace (default: what the trace says, or 512)")  # fmt: skip
    add("--limit", type=count(1, 2**31 - 1), metavar="N", help="plan only the first N requests of the trace")
    add("--html", type=Path, metavar="FILE", help="also write the plan as a page with charts")
    add("--json", action="store_true", help="print JSON instead of the table")


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exit with an error of the parser if an option is missing or has no effect. Fills in what a mix assumes."""
    if (options.trace is None) == (options.mix is None):
        parser.error("give either TRACE, a file, or --mix, an invented workload")
    if options.model is not None and options.kv_bytes_per_token is not None:
        parser.error("argument --model: has no effect with --kv-bytes-per-token")
    if options.mix is not None:
        for name, value in MIX_DEFAULTS.items():
            if getattr(options, name) is None and not (name == "kv_bytes_per_token" and options.model is not None):
                setattr(options, name, value)
    check_goes_with(parser, options, GOES_WITH)
    if options.kv_bytes_per_token is None and options.model is None:
        parser.error("argument --kv-bytes-per-token: either this or --model is required with TRACE")
    if options.device is None:
        parser.error("argument --device: is required with TRACE")
    if options.save_mix is not None and (options.save_mix.suffix == ".gz" or str(options.save_mix) == "-"):
        parser.error(f"argument --save-mix: must name a file that is not compressed, got {str(options.save_mix)!r:.80}")


def _run(options: argparse.Namespace) -> None:
    kv_bytes = options.kv_bytes_per_token if options.model is None else _kv_bytes_of(options.model)
    trace, made = _trace(options)
    sizes = Sizes(kv_bytes, options.device, options.host, options.disk)
    forecast = Forecast(
        trace, sizes, _speeds(options), _prices(options), options.store, options.eviction, options.hints,
        _quotas(options),
    )  # fmt: skip
    if options.html is not None:  # before the table, because the output may be cut off after the table's beginning
        print_aside(write_page(forecast, options.trace or options.save_mix, options.html, made))
    if options.json:
        print(json.dumps(as_json(forecast, made), indent=1))
    else:
        print_lines(as_text(forecast, made))


def _trace(options: argparse.Namespace) -> tuple[Trace, Made | None]:
    if options.mix is None:
        return read_trace(options.trace, options.block_tokens, options.limit), None
    block_tokens = options.block_tokens or DEFAULT_BLOCK_TOKENS
    made = make_mix(options.mix, block_tokens, options.prefill_tokens_per_s, options.users)
    if options.save_mix is not None:
        with whole_file(options.save_mix) as output:
            output.writelines(f"{line}\n" for line in made.lines)
    return parse_trace(f"mix {options.mix}", made.lines, limit=options.limit), made


def _kv_bytes_of(model: Path) -> int:
    try:
        return groups_of(model).bytes_per_token
    except ConfigError as error:
        raise ConfigError("model", error.problem) from error


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
        raise ConfigError("disk_price_per_gib_month", "is required with --disk and --price-per-gib-month")
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


class _NoUnit(int):
    """A size without a unit: bytes, unless the unit was forgotten."""


def _size(text: str) -> int:
    try:
        found = parse_bytes("size", text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(error.problem) from None
    if not found:
        raise argparse.ArgumentTypeError(f"must be at least a byte, got {text!r:.80}")
    return _NoUnit(found) if text.strip().isdecimal() else found


def _with_unit(options: argparse.Namespace, error: ConfigError) -> str:
    """The size that was probably meant, if the error is about a small size without a unit."""
    sizes = {"device": (options.device,), "host": options.host, "disk": options.disk}.get(error.argument, ())
    smallest = min(sizes, default=None)  # the error is about this one
    is_small = isinstance(smallest, _NoUnit) and smallest < SMALL
    return f" (did you mean {smallest}GiB?)" if is_small else ""


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(sorted({_size(part) for part in text.split(",")}))


def _names(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        wanted = text.split(",")
        if not set(wanted) <= set(known):
            raise argparse.ArgumentTypeError(f"must be of {', '.join(known)}, got {text!r:.80}")
        return tuple(name for name in known if name in wanted)

    return parse
