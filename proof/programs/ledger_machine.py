"""Programs over a ledger with device blocks of its own: simulates an engine, its copies and its bytes, call by call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from aoffload._common.prefix import Prefix, Root
from aoffload._extensions.transfers import CacheTransfer

from .ledger_laws import Laws
from .ledger_requests import RequestCalls
from .machine import Machine

__all__ = ["LedgerMachine"]


class LedgerMachine(RequestCalls, Machine):
    LAWS = Laws
    FAREWELL: ClassVar[tuple[str, ...]] = ("drop_pins", "cancel_cache_transfers")

    # -- prefetches, demotions and the watermark -------------------------------------------------------------------

    def do_prefetch(self, name: str, tokens: Sequence[int], salt: str | None = None) -> str:
        return self._transfer(
            "prefetch", name, self.ledger.transfers.prefetch(Prefix.of(Root("programs", salt), tokens))
        )

    def do_demote(self, name: str, tokens: Sequence[int], salt: str | None = None) -> str:
        return self._transfer("demote", name, self.ledger.transfers.demote(Prefix.of(Root("programs", salt), tokens)))

    def _transfer(self, kind: str, name: str, transfer: CacheTransfer) -> str:
        self.cache_transfers[name] = transfer
        self.take(transfer.plans)
        self._note(kind, transfer.plans)
        return f"{transfer}"

    def do_watermark(self) -> str:
        plans = self.ledger.write_back.plan() if self.ledger.writes_back else ()
        self.take(plans)
        self._note("watermark", plans)
        return f"{len(plans)}"
