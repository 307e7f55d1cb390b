"""The command: shows the metrics of a process, refreshed at an interval."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import attrs
from prometheus_client.parser import text_string_to_metric_families

from .. import Tier
from .._common.commands import INTERRUPTED, complain, count, number
from ..errors import InvalidArgument

# -- look ------------------------------------------------------------------------------------------------------------
#
# The metrics of a process at one time, and a description of them in lines.

STATES = ("running", "loading", "pinned", "allocated", "matched", "draining", "requeued", "stranded", "preempted")
TIERS = tuple(tier.name.lower() for tier in Tier)
USES = {"ask": "questions", "load": "loads", "store": "stores"}
OLD_SNAPSHOT_S = 5.0
"""The event loop answers at each scrape, so an older snapshot means that the loop is blocked."""


@attrs.frozen
class Look:
    at_s: float
    """Time by a monotonic clock."""
    values: Mapping[tuple[str, frozenset[tuple[str, str]]], float]
    """Values by name of the sample and labels."""

    @classmethod
    def of(cls, text: str, at_s: float) -> Look:
        """Raises `ValueError` for a text that is not in the format of Prometheus."""
        samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
        return cls(
            at_s,
            {
                (sample.name, frozenset(sample.labels.items())): sample.value
                for sample in samples
                if sample.name.startswith("aoffload_")
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


def lines(look: Look, before: Look | None) -> Iterator[str]:
    """A summary for people. Rates are those since `before`. Without it there are none."""
    yield from _requests(look)
    yield from _fetches(look)
    for tier in _tiers(look):
        yield _blocks(look, tier)
    yield from _eviction(look)
    yield from _copies(look, before)
    if before is not None:
        yield _rates(look, before)
    yield from _warnings(look)


def _requests(look: Look) -> Iterator[str]:
    yield "requests   " + (", ".join(_of_state(look, state) for state in STATES if _number(look, state)) or "none")
    waiting = look.get("aoffload_requests_waiting")
    if waiting:
        yield f"waiting    {waiting:,.0f}, the first for {look.get('aoffload_oldest_wait_seconds'):,.1f} s"
    step_s = look.get("aoffload_oldest_step_seconds")
    if step_s:
        yield f"steps      the oldest is open for {step_s:,.1f} s"


def _number(look: Look, state: str) -> float:
    return look.get("aoffload_requests", state=state)


def _of_state(look: Look, state: str) -> str:
    oldest_s = look.get("aoffload_oldest_request_seconds", state=state)
    return f"{_number(look, state):,.0f} {state} (one for {oldest_s:,.1f} s)"


def _fetches(look: Look) -> Iterator[str]:
    if number := look.get("aoffload_fetching_requests"):
        parts = _by_tier(look, "aoffload_fetching_tokens")
        tokens = " and ".join(f"{value:,.0f} tokens from {tier}" for tier, value in parts.items() if value)
        yield f"fetching   {number:,.0f} requests: {tokens or 'what others bring'}"


def _tiers(look: Look) -> list[str]:
    """Tiers with blocks, from the one nearest to the compute down."""
    shown = _by_tier(look, "aoffload_blocks")
    return [tier for tier in TIERS if tier in shown or tier in TIERS[:2]]


def _by_tier(look: Look, name: str) -> dict[str, float]:
    """The sums of a metric by its label `tier`, for tiers that are exported."""
    found = {dict(labels).get("tier", "") for sample, labels in look.values if sample == name}
    return {tier: look.get(name, tier=tier) for tier in TIERS if tier in found}


def _blocks(look: Look, tier: str) -> str:
    is_ours = any(found == "aoffload_pool_blocks" and ("tier", tier) in has for found, has in look.values)
    states = ("free", "cached", "pinned", "quarantined") if is_ours else ("pinned", "quarantined")
    each = ", ".join(f"{look.get('aoffload_blocks', tier=tier, state=state):,.0f} {state}" for state in states)
    if not is_ours:
        return f"{tier:<10} {each}: what copies hold of the engine's blocks"
    return f"{tier:<10} {each}; {look.get('aoffload_pool_blocks', tier=tier):,.0f} blocks"


def _eviction(look: Look) -> Iterator[str]:
    """For learned eviction: the order in use in each tier."""
    ruled = _by_tier(look, "aoffload_eviction_learned")
    if ruled:
        orders = ", ".join(f"{tier} by {'what was learned' if on else 'the last use'}" for tier, on in ruled.items())
        yield f"eviction   {orders}"


def _copies(look: Look, before: Look | None) -> Iterator[str]:
    jobs = ", ".join(
        f"{look.get('aoffload_jobs', state=state):,.0f} {state}" for state in ("queued", "launched", "quarantined")
    )
    yield f"copies     {jobs}"
    if before is None:
        return
    name = "aoffload_copied_bytes_total"
    for tier in _by_tier(look, name):
        load, store = (look.rate(before, name, direction=way, tier=tier) / 1e6 for way in ("load", "store"))
        yield f"  {tier:<8} load {load:,.1f} MB/s, store {store:,.1f} MB/s"


def _rates(look: Look, before: Look) -> str:
    over = {
        outcome: look.rate(before, "aoffload_requests_finished_total", outcome=outcome)
        for outcome in ("done", "aborted")
    }
    tokens = {
        source: look.rate(before, "aoffload_tokens_total", source=source)
        for source in ("device_hit", "host_hit", "computed")
    }
    num_tokens = sum(tokens.values())
    shares = ", ".join(f"{rate / num_tokens:.0%} {source.replace('_', ' ')}" for source, rate in tokens.items() if rate)
    requests = ", ".join(f"{rate:,.1f} {outcome}" for outcome, rate in over.items())
    return f"a second   {requests}; {num_tokens:,.0f} tokens" + (f": {shares}" if shares else "")


def _warnings(look: Look) -> Iterator[str]:
    if look.get("aoffload_cache_off"):
        yield "WARNING    the cache is off: nothing is loaded or stored any more"
    for tier, is_off in _by_tier(look, "aoffload_storage_off").items():
        if is_off:
            yield f"WARNING    {tier} is off: nothing is fetched from it or stored there any more"
    for tier in _by_tier(look, "aoffload_storage_left_alone"):
        uses = [name for use, name in USES.items() if look.get("aoffload_storage_left_alone", tier=tier, use=use)]
        if uses:
            yield f"WARNING    {tier} fails and is left alone for a while: {', '.join(uses)}"
    if look.get("aoffload_loads_paused"):
        yield "WARNING    loads are paused: too many of the engine's blocks are in quarantine"
    age_s = look.get("aoffload_snapshot_age_seconds")
    if age_s > OLD_SNAPSHOT_S:
        yield f"WARNING    this is {age_s:,.0f} s old: the event loop does not answer"


# -- command ---------------------------------------------------------------------------------------------------------

GONE = 1
INTERVAL = number("from 0.1 to 3600", lambda value: 0.1 <= value <= 3600)
TIMEOUT_S = 10.0
"""A scrape itself waits up to 5 s for the event loop."""
KEY_VARIABLE = "AOFFLOAD_API_KEY"
MAX_BYTES = 16 * 2**20
CLEAR = "\x1b[H\x1b[2J"


class NothingToShow(Exception):  # noqa: N818
    """There is no process with metrics of `aoffload` at the address."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0: all views shown; 1: the process has ended; 2: never reached; 130: Ctrl-C."""
    options = make_parser().parse_args(arguments)
    num_seen = 0
    try:
        request = _request(options.url)
        looks = watch(lambda: _fetch(request), time.monotonic, time.sleep, options.interval, options.count)
        for num_seen, text in enumerate(looks, 1):  # noqa: B007
            _show(f"{options.url}, {time.strftime('%H:%M:%S')}\n{text}\n")
    except InvalidArgument as error:
        return complain("top", str(error))
    except NothingToShow as error:
        bad_input = complain("top", f"{options.url}: {error}")
        return GONE if num_seen else bad_input
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
    """A view every `interval_s` seconds, `count` times or for ever. Raises `NothingToShow`."""
    before = None
    for num_looks in itertools.count(1):
        look = _look(fetch(), clock())
        yield "\n".join(lines(look, before))
        before = look
        if num_looks == count:
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
    parser.add_argument(
        "--interval",
        type=INTERVAL,
        default=2.0,
        metavar="S",
        help="seconds between two looks (2)",
    )
    parser.add_argument("--count", type=count(1, 2**31 - 1), metavar="N", help="looks; without it, until Ctrl-C")
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


def _fetch(request: Request) -> str:
    try:
        with urlopen(request, timeout=TIMEOUT_S) as answer:
            body: bytes = answer.read(MAX_BYTES)
    except HTTPError as error:
        raise NothingToShow(f"{error.code} {error.reason}") from error
    except (OSError, HTTPException, ValueError) as error:
        raise NothingToShow(f"no answer: {getattr(error, 'reason', error)}") from error
    return body.decode("utf-8", "replace")
