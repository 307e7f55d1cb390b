"""An endpoint: handles a request from its body to the last byte of the answer, in the request's task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import attrs

from ..._kernel.plans import StoreScope
from ...errors import AoffloadError
from ..engine.engine import PagedEngine
from .admission import Admission
from .bodies import Limits, Wish
from .errors import ApiError, HungUp, error_of, too_long
from .fields import Fields
from .flow import Flow
from .gate import Rules
from .metrics import Metrics
from .prompts import Prompt
from .reply import FAREWELL_S, Reply
from .stops import Stops
from .streaming import Stream
from .tokenizer import Tokenizer
from .visit import Visit
from .wire import Wire, usage_of

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

__all__ = ["Answering", "Service"]

LONG_TEXT = 8192
"""Prompts of at least this many characters are tokenized in a thread."""


@attrs.frozen(kw_only=True)
class Service:
    """What both endpoints share."""

    engine: PagedEngine
    tokenizer: Tokenizer
    admission: Admission
    metrics: Metrics
    limits: Limits
    max_body_bytes: int
    answer_timeout_s: float
    rules: Rules = attrs.field(factory=Rules)
    """Who may ask."""
    tokenizing: anyio.CapacityLimiter = attrs.field(factory=lambda: anyio.CapacityLimiter(1))
    """One thread at a time: tokenizers of transformers are not thread-safe."""


@attrs.frozen(kw_only=True)
class Answering:
    """An ASGI application for one path. All state of a request lives inside this call."""

    service: Service
    read: Callable[[Fields, Limits], Wish]
    new_wire: Callable[[str], Wire]
    prompt_field: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(send)
        try:
            _check_content_type(scope)
            wish = await self._read_wish(receive)
            with self.service.admission.place():
                await self._attend(wish, receive, reply)
        except HungUp:
            return
        except ApiError as error:
            await self._say_goodbye(reply, error)

    async def _read_wish(self, receive: Receive) -> Wish:
        most = self.service.max_body_bytes
        body = await self.service.admission.readings.read(receive, most)
        if body is None:
            raise too_long(self.prompt_field, f"the body has more than {most} bytes, so this can't be short enough")
        return self.read(Fields.of_body(body), self.service.limits)

    async def _attend(self, wish: Wish, receive: Receive, reply: Reply) -> None:
        visit = Visit(receive, self.service.admission, self.service.answer_timeout_s)
        try:
            await visit.run(partial(self._serve, wish, reply))
        except ApiError as error:
            await self._say_goodbye(reply, error)
        except AoffloadError as error:
            await self._say_goodbye(reply, error_of(error, wish.prompt_field))

    async def _say_goodbye(self, reply: Reply, error: ApiError) -> None:
        with anyio.move_on_after(FAREWELL_S):
            await reply.fail(error)

    async def _serve(self, wish: Wish, reply: Reply) -> None:
        service = self.service
        token_ids = await self._encode(wish.prompt)
        num_new = wish.num_new_tokens(len(token_ids), service.limits)
        end_token_ids = frozenset[int]() if wish.ignore_eos else service.tokenizer.end_token_ids
        flow = Flow(service.tokenizer.speller(), Stops(wish.stop), end_token_ids)
        wire = self.new_wire(service.limits.model_name)
        generate = partial(
            service.engine.generate,
            token_ids,
            num_new,
            request_id=wire.answer_id,
            cache_salt=wish.cache_salt,
            reads_cache=wish.reads_cache,
            store=StoreScope.ALL if wish.is_stored else StoreScope.NONE,
            until=flow.take,
        )
        if wish.is_streamed:
            await Stream(flow, wire, reply, has_usage=wish.has_usage).run(generate)
        else:
            generation = await generate()
            flow.finish()
            await reply.whole(wire.whole(flow.text(), flow.finish_reason, usage_of(generation)))

    async def _encode(self, prompt: Prompt) -> Sequence[int]:
        tokenizer = self.service.tokenizer
        if prompt.num_characters < LONG_TEXT:
            return prompt.encode(tokenizer)
        return await anyio.to_thread.run_sync(prompt.encode, tokenizer, limiter=self.service.tokenizing)


def _check_content_type(scope: Scope) -> None:
    """Refuse other types than JSON: a web page of anybody's can have a browser send those without asking."""
    found = [value for name, value in scope["headers"] if name == b"content-type"]
    if [value.partition(b";")[0].strip().lower() for value in found] != [b"application/json"]:
        raise ApiError(415, "content-type: must be application/json", code="unsupported_media_type")
