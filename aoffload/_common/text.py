"""Text from outside, made safe to print."""

from __future__ import annotations


def plain(text: str) -> str:
    """`text` with all unprintable characters escaped, because a terminal would obey escape sequences in a log, a file
    name, an address or an answer."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
