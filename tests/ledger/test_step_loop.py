"""The example of a ledger in a step loop: whatever becomes of its copies, the outputs are right and it ends."""

from __future__ import annotations

import runpy
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from aoffload._transfer.backends.cpu import CpuBackend
from aoffload.ledger import Direction, Outcome, TransferPlan
from aoffload.transport import LocalTransport

EXAMPLE = Path(__file__).parents[2] / "examples/ledger_step_loop.py"
PROMPTS = {
    f"{name}-{again}": range(first, first + 60)
    for again in range(3)
    for name, first in (("a", 0), ("b", 99), ("c", 200), ("d", 300))
}
OUTCOMES = {
    "failed": Outcome.FAILED, "corrupt": Outcome.CORRUPT, "unproven": Outcome.UNPROVEN, "hung": Outcome.UNPROVEN,
}  # fmt: skip
NEVER = {(Direction.STORE, "corrupt")}
"""A store's bytes are compared when they are loaded."""


class FaultyBackend(CpuBackend):
    """Spoils the first and the third copy of one direction in one way."""

    fault, spoils = "", Direction.LOAD
    num_copies = num_doubts = 0

    def open(self, num_host_blocks: int) -> None:
        super().open(num_host_blocks)
        self.may_end = threading.Event()

    def _is_spoiled(self, direction: Direction, fault: str) -> bool:
        return self.fault == fault and direction is self.spoils and self.num_copies in (1, 3)

    def copy_batch(self, direction: Direction, on_device: NDArray[np.int64], on_host: NDArray[np.int64]) -> None:
        self.num_copies += direction is self.spoils
        if self._is_spoiled(direction, "unproven"):
            self.num_doubts += 1  # it is settled by another thread, perhaps after the next copy has begun
        if self._is_spoiled(direction, "failed") or self._is_spoiled(direction, "unproven"):
            raise OSError("the link is down")
        if self._is_spoiled(direction, "hung"):
            assert self.may_end.wait(60)
        super().copy_batch(direction, on_device, on_host)

    def settle(self, direction: Direction) -> None:
        if self.num_doubts:
            self.num_doubts -= 1
            raise OSError("the device does not answer")

    def after_copy(self, plan: TransferPlan) -> None:
        if self._is_spoiled(plan.direction, "corrupt"):
            block_id = plan.destination_ids[0]
            self.write_device_block(block_id, self.device_block(block_id) ^ 1)


@pytest.fixture
def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE))


@pytest.mark.parametrize(
    ("spoils", "fault"),
    [(spoils, fault) for spoils in Direction for fault in OUTCOMES if (spoils, fault) not in NEVER],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_loop_survives_every_end_of_a_copy(example: dict[str, Any], fault: str, spoils: Direction) -> None:
    """Copies fail, bring other bytes, end in doubt or hang: every output is that of a run without a cache, the loop
    ends, nothing is pinned, and only what is in doubt is in quarantine."""
    kv = torch.zeros(11, example["BLOCK"], dtype=torch.int64)
    transport = LocalTransport([kv], type("Faulty", (FaultyBackend,), {"fault": fault, "spoils": spoils}))
    engine = example["Engine"](kv, transport, verify=True, transfer_timeout_s=0.05)
    outcomes = set[Outcome]()
    settle = engine.ledger.settle

    def note(completion: Any) -> None:
        outcomes.add(completion.outcome)
        settle(completion)

    engine.ledger.settle = note
    assert example["run"](engine, PROMPTS)
    assert OUTCOMES[fault] in outcomes
    assert isinstance(transport.backend, FaultyBackend)
    transport.backend.may_end.set()
    engine.close()
    engine.ledger.check_integrity()
    found = engine.ledger.statistics()
    assert found.device.num_pinned == found.host.num_pinned == found.num_requests == 0
    in_doubt = found.device.num_quarantined + found.host.num_quarantined
    assert bool(in_doubt) == (fault == "unproven")


def test_the_loop_notices_a_wrong_byte(example: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """What the outputs are compared with is worth something: without checksums, one wrong byte is one wrong output."""
    kv = torch.zeros(6, example["BLOCK"], dtype=torch.int64)
    transport = LocalTransport([kv], type("Faulty", (FaultyBackend,), {"fault": "corrupt"}))
    engine = example["Engine"](kv, transport)
    assert not example["run"](engine, PROMPTS)
    engine.close()
