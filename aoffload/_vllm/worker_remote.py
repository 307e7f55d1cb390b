"""The remote store of a worker: what it is asked with a step, and what it has to say with a later one."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from .._config.config import OffloadConfig
from .._transfer.breaker import in_words
from .._transfer.transport import HasRemote, TransportRemote
from ..errors import ConfigError
from ..ledger import Direction
from ..transport import Transport
from .messages import CellsFound, Question, Refusing, Said

__all__ = ["WorkerRemote", "remote_of"]

_log = logging.getLogger("vllm.aoffload")

LATE_S = 0.01
"""For an answer that is given just in time, to arrive."""


class WorkerRemote:
    """Calls come from the thread that runs the model."""

    def __init__(self, remote: TransportRemote, clock: Callable[[], float]) -> None:
        self._remote, self._clock = remote, clock
        self._heard: deque[CellsFound] = deque()
        """Threads of the store append."""
        self._asked: dict[int, float] = {}
        """When the time of each question is over that is not answered."""
        self._refusing = Refusing()
        """As the scheduler knows it."""

    def connect(self) -> None:
        """Wait until the store has connected or failed, for `load_timeout_s` at most, because questions have less
        time."""
        is_over = threading.Event()
        self._remote.connect(is_over.set)
        is_over.wait(self._remote.tier.load_timeout_s + LATE_S)

    def ask(self, questions: Iterable[Question]) -> None:
        for question in questions:
            self._asked[question.number] = self._clock() + self._remote.tier.ask_timeout_s + LATE_S
            self._remote.ask(question.labels, partial(self._hear, question.number))

    def _hear(self, number: int, num_cells: int) -> None:
        self._heard.append(CellsFound(number, num_cells))

    def take(self) -> tuple[Said, ...]:
        """What it has to say since the last call. What the store has not said in time it does not have."""
        said: list[Said] = []
        for _ in range(len(self._heard)):
            found = self._heard.popleft()
            if self._asked.pop(found.number, None) is not None:
                said.append(found)
        now = self._clock() if self._asked else 0.0
        for number in [number for number, until in self._asked.items() if until <= now]:
            del self._asked[number]
            said.append(CellsFound(number, 0))
        for move in self._remote.take_moves():
            _log.warning("aoffload: %s", in_words(move))
        refusing = Refusing(self._remote.refuses(Direction.LOAD), self._remote.refuses(Direction.STORE))
        if refusing != self._refusing:
            self._refusing = refusing
            said.append(refusing)
        return tuple(said)


def remote_of(transport: Transport, config: OffloadConfig) -> TransportRemote | None:
    """The remote tier of `transport`. `ConfigError`: it is not that of `config`."""
    found = transport.remote if isinstance(transport, HasRemote) else None
    if (None if found is None else found.tier) != config.remote:
        raise ConfigError("remote", "must be that of the transport: a `make_transport` of your own has to give it one")
    return found
