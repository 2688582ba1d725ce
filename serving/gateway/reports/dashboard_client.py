"""The gateway's side of the dashboard: hands out samples and forwards requests for pages.

Owns the consequences of a slow or absent dashboard: one sample is on its way at most, a page is
refused with a reason, and no model request is affected. Does not own pages or history.
"""

import asyncio
import logging

import msgspec
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from serving.domain.dashboard_messages import GatewaySample, PageAnswer, PageRequest
from serving.domain.errors import DashboardUnavailableError

logger = logging.getLogger(__name__)

# Bounds the samples that a dashboard may miss before the next one is sent.
_SAMPLE_TIMEOUT_S = 5.0
# Less than the 5 s that the page's script waits for an answer.
_PAGE_TIMEOUT_S = 4.0
# Many times the tabs that a fleet's operators have open.
_MAX_PAGES = 64


class DashboardClient:
    """The gateway's client of the application's one dashboard."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle
        self._sending: asyncio.Task[None] | None = None
        self._is_away = False
        self._num_pages = 0

    @property
    def is_ready(self) -> bool:
        """True if the last sample has arrived or was given up."""
        return self._sending is None or self._sending.done()

    def send(self, sample: GatewaySample) -> None:
        """Sends a sample in a task of its own. Call it only while `is_ready`."""
        self._sending = asyncio.create_task(self._send(msgspec.msgpack.encode(sample)))

    async def ask(self, request: PageRequest) -> PageAnswer:
        """Asks the dashboard for a page.

        Raises:
            DashboardUnavailableError: it is away or late, or too many requests wait. Retry later.
        """
        if self._num_pages >= _MAX_PAGES:
            raise DashboardUnavailableError(f"{_MAX_PAGES} requests wait for it already")
        self._num_pages += 1
        try:
            answer: PageAnswer = await asyncio.wait_for(
                self._handle.page.remote(request), _PAGE_TIMEOUT_S
            )
        except TimeoutError as error:
            raise DashboardUnavailableError(f"no answer within {_PAGE_TIMEOUT_S:g} s") from error
        except (RayError, RayServeException) as error:
            raise DashboardUnavailableError("its process is away") from error
        finally:
            self._num_pages -= 1
        return answer

    def close(self) -> None:
        """Gives up the sample on its way. Idempotent."""
        if self._sending is not None:
            self._sending.cancel()

    async def _send(self, encoded: bytes) -> None:
        try:
            await asyncio.wait_for(self._handle.take.remote(encoded), _SAMPLE_TIMEOUT_S)
        except (TimeoutError, RayError, RayServeException) as error:
            if not self._is_away:
                logger.warning("dashboard_away error=%r", error)
            self._is_away = True
        else:
            if self._is_away:
                logger.info("dashboard_back")
            self._is_away = False
