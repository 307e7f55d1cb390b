"""`FaultyTransport` applies a fault to the n-th job, and an engine on it computes the missing tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch

from aoffload import InvalidArgument, KVCacheGroup, OffloadConfig, OffloadRuntime
from aoffload.errors import RegionNotLoaded
from aoffload.ledger import Direction
from aoffload.testing import FaultyTransport, JobFault
from aoffload.transport import LocalTransport

pytestmark = pytest.mark.anyio

BLOCK, NUM_BLOCKS, GUARD_S = 4, 12, 30.0
PROMPT = range(4 * BLOCK + 1)
HALF, WHOLE = 2 * BLOCK, 4 * BLOCK


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


class Engine:
    """Writes the number of each block of the prompt into it, and reads what is called ready."""

    def __init__(self, *faults: JobFault | str, every: int = 1, **options: Any) -> None:
        self.kv = torch.zeros(NUM_BLOCKS + 1, 2, dtype=torch.int64)
        options.setdefault("direction", Direction.LOAD)
        self.transport = FaultyTransport(LocalTransport(self.kv), *faults, every=every, **options)

    @asynccontextmanager
    async def opened(self, **options: Any) -> AsyncIterator[OffloadRuntime]:
        config = OffloadConfig(groups=[KVCacheGroup("all", block_size=BLOCK)], num_host_blocks=16, **options)
        async with OffloadRuntime(config, transport=self.transport) as self.runtime:
            await self.serve()
            await self.runtime.flush()
            await self.forget()
            yield self.runtime

    async def serve(self) -> int:
        """How many tokens were ready, all of them with the right bytes."""
        async with self.runtime.request(PROMPT) as request:
            await request.allocate()
            num_ready = await request.load()
            (table,) = request.block_ids
            numbers = self.kv[table[: num_ready // BLOCK]].tolist()
            assert numbers == [[at + 1, at + 1] for at in range(num_ready // BLOCK)]
            with self.runtime.step([request]):
                for at, block_id in enumerate(table):
                    self.kv[block_id] = at + 1
            request.commit(len(PROMPT))
            return num_ready

    async def forget(self) -> None:
        """Take every device block, and spoil it."""
        async with self.runtime.request(range(500, 500 + NUM_BLOCKS * BLOCK), store="none") as request:
            await request.allocate()
            self.kv[request.block_ids[0]] = -1

    async def at_rest(self) -> None:
        with anyio.fail_after(GUARD_S):
            while self.runtime.statistics().device.num_quarantined:
                await anyio.lowlevel.checkpoint()
        self.runtime.check_integrity()


@pytest.mark.parametrize(("fault", "num_ready"), [("fail", HALF), ("corrupt", HALF), ("refuse", 0), ("unproven", 0)])
async def test_what_does_not_come_is_computed(fault: str, num_ready: int) -> None:
    """Half of the blocks where a copy breaks off, none where it is in doubt; and the next time they are there again."""
    engine = Engine(fault, every=2)
    async with engine.opened():
        assert await engine.serve() == WHOLE
        await engine.runtime.flush()
        await engine.forget()
        assert await engine.serve() == num_ready
        assert engine.transport.num_faults == {JobFault(fault): 1}
        await engine.runtime.flush()
        engine.transport.release()
        await engine.at_rest()
        await engine.forget()
        assert await engine.serve() == WHOLE


async def test_a_copy_without_a_proof_writes_late_over_blocks_that_nobody_has() -> None:
    """They are in quarantine until the copy is proven over, and nobody reads them before."""
    engine = Engine("unproven")
    async with engine.opened() as runtime:
        assert await engine.serve() == 0
        assert runtime.statistics().device.num_quarantined == 4
        await runtime.flush()
        assert runtime.transport.statistics().num_loads == 0
        engine.transport.release()
        await engine.at_rest()
        assert runtime.transport.statistics().num_loads == 1


async def test_a_copy_that_hangs_ends_when_it_is_released() -> None:
    """A request that waits for it goes on then, with the right bytes."""
    engine, found = Engine("hang"), list[int]()

    async def waits() -> None:
        found.append(await engine.serve())

    async with engine.opened(), anyio.create_task_group() as group:
        group.start_soon(waits)
        while not engine.transport.num_faults:
            await anyio.lowlevel.checkpoint()
        await anyio.wait_all_tasks_blocked()
        assert not found
        engine.transport.release()
    assert found == [WHOLE]


async def test_a_late_copy_begins_by_itself() -> None:
    """`late_s` seconds after its launch."""
    engine = Engine("hang", late_s=0.01)
    async with engine.opened():
        with anyio.fail_after(GUARD_S):
            assert await engine.serve() == WHOLE


async def test_what_hangs_when_the_runtime_closes_never_begins() -> None:
    """The runtime closes all the same, and a release afterwards does nothing."""
    engine = Engine("unproven")
    async with engine.opened() as runtime:
        await engine.serve()
    engine.transport.release()
    assert runtime.transport.statistics().num_loads == 0
    assert not engine.transport.close(0.0), "as far as anybody knows it still writes"


async def test_every_nth_job_of_a_direction_meets_the_faults_in_turn() -> None:
    """Others are as ever."""
    engine = Engine("fail", JobFault.REFUSE, every=2)
    async with engine.opened() as runtime:
        found = []
        for _ in range(6):
            found.append(await engine.serve())
            await runtime.flush()
            await engine.forget()
        assert found == [WHOLE, HALF, WHOLE, 0, WHOLE, HALF]
        assert engine.transport.num_faults == {JobFault.FAIL: 2, JobFault.REFUSE: 1}
        assert repr(engine.transport).endswith("every=2 fail=2, refuse=1>")


@pytest.mark.parametrize("fault", ["fail", "corrupt", "refuse", "unproven"])
async def test_stores_go_wrong_too(fault: str) -> None:
    """What has not come to the host is no hit there, and the blocks of the device are right all the same."""
    engine = Engine(fault, direction=Direction.STORE)
    async with engine.opened() as runtime:
        assert await engine.serve() == (HALF if fault in ("fail", "corrupt") else 0)
        assert engine.transport.num_faults[JobFault(fault)] >= 1
        runtime.check_integrity()


async def test_a_region_is_not_loaded_because_half_of_its_blocks_are() -> None:
    """The fences of a load that starts early do not pass for a copy that breaks off."""
    engine = Engine("fail")
    async with engine.opened() as runtime:
        async with runtime.request(PROMPT) as request:
            await request.allocate()
            pending = request.load_nowait()
            with pytest.raises(RegionNotLoaded):
                await anyio.to_thread.run_sync(pending.regions[0].synchronize)
            assert await pending.wait() == HALF


@pytest.mark.parametrize(
    ("name", "faults", "options"),
    [
        ("transport", ["fail"], {"transport": object()}),
        ("faults", [], {}),
        ("faults", ["explode"], {}),
        ("faults", [3], {}),
        ("every", ["fail"], {"every": 0}),
        ("every", ["fail"], {"every": True}),
        ("direction", ["fail"], {"direction": "load"}),
        ("late_s", ["hang"], {"late_s": -1}),
        ("late_s", ["hang"], {"late_s": float("nan")}),
        ("late_s", ["hang"], {"late_s": "soon"}),
    ],
)
def test_a_wrong_argument_is_named(name: str, faults: list[Any], options: dict[str, Any]) -> None:
    transport = options.pop("transport", LocalTransport(torch.zeros(3, 2)))
    with pytest.raises(InvalidArgument) as refused:
        FaultyTransport(transport, *faults, **options)
    assert refused.value.argument == name
