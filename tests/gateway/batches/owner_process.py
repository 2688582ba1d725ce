"""A process that runs batches: `python -m tests.gateway.batches.owner_process PLACE [LIMIT]`.

PLACE is a folder, or the address of a bucket.

It answers each line with the line's own body, some time after it was asked; LIMIT lines, and no
line after them.
"""

import asyncio
import os
import sys
import time
from pathlib import Path

from serving.artifacts.object_store.address import is_bucket, open_bucket
from serving.gateway.batches.answers import LineReply
from serving.gateway.batches.bucket.store import BucketBatchStore
from serving.gateway.batches.lines import BatchLine, LineLimits
from serving.gateway.batches.records import Batch
from serving.gateway.batches.running.job import JobSettings
from serving.gateway.batches.running.runner import BatchRunner
from serving.gateway.batches.running.threads import LaneThreads
from serving.gateway.batches.sqlite.store import SqliteBatchStore
from serving.gateway.batches.store import BatchStore

LEASE_S = 1.0
LIMITS = LineLimits(50_000, 10_000)
_ANSWER_S = 0.005


class Echo:
    """Answers `limit` lines; without one, all. Implements `LineCaller`."""

    def __init__(self, limit: int | None) -> None:
        self._num_left = limit

    async def ask(self, batch: Batch, line: BatchLine) -> LineReply:
        if self._num_left is not None:
            if self._num_left == 0:
                await asyncio.Event().wait()
            self._num_left -= 1
        await asyncio.sleep(_ANSWER_S)
        return LineReply(200, line.body, f"{os.getpid()}-{line.number}")


def store_at(place: str) -> BatchStore:
    """Opens a folder, or a bucket that bears many writes."""
    if is_bucket(place):
        return BucketBatchStore(open_bucket(place), write_interval_s=0.02)
    return SqliteBatchStore(Path(place))


async def main(place: str, limit: int | None = None) -> None:
    settings = JobSettings(LIMITS, 64, LEASE_S, LEASE_S / 5, 3600.0)
    store = store_at(place)
    runner = BatchRunner(
        store, Echo(limit), settings, str(os.getpid()), 1, time.time, LaneThreads(1).jobs, 3600.0
    )
    await runner.run()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))
