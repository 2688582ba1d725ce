"""Watches Compute Engine's metadata server for the announced end of this host.

Owns the protocol (long polling with entity tags) and the meaning of the values. Does not own what
follows from a notice.

Sources, Google Cloud documentation, read 2026-11:
- "View and query VM metadata" (`compute/docs/metadata/querying-metadata`): the header
  `Metadata-Flavor: Google`, `wait_for_change`, `last_etag`, `timeout_sec`; status 503 for up to a
  second around maintenance.
- "Query the metadata server for maintenance event notices" (`.../getting-live-migration-notice`):
  `instance/maintenance-event`. Only a host that has asked for it at least once is warned.
- "View maintenance notifications" (`tpu/docs/view-maintenance-notifications`): the JSON of
  `instance/upcoming-maintenance` on TPU VMs.
- Spot VMs (`compute/docs/instances/spot`): `instance/preempted`.

The end of a flex-start VM's run stands in no documented metadata key; `node_notices` reads it from
the node object. GKE's own metadata server, which pods see under Workload Identity without host
network, serves a subset of these paths: what it does not have counts as absent.
"""

import asyncio
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import aiohttp

from serving.slices.local.node_notices import format_utc, rfc3339_s
from serving.slices.notices import Notice, NoticeKind, NoticeSink

logger = logging.getLogger(__name__)

# Where Google's own client libraries for Go and Python look for the server's `host[:port]`.
HOST_VARIABLE = "GCE_METADATA_HOST"
_DEFAULT_HOST = "metadata.google.internal"

# From the announcement to the forced stop. Source: Spot VMs page, read 2026-11; GKE gives ordinary
# pods 15 of these seconds.
SPOT_NOTICE_S = 30.0

PREEMPTED = "instance/preempted"
MAINTENANCE_EVENT = "instance/maintenance-event"
UPCOMING_MAINTENANCE = "instance/upcoming-maintenance"
_WATCHED = (PREEMPTED, MAINTENANCE_EVENT, UPCOMING_MAINTENANCE)

# A long poll is renewed this often, as by Google's guest agent (60 s, read 2026-11).
_WAIT_S = 60
# Allowed for the answer itself, in addition to the wait for a change.
_ANSWER_S = 10.0
# A path that this host does not have may come with its first announcement.
_ABSENT_RETRY_S = 5.0
_FIRST_RETRY_S = 0.25
_LONGEST_RETRY_S = 30.0
# A server that does not wait for a change is asked no more often than this.
_SHORTEST_POLL_S = 1.0
# Bounds what a server that is no metadata server can make us hold.
_MAX_VALUE_BYTES = 64 * 1024


class MetadataError(Exception):
    """The server could not be asked, or its answer makes no sense. Nothing is known; ask again."""


@dataclass(frozen=True, slots=True)
class Value:
    """The value of a metadata path. `text` is `None` where this host has no such path."""

    text: str | None
    etag: str | None


class MetadataClient:
    """Asks one metadata server. An asynchronous context manager; may be entered once."""

    def __init__(self, host: str | None = None) -> None:
        """Takes `host` as `host[:port]`; `None` is the name that every Google VM knows."""
        self._url = f"http://{host or _DEFAULT_HOST}/computeMetadata/v1/"
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # It takes no proxy from the environment: the server is link-local.
        self._session = aiohttp.ClientSession(headers={"Metadata-Flavor": "Google"})
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def get(
        self,
        path: str,
        query: Mapping[str, str] | None = None,
        *,
        other_than: str | None = None,
        wait_s: int = _WAIT_S,
    ) -> Value:
        """Returns the value now; with `other_than`, an entity tag, the next one with another tag.

        In the latter case it returns the old value after all if nothing changes within `wait_s`.

        Raises:
            MetadataError: ask again.
        """
        asked = dict(query or {})
        if other_than is not None:
            asked |= {
                "wait_for_change": "true",
                "last_etag": other_than,
                "timeout_sec": str(wait_s),
            }
        timeout = aiohttp.ClientTimeout(total=_ANSWER_S + (wait_s if other_than is not None else 0))
        assert self._session is not None, "it has not been entered"
        try:
            async with self._session.get(self._url + path, params=asked, timeout=timeout) as answer:
                body = bytearray()
                async for data in answer.content.iter_any():
                    body += data
                    if len(body) > _MAX_VALUE_BYTES:
                        raise MetadataError(f"more than {_MAX_VALUE_BYTES} bytes")
                return _value(answer.status, answer.headers, bytes(body))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise MetadataError(f"{type(error).__name__}: {error}") from error


def _value(status: int, headers: Mapping[str, str], body: bytes) -> Value:
    # 403: GKE's metadata server conceals the path.
    if status in (403, 404) or (status == 503 and b"no notifications have been received" in body):
        return Value(None, None)
    if status != 200:
        raise MetadataError(f"status {status}")
    if headers.get("Metadata-Flavor") != "Google":
        raise MetadataError("the answer is not from a metadata server")
    return Value(body.decode(errors="replace").strip(), headers.get("ETag"))


async def watch_notices(
    client: MetadataClient,
    worker_id: int,
    sink: NoticeSink,
    *,
    preemption_notice_s: float = SPOT_NOTICE_S,
    absent_retry_s: float = _ABSENT_RETRY_S,
) -> None:
    """Announces to `sink` what this host's metadata server announces, until it is cancelled.

    A server that cannot be reached announces and withdraws nothing. `preemption_notice_s` is the
    time that the host has after the announcement of a preemption.
    """
    failing: dict[str, str] = {}
    async with client, asyncio.TaskGroup() as tasks:
        for path in _WATCHED:
            watch = _Watch(
                client, path, worker_id, sink, preemption_notice_s, absent_retry_s, failing
            )
            tasks.create_task(watch.run(), name=f"watch {path}")


@dataclass(slots=True)
class _Watch:
    """The watch over one path. `failing` has the reason for each path that is unknown now."""

    client: MetadataClient
    path: str
    worker_id: int
    sink: NoticeSink
    preemption_notice_s: float
    absent_retry_s: float
    failing: dict[str, str]
    known: Value = Value(None, None)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        num_failures = 0
        while True:
            asked_at_s = loop.time()
            try:
                has_changed = await self._look()
            except MetadataError as error:
                if not num_failures:
                    self._announce_unknown(str(error))
                await asyncio.sleep(min(_LONGEST_RETRY_S, _FIRST_RETRY_S * 2.0**num_failures))
                num_failures = min(num_failures + 1, 16)
                continue
            num_failures = 0
            self.failing.pop(self.path, None)
            if self.known.text is None:
                await asyncio.sleep(self.absent_retry_s)
            elif not has_changed:
                await asyncio.sleep(max(0.0, asked_at_s + _SHORTEST_POLL_S - loop.time()))

    def _announce_unknown(self, reason: str) -> None:
        """Warns, if no other path of this host is unknown for the same reason."""
        is_known = reason in self.failing.values()
        self.failing[self.path] = reason
        level = logging.DEBUG if is_known else logging.WARNING
        logger.log(level, "metadata_unknown path=%s reason=%r", self.path, reason)

    async def _look(self) -> bool:
        """Handles the next value; returns whether it differs from the last one."""
        query = {"alt": "json", "recursive": "true"} if self.path == UPCOMING_MAINTENANCE else {}
        value = await self.client.get(self.path, query, other_than=self.known.etag)
        if value.text != self.known.text:
            notice = self._read(value.text)
            if notice is not None:
                self.sink.announce(notice)
            else:
                self.sink.withdraw(self.worker_id, self._source)
        has_changed, self.known = value != self.known, value
        return has_changed

    @property
    def _source(self) -> str:
        return f"metadata {self.path}"

    def _read(self, text: str | None) -> Notice | None:
        """Returns the notice in a value. Raises `MetadataError` if it cannot be understood."""
        if text is None:
            return None
        kind, deadline_s, reason = NoticeKind.MAINTENANCE, None, "maintenance stops the host now"
        if self.path == PREEMPTED:
            if text != "TRUE":
                return None
            kind, deadline_s = NoticeKind.PREEMPTION, time.time() + self.preemption_notice_s
            reason = f"the host is preempted, with {self.preemption_notice_s:g} s notice"
        elif self.path == MAINTENANCE_EVENT:
            # The others are NONE and MIGRATE_ON_HOST_MAINTENANCE, which stops nothing.
            if not text.startswith("TERMINATE"):
                return None
        else:
            deadline_s = read_maintenance(text)
            if deadline_s is None:
                return None
            reason = f"maintenance is scheduled for {format_utc(deadline_s)}"
        return Notice(kind, self.worker_id, deadline_s, reason, self._source)


def read_maintenance(text: str) -> float | None:
    """Returns the start of the maintenance in `instance/upcoming-maintenance`; `None` for none.

    The documentation shows the fields in two spellings, with and without an object around them; all
    are understood.

    Raises:
        MetadataError: there is something, but no time in it.
    """
    if text in ("", "NONE"):
        return None
    try:
        fields = _by_plain_name(json.loads(text))
        fields = _by_plain_name(fields.get("upcomingmaintenance", fields))
        if not fields or "error" in fields or fields.get("maintenancestatus") == "COMPLETE":
            return None
        return rfc3339_s(str(fields["windowstarttime"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MetadataError(f"unreadable maintenance {text[:200]!r}") from error


def _by_plain_name(raw: Any) -> dict[str, Any]:
    return {"".join(filter(str.isalnum, name)).lower(): value for name, value in raw.items()}
