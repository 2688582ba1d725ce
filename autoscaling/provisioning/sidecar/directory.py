"""The provisioner's two-way road to the fleet directory: keys in Ray's key-value store.

Owns the reading of the directory's report of slices, and the writing of the pods that there are. It
needs Ray's head and nothing else of Ray: no driver, no shared memory, no Serve.
"""

import asyncio
import time
import uuid
from collections.abc import Callable

import ray
from ray._raylet import GcsClient  # type: ignore[attr-defined] # Cython has no stubs

from autoscaling.provisioning.errors import RecordsUnavailableError, UnreachableError
from serving.domain.supply.beat import BEAT_S, STALE_S, BeatWatch, ReportBeat, decode_beat
from serving.domain.supply.keys import SupplyKeys
from serving.domain.supply.pods import GroupPods, encode_pods
from serving.domain.supply.records import SupplyReport, SupplyReportError, decode_supply

# The head answers in milliseconds; while it is away every call takes this long.
_TIMEOUT_S = 5.0


class DirectoryRoad:
    """The reports of one application. Used from one event loop, one call at a time.

    `clock` is monotonic, in seconds.
    """

    def __init__(
        self, gcs: GcsClient, application: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._gcs = gcs
        self._clock = clock
        self._keys = SupplyKeys(application)
        self._watch = BeatWatch()
        self._report: SupplyReport | None = None
        self._pods: tuple[GroupPods, ...] | None = None
        self._instance = uuid.uuid4().hex[:8]
        self._beat = ReportBeat("", 0)
        self._beat_at_s = float("-inf")
        self._silence_s: float | None = None

    @property
    def silence_s(self) -> float | None:
        """How long the directory had been silent at the last look; `None`: never heard of it."""
        return self._silence_s

    async def read_supply(self) -> SupplyReport:
        """Returns the directory's last report; reads it anew only if it is another one.

        Raises:
            RecordsUnavailableError: there is none, its writer has fallen silent, or another version
                wrote it. Plan nothing.
        """
        beat = await self._get(self._keys.supply_beat)
        now_s = self._clock()
        self._watch.see(None if beat is None else decode_beat(beat), now_s)
        if self._watch.version is None:
            application = self._keys.application
            raise RecordsUnavailableError(f"no directory of {application} has reported slices here")
        self._silence_s = silent_s = self._watch.silence_s(now_s)
        if silent_s > STALE_S:
            raise RecordsUnavailableError(
                f"the directory has been silent for {silent_s:.0f} s; allowed: {STALE_S:g} s"
            )
        if self._report is None or self._report.version != self._watch.version:
            text = await self._get(self._keys.supply)
            if text is None:
                raise RecordsUnavailableError("the directory's report of slices is gone")
            try:
                self._report = decode_supply(text)
            except SupplyReportError as error:
                raise RecordsUnavailableError(str(error)) from error
        return self._report

    async def report_pods(self, groups: tuple[GroupPods, ...]) -> None:
        """Tells the directory which pods there are, if that has changed, and that we live.

        Raises:
            UnreachableError: Ray's head is away.
        """
        now_s = self._clock()
        is_news = groups != self._pods
        if is_news:
            await self._put(self._keys.pods, encode_pods(groups))
            self._pods = groups
        if is_news or now_s - self._beat_at_s >= BEAT_S:
            count = self._beat.count + 1
            version = f"{self._instance}:{count}" if is_news else self._beat.version
            self._beat = ReportBeat(version, count)
            await self._put(self._keys.pods_beat, self._beat.encode())
            self._beat_at_s = now_s

    async def _get(self, key: bytes) -> bytes | None:
        try:
            value: bytes | None = await asyncio.to_thread(
                self._gcs.internal_kv_get, key, timeout=_TIMEOUT_S
            )
        except (RuntimeError, ray.exceptions.RayError) as error:
            raise RecordsUnavailableError(f"Ray's head is away: {error}") from error
        return value

    async def _put(self, key: bytes, value: bytes) -> None:
        try:
            await asyncio.to_thread(
                self._gcs.internal_kv_put, key, value, overwrite=True, timeout=_TIMEOUT_S
            )
        except (RuntimeError, ray.exceptions.RayError) as error:
            raise UnreachableError(f"Ray's head is away: {error}") from error
