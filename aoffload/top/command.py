"""The command: shows the metrics of a process, refreshed at an interval."""

from __future__ import annotations

import argparse
import itertools
import math
import os
import queue
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.client import HTTPException, IncompleteRead
from textwrap import wrap
from typing import Any, Self, TextIO
from urllib.error import HTTPError
from urllib.parse import urljoin, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

import attrs
from prometheus_client.parser import text_string_to_metric_families

from .. import Tier
from .._common.commands import INTERRUPTED, abandon_output, complain, count, ended_by, number, print_any_name
from ..errors import InvalidArgument
from ..trace.output import text_table
from ..trace.wording import plain

# -- look ------------------------------------------------------------------------------------------------------------
#
# The metrics of a process at one time, and a description of them in lines.

STATES = ("running", "loading", "pinned", "allocated", "matched", "draining", "requeued", "stranded", "preempted")
TIERS = tuple(tier.name.lower() for tier in Tier)
BLOCK_STATES = ("free", "cached", "pinned", "quarantined")
FINISHED = "aoffload_requests_finished_total"
USES = {"ask": "questions", "load": "loads", "store": "stores"}
OLD_SNAPSHOT_S = 5.0
"""The event loop answers at each scrape, so an older snapshot means that the loop is blocked."""

LARGEST = 1e18
"""Larger values are cut to this one, because no count is so large and its digits would fill the screen."""


@attrs.frozen
class Look:
    at_s: float
    """Time by a monotonic clock."""
    values: Mapping[tuple[str, frozenset[tuple[str, str]]], float]
    """Values by name of the sample and labels. Samples that are not finite are left out."""

    @classmethod
    def of(cls, text: str, at_s: float) -> Look:
        """Raises `ValueError` for a text that is not in the format of Prometheus."""
        samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
        return cls(
            at_s,
            {
                (sample.name, frozenset(sample.labels.items())): min(max(sample.value, -LARGEST), LARGEST)
                for sample in samples
                if sample.name.startswith("aoffload_") and math.isfinite(sample.value)
            },
        )

    def get(self, name: str, **labels: str) -> float:
        """The sum over the samples of `name` that have these labels."""
        wanted = labels.items()
        return sum(value for (found, has), value in self.values.items() if found == name and wanted <= has)

    def rate(self, before: Look | None, name: str, **labels: str) -> float:
        """Increase of a counter per second since `before`. If the process was restarted, it counts from 0."""
        if before is None or self.at_s <= before.at_s:
            return 0.0
        grown = self.get(name, **labels) - before.get(name, **labels)
        return max(0.0, grown) / (self.at_s - before.at_s)

    def hit_share(self, before: Look | None) -> str:
        """Of the prompt tokens since `before`, or of all, the share that was found in a cache."""
        counts = {source: self.get(TOKENS, source=source) for source in SOURCES}
        if before is not None:
            counts = {source: self.rate(before, TOKENS, source=source) for source in SOURCES}
        return _share(counts["device_hit"] + counts["host_hit"], sum(counts.values()))


UNKNOWN = "-"
TOKENS, COPIED = "aoffload_tokens_total", "aoffload_copied_bytes_total"
SOURCES = {"device_hit": "found on device", "host_hit": "found in host", "computed": "computed"}
INDENT = " " * 11


def lines(look: Look, before: Look | None, width: int = 80) -> Iterator[str]:
    """A summary for people, in lines of at most `width` columns if that is at least 30. Rates are those since `before`.
    Without it they are unknown."""
    for text in (*_warnings(look), *_requests(look, before)):
        yield from wrap(text, width, subsequent_indent=INDENT)
    yield ""
    yield from _tokens(look, before, width)
    yield ""
    yield from _memory(look, before, width)
    yield ""
    for text in (*_engine_blocks(look), *_eviction(look), _copies(look)):
        yield from wrap(text, width, subsequent_indent=INDENT)


def _requests(look: Look, before: Look | None) -> Iterator[str]:
    yield "requests   " + (", ".join(_of_state(look, state) for state in STATES if _number(look, state)) or "none")
    if before is not None:
        done, aborted = (look.rate(before, FINISHED, outcome=outcome) for outcome in ("done", "aborted"))
        yield f"finished   {done:,.1f}/s done, {aborted:,.1f}/s aborted"
    waiting = look.get("aoffload_requests_waiting")
    if waiting:
        yield f"waiting    {waiting:,.0f} for blocks, the first for {look.get('aoffload_oldest_wait_seconds'):,.1f} s"
    if number := look.get("aoffload_fetching_requests"):
        parts = _by_tier(look, "aoffload_fetching_tokens")
        tokens = " and ".join(f"{value:,.0f} tokens from {tier}" for tier, value in parts.items() if value)
        yield f"fetching   {number:,.0f} requests: {tokens or 'tokens that other requests fetch'}"
    step_s = look.get("aoffload_oldest_step_seconds")
    if step_s:
        yield f"steps      the oldest is open for {step_s:,.1f} s"


def _number(look: Look, state: str) -> float:
    return look.get("aoffload_requests", state=state)


def _of_state(look: Look, state: str) -> str:
    oldest_s = look.get("aoffload_oldest_request_seconds", state=state)
    return f"{_number(look, state):,.0f} {state} (longest {oldest_s:,.1f} s)"


def _tokens(look: Look, before: Look | None, width: int) -> Iterator[str]:
    now = UNKNOWN if before is None else look.hit_share(before)
    yield from wrap(f"hit share  {now} now, {look.hit_share(None)} since the start", width, subsequent_indent=INDENT)
    rows = [["tokens", "per s", "share"]]
    rates = {source: look.rate(before, TOKENS, source=source) for source in SOURCES}
    for source, words in SOURCES.items():
        share = _share(rates[source], sum(rates.values()))
        rows.append([words, UNKNOWN if before is None else f"{rates[source]:,.0f}", share])
    yield from stacked(rows, width)


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else UNKNOWN


def _memory(look: Look, before: Look | None, width: int) -> Iterator[str]:
    """A row for each tier, from the one nearest to the compute down. Bytes are those copied from it and to it."""
    rows = [["memory", "blocks", *BLOCK_STATES, "loaded", "stored"]]
    blocks, copied, pools = (_by_tier(look, name) for name in ("aoffload_blocks", COPIED, "aoffload_pool_blocks"))
    for tier in TIERS:
        if tier not in {*blocks, *copied, *TIERS[:2]}:
            continue
        known = BLOCK_STATES if tier in pools else BLOCK_STATES[2:] if tier in blocks else ()
        counts = [
            f"{look.get('aoffload_blocks', tier=tier, state=state):,.0f}" if state in known else UNKNOWN
            for state in BLOCK_STATES
        ]
        rates = [UNKNOWN, UNKNOWN]
        if before is not None and tier in copied:
            rates = [byte_rate(look.rate(before, COPIED, direction=way, tier=tier)) for way in ("load", "store")]
        rows.append([tier, f"{pools[tier]:,.0f}" if tier in pools else UNKNOWN, *counts, *rates])
    yield from stacked(rows, width)


def byte_rate(num_bytes: float) -> str:
    """Three digits and a unit."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while num_bytes >= 999.5 and len(units) > 1:
        num_bytes /= 1024
        del units[0]
    digits = 0 if units[0] == "B" or num_bytes >= 99.95 else 1 if num_bytes >= 9.995 else 2
    return f"{num_bytes:.{digits}f} {units[0]}/s"


def stacked(rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    """The lines of a table. If it is wider than `width`, its columns follow in further tables below it, each with the
    first column."""
    first, *rest = zip(*rows, strict=True)
    while rest:
        number = len(rest)
        while number > 1 and len(max(table_of(first, rest[:number]), key=len)) > width:
            number -= 1
        yield from table_of(first, rest[:number])
        rest = rest[number:]


def table_of(first: Sequence[str], rest: Sequence[Sequence[str]]) -> list[str]:
    return text_table(list(zip(first, *rest, strict=True)))


def _by_tier(look: Look, name: str) -> dict[str, float]:
    """The sums of a metric by its label `tier`, for tiers that are exported."""
    found = {dict(labels).get("tier", "") for sample, labels in look.values if sample == name}
    return {tier: look.get(name, tier=tier) for tier in TIERS if tier in found}


def _engine_blocks(look: Look) -> Iterator[str]:
    if "device" not in _by_tier(look, "aoffload_pool_blocks"):
        yield "device     the blocks are the engine's: only those that copies hold are known"


def _eviction(look: Look) -> Iterator[str]:
    """For learned eviction: the order in use in each tier."""
    ruled = _by_tier(look, "aoffload_eviction_learned")
    if ruled:
        orders = ", ".join(f"{tier} {'learned' if on else 'least recently used'}" for tier, on in ruled.items())
        yield f"eviction   {orders}"


def _copies(look: Look) -> str:
    return "copies     " + ", ".join(
        f"{look.get('aoffload_jobs', state=state):,.0f} {state}" for state in ("queued", "launched", "quarantined")
    )


def _warnings(look: Look) -> Iterator[str]:
    if look.get("aoffload_cache_off"):
        yield "WARNING    the cache is off: nothing is loaded or stored any more"
    for tier, is_off in _by_tier(look, "aoffload_storage_off").items():
        if is_off:
            yield f"WARNING    {tier} is off: nothing is fetched from it or stored there any more"
    for tier in _by_tier(look, "aoffload_storage_left_alone"):
        uses = [name for use, name in USES.items() if look.get("aoffload_storage_left_alone", tier=tier, use=use)]
        if uses:
            yield f"WARNING    {tier} fails, so for a while it gets no {' and no '.join(uses)}"
    if look.get("aoffload_loads_paused"):
        yield "WARNING    loads are paused: too many of the engine's blocks are in quarantine"
    age_s = look.get("aoffload_snapshot_age_seconds")
    if age_s > OLD_SNAPSHOT_S:
        yield f"WARNING    these figures are {age_s:,.0f} s old: the event loop does not answer"


# -- screen ----------------------------------------------------------------------------------------------------------

ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""To the alternate screen, without a cursor, and back."""
HOME, CLEAR_LINE, CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
PLAIN_WIDTH = 120
TERMINATED = 128 + signal.SIGTERM


@attrs.define(eq=False)
class Screen:
    """Shows views in place on a terminal, and leaves the last one there at the end. Elsewhere, prints one after the
    other."""

    stream: TextIO
    _is_terminal: bool = False
    _last: list[str] = attrs.field(factory=list)
    _handler: Any = None

    def __enter__(self) -> Self:
        self._is_terminal = self.stream.isatty() and os.environ.get("TERM") != "dumb"
        if self._is_terminal:
            if threading.current_thread() is threading.main_thread():
                self._handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
            self._write(ENTER)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._is_terminal:
                self._write(LEAVE + "".join(f"{line}\n" for line in self._last))
        except OSError:  # the terminal was closed: what ended the command must still reach the caller
            abandon_output()
        finally:
            if self._handler is not None:
                signal.signal(signal.SIGTERM, self._handler)

    @property
    def width(self) -> int:
        return shutil.get_terminal_size().columns if self._is_terminal else PLAIN_WIDTH

    def show(self, view: list[str]) -> None:
        if not self._is_terminal:
            self._write("".join(f"{line}\n" for line in (*view, "")))
            return
        self._last = view
        columns, num_lines = shutil.get_terminal_size()
        shown = (f"{line[:columns]}{CLEAR_LINE}" for line in view[:num_lines])  # one more would scroll
        self._write(HOME + "\r\n".join(shown) + CLEAR_BELOW)

    def _write(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()


# -- command ---------------------------------------------------------------------------------------------------------

GONE = 1
INTERVAL = number("from 0.1 to 3600", lambda value: 0.1 <= value <= 3600)
TIMEOUT_S = 10.0
"""A scrape itself waits up to 5 s for the event loop."""
KEY_VARIABLE = "AOFFLOAD_API_KEY"
MAX_BYTES = 16 * 2**20


class NothingToShow(Exception):  # noqa: N818
    """There is no process with metrics of `aoffload` at the address. The text follows the address."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0: all views shown; 1: the process has ended; 2: never reached, or the output can't be written; 130:
    Ctrl-C."""
    options = make_parser().parse_args(arguments)
    num_seen = 0
    try:
        print_any_name()
        request = _request(options.url)
        looks = watch(lambda: _fetch(request), time.monotonic, time.sleep, options.interval, options.count)
        with Screen(sys.stdout) as screen:
            for num_seen, (look, before) in enumerate(looks, 1):  # noqa: B007
                title = f"{options.url}  {time.strftime('%H:%M:%S')}, every {options.interval:g} s"
                screen.show([*wrap(plain(title), screen.width), "", *lines(look, before, screen.width)])
    except InvalidArgument as error:
        return complain("top", str(error))
    except NothingToShow as error:
        bad_input = complain("top", f"{options.url} {error}")
        return GONE if num_seen else bad_input
    except OSError as error:
        return ended_by("top", error)
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def watch(
    fetch: Callable[[], str],
    clock: Callable[[], float],
    sleep: Callable[[float], None],
    interval_s: float,
    count: int | None = None,
) -> Iterator[tuple[Look, Look | None]]:
    """A look every `interval_s` seconds and the one before, `count` times or for ever. Raises `NothingToShow`."""
    before = None
    for num_looks in itertools.count(1):
        look = _look(fetch(), clock())
        yield look, before
        before = look
        if num_looks == count:
            return
        sleep(interval_s)


def _look(text: str, at_s: float) -> Look:
    try:
        look = Look.of(text, at_s)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        # The parser does not check its input. For example, a label without a name causes an IndexError.
        raise NothingToShow("answers with something else than metrics") from error
    if not look.values:
        of_vllm = ", only those of its vLLM connector" if "vllm:aoffload_" in text else ""
        raise NothingToShow(f"has no metrics of aoffload{of_vllm}")
    return look


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="aoffload top",
        description="Show live rates, the hit share and memory of a running process, from its metrics.",
        epilog="If AOFFLOAD_API_KEY is set, it is sent as the key. Exit status: 0 for success; 1 if the process has "
        "ended; 2 if it was never reached, or if the output can't be written; 130 after Ctrl-C.",
    )
    parser.add_argument("url", metavar="URL", help="the address of the metrics, such as http://127.0.0.1:8000/metrics")
    parser.add_argument(
        "--interval",
        type=INTERVAL,
        default=2.0,
        metavar="S",
        help="the seconds between two scrapes (default: 2)",
    )
    parser.add_argument(
        "--count", type=count(1, 2**31 - 1), metavar="N", help="the number of scrapes (default: until Ctrl-C)"
    )
    return parser


def _request(url: str) -> Request:
    try:
        is_web = urlsplit(url).scheme in ("http", "https")
    except ValueError:
        is_web = False
    if not is_web:
        raise InvalidArgument("url", f"must begin with http:// or https://, got {url!r:.100}")
    key = os.environ.get(KEY_VARIABLE)
    return Request(url, headers={"authorization": f"Bearer {key}"} if key else {})


class _NoRedirects(HTTPRedirectHandler):
    """Makes each redirect an error, because a redirected request would give the key to another host."""

    def http_error_302(self, *_: Any) -> None:
        """None leaves the redirect to the next handler, which raises it as an `HTTPError`."""

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302  # type: ignore[assignment]


def _fetch(request: Request) -> str:
    """The whole answer, within `TIMEOUT_S`. The timeout of a socket limits each read, so a server that sends one byte
    at a time could delay a scrape for ever. So a thread reads the answer, and continues alone after `TIMEOUT_S`."""
    answers = queue.SimpleQueue[str | NothingToShow]()
    threading.Thread(target=lambda: answers.put(_answer(request)), name="aoffload top", daemon=True).start()
    try:
        answer = answers.get(timeout=TIMEOUT_S)
    except queue.Empty:
        raise NothingToShow(f"does not answer within {TIMEOUT_S:g} s") from None
    if isinstance(answer, NothingToShow):
        raise answer
    return answer


def _answer(request: Request) -> str | NothingToShow:
    """The text of the answer, or the reason why there is nothing to show."""
    try:
        with build_opener(_NoRedirects).open(request, timeout=TIMEOUT_S) as answer:
            body: bytes = answer.read(MAX_BYTES)
            is_cut_off = bool(answer.length) and len(body) < MAX_BYTES  # bytes that the header promised besides
    except HTTPError as error:
        address = error.headers.get("location")
        if error.code // 100 == 3 and address:
            with suppress(ValueError):  # for example `http://[`
                address = urljoin(request.full_url, address)
            return NothingToShow(f"redirects to {address:.1000}: use that address")
        key = f" (set {KEY_VARIABLE})" if error.code == HTTPStatus.UNAUTHORIZED else ""
        return NothingToShow(f"answers {error.code} {error.reason}{key}")
    except IncompleteRead:
        is_cut_off = True
    except (OSError, HTTPException, ValueError) as error:  # of the socket, of HTTP, or of a malformed address
        reason = getattr(error, "reason", error)
        problem = str(getattr(reason, "strerror", None) or reason)
        return NothingToShow(f"can't be reached: {problem[:1].lower()}{problem[1:]}")
    return NothingToShow("can't be read: the answer was cut off") if is_cut_off else body.decode("utf-8", "replace")
