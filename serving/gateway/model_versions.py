"""One model at one gateway, in all the versions that have engines or requests now.

Owns which version takes a request, and the life of each version here: from the configuration or the
first engine that names it, to its last request. Does not own what is in a version (`served_model`),
nor the rule of the choice (`rollout.choice`).

While engines are replaced, a gateway has two versions of the model beside each other. It knows the
new one from the configuration, and the old one from before; or, when it has started in between,
from what the old engines tell.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from pydantic import ValidationError
from starlette.types import ASGIApp

from serving.config.application import GatewayConfig, ModelConfig
from serving.domain.load_report import LoadSample
from serving.gateway.admission import Admission, Inside
from serving.gateway.asked import Asked
from serving.gateway.choice import CanaryView, VersionView, choose_version
from serving.gateway.fleet_core import EngineSeat, FleetCore, load_of
from serving.gateway.served_model import ServedModel, Shared
from serving.gateway.telemetry.request_metrics import RequestMeter

logger = logging.getLogger(__name__)


class VersionUnknownError(ValueError):
    """An engine is of a version that cannot be served here; its message says why. Do not use it."""


class ModelVersions:
    """Implements the edge's `ModelFrontend` and membership's `FleetModel` over all versions."""

    def __init__(self, gateway: GatewayConfig, config: ModelConfig, shared: Shared) -> None:
        self._gateway = gateway
        self._config = config
        self._shared = shared
        self._versions: dict[str, ServedModel] = {}
        self._admission = Admission(config.name, gateway, shared.door)
        self._building = asyncio.Lock()

    @classmethod
    async def build(cls, config: ModelConfig, gateway: GatewayConfig) -> "ModelVersions":
        """The model in the version of its configuration; needs no engine.

        Raises:
            ValueError: vLLM refuses the model, an engine argument or a frontend argument.
        """
        versions = cls(gateway, config, Shared.of(config.name, gateway))
        await versions.update(config)
        return versions

    # -- what the edge asks --

    @property
    def name(self) -> str:
        """See `ModelFrontend`."""
        return self._config.name

    @property
    def canary_of(self) -> str | None:
        """The model of which it is the canary, if it is one."""
        return self._config.canary_of

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """See `ModelFrontend`."""
        return tuple(adapter.name for adapter in self._config.lora_adapters)

    @property
    def refused_fields(self) -> Mapping[str, str]:
        """See `ModelFrontend`."""
        return self.current.refused_fields

    async def enter(self, asked: Asked) -> ASGIApp:
        """See `ModelFrontend`."""
        if not asked.needs_engine:
            return await self.current.app()
        chosen: ServedModel | None = None

        def can_enter() -> bool:
            nonlocal chosen
            chosen = self._chosen(asked.name)
            return chosen is not None

        await self._admission.admit(self._inside(), can_enter)
        # Without a pause since the door: an engine that was there is there.
        return await (chosen or self.current).app()

    async def cards(self) -> list[dict[str, Any]]:
        """See `ModelFrontend`."""
        return await self.current.cards()

    def canary(self) -> CanaryView:
        """What is to be known of it as a canary."""
        num_ready = sum(each.core.num_ready for each in self._versions.values())
        weight = self._config.canary_weight or 0.0
        return CanaryView(self.name, self.current.version, weight, num_ready)

    # -- versions come and go --

    @property
    def current(self) -> ServedModel:
        """The version that the configuration names."""
        return self._versions[self._config.version_id]

    async def update(self, config: ModelConfig) -> None:
        """Takes in a changed configuration; requests in flight stay with what they have.

        Raises:
            ValueError: vLLM refuses it. Everything is as before.
        """
        async with self._building:
            served = self._versions.get(config.version_id)
            if served is None:
                served = await self._build(config)
                self._versions[served.version] = served
            elif not served.is_frontend_of(config):
                await served.reframe(config)
            before, self._config = self._config, config
            for version, each in self._versions.items():
                each.core.is_retired = version != config.version_id
            self._shared.door.open()
            if before.version_id != config.version_id:
                logger.info(
                    "version_current model=%s version=%s before=%s engines_before=%d",
                    self.name, config.version_id, before.version_id,
                    len(self._versions[before.version_id].core.seats)
                    if before.version_id in self._versions else 0,
                )  # fmt: skip

    async def take_in(self, engine_info: Mapping[str, Any]) -> FleetCore:
        """See `FleetModel`.

        Raises:
            VersionUnknownError: the engine is of a version that vLLM refuses here.
        """
        version = engine_info.get("version") or self._config.version_id
        served = self._versions.get(str(version))
        if served is None:
            served = await self._build_told(str(version), engine_info)
        served.learn(engine_info)
        return served.core

    async def _build_told(self, version: str, engine_info: Mapping[str, Any]) -> ServedModel:
        """A version that the configuration does not name, from what an engine tells of it."""
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
                served.core.is_retired = True
                self._versions[version] = served
                logger.info("version_told model=%s version=%s", self.name, version)
            return self._versions[version]

    async def _build(self, config: ModelConfig) -> ServedModel:
        try:
            return await ServedModel.build(config, self._gateway, self._shared)
        except OSError as error:
            raise ValueError(f"the files of {config.source!r} cannot be read: {error}") from error

    def tidy(self) -> None:
        """Lets go of versions on their way out that have neither an engine nor a request."""
        for version, served in list(self._versions.items()):
            if version != self._config.version_id and served.is_over:
                del self._versions[version]
                served.llm.shutdown()
                logger.info("version_gone model=%s version=%s", self.name, version)

    @property
    def is_over(self) -> bool:
        """Whether neither an engine nor a request is left."""
        return all(each.is_over for each in self._versions.values())

    def close(self) -> None:
        """Ends the frontends."""
        for served in self._versions.values():
            served.llm.shutdown()

    # -- what the gateway shows --

    @property
    def seats(self) -> tuple[EngineSeat, ...]:
        """The linked engines of all versions."""
        return tuple(seat for each in self._versions.values() for seat in each.core.seats)

    @property
    def request_meter(self) -> RequestMeter:
        """The numbers of all versions, those included that are gone."""
        return self._shared.requests

    @property
    def num_waiting(self) -> int:
        """Requests inside that wait for an engine."""
        return sum(each.core.num_waiting for each in self._versions.values())

    @property
    def num_at_the_door(self) -> int:
        """Requests that are not let in yet."""
        return self._shared.door.num_waiting

    @property
    def load(self) -> LoadSample:
        """The load of the last half minute."""
        cores = [each.core for each in self._versions.values()]
        return load_of(cores, self._shared.door, time.monotonic())

    @property
    def metrics(self) -> CollectorRegistry | None:
        """VLLM's own metrics of the current version; `None` where none are kept."""
        return self.current.metrics

    def expect_engine(self, in_s: float | None) -> None:
        """Takes in when the next engine is expected to be ready; `None`: nobody knows."""
        self._shared.door.expect_engine(in_s)

    def describe(self) -> dict[str, Any]:
        """The model's part of `/fleet` that only this gateway knows."""
        told: dict[str, Any] = {
            "name": self.name,
            "version": self._config.version_id,
            "canary_of": self._config.canary_of,
            "canary_weight": self._config.canary_weight,
            "waiting": self.num_waiting + self.num_at_the_door,
        }
        versions = self._versions.values()
        told["in_flight"] = sum(each.core.num_in_flight for each in versions)
        told["frontend_in_flight"] = sum(each.llm.num_in_flight for each in versions)
        told["resumes"] = sum(
            count for each in self.request_meter.classes.values() for count in each.resumes.values()
        )
        told["versions"] = [
            {
                "version": view.version,
                "is_current": view.is_current,
                "ready": view.num_ready,
                "in_flight": view.num_in_flight,
            }
            for view in self._views()
        ]
        return told

    def _views(self, name: str | None = None) -> list[VersionView]:
        """The versions that answer to `name`, a model or an adapter; all of them for `None`."""
        return [
            VersionView(
                version,
                served.core.num_ready,
                served.core.num_in_flight,
                is_current=version == self._config.version_id,
            )
            for version, served in self._versions.items()
            if name is None or served.answers_to(name)
        ]

    def _chosen(self, name: str | None) -> ServedModel | None:
        version = choose_version(self._views(name)).version
        return None if version is None else self._versions[version]

    def _inside(self) -> Inside:
        parts = [each.inside for each in self._versions.values()]
        return Inside(max(part.behind_s for part in parts), sum(part.num_waiting for part in parts))
