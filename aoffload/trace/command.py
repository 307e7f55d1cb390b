"""The command: from arguments to exit status."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from .._common.commands import INTERRUPTED, complain, ended_by, print_any_name, print_lines
from .events import time_of
from .figures import Figures
from .narrative import UnknownError, narrative
from .page import write_page
from .perfetto import write_perfetto
from .scan import EmptyLogError, Scan
from .summary import summary
from .wording import plain

NAME = "trace"
MAX_NAMED = 8


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0: written; 2: no such log, no such request, or no place to write to; 130: Ctrl-C."""
    options = make_parser().parse_args(arguments)
    try:
        print_any_name()
        run: Callable[[argparse.Namespace], None] = options.run
        run(options)
        sys.stdout.flush()
    except OSError as error:
        return ended_by(NAME, error)
    except EmptyLogError as error:
        before = "" if options.until is None else ", or none before --until"
        found = f"no event of aoffload in it{before}: {error}"
        return complain(NAME, f"{options.log}: {found}; docs/howto/logs-and-spans.md shows how to write a log")
    except UnknownError as error:
        return complain(NAME, str(error))
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="aoffload trace",
        description="Explain a log of events: show its requests, copies and memory pools.",
        epilog="Exit status: 0 for success; 2 if the log, the request or the output directory does not exist; 130 "
        "after Ctrl-C.",
    )
    parser.add_argument("log", type=Path, metavar="LOG", help="a file of JSON lines; - for standard input")
    _add_until(parser, None)
    parser.set_defaults(run=_summary, runtime="")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    add = commands.add_parser
    whole = add(
        "summary", help="print percentiles of each state, the slowest requests, and why requests ended (default)"
    )
    whole.add_argument("--runtime", default="", metavar="NAME", help="show only the runtime with this name or number")
    whole.set_defaults(run=_summary)
    request = add("request", help="print the timeline of one request in plain words")
    request.add_argument("request_id", metavar="ID")
    request.set_defaults(run=_request)
    page = add("html", help="write an HTML page with requests, copies and memory over time")
    page.add_argument("file", type=Path, metavar="FILE")
    page.set_defaults(run=_page)
    perfetto = add("perfetto", help="write a trace for the Perfetto viewer (ui.perfetto.dev) or chrome://tracing")
    perfetto.add_argument("file", type=Path, metavar="FILE")
    perfetto.set_defaults(run=_perfetto)
    for command in (whole, request, page, perfetto):
        _add_until(command, argparse.SUPPRESS)  # the default would override an option given before the command
    return parser


def _add_until(parser: argparse.ArgumentParser, default: object) -> None:
    parser.add_argument(
        "--until", type=_until, default=default, metavar="TIME",
        help="the time at which the log ends, as ISO 8601 (UTC), seconds since 1970, or now: later events are ignored, "
        "and open states last until then (default: the last event)",
    )  # fmt: skip


def _until(text: str) -> float:
    if text == "now":
        return time.time()
    try:
        value: float | str = float(text)
    except ValueError:
        value = text
    at_s = time_of(value)
    if at_s is None:
        raise argparse.ArgumentTypeError(f"must be a time such as 2026-11-21T21:50:16, got {plain(text)!r}")
    return at_s


def _summary(options: argparse.Namespace) -> None:
    figures = Figures(options.runtime)
    scan = Scan.of(options.log, figures, sys.stderr, options.until)
    scan.run()
    if options.runtime and not any(life.is_called(options.runtime) for life in scan.runtimes.lives):
        raise UnknownError(_no_runtime(options, scan))
    print_lines(summary(scan, figures))


def _no_runtime(options: argparse.Namespace, scan: Scan) -> str:
    names = ", ".join(life.name for life in scan.runtimes.lives[:MAX_NAMED])
    return f"no runtime {plain(options.runtime)!r} in {options.log}; there are: {names}"


def _request(options: argparse.Namespace) -> None:
    print_lines(narrative(options.log, options.request_id, sys.stderr, options.until))


def _page(options: argparse.Namespace) -> None:
    print_lines([write_page(options.log, options.file, sys.stderr, options.until)])


def _perfetto(options: argparse.Namespace) -> None:
    print_lines([write_perfetto(options.log, options.file, sys.stderr, options.until)])
