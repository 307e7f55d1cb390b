"""The bodies of /v1/completions and /v1/chat/completions, checked and turned into a `Wish`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn, Protocol, TypeVar

import attrs

from ..._common.hints import GivenHint
from .errors import ApiError, bad_field, too_long
from .hints import ClientHint, hints_of, read_control
from .tokenizer import Message, Tokenizer

# -- fields ----------------------------------------------------------------------------------------------------------
#
# The fields of a body. Each is read by name and type, and unread fields are refused by name.

MAX_SHOWN = 100
"""Most characters of a client's value that an error repeats."""
Value = TypeVar("Value")
Default = TypeVar("Default")
Reader = Callable[[str, object], Value]
"""Takes the path of a value in the body, and the value. Raises `ApiError`."""


@attrs.define(eq=False)
class Fields:
    """An object of the body. `where` is its path: "" for the body itself. null counts as missing."""

    _values: Mapping[str, object]
    _where: str = ""
    _unread: set[str] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._unread = {name for name, value in self._values.items() if value is not None}

    @classmethod
    def of_body(cls, body: bytes) -> Fields:
        try:
            found = json.loads(body, parse_constant=_refuse_constant)
        except RecursionError:
            raise ApiError(400, "the body is nested too deeply") from None
        except ValueError as error:  # not UTF-8, not JSON, or an integer of thousands of digits
            raise ApiError(400, f"the body is not JSON: {error}") from None
        if not isinstance(found, dict):
            raise ApiError(400, f"the body must be a JSON object, not {_type_name(found)}")
        return cls(found)

    @classmethod
    def inside(cls, param: str, value: object) -> Fields:
        """A `Reader` of objects inside the body."""
        if not isinstance(value, dict):
            raise bad_field(param, f"must be an object, not {_type_name(value)}")
        return cls(value, f"{param}.")

    def required(self, name: str, read: Reader[Value]) -> Value:
        if self._values.get(name) is None:
            raise bad_field(self._where + name, "is missing")
        self._unread.discard(name)
        return read(self._where + name, self._values[name])

    def optional(self, name: str, read: Reader[Value], default: Default) -> Value | Default:
        if self._values.get(name) is None:
            return default
        return self.required(name, read)

    def ignored(self, *names: str) -> None:
        """Accept fields that never change an answer, whatever their values are."""
        self._unread.difference_update(names)

    def neutral(self, name: str, *values: object) -> None:
        """Accept an unsupported field only with one of `values`, which do not change the answer."""
        value = self._values.get(name)
        if value is not None and not any(_is_same(value, neutral) for neutral in values):
            known = ", ".join(json.dumps(neutral) for neutral in (*values, None))
            raise bad_field(
                self._where + name, f"is not supported; the only accepted values are {known}", "unsupported_value"
            )
        self._unread.discard(name)

    def finish(self) -> None:
        """Refuse unread fields: each is a typing mistake, or would be ignored silently."""
        if self._unread:
            name = min(self._unread)
            shown = name if len(name) <= MAX_SHOWN else f"{name[:MAX_SHOWN]}..."
            raise bad_field(self._where + shown, "is not a field of this request", "unknown_field")


def text(param: str, value: object) -> str:
    """A `Reader` of strings that can be encoded. A lone surrogate cannot."""
    if not isinstance(value, str):
        raise bad_field(param, f"must be a string, not {_type_name(value)}")
    if not is_text(value):
        raise bad_field(param, "is not valid text: it holds half of a surrogate pair")
    return value


def is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def boolean(param: str, value: object) -> bool:
    """A `Reader` of booleans."""
    if not isinstance(value, bool):
        raise bad_field(param, f"must be true or false, not {_type_name(value)}")
    return value


def integer(low: int, high: int) -> Reader[int]:
    """A `Reader` of integers in `[low, high]`."""

    def read(param: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise bad_field(param, f"must be an integer, not {_type_name(value)}")
        if not low <= value <= high:
            raise bad_field(param, f"must be in [{low}, {high}], got {_short(value)}")
        return value

    return read


def items(read_one: Reader[Value], *, most: int) -> Reader[tuple[Value, ...]]:
    """A `Reader` of arrays with one to `most` items."""

    def read(param: str, value: object) -> tuple[Value, ...]:
        if not isinstance(value, list):
            raise bad_field(param, f"must be an array, not {_type_name(value)}")
        if not 0 < len(value) <= most:
            raise bad_field(param, f"must have 1 to {most} items, got {len(value)}")
        return tuple(read_one(f"{param}[{index}]", item) for index, item in enumerate(value))

    return read


def _short(value: int) -> str:
    return str(value) if abs(value) < 10**20 else "one of many digits"


def _is_same(value: object, neutral: object) -> bool:
    """Whether both are the same value: 1 and 1.0 are, 1 and true are not."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


_TYPE_NAMES: Mapping[type, str] = {
    str: "a string", bool: "a boolean", int: "an integer", float: "a number", list: "an array", dict: "an object",
    type(None): "null",
}  # fmt: skip


def _type_name(value: Any) -> str:
    return _TYPE_NAMES[type(value)]


# -- prompts ---------------------------------------------------------------------------------------------------------
#
# The kinds of prompts: a text, token ids, or a chat.


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


# -- bodies ----------------------------------------------------------------------------------------------------------

MAX_MESSAGES = 4096
MAX_STOPS = 4
MAX_STOP_CHARACTERS = 256
MAX_SALT_CHARACTERS = 1024
COMPLETION_TOKENS = 16
"""OpenAI's own default."""
CHAT_TOKENS = 256
"""OpenAI's default is the rest of the context. Here blocks are granted before a request begins, so longer answers have
to be requested."""
NOTHING_MARKED: Mapping[int, GivenHint] = MappingProxyType({})
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


@attrs.frozen
class Limits:
    """Limits that bodies have to respect."""

    model_name: str
    vocab_size: int
    num_tokens: int
    """Maximum tokens of prompt and answer together."""
    requires_salt: bool = False
    """Whether each request has to name its `cache_salt`."""


@attrs.frozen(kw_only=True)
class Wish:
    """One requested answer."""

    prompt: Prompt
    prompt_field: str
    max_tokens: int | None
    """None: `default_tokens`."""
    max_tokens_field: str
    default_tokens: int
    stop: tuple[str, ...]
    ignore_eos: bool
    is_streamed: bool
    has_usage: bool
    """Whether a stream ends with an event that has the token counts."""
    cache_salt: str | None
    reads_cache: bool
    is_stored: bool
    hints: tuple[ClientHint, ...]

    def num_new_tokens(self, num_prompt_tokens: int, limits: Limits) -> int:
        """The maximum length of its answer. `ApiError` naming the field that is too long."""
        left = limits.num_tokens - num_prompt_tokens
        if left < 1:
            problem = f"has {num_prompt_tokens} tokens; prompt and answer together can have {limits.num_tokens}"
            raise too_long(self.prompt_field, problem)
        if self.max_tokens is None:
            return min(self.default_tokens, left)
        if self.max_tokens > left:
            problem = f"{self.max_tokens} and the {num_prompt_tokens} tokens of the prompt exceed the limit"
            raise too_long(self.max_tokens_field, f"{problem} of {limits.num_tokens} tokens")
        return self.max_tokens


def read_completion(fields: Fields, limits: Limits) -> Wish:
    """The body of /v1/completions."""
    _read_model(fields, limits)
    prompt = fields.required("prompt", _prompt_reader(limits))
    for name, neutral in (("best_of", 1), ("echo", False), ("logprobs", None), ("suffix", "")):
        fields.neutral(name, neutral)
    max_tokens = fields.optional("max_tokens", integer(1, limits.num_tokens), None)
    return _read_common(fields, limits, prompt, "prompt", max_tokens, "max_tokens", COMPLETION_TOKENS)


def read_chat(fields: Fields, limits: Limits) -> Wish:
    """The body of /v1/chat/completions."""
    _read_model(fields, limits)
    read = fields.required("messages", items(_read_message, most=MAX_MESSAGES))
    messages = [message for message, _ in read]
    marked = {number: mark for number, (_, mark) in enumerate(read, 1) if mark is not None}
    fields.optional("response_format", _read_format, None)
    for name, neutral in (("logprobs", False), ("top_logprobs", 0), ("tools", []), ("tool_choice", "none")):
        fields.neutral(name, neutral)
    fields.neutral("modalities", ["text"])
    fields.ignored("parallel_tool_calls")
    old = fields.optional("max_tokens", integer(1, limits.num_tokens), None)
    new = fields.optional("max_completion_tokens", integer(1, limits.num_tokens), None)
    name = "max_tokens" if new is None else "max_completion_tokens"
    return _read_common(
        fields, limits, ChatPrompt(messages), "messages", old if new is None else new, name, CHAT_TOKENS, marked
    )


def _read_common(
    fields: Fields,
    limits: Limits,
    prompt: Prompt,
    prompt_field: str,
    max_tokens: int | None,
    max_tokens_field: str,
    default: int,
    marked: Mapping[int, GivenHint] = NOTHING_MARKED,
) -> Wish:
    """Read the fields that both bodies share, then refuse all unread ones."""
    _refuse_sampling(fields)
    is_streamed = fields.optional("stream", boolean, False)
    offload = fields.optional("kv_offload", Fields.inside, Fields({}))
    wish = Wish(
        prompt=prompt,
        prompt_field=prompt_field,
        max_tokens=max_tokens,
        max_tokens_field=max_tokens_field,
        default_tokens=default,
        stop=fields.optional("stop", _read_stop, ()),
        ignore_eos=fields.optional("ignore_eos", boolean, False),
        is_streamed=is_streamed,
        has_usage=_read_stream_options(fields, is_streamed),
        cache_salt=_read_salt_of(fields, limits),
        reads_cache=offload.optional("read", boolean, True),
        is_stored=offload.optional("store", boolean, True),
        hints=hints_of(
            control=fields.optional("cache_control", _anything, None),
            retention=fields.optional("prompt_cache_retention", _anything, None),
            payload=fields.optional("kv_hints", _anything, None),
            marked=marked,
        ),
    )
    offload.finish()
    fields.finish()
    return wish


def _read_model(fields: Fields, limits: Limits) -> None:
    name = fields.required("model", text)
    if name != limits.model_name:
        raise no_model(name, limits.model_name)


def no_model(name: str, known: str) -> ApiError:
    """404: there is one model, and it has another name."""
    message = f"model: {name!r:.100} does not exist; the model of this server is {known!r}"
    return ApiError(404, message, param="model", code="model_not_found")


def _refuse_sampling(fields: Fields) -> None:
    """Refuse sampling options, because there is one answer, and it is greedy."""
    for name, *neutral in (
        ("n", 1), ("temperature", 0), ("top_p", 1), ("top_k", 0, -1, 1), ("min_p", 0), ("repetition_penalty", 1),
        ("presence_penalty", 0), ("frequency_penalty", 0), ("logit_bias", {}), ("min_tokens", 0),
    ):  # fmt: skip
        fields.neutral(name, *neutral)
    fields.ignored("user", "seed", "metadata", "service_tier", "store", "safety_identifier", "prompt_cache_key")


def _prompt_reader(limits: Limits) -> Reader[Prompt]:
    read_id = integer(0, limits.vocab_size - 1)

    def read(param: str, value: object) -> Prompt:
        if isinstance(value, list):
            if len(value) == 1 and isinstance(value[0], str):
                return _text_prompt(f"{param}[0]", value[0])
            if any(not isinstance(item, int) for item in value[:2]):
                raise bad_field(param, "must be a string or an array of token ids: a request has one prompt")
            if len(value) >= limits.num_tokens:
                raise too_long(
                    param, f"has {len(value)} tokens; prompt and answer together can have {limits.num_tokens}"
                )
            if set(map(type, value)) == {int} and 0 <= min(value) <= max(value) < limits.vocab_size:
                return TokenPrompt(value)  # saves a call for each id
            return TokenPrompt(items(read_id, most=limits.num_tokens)(param, value))
        return _text_prompt(param, value)

    return read


def _text_prompt(param: str, value: object) -> TextPrompt:
    return TextPrompt(_not_empty(param, text(param, value)))


def _anything(_: str, value: object) -> object:
    """A `Reader` of values that are read later, because a bad one is no error of the request."""
    return value


def _read_message(param: str, value: object) -> tuple[Message, GivenHint | None]:
    """A message, and its `cache_control`, which may be that of its last part."""
    fields = Fields.inside(param, value)
    role = fields.required("role", text)
    if role not in _ROLES:
        raise bad_field(f"{param}.role", f"must be one of {', '.join(_ROLES)}, got {role!r:.100}")
    content, control = fields.required("content", _read_content)
    control = fields.optional("cache_control", _anything, control)
    fields.ignored("name", "refusal")
    fields.finish()
    return Message(_ROLES[role], content), read_control(control, f"{param}.cache_control")


def _read_content(param: str, value: object) -> tuple[str, object]:
    if isinstance(value, list):
        parts = items(_read_part, most=MAX_MESSAGES)(param, value)
        return "".join([part for part, _ in parts]), parts[-1][1]
    return text(param, value), None


def _read_part(param: str, value: object) -> tuple[str, object]:
    fields = Fields.inside(param, value)
    kind = fields.required("type", text)
    if kind != "text":
        raise bad_field(f"{param}.type", f"must be 'text', got {kind!r:.100}")
    found = fields.required("text", text)
    control = fields.optional("cache_control", _anything, None)
    fields.finish()
    return found, control


def _read_format(param: str, value: object) -> None:
    fields = Fields.inside(param, value)
    fields.neutral("type", "text")
    fields.finish()


def _read_stop(param: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (_read_stop_text(param, value),)
    return items(_read_stop_text, most=MAX_STOPS)(param, value)


def _read_stop_text(param: str, value: object) -> str:
    found = _not_empty(param, text(param, value))
    return _at_most(MAX_STOP_CHARACTERS, param, found)


def _read_salt_of(fields: Fields, limits: Limits) -> str | None:
    if limits.requires_salt:
        return fields.required("cache_salt", _read_salt)
    return fields.optional("cache_salt", _read_salt, None)


def _read_salt(param: str, value: object) -> str:
    found = _not_empty(param, text(param, value))
    return _at_most(MAX_SALT_CHARACTERS, param, found)


def _not_empty(param: str, value: str) -> str:
    if not value:
        raise bad_field(param, "is empty")
    return value


def _at_most(most: int, param: str, value: str) -> str:
    if len(value) > most:
        raise bad_field(param, f"must have at most {most} characters, got {len(value)}")
    return value


def _read_stream_options(fields: Fields, is_streamed: bool) -> bool:
    options = fields.optional("stream_options", Fields.inside, None)
    if options is None:
        return False
    if not is_streamed:
        raise bad_field("stream_options", "is only allowed with stream: true")
    has_usage = options.optional("include_usage", boolean, False)
    options.neutral("include_obfuscation", False)
    options.neutral("continuous_usage_stats", False)
    options.finish()
    return has_usage
