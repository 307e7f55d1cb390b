"""The scripted transport follows its script, and refuses invalid scripts."""

from __future__ import annotations

from array import array

import pytest
from scripted import TORN, UNWRITTEN, ScriptedFence, ScriptedTransport

from aoffload._common.tiers import Tier
from aoffload._kernel.plans import Completion, TransferPlan
from aoffload._kernel.states import Outcome
from aoffload._transfer.transport import Transport
from aoffload.errors import TransferRefused
from aoffload.transport import Env


def opened(*, auto: bool = False) -> tuple[ScriptedTransport, list[Completion]]:
    transport = ScriptedTransport(6, auto=auto)
    delivered: list[Completion] = []
    transport.open(4, verify=True, deliver=delivered.append, env=Env())
    return transport, delivered


def store(job_id: int, device: list[int], host: list[int]) -> TransferPlan:
    return TransferPlan(job_id, Tier.DEVICE, Tier.HOST, array("i", device), array("i", host))


def load(job_id: int, host: list[int], device: list[int]) -> TransferPlan:
    return TransferPlan(job_id, Tier.HOST, Tier.DEVICE, array("i", host), array("i", device))


def test_tags_move_when_a_copy_lands() -> None:
    """Not at launch: what is written in between is what is copied."""
    transport, delivered = opened()
    seam: Transport = transport
    transport.write_device([1, 2], [11, 12])
    seam.launch(store(1, [1, 2], [3, 0]), None)
    transport.write_device([2], [22])
    assert list(transport.host_content) == [UNWRITTEN] * 4
    transport.land(1)
    assert list(transport.host_content) == [22, UNWRITTEN, UNWRITTEN, 11]
    transport.launch(load(2, [3], [5]), None)
    transport.land_all()
    assert transport.device_content[5] == 11
    assert [end.outcome for end in delivered] == [Outcome.LANDED] * 2
    assert seam.close(0)


def test_copies_land_in_any_order_and_may_repeat_themselves() -> None:
    """Out of order, late and twice."""
    transport, delivered = opened()
    for job_id in (1, 2, 3):
        transport.launch(store(job_id, [job_id], [job_id]), None)
    transport.land(3)
    transport.lose(1)
    transport.deliver_again(3)
    transport.land_all()
    assert not transport.close(0)
    transport.land(1)
    assert transport.close(0)
    assert [end.job_id for end in delivered] == [3, 1, 3, 2, 1]
    assert [end.outcome for end in delivered if end.job_id == 1] == [Outcome.UNPROVEN, Outcome.LANDED]


def test_failures_leave_torn_blocks() -> None:
    """What is not proven is not there: the block after the landed ones, or the corrupt one, holds garbage."""
    transport, delivered = opened()
    transport.write_device([1, 2, 3], [11, 12, 13])
    transport.launch(store(1, [1, 2, 3], [0, 1, 2]), None)
    transport.fail(1, num_landed=1)
    assert list(transport.host_content) == [11, TORN, UNWRITTEN, UNWRITTEN]
    transport.launch(store(2, [1, 2, 3], [0, 1, 2]), None)
    transport.corrupt(2, 2)
    assert list(transport.host_content) == [11, 12, TORN, UNWRITTEN]
    assert [(end.outcome, end.num_landed, end.corrupt) for end in delivered] == [
        (Outcome.FAILED, 1, ()),
        (Outcome.CORRUPT, 2, (2,)),
    ]


def test_refusals_start_nothing() -> None:
    """Refused launches are neither listed nor delivered; closed means refused."""
    transport, delivered = opened(auto=True)
    transport.refuse_next(1)
    with pytest.raises(TransferRefused):
        transport.launch(store(1, [1], [0]), None)
    transport.launch(store(1, [1], [0]), None)
    transport.close(0)
    with pytest.raises(TransferRefused):
        transport.launch(store(2, [1], [0]), None)
    assert [launched.plan.job_id for launched in transport.launched] == [1]
    assert len(delivered) == 1
    assert transport.statistics().blocks_stored == 1


def test_a_copy_cannot_land_before_its_fences() -> None:
    """Neither before `after`, nor, for a load, before the compute that was under way at launch."""
    transport, delivered = opened(auto=True)
    fence = ScriptedFence()
    transport.launch(store(1, [1], [0]), fence)
    transport.fence = fence
    transport.launch(load(2, [0], [2]), None)
    assert not delivered
    for job_id in (1, 2):
        with pytest.raises(AssertionError, match="fence has not passed"):
            transport.land(job_id)
    fence.has_passed = True
    transport.land_all()
    assert len(delivered) == 2


@pytest.mark.parametrize(
    "plan",
    [store(1, [0], [0]), store(1, [1], [4]), store(1, [1, 1], [0, 1]), store(1, [1, 2], [0]), load(1, [0], [6])],
)
def test_plans_that_a_real_transport_would_refuse_are_bugs(plan: TransferPlan) -> None:
    """A test must not depend on a plan that no tensor could be copied by."""
    transport, _ = opened()
    with pytest.raises(AssertionError):
        transport.launch(plan, None)
