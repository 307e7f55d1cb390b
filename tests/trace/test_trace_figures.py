"""Percentiles, counts over time and tallies: right where they can be compared, and small however much goes in."""

from __future__ import annotations

import io
import math
import random
from pathlib import Path

import pytest

from aoffload import Tier
from aoffload._observe.log import Telemetry
from aoffload._transfer.transport import PinProgress
from aoffload.host_cache import LoadsPaused, LoadsResumed
from aoffload.ledger import CacheTurnedOff, StoreSkipped, TransportRecovered, TransportStalled, WorkerFailed
from aoffload.trace.drawing import MAX_BUCKETS, Series
from aoffload.trace.figures import MAX_NAMES, NUM_SLOWEST, OTHERS, Durations, Figures, Tally
from aoffload.trace.scan import Scan
from aoffload.trace.summary import summary
from aoffload.trace.wording import duration, size
from benchmarks.synthetic_log import line, write_synthetic


@pytest.mark.parametrize(("num", "tolerance"), [(1, 0.0), (7, 0.0), (4_096, 0.0), (50_000, 0.006)])
def test_percentiles_are_those_of_the_sorted_durations(num: int, tolerance: float) -> None:
    """Exact for small logs, half a percent off at most for large ones; the longest is always exact."""
    rng = random.Random(num)
    values = [rng.choice((0.0, 1e-9, rng.expovariate(3), rng.expovariate(1e4))) for _ in range(num)]
    durations = Durations()
    for value in values:
        durations.add(value)
    values.sort()
    for percent in (1, 25, 50, 75, 90, 99, 100):
        expected = values[max(1, math.ceil(num * percent / 100)) - 1]
        assert durations.percentile(percent) == pytest.approx(expected, rel=tolerance, abs=1.1e-7 if tolerance else 0.0)
    assert durations.max_s == values[-1]
    assert durations.total_s == pytest.approx(sum(values))


def test_no_durations_have_no_percentiles() -> None:
    """An empty state is zero, not an error."""
    assert Durations().percentile(50) == 0.0


def test_a_series_keeps_every_peak_in_bounded_memory() -> None:
    """However many changes: the highest value is kept, the last one too, and time never goes back."""
    series, rng, at_s = Series(), random.Random(1), 1.78e9
    changes = []
    for at in range(60_000):
        at_s += rng.expovariate(300)
        changes.append((at_s, rng.randrange(1000) if at % 100 else 1000 + at))
        series.add(*changes[-1])
    points = list(series.points())
    assert len(points) <= 2 * MAX_BUCKETS
    assert {value for _, value in changes if value >= 1000} <= {point.value for point in points}
    assert points[-1].value == changes[-1][1]
    assert [point.at_s for point in points] == sorted(point.at_s for point in points)
    assert points[0].at_s == changes[0][0]


def test_a_short_series_is_exact() -> None:
    """Where there is room, nothing is put together."""
    series = Series()
    for at, value in enumerate((3, 3, 1, 4)):
        series.add(100.0 + at, value)
    assert [(point.at_s, point.value) for point in series.points()] == [(100.0, 3), (102.0, 1), (103.0, 4)]


def test_a_tally_is_bounded() -> None:
    """Reasons that differ in every request fill no memory."""
    tally = Tally()
    for at in range(3 * MAX_NAMES):
        tally.add(f"reason {at}")
    assert len(tally.highest_first()) == MAX_NAMES + 1
    assert tally.highest_first()[0] == (OTHERS, 2 * MAX_NAMES) and tally.total == 3 * MAX_NAMES


def test_the_slowest_requests_come_slowest_first(tmp_path: Path) -> None:
    """The same as sorting all of them would give."""
    path = tmp_path / "log"
    lengths = {f"r{at}": float((at * 37) % 101) for at in range(101)}
    found = {"num_tokens": 1, "num_device_tokens": 0, "num_host_tokens": 0}
    with path.open("w") as file:
        for at, (name, seconds) in enumerate(lengths.items()):
            start = 1000.0 + 200 * at
            file.write(line(start, "request_matched", request_id=name, **found) + "\n")
            file.write(line(start + seconds, "request_done", request_id=name, num_computed_tokens=1) + "\n")
    figures = Figures()
    Scan.of(path, figures, io.StringIO()).run()
    expected = sorted(lengths, key=lambda name: -lengths[name])[:NUM_SLOWEST]
    assert [timeline.name for timeline in figures.slowest()] == expected


def test_skipped_stores_alarms_and_failures_are_named(tmp_path: Path) -> None:
    """What the telemetry itself writes about trouble is in the summary, with its reason."""
    lines: list[str] = []

    class Logger:
        def bind(self) -> Logger:
            return self

        def debug(self, event: str, **fields: object) -> None:
            lines.append(line(1000.0 + len(lines), event, **fields))

        info = warning = error = debug

    telemetry = Telemetry(Logger())
    telemetry.host_memory_page_locked(PinProgress(8, 8, 8, 1))
    telemetry.runtime_opened(4, 4, "")
    for num_blocks in (3, 4):
        telemetry.observe(StoreSkipped(None, num_blocks, "host_full"))
    for event in (
        TransportStalled(Tier.HOST, Tier.DEVICE, 2), TransportRecovered(Tier.HOST, Tier.DEVICE), LoadsPaused(8),
        LoadsResumed(4), WorkerFailed(ValueError("no")), CacheTurnedOff("device lost: no answer"),
    ):  # fmt: skip
        telemetry.observe(event)
    telemetry.runtime_closed(1)
    about = {"job_id": 1, "direction": "store", "num_blocks": 4, "request_id": ""}
    lines.append(line(1100.0, "job_launched", **about))
    lines.append(line(1101.0, "job_failed", error="the device is gone", **about))
    path = tmp_path / "log"
    path.write_text("\n".join(lines))
    figures = Figures()
    scan = Scan.of(path, figures, io.StringIO())
    scan.run()
    assert len(scan.runtimes.lives) == 1, "what comes before it is opened is another's, or nobody's"
    text = "\n".join(summary(scan, figures))
    for expected in (
        "2  host_full  7 blocks",
        "1  store to host failed: the device is gone",
        "1  transport_stalled",
        "1  transport_recovered",
        "1  loads_paused",
        "1  loads_resumed",
        "1  worker_failed: ValueError('no')",
        "1  cache_turned_off: device lost: no answer",
        "1  runtime_closed",
    ):
        assert expected in text


def test_the_summary_of_a_synthetic_log_adds_up(tmp_path: Path) -> None:
    """Every tenth request is aborted, half of them load, and all but those under way have ended."""
    path = tmp_path / "log"
    write_synthetic(path, 20_000)
    figures = Figures()
    scan = Scan.of(path, figures, io.StringIO())
    scan.run()
    requests = figures.in_all.num
    assert scan.reader.num_events == 20_000 and requests > 1500 and scan.remarks() == []
    text = "\n".join(summary(scan, figures))
    assert f"{requests:,} requests" in text and "cancelled while running" in text
    assert abs(figures.in_state["loading"].num - requests / 2) < requests / 10
    spent = sum(found.total_s for found in figures.in_state.values())
    assert spent == pytest.approx(figures.in_all.total_s)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.00 µs"), (4.2e-6, "4.20 µs"), (0.00123, "1.23 ms"), (0.9996, "1.00 s"),
        (59.96, "60.0 s"), (125, "2 min 05 s"),
    ],
)  # fmt: skip
def test_durations_have_three_digits(seconds: float, text: str) -> None:
    """And a unit that suits them."""
    assert duration(seconds) == text


def test_sizes_are_in_powers_of_a_thousand() -> None:
    """As the rates of copies are."""
    assert [size(n) for n in (0, 999, 1000, 1_234_567, 5e9, 7e12)] == [
        "0 B",
        "999 B",
        "1.00 kB",
        "1.23 MB",
        "5.00 GB",
        "7.00 TB",
    ]
