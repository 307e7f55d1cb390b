"""Reads the data of a trace page without a browser."""

from __future__ import annotations

import base64
import json
import re
import zlib
from array import array
from pathlib import Path
from typing import Any

TYPES = {"u1": "B", "u2": "H", "u4": "I", "f8": "d"}


def page_data(page: Path) -> dict[str, Any]:
    """The embedded JSON, as it stands."""
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    data: dict[str, Any] = json.loads(found)
    return data


def column(raw: dict[str, Any]) -> list[Any]:
    """One column's values."""
    content = zlib.decompress(base64.b64decode(raw["data"]))
    values = json.loads(content) if raw["type"] == "text" else array(TYPES[raw["type"]], content).tolist()
    assert len(values) == raw["length"]
    return list(values)


def columns(raw: dict[str, Any]) -> dict[str, list[Any]]:
    return {name: column(one) for name, one in raw.items()}
