"""Text to tokens and back: the protocol, and the byte-level tokenizer for models that come without one."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

import attrs

from ...errors import ConfigError

__all__ = ["ByteTokenizer", "Message", "Speller", "Tokenizer"]

NUM_BYTES = 256
SPECIALS = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
"""Markers of the parts of a chat. They have ids of their own, which no text is encoded as."""
SYLLABLES = tuple(consonant + vowel for consonant in "bdklmnrstv" for vowel in "aeiou")


@attrs.frozen
class Message:
    role: str
    """`system`, `user` or `assistant`."""
    content: str


class Speller(Protocol):
    """Turns one answer's tokens into text. A character may take several tokens, so a token may give no text yet."""

    def feed(self, token_id: int) -> str:
        """The text that is complete with this token."""
        ...

    def finish(self) -> str:
        """The text that is left, with replacement characters for incomplete ones."""
        ...


class Tokenizer(Protocol):
    end_token_ids: frozenset[int]
    """Tokens that end an answer and are no part of its text."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt."""
        ...

    def render(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a chat, up to where the assistant's answer begins. `ApiError` if the model cannot render it."""
        ...

    def speller(self) -> Speller: ...


class ByteTokenizer:
    """Every byte of UTF-8 is a token, id 0 to 255; four ids mark the parts of a chat.

    The other ids of the vocabulary, which a model with random weights picks as often as any, spell words: with them
    one sees whether two answers differ. No text is encoded as them.
    """

    def __init__(self, vocab_size: int) -> None:
        """Raises `ConfigError` naming `vocab_size` if that has no room for the bytes and the parts of a chat."""
        if vocab_size < NUM_BYTES + len(SPECIALS):
            raise ConfigError("vocab_size", f"must be at least {NUM_BYTES + len(SPECIALS)}, got {vocab_size}")
        self.vocab_size = vocab_size
        self.special_ids = {name: NUM_BYTES + index for index, name in enumerate(SPECIALS)}
        self.end_token_ids = frozenset([self.special_ids["<|end|>"]])

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer`."""
        return list(text.encode())

    def render(self, messages: Sequence[Message]) -> list[int]:
        """See `Tokenizer`."""
        ids: list[int] = []
        for message in messages:
            ids += [self.special_ids[f"<|{message.role}|>"], *message.content.encode(), *self.end_token_ids]
        return [*ids, self.special_ids["<|assistant|>"]]

    def speller(self) -> Speller:
        """See `Tokenizer`."""
        return _ByteSpeller(self)

    def spelling(self, token_id: int) -> bytes:
        """The bytes that a token stands for; empty for the markers of a chat."""
        if token_id < NUM_BYTES:
            return bytes([token_id])
        number = token_id - NUM_BYTES - len(SPECIALS)
        return b"" if number < 0 else word(number).encode()


class _ByteSpeller:
    def __init__(self, tokenizer: ByteTokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        return self._decoder.decode(self._tokenizer.spelling(token_id))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


def word(number: int) -> str:
    """The word of `number`, with a space before it: two syllables or more, a different word for each number."""
    syllables: list[str] = []
    while number or len(syllables) < 2:
        number, index = divmod(number, len(SYLLABLES))
        syllables.append(SYLLABLES[index])
    return " " + "".join(reversed(syllables))
