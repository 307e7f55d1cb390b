"""`html FILE`: one page that needs no network and no other file."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any, TextIO

from .._common.tiers import TIERS
from .book import DERIVED
from .drawing import MAX_DRAWN, Drawing
from .output import asset, content_hash, filled_in, whole_file
from .scan import Scan
from .summary import STATES, meaning
from .timelines import pool_field
from .wording import counted, size

SCRIPTS = ("format.js", "data.js", "view.js", "gantt.js", "pools.js", "details.js", "main.js")
_FORMAT = 3


def write_page(log: Path, file: Path, progress: TextIO, until_s: float | None = None) -> str:
    """Read `log`, write `file`. Returns a line about it. Raises `OSError`, or `EmptyLogError`."""
    drawing = Drawing()
    scan = Scan.of(log, drawing, progress, until_s)
    with whole_file(file, beside=log) as output:
        scan.run()
        page = make_page(scan, drawing)
        output.write(page)
    return f"{file}: {size(len(page))}, {counted(scan.book.num_timelines, 'timeline', 'timelines')}"


def make_page(scan: Scan, drawing: Drawing) -> str:
    """The page as text, in ASCII."""
    style, script = _asset("style.css"), "\n".join(map(_asset, SCRIPTS))
    parts = {
        "TITLE": html.escape(scan.path.name).encode("ascii", "xmlcharrefreplace").decode(),
        "POLICY": f"default-src 'none'; style-src {content_hash(style)}; script-src {content_hash(script)}",
        "STYLE": style,
        "DATA": _for_script(_data(scan, drawing)),
        "SCRIPT": script,
    }
    return filled_in(_asset("page.html"), parts)


def _data(scan: Scan, drawing: Drawing) -> dict[str, Any]:
    remarks = scan.remarks()
    if drawing.num_left_out:
        remarks.append(
            f"{counted(drawing.num_left_out, 'request or job', 'requests and jobs')} not drawn: "
            f"a page holds the first {MAX_DRAWN:,} of each; split the log"
        )
    return {
        "format": _FORMAT,
        "title": scan.title(),
        "first_s": scan.first_s,
        "last_s": scan.last_s,
        "states": {state: meaning(state, *scan.runtimes.lives) for state in STATES},
        "remarks": remarks,
        "derived": DERIVED,
        "runtimes": [
            {
                "number": life.number,
                "name": life.name,
                "about": life.sizes() + life.ending(),
                "start_s": life.opened_s,
                "stop_s": life.last_s,
                **{pool_field(row.tier): life.pools.get(row.tier, 0) for row in TIERS},
            }
            for life in scan.runtimes.lives
        ],
        **drawing.finish(),
    }


def _asset(name: str) -> str:
    return asset(__package__, name)


def _for_script(data: dict[str, Any]) -> str:
    """JSON in which nothing looks like markup, because `</script>` in a request id must not end the script."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
