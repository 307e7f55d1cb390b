"""The command: from arguments to exit status."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from ..errors import InvalidArgument
from .look import Look, lines

__all__ = ["main", "watch"]

BAD_INPUT = 2
GONE = 1
INTERRUPTED = 130
TIMEOUT_S = 10.0
"""A scrape itself waits up to 5 s for the event loop."""
KEY_VARIABLE = "AOFFLOAD_API_KEY"
MAX_BYTES = 16 * 2**20
CLEAR = "\x1b[H\x1b[2J"


class NothingToShow(Exception):  # noqa: N818
    """There is no process with metrics of `aoffload` at the address."""


def main(arguments: Sequence[str] | None = None) -> int:
    """0: looked as often as wanted; 1: it has gone; 2: never seen; 130: Ctrl-C."""
    options = make_parser().parse_args(arguments)
    number = 0
    try:
        request = _request(options.url)
        looks = watch(lambda: _fetch(request), time.monotonic, time.sleep, options.interval, options.count)
        for number, text in enumerate(looks, 1):  # noqa: B007
            _show(f"{options.url}, {time.strftime('%H:%M:%S')}\n{text}\n")
    except InvalidArgument as error:
        return _complain(str(error), BAD_INPUT)
    except NothingToShow as error:
        return _complain(f"{options.url}: {error}", GONE if number else BAD_INPUT)
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def watch(
    fetch: Callable[[], str],
    clock: Callable[[], float],
    sleep: Callable[[float], None],
    interval_s: float,
    count: int | None = None,
) -> Iterator[str]:
    """A look each `interval_s` seconds: `count` of them, or for ever. Raises `NothingToShow`."""
    before = None
    for number in itertools.count(1):
        look = _look(fetch(), clock())
        yield "\n".join(lines(look, before))
        before = look
        if number == count:
            return
        sleep(interval_s)


def _show(text: str) -> None:
    print((CLEAR if sys.stdout.isatty() else "") + text, flush=True)


def _look(text: str, at_s: float) -> Look:
    try:
        look = Look.of(text, at_s)
    except ValueError as error:
        raise NothingToShow("what is there are no metrics") from error
    if not look.values:
        raise NothingToShow("no metric of aoffload is there")
    return look


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="aoffload top",
        description="A live view of a running process, from its metrics.",
        epilog="AOFFLOAD_API_KEY is sent along where it is set. "
        "Exit status: 0 good; 1 the process has gone; 2 there is none; 130 Ctrl-C.",
    )
    parser.add_argument("url", metavar="URL", help="of the metrics, such as http://127.0.0.1:8000/metrics")
    parser.add_argument("--interval", type=_seconds, default=2.0, metavar="S", help="seconds between two looks (2)")
    parser.add_argument("--count", type=_count, metavar="N", help="looks; without it, until Ctrl-C")
    return parser


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError("must be from 0.1 to 3600")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _request(url: str) -> Request:
    try:
        is_web = urlsplit(url).scheme in ("http", "https")
    except ValueError:
        is_web = False
    if not is_web:
        raise InvalidArgument("url", f"must begin with http:// or https://, got {url!r:.100}")
    key = os.environ.get(KEY_VARIABLE)
    return Request(url, headers={"authorization": f"Bearer {key}"} if key else {})


def _fetch(request: Request) -> str:
    try:
        with urlopen(request, timeout=TIMEOUT_S) as answer:
            body: bytes = answer.read(MAX_BYTES)
    except HTTPError as error:
        raise NothingToShow(f"{error.code} {error.reason}") from error
    except (OSError, HTTPException, ValueError) as error:
        raise NothingToShow(f"no answer: {getattr(error, 'reason', error)}") from error
    return body.decode("utf-8", "replace")


def _complain(problem: str, status: int) -> int:
    print(f"aoffload top: {problem}", file=sys.stderr)
    return status
