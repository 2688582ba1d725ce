"""What a batch costs is what the ledger charges for its lines, over owners that come and go."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from serving.domain.slice_lifecycle import SliceLifecycle, SliceState, Transition
from serving.domain.slice_records import SliceRecord, Snapshot
from serving.gateway.batches.answers import LineReply
from serving.gateway.batches.costs import BatchPrices, CostMeter
from serving.gateway.batches.lines import BatchLine
from serving.gateway.batches.records import Batch, BatchCost, BatchLease, BatchStatus, cancelled
from serving.gateway.batches.running.job import BatchJob
from serving.gateway.batches.running.threads import StoreCalls
from serving.gateway.batches.store import LeaseLostError
from serving.gateway.metrics.ledger import engine_use, is_busy
from serving.gateway.telemetry.request_metrics import DEFAULT_TENANT
from serving.ledger.ledger import Ledger
from serving.ledger.states import to_ms
from serving.telemetry.spans import NO_TRACER
from tests.gateway.test_request_traces import Stage, stage_for

from .kept import KeptInFolder
from .lanes import begin, ended
from .test_job import DEADLINE_S, LEASE_S, NUM_LINES, SETTINGS, World
from .test_losses import PATH, GatewayOfStage, completions

HOUR_MS = 3_600_000
LINE_MS = 100
BRISK = replace(SETTINGS, check_s=0.001)


def test_meter_counts_from_now_on_at_the_prices_of_now() -> None:
    chips = {"spot": HOUR_MS}
    prices = {"spot": 2.0, "reserved": 1.0}
    meter = CostMeter(BatchPrices(lambda _: chips, prices, 0.0), "b1")
    assert meter.take() == BatchCost()
    chips |= {"spot": 2 * HOUR_MS, "reserved": HOUR_MS}
    assert meter.take() == BatchCost(2 * HOUR_MS, 3.0)
    prices["spot"] = 4.0
    chips["spot"] += HOUR_MS
    assert meter.take() == BatchCost(HOUR_MS, 4.0)
    assert meter.take() == BatchCost()


def test_chips_without_a_price_make_the_dollars_unknown() -> None:
    chips = {"local": 0}
    meter = CostMeter(BatchPrices(lambda _: chips, {}, 0.0), "b1")
    assert meter.take() == BatchCost(0, 0.0)
    chips["local"] = 5
    cost = meter.take()
    assert cost == BatchCost(5, None)
    assert BatchCost(1, 1.0) + cost + BatchCost(1, 1.0) == BatchCost(7, None)


def test_ledger_that_has_forgotten_a_batch_gives_nothing_back() -> None:
    chips = {"spot": 10}
    meter = CostMeter(BatchPrices(lambda _: chips, {"spot": 0.0}, 0.0), "b1")
    chips["spot"] = 4
    assert meter.take().chip_ms == 0
    chips["spot"] = 9
    assert meter.take().chip_ms == 5


class Priced(World):
    """A world in which each line that is asked costs something, which is known a while later."""

    def __init__(self, folder: Path, known_after_s: float = 0.0) -> None:
        super().__init__(KeptInFolder(folder))
        self.chips = {"spot": 0}
        self.known_after_s = known_after_s
        self.num_free: int | None = None  # lines that are answered; the others wait
        self.prices = BatchPrices(lambda _: self.chips, {"spot": 3.6}, 2 * known_after_s)

    async def ask(self, batch: Batch, line: BatchLine) -> LineReply:
        asyncio.get_running_loop().call_later(self.known_after_s, self._charge)
        if self.num_free is not None and self.asked.total() >= self.num_free:
            self.asked["waits"] += 1
            await asyncio.Event().wait()
        return await super().ask(batch, line)

    def _charge(self) -> None:
        self.chips["spot"] += LINE_MS

    def job(self, lease: BatchLease) -> BatchJob:
        async def blocking(call, *values):  # type: ignore[no-untyped-def]
            await asyncio.sleep(0)
            return call(*values)

        now_s = lambda: self.now_s  # noqa: E731 - a clock
        calls = StoreCalls(blocking, blocking)
        return BatchJob(lease, self.store, self, BRISK, now_s, calls, self.counts, self.prices)


@asynccontextmanager
async def priced(folder: Path, known_after_s: float = 0.0) -> AsyncIterator[Priced]:
    world = Priced(folder, known_after_s)
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield world
    finally:
        world.store.close()


def owned(world: World, owner: str = "gw-1") -> BatchLease:
    lease = world.claim(owner)
    assert lease is not None
    return lease


async def test_batch_that_has_ended_has_the_cost_of_its_last_line(tmp_path: Path) -> None:
    async with priced(tmp_path, known_after_s=0.01) as world:
        await world.job(owned(world)).run()
        assert world.batch.status is BatchStatus.COMPLETED
        assert world.batch.cost.chip_ms == NUM_LINES * LINE_MS
        assert world.batch.cost.usd == pytest.approx(NUM_LINES * LINE_MS / HOUR_MS * 3.6)


async def test_cost_is_seen_while_the_batch_runs(tmp_path: Path) -> None:
    async with priced(tmp_path) as world:
        world.num_free = 1
        running = asyncio.create_task(world.job(owned(world)).run())
        while not world.batch.cost.chip_ms:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.001)
        assert world.batch.status is BatchStatus.IN_PROGRESS
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_owners_that_take_turns_count_each_chip_once(tmp_path: Path) -> None:
    """Given back in the middle, and lines that were in flight asked again."""
    async with priced(tmp_path) as world:
        world.num_free = 2
        first = owned(world)
        running = asyncio.create_task(world.job(first).run())
        while world.asked["waits"] < 2:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.001)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert world.batch.cost.chip_ms == world.chips["spot"] == world.asked.total() * LINE_MS
        world.store.release(first)
        world.num_free = None
        await world.job(owned(world, "gw-2")).run()
        assert world.batch.cost.chip_ms == world.chips["spot"]
        assert world.chips["spot"] > NUM_LINES * LINE_MS


async def test_owner_that_has_lost_its_lease_adds_nothing(tmp_path: Path) -> None:
    async with priced(tmp_path) as world:
        first = owned(world)
        world.store.renew(first, world.now_s, LEASE_S, BatchCost(10, 1.0))
        world.now_s += LEASE_S
        second = owned(world, "gw-2")
        with pytest.raises(LeaseLostError):
            world.store.renew(first, world.now_s, LEASE_S, BatchCost(10, 1.0))
        batch = world.store.renew(second, world.now_s, LEASE_S, BatchCost(5, 0.5))
        assert batch.cost == BatchCost(15, 1.5)


async def test_batch_of_which_nothing_was_asked_ends_at_once(tmp_path: Path) -> None:
    async with priced(tmp_path, known_after_s=1e6) as world:
        world.store.change("a", "b1", lambda batch: cancelled(batch, 0.0))
        await world.job(owned(world)).run()
        assert world.batch.status is BatchStatus.CANCELLED
        assert world.batch.cost == BatchCost()


class LedgerOfStage:
    """The ledger of a gateway before a stage, whose engines have slices of one chip."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.ledger = Ledger(to_ms(time.time()))
        life = SliceLifecycle((Transition(SliceState.READY, time.time(), "the test says so"),))
        self._snapshot = Snapshot(
            "v",
            tuple(
                SliceRecord(name, "demo", "spot", life, "v6e", "1x1", engine_id=name)
                for name in stage.engines
            ),
        )

    async def run(self) -> None:
        while True:
            connections = self._stage.model.connections
            busy = {
                each.engine_id: is_busy(len(each.requests), each.link.stats.load)
                for each in connections
            }
            uses = {
                each.engine_id: engine_use(each.requests.values(), each.link.stats.engine_stats)
                for each in connections
            }
            self.ledger.observe(self._snapshot, busy, to_ms(time.time()), uses)
            await asyncio.sleep(0.02)


@pytest.mark.imports_vllm
async def test_batches_cost_what_their_tenant_was_charged(tmp_path: Path) -> None:
    """Through edge, links and engines: all requests of the tenant are lines of two batches.

    They run for several reports of an engine, of which there is one a second: of a batch that comes
    and goes between two, the ledger knows nothing.
    """
    async with stage_for(NO_TRACER, num_engines=2) as stage:
        kept = LedgerOfStage(stage)
        keeping = asyncio.create_task(kept.run())
        gateway = GatewayOfStage(stage, tmp_path, "gw-1")
        prices = BatchPrices(kept.ledger.batch, {"spot": 3.6}, settled_s=6.0)
        gateway.lane.start(gateway.edge.answer_line, prices)
        async with asyncio.timeout(DEADLINE_S), gateway.client() as client:
            ids = [await begin(client, completions(40, 240), endpoint=PATH) for _ in range(2)]
            batches = [await ended(client, batch_id) for batch_id in ids]
        await gateway.lane.close()
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
    (charged,) = [part for part in kept.ledger.tenants() if part.tenant == DEFAULT_TENANT]
    costs = [batch.model_extra["cost"] for batch in batches]
    assert all(cost["chip_seconds"] > 0 for cost in costs)
    assert round(sum(cost["chip_seconds"] for cost in costs) * 1000) == charged.chip_ms
    assert sum(cost["usd"] for cost in costs) == pytest.approx(charged.chip_ms / HOUR_MS * 3.6)
