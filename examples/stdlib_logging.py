"""Events through Python's own `logging`: the level and the handlers of a logger apply, fields are `extra`.

Prints:
    INFO aoffload.server tenant=blue runtime_opened
    INFO aoffload.server tenant=blue request_done r1
    INFO aoffload.server tenant=blue request_aborted r2: deadline
"""

import logging
import sys

import anyio
import torch

from aoffload import KVCacheGroup, OffloadConfig, OffloadRuntime

PROMPT = list(range(40))


class Formatter(logging.Formatter):
    """One line for each event. For a formatter that writes JSON, see docs/howto/logs-and-spans.md."""

    def format(self, record: logging.LogRecord) -> str:
        fields = vars(record)  # {"request_id": "r1", "num_computed_tokens": 40, ...}
        line = f"{record.levelname} {record.name} tenant={fields['tenant']} {record.getMessage()}"
        line += f" {fields['request_id']}" if "request_id" in fields else ""
        return f"{line}: {fields['reason']}" if "reason" in fields else line


async def main() -> None:
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(Formatter())
    logger = logging.getLogger("aoffload.server")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)  # events of the level DEBUG are not even described

    config = OffloadConfig(groups=[KVCacheGroup("full", block_size=16)], num_host_blocks=64)
    bound = logging.LoggerAdapter(logger, {"tenant": "blue"})
    async with OffloadRuntime(config, torch.zeros(9, 16, 64), logger=bound) as runtime:
        async with runtime.request(PROMPT, "r1") as request:
            await request.allocate()
            await request.load()
            request.commit(len(PROMPT))
        async with runtime.request(PROMPT, "r2", deadline_s=0) as request:
            await request.allocate()


if __name__ == "__main__":
    anyio.run(main)
