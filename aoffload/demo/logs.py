"""The logger of events: JSON lines in a file, or nothing."""

from __future__ import annotations

import logging
from typing import Any, TextIO

import structlog

__all__ = ["make_logger"]


def make_logger(file: TextIO | None) -> Any:
    """A structlog logger that neither reads nor changes structlog's global configuration."""
    if file is None:
        return structlog.wrap_logger(
            structlog.ReturnLogger(), wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL)
        )
    return structlog.wrap_logger(
        structlog.WriteLogger(file),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),
    )
