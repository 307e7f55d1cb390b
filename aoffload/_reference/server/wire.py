"""Answers on the wire: their JSON objects, in the shape of OpenAI's API, and the HTTP response."""

from __future__ import annotations

import enum
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

import attrs

from ..engine.sequence import Generation
from .errors import ApiError

if TYPE_CHECKING:
    from starlette.types import Send


# -- sse -------------------------------------------------------------------------------------------------------------
#
# Server-sent events, as the streams of this API use them: one line of JSON each, and `[DONE]` as the last one.

HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
DONE = b"data: [DONE]\n\n"


def event(value: Mapping[str, Any]) -> bytes:
    """One event. JSON in ASCII has no line break and no partial character, whatever the text is."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode("ascii") + b"\n\n"


# -- answers ---------------------------------------------------------------------------------------------------------


@attrs.frozen
class Wire(ABC):
    """One answer's objects: the whole answer, or a stream of its pieces. Each object has the answer's id and model."""

    model_name: str
    answer_id: str
    created: int

    PREFIX: ClassVar[str]
    """Prefix of the ids of answers."""
    KIND: ClassVar[str]
    """The kind of object that a stream consists of."""

    @classmethod
    def new(cls, model_name: str) -> Self:
        return cls(model_name, f"{cls.PREFIX}-{uuid.uuid4().hex}", int(time.time()))

    @abstractmethod
    def whole(self, text: str, finish_reason: str, usage: Mapping[str, Any]) -> dict[str, Any]: ...

    def first(self) -> list[dict[str, Any]]:
        """The objects of a stream before its text."""
        return []

    @abstractmethod
    def piece(self, text: str, finish_reason: str | None = None) -> dict[str, Any]: ...

    def last(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """The token counts of the whole answer, for clients that request them."""
        return self._around(self.KIND, [], usage)

    def _around(
        self, kind: str, choices: Sequence[Mapping[str, Any]], usage: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        head = {"id": self.answer_id, "object": kind, "created": self.created, "model": self.model_name}
        found: dict[str, Any] = head | {"choices": choices}
        return found if usage is None else found | {"usage": usage}


class CompletionWire(Wire):
    """A `Wire` for /v1/completions."""

    PREFIX = "cmpl"
    KIND = "text_completion"

    def whole(self, text: str, finish_reason: str, usage: Mapping[str, Any]) -> dict[str, Any]:
        return self._around(self.KIND, [_choice(finish_reason, text=text)], usage)

    def piece(self, text: str, finish_reason: str | None = None) -> dict[str, Any]:
        return self._around(self.KIND, [_choice(finish_reason, text=text)])


class ChatWire(Wire):
    """A `Wire` for /v1/chat/completions."""

    PREFIX = "chatcmpl"
    KIND = "chat.completion.chunk"

    def whole(self, text: str, finish_reason: str, usage: Mapping[str, Any]) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return self._around("chat.completion", [_choice(finish_reason, message=message)], usage)

    def first(self) -> list[dict[str, Any]]:
        return [self._delta({"role": "assistant", "content": ""})]

    def piece(self, text: str, finish_reason: str | None = None) -> dict[str, Any]:
        return self._delta({"content": text} if text else {}, finish_reason)

    def _delta(self, delta: Mapping[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        return self._around(self.KIND, [_choice(finish_reason, delta=delta)])


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


# -- reply -----------------------------------------------------------------------------------------------------------
#
# One HTTP response: a JSON object or a stream of events, and an error at any point.

FAREWELL_S = 1.0
"""Seconds that a client has to read enough for an error to be sent, or an answer that needs no admission."""

NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class _State(enum.Enum):
    NEW = "new"
    STREAMING = "streaming"
    OVER = "over"


class Reply:
    """Sends one response through the `send` of its request."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._state = _State.NEW

    async def whole(self, value: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] = NO_HEADERS) -> None:
        """Send the response as one JSON object."""
        body = json.dumps(value, separators=(",", ":")).encode("ascii")
        self._state = _State.OVER
        about = {"content-type": "application/json", "content-length": str(len(body)), **headers}
        await self._begin(status, about)
        await self._more(body, False)

    async def event(self, value: Mapping[str, Any]) -> None:
        """Send one event of a stream. The first one begins the response. Before it, an error can have its own
        status."""
        await self._begin_stream()
        await self._more(event(value), True)

    async def end_stream(self) -> None:
        """Complete the stream."""
        await self._begin_stream()
        self._state = _State.OVER
        await self._more(DONE, False)

    async def fail(self, error: ApiError) -> None:
        """Send the error: as the response with its own status, or as the last event of a stream that has begun."""
        if self._state is _State.NEW:
            await self.whole(error.as_dict(), error.status, error.headers)
        elif self._state is _State.STREAMING:
            self._state = _State.OVER
            await self._more(event(error.as_dict()), False)

    async def _begin_stream(self) -> None:
        if self._state is _State.NEW:
            self._state = _State.STREAMING
            await self._begin(200, HEADERS)

    async def _begin(self, status: int, headers: Mapping[str, str]) -> None:
        pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def _more(self, body: bytes, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
