"""Growth: the cost of one request as pools, prompts, requests in flight and groups grow, as rows and as a picture.

Each point of a curve is the time of one request: through the ledger (`pools.py`), every copy landed at once, or through
the runtime (`flights.py`). All pools are full. The points of a curve take turns. A ratio is the median over the rounds
of a point's time, divided by that of the first one. `build/bench/growth.png` shows the curves if matplotlib is
installed.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import anyio

from aoffload import KVCacheGroup, SlidingWindow

from .cycle import BLOCK_SIZE
from .flights import AllAtOnce, Flight, ParkedBeside, measure_flights
from .harness import Rounds, Row, Subject
from .peer import Peer
from .plots import Curve, MissingPlotterError, Point, draw
from .pools import ONE_GROUP, RUN_BLOCKS, FullPools

__all__ = ["run"]

POOLS = (10**4, 10**3, 10**5, 10**6)
"""Blocks of each tier. The others are compared with the first, here and below."""
LENGTHS = (16, 64, 256, 1024, 4096, 8192)
"""Blocks of a prompt."""
IN_FLIGHT = (1, 10, 100, 1_000, 10_000)
GROUPS = (1, 2, 3, 4)
GROUP_BLOCKS = 64
NUM_BESIDE = 64
"""Cached prompts beside the requests in flight."""
BACKENDS = ("asyncio", "trio")
SECONDS = 6.0
LEAST_FLIGHTS = 3
MOST_BY_POOL, MOST_BY_FLIGHT = 1.3, 2.0
PICTURE = Path("build/bench/growth.png")


def run(vllm: Peer | None) -> Iterator[Row]:
    """A row for each point of each curve."""
    measured: tuple[Callable[[], Curve], ...] = (
        lambda: by_pool(POOLS),
        lambda: by_length(LENGTHS),
        lambda: by_flight(IN_FLIGHT),
        lambda: by_flight_in_runtime("runtime, others parked", ParkedBeside, IN_FLIGHT),
        lambda: by_flight_in_runtime("runtime, all at once", AllAtOnce, IN_FLIGHT),
        lambda: by_groups(GROUPS),
    )
    curves = []
    for measure in measured:
        curves.append(measure())
        yield from rows_of(curves[-1])
    try:
        draw(curves, PICTURE)
    except MissingPlotterError as missing:
        print(f"growth: {missing}", file=sys.stderr)


def by_pool(sizes: Sequence[int], seconds: float = SECONDS) -> Curve:
    """Prompts of one run each, by the number of blocks of each tier. All blocks are in use."""
    pools = {size: FullPools(-(-size // RUN_BLOCKS)) for size in sizes}
    subjects = {(line, size): one for size, p in pools.items() for line, one in _tiers(p)}
    return Curve("Ledger, pool size", "blocks in each tier", _measure(subjects, seconds), {10**6: MOST_BY_POOL})


def by_length(lengths: Sequence[int], seconds: float = SECONDS) -> Curve:
    """Prompts by their length, in pools that hold a few of them."""
    pools = {length: FullPools(2, length) for length in lengths}
    subjects = {(line, length * BLOCK_SIZE): one for length, p in pools.items() for line, one in _tiers(p)}
    return Curve("Ledger, prefix length", "tokens of the prompt", _measure(subjects, seconds))


def _tiers(pools: FullPools) -> list[tuple[str, Subject]]:
    return [("device hit", pools.device_hit), ("host hit", pools.host_hit), ("miss", pools.miss)]


def by_flight(numbers: Sequence[int], seconds: float = SECONDS, num_beside: int = NUM_BESIDE) -> Curve:
    """Pools of one size, by the number of requests in flight, the measured one included. The others have computed their
    prompts."""
    subjects: dict[tuple[str, int], Subject] = {}
    for number in numbers:
        pools = FullPools(max(numbers) + num_beside)
        pools.park(number - 1)
        subjects["host hit", number], subjects["miss", number] = pools.host_hit, pools.miss
    return Curve("Ledger, in flight", "requests in flight", _measure(subjects, seconds), {1_000: MOST_BY_FLIGHT})


def by_flight_in_runtime(
    title: str, flight_of: Callable[[int], Flight], numbers: Sequence[int], seconds: float = SECONDS
) -> Curve:
    """The same through the runtime, on each event loop."""
    lines = {}
    for backend in BACKENDS:
        flights = [flight_of(number) for number in numbers]
        rounds = anyio.run(measure_flights, flights, seconds, LEAST_FLIGHTS, backend=backend)
        lines[backend] = dict(zip(numbers, points_of(rounds), strict=True))
    return Curve(title, "requests in flight", lines, {1_000: MOST_BY_FLIGHT})


def by_groups(numbers: Sequence[int], seconds: float = SECONDS) -> Curve:
    """Prompts of 1,024 tokens by the number of groups: all full, or one full and equal or different windows."""
    mixes = {
        "all full": lambda _: ONE_GROUP[0].attention,
        "one full, windows alike": lambda _: SlidingWindow(512),
        "one full, windows unlike": lambda at: SlidingWindow(128 * 2**at),
    }
    subjects: dict[tuple[str, int], Subject] = {}
    for (line, kind_of), number in itertools.product(mixes.items(), numbers):
        more = [KVCacheGroup(f"{at}", attention=kind_of(at), block_size=BLOCK_SIZE) for at in range(number - 1)]
        pools = FullPools(1, GROUP_BLOCKS, (*ONE_GROUP, *more), num_more=7)
        subjects[line, number] = pools.host_hit
    return Curve("Ledger, host hit, groups", "groups", _measure(subjects, seconds))


def _measure(subjects: Mapping[tuple[str, int], Subject], seconds: float) -> dict[str, dict[int, Point]]:
    """Measure every point of every curve in turns. Those of one curve are compared with its first."""
    named = {f"{line} {at}": subject for (line, at), subject in subjects.items()}
    rounds = Rounds(named, seconds=seconds)
    for name in rounds:
        rounds.add(name, named[name]())
    lines = list(dict.fromkeys(line for line, _ in subjects))
    return {line: _line_of(rounds, line, [at for name, at in subjects if name == line]) for line in lines}


def _line_of(rounds: Rounds, line: str, xs: Sequence[int]) -> dict[int, Point]:
    names = [f"{line} {x}" for x in xs]
    return dict(zip(xs, points_of(rounds, names), strict=True))


def points_of(rounds: Rounds, names: Sequence[str] = ()) -> list[Point]:
    """The points of `names` (of all, if empty), each compared with the first one round by round, because other work on
    the machine slows both."""
    measured, samples = rounds.measured(), rounds.samples
    chosen = names or list(samples)
    return [
        Point(
            measured[name],
            statistics.median(
                one.wall_s / base.wall_s for one, base in zip(samples[name], samples[chosen[0]], strict=True)
            ),
        )
        for name in chosen
    ]


def rows_of(curve: Curve) -> list[Row]:
    """The time of each point of a curve, beside that of its first one."""
    return [
        Row(
            name=f"{curve.title}: {line}, {x:,}", value=point.took.median_s * 1e6, unit="us", spread=point.took.spread,
            against=f"{base:,}", limit=points[base].took.median_s * 1e6, ratio=point.ratio, wanted=curve.most.get(x),
            is_at_most=True,
        )
        for line, points in curve.lines.items() for base in [next(iter(points))] for x, point in points.items()
        if x != base
    ]  # fmt: skip
