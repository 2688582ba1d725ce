"""A process that runs batches of a folder: `python -m tests.gateway.batches.owner_process FOLDER`.

It answers each line with the line's own body, some time after it was asked.
"""

import asyncio
import os
import sys
import time
from pathlib import Path

from serving.gateway.batches.answers import LineReply
from serving.gateway.batches.job import JobSettings
from serving.gateway.batches.lines import BatchLine, LineLimits
from serving.gateway.batches.records import Batch
from serving.gateway.batches.runner import BatchRunner, BlockingCalls
from serving.gateway.batches.sqlite_store import SqliteBatchStore

LEASE_S = 1.0
LIMITS = LineLimits(50_000, 10_000)
_ANSWER_S = 0.005


class Echo:
    """Answers lines. Implements `LineCaller`."""

    async def ask(self, batch: Batch, line: BatchLine) -> LineReply:
        await asyncio.sleep(_ANSWER_S)
        return LineReply(200, line.body, f"{os.getpid()}-{line.number}")


async def main(folder: Path) -> None:
    settings = JobSettings(LIMITS, 64, LEASE_S, LEASE_S / 5, 3600.0)
    store = SqliteBatchStore(folder)
    runner = BatchRunner(
        store, Echo(), settings, str(os.getpid()), 1, time.time, BlockingCalls(), 3600.0
    )
    await runner.run()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
