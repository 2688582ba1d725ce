"""The batch lane of one gateway: its store, its routes and its runner, wired."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from serving.artifacts.object_store.address import open_bucket
from serving.config.application import BatchesConfig, GatewayConfig
from serving.domain.capacity.batch_due import BatchDue
from serving.gateway.batches.bucket.store import BucketBatchStore
from serving.gateway.batches.costs import BatchPrices
from serving.gateway.batches.due import due_by_model
from serving.gateway.batches.lines import LineLimits
from serving.gateway.batches.routes import BatchRoutes, BatchRules
from serving.gateway.batches.running.edge_caller import AnswerLine, EdgeCaller
from serving.gateway.batches.running.job import JobSettings, LineCounts
from serving.gateway.batches.running.long_lines import LongLines
from serving.gateway.batches.running.runner import (
    NO_OTHERS,
    BatchRunner,
    OthersWork,
    most_leased,
)
from serving.gateway.batches.running.threads import LaneThreads
from serving.gateway.batches.sqlite.store import SqliteBatchStore
from serving.gateway.batches.store import BatchStore

# How often leases are renewed and cancellations looked for, of a lease's length; and at least.
# Where a store bears few writes to a batch, most of them are for answers.
_CHECKS_PER_LEASE = 6
_MAX_CHECK_S = 1.0
_CHECKS_PER_WRITE = 2.5
# How often it is looked for work that is due, and at how many batches: in a bucket each takes some
# tens of ms, and eight are read at once. A policy plans hours ahead.
_LOOK_S = 30.0
_MOST_LOOKED_AT = 1000

logger = logging.getLogger(__name__)


def open_batch_store(config: BatchesConfig) -> BatchStore | None:
    """Opens what a configuration keeps batches in; `None` if it keeps none.

    Raises:
        ValueError: it cannot be used.
    """
    if config.store is not None:
        return BucketBatchStore(open_bucket(config.store))
    if config.folder is None:
        return None
    try:
        return SqliteBatchStore(Path(config.folder))
    except Exception as error:
        raise ValueError(f"batches.folder {config.folder!r} cannot be used: {error}") from error


class BatchLane:
    """Takes batches in and runs them; made once, run once, closed once."""

    def __init__(
        self, store: BatchStore, config: BatchesConfig, gateway: GatewayConfig, owner: str
    ) -> None:
        """Makes the lane of a store, which it closes; `owner` is the gateway's id."""
        self._store = store
        self._threads = LaneThreads(most_leased(config.batches_at_once))
        self._settings = JobSettings(
            LineLimits(config.max_lines, gateway.max_body_bytes),
            config.lines_in_flight,
            config.lease_s,
            max(
                min(_MAX_CHECK_S, config.lease_s / _CHECKS_PER_LEASE),
                _CHECKS_PER_WRITE * store.write_interval_s,
            ),
            config.file_lifetime_s,
        )
        self._batches_at_once = config.batches_at_once
        self._batch_lifetime_s = config.batch_lifetime_s
        # Half of the places to wait are others', should all lines have to wait at once.
        self._max_lines = gateway.max_waiting_requests // 2
        self._owner = owner
        self._long_lines: LongLines | None = None
        self._runner: BatchRunner | None = None
        self._task: asyncio.Task[None] | None = None
        self.due: Mapping[str, BatchDue] = {}
        """The batch work of each model by when it is due, as it was seen last."""
        rules = BatchRules(
            config.max_file_bytes,
            config.max_tenant_bytes,
            config.max_tenant_batches,
            config.file_lifetime_s,
            config.windows_s,
            gateway.body_timeout_s,
        )
        clients = self._threads.clients
        self.routes = BatchRoutes(self._store, rules, time.time, clients, self._wake)

    @property
    def counts(self) -> LineCounts:
        """What came of lines here since the start."""
        return LineCounts() if self._runner is None else self._runner.counts

    @property
    def num_leased(self) -> int:
        """The batches that this gateway works on."""
        return 0 if self._runner is None else self._runner.num_leased

    async def look_for_due(self, model_of: Callable[[str | None], str | None]) -> None:
        """Looks, until it is cancelled, which batch work is due when; `due` has it.

        `model_of` returns the model behind a name of a request, or behind none.
        """
        while True:
            try:
                look = self._threads.jobs.bulk
                batches = await look(self._store.open_batches, _MOST_LOOKED_AT)
                self.due = due_by_model(batches, model_of)
            except Exception:
                # What was seen last stands: work does not go away because nobody sees it.
                logger.exception("batch_store_failed")
            await asyncio.sleep(_LOOK_S)

    def start(
        self,
        answer_line: AnswerLine,
        prices: BatchPrices | None = None,
        others: OthersWork = NO_OTHERS,
    ) -> None:
        """Runs batches from now on; `answer_line` is the edge's. Without `prices` none costs.

        `others` tells what else the gateway does: a batch whose time runs out has more lines asked
        at once while lines do not wait, and fewer where others' requests miss their objectives.
        """
        self._long_lines = LongLines(asyncio.get_running_loop())
        self._runner = BatchRunner(
            self._store,
            EdgeCaller(answer_line),
            replace(self._settings, read_line=self._long_lines.read),
            self._owner,
            self._batches_at_once,
            time.time,
            self._threads.jobs,
            self._batch_lifetime_s,
            prices,
            self._max_lines,
            others,
        )
        self._task = asyncio.create_task(self._runner.run())

    async def close(self) -> None:
        """Gives the batches back that are not done, and closes the store."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.to_thread(self._threads.close)
        if self._long_lines is not None:
            await self._long_lines.wait_closed()
        await asyncio.to_thread(self._store.close)

    def _wake(self) -> None:
        if self._runner is not None:
            self._runner.wake()
