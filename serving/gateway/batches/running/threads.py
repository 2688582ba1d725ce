"""The threads of the batch lane, for the calls of its store, which block.

A lease that is not renewed in time is lost. So the calls that keep leases have threads that no long
call can take, and clients take none of those that carry batches on.
"""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

# Runs a blocking call where it does not stop the event loop.
Blocking = Callable[..., Awaitable[Any]]

# Of one batch, a renewal and another write to its head are under way at once.
_BRIEF_PER_BATCH = 2
# A claim and a release; a sweep and a look at what is due.
_BESIDE_BATCHES = 2
# A long one may be an upload to a bucket, which holds 32 MiB.
_CLIENTS_BRIEF, _CLIENTS_BULK = 4, 8


@dataclass(frozen=True, slots=True)
class StoreCalls:
    """Where calls of a store run: `brief` ones, and `bulk` ones that read or write contents."""

    brief: Blocking
    bulk: Blocking


class BlockingCalls:
    """Runs blocking calls in a few threads of their own."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, name)

    async def __call__(self, call: Callable[..., Any], *values: Any) -> Any:
        """Returns what a call returns; the call goes on if the caller is cancelled."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *values)

    def close(self) -> None:
        """Waits for the calls that run, and takes no more."""
        self._threads.shutdown(cancel_futures=True)


async def to_its_end(call: Awaitable[Any]) -> Any:
    """Returns what a call returns, and does not end before it, though the caller is cancelled.

    A caller that is cancelled again meanwhile leaves the call, which goes on.
    """
    task = asyncio.ensure_future(call)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


class LaneThreads:
    """The threads of one gateway's lane: for `jobs` that carry batches on, and for `clients`."""

    def __init__(self, num_batches: int) -> None:
        """Makes enough of them that none of `num_batches` at once waits for another."""
        num_brief = _BRIEF_PER_BATCH * num_batches + _BESIDE_BATCHES
        pools = (
            BlockingCalls(num_brief, "batch-leases"),
            BlockingCalls(num_batches + _BESIDE_BATCHES, "batch-bulk"),
            BlockingCalls(_CLIENTS_BRIEF, "batch-clients"),
            BlockingCalls(_CLIENTS_BULK, "batch-contents"),
        )
        self.jobs, self.clients = StoreCalls(*pools[:2]), StoreCalls(*pools[2:])
        self._pools = pools

    def close(self) -> None:
        """Waits for the calls that run, and takes no more."""
        for pool in self._pools:
            pool.close()
