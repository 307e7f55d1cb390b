"""Columns of numbers or text for the page: compressed while they grow, so that a long log needs little memory."""

from __future__ import annotations

import base64
import json
import sys
import zlib
from array import array
from typing import Any

import attrs

__all__ = ["NumberColumn", "TextColumn", "Vocabulary"]

_MAX_TEXTS, _ONE_OF_MANY = 4_096, "(one of many)"
_VALUES_AT_ONCE = 8_192
_TYPES = {"B": "u1", "H": "u2", "I": "u4", "d": "f8"}
_LIMITS = {"B": 0xFF, "H": 0xFFFF, "I": 0xFFFF_FFFF}


@attrs.define(eq=False)
class _Deflated:
    """Compresses bytes as they are added."""

    _compressor: Any = attrs.field(factory=lambda: zlib.compressobj(6))
    _output: bytearray = attrs.field(factory=bytearray)

    def add(self, data: bytes) -> None:
        self._output += self._compressor.compress(data)

    def finish(self) -> str:
        """Base64 of a zlib stream. Nothing can be added after that."""
        self._output += self._compressor.flush()
        return base64.b64encode(self._output).decode()


@attrs.define(eq=False)
class NumberColumn:
    """`typecode` as for `array`: B, H, I (counts, limited to the type's largest) or d."""

    typecode: str
    num_values: int = 0
    _values: array[Any] = attrs.field(init=False)
    _deflated: _Deflated = attrs.field(factory=_Deflated)

    def __attrs_post_init__(self) -> None:
        self._values = array(self.typecode)

    def append(self, value: float) -> None:
        limit = _LIMITS.get(self.typecode)
        self._values.append(value if limit is None else min(int(value), limit))
        self.num_values += 1
        if len(self._values) >= _VALUES_AT_ONCE:
            self._flush()

    def finish(self) -> dict[str, Any]:
        """The column in the page's format."""
        self._flush()
        return {"type": _TYPES[self.typecode], "length": self.num_values, "data": self._deflated.finish()}

    def _flush(self) -> None:
        if sys.byteorder == "big":
            self._values.byteswap()
        self._deflated.add(self._values.tobytes())
        del self._values[:]


@attrs.define(eq=False)
class TextColumn:
    """Texts, stored as a JSON array."""

    num_values: int = 0
    _deflated: _Deflated = attrs.field(factory=_Deflated)

    def append(self, text: str) -> None:
        self._deflated.add((("," if self.num_values else "[") + json.dumps(text)).encode())
        self.num_values += 1

    def finish(self) -> dict[str, Any]:
        self._deflated.add(b"]" if self.num_values else b"[]")
        return {"type": "text", "length": self.num_values, "data": self._deflated.finish()}


@attrs.define(eq=False)
class Vocabulary:
    """Repeated texts by number. New texts beyond the limit share one entry."""

    texts: list[str] = attrs.field(factory=list)
    _numbers: dict[str, int] = attrs.field(factory=dict)

    def number(self, text: str) -> int:
        if text not in self._numbers:
            if len(self.texts) >= _MAX_TEXTS and text != _ONE_OF_MANY:
                return self.number(_ONE_OF_MANY)
            self._numbers[text] = len(self.texts)
            self.texts.append(text)
        return self._numbers[text]
