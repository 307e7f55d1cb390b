"""The page as a person sees it: in a browser, from a file, without a network."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_log import write_real

from aoffload.trace.page import write_page
from benchmarks.synthetic_log import write_synthetic
from benchmarks.trace_page import CHROMIUM

PICTURES = Path(__file__).parents[2] / "build" / "trace"
NUM_EVENTS = 200_000
LOADS, STORES = (f"[data-link='{link}'] canvas" for link in ("load from host", "store to host"))

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


def tip_at_middle(page: Any, name: str) -> str:
    """What is said about `name` where the pointer finds it: in the middle, wherever its lane is."""
    box = page.locator("#gantt canvas").bounding_box()
    for y in range(2, int(box["height"]), 2):
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + y)
        tip = page.locator("#tip")
        if tip.is_visible() and tip.inner_text().split("\n")[0] == name:
            return str(tip.inner_text())
    raise AssertionError(f"no tip about {name}")


def test_the_panels_are_drawn(opened: Any, small: Path) -> None:
    """Requests, jobs and pools are on the screen, with a legend and the log's name."""
    page = opened(small)
    for selector in ("#gantt canvas", LOADS, STORES, "#device", "#host"):
        assert num_coloured(page, selector) > 50, selector
    assert "real.log: 108 events" in page.locator("#title").inner_text()
    assert "running" in page.locator("#states").inner_text()
    assert "10 done" in page.locator("#counts").inner_text()
    page.locator("#why").click()
    assert "no event carries the counts of a pool" in page.locator("#derived").inner_text()
    picture(page, "small.png")


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


def test_hovering_says_what_a_bar_is(opened: Any, small: Path) -> None:
    """Beside the pointer: the id, the state there and for how long, what was found, and the runtime."""
    page = opened(small)
    search(page, "holder")
    tip = tip_at_middle(page, "holder")
    assert "running for" in tip and "done" in tip and "120 tokens: 0 on the device" in tip and "runtime first" in tip
    page.locator("#device").hover()
    assert "blocks in all" in page.locator("#tip").inner_text()
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
    page.locator("#gantt canvas").hover()
    page.mouse.wheel(0, -600)
    zoomed = axis()
    assert zoomed != whole
    page.mouse.down()
    page.mouse.move(700, 260, steps=4)
    page.mouse.up()
    assert axis() not in (whole, zoomed)
    assert not page.locator("#timeline").is_visible()  # a drag is no click
    page.keyboard.press("0")
    assert axis() == whole
    page.mouse.move(0, 0)
    all_requests = drawn("#gantt canvas")
    page.locator("#runtime").select_option("2")
    assert drawn("#gantt canvas") != all_requests  # how long that runtime was open is up to the machine
    page.get_by_role("button", name="whole log").click()
    page.locator("#runtime").select_option("0")
    assert axis() == whole and drawn("#gantt canvas") == all_requests


def test_two_hundred_thousand_events_can_be_looked_at(opened: Any, large: Path) -> None:
    """All is drawn, and search and hover find one request of twenty thousand."""
    page = opened(large)
    assert num_coloured(page, "#gantt canvas") > 10_000
    picture(page, "large.png")
    search(page, "req-010000")
    assert "req-010000" in page.locator("#timeline").inner_text()
    assert "16 tokens" not in tip_at_middle(page, "req-010000")
    picture(page, "found.png")
