"""Transports that are closed after the test, whatever happened."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from copies import GUARD_S, Copies


@pytest.fixture
def open_copies() -> Iterator[Callable[..., Copies]]:
    opened: list[Copies] = []

    def open_one(*args: object, **kwargs: object) -> Copies:
        opened.append(Copies(*args, **kwargs))  # type: ignore[arg-type]
        return opened[-1]

    yield open_one
    for copies in opened:
        copies.transport.close(GUARD_S)
