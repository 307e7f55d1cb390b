"""Text to tokens and back: the protocol, the tokenizer of a model, and a byte-level one for models without."""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs

from ...errors import ConfigError, InvalidArgument
from .errors import bad_field

NUM_BYTES = 256
SPECIALS = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
"""Markers of the parts of a chat. They have ids of their own, and no text is encoded as one of them."""
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
        """The remaining text, with replacement characters for incomplete characters."""
        ...


class Tokenizer(Protocol):
    """Converts text to tokens, and tokens to text."""

    end_token_ids: frozenset[int]
    """Tokens that end an answer and are no part of its text."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt."""
        ...

    def render(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a chat, up to the beginning of the assistant's answer. `ApiError` if the model cannot render
        it."""
        ...

    def speller(self) -> Speller: ...


class ByteTokenizer:
    """Every byte of UTF-8 is a token, id 0 to 255. Four ids mark the parts of a chat.

    The other ids of the vocabulary spell words. A model with random weights picks them as often as any id, and the
    words show whether two answers differ. No text is encoded as these ids.
    """

    def __init__(self, vocab_size: int) -> None:
        """Raises `ConfigError` naming `vocab_size` if it is too small for the bytes and the parts of a chat."""
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


# -- tokenizer directory ---------------------------------------------------------------------------------------------
#
# The byte-level tokenizer as files: a directory that `AutoTokenizer.from_pretrained` loads without a network.
#
# It is for programs that count or make tokens on the client's side, such as load generators.

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + ('system' if message.role == 'developer' else message.role) + '|>' + message.content + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def write_tokenizer(tokenizer: ByteTokenizer, directory: str | Path, *, max_tokens: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`. Creates the directory if it is missing.

    The files encode text as the server does, except for the four markers of a chat, which the server encodes as plain
    text. Programs read `max_tokens` as the longest prompt. `InvalidArgument` names `directory` if it cannot be written.
    """
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_tokens,
        "eos_token": "<|end|>",
        "pad_token": "<|end|>",
        "additional_special_tokens": list(SPECIALS[1:]),
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        _write(Path(directory) / "tokenizer.json", _tokenizer_json(tokenizer))
        _write(Path(directory) / "tokenizer_config.json", config)
    except OSError as error:
        raise InvalidArgument("directory", f"cannot be written: {error}") from error


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _tokenizer_json(tokenizer: ByteTokenizer) -> dict[str, Any]:
    """The format of the tokenizers library: byte-pair encoding without merges."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added_token(name, token_id) for name, token_id in tokenizer.special_ids.items()],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": _vocabulary(tokenizer), "merges": [],
        },
    }  # fmt: skip


def _added_token(name: str, token_id: int) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": token_id, "content": name, **flags}


def _vocabulary(tokenizer: ByteTokenizer) -> dict[str, int]:
    characters = _byte_characters()
    names = [*characters, *SPECIALS]
    num_words = tokenizer.vocab_size - len(names)
    names += ["".join(characters[byte] for byte in word(number).encode()) for number in range(num_words)]
    return {name: token_id for token_id, name in enumerate(names)}


def _byte_characters() -> list[str]:
    """The character for each byte in such files: the byte's own if it is visible, otherwise one from 256 on."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(NUM_BYTES) if byte not in seen]
    return [chr(byte if byte in seen else NUM_BYTES + hidden.index(byte)) for byte in range(NUM_BYTES)]


# -- pretrained ------------------------------------------------------------------------------------------------------
#
# The tokenizer of a model directory, by transformers: files only, no code from the directory, no network.

FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
"""A directory with a tokenizer has at least one of these."""
MAX_HELD = 8
"""Text that ends in an incomplete character is held back for fewer tokens than this, and then shown as it is."""
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
        except Exception as error:  # any error of transformers for truncated or wrong files
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
            raise bad_field("messages", f"this model's chat template does not accept them: {error!s:.200}") from error

    def speller(self) -> Speller:
        """See `Tokenizer`."""
        return _Window(self._tokenizer)


class _Window:
    """Decodes the last few tokens again with each new one, because the spelling of a token depends on the one before
    it.

        ids         ... | first .. shown | shown .. end
        text              returned before  new, after it ends in a whole character
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
