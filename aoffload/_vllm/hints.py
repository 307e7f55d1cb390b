"""Hints that requests of vLLM carry, about what comes after them.

A request carries them in its `kv_hints`, the envelope of vLLM, or, if it has none, under `kv_hints` in its
`kv_transfer_params`, which clients of the HTTP server can send. Both are read once, when the request is first seen.

    at the start     prefetch: the tiers below the host are fetched while the request waits
    at the end       all others, in their order, for all tokens of the request, prompt and output. A pin also keeps the
                     blocks whose stores are under way then, once they have landed
    aborted          only `done` counts: a client that goes away needs nothing kept

A preempted request applies its hints once, when it finishes. The answers are in the `kv_transfer_params` of the
finished request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from .. import HostCache
from .._common.hints import MAX_ACTIONS, DoneHint, GivenHint, HintReason, PrefetchHint, read_hints
from .._common.prefix import Prefix
from ..ledger import HintAnswer, TransferPlan

KEY = "kv_hints"
_FIELDS = ("action_id", "action_type", "action_version", "payload")
_ABORTED = ("FINISHED_ABORTED", "FINISHED_ERROR")


def given_by(request: Any) -> list[GivenHint]:
    """The hints that `request` carries. Raises nothing."""
    envelope = getattr(request, KEY, None)
    if envelope is not None:
        return read_hints(envelope if type(envelope) is dict else _plain(envelope))
    params = getattr(request, "kv_transfer_params", None)
    return read_hints(params.get(KEY)) if type(params) is dict else []


def _plain(envelope: Any) -> object:
    """vLLM's envelope as the dicts and lists that `read_hints` reads."""
    try:
        actions = [{name: getattr(action, name) for name in _FIELDS} for action in envelope.actions[: MAX_ACTIONS + 1]]
        return {"protocol_version": envelope.protocol_version, "actions": actions}
    except Exception:  # noqa: BLE001 - vLLM does not check what a program puts into the envelope
        return ""  # malformed


@attrs.define(eq=False)
class EngineHints:
    """One per engine."""

    ledger: HostCache
    submit: Callable[[Sequence[TransferPlan]], object]
    clock: Callable[[], float]
    lapses_at: float = math.inf
    """The time of the next call of `ledger.lapse`; infinity if no pin expires."""

    def prefetch(self, given: Sequence[GivenHint], prefix: Prefix | None, *, may_fetch: bool) -> dict[int, HintAnswer]:
        """Apply the prefetches of a request that begins. Returns their answers, by place in `given`."""
        found: dict[int, HintAnswer] = {}
        for place, action in enumerate(given):
            if isinstance(action.hint, PrefetchHint):
                reason = HintReason.NOT_CACHEABLE if prefix is None else HintReason.NO_LOWER_TIER
                if prefix is not None and may_fetch:
                    found[place] = self._apply(prefix, action)
                else:
                    found[place] = self.ledger.hints.reject(action, reason)
        return found

    def finish(
        self, request: Any, given: Sequence[GivenHint], prefix: Prefix | None, answers: dict[int, HintAnswer]
    ) -> dict[str, Any]:
        """Apply the other hints of a request that has finished. `prefix`: all its tokens; None: its KV is not cached.
        Returns the field of the response that has the answers."""
        is_aborted = getattr(getattr(request, "status", None), "name", "") in _ABORTED
        found: list[HintAnswer] = []
        for place, action in enumerate(given):
            answer = answers.get(place)
            if answer is None:
                if action.hint is None or prefix is None:
                    reason = HintReason.NOT_CACHEABLE if action.hint is not None else None
                    answer = self.ledger.hints.reject(action, reason)
                elif is_aborted and not isinstance(action.hint, DoneHint):
                    answer = self.ledger.hints.reject(action, HintReason.NOT_FINISHED)
                else:
                    answer = self._apply(prefix, action)
            found.append(answer)
        return {KEY: [answer.as_dict() for answer in found]}

    def _apply(self, prefix: Prefix, action: GivenHint) -> HintAnswer:
        (answer,) = self.ledger.hints.apply_all(prefix, [action], self.clock())
        if answer.plans:
            self.submit(answer.plans)
        self.lapses_at = self.ledger.next_lapse
        return answer

    def lapse(self) -> None:
        """End the pins that have expired. Called in each step, and cheap while no pin is due."""
        now = self.clock()
        if now >= self.lapses_at:
            self.ledger.lapse(now)
            self.lapses_at = self.ledger.next_lapse
