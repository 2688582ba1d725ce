"""Holds one model at one gateway, in all the versions that have engines or requests now.

Owns which version takes a request, and the life of each version here: from the configuration or the
first engine that names it, to its last request. Does not own the parts of a version
(`model_version`), nor the rules of admission and of the choice (`admission`, `routing`).

While engines are replaced, a gateway has two versions of the model. It knows the new one from the
configuration, and the old one from before; a gateway that started in between knows the old one
from the reports of its engines.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from pydantic import ValidationError
from starlette.types import ASGIApp

from serving.config.application import GatewayConfig
from serving.config.models import ModelConfig
from serving.domain.capacity.batch_lines import STEP_SHARE, EnginePace
from serving.domain.capacity.engine_rates import EngineRate
from serving.domain.load_report import LoadSample
from serving.domain.models.request_fields.service_class import ServiceClass
from serving.gateway.dispatch.admission import (
    AdmissionQueue,
    FleetLimits,
    QueueState,
    RequestTarget,
)
from serving.gateway.dispatch.choice.routing import CanaryView, VersionView, choose_version
from serving.gateway.dispatch.dispatcher import Dispatcher
from serving.gateway.dispatch.load import load_of
from serving.gateway.dispatch.requests import Account, EngineConnection
from serving.gateway.edge.fields import BodyJudge
from serving.gateway.model_version import ModelVersion
from serving.gateway.streams.hold import TokenHold
from serving.gateway.streams.pace import HoldBounds
from serving.gateway.telemetry.engine_work import EngineSteps, EngineWork, StepPace
from serving.gateway.telemetry.request_metrics import FORECAST_OUTCOMES, RequestMetrics
from serving.gateway.telemetry.request_story import Because

logger = logging.getLogger(__name__)

# So many lines of tenants are shown: there may be thousands.
_MOST_LINES = 20


class VersionUnknownError(ValueError):
    """Reports an engine whose version cannot be served here, with the reason.

    Do not use the engine.
    """


class ServedModel:
    """Implements the edge's `ModelFrontend` and membership's `FleetModel` over all versions."""

    def __init__(self, gateway: GatewayConfig, config: ModelConfig) -> None:
        self._gateway = gateway
        self._config = config
        # The id of the configuration's version, a digest. Kept, because every request needs it.
        self._current_id = config.version_id
        self._queue = AdmissionQueue(config.name, FleetLimits.of(gateway))
        self._hold = TokenHold(HoldBounds(gateway.min_hold_s, gateway.max_hold_s))
        self._versions: dict[str, ModelVersion] = {}
        self._building = asyncio.Lock()
        self._engine_work = EngineWork()
        self._step_pace = StepPace()

    @classmethod
    async def build(cls, config: ModelConfig, gateway: GatewayConfig) -> "ServedModel":
        """Builds the model in the version of its configuration; needs no engine.

        Raises:
            ValueError: vLLM refuses the model, an engine argument or a frontend argument.
        """
        model = cls(gateway, config)
        await model.update(config)
        return model

    # -- what the edge asks --

    @property
    def name(self) -> str:
        """The model's name; see `ModelFrontend`."""
        return self._config.name

    @property
    def canary_of(self) -> str | None:
        """The model that it is a canary for; `None` if it is no canary."""
        return self._config.canary_of

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """The LoRA adapters; see `ModelFrontend`."""
        return tuple(adapter.name for adapter in self._config.lora_adapters)

    @property
    def body_judge(self) -> BodyJudge:
        """The judge of bodies; see `ModelFrontend`."""
        return self.current.body_judge

    @property
    def served_routes(self) -> frozenset[str]:
        """The routes that it answers; see `ListedModel`."""
        return self.current.served_routes

    async def enter(self, target: RequestTarget) -> ASGIApp:
        """Returns the application for a request; see `ModelFrontend`."""
        if not target.needs_engine:
            return await self._app_of(self.current, target)
        chosen: ModelVersion | None = None

        def can_enter() -> bool:
            nonlocal chosen
            chosen = self._chosen(target.name)
            return chosen is not None

        patience_s = target.patience_s
        if patience_s is None:
            patience_s = self._queue.limits.patience_s(target.service_class)
        await self._queue.admit(self._queue_state(), can_enter, patience_s)
        # Without a pause since admission: an engine that was there is there.
        return await self._app_of(chosen or self.current, target)

    @staticmethod
    async def _app_of(version: ModelVersion, target: RequestTarget) -> ASGIApp:
        app = await version.app()
        return version.preparing(app) if target.is_prepared_apart else app

    async def cards(self) -> list[dict[str, Any]]:
        """Returns the entries of `/v1/models`; see `ModelFrontend`."""
        return await self.current.cards()

    def canary(self) -> CanaryView:
        """Returns the facts that decide whether it takes a request as a canary."""
        num_ready = sum(version.dispatcher.num_ready for version in self._versions.values())
        weight = self._config.canary_weight or 0.0
        return CanaryView(self.name, self.current.version, weight, num_ready)

    # -- versions come and go --

    @property
    def current(self) -> ModelVersion:
        """The version that the configuration names."""
        return self._versions[self._current_id]

    async def update(self, config: ModelConfig) -> None:
        """Applies a changed configuration; requests in flight stay with what they have.

        Raises:
            ValueError: vLLM refuses it. Everything is as before.
        """
        async with self._building:
            version_id = config.version_id
            served = self._versions.get(version_id)
            if served is None:
                served = await self._build(config)
                self._versions[served.version] = served
            elif not served.is_frontend_of(config):
                await served.rebuild_frontend(config)
            before_id, self._current_id, self._config = self._current_id, version_id, config
            self._queue.telemetry.set_objectives(
                config.own_objectives, are_held=config.holds_objectives
            )
            for known in self._versions.values():
                known.dispatcher.is_retired = known.version != version_id
                known.dispatcher.objectives_changed()
            self._queue.look_again()
            if before_id != version_id:
                before = self._versions.get(before_id)
                num_engines = 0 if before is None else len(before.dispatcher.connections)
                logger.info(
                    "version_current model=%s version=%s before=%s engines_before=%d",
                    self.name, version_id, before_id, num_engines,
                )  # fmt: skip

    async def register_engine(self, engine_info: Mapping[str, Any]) -> Dispatcher:
        """Returns the dispatcher of the engine's version; see `FleetModel`.

        Raises:
            VersionUnknownError: the engine is of a version that vLLM refuses here.
        """
        version = engine_info.get("version") or self._current_id
        served = self._versions.get(str(version))
        if served is None:
            served = await self._build_reported(str(version), engine_info)
        served.update_from_engine(engine_info)
        return served.dispatcher

    async def _build_reported(self, version: str, engine_info: Mapping[str, Any]) -> ModelVersion:
        """Builds a version that the configuration does not name, as an engine describes it."""
        async with self._building:
            if version not in self._versions:
                try:
                    config = ModelConfig.model_validate(engine_info.get("described"))
                    if config.version_id != version:
                        raise VersionUnknownError(f"it describes {config.version_id}")
                    served = await self._build(config)
                except (ValidationError, ValueError) as error:
                    raise VersionUnknownError(
                        f"version {version} of {self.name} cannot be served here: {error}"
                    ) from error
                served.dispatcher.is_retired = True
                self._versions[version] = served
                logger.info("version_reported model=%s version=%s", self.name, version)
            return self._versions[version]

    async def _build(self, config: ModelConfig) -> ModelVersion:
        try:
            return await ModelVersion.build(config, self._gateway, self._queue, self._hold)
        except OSError as error:
            raise ValueError(f"the files of {config.source!r} cannot be read: {error}") from error

    def prune(self) -> None:
        """Drops versions that are not current and have neither an engine nor a request."""
        for version, served in list(self._versions.items()):
            if version != self._current_id and served.is_over:
                del self._versions[version]
                served.close()
                logger.info("version_gone model=%s version=%s", self.name, version)

    @property
    def is_broken(self) -> bool:
        """True if the frontend of a version has died; see `ModelFrontend`."""
        return any(version.is_broken for version in self._versions.values())

    @property
    def is_over(self) -> bool:
        """True if neither an engine nor a request is left."""
        return all(version.is_over for version in self._versions.values())

    def close(self) -> None:
        """Ends the frontends."""
        for served in self._versions.values():
            served.close()

    # -- what the gateway shows --

    @property
    def connections(self) -> tuple[EngineConnection, ...]:
        """The linked engines of all versions."""
        return tuple(
            connection
            for version in self._versions.values()
            for connection in version.dispatcher.connections
        )

    @property
    def request_metrics(self) -> RequestMetrics:
        """The numbers of all versions, gone ones included."""
        return self._queue.telemetry.metrics

    @property
    def num_waiting(self) -> int:
        """The number of admitted requests that wait for an engine."""
        return sum(version.dispatcher.num_waiting for version in self._versions.values())

    @property
    def num_queued(self) -> int:
        """The number of requests that are not admitted yet."""
        return self._queue.num_waiting

    @property
    def num_in_line(self) -> dict[ServiceClass, int]:
        """The number of admitted requests that wait for room in an engine, by class."""
        totals = dict.fromkeys(ServiceClass, 0)
        for version in self._versions.values():
            for service_class, count in version.dispatcher.num_waiting_of.items():
                totals[service_class] += count
        return totals

    @property
    def num_in_line_of_account(self) -> Counter[Account]:
        """Of these, those that wait for their tenants' turns, by class and tenant."""
        counts: Counter[Account] = Counter()
        for version in self._versions.values():
            counts.update(version.dispatcher.num_waiting_of_account)
        return counts

    @property
    def num_promised(self) -> int:
        """The number of refused requests that were told when to come back, and have not yet."""
        return sum(version.dispatcher.num_promised for version in self._versions.values())

    @property
    def load(self) -> LoadSample:
        """The load of the last half minute."""
        dispatchers = [version.dispatcher for version in self._versions.values()]
        return load_of(dispatchers, self._queue, time.monotonic())

    def engine_rates(self, now_s: float) -> list[EngineRate]:
        """Returns what the engines do that this gateway shows, as of now; call it now and then.

        `now_s` is of the monotonic clock.

        An engine that has a part of a slice is told of as if all on that slice did what it does.
        """
        engines = (
            (
                engine.engine_id,
                engine.compute_class,
                stats,
                0.0 if engine.load is None else engine.load.kv_usage_ratio,
            )
            for engine in self.connections
            if not engine.is_draining
            and (stats := engine.link.stats.engine_stats) is not None
            and stats.is_yours
        )
        parts = {each.compute_class: each.num_engines for each in self._config.deployments}
        return [
            rate.of_slice(parts.get(rate.compute_class, 1))
            for rate in self._engine_work.look(now_s, engines)
        ]

    def line_pace(self) -> EnginePace | None:
        """Returns the pace that lines of batches keep to; `None`: no objective bounds it.

        It is of all engines, whichever gateway shows them.
        """
        objectives = self._config.own_objectives
        if objectives is None:
            return None
        steps = {
            engine.engine_id: EngineSteps(
                stats.num_steps,
                stats.busy_s,
                len(engine.requests) if engine.room is None else engine.room.num_sequences,
            )
            for engine in self.connections
            if (stats := engine.link.stats.engine_stats) is not None
        }
        return self._step_pace.look(time.monotonic(), steps, STEP_SHARE * objectives.tpot_s)

    @property
    def metrics(self) -> CollectorRegistry | None:
        """The vLLM metrics of the current version; `None` if none are kept."""
        return self.current.metrics

    def expect_engine(self, in_s: float | None) -> None:
        """Sets when the next engine is expected to be ready; `None` means that nobody knows."""
        self._queue.expect_engine(in_s)

    def describe(self) -> dict[str, Any]:
        """Returns the model's part of `/fleet` that only this gateway knows."""
        described: dict[str, Any] = {
            "name": self.name,
            "version": self._current_id,
            "canary_of": self._config.canary_of,
            "canary_weight": self._config.canary_weight,
            "waiting": self.num_waiting + self.num_queued,
            "line": {each.label: count for each, count in self.num_in_line.items()},
            "line_tenants": self._longest_lines(),
            "line_mean_wait_s": self._mean_waits_s(),
            "promised": self.num_promised,
            "cache_forecast": self._cache_forecast(),
            "dispatches": self._dispatches(),
        }
        versions = self._versions.values()
        described["in_flight"] = sum(version.dispatcher.num_in_flight for version in versions)
        described["frontend_in_flight"] = sum(version.llm.num_in_flight for version in versions)
        described["resumes"] = sum(
            count
            for numbers in self.request_metrics.classes.values()
            for count in numbers.resumes.values()
        )
        described["versions"] = [
            {
                "version": view.version,
                "is_current": view.is_current,
                "ready": view.num_ready,
                "in_flight": view.num_in_flight,
            }
            for view in self._views()
        ]
        return described

    def _mean_waits_s(self) -> dict[str, float]:
        waits = self._queue.telemetry.mean_waits_s(time.monotonic())
        return {each.label: wait_s for each, wait_s in sorted(waits.items())}

    def _longest_lines(self) -> list[dict[str, Any]]:
        """Returns the tenants of which most waits, by class."""
        counts = self.num_in_line_of_account
        return [
            {"tenant": tenant, "service_class": service_class.label, "waiting": count}
            for (service_class, tenant), count in counts.most_common(_MOST_LINES)
        ]

    def _cache_forecast(self) -> dict[str, int]:
        """Returns how many tokens were expected in engines' caches and were there, and so on."""
        forecasts = [each.cache_forecast for each in self.request_metrics.classes.values()]
        return {
            outcome: sum(getattr(forecast, outcome) for forecast in forecasts)
            for outcome in FORECAST_OUTCOMES
        }

    def _dispatches(self) -> dict[str, int]:
        """Returns how many sequences went where they went for which reason."""
        counts: Counter[str] = Counter()
        for numbers in self.request_metrics.classes.values():
            counts.update(numbers.dispatches)
        return {because.value: counts[because] for because in Because}

    def _views(self, name: str | None = None) -> list[VersionView]:
        """Returns the versions that answer to `name`, a model or an adapter; all for `None`."""
        return [
            VersionView(
                version,
                served.dispatcher.num_ready,
                served.dispatcher.num_in_flight,
                is_current=version == self._current_id,
            )
            for version, served in self._versions.items()
            if name is None or served.answers_to(name)
        ]

    def _chosen(self, name: str | None) -> ModelVersion | None:
        version = choose_version(self._views(name)).version
        return None if version is None else self._versions[version]

    def _queue_state(self) -> QueueState:
        states = [version.queue_state for version in self._versions.values()]
        behind_s = max(state.behind_s for state in states)
        return QueueState(behind_s, sum(state.num_waiting for state in states))
