"""A process that serves prompts with a disk until it is killed, and says which of them the disk has."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import anyio
from disk_serving import stored, with_disk
from serving import prompt


async def serve(place: Path) -> None:
    async with with_disk(place) as engine:
        await engine.runtime.disk.wait_restored()
        for seed in itertools.count(1):
            await engine.serve(prompt(seed, 17))
            await stored(engine)
            print(seed, flush=True)


if __name__ == "__main__":
    anyio.run(serve, Path(sys.argv[1]))
