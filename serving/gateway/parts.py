"""The parts of a gateway, made once and wired here: HTTP edge, models, links, ledger, metrics."""

import asyncio
import gc
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from prometheus_client import REGISTRY, CollectorRegistry

from serving.config.application import AppConfig, LinkConfig
from serving.config.models import ModelConfig
from serving.directory.cluster_secret import cluster_secret
from serving.domain.capacity.batch_due import NOTHING_DUE, due_stats
from serving.domain.capacity.batch_lines import EnginePace
from serving.domain.capacity.engine_rates import rate_stats
from serving.domain.dashboard_messages import GatewaySample
from serving.domain.limits import STATS_INTERVAL_S
from serving.domain.load_report import load_stats, misses_objectives
from serving.domain.plan_report import PlanReport, PlanReportError
from serving.domain.slice_records import SliceRecord, Snapshot
from serving.gateway.batches.costs import BatchPrices
from serving.gateway.batches.lane import BatchLane, open_batch_store
from serving.gateway.batches.running.runner import OthersWork
from serving.gateway.dispatch.requests import EngineConnection
from serving.gateway.edge.http import EdgeRules, HttpEdge, model_behind
from serving.gateway.edge.own_routes import complaint
from serving.gateway.edge.readiness_keeper import Latch, ReadinessKeeper
from serving.gateway.membership import LinkSettings, Membership
from serving.gateway.metrics.batches import BatchCollector
from serving.gateway.metrics.class_prices import ClassPrices
from serving.gateway.metrics.engines import LinkCollector, LinkReading
from serving.gateway.metrics.fleet import PlanCollector, SliceCollector
from serving.gateway.metrics.ledger import LedgerCollector, engine_use, is_busy
from serving.gateway.metrics.loop import LoopCollector
from serving.gateway.metrics.own_listener import OwnListener
from serving.gateway.metrics.page import render_metrics
from serving.gateway.metrics.quotas import QuotaCollector
from serving.gateway.metrics.requests import EngineCollector, EngineReading, ServingCollector
from serving.gateway.metrics.spans import SpanCollector
from serving.gateway.quotas.book import QuotaBook
from serving.gateway.quotas.teller import ChipUse, TellUsage, UsageTeller
from serving.gateway.reports.dashboard_client import DashboardClient
from serving.gateway.reports.fleet_view import (
    EngineStatus,
    GatewayView,
    ModelView,
    describe_fleet,
    describe_plans,
)
from serving.gateway.reports.gateway_sample import ledger_entries, take_sample
from serving.gateway.served_model import ServedModel
from serving.gateway.telemetry.request_metrics import refusal_counts
from serving.ledger.endings import Endings
from serving.ledger.ledger import EngineUse, Ledger
from serving.ledger.states import to_ms
from serving.link.client import ClientLimits
from serving.link.heartbeat import HeartbeatConfig
from serving.telemetry.loop_turns import LoopTurns
from serving.telemetry.open_tracer import open_tracer

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

# Returns the directory's snapshot once it differs from the version given, at the latest after the
# seconds given. Raises `ConnectionError` while the directory is away.
Watch = Callable[[str, float], Awaitable[Snapshot]]


@dataclass(frozen=True, slots=True)
class DirectoryCalls:
    """The calls of the directory, and of the store of plans, which is read in a thread.

    All raise `ConnectionError` while the other side is away.
    """

    watch: Watch
    share_usage: TellUsage
    read_plan: Callable[[], PlanReport | None]


# Less than the policy takes between two plans.
_PLAN_PERIOD_S = 2.0
# How finely the ledger divides serving from idle.
_LEDGER_PERIOD_S = 1.0
# How long a gateway that starts waits for the directory, which starts with it.
_DIRECTORY_S = 10.0
# How long a gateway that ends may take to send its last spans.
_TRACES_S = 2.0


class LatestValue(Generic[_T]):
    """Holds a value that is set repeatedly. Used from one event loop; one task waits at a time.

    If several changes come while the task is busy, it gets the last.
    """

    def __init__(self) -> None:
        self._value: _T | None = None
        self._is_new = asyncio.Event()

    def set(self, value: _T) -> None:
        """Sets the present value; an unchanged one has no effect."""
        if value != self._value:
            self._value = value
            self._is_new.set()

    async def next(self) -> _T:
        """Waits for the next change."""
        while True:
            await self._is_new.wait()
            self._is_new.clear()
            if self._value is not None:
                return self._value


class GatewayParts:
    """The parts of one gateway, from the HTTP edge to the links: start once, close once."""

    def __init__(
        self,
        config: AppConfig,
        directory: DirectoryCalls,
        dashboard: DashboardClient,
        latch: Latch,
        host: str,
    ) -> None:
        """Wires the parts; `latch` is the Ray cluster's.

        `host` is the address that Serve listens on.

        Raises:
            ValueError: the API keys cannot be used; see `load_keys`.
        """
        self._view = GatewayView(uuid.uuid4().hex[:12], time.time())
        self._directory = directory
        self._dashboard = dashboard
        self._config = config
        # By name, as the directory lists them; changed in place, because all parts look at it.
        self._models: dict[str, ServedModel] = {}
        self._tasks: list[asyncio.Task[None]] = []  # they live as long as the gateway
        self._leaving: list[ServedModel] = []  # no longer served, with requests in flight
        self._prices = ClassPrices(config)
        self._readiness = ReadinessKeeper(latch, self._num_ready, time.monotonic)
        self._listed_models: LatestValue[tuple[Mapping[str, Any], ...]] = LatestValue()
        self._tracer = open_tracer(
            config.tracing.settings, "slicewise-gateway", self._view.gateway_id
        )
        self._quotas = QuotaBook(self._view.gateway_id)
        self._batches = _batch_lane(config, self._view.gateway_id)
        self.edge = HttpEdge(
            self._models,
            EdgeRules.of(config),
            self._render_metrics,
            self._describe_fleet,
            self._dashboard.ask,
            self._readiness.readiness,
            tracer=self._tracer,
            gateway_id=self._view.gateway_id,
            quotas=self._quotas,
            batches=None if self._batches is None else self._batches.routes,
        )
        self._listener = OwnListener(self.edge, host, config.gateway.metrics_ports)
        self._membership = Membership(
            self._models, _link_settings(config.link, self._view.gateway_id)
        )
        self._plan_report: PlanReport | None = None
        self._ledger = Ledger(to_ms(time.time()))
        self._chip_use = ChipUse(self._ledger, self._prices.usd_per_chip_hour)
        self._teller = UsageTeller(
            self._quotas, directory.share_usage, lambda: self.edge.tenant_quotas
        )
        self._endings = Endings(self._view.started_at_s)
        self._turns = LoopTurns()
        self._metrics = self._own_metrics()

    async def start(self) -> None:
        """Serves the models of the directory from now on.

        Raises:
            ValueError: vLLM refuses a model.
        """
        # What this gateway was made with may be older than what is listed: Serve keeps the
        # arguments of a deployment whose own part of the configuration has not changed.
        first = await self._first_snapshot()
        await self._apply_models(first.models or _raw_models(self._config))
        self._tasks += [
            asyncio.create_task(self._membership.follow(self._watch_directory)),
            asyncio.create_task(self._follow_models()),
            asyncio.create_task(self._keep_ledger()),
            asyncio.create_task(self._readiness.open_when_ready()),
            asyncio.create_task(self._teller.run()),
        ]
        if self._config.is_autoscaled:
            self._tasks.append(asyncio.create_task(self._follow_plans()))
        if self._batches is not None:
            others = OthersWork(self._num_batch_waiting, self._is_pressed, self._line_pace)
            self._batches.start(self.edge.answer_line, self._batch_prices(), others)
            self._tasks.append(asyncio.create_task(self._batches.look_for_due(self._model_of)))
        self._listener.start()
        # What start-up made lives as long as the process: the collector need not walk it again.
        gc.collect()
        gc.freeze()
        # Not before: until now it stood still for whole seconds, and nobody was served.
        self._turns.start()

    async def close(self) -> None:
        """Ends the links; engines free what was in flight here."""
        for task in self._tasks:
            task.cancel()
        if self._batches is not None:
            await self._batches.close()
        self._turns.stop()
        self._dashboard.close()
        self.edge.close()
        await self._listener.close()
        await self._membership.close()
        await asyncio.to_thread(self._tracer.close, _TRACES_S)

    def check_health(self) -> None:
        """Checks that every model can be answered for.

        Raises:
            RuntimeError: the frontend of a model has died. Replace this gateway.
        """
        broken = self.edge.broken_models
        if broken:
            raise RuntimeError(complaint(broken))

    def load_stats(self) -> dict[str, float]:
        """Returns the load of every model at this gateway, for an autoscaling policy."""
        stats: dict[str, float] = {}
        now_s = time.monotonic()
        due = {} if self._batches is None else self._batches.due
        for name, model in self._models.items():
            stats |= load_stats(name, model.load) | rate_stats(name, model.engine_rates(now_s))
            stats |= due_stats(name, due.get(name, NOTHING_DUE))
        return stats

    def _num_batch_waiting(self) -> int:
        return sum(model.load.num_batch_waiting for model in self._models.values())

    def _is_pressed(self) -> bool:
        return any(misses_objectives(model.load) for model in self._models.values())

    def _line_pace(self, names: Iterable[str]) -> EnginePace | None:
        """The pace of the engines that are nearest to what they may take, of several models."""
        # Lines of a batch that name none are for the only model.
        named: list[str | None] = [*names] or [None]
        models = {model for name in named if (model := self._model_of(name)) is not None}
        paces = [pace for name in models if (pace := self._models[name].line_pace()) is not None]
        return min(paces, key=lambda pace: pace.most_s / pace.step_s, default=None)

    def _model_of(self, name: str | None) -> str | None:
        """The model that answers to a name in a request; the only one, to a request without."""
        return model_behind(name, self._models)

    def _batch_prices(self) -> BatchPrices:
        # An engine's report, the next look of the ledger, and as much again for what is late.
        lag_s = self._config.link.heartbeat_interval_s + STATS_INTERVAL_S + _LEDGER_PERIOD_S
        return BatchPrices(self._ledger.batch, self._prices.usd_per_chip_hour, 2 * lag_s)

    def _num_ready(self) -> int:
        connections = (engine for model in self._models.values() for engine in model.connections)
        return sum(not engine.is_draining for engine in connections)

    def _own_metrics(self) -> CollectorRegistry:
        """Makes the registry of this gateway's own counters."""
        metrics = CollectorRegistry(auto_describe=False)
        for collector in (
            ServingCollector(self._models, self.edge.metrics),
            EngineCollector(self._read_engines),
            SpanCollector(self._tracer),
            LoopCollector(self._turns),
            LinkCollector(self._read_links),
            LedgerCollector(self._ledger, self._prices.usd_per_chip_hour),
            QuotaCollector(self._quotas, lambda: self._teller.age_s(time.monotonic()), time.time),
            SliceCollector(
                lambda: self._membership.snapshot,
                self._endings,
                self._prices.patience_s,
                time.time,
            ),
            PlanCollector(lambda: self._plan_report),
        ):
            metrics.register(collector)
        if self._batches is not None:
            metrics.register(BatchCollector(self._batches))
        return metrics

    async def _watch_directory(self, version: str, timeout_s: float) -> Snapshot:
        snapshot = await self._directory.watch(version, timeout_s)
        self._readiness.set_snapshot(snapshot)
        if snapshot.models is not None:
            self._listed_models.set(snapshot.models)
        return snapshot

    async def _first_snapshot(self) -> Snapshot:
        """Returns the directory's list; an empty one if no answer came within `_DIRECTORY_S`."""
        try:
            return await asyncio.wait_for(self._watch_directory("", 0.0), _DIRECTORY_S)
        except (TimeoutError, ConnectionError) as error:
            logger.warning("directory_unreachable error=%r", error)
            return Snapshot("")

    async def _follow_models(self) -> None:
        """Applies every change of the models, without a pause for the streams."""
        while True:
            raw = await self._listed_models.next()
            try:
                await self._apply_models(raw)
            except ValueError as error:
                # The engines refuse it too, and Serve reports it; the models of before go on.
                logger.error("models_refused error=%r", str(error))

    async def _apply_models(self, raw: Iterable[Mapping[str, Any]]) -> None:
        """Serves exactly these models from now on.

        Raises:
            ValueError: vLLM refuses some of them, which stay as before. The others are applied.
        """
        wanted = [ModelConfig.model_validate(model) for model in raw]
        self._prices.update(wanted)
        self._readiness.set_models(wanted)
        refused = []
        for model in wanted:
            try:
                if (served := self._models.get(model.name)) is not None:
                    await served.update(model)
                else:
                    built = await ServedModel.build(model, self._config.gateway)
                    self._models[model.name] = built
            except ValueError as error:
                refused.append(f"{model.name}: {error}")
        for name in self._models.keys() - {model.name for model in wanted}:
            self._leaving.append(self._models.pop(name))
            logger.info("model_gone model=%s", name)
        if refused:
            raise ValueError("; ".join(refused))

    def _prune(self) -> None:
        """Drops versions and models that have neither an engine nor a request left."""
        for model in self._models.values():
            model.prune()
        for model in [model for model in self._leaving if model.is_over]:
            self._leaving.remove(model)
            model.close()

    async def _follow_plans(self) -> None:
        """Keeps the last plan at hand, for readers of the fleet and for refused clients."""
        reported = ""
        while True:
            try:
                self._plan_report = (
                    await asyncio.to_thread(self._directory.read_plan) or self._plan_report
                )
            except (PlanReportError, ConnectionError) as error:
                # The last plan is shown with its age until there is another.
                if repr(error) != reported:
                    reported = repr(error)
                    logger.warning("plan_report_unreadable error=%r", error)
            if self._plan_report is not None:
                now_s = time.time()
                for name, model in self._models.items():
                    model.expect_engine(self._plan_report.retry_after_s(name, now_s))
            await asyncio.sleep(_PLAN_PERIOD_S)

    async def _keep_ledger(self) -> None:
        # Wall-clock time that no change of the clock turns back.
        epoch_s = time.time() - time.monotonic()
        while True:
            now_s = epoch_s + time.monotonic()
            self._count_chips()
            self._chip_use.count(self._quotas, time.time())
            self._prune()
            if self._dashboard.is_ready:
                self._dashboard.send(self._take_sample())
            # In the middle of a second: a timer that is a little early or late is still in it.
            await asyncio.sleep(_LEDGER_PERIOD_S - (now_s - 0.5) % _LEDGER_PERIOD_S)

    def _count_chips(self) -> None:
        busy: dict[str, bool] = {}
        uses: dict[str, EngineUse] = {}
        for model in self._models.values():
            for engine in model.connections:
                stats = engine.link.stats
                requests = engine.requests.values()
                busy[engine.engine_id] = is_busy(len(requests), stats.load)
                uses[engine.engine_id] = engine_use(requests, stats.engine_stats)
        self._ledger.observe(self._membership.snapshot, busy, to_ms(time.time()), uses)
        self._endings.observe(self._membership.snapshot)

    def _read_engines(self) -> Iterator[EngineReading]:
        records = self._membership.snapshot.records
        slices = _slice_names(records)
        for name, model in self._models.items():
            for view in map(_engine_status, model.connections):
                if view.load is not None:
                    slice_name = slices.get(view.engine_id)
                    yield EngineReading(
                        name, view.compute_class, view.engine_id, slice_name, view.load
                    )

    def _read_links(self) -> Iterator[LinkReading]:
        records = self._membership.snapshot.records
        slices = _slice_names(records)
        for name, model in self._models.items():
            for engine in model.connections:
                stats = engine.link.stats
                yield LinkReading(
                    model=name,
                    compute_class=engine.compute_class,
                    engine_id=engine.engine_id,
                    slice_name=slices.get(engine.engine_id),
                    traffic=stats.traffic,
                    silence_s=stats.silence_s,
                    round_trip_s=stats.round_trip_s,
                    load=stats.load,
                    engine_stats=stats.engine_stats,
                )

    async def _render_metrics(self, accept: str) -> tuple[bytes, str]:
        self._count_chips()
        of_models = (model.metrics for model in self._models.values())
        vllms = [REGISTRY, *(registry for registry in of_models if registry is not None)]
        return await render_metrics(vllms, self._view.gateway_id, accept, ours=[self._metrics])

    def _take_sample(self) -> GatewaySample:
        return take_sample(
            self._view.gateway_id,
            self._models,
            self.edge.metrics,
            self._read_engines(),
            ledger_entries(self._ledger, self._prices.usd_per_chip_hour),
            time.monotonic(),
        )

    def _describe_fleet(self) -> dict[str, Any]:
        models = [
            ModelView(
                model.describe()
                | {"refusals": refusal_counts(name, self.edge.metrics, model.request_metrics)},
                tuple(map(_engine_status, model.connections)),
            )
            for name, model in self._models.items()
        ]
        now_s = time.time()
        autoscaling = (
            describe_plans(self._plan_report, now_s) if self._config.is_autoscaled else None
        )
        uses = self._quotas.uses(now_s)
        return describe_fleet(
            self._view, models, self._membership.snapshot, now_s, autoscaling, uses
        )


def _batch_lane(config: AppConfig, gateway_id: str) -> BatchLane | None:
    """Opens the batch lane; `None` if there is no place for one.

    Raises:
        ValueError: its place cannot be used.
    """
    store = open_batch_store(config.batches)
    return None if store is None else BatchLane(store, config.batches, config.gateway, gateway_id)


def _link_settings(link: LinkConfig, gateway_id: str) -> LinkSettings:
    return LinkSettings(
        gateway_id=gateway_id,
        secret=cluster_secret(link),
        heartbeat=HeartbeatConfig(link.heartbeat_interval_s, link.heartbeat_timeout_s),
        limits=ClientLimits(max_buffered_bytes=link.max_buffered_bytes),
        encryption=link.encryption,
    )


def _slice_names(records: Iterable[SliceRecord]) -> dict[str, str | None]:
    """Returns the slice of each engine by its id; for a multislice the first, where its host is."""
    return {
        engine_id: record.life.slice_name for record in records for engine_id in record.engine_ids
    }


def _raw_models(config: AppConfig) -> tuple[dict[str, Any], ...]:
    """Returns the models as the directory lists them."""
    return tuple(model.model_dump(mode="json") for model in config.models)


def _engine_status(engine: EngineConnection) -> EngineStatus:
    # The link's load is kept fresh by heartbeats while the engine makes no step.
    return EngineStatus(
        engine.engine_id,
        engine.compute_class,
        engine.is_draining,
        len(engine.requests),
        engine.link.stats.load,
    )
