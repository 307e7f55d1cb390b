"""The loggers that a log may write to: structlog's, others that bind and take fields, and those of `logging`.

structlog is imported only if it is needed: for the default logger, and as the bridge to `logging`.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from .._common.arguments import check_has, shown
from ..errors import InvalidArgument


def check_logger(logger: Any) -> None:
    """Raise unless a log can write to `logger`. None stands for the default one."""
    if logger is None or isinstance(logger, logging.Logger):
        return
    if isinstance(logger, logging.LoggerAdapter):
        inner, adapters = _adapted(logger)
        if not isinstance(inner, logging.Logger):
            raise InvalidArgument("logger", f"must adapt a logging.Logger, got one that adapts {shown(inner)}")
        for extra in (getattr(adapter, "extra", None) for adapter in adapters):
            if extra is not None and not hasattr(extra, "keys"):
                raise InvalidArgument("logger", f"must be an adapter whose `extra` is a mapping, got {shown(extra)}")
        return
    check_has("logger", logger, "logging.Logger or a structlog logger", "bind")


def bound_logger(logger: Any) -> tuple[Any, Callable[[int], bool]]:
    """A logger that takes events with fields and writes them to `logger`, and a function that returns whether it emits
    a level. The function is called for each event, because levels may change."""
    check_logger(logger)
    if isinstance(logger, (logging.Logger, logging.LoggerAdapter)) and not hasattr(logger, "bind"):
        return _bridge(logger)
    # Bound once: an unbound structlog proxy would look up its configuration at every event.
    bound = (_default_logger() if logger is None else logger).bind()
    return bound, _levels_heard(bound)


def takes_exceptions(logger: Any) -> bool:
    """Whether `logger` takes an exception as `exc_info`, and writes its traceback."""
    return getattr(type(logger), "is_bridge", False) is True


def _default_logger() -> Any:
    """The program's structlog logger. If structlog is not configured, one that prints only warnings to stderr."""
    try:
        import structlog
    except ModuleNotFoundError as error:
        raise InvalidArgument("logger", "must be given: there is no default one, structlog is not installed") from error
    if structlog.is_configured():
        return structlog.get_logger("aoffload")
    return structlog.wrap_logger(
        structlog.PrintLogger(sys.stderr),
        processors=[structlog.processors.add_log_level, structlog.processors.KeyValueRenderer()],
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
    )


def _levels_heard(logger: Any) -> Callable[[int], bool]:
    """A function that returns whether `logger` emits a level. A logger without such a check gets every event.

    `is_enabled_for` is looked up in the class, because an instance may take any attribute name for a level and write an
    event when it is called.
    """
    is_enabled_for = getattr(type(logger), "is_enabled_for", None)
    try:
        is_enabled_for(logger, logging.DEBUG)  # type: ignore[misc]
    except Exception:  # noqa: BLE001 - the logger has none, or the one it wraps
        return lambda level: True
    return logger.is_enabled_for  # type: ignore[no-any-return]


# -- logging ---------------------------------------------------------------------------------------------------------


def _adapted(logger: Any) -> tuple[Any, list[Any]]:
    """The logger that adapters adapt, and the adapters, the outermost first."""
    adapters: list[Any] = []
    while isinstance(logger, logging.LoggerAdapter) and not any(logger is one for one in adapters):
        adapters.append(logger)
        logger = logger.logger
    return logger, adapters


@functools.lru_cache(maxsize=4)
def _taken(record_factory: Callable[..., Any]) -> frozenset[str]:
    """The names of attributes that each record has, and `logging` refuses as fields."""
    return frozenset(vars(record_factory("", 0, "", 0, "", (), None))) | {"message", "asctime"}


def _free(name: str, taken: frozenset[str], fields: Mapping[str, Any]) -> str:
    """`name`, followed by underscores if it is taken."""
    if name in taken:
        name += "_"
        while name in taken or name in fields:
            name += "_"
    return name


def _bridge(logger: Any) -> tuple[Any, Callable[[int], bool]]:
    """A structlog logger that calls `logger` with the fields of an event as `extra`. `logging` refuses
    fields with the name of an attribute of each record, so `name` becomes `name_`."""
    try:
        from structlog import DropEvent, wrap_logger
        from structlog.stdlib import BoundLogger, render_to_log_kwargs
    except ModuleNotFoundError as error:
        raise InvalidArgument("logger", "a logging.Logger needs structlog, which is not installed") from error

    class Bridge(BoundLogger):
        is_bridge = True

    inner, adapters = _adapted(logger)

    def ask(_: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """Drop an event of a level that the adapters do not emit."""
        level = logging.ERROR if method == "exception" else getattr(logging, method.upper(), logging.CRITICAL)
        if not logger.isEnabledFor(level):
            raise DropEvent
        return event

    def adapt(_: Any, __: str, call: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """Let each adapter process the call. An adapter may replace `extra` by its own; then both are merged."""
        fields, message = call["extra"], call.pop("msg")
        for adapter in adapters:
            message, call = adapter.process(message, call)
            call["extra"] = {**(call.get("extra") or {}), **fields}
        return {"msg": message, **call}

    def rename(_: Any, __: str, call: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        fields, taken = call["extra"], _taken(logging.getLogRecordFactory())
        if not taken.isdisjoint(fields):
            call["extra"] = {_free(name, taken, fields): value for name, value in fields.items()}
        return call

    processors = [ask, render_to_log_kwargs, adapt, rename] if adapters else [render_to_log_kwargs, rename]
    # Not the bridge's own check of a level, because structlog has it only since 26.1.
    return wrap_logger(inner, processors=processors, wrapper_class=Bridge).bind(), logger.isEnabledFor
