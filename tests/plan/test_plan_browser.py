"""The page of a plan in a browser: it fits wide and narrow windows, in light and dark."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from synthetic_traces import conversations, write_trace

from aoffload.plan.command import main
from benchmarks.trace_page import CHROMIUM

pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path")]


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All columns: times, prices, a disk, and more than one kind of rows."""
    directory = tmp_path_factory.mktemp("plan")
    trace = write_trace(directory / "asked.jsonl", conversations(20, 400))
    sizes = ("--kv-bytes-per-token", "1KiB", "--device", "1200KiB", "--host", "3MiB,12MiB", "--disk", "20MiB")
    speeds = ("--prefill-tokens-per-s", "2000", "--host-gbs", "1", "--disk-gbs", "1", "--store", "eager,lazy")
    prices = ("--price-per-gib-month", "4000", "--disk-price-per-gib-month", "300", "--block-tokens", "8")
    assert main([str(trace), *sizes, *speeds, *prices, "--html", str(directory / "page.html")]) == 0
    return directory / "page.html"


@pytest.fixture(scope="module")
def browser(page_file: Path) -> Iterator[Any]:
    """Started after `page_file`: while it runs, its event loop is this thread's, and there can be no other."""
    driver = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra `browser`)")
    options = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses its sandbox to root
    with driver.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        yield started
        started.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 400])
def test_it_fits_the_window(browser: Any, page_file: Path, scheme: str, width: int) -> None:
    """The page does not scroll sideways. The table fits 1,200 pixels, and scrolls in its own box at 400. One drawing
    of each chart is shown, with letters of at least 11 pixels, in a colour that stands out from the ground."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.goto(page_file.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    tables = page.evaluate("[...document.querySelectorAll('.scroller')].map(e => e.scrollWidth - e.clientWidth)")
    assert [excess > 0 for excess in tables] == [width == 400]
    shown = page.evaluate(
        "[...document.querySelectorAll('svg.chart')].filter(e => e.getBoundingClientRect().width)"
        ".map(e => 12 * e.getBoundingClientRect().width / e.viewBox.baseVal.width)"
    )
    assert len(shown) == 2 and min(shown) >= 11
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}[scheme]
    assert complaints == []
    context.close()
