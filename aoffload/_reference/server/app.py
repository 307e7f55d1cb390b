"""The ASGI application: its routes, and errors of one shape for all other requests."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import anyio
import attrs
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from .admission import ServerState
from .answering import Answering, Service
from .bodies import no_model, read_chat, read_completion
from .errors import ApiError, internal
from .gate import Gate
from .wire import FAREWELL_S, ChatWire, CompletionWire, model_object

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send


def make_app(service: Service) -> Starlette:
    """An ASGI application around an engine. Keep the engine open for as long as the application is used.

    The application has no state besides `service` and starts nothing by itself. It runs in the event loop of the
    engine, asyncio or trio.
    """
    views = _Views(service, int(time.time()))
    completions = Answering(service=service, read=read_completion, new_wire=CompletionWire.new, prompt_field="prompt")
    chat = Answering(service=service, read=read_chat, new_wire=ChatWire.new, prompt_field="messages")
    app = Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/models", views.models),
            Route("/v1/models/{model:path}", views.model),
            Route("/health", views.health),
            Route("/metrics", views.metrics),
        ],
        middleware=[Middleware(Gate, rules=service.rules)],
        exception_handlers={ApiError: _say, HTTPException: _say_http, Exception: _say_internal},
    )
    app.router.redirect_slashes = False  # it would redirect to any host that the client names
    return app


class _Text(Response):  # type: ignore[misc]  # starlette has no types here
    """An answer that needs no admission. Its client has little time to read it. Otherwise a client that sends requests
    and reads nothing would occupy the connection for ever."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with anyio.move_on_after(FAREWELL_S):
            await super().__call__(scope, receive, send)


class _Json(JSONResponse, _Text):  # type: ignore[misc]
    """The same with JSON."""


@attrs.frozen
class _Views:
    """The read-only endpoints."""

    service: Service
    created: int

    async def models(self, _: Request) -> Response:
        return _Json({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        if name != self.service.limits.model_name:
            raise no_model(name, self.service.limits.model_name)
        return _Json(self._model())

    async def health(self, _: Request) -> Response:
        """200 while requests are admitted, 503 afterwards."""
        admission = self.service.admission
        status = 200 if admission.state is ServerState.OPEN else 503
        return _Json({"status": admission.state.value, "num_requests": admission.num_inside}, status)

    async def metrics(self, _: Request) -> Response:
        content, content_type = self.service.metrics.scrape()
        return _Text(content, headers={"content-type": content_type})

    def _model(self) -> dict[str, object]:
        limits = self.service.limits
        return model_object(limits.model_name, self.created, limits.num_tokens)


async def _say(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _Json(error.as_dict(), error.status, error.headers)


async def _say_http(request: Request, error: Exception) -> Response:
    """Errors of the routing, 404 and 405."""
    assert isinstance(error, HTTPException)
    message = f"{request.method:.20} {request.url.path:.200}: {error.detail}"
    found = ApiError(error.status_code, message, code="not_found" if error.status_code == 404 else None)
    return _Json(found.as_dict(), error.status_code, dict(error.headers or {}))


async def _say_internal(_: Request, error: Exception) -> Response:
    """A defect of the server. Its log has the traceback."""
    return _Json(internal().as_dict(), 500)
