"""Engines with the connector, and the checks at the end of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engine_doubles import TEXT, Request
from small_engine import SmallEngine


@pytest.fixture
def engines() -> Iterator[Callable[..., SmallEngine]]:
    made: list[SmallEngine] = []

    def make(**options: Any) -> SmallEngine:
        made.append(SmallEngine(**options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
        assert not engine.wrong, "wrong KV was read"
        assert engine.may_be_off or not engine.connector.off_reason, "the connector hid an error"
        engine.connector.ledger.check_integrity()
        assert not engine.manager.tables, "a request kept its blocks"


@pytest.fixture
def warm(engines: Callable[..., SmallEngine]) -> Callable[..., SmallEngine]:
    """An engine that has stored TEXT and forgotten it on its device."""

    def make(**options: Any) -> SmallEngine:
        engine = engines(**options)
        engine.run(Request("first", TEXT))
        num_stored = {(0,): 7, (0, 0): 14, (0, 12): 11}[engine.manager.windows]
        assert engine.connector.ledger.statistics().host.num_cached == num_stored
        engine.manager.evict_all()
        return engine

    return make
