"""The time until a browser shows the page of a long log, and finds a request in it. Needs playwright and a Chromium."""

from __future__ import annotations

import io
import os
import shutil
import statistics
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from aoffload.trace.page import write_page

from .harness import Row
from .peer import Peer
from .synthetic_log import write_synthetic

__all__ = ["CHROMIUM", "run"]

NUM_EVENTS = 200_000
NUM_ROUNDS = 5
OPENS_WITHIN_MS = 5000.0
FINDS_WITHIN_MS = 2000.0
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name)) is not None), None)


def run(vllm: Peer | None = None) -> list[Row]:
    """Milliseconds from requesting the file until everything is drawn, and from typing an id until its timeline is
    shown."""
    if CHROMIUM is None or find_spec("playwright") is None:
        print("trace_page: there is no Chromium, or no playwright (group `browser`)", file=sys.stderr)
        return []
    with TemporaryDirectory() as directory:
        log, page = Path(directory) / "events.log", Path(directory) / "page.html"
        write_synthetic(log, NUM_EVENTS)
        write_page(log, page, io.StringIO())
        opened, found = zip(*_look(page.as_uri()), strict=True)
    return [
        _row(f"page of {NUM_EVENTS:,} events opens", opened, OPENS_WITHIN_MS),
        _row("a request is found in it", found, FINDS_WITHIN_MS),
    ]


def _look(uri: str) -> list[tuple[float, float]]:
    from playwright.sync_api import sync_playwright

    options = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses its sandbox to root
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        took = [_open_and_find(browser, uri) for _ in range(NUM_ROUNDS)]
        browser.close()
    return took


def _open_and_find(browser: Any, uri: str) -> tuple[float, float]:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    began = time.perf_counter()
    page.goto(uri)
    page.wait_for_selector("body[data-ready-ms]")
    is_there = time.perf_counter()
    page.locator("#wanted").fill("req-010000")
    page.locator("#wanted").press("Enter")
    page.locator("#timeline", has_text="req-010000").wait_for()
    is_found = time.perf_counter()
    page.close()
    return (is_there - began) * 1e3, (is_found - is_there) * 1e3


def _row(name: str, took_ms: tuple[float, ...], wanted_ms: float) -> Row:
    median = statistics.median(took_ms)
    return Row(
        name=name, value=median, unit="ms", spread=f"{min(took_ms):.3g}-{max(took_ms):.3g}", against="its aim",
        limit=wanted_ms, ratio=median, wanted=wanted_ms, is_at_most=True,
    )  # fmt: skip
