"""Errors for clients: a status, and an error object of OpenAI's shape."""

from __future__ import annotations

import logging
from typing import Any

from ...errors import AoffloadError, InvalidArgument, OutOfBlocks, RequestAborted, RuntimeClosed
from ..engine.loop import EngineClosed

LOGGER = "aoffload.server"
"""The logger of `logging` for details that clients do not get."""
logger = logging.getLogger(LOGGER)

RETRY_AFTER_S = 1
"""The value of `Retry-After`: about as long as an answer takes, so that the server should accept requests again."""


class HungUp(Exception):  # noqa: N818 - reads as what it is at the call
    """The client has closed its connection, so there is nothing to answer."""


class ApiError(Exception):
    """`param` names the field at fault. None: no field is. `retry_after_s` becomes a header."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def as_dict(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        if self.status == 401:
            return {"www-authenticate": "Bearer"}
        return {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}


def bad_field(param: str, problem: str, code: str | None = None) -> ApiError:
    """400: the value of a field. `param` is where it is in the body, as in `messages[0].role`."""
    return ApiError(400, f"{param}: {problem}", param=param, code=code)


def too_long(param: str, problem: str) -> ApiError:
    """400: more than the model or the server can take."""
    return bad_field(param, problem, "context_length_exceeded")


def unavailable(message: str) -> ApiError:
    """503: the request may succeed later, or at another server."""
    return ApiError(503, message, kind="server_error", code="unavailable", retry_after_s=RETRY_AFTER_S)


def too_many() -> ApiError:
    """429: the server has admitted as many requests as it may."""
    message = "the server has reached its limit of requests"
    return ApiError(429, message, kind="rate_limit_error", code="rate_limit_exceeded", retry_after_s=RETRY_AFTER_S)


def too_slow() -> ApiError:
    """408: the body is not complete in time."""
    return ApiError(408, "the body did not arrive in time", code="timeout")


def internal() -> ApiError:
    """500: the cause concerns other requests or this machine, so only the log has it."""
    return ApiError(500, "internal error", kind="server_error", code="internal_error")


def error_of(error: AoffloadError, prompt_field: str) -> ApiError:
    """The client's error for an error of the engine. `prompt_field` is the name of the field with the prompt."""
    if isinstance(error, InvalidArgument):
        return bad_field(prompt_field if error.argument == "token_ids" else error.argument, error.problem)
    if isinstance(error, OutOfBlocks):
        if error.retryable:
            return unavailable("too few device blocks are free")
        return too_long(prompt_field, f"can never fit on the device: {error}")
    if isinstance(error, (EngineClosed, RuntimeClosed)):
        return unavailable("the engine is closed")
    logger.error("%s", error, exc_info=error)
    if isinstance(error, RequestAborted):
        return ApiError(503, "the request was aborted", kind="server_error", code="aborted")
    return internal()
