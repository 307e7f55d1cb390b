"""`python -m benchmarks` prints every row, or names the missing package."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import benchmarks.__main__
from benchmarks import against_lmcache, eager_store, flights, growth, link_steps, memory, peer, policies, pools
from benchmarks.__main__ import BENCHMARKS, as_line, as_table, collect
from benchmarks.cycle import prompts_of
from benchmarks.harness import Measured, Rounds, Row, Sample, Subject, interleave
from benchmarks.plots import Curve, MissingPlotterError, Point, draw

ROWS = [
    Row(
        name="cycle of 1,024 tokens", value=14.512, unit="us", against="peer", limit=302.0, ratio=20.81, wanted=15.0,
        spread="14-16",
    ),
    Row(name="lag", value=12345.6, unit="us", against="idle", limit=3.0, ratio=4.1, wanted=3.0, is_at_most=True),
]  # fmt: skip


def test_table_has_a_line_for_every_row() -> None:
    """Each row stands with its figures, rounded, beside what it is measured against, and says if that is enough."""
    _, *lines = as_table(ROWS).splitlines()
    assert lines[0].split()[4:] == ["14.5", "us", "14-16", "peer", "302", "20.8", "at", "least", "15:", "met"]
    assert lines[1].endswith("4.1  at most 3: MISSED")


def test_whoever_is_compared_takes_turns() -> None:
    """Each round begins with another one, and what came before the first round does not count."""
    called: list[str] = []

    def subject(name: str) -> Subject:
        def once() -> Sample:
            called.append(name)
            return Sample(1.0 if len(called) > 4 else 100.0, 0.5)

        return once

    found = interleave({"a": subject("a"), "b": subject("b")}, seconds=0.0, least=3)
    assert "".join(called) == "abababbaab"
    assert found["a"] == Measured(1.0, 1.0, 1.0, 0.5, 3)


def test_a_peer_answers_line_by_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer runs in an environment of its own, says what one unit took, and may print what it likes beside that."""
    python = tmp_path / "echo" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    (tmp_path / "echo_side.py").write_text(
        f"import sys; sys.path.insert(0, {str(peer.SCRIPTS)!r})\n"
        "import line\n"
        "def cycle(**about):\n    print('noise')\n    return line.timed(lambda: None, 0.001)\n"
        "line.serve({'cycle': cycle, 'say': lambda text: text})\n"
    )
    monkeypatch.setattr(peer, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(peer, "SCRIPTS", tmp_path)
    with peer.Peer("echo") as echo:
        assert echo.ask("say", text="hello") == "hello"
        assert echo.cycles(1, hashes=False)().wall_s >= 0
        with pytest.raises(RuntimeError, match="echo ended in nothing"):
            echo.ask("nothing")


def test_a_peer_that_is_not_installed_is_named() -> None:
    """The message says how to install the peer."""
    with pytest.raises(peer.MissingPeerError, match="make bench-peers"):
        peer.Peer("unheard of")


def test_a_missing_benchmark_is_named() -> None:
    """The message names the missing module, without a traceback."""
    with pytest.raises(SystemExit, match=r"no benchmarks\.unheard_of"):
        list(collect(["unheard_of"], None))


def planted(monkeypatch: pytest.MonkeyPatch, run: Callable[[Any], Iterator[Row]]) -> None:
    """A benchmark called `planted`, without a calibration and without a peer, wherever peers are installed."""
    monkeypatch.setitem(sys.modules, "benchmarks.planted", SimpleNamespace(run=run))  # type: ignore[arg-type]
    monkeypatch.setattr(benchmarks.__main__, "calibrate", lambda: {"loop_ns": 1.0})
    monkeypatch.setattr(benchmarks.__main__, "_vllm", lambda stack: None)


def test_each_row_is_printed_and_kept_before_the_next_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While a benchmark measures a row, the file and the screen have the rows before it, and at the end there is one
    table."""
    file, seen = tmp_path / "kept" / "rows.json", []

    def look() -> None:
        seen.append(([row["name"] for row in json.loads(file.read_text())["rows"]], capsys.readouterr().out))

    def run(vllm: Any) -> Iterator[Row]:
        for row in ROWS:
            look()
            yield row
        look()

    planted(monkeypatch, run)
    benchmarks.__main__.main(["planted", "--json", str(file)])
    names = [row.name for row in ROWS]
    assert [kept for kept, _ in seen] == [[], names[:1], names]
    assert seen[0][1] == ""
    assert seen[1][1] == "cycle of 1,024 tokens: 14.5 us (14-16); peer: 302; ratio 20.8; at least 15: met\n"
    assert seen[2][1] == "lag: 12,346 us; idle: 3; ratio 4.1; at most 3: MISSED\n"
    assert as_table(ROWS) in capsys.readouterr().out
    assert json.loads(file.read_text())["after"] == {"loop_ns": 1.0}


def test_a_benchmark_that_is_cut_off_keeps_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ends it: the rows before are in the file, and the rates of the machine from before them."""
    file = tmp_path / "rows.json"

    def run(vllm: Any) -> Iterator[Row]:
        yield ROWS[0]
        raise KeyboardInterrupt

    planted(monkeypatch, run)
    with pytest.raises(KeyboardInterrupt):
        benchmarks.__main__.main(["planted", "--json", str(file)])
    assert json.loads(file.read_text()) == {"rows": [ROWS[0].as_dict()], "before": {"loop_ns": 1.0}, "after": None}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_benchmarks_are_there(name: str) -> None:
    """Every benchmark that the command runs is a module with `run`."""
    module = importlib.import_module(f"benchmarks.{name}")
    assert callable(module.run)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of a few requests: what is measured has to be right, not the figures."""
    for module in (pools, flights):
        monkeypatch.setattr(module, "SAMPLE_S", 1e-6)


def test_the_same_request_goes_through_full_pools(quick: None) -> None:
    """Whatever came before, a hit is one in the tier it is measured for, a miss is one, and both pools stay full. The
    ledger is whole."""
    full = pools.FullPools(5, 4)
    for subject in (full.miss, full.device_hit, full.host_hit, full.host_hit, full.miss, full.host_hit):
        assert subject().wall_s > 0
        found = full.ledger.statistics()
        assert (found.device.num_cached, found.device.num_free) == (5 * 4, 1)
        assert (found.host.num_cached, found.host.num_free) == (6 * 4, 0)
    full.ledger.check_integrity()


def test_parked_requests_keep_their_blocks(quick: None) -> None:
    """Who is in flight pins what it has; the others still load and miss as before."""
    full = pools.FullPools(5, 4)
    full.park(3)
    for subject in (full.host_hit, full.miss, full.host_hit):
        subject()
    found = full.ledger.statistics()
    assert (found.num_requests, found.device.num_pinned, found.device.num_cached) == (3, 3 * 4, 2 * 4)


@pytest.mark.parametrize(
    ("title", "measure"),
    [
        ("Ledger, pool size", lambda: growth.by_pool((32, 64), 0.0)),
        ("Ledger, prefix length", lambda: growth.by_length((1, 3), 0.0)),
        ("Ledger, in flight", lambda: growth.by_flight((1, 3), 0.0, 4)),
        ("parked", lambda: growth.by_flight_in_runtime("parked", lambda at: flights.ParkedBeside(at, 3), (1, 3), 0.0)),
        ("at once", lambda: growth.by_flight_in_runtime("at once", flights.AllAtOnce, (1, 70), 0.0)),
        ("Ledger, host hit, groups", lambda: growth.by_groups((1, 3), 0.0)),
    ],
)
def test_curves_have_a_row_for_each_point(quick: None, title: str, measure: Any) -> None:
    """Every line of a curve is measured at both of its points, by requests that did what they were to do."""
    curve = measure()
    rows = growth.rows_of(curve)
    assert curve.title == title and len(rows) == len(curve.lines) >= 2
    assert all(row.value > 0 and row.ratio > 0 and row.name.startswith(title) for row in rows)


def _rounds(**walls: list[float]) -> Rounds:
    rounds = Rounds(walls, seconds=0.0)
    for name, found in walls.items():
        for wall in found:
            rounds.add(name, Sample(wall, wall))
    return rounds


def test_what_slows_both_for_a_while_is_no_growth() -> None:
    """Points are compared round by round: a machine that is slow every other round adds nothing to a ratio."""
    small, large = growth.points_of(_rounds(small=[1.0, 9.0, 1.0, 9.0, 1.0], large=[2.0, 18.0, 2.0, 18.0, 18.0]))
    assert small.ratio == 1.0
    assert large.ratio == 2.0 and large.took.median_s == 18.0


def test_a_bound_belongs_to_its_point() -> None:
    """Rows say what is wanted where something is, and which point they stand beside."""
    small, large = growth.points_of(_rounds(small=[1.0], large=[3.0]))
    (row,) = growth.rows_of(Curve("pool", "blocks", {"miss": {10: small, 1000: large}}, {1000: 1.3}))
    assert (row.name, row.against, row.ratio) == ("pool: miss, 1,000", "10", 3.0)
    assert row.verdict == "at most 1.3: MISSED"


def test_curves_are_drawn(tmp_path: Path) -> None:
    """One picture for all of them, small enough to be kept beside the text."""
    pytest.importorskip("matplotlib", reason="pictures need the group 'bench'")
    points = {x: Point(Measured(x * 1e-6, x * 0.9e-6, x * 1.1e-6, 0.0, 3), x / 1.0) for x in (1, 10, 100)}
    curves = [Curve(f"curve {number}", "blocks", {"hit": points, "miss": points}) for number in range(3)]
    draw(curves, tmp_path / "new" / "growth.png")
    assert 0 < (tmp_path / "new" / "growth.png").stat().st_size < 100_000


def test_a_missing_plotter_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without matplotlib there is no picture, but a line that says how to get one."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingPlotterError, match=r"pip install --group bench"):
        draw([], tmp_path / "growth.png")


@pytest.mark.skipif(not memory.STATM.exists(), reason="the resident set is read from /proc")
@pytest.mark.parametrize("kind", ["alone", "branching"])
def test_a_cached_block_takes_at_least_its_tokens(kind: str) -> None:
    """What a fresh process takes for an index holds all token bytes and both tiers' ids, and is of their order."""
    found = memory.in_fresh_process(kind, 2000 * 16)
    assert 64 + 8 < found["bytes"] < 10 * 64
    assert found["collect_s"] > 0


@pytest.mark.skipif(not memory.STATM.exists(), reason="the resident set is read from /proc")
@pytest.mark.parametrize("kind", ["records", "requests asyncio", "requests trio"])
def test_idle_requests_are_in_flight_when_they_are_weighed(kind: str) -> None:
    """All of them hold blocks at that moment, and end without a trace."""
    found = memory.measure(kind, 20)
    assert {"bytes", "beside"} <= found.keys()


def test_an_index_beyond_its_tokens_and_sixty_bytes_a_block_is_too_large() -> None:
    """What is wanted of the index is a bound from above."""
    assert memory.index_row("alone", {"bytes": 124.0}).verdict == "at most 1: met"
    assert memory.index_row("alone", {"bytes": 124.5}).verdict == "at most 1: MISSED"


def test_new_prompts_are_stored_with_and_without_room() -> None:
    """A row for a free and one for a full host, each beside a cache that stores block by block; every request misses,
    and only a full host evicts: the subjects say so themselves."""
    free, full = eager_store.measure(3, None, 0.0)
    assert free.name.endswith("48 new tokens, free host pool") and full.name.endswith("full host pool")
    assert free.value > 0 < full.value and free.against == full.against == "block by block"


def test_block_by_block_the_least_recently_used_goes() -> None:
    """The stand-in keeps what it stored last, in both tiers, and no more than fits."""
    (template,) = prompts_of(3, 1)
    cache = eager_store.PerBlockStores(3, 6)
    first, second, third = (pools.prompt_of(number, template).copy() for number in range(3))
    for prompt in (first, second, third):
        cache.store(prompt)
    assert [cache.num_cached(prompt) for prompt in (first, second, third)] == [0, 3, 3]
    assert (len(cache.device), len(cache.host)) == (3, 6)


def test_without_lmcache_there_are_no_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where it is not installed the other benchmarks go on, and whoever runs them reads how to get it."""
    monkeypatch.setattr(peer, "ENVIRONMENTS", tmp_path)
    assert against_lmcache.run() == []
    assert "lmcache is not installed: make bench-peers" in capsys.readouterr().err


@pytest.fixture
def copies_of_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """LMCache's part is played by a script that takes 64 ms, and says that as many bytes arrive as `arrived` has."""
    python = tmp_path / "lmcache" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    scripts = str(peer.SCRIPTS)
    monkeypatch.setattr(peer, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(peer, "SCRIPTS", tmp_path)
    monkeypatch.setattr(against_lmcache, "REGION_BLOCK_BYTES", 64)
    monkeypatch.setattr(against_lmcache, "NUM_BYTES", 64 * 32 * 64)
    monkeypatch.setattr(against_lmcache, "SECONDS", 0.0)
    (tmp_path / "lmcache_side.py").write_text(
        f"import sys; sys.path.insert(0, {scripts!r})\n"
        "import pathlib, line\n"
        "def took(**about):\n    return {'wall_s': 0.064, 'cpu_s': 0.064}\n"
        "def prepare(**about):\n    return {'num_bytes': 64 * 32 * 64, 'num_threads': 2}\n"
        f"def check(by):\n    return int(pathlib.Path({str(tmp_path / 'arrived')!r}).read_text())\n"
        "line.serve({'prepare': prepare, 'check': check, 'store': took, 'load': took})\n"
    )
    return tmp_path / "arrived"


def test_lmcache_has_a_row_for_each_way(copies_of_nothing: Path) -> None:
    """Each of its ways stands beside ours, in both directions, with the ratio that is wanted."""
    copies_of_nothing.write_text(str(64 * 32 * 64))
    rows = [row for row in against_lmcache.run() if row.against != "one memmove"]
    ways = [f"LMCache by {by}, {threads}" for threads in ("2 threads", "1 thread") for by in ("slots", "blocks")]
    assert [(row.name.split(",")[0], row.against) for row in rows] == [
        (direction, way) for way in ways for direction in ("store", "load")
    ]
    assert all(row.wanted == 2.5 and row.limit == pytest.approx(64 * 32 * 64 / 0.064 / 1e9) for row in rows)


def test_a_peer_that_copies_nothing_is_not_measured(copies_of_nothing: Path) -> None:
    """What the peer takes counts only if all the bytes arrive."""
    copies_of_nothing.write_text("0")
    with pytest.raises(AssertionError, match="0 bytes arrived by slots"):
        against_lmcache.run()


TRACE = [[1, 2, 3], [4, 5, 6], [1, 2, 3], [7, 8], [1, 2, 9], [4, 5, 6]]
"""On a device of seven blocks: the third finds the first one still there, the others have to come from the host."""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps({"timestamp": 0, "hash_ids": ids}) + "\n" for ids in TRACE))
    return path


@pytest.mark.parametrize(
    ("policy", "counted"), [("off", (5, 0, 0, 0)), ("eager", (5, 3, 9, 3)), ("selective", (5, 0, 6, 0))]
)
def test_a_replay_counts_blocks(trace: Path, policy: Any, counted: tuple[int, ...]) -> None:
    """Every id is one block that is asked for; hits and copies are those that one counts by hand."""
    found = policies.replay(policy, policy, policies.read_trace(trace), 7, 20)
    assert (found.num_device_hits, found.num_host_hits, found.num_stored, found.num_loaded) == counted


def test_the_study_prints_a_line_for_every_policy(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the command line, with as many requests as asked for."""
    policies.main(["--trace", str(trace), "--device", "7", "--host", "20", "--limit", "3", "--watermark", "2"])
    about, heading, *lines = capsys.readouterr().out.splitlines()
    assert about == "3 requests, 9 blocks asked for"
    assert heading.split()[:3] == ["policy", "device", "hits"]
    assert [line.split("  ")[0] for line in lines] == ["off", "eager", "lazy", "selective", "lazy, 2"]


def test_copies_take_no_more_steps_than_the_link_needs() -> None:
    """On links of 50, 5 and 2 GB/s: all that four steps compute is stored, and a load takes as many steps as its copies
    need, also in a process that has stored nothing. The engine of these rows is timed, not real."""
    found = list(link_steps.link_step_rows())
    assert len(found) == 12
    assert not [as_line(row) for row in found if "MISSED" in as_line(row)]
