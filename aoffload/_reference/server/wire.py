"""The JSON objects of answers, in the shape of OpenAI's API."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import attrs

from ..engine.sequence import Generation

__all__ = ["ChatWire", "CompletionWire", "Wire", "model_object", "usage_of"]


class Wire(Protocol):
    """One answer's objects: the whole answer, or a stream of pieces of it. All of them name its id and its model."""

    @property
    def answer_id(self) -> str: ...

    def whole(self, text: str, finish_reason: str, usage: Mapping[str, Any]) -> dict[str, Any]: ...

    def first(self) -> list[dict[str, Any]]:
        """The objects of a stream before its text."""
        ...

    def piece(self, text: str, finish_reason: str | None = None) -> dict[str, Any]: ...

    def last(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """The token counts of the whole answer, for clients that ask for them."""
        ...


@attrs.frozen
class _Head:
    model_name: str
    answer_id: str
    created: int

    @classmethod
    def new(cls, model_name: str, prefix: str) -> _Head:
        return cls(model_name, f"{prefix}-{uuid.uuid4().hex}", int(time.time()))

    def around(
        self, kind: str, choices: Sequence[Mapping[str, Any]], usage: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        head = {"id": self.answer_id, "object": kind, "created": self.created, "model": self.model_name}
        found: dict[str, Any] = head | {"choices": choices}
        return found if usage is None else found | {"usage": usage}


@attrs.frozen
class CompletionWire:
    """A `Wire` for /v1/completions."""

    _head: _Head

    @classmethod
    def new(cls, model_name: str) -> CompletionWire:
        return cls(_Head.new(model_name, "cmpl"))

    @property
    def answer_id(self) -> str:
        return self._head.answer_id

    def whole(self, text: str, finish_reason: str, usage: Mapping[str, Any]) -> dict[str, Any]:
        return self._head.around("text_completion", [_choice(finish_reason, text=text)], usage)

    def first(self) -> list[dict[str, Any]]:
        return []

    def piece(self, text: str, finish_reason: str | None = None) -> dict[str, Any]:
        return self._head.around("text_completion", [_choice(finish_reason, text=text)])

    def last(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        return self._head.around("text_completion", [], usage)


@attrs.frozen
class ChatWire:
    """A `Wire` for /v1/chat/completions."""

    _head: _Head

    @classmethod
    def new(cls, model_name: str) -> ChatWire:
        return cls(_Head.new(model_name, "chatcmpl"))

    @property
    def answer_id(self) -> str:
        return self._head.answer_id

    def whole(self, text: str, finish_reason: str, usage: Mapping[str, Any]) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return self._head.around("chat.completion", [_choice(finish_reason, message=message)], usage)

    def first(self) -> list[dict[str, Any]]:
        return [self._delta({"role": "assistant", "content": ""})]

    def piece(self, text: str, finish_reason: str | None = None) -> dict[str, Any]:
        return self._delta({"content": text} if text else {}, finish_reason)

    def last(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        return self._head.around("chat.completion.chunk", [], usage)

    def _delta(self, delta: Mapping[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        return self._head.around("chat.completion.chunk", [_choice(finish_reason, delta=delta)])


def usage_of(generation: Generation) -> dict[str, Any]:
    """The token counts of one answer, with the cached tokens of its prompt by tier."""
    num_prompt, num_new = generation.num_prompt_tokens, len(generation.token_ids)
    by_tier = {"device": generation.num_device_tokens, "host": generation.num_host_tokens}
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
        "prompt_tokens_details": {"cached_tokens": sum(by_tier.values()), "cached_tokens_by_tier": by_tier},
    }


def model_object(name: str, created: int, max_tokens: int) -> dict[str, Any]:
    """A row of /v1/models. `max_model_len` is not OpenAI's; load generators look for it."""
    about = {"id": name, "object": "model", "created": created, "owned_by": "aoffload"}
    return about | {"max_model_len": max_tokens}


def _choice(finish_reason: str | None, **content: Any) -> dict[str, Any]:
    return {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}
