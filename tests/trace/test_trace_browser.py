"""The page as a person sees it: in a browser, from a file, without a network."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_log import write_real

from aoffload.trace.page import write_page
from benchmarks.synthetic_log import line, write_synthetic
from benchmarks.trace_page import CHROMIUM

PICTURES = Path(__file__).parents[2] / "build" / "trace"
NUM_EVENTS = 200_000
FIRST = "[data-runtime='1']"
REQUESTS = f"{FIRST} .requests canvas"
LOADS, STORES = (f"{FIRST} [data-link='{link}'] canvas" for link in ("load from host", "store to host"))
DEVICE, HOST = (f"{FIRST} [data-tier='{tier}']" for tier in ("device", "host"))
RECORD_TEXTS = """
    window.texts = [];
    const { fillText } = CanvasRenderingContext2D.prototype;
    CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
        window.texts.push(text);
        return fillText.call(this, text, ...rest);
    };
"""

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path")]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("browser")
    write_real(directory / "real.log")
    write_page(directory / "real.log", directory / "real.html", io.StringIO())
    return directory / "real.html"


@pytest.fixture(scope="module")
def browser(small: Path) -> Iterator[Any]:
    """Started after `small`: while it runs, its event loop is this thread's, and there can be no other."""
    driver = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (group `browser`)")
    options = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses its sandbox to root
    with driver.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        yield started
        started.close()


@pytest.fixture
def opened(browser: Any) -> Iterator[Any]:
    """Opens a page from its file; afterwards it has asked for nothing else and complained about nothing."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, offline=True)
    context.add_init_script(RECORD_TEXTS)
    page = context.new_page()
    page.set_default_timeout(120_000)
    complaints: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))

    def open_file(file: Path) -> Any:
        page.goto(file.as_uri())
        page.wait_for_selector("body[data-ready-ms]")
        return page

    yield open_file
    assert complaints == []
    assert len(asked) == 1 and asked[0].startswith("file:")
    context.close()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("browser")
    write_synthetic(directory / "large.log", NUM_EVENTS)
    write_page(directory / "large.log", directory / "large.html", io.StringIO())
    return directory / "large.html"


def picture(page: Any, name: str) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=PICTURES / name, full_page=True)


def num_coloured(page: Any, selector: str) -> int:
    """Pixels of a canvas that are neither transparent nor grey."""
    count = """canvas => {
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        let count = 0;
        for (let at = 0; at < data.length; at += 4) {
            const [red, green, blue, alpha] = data.slice(at, at + 4);
            if (alpha > 200 && Math.max(red, green, blue) - Math.min(red, green, blue) > 60) count += 1;
        }
        return count;
    }"""
    found: int = page.locator(selector).evaluate(count)
    return found


def axis_labels_changed(page: Any, before: bytes) -> bool:
    return bool(page.locator("#axis").screenshot() != before)


def search(page: Any, text: str) -> None:
    page.locator("#wanted").fill(text)
    page.locator("#wanted").press("Enter")


def tip_at_middle(page: Any, name: str, runtime: int = 1) -> str:
    """What is said about `name` where the pointer finds it: in the middle, wherever its lane is."""
    box = page.locator(f"[data-runtime='{runtime}'] .requests canvas").bounding_box()
    for y in range(2, int(box["height"]), 2):
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + y)
        tip = page.locator("#tip")
        if tip.is_visible() and tip.inner_text().split("\n")[0] == name:
            return str(tip.inner_text())
    raise AssertionError(f"no tip about {name}")


def drawn_texts(page: Any) -> list[str]:
    """What is written on canvases, after a frame."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    found: list[str] = page.evaluate("window.texts.splice(0)")
    return found


def test_the_panels_are_drawn(opened: Any, small: Path) -> None:
    """Requests, jobs and pools are on the screen, with the log's name."""
    page = opened(small)
    for selector in (REQUESTS, LOADS, STORES, DEVICE, HOST):
        assert num_coloured(page, selector) > 50, selector
    assert "real.log: 108 events" in page.locator("#title").inner_text()
    page.locator("#help summary").click()
    assert "no event carries the counts of a pool" in page.locator("#derived").inner_text()
    picture(page, "small.png")


def test_each_runtime_has_a_frame_with_its_name_and_named_rows(opened: Any, small: Path) -> None:
    """Two runtimes of one log: each row says what it shows, to people who see and to those who listen."""
    page = opened(small)
    frames = page.locator(".runtime")
    assert [text.split("\n")[0] for text in frames.locator("h2").all_inner_texts()] == [
        f"runtime {name} 8 device blocks, 9 in host memory" for name in ("first", "second")
    ]
    for frame in frames.all():
        assert frame.evaluate("frame => parseFloat(getComputedStyle(frame).borderTopWidth)") >= 1
        rows = frame.locator(".row").evaluate_all("rows => rows.map((row) => row.querySelector('b').textContent)")
        assert rows == ["Requests", "Load from host", "Store to host", "Device memory", "Host memory"]
        assert "5 done, 1 aborted" in frame.locator(".label").first.inner_text()
        spoken = frame.locator("canvas").evaluate_all("all => all.map((one) => one.getAttribute('aria-label'))")
        name = frame.get_attribute("aria-label")
        assert spoken == [f"{row} of {name} over time" for row in rows]


def test_a_request_s_name_stands_on_its_bar(opened: Any, small: Path) -> None:
    """Where it fits, without what all ids of the runtime begin with."""
    page = opened(small)
    search(page, "holder")
    assert "holder" in drawn_texts(page)
    fit = """([text, width]) => fitText({ measureText: ({ length }) => ({ width: 10 * length }) }, text, width)"""
    fitted = [page.evaluate(fit, ["12 of holder, waiter", width]) for width in (200, 199, 20, 19)]
    assert fitted == ["12 of holder, waiter", "12", "12", ""]
    assert page.evaluate(fit, ["3f2a91c0-7d11", 100]) == "3f2a91c0\u2026" and not page.evaluate(
        fit, ["user1-turn2", 60]
    )
    assert page.evaluate("sharedPrefix(['chat-1-a', 'chat-1-b', 'chat-12'])") == "chat-"
    assert page.evaluate("sharedPrefix(['one'])") == page.evaluate("sharedPrefix(['cat', 'car'])") == ""


def test_a_large_pool_does_not_flatten_what_is_used_of_it(opened: Any, small: Path) -> None:
    """Each plot has its own scale, which ends at the pool, or a little above what was used most; it says so."""
    page = opened(small)
    assert page.evaluate("topOfScale(148, 4096)") == 200
    assert page.evaluate("[topOfScale(60, 64), topOfScale(70, 64), topOfScale(0, 64)]") == [64, 70, 64]
    life = {"start_s": 0, "stop_s": 9, "number": 1, "num_host_blocks": 4096}
    tier = {"name": "host", "pool": "num_host_blocks", "area": "area", "line": "line"}
    page.evaluate(
        """([life, tier]) => {
            const usages = { 1: { area: { at_s: [1], value: [148] }, line: { at_s: [], value: [] } } };
            window.texts.length = 0;
            new Plot(document.querySelector(".plot"), tier, life, { usages }, new View(0, 9)).draw();
        }""",
        [life, tier],
    )
    assert page.evaluate("window.texts") == ["200 (the pool is higher: 4,096)", "100", "0"]


def test_numbers_stand_under_their_header_which_has_the_unit(opened: Any, small: Path) -> None:
    """Flush right, in digits of one width, in every table."""
    page = opened(small)
    search(page, "holder")
    tables = page.locator("#timeline table")
    assert tables.count() == 3
    assert "for (ms)" in tables.first.inner_text()
    for table in tables.all():
        columns = table.evaluate("""table => [...table.rows[0].cells].map((header, at) => ({
            isNumber: header.className === "number",
            texts: [...table.tBodies[0].rows].map((row) => row.cells[at].textContent),
            looks: [...table.rows].map(({ cells }) => {
                const { textAlign, fontVariantNumeric } = getComputedStyle(cells[at]);
                return `${textAlign} ${fontVariantNumeric}`;
            }),
        }))""")
        assert any(column["isNumber"] for column in columns)
        for column in columns:
            wanted = "right tabular-nums" if column["isNumber"] else "left normal"
            assert {look.replace("start", "left") for look in column["looks"]} == {wanted}
            if column["isNumber"]:
                assert all(re.fullmatch(r"[\d.,:]*", text) for text in column["texts"])


def test_the_legend_says_what_each_colour_is(opened: Any, small: Path) -> None:
    """In words and with the name that the log has; no two entries of a group look alike."""
    page = opened(small)
    assert "waits for blocks (pinned)" in page.locator("#states").inner_text()
    assert "store: copy to a slower tier" in page.locator("#directions").inner_text()
    for group in ("#states", "#directions", "#measures"):
        marks = page.locator(f"{group} i").evaluate_all(
            "all => all.map((one) => getComputedStyle(one).backgroundColor + one.className)"
        )
        assert len(set(marks)) == len(marks) > 1
    drawn = {"matched", "pinned", "allocated", "loading", "running", "preempted"}
    text = page.locator("#states").inner_text()
    assert all(f"({state})" in text for state in drawn)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_telephone(opened: Any, small: Path, scheme: str) -> None:
    """Nothing is wider than the screen, with the details open too; labels stand above their rows."""
    page = opened(small)
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": 400, "height": 800})
    search(page, "holder")
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    label, canvas = (page.locator(f"{FIRST} {what}").first.bounding_box() for what in (".label", "canvas"))
    assert label["y"] + label["height"] <= canvas["y"] and canvas["width"] > 340
    picture(page, f"narrow-{scheme}.png")


def test_what_is_not_over_and_what_to_know_stand_first_as_tables(opened: Any, tmp_path: Path) -> None:
    """Each figure under a header that has its unit; a click on the name leads there."""
    log = tmp_path / "stuck.log"
    match = {"num_tokens": 9, "num_device_tokens": 0, "num_host_tokens": 0}
    log.write_text(
        line(0, "runtime_opened", num_device_blocks=8, num_host_blocks=8) + "\n"
        + line(1, "request_matched", request_id="stuck", **match) + "\n"
        + line(3, "request_pinned", request_id="stuck") + "\n"
        + line(90, "loads_paused", num_quarantined=7) + "\n"
    )  # fmt: skip
    write_page(log, tmp_path / "stuck.html", io.StringIO())
    page = opened(tmp_path / "stuck.html")
    cells = "rows => rows.map(({ cells }) => [...cells].map((cell) => cell.textContent))"
    assert page.locator("#open tr").evaluate_all(cells) == [
        ["open for (s)", "request or step", "state", "in that state for (s)", "runtime"],
        ["89.000", "stuck", "waits for blocks (pinned)", "87.000", "runtime 1"],
    ]
    header, (time, event, runtime) = page.locator("#notes tr").evaluate_all(cells)
    assert header == ["time (UTC)", "event", "runtime"] and time.endswith("01:30.000") and runtime == "runtime 1"
    assert "7" in event
    page.get_by_role("button", name="stuck", exact=True).click()
    assert "stuck" in page.locator("#timeline h2").inner_text()


def test_of_many_runtimes_the_first_are_shown_and_each_is_found(opened: Any, tmp_path: Path) -> None:
    """The page says how many there are; the choice at the top and the search lead to the others."""
    log = tmp_path / "many.log"
    with log.open("w") as file:
        for at in range(15):
            bound = {"run": f"r{at + 1}"}
            pools = {"num_device_blocks": 8, "num_host_blocks": 8}
            file.write(line(at, "runtime_opened", **pools, **bound) + "\n")
            match = {"num_tokens": 9, "num_device_tokens": 0, "num_host_tokens": 0}
            file.write(line(at, "request_matched", request_id=f"only-in-{at + 1}", **match, **bound) + "\n")
            file.write(line(at + 1, "runtime_closed", num_quarantined_jobs=0, **bound) + "\n")
    write_page(log, tmp_path / "many.html", io.StringIO())
    page = opened(tmp_path / "many.html")
    assert page.locator(".runtime").count() == 12
    assert "The first 12 of 15 runtimes" in page.locator("#rest").inner_text()
    page.locator("#runtime").select_option("13")
    assert page.locator(".runtime h2").all_inner_texts() == ["runtime r13 8 device blocks, 8 in host memory"]
    assert not page.locator("#rest").is_visible()
    search(page, "only-in-15")
    assert "runtime r15" in page.locator(".runtime h2").inner_text()


def test_search_finds_a_request_and_shows_its_timeline(opened: Any, small: Path) -> None:
    """Typing part of an id lists who has it; Enter goes there, and the timeline stands below."""
    page = opened(small)
    before = page.locator("#axis").screenshot()
    page.keyboard.press("/")
    page.keyboard.type("wait")
    assert page.locator("#matches li").count() == 2
    assert page.locator("#found").inner_text() == "2 found"
    page.keyboard.press("Enter")
    timeline = page.locator("#timeline")
    assert "waiter" in timeline.inner_text() and "aborted: the client left" in timeline.inner_text()
    assert "pinned" in timeline.inner_text() and "prompt tokens" in timeline.inner_text()
    page.evaluate("() => new Promise(drawn => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
    assert axis_labels_changed(page, before)
    page.keyboard.press("Escape")
    assert not timeline.is_visible()
    search(page, "holder")
    page.get_by_role("button", name="close").click()
    assert not timeline.is_visible()


def test_hovering_says_what_a_bar_is(opened: Any, small: Path) -> None:
    """Beside the pointer: the id, the state there and for how long, what was found, and the runtime."""
    page = opened(small)
    search(page, "holder")
    tip = tip_at_middle(page, "holder")
    assert (
        "computes (running) for" in tip
        and "done" in tip
        and "120 tokens: 0 on the device" in tip
        and "runtime first" in tip
    )
    page.locator(DEVICE).hover()
    assert "used of 8 blocks" in page.locator("#tip").inner_text()
    page.locator("#runtime").select_option("2")
    assert not page.locator("#tip").is_visible()
    page.locator("[data-tier='device']").hover()
    assert "runtime second" in page.locator("#tip").inner_text()
    page.locator("h1").hover()
    assert not page.locator("#tip").is_visible()


def test_the_view_zooms_moves_and_comes_back(opened: Any, small: Path) -> None:
    """Wheel, keys, drag, the runtime's choice and the button for the whole log."""
    page = opened(small)

    def drawn(selector: str) -> bytes:
        page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return bytes(page.locator(selector).screenshot())

    def axis() -> bytes:
        return drawn("#axis")

    whole = axis()
    page.locator(REQUESTS).hover()
    page.keyboard.down("Control")
    page.mouse.wheel(0, -600)
    page.keyboard.up("Control")
    zoomed = axis()
    assert zoomed != whole
    page.locator(REQUESTS).hover()
    page.mouse.down()
    page.mouse.move(500, 260, steps=4)
    page.mouse.up()
    assert axis() not in (whole, zoomed)
    assert not page.locator("#timeline").is_visible()  # a drag is no click
    page.keyboard.press("0")
    assert axis() == whole
    page.mouse.move(0, 0)
    all_requests = drawn(REQUESTS)
    page.locator("#runtime").select_option("2")
    assert not page.locator(REQUESTS).is_visible() and page.locator(".runtime").count() == 1
    page.get_by_role("button", name="whole log").click()
    page.locator("#runtime").select_option("0")
    assert axis() == whole and drawn(REQUESTS) == all_requests


def test_the_wheel_alone_scrolls_the_page(opened: Any, small: Path) -> None:
    """A long page can be scrolled wherever the pointer is; times stay in view."""
    page = opened(small)
    page.set_viewport_size({"width": 1280, "height": 500})
    drawn_texts(page)
    page.locator(REQUESTS).hover()
    page.mouse.wheel(0, 300)
    assert page.evaluate("""async () => {
        for (let frames = 0; frames < 300 && !window.scrollY; frames++) await new Promise(requestAnimationFrame);
        return window.scrollY;
    }""")
    assert drawn_texts(page) == []  # nothing was zoomed, so nothing was drawn
    assert page.locator("#axis").bounding_box()["y"] >= 0


def test_the_details_of_a_bar_are_seen_at_once(opened: Any, small: Path) -> None:
    """However long the page is, they stand at the lower end of the screen."""
    page = opened(small)
    page.set_viewport_size({"width": 1280, "height": 500})
    page.evaluate("page => document.querySelector('#wanted').scrollIntoView()")
    search(page, "holder")
    box = page.locator("#timeline h2").bounding_box()
    assert 0 <= box["y"] < 500


def test_two_hundred_thousand_events_can_be_looked_at(opened: Any, large: Path) -> None:
    """All is drawn, and search and hover find one request of twenty thousand."""
    page = opened(large)
    assert num_coloured(page, REQUESTS) > 10_000
    picture(page, "large.png")
    search(page, "req-010000")
    assert "req-010000" in page.locator("#timeline").inner_text()
    assert "16 tokens" not in tip_at_middle(page, "req-010000")
    picture(page, "found.png")
