"""The log of a runtime."""

from __future__ import annotations

from typing import Any

import attrs

from .core.hops import Tier
from .core.owners import Holding
from .ledger_log import LedgerLog, harmless
from .transfer.breaker import Closed, StorageMove
from .transfer.transport import PinProgress

__all__ = ["Telemetry"]


class Telemetry(LedgerLog):
    """The log of a runtime: its ledger's events and its own."""

    @harmless
    def request_cancelled(self, holding: Holding, reason: str) -> None:
        self.logger.info("request_cancelled", request_id=holding.request_id, reason=reason)

    @harmless
    def host_memory_page_locked(self, progress: PinProgress) -> None:
        self.logger.info("host_memory_page_locked", **attrs.asdict(progress))

    @harmless
    def disk_opened(self, path: str, num_slots: int) -> None:
        self.logger.info("disk_opened", path=path, num_slots=num_slots)

    @harmless
    def disk_restored(self, num_blocks: int, duration_s: float) -> None:
        self.logger.info("disk_restored", num_blocks=num_blocks, duration_s=round(duration_s, 6))

    @harmless
    def fetch_declined(self, request_id: str, num_tokens: int, fetch_s: float) -> None:
        self.logger.debug("fetch_declined", request_id=request_id, num_tokens=num_tokens, fetch_s=round(fetch_s, 6))

    @harmless
    def fetch_skipped(self, request_id: str, tier: Tier) -> None:
        self.logger.debug("fetch_skipped", request_id=request_id, tier=tier.name.lower())

    @harmless
    def storage_moved(self, moved: StorageMove) -> None:
        about: dict[str, Any] = {"tier": moved.tier.name.lower(), "use": moved.use.value, "node": moved.node}
        move = moved.move
        if isinstance(move, Closed):
            about |= {"after_s": round(move.after_s, 3), "num_refused": move.num_refused}
            self.logger.warning("storage_back", **about)
            return
        about |= {"for_s": move.for_s, "num_failures": move.num_failures, "num_refused": move.num_refused}
        log = self.logger.warning if move.is_first else self.logger.info
        log("storage_left_alone", **about, error=move.error)

    @harmless
    def load_declined(self, request_id: str, num_tokens: int, load_s: float, compute_s: float) -> None:
        seconds = {"load_s": round(load_s, 6), "compute_s": round(compute_s, 6)}
        self.logger.debug("load_declined", request_id=request_id, num_tokens=num_tokens, **seconds)

    @harmless
    def remote_opened(self, store: str, is_encrypted: bool, cell_tokens: int) -> None:
        self.logger.info("remote_opened", store=store, is_encrypted=is_encrypted, cell_tokens=cell_tokens)

    @harmless
    def remote_turned_off(self, reason: str) -> None:
        self.logger.warning("remote_turned_off", reason=reason)

    @harmless
    def disk_records_dropped(self, reason: str) -> None:
        self.logger.warning("disk_records_dropped", reason=reason)

    @harmless
    def disk_turned_off(self, reason: str) -> None:
        self.logger.error("disk_turned_off", reason=reason)

    def runtime_opened(
        self, num_device_blocks: int, num_host_blocks: int, layout: str, *, engine_blocks: bool = False
    ) -> None:
        """`layout`: the KV regions as they are understood; empty where a transport of the program's own has them.
        `engine_blocks`: the device blocks are an engine's."""
        sizes = {"num_device_blocks": num_device_blocks, "num_host_blocks": num_host_blocks}
        self._opened("runtime_opened", {**sizes, "engine_blocks": engine_blocks, "layout": layout})

    def runtime_closed(self, num_quarantined_jobs: int) -> None:
        self._closed("runtime_closed", num_quarantined_jobs)
