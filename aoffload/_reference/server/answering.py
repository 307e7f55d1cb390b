"""An endpoint: it handles a request from its body to the last byte of the answer, in the request's task."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import attrs

from ..._kernel.plans import StoreScope
from ...errors import AoffloadError
from ..engine.engine import PagedEngine
from ..engine.sequence import Generation
from .admission import Admission
from .bodies import ChatPrompt, Fields, Limits, Prompt, Wish
from .errors import ApiError, HungUp, error_of, too_long, unavailable
from .gate import Rules
from .hints import RequestHints, common_length
from .metrics import Metrics
from .tokenizer import Speller, Tokenizer
from .wire import FAREWELL_S, Reply, Wire, usage_of

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send


# -- stops -----------------------------------------------------------------------------------------------------------
#
# Stop strings in a text that comes in pieces.


@attrs.define(eq=False)
class Stops:
    """Passes a text on up to the first of `stops`, which it drops.

    Text that may be the beginning of a stop string is held back until it is known whether it is.
    """

    stops: tuple[str, ...]
    was_met: bool = False
    _held: str = ""

    def feed(self, text: str) -> str:
        """Add `text`. Returns the text that can be shown now and could not before."""
        if self.was_met:
            return ""
        text = self._held + text
        found = [place for stop in self.stops if (place := text.find(stop)) >= 0]
        if found:
            self.was_met = True
            self._held = ""
            return text[: min(found)]
        num_held = max((_overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def finish(self) -> str:
        """The text has ended: returns the text that was held back, because it was no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Number of characters at the end of `text` that are a beginning of `stop`."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)


# -- flow ------------------------------------------------------------------------------------------------------------
#
# The text of one answer, while it is generated.


@attrs.define(eq=False)
class Flow:
    """Takes tokens from the engine's loop without blocking it, and hands pieces of text to the task that sends them.

    The text in between is bounded by the length of the answer.
    """

    speller: Speller
    stops: Stops
    end_token_ids: frozenset[int]
    """Tokens that end this answer."""
    _finish_reason: str = "length"
    _pieces: list[str] = attrs.field(factory=list)
    _is_over: bool = False
    _news: anyio.Event = attrs.field(factory=anyio.Event)

    @property
    def finish_reason(self) -> str:
        """`stop` if the answer ended with an end token or a stop string, `length` if at its limit."""
        return "stop" if self.stops.was_met else self._finish_reason

    def take(self, token_id: int) -> bool:
        """Take a token. Returns whether it is the last one."""
        if token_id in self.end_token_ids:
            self._finish_reason = "stop"
            return True
        self._put(self.stops.feed(self.speller.feed(token_id)))
        return self.stops.was_met

    def finish(self) -> None:
        """Add the text that was held back, because no further token comes."""
        self._put(self.stops.feed(self.speller.finish()))
        self._put(self.stops.finish())
        self.close()

    def close(self) -> None:
        """End the text: `next_text` does not wait any more."""
        self._is_over = True
        self._news.set()

    def text(self) -> str:
        """Take all text that was not taken yet."""
        text = "".join(self._pieces)
        self._pieces.clear()
        return text

    async def next_text(self) -> str:
        """Wait for more text: that of one token, or of several if the reader is slower. Empty: the text has ended."""
        while not self._pieces and not self._is_over:
            self._news = anyio.Event()
            await self._news.wait()
        return self.text()

    def _put(self, text: str) -> None:
        if text:
            self._pieces.append(text)
            self._news.set()


# -- streaming -------------------------------------------------------------------------------------------------------
#
# An answer as server-sent events.


@attrs.define(eq=False)
class Stream:
    """Sends text while more is generated. A slow reader blocks no other request and holds no blocks."""

    flow: Flow
    wire: Wire
    reply: Reply
    has_usage: bool = attrs.field(kw_only=True)
    """Whether the last event has the token counts; all others then have `usage: null`."""
    hints: RequestHints = attrs.field(kw_only=True)
    """The last event has the answers to them."""

    async def run(self, generate: Callable[[], Awaitable[Generation]]) -> None:
        """Generate and send. Raises the `AoffloadError` of `generate` after all text before it was sent."""
        outcome: list[Generation | AoffloadError] = []

        async def make() -> None:
            try:
                outcome.append(await generate())
                self.flow.finish()
            except AoffloadError as error:
                outcome.append(error)
                self.flow.close()

        async with anyio.create_task_group() as group:
            group.start_soon(make)
            await self._send_text()
        (found,) = outcome
        if isinstance(found, AoffloadError):
            raise found
        await self._send_end(found)

    async def _send_text(self) -> None:
        """Send the text. The opening is sent with the first piece. Until then an error can still have its own
        status."""
        opening = self.wire.first()
        while text := await self.flow.next_text():
            for value in [*opening, self.wire.piece(text)]:
                await self._send(value)
            opening = []

    async def _send_end(self, generation: Generation) -> None:
        end, answers = self.wire.piece("", self.flow.finish_reason), self.hints.as_dict()
        await self._send(end if self.has_usage else end | answers)
        if self.has_usage:
            await self.reply.event(self.wire.last(usage_of(generation)) | answers)
        await self.reply.end_stream()

    async def _send(self, value: Mapping[str, Any]) -> None:
        await self.reply.event({**value, "usage": None} if self.has_usage else value)


# -- visit -----------------------------------------------------------------------------------------------------------
#
# The work for one client, which runs while the client is connected and has time left.


class Visit:
    """Runs work for a client in a task group, until it is done, the client leaves, time is up or the server ends.

    A task that reads from the connection notices that the client disconnects. Then the work is cancelled at its current
    await, and the engine's request releases its blocks at that moment.
    """

    def __init__(self, receive: Receive, admission: Admission, timeout_s: float) -> None:
        self._receive = receive
        self._admission = admission
        self._timeout_s = timeout_s

    async def run(self, work: Callable[[], Awaitable[None]]) -> None:
        """Raises the `AoffloadError` or `ApiError` of `work`, `HungUp` if the client disconnects, and `ApiError` with
        503 if the server ends or 504 if the work takes too long."""
        errors: list[Exception] = []
        async with anyio.create_task_group() as group:

            async def end_after(wait: Callable[[], Awaitable[None]], error: Exception) -> None:
                await wait()
                errors.append(error)
                group.cancel_scope.cancel()

            group.start_soon(end_after, self._hung_up, HungUp())
            group.start_soon(
                end_after,
                self._admission.wait_ending,
                unavailable("the server was shut down before the answer was complete"),
            )
            group.start_soon(end_after, self._out_of_time, _took_too_long(self._timeout_s))
            try:
                await work()
            except (AoffloadError, ApiError) as error:
                errors.append(error)
            group.cancel_scope.cancel()
        if errors:
            raise errors[0]

    async def _hung_up(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass  # the end of the body may come in a separate message

    async def _out_of_time(self) -> None:
        await anyio.sleep(self._timeout_s)


def _took_too_long(timeout_s: float) -> ApiError:
    message = f"the answer was not complete after {timeout_s:g} seconds"
    return ApiError(504, message, kind="server_error", code="timeout")


# -- answering -------------------------------------------------------------------------------------------------------

LONG_TEXT = 8192
"""Prompts of at least this many characters are tokenized in a thread."""


@attrs.frozen(kw_only=True)
class Service:
    """Objects that both endpoints share."""

    engine: PagedEngine
    tokenizer: Tokenizer
    admission: Admission
    metrics: Metrics
    limits: Limits
    max_body_bytes: int
    answer_timeout_s: float
    rules: Rules = attrs.field(factory=Rules)
    """The rules of access."""
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
            raise too_long(self.prompt_field, f"the body is longer than the limit of {most} bytes")
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
        stops = await self._stops(wish, token_ids) if wish.hints else {}
        hints = RequestHints(service.engine.runtime, wish.hints, token_ids, wish.cache_salt, stops)

        async def generate_with_hints() -> Generation:
            if not wish.hints:
                return await generate()
            hints.begin()
            try:
                generation = await generate()
            except BaseException:
                hints.give_up()
                raise
            hints.finish(generation.token_ids)
            return generation

        if wish.is_streamed:
            await Stream(flow, wire, reply, has_usage=wish.has_usage, hints=hints).run(generate_with_hints)
        else:
            generation = await generate_with_hints()
            flow.finish()
            whole = wire.whole(flow.text(), flow.finish_reason, usage_of(generation))
            await reply.whole(whole | hints.as_dict())

    async def _stops(self, wish: Wish, token_ids: Sequence[int]) -> dict[int, int]:
        """By number of messages, the tokens of the prompt up to their end."""
        found: dict[int, int] = {}
        for number in {hint.num_messages for hint in wish.hints if hint.num_messages}:
            first = ChatPrompt(wish.prompt.messages[:number]) if isinstance(wish.prompt, ChatPrompt) else wish.prompt
            try:
                found[number] = common_length(token_ids, await self._encode(first))
            except ApiError:  # a chat template may refuse the beginning of a chat that it takes as a whole
                found[number] = 0
        return found

    async def _encode(self, prompt: Prompt) -> Sequence[int]:
        tokenizer = self.service.tokenizer
        if prompt.num_characters < LONG_TEXT:
            return prompt.encode(tokenizer)
        return await anyio.to_thread.run_sync(prompt.encode, tokenizer, limiter=self.service.tokenizing)


def _check_content_type(scope: Scope) -> None:
    """Refuse types other than JSON. A web page can have a browser send those to this server without the user's
    consent."""
    found = [value for name, value in scope["headers"] if name == b"content-type"]
    if [value.partition(b";")[0].strip().lower() for value in found] != [b"application/json"]:
        raise ApiError(415, "content-type: must be application/json", code="unsupported_media_type")
