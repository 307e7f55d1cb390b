"""The command line of the planner, and the page that it writes."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from synthetic_traces import BLOCK_TOKENS, agents, conversations, write_trace

from aoffload.plan.command import main
from aoffload.plan.page import BOTTOM, LEFT, RIGHT, TOP, Box, overlap, round_step, tick_time

SIZES = ("--kv-bytes-per-token", "1KiB", "--device", "1200KiB", "--host", "3MiB,12MiB", "--block-tokens", "8")
SPEEDS = ("--prefill-tokens-per-s", "2000", "--host-gbs", "1", "--price-per-gib-month", "4")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_trace(tmp_path_factory.mktemp("plan") / "asked.jsonl", conversations(20, 400)))


def test_the_table_has_a_row_for_each_size(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a cache, with the device alone, each size, and unlimited; with times and prices if these are given."""
    assert main([trace, *SIZES]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "" and "asked.jsonl: 400 requests in 3 min 20 s, " in lines[11]
    names = [line.split("  ")[0].strip() for line in lines[3:8]]
    assert names == ["no cache", "device alone", "host 3 MiB", "host 12 MiB", "unlimited host"]
    assert "first token" not in lines[2] and "a month" not in lines[2] and "on disk" not in lines[2]
    assert main([trace, *SIZES, *SPEEDS]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "first token p50" in lines[4] and lines[4].endswith("a month")
    assert lines[7].endswith("0.01") and (" ms " in lines[7] or " s " in lines[7])


def test_the_first_line_says_what_to_buy(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It is the sentence of the JSON and of the page; the last line says what the sentence is based on."""
    assert main([trace, *SIZES]) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == (
        "Buy 12 MiB of host memory: 85 % of the prompt tokens would be hits, 24 points more than with the device alone "
        "and as many as with unlimited host memory."
    )
    assert "smallest host memory of the table that has at least 80 % of the gain of unlimited host memory" in last
    assert main([trace, *SIZES, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["advice"] == {
        "sentence": first, "host_bytes": 12 * 2**20, "disk_bytes": 0, "consequences": [], "rule": last,
    }  # fmt: skip


def test_no_escape_sequence_of_a_file_reaches_the_terminal(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not of the written page's name, of a broken trace's name, or of a model's config."""
    page, broken, config = tmp_path / "\x1b[31mpage", tmp_path / "\x1b[31mbroken", tmp_path / "config.json"
    broken.write_text("[]\n")
    model = {"model_type": "x", "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 8, "dtype": "bfloat16"}
    config.write_text(json.dumps(model | {"layer_types": ["\x1b[31m"]}))
    assert main([trace, *SIZES, "--html", str(page)]) == 0
    assert main([str(broken), *SIZES]) == 2
    assert main([trace, "--model", str(config), "--device", "1GiB"]) == 2
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out + captured.err
    assert captured.err.count("\\x1b[31m") == captured.err.count("\n") == 3


def test_json_has_the_same_and_more(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers for programs; the rows are those of the table."""
    assert main([trace, *SIZES, *SPEEDS, "--disk", "20MiB", "--disk-price-per-gib-month", "0.1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in found["rows"]] == [
        "no cache", "device alone", "host", "host and disk", "host", "host and disk", "endless",
    ]  # fmt: skip
    assert found["trace"]["num_requests"] == 400 and found["block_bytes"] == 1024 * BLOCK_TOKENS
    endless = found["rows"][-1]
    assert sum(endless["hit_blocks"].values()) == found["num_endless_hit_blocks"]
    assert endless["num_computed_tokens"] + sum(endless["hit_tokens"].values()) == found["trace"]["num_prompt_tokens"]
    assert found["rows"][2]["age_at_eviction_s"] > 0 and found["rows"][0]["first_token_p90_s"] > 0
    assert found["device_bytes"] <= found["knee_bytes"] <= endless["host_bytes"]
    assert found["rows"][3]["price_per_month"] == pytest.approx(3 / 1024 * 4 + 20 / 1024 * 0.1)


def test_lazy_stores_have_rows_of_their_own(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Behind the eager ones, in whatever order they are named."""
    assert main([trace, *SIZES, "--store", "lazy,eager"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[3] for line in lines[5:9]] == ["eager,", "eager,", "lazy,", "lazy,"]


AGENTS = (*SIZES[:4], "--host", "800KiB", "--block-tokens", "8", "--eviction", "lru,learned")


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("plan") / "sessions.jsonl"
    path.write_text("\n".join(agents(5, 300, tenant="team-a") + agents(6, 300)))
    return str(path)


def test_hints_and_quotas_are_rows(sessions: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One of LRU, and one of each kind of hints, without and with quotas; the hits of each tenant follow. The report
    says which rows are an upper bound, and the page draws all of them."""
    page = tmp_path / "page.html"
    quota = ("--quota", "team-a=400KiB:", "--html", str(page))
    assert main([sessions, *AGENTS, "--hints", "none,stop,returns", *quota]) == 0
    printed = capsys.readouterr().out
    assert "hints: returns know the true time of each return, so these rows are an upper bound" in printed
    kinds = ("lru", "lru, quotas", *(
        f"learned{hints}{quotas}" for hints in ("", ", hints: stop", ", hints: returns") for quotas in ("", ", quotas")
    ))  # fmt: skip
    above, below = printed.split("blocks hit by tenant")
    assert re.findall(r"^host 800 KiB +eager, (.*?)  ", above, re.MULTILINE) == list(kinds)
    assert re.findall(r"^host 800 KiB +eager, (.*?)  ", below, re.MULTILINE) == list(kinds)
    assert re.match(r" +stores, eviction +team-a +others\n", below)
    elements = Elements(page.read_text(encoding="ascii"))
    assert elements.tags.count("circle") == 3 * 8 and elements.tags.count("table") == 2 and not elements.open


def test_sizes_beyond_all_bounds_are_planned(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """More blocks than any pool can have: a replay makes no larger pools than the trace can fill."""
    huge = ["--kv-bytes-per-token", "1", "--device", "900000TiB", "--host", "900000TiB", "--block-tokens", "8"]
    assert main([trace, *huge, "--store", "eager,lazy", "--json"]) == 0
    hits = {sum(row["hit_blocks"].values()) for row in json.loads(capsys.readouterr().out)["rows"][1:]}
    assert len(hits) == 1


def test_sizes_are_chosen_where_none_is_named(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The device's, doubled up to the first one that holds everything, so one of them is enough; at most eight."""
    assert main([trace, *SIZES[:4], "--block-tokens", "8", "--json"]) == 0
    *_, endless = rows = json.loads(capsys.readouterr().out)["rows"]
    hosts = [row["host_bytes"] for row in rows if row["name"] == "host"]
    assert hosts == [1200 * 2**10 * 2**power for power in range(len(hosts))]
    assert hosts[-2] < endless["host_bytes"] <= hosts[-1]
    assert main([trace, *SIZES[:2], "--device", "16KiB", "--block-tokens", "8", "--json"]) == 0
    assert sum(row["name"] == "host" for row in json.loads(capsys.readouterr().out)["rows"]) == 8


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--device", "1KiB"], "argument --device: 1,024 bytes hold 0 blocks of 8,192; 2 are needed"),
        (["--host", "1KiB"], "argument --host: 1,024 bytes hold 0 blocks"),
        (["--block-tokens", "16"], "line 1: has "),
        (["--hints", "stop"], "argument --hints: has an effect only with --eviction learned"),
        (["--eviction", "learned", "--hints", "stop"], "argument --hints: stop needs the field `stop`, which no line"),
        (["--quota", "team-a=1MiB:"], "argument --quota: 'team-a' is no `tenant` of any line of asked.jsonl"),
        (["--quota", "a=1MiB:", "--quota", "a=:1MiB"], "argument --quota: was given twice for 'a'"),
        (
            ["--disk", "1GiB", "--price-per-gib-month", "3"],
            "argument --disk-price-per-gib-month: is required with --disk",
        ),
    ],
)
def test_what_cannot_be_is_one_line_and_status_2(
    trace: str, arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It names the option, or the line of the file."""
    assert main([trace, *SIZES, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("aoffload plan: ") and captured.err.count("\n") == 1
    assert problem in captured.err


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--device", "24"], " (did you mean 24GiB?)"), (["--host", "1TiB,64"], " (did you mean 64GiB?)"),
        (["--disk", "2"], " (did you mean 2GiB?)"), (["--device", "24B"], ""), (["--device", "12000"], ""),
        (["--device", "1KiB", "--host", "64"], ""),
    ],
)  # fmt: skip
def test_a_forgotten_unit_is_guessed(
    trace: str, arguments: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """For a small number without a unit, and only in the error about this number."""
    assert main([trace, *SIZES, *arguments]) == 2
    assert capsys.readouterr().err.endswith(f" {2 if '--device' in arguments else 1} are needed{hint}\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--device", "many"], ["--device", "0.1B"], ["--kv-bytes-per-token", "-1"], ["--host", "1GiB,,2GiB"],
        ["--prefill-tokens-per-s", "1e-320"], ["--limit", "9" * 5000],
        ["--limit", "0"], ["--limit", "x"], ["--block-tokens", "²"], ["--prefill-tokens-per-s", "nan"],
        ["--prefill-tokens-per-s", "0"], ["--host-gbs", "-1"], ["--price-per-gib-month", "inf"],
        ["--store", "lazy,often"], ["--store", ""], ["--eviction", "oldest"],
        ["--hints", "always"], ["--quota", "team-a"], ["--quota", "=1MiB:"], ["--quota", "a=:"], ["--quota", "a=1MiB"],
        ["--quota", "a=2MiB:1MiB"], ["--quota", "a=x:"],
    ],
)  # fmt: skip
def test_bad_options_are_refused(trace: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """By the parser, with the option's name."""
    with pytest.raises(SystemExit) as left:
        main([trace, *SIZES, *arguments])
    assert left.value.code == 2
    assert f"argument {arguments[0]}" in capsys.readouterr().err


def test_floors_have_to_fit_every_host(sessions: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A floor above the smallest host is refused before anything is printed."""
    assert main([sessions, *AGENTS, "--quota", "team-a=801KiB:"]) == 2
    captured = capsys.readouterr()
    assert "argument --quota: has floors of 820,224 bytes, more than a host of 819,200" in captured.err
    assert captured.out == ""


def test_files_that_cannot_be_read_or_written(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing trace, a directory, a page over the trace itself: one line, and the trace is whole."""
    before = Path(trace).read_text()
    for arguments, problem in (
        ([str(tmp_path / "none"), *SIZES], "No such file or directory"),
        ([str(tmp_path), *SIZES], "Is a directory"),
        ([trace, *SIZES, "--html", trace], "is the input file"),
        ([trace, *SIZES, "--html", str(tmp_path / "no" / "page.html")], "no such directory"),
    ):
        assert main(arguments) == 2
        captured = capsys.readouterr().err
        assert captured.count("\n") == 1 and problem in captured
    assert Path(trace).read_text() == before


def test_it_runs_as_a_module_and_imports_no_torch(trace: str) -> None:
    """`python -m aoffload.plan`; torch would take seconds."""
    code = (
        "import sys; from aoffload.plan.command import main; status = main(sys.argv[1:]);"
        "assert not {'torch', 'structlog'} & set(sys.modules); sys.exit(status)"
    )
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    for program in (["-c", code], ["-m", "aoffload.plan"], ["-m", "aoffload", "plan"]):
        command = [sys.executable, "-W", "error", *program, trace, *SIZES, "--store", "eager,lazy"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode, done.stderr) == (0, "") and "unlimited host" in done.stdout


# -- the page ----------------------------------------------------------------------------------------------------------


class Elements(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def page(trace: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("page") / "plan.html"
    assert main([trace, *SIZES, *SPEEDS, "--store", "eager,lazy", "--html", str(file)]) == 0
    return file.read_text(encoding="ascii")


def test_the_page_needs_nothing_else(page: str) -> None:
    """No script, no address, no other file: and the browser is told to fetch nothing."""
    elements = Elements(page)
    assert "script" not in elements.tags and not elements.open
    assert not {"src", "href", "style", "onload"} & {name for name, _ in elements.attributes}
    assert not re.search(r"https?:|url\(|@import", page)
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'sha256-{digest}'" in page


def test_the_page_draws_every_row(page: str) -> None:
    """A dot for each size and policy on the curve, lines of times, and the table. Each chart is drawn twice, for wide
    and for narrow windows."""
    elements = Elements(page)
    assert elements.tags.count("svg") == 2 * 2 + 3  # two charts, three entries of a legend
    assert (
        elements.tags.count("circle") == 2 * 4 + 2 and "eager, lru, 3 MiB: " in page and "lazy, lru, 12 MiB: " in page
    )
    assert elements.tags.count("tr") == 1 + 7
    for points in re.findall(r'points="([^"]*)"', page):
        assert all(re.fullmatch(r"-?\d+(\.\d)?,-?\d+(\.\d)?", point) for point in points.split())


def test_a_name_of_a_file_is_no_markup(tmp_path: Path) -> None:
    """What the trace is called stands in the page as text."""
    trace = write_trace(tmp_path / "<b>&%STYLE%\u2028.jsonl", conversations(21, 50))
    assert main([str(trace), *SIZES, "--html", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text(encoding="ascii")
    assert "<b>" not in page and "&lt;b&gt;&amp;%STYLE%" in page


@pytest.mark.parametrize("prompts", [[[1]], [[1], [2]], [[1, 2]] * 3])
def test_tiny_traces_are_drawn(tmp_path: Path, prompts: list[list[int]]) -> None:
    """One request, nothing that comes back, no time that passes."""
    trace = write_trace(tmp_path / "tiny.jsonl", prompts, gap_ms=0)
    assert main([str(trace), *SIZES, *SPEEDS, "--html", str(tmp_path / "page.html")]) == 0
    Elements((tmp_path / "page.html").read_text())


@pytest.mark.parametrize(
    ("top", "is_time", "step"),
    [(0.33, False, 0.1), (0.95, False, 0.2), (0.04, False, 0.01), (0.9, True, 0.2), (49.0, True, 10.0),
     (200.0, True, 60.0), (680.0, True, 300.0), (4000.0, True, 900.0), (40_000.0, True, 14_400.0),
     (900_000.0, True, 259_200.0)],
)  # fmt: skip
def test_ticks_are_round(top: float, is_time: bool, step: float) -> None:
    """In percent, and in seconds, minutes, hours or days as a clock has them; never more than six."""
    assert round_step(top, is_time=is_time) == pytest.approx(step)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0"), (0.0002, "200 \u00b5s"), (0.2, "200 ms"), (10, "10 s"), (300, "5 min"), (14_400, "4 h")],
)
def test_ticks_of_times_have_a_unit(seconds: float, text: str) -> None:
    """Nothing at the origin."""
    assert tick_time(seconds) == text


def test_axes_have_round_numbers_with_units(page: str) -> None:
    """Shares in percent, sizes in powers of two, both from the smallest to the largest."""
    wide, *_ = re.findall(r'<svg class="chart wide".*?</svg>', page, re.DOTALL)
    texts = re.findall(r"<text [^>]*>(.*?)</text>", wide)
    assert texts[:6] == ["0 %", "20 %", "40 %", "60 %", "80 %", "100 %"]
    assert texts[6:10] == ["1 MiB", "2 MiB", "4 MiB", "8 MiB"]


def test_nothing_is_said_twice_on_a_page(page: str) -> None:
    """The sentence is the heading, no paragraph repeats another, no text has the marks of a page's source."""
    paragraphs = re.findall(r"<p[^>]*>(.*?)</p>", page)
    assert len(paragraphs) == len(set(paragraphs)) and "`" not in page
    (sentence,) = re.findall(r"<h1>(.*?)</h1>", page)
    assert sentence.startswith("Buy ") and page.count(sentence) == 1
    assert "smallest host memory" in page or "cheapest row" in page


# -- labels of charts --------------------------------------------------------------------------------------------------


def boxes_of(chart: str) -> tuple[list[tuple[str, Box]], list[Box]]:
    """The labels inside a chart, with their boxes; and the boxes of dots, of upright lines, and of pieces of curves."""
    labels, taken = list[tuple[str, Box]](), list[Box]()
    height, inside = float(re.findall(r'viewBox="0 0 \d+ (\d+)"', chart)[0]), chart.partition("</svg>")[0]
    for x, y, about in re.findall(r'<text x="([\d.]+)" y="([\d.-]+)" text-anchor="start">(.*?)</text>', inside):
        left, base = float(x), float(y)
        labels.append((about, (left, base - 9, left + 6.3 * len(about), base + 3)))
        assert left >= LEFT and left + 6.3 * len(about) <= float(re.findall(r"0 0 (\d+)", chart)[0]) - RIGHT
        assert base >= 9 and base + 3 <= height - BOTTOM
    for x, y in re.findall(r'<circle [^>]*cx="([\d.]+)" cy="([\d.]+)"', inside):
        taken.append((float(x) - 4, float(y) - 4, float(x) + 4, float(y) + 4))
    for x in re.findall(r'<line class="bought" x1="([\d.]+)"', inside):
        taken.append((float(x), TOP, float(x), height - BOTTOM))
    for text in re.findall(r'points="([^"]+)"', inside):
        points = [tuple(map(float, point.split(","))) for point in text.split()]
        for (x, y), (next_x, next_y) in pairwise(points):
            for at in range(21):
                here, there = x + (next_x - x) * at / 20, y + (next_y - y) * at / 20
                taken.append((here, there, here, there))
    return labels, taken


def charts_of(page: str) -> list[str]:
    return re.findall(r'<svg class="chart .*?</svg>', page, re.DOTALL)


@pytest.mark.parametrize("arguments", [
    ("agents",), ("conversations",), ("documents",), ("agents", "--users", "4"), ("agents", "--users", "30"),
    ("agents", "--kv-bytes-per-token", "64KiB", "--device", "24GiB", "--prefill-tokens-per-s", "8000"),
    ("agents", "--host-gbs", "3"), ("agents", "--host", "200GiB"), ("conversations", "--device", "10GiB"),
])  # fmt: skip
def test_labels_of_charts_overlap_nothing(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """No curve, dot, upright line, or other label, in wide and narrow windows. Each is inside the chart."""
    assert main(["--mix", *arguments, "--html", str(tmp_path / "page.html")]) == 0
    charts = charts_of((tmp_path / "page.html").read_text())
    assert len(charts) == 4
    for chart in charts:
        labels, taken = boxes_of(chart)
        assert any("device alone" in about for about, _ in labels)
        for number, (about, box) in enumerate(labels):
            others = [*taken, *(other for _, other in labels[:number])]
            assert not any(overlap(box, other) for other in others), about


def test_the_chart_of_hits_counts_what_the_table_counts(tmp_path: Path) -> None:
    """Prompt tokens, not blocks: a dot has the share that its row has, also where the two differ. No label of a line
    repeats a share."""
    assert main(["--mix", "agents", "--block-tokens", "8192", "--html", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    dots = dict(re.findall(r"<title>eager, lru, (.*?): (.*?)</title>", page))
    rows = dict(re.findall(r"<td>host (.*?)</td><td>(?:&#8805; )?(.*?)</td>", page))
    assert len(rows) >= 6 and dots == rows
    assert not any("%" in about for chart in charts_of(page) for about, _ in boxes_of(chart)[0])
