"""What a prompt may be: a text, token ids, or a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import attrs

from .tokenizer import Message, Tokenizer

__all__ = ["ChatPrompt", "Prompt", "TextPrompt", "TokenPrompt"]


class Prompt(Protocol):
    @property
    def num_characters(self) -> int:
        """Characters to tokenize."""
        ...

    def encode(self, tokenizer: Tokenizer) -> Sequence[int]: ...


@attrs.frozen
class TextPrompt:
    text: str

    @property
    def num_characters(self) -> int:
        return len(self.text)

    def encode(self, tokenizer: Tokenizer) -> Sequence[int]:
        return tokenizer.encode(self.text)


@attrs.frozen
class TokenPrompt:
    token_ids: Sequence[int]

    @property
    def num_characters(self) -> int:
        return 0

    def encode(self, tokenizer: Tokenizer) -> Sequence[int]:
        return self.token_ids


@attrs.frozen
class ChatPrompt:
    messages: Sequence[Message]

    @property
    def num_characters(self) -> int:
        return sum(len(message.content) for message in self.messages)

    def encode(self, tokenizer: Tokenizer) -> Sequence[int]:
        return tokenizer.render(self.messages)
