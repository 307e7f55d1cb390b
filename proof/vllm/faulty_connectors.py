"""Connectors with a faulty transport, for `kv_connector_module_path="proof.vllm.faulty_connectors"`.

What a class does is in its code. There is no key and no variable by which a server could be told to.
"""

from __future__ import annotations

from typing import Any, ClassVar

from aoffload.integrations.vllm import AoffloadConnector

from .faulty_transport import Ending, FailingTransport

__all__ = ["AllFail", "Counted", "FailOnSecondRank", "HalfFail", "SomeHang", "SomeUnproven"]


class Counted(AoffloadConnector):  # type: ignore[misc]
    """Ends every load well."""

    transport: FailingTransport
    first: ClassVar[int] = 0
    """The number of the first load that fails."""
    number: ClassVar[int] = 0
    """How many are."""
    ending: ClassVar[Ending] = Ending.WELL

    def make_transport(self, regions: Any) -> FailingTransport:
        self.transport = FailingTransport(super().make_transport(regions), self.ending_of)
        return self.transport

    def ending_of(self, load: int) -> Ending:
        return self.ending if self.first <= load < self.first + self.number else Ending.WELL


class AllFail(Counted):
    number, ending = 1_000_000, Ending.FAILED


class HalfFail(Counted):
    """Of every load only the first half comes."""

    number, ending = 1_000_000, Ending.HALF


class SomeUnproven(Counted):
    first, number, ending = 2, 3, Ending.UNPROVEN


class SomeHang(Counted):
    first, number, ending = 2, 3, Ending.HUNG


class FailOnSecondRank(Counted):
    """Every third load fails, on the second rank only."""

    ending = Ending.FAILED

    def ending_of(self, load: int) -> Ending:
        is_second = self._vllm_config.parallel_config.rank == 1
        return Ending.FAILED if is_second and load % 3 == 0 else Ending.WELL
