"""Hints of clients about what comes after their request: how the server reads, applies and answers them.

    cache_control            as clients of Anthropic's API send it, on the body, a message or a part of a message: a pin
                             for 5 minutes or an hour. On a message it is about the prompt up to the end of the message
    prompt_cache_retention   as clients of OpenAI's API send it: `24h` is a pin for a day
    kv_hints                 the payload that vLLM takes, with every verb

A hint never fails a request. A value that cannot be read is ignored, counted, and answered with a reason. Prefetches
are applied before the prompt is computed, all others after the answer is complete, for prompt and answer. If the answer
is not complete, because its client hung up for example, only `done` counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import attrs

from ..._common.hints import DoneHint, GivenHint, HintReason, HintVerb, PinHint, PrefetchHint, read_hints
from ...errors import AoffloadError
from ...ledger import HintAnswer

if TYPE_CHECKING:
    from ..._runtime.runtime import OffloadRuntime

MAX_MARKED = 4
"""Most messages with a `cache_control` that counts, the last ones. Each costs one more tokenization of a chat."""
_TTL_S = {"5m": 300.0, "1h": 3600.0}
_RETENTION_S = {"24h": 86400.0}
_NO_RETENTION = ("in_memory", "in-memory")


@attrs.frozen
class ClientHint:
    given: GivenHint
    num_messages: int = 0
    """It is about the first messages of the chat. 0: about the whole prompt and its answer."""


def read_control(value: object, name: str) -> GivenHint | None:
    """The `cache_control` at the path `name`. None if there is none."""
    if value is None:
        return None
    if type(value) is dict and value.get("type") == "ephemeral":
        ttl = value.get("ttl", "5m")
        if type(ttl) is str and ttl in _TTL_S:
            return GivenHint.of(PinHint(_TTL_S[ttl]), name)
    return GivenHint(HintVerb.PIN, None, HintReason.MALFORMED, name)


def read_retention(value: object) -> GivenHint | None:
    """The `prompt_cache_retention` of a body. None if it asks for nothing."""
    name = "prompt_cache_retention"
    if value is None or (type(value) is str and value in _NO_RETENTION):
        return None
    if type(value) is str and value in _RETENTION_S:
        return GivenHint.of(PinHint(_RETENTION_S[value]), name)
    return GivenHint(HintVerb.PIN, None, HintReason.MALFORMED, name)


def hints_of(
    *, control: object, retention: object, payload: object, marked: Mapping[int, GivenHint]
) -> tuple[ClientHint, ...]:
    """All hints of a body. `marked`: the `cache_control` of messages, by the number of messages up to each."""
    found = [ClientHint(hint, number) for number, hint in sorted(marked.items())[-MAX_MARKED:]]
    if len(marked) > MAX_MARKED:
        found.append(ClientHint(GivenHint(HintVerb.PIN, None, HintReason.TOO_MANY_ACTIONS, "cache_control")))
    whole = [read_control(control, "cache_control"), read_retention(retention), *read_hints(payload)]
    return (*found, *[ClientHint(hint) for hint in whole if hint is not None])


@attrs.define(eq=False)
class RequestHints:
    """The hints of one request while it is served."""

    runtime: OffloadRuntime
    hints: Sequence[ClientHint]
    prompt: Sequence[int]
    cache_salt: str | None
    stops: Mapping[int, int]
    """By number of messages, the tokens of the prompt up to their end."""
    _answers: dict[int, HintAnswer] = attrs.field(factory=dict, init=False)

    def begin(self) -> None:
        """Apply the prefetches."""
        for place, hint in enumerate(self.hints):
            if isinstance(hint.given.hint, PrefetchHint):
                self._apply(place, hint.given, self.prompt)

    def finish(self, answer: Sequence[int]) -> None:
        """Apply the others, for the prompt and the tokens of its `answer`."""
        whole = [*self.prompt, *answer]
        for place, hint in enumerate(self.hints):
            if place not in self._answers:
                tokens = whole if not hint.num_messages else self.prompt[: self.stops[hint.num_messages]]
                self._apply(place, hint.given, tokens)

    def give_up(self) -> None:
        """The answer is not complete: apply `done`. Raises nothing, because the runtime may be closed."""
        with suppress(AoffloadError):
            for place, hint in enumerate(self.hints):
                if place in self._answers:
                    continue
                if isinstance(hint.given.hint, DoneHint):
                    self._apply(place, hint.given, self.prompt)
                elif hint.given.hint is not None:
                    self._apply(place, GivenHint(hint.given.verb, None, HintReason.NOT_FINISHED), self.prompt)

    def _apply(self, place: int, given: GivenHint, tokens: Sequence[int]) -> None:
        (self._answers[place],) = self.runtime.hints.apply(tokens or [0], [given], cache_salt=self.cache_salt)

    def as_dict(self) -> dict[str, Any]:
        """A field of the response; empty if the request has carried no hints."""
        return {"kv_hints": [self._answers[place].as_dict() for place in sorted(self._answers)]} if self.hints else {}


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Number of leading tokens that both have."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
