"""The dashboard as a Serve deployment: one replica, in a process of its own.

It opens no port: gateways hand it their samples and forward the requests of browsers. A restart
loses the points of the charts, and nothing else.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from serving.dashboard.exporter_scraper import ExporterScraper
from serving.dashboard.history import History
from serving.dashboard.metric_sampling import TpuSample
from serving.dashboard.pages import DashboardPages
from serving.domain.dashboard_messages import GatewaySample, PageAnswer, PageRequest
from serving.domain.slice_records import Snapshot
from serving.telemetry.process_log import LogStyle, log_as_replica

logger = logging.getLogger(__name__)

_DIRECTORY_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class DashboardSettings:
    """The dashboard's part of the configuration. Without `tpu_exporter_port` no host is asked."""

    log_style: LogStyle
    tpu_exporter_port: int | None


class Dashboard:
    """The history of the fleet, and its page. `serving.app` deploys it."""

    async def __init__(  # type: ignore[misc] # Serve awaits it
        self, settings: DashboardSettings, directory: DeploymentHandle
    ) -> None:
        log_as_replica(settings.log_style)
        self._directory = directory
        self._addresses: frozenset[str] = frozenset()
        # Wall-clock time that no change of the clock turns back.
        self._epoch_s = time.time() - time.monotonic()
        read_chips: Callable[[], Iterable[TpuSample]] = tuple
        self._scraping: asyncio.Task[None] | None = None
        if settings.tpu_exporter_port is not None:
            scraper = ExporterScraper(settings.tpu_exporter_port, self._host_addresses)
            read_chips = scraper.read
            self._scraping = asyncio.create_task(scraper.follow())
        self._history = History(uuid.uuid4().hex[:12], time.time(), read_chips)
        self._pages = DashboardPages(self._history)
        self._decoder = msgspec.msgpack.Decoder(GatewaySample)

    async def take(self, encoded: bytes) -> None:
        """Takes the sample of a gateway."""
        sample = self._decoder.decode(encoded)
        self._history.take(sample, self._epoch_s + time.monotonic())

    async def page(self, request: PageRequest) -> PageAnswer:
        """Answers a request that a gateway forwards."""
        return self._pages.answer(request)

    async def __del__(self) -> None:
        """Ends the scraping."""
        scraping = getattr(self, "_scraping", None)
        if scraping is not None:
            scraping.cancel()

    async def _host_addresses(self) -> frozenset[str]:
        """Returns the hosts of the listed slices; the last known ones without the directory."""
        try:
            snapshot: Snapshot = await asyncio.wait_for(
                self._directory.watch.remote("", 0.0), _DIRECTORY_TIMEOUT_S
            )
        except (TimeoutError, RayError, RayServeException) as error:
            logger.warning("directory_unreachable error=%r", error)
            return self._addresses
        self._addresses = frozenset(
            host.address for record in snapshot.records for host in record.hosts
        )
        return self._addresses
