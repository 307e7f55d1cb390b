"""Names of blocks that say nothing about their tokens: a keyed digest of the prefix up to the end of each block.

HMAC-SHA256 (RFC 2104) of the root's digest and all tokens so far, with the records of key spans, cut to 8 bytes. It is
computed along the prefix, each block's from the state behind the one before. Equal names mean equal prefixes; without
the secret nothing else can be learnt from them. Two of a million blocks get the same name once in 37 million files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from .._kernel.prefix import TOKEN_BYTES, KeySpan, Root

__all__ = ["DIGEST_BYTES", "BlockDigests"]

DIGEST_BYTES = 8
SHA256_BLOCK = 64


class BlockDigests:
    """`secret`: at most 64 bytes, the key of all digests."""

    def __init__(self, secret: bytes, block_tokens: int) -> None:
        key = secret.ljust(SHA256_BLOCK, b"\0")
        self._inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in key))
        self._outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in key))
        self.block_tokens = block_tokens

    def of(self, root: Root, tokens: bytes, spans: Iterable[KeySpan] = ()) -> list[str]:
        """The names of the whole blocks of `tokens` (little-endian int32), in hexadecimal digits."""
        running = self._inner.copy()
        running.update(root.hasher.digest())
        width, given = self.block_tokens * TOKEN_BYTES, tuple(spans)
        names: list[str] = []
        for at in range(0, len(tokens) - width + 1, width):
            running.update(tokens[at : at + width])
            if given:
                first = at // TOKEN_BYTES
                running.update(_records(given, first, first + self.block_tokens))
            outer = self._outer.copy()
            outer.update(running.copy().digest())
            names.append(outer.digest()[:DIGEST_BYTES].hex())
        return names


def _records(spans: Sequence[KeySpan], start: int, stop: int) -> bytes:
    """Of the spans that touch tokens `[start, stop)`. None encodes as tokens do."""
    return b"".join(span.record() for span in spans if span.start < stop and span.stop > start)
