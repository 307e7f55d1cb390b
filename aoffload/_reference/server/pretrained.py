"""The tokenizer of a model directory, by transformers: files only, no code from the directory, no network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from ...errors import ConfigError
from .errors import bad_field
from .tokenizer import Message, Speller

__all__ = ["PretrainedTokenizer"]

FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
"""A directory with a tokenizer has at least one of these."""
MAX_HELD = 8
"""Text that ends in an incomplete character is held back for fewer tokens than this, then shown as it is."""
REPLACEMENT = "\ufffd"


class PretrainedTokenizer:
    """A `Tokenizer` around one of transformers."""

    def __init__(self, tokenizer: Any, end_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        own = tokenizer.eos_token_id
        self.end_token_ids = end_token_ids | ({own} if own is not None else frozenset())

    @classmethod
    def of_directory(cls, directory: str | Path, end_token_ids: frozenset[int]) -> PretrainedTokenizer | None:
        """The tokenizer in `directory`; None if it has none. `ConfigError` naming `model` if it cannot be loaded."""
        if not any((Path(directory) / name).exists() for name in FILES):
            return None
        from transformers import AutoTokenizer

        try:
            found = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
            found.decode(found.encode("a"))
        except Exception as error:  # whatever transformers makes of files that are cut off, or lie
            problem = f"{type(error).__name__}: {error}".partition("\n")[0]
            told = f"the tokenizer in {str(directory)!r} can't be loaded: {problem:.300}"
            raise ConfigError("model", told) from error
        return cls(found, end_token_ids)

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer`."""
        return list(self._tokenizer.encode(text))

    def render(self, messages: Sequence[Message]) -> list[int]:
        """See `Tokenizer`."""
        from jinja2 import TemplateError

        if not self._tokenizer.chat_template:
            raise bad_field("messages", "this model has no chat template: use /v1/completions")
        said = [attrs.asdict(message) for message in messages]
        try:
            return list(self._tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=False))
        except TemplateError as error:
            raise bad_field("messages", f"this model's chat template refuses them: {error!s:.200}") from error

    def speller(self) -> Speller:
        """See `Tokenizer`."""
        return _Window(self._tokenizer)


class _Window:
    """Decodes the last few tokens again with each new one: how a token is spelled depends on the one before it.

    ids         ... | first .. shown | shown .. end
    text              said already     new, once it ends in a whole character
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._first = self._shown = 0

    def feed(self, token_id: int) -> str:
        self._ids.append(token_id)
        new = self._new_text()
        if new.endswith(REPLACEMENT) and len(self._ids) - self._shown < MAX_HELD:
            return ""
        if new:
            self._first, self._shown = self._shown, len(self._ids)
        return new

    def finish(self) -> str:
        return self._new_text()

    def _new_text(self) -> str:
        said = self._decode(self._ids[self._first : self._shown])
        return self._decode(self._ids[self._first :])[len(said) :]

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
