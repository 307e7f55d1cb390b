"""Programs over a ledger with device blocks of its own: simulates an engine, its copies and its bytes, call by call."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.kept import Errand
from ...prefix import Prefix, Root
from .ledger_laws import Laws
from .ledger_requests import RequestCalls
from .machine import Machine

__all__ = ["LedgerMachine"]


class LedgerMachine(RequestCalls, Machine):
    LAWS = Laws
    FAREWELL = ("drop_pins", "cancel_errands")

    # -- prefetches, demotions and the frontier -------------------------------------------------------------------

    def do_prefetch(self, name: str, tokens: Sequence[int], salt: str | None = None) -> str:
        return self._errand("prefetch", name, self.ledger.prefetch(Prefix.of(Root("programs", salt), tokens)))

    def do_demote(self, name: str, tokens: Sequence[int], salt: str | None = None) -> str:
        return self._errand("demote", name, self.ledger.demote(Prefix.of(Root("programs", salt), tokens)))

    def _errand(self, kind: str, name: str, errand: Errand) -> str:
        self.errands[name] = errand
        self.take(errand.plans)
        self._note(kind, errand.plans)
        return f"{errand}"

    def do_cancel(self, name: str) -> str:
        if name not in self.errands:
            return "skipped"
        self.ledger.cancel(self.errands.pop(name))
        return "cancelled"

    def do_cancel_errands(self) -> str:
        self.ledger.cancel_errands()
        return "cancelled"

    def do_frontier(self) -> str:
        plans = self.ledger.plan_frontier()
        self.take(plans)
        self._note("frontier", plans)
        return f"{len(plans)}"
