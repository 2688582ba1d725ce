"""Serves metadata to simulated hosts and to tests.

Has what `metadata_client` needs of Compute Engine's, as documented there: the header in both
directions, plain values under `computeMetadata/v1/`, entity tags, and waiting for a change. Does
not have directories, tokens or attributes of the project. A test makes it fail on command.
"""

import asyncio
import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime

from aiohttp import web

FLAVOR = {"Metadata-Flavor": "Google"}
_PREFIX = "/computeMetadata/v1/"

PREEMPTED = "instance/preempted"
MAINTENANCE_EVENT = "instance/maintenance-event"
UPCOMING_MAINTENANCE = "instance/upcoming-maintenance"

# How long answers that are still due at the end may take; to aiohttp 0 means for ever.
_CLOSE_S = 0.05

# What some VMs answer, with status 503, as long as no maintenance was announced; others say NONE.
# Source: Cloud TPU page "View maintenance notifications", and the 503 from Google's SAP agent
# (`metadataserver.go`); read 2026-11.
_NO_NOTIFICATION = {"error": "no notifications have been received yet, try again later"}


class SimulatedMetadata:
    """The metadata of one host. Start it, change it, close it, all on one event loop.

    A removed `instance/upcoming-maintenance` answers as on a VM that never had any maintenance.
    """

    def __init__(self, values: Mapping[str, str] | None = None) -> None:
        self._values = {
            PREEMPTED: "FALSE",
            MAINTENANCE_EVENT: "NONE",
            UPCOMING_MAINTENANCE: "NONE",
            **(values or {}),
        }
        self._failures: dict[str, int] = {}
        self._changed = asyncio.Event()
        self._asked = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self._address: tuple[str, int] | None = None
        self._is_closing = False
        self.num_requests = 0

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listens on `port`, or on a free one."""
        application = web.Application()
        application.router.add_get(_PREFIX + "{path:.*}", self._answer)
        self._runner = web.AppRunner(
            application,
            access_log=None,
            handler_cancellation=True,  # a client that has gone waits for nothing any more
            shutdown_timeout=_CLOSE_S,
        )
        self._is_closing = False
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        bound = self._runner.addresses[0]
        self._address = (bound[0], bound[1])

    async def close(self) -> None:
        """Ends it; clients that wait are answered. Idempotent."""
        self._is_closing = True
        self._note_change()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @property
    def host(self) -> str:
        """Returns what the environment variable GCE_METADATA_HOST of a simulated host has to be."""
        assert self._address is not None, "it has not been started"
        return f"{self._address[0]}:{self._address[1]}"

    def set(self, path: str, value: str) -> None:
        """Changes a value, such as `instance/preempted`; clients that wait for it are notified."""
        self._values[path] = value
        self._note_change()

    def remove(self, path: str) -> None:
        """Removes a path from this host from now on."""
        self._values.pop(path, None)
        self._note_change()

    def fail(self, path: str, status: int | None) -> None:
        """Answers this path with an HTTP status from now on; `None`: with its value again."""
        if status is None:
            self._failures.pop(path, None)
        else:
            self._failures[path] = status
        self._note_change()

    def announce_preemption(self) -> None:
        """Announces that the host is being preempted."""
        self.set(PREEMPTED, "TRUE")

    def announce_maintenance(self, at_s: float) -> None:
        """Announces that maintenance ends the host at this wall-clock time."""
        self.set(
            UPCOMING_MAINTENANCE,
            json.dumps(
                {
                    "can_reschedule": "false",
                    "latest_window_start_time": _rfc3339(at_s),
                    "maintenance_status": "PENDING",
                    "type": "UNSCHEDULED",
                    "window_start_time": _rfc3339(at_s),
                    "window_end_time": _rfc3339(at_s + 3600.0),
                }
            ),
        )

    async def wait_requests(self, count: int) -> None:
        """Waits until it has been asked so often since it was made."""
        while self.num_requests < count:
            await self._asked.wait()

    async def _answer(self, request: web.Request) -> web.Response:
        self.num_requests += 1
        self._asked.set()
        self._asked = asyncio.Event()
        if (
            request.headers.get("Metadata-Flavor") != "Google"
            or "X-Forwarded-For" in request.headers
        ):
            return web.Response(status=403, text="Missing Metadata-Flavor:Google header.")
        path = request.match_info["path"].rstrip("/")
        if request.query.get("wait_for_change", "").lower() == "true":
            timeout_s = float(request.query.get("timeout_sec", "inf"))
            await self._wait(path, request.query.get("last_etag"), timeout_s)
        if path in self._failures:
            return web.Response(status=self._failures[path], headers=FLAVOR)
        value = self._values.get(path)
        if value is None and path == UPCOMING_MAINTENANCE:
            return web.json_response(_NO_NOTIFICATION, status=503, headers=FLAVOR)
        if value is None:
            return web.Response(status=404, headers=FLAVOR)
        return web.Response(text=value, headers={**FLAVOR, "ETag": _etag(value)})

    async def _wait(self, path: str, last_etag: str | None, timeout_s: float) -> None:
        """Waits until the value differs from the one the client knows, or there is none."""
        before = self._state(path)
        if before is None or (last_etag is not None and last_etag != before):
            return
        try:
            async with asyncio.timeout(timeout_s if timeout_s < float("inf") else None):
                while self._state(path) == before and not self._is_closing:
                    await self._changed.wait()
        except TimeoutError:
            pass

    def _state(self, path: str) -> str | None:
        if path in self._failures or path not in self._values:
            return None
        return _etag(self._values[path])

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _etag(value: str) -> str:
    return hashlib.sha256(value.encode()).hexdigest()[:16]


def _rfc3339(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat()
