"""The bodies of /v1/completions and /v1/chat/completions, checked and turned into a `Wish`."""

from __future__ import annotations

import attrs

from .errors import ApiError, bad_field, too_long
from .fields import Fields, Reader, boolean, integer, items, text
from .prompts import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from .tokenizer import Message

__all__ = ["Limits", "Wish", "no_model", "read_chat", "read_completion"]

MAX_MESSAGES = 4096
MAX_STOPS = 4
MAX_STOP_CHARACTERS = 256
MAX_SALT_CHARACTERS = 1024
COMPLETION_TOKENS = 16
"""OpenAI's own default."""
CHAT_TOKENS = 256
"""OpenAI's default is the rest of the context. Room is granted before a request begins, so more has to be asked for."""
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


@attrs.frozen
class Limits:
    """What bodies are checked against."""

    model_name: str
    vocab_size: int
    num_tokens: int
    """Prompt and answer together."""
    requires_salt: bool = False
    """Whether each request has to name its `cache_salt`."""


@attrs.frozen(kw_only=True)
class Wish:
    """One requested answer."""

    prompt: Prompt
    prompt_field: str
    max_tokens: int | None
    """None: as many as `default_tokens`."""
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

    def num_new_tokens(self, num_prompt_tokens: int, limits: Limits) -> int:
        """The most tokens of its answer; `ApiError` naming the field that is too long."""
        left = limits.num_tokens - num_prompt_tokens
        if left < 1:
            problem = f"has {num_prompt_tokens} tokens; with one of the answer, {limits.num_tokens} fit"
            raise too_long(self.prompt_field, problem)
        if self.max_tokens is None:
            return min(self.default_tokens, left)
        if self.max_tokens > left:
            problem = f"{self.max_tokens} and the {num_prompt_tokens} tokens of the prompt are more than fit"
            raise too_long(self.max_tokens_field, f"{problem}, which is {limits.num_tokens}")
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
    messages = fields.required("messages", items(_read_message, most=MAX_MESSAGES))
    fields.optional("response_format", _read_format, None)
    for name, neutral in (("logprobs", False), ("top_logprobs", 0), ("tools", []), ("tool_choice", "none")):
        fields.neutral(name, neutral)
    fields.neutral("modalities", ["text"])
    fields.ignored("parallel_tool_calls")
    old = fields.optional("max_tokens", integer(1, limits.num_tokens), None)
    new = fields.optional("max_completion_tokens", integer(1, limits.num_tokens), None)
    name = "max_tokens" if new is None else "max_completion_tokens"
    return _read_common(
        fields, limits, ChatPrompt(messages), "messages", old if new is None else new, name, CHAT_TOKENS
    )


def _read_common(
    fields: Fields,
    limits: Limits,
    prompt: Prompt,
    prompt_field: str,
    max_tokens: int | None,
    max_tokens_field: str,
    default: int,
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
    )
    offload.finish()
    fields.finish()
    return wish


def _read_model(fields: Fields, limits: Limits) -> None:
    name = fields.required("model", text)
    if name != limits.model_name:
        raise no_model(name, limits.model_name)


def no_model(name: str, known: str) -> ApiError:
    """404: there is one model, and this is not its name."""
    message = f"model: there is no {name!r:.100} here, only {known!r}"
    return ApiError(404, message, param="model", code="model_not_found")


def _refuse_sampling(fields: Fields) -> None:
    """Refuse sampling options: there is one answer, and it is greedy."""
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
                raise bad_field(param, "must be a string, or an array of token ids: one prompt a request")
            if len(value) >= limits.num_tokens:
                raise too_long(param, f"has {len(value)} tokens; with one of the answer, {limits.num_tokens} fit")
            if set(map(type, value)) == {int} and 0 <= min(value) <= max(value) < limits.vocab_size:
                return TokenPrompt(value)  # saves a call for each id
            return TokenPrompt(items(read_id, most=limits.num_tokens)(param, value))
        return _text_prompt(param, value)

    return read


def _text_prompt(param: str, value: object) -> TextPrompt:
    return TextPrompt(_not_empty(param, text(param, value)))


def _read_message(param: str, value: object) -> Message:
    fields = Fields.inside(param, value)
    role = fields.required("role", text)
    if role not in _ROLES:
        raise bad_field(f"{param}.role", f"must be one of {', '.join(_ROLES)}, got {role!r:.100}")
    content = fields.required("content", _read_content)
    fields.ignored("name", "refusal")
    fields.finish()
    return Message(_ROLES[role], content)


def _read_content(param: str, value: object) -> str:
    if isinstance(value, list):
        return "".join(items(_read_part, most=MAX_MESSAGES)(param, value))
    return text(param, value)


def _read_part(param: str, value: object) -> str:
    fields = Fields.inside(param, value)
    kind = fields.required("type", text)
    if kind != "text":
        raise bad_field(f"{param}.type", f"must be 'text', got {kind!r:.100}")
    found = fields.required("text", text)
    fields.finish()
    return found


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
        raise bad_field("stream_options", "only goes with stream: true")
    has_usage = options.optional("include_usage", boolean, False)
    options.neutral("include_obfuscation", False)
    options.neutral("continuous_usage_stats", False)
    options.finish()
    return has_usage
