"""Servers with a disk or a shared store: a later server hits the KV of an earlier one."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import attrs
import pytest
from http_bench import OPTIONS, SmallModel

pytest.importorskip("xxhash", reason="the extra `disk` is not installed")

from aoffload import RemoteTier
from aoffload._reference.server import opening
from aoffload.integrations.openai_server import ServerOptions, Service, open_service
from aoffload.testing import SimulatedStore

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])]

PROMPT = [number % 256 for number in range(400)]


async def served(service: Service, num_times: int) -> list[list[int]]:
    """The tokens of as many answers to one prompt."""
    found = []
    for _ in range(num_times):
        found.append((await service.engine.generate(PROMPT, 4)).token_ids)
        while service.engine.runtime.statistics().num_jobs:
            await service.engine.runtime.flush()
    return found


async def test_the_next_server_finds_what_is_on_the_disk(tmp_path: Path) -> None:
    """Its answer is the same."""
    options = attrs.evolve(OPTIONS, disk=tmp_path / "kv", disk_size="1MiB")
    async with open_service(options, SmallModel()) as service:
        expected = await served(service, 1)
    async with open_service(options, SmallModel()) as service:
        runtime = service.engine.runtime
        assert await runtime.disk.wait_restored() > 0
        assert await served(service, 1) == expected
        statistics = runtime.statistics()
        assert statistics.disk_transfers is not None
        assert statistics.disk_transfers.blocks_loaded or statistics.num_fetches_declined


@pytest.mark.parametrize("has_secret", [False, True])
async def test_the_next_server_finds_what_is_in_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_secret: bool
) -> None:
    """Its answer is the same; a server of another model finds nothing."""
    pytest.importorskip("cryptography", reason="the extra `remote` is not installed")
    store = SimulatedStore()
    monkeypatch.setattr(opening, "store_of", lambda url: store)
    monkeypatch.setattr(opening, "RemoteTier", partial(RemoteTier, cell_bytes=4096))  # its KV is small
    (tmp_path / "secret").write_bytes(b"0123456789abcdef")
    options = attrs.evolve(OPTIONS, remote="redis://x", remote_secret=tmp_path / "secret" if has_secret else None)

    async def serve(options: ServerOptions, num_times: int) -> tuple[list[list[int]], int]:
        async with open_service(options, SmallModel()) as service:
            found = await served(service, num_times)
            statistics = service.engine.runtime.statistics()
            assert statistics.remote_transfers is not None
            return found, statistics.remote_transfers.blocks_loaded + statistics.num_fetches_declined

    expected, _ = await serve(options, 2)
    num_objects = len(store.objects)
    assert num_objects
    found, num_worth_a_look = await serve(options, 1)
    assert found == expected[:1] and num_worth_a_look
    _, num_worth_a_look = await serve(attrs.evolve(options, seed=1), 2)
    assert not num_worth_a_look
    assert len(store.objects) == 2 * num_objects
