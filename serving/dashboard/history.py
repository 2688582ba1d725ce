"""A gateway's short history: what its metrics page showed in the last minutes, as points in time.

Owns how readings become rates, quantiles and prices, and in which answer they are told. Counts
nothing by itself: all of it comes from the families of the metrics page. Does not own their meaning
(`history_reading`), nor HTTP (`history_page`). Pure: callers pass the time.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import Metric as Family

from serving.dashboard.metric_sampling import (
    COST,
    TOKENS,
    Increase,
    Reading,
    increase,
    quantile,
    read,
)
from serving.dashboard.time_series import Key, Means, Ring

# What is kept, as step and number of points: 5 minutes finely, an hour coarsely.
FINE_STEP_S, FINE_POINTS = 1, 300
COARSE_STEP_S, COARSE_POINTS = 10, 360
STEPS_S = (FINE_STEP_S, COARSE_STEP_S)
# Bounds the memory to 512 x 660 points of 8 bytes, 2.7 MB. Ten models on four compute classes each
# have at most 396 series; one on two has 64, in 0.34 MB.
MAX_SERIES = 512
# Requests, quantiles and prices are of so long: in one second too little happens for them.
WINDOW_S = 10.0

_QUANTILES = (("p50", 0.5), ("p99", 0.99))
# What is of the last ten seconds already: of such a series a coarse point is the last fine one.
_WINDOWED = frozenset(
    {"requests_per_s", "ttft_s", "tpot_s", "usd_per_hour", "usd_per_million_tokens"}
)
# What is a number in a step, and adds up; everything else is a mean over time.
_COUNTED = "losses"
_S_PER_HOUR = 3600
_MILLION = 1e6


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a reader asks for: a step of `STEPS_S`, and a model or all (`ALL_MODELS`).

    `since` is by gateway the first slot that the reader does not have; a gateway that is not in it
    tells all it has.
    """

    step_s: int
    model: str
    since: Mapping[str, int]


class History:
    """What one gateway saw. `started_at_s` is since the epoch, as all times here."""

    def __init__(self, gateway_id: str, started_at_s: float) -> None:
        self.gateway_id = gateway_id
        self._started_at_s = started_at_s
        self._fine = Ring(FINE_STEP_S, FINE_POINTS, MAX_SERIES)
        self._coarse = Ring(COARSE_STEP_S, COARSE_POINTS, MAX_SERIES)
        self._means = Means()
        self._last: tuple[float, Reading] | None = None
        self._recent: deque[Increase] = deque()
        self._latest: dict[Key, float] = {}  # windowed values of the last look
        self._sums: dict[Key, float] = {}  # counted values of the coarse step

    @property
    def max_bytes(self) -> int:
        """What all points take at most."""
        return self._fine.max_bytes + self._coarse.max_bytes

    def observe(self, families: Iterable[Family], now_s: float) -> None:
        """Takes what the metrics page shows now; a second look in the same second is passed over.

        `now_s` goes only up, whatever is done to the clock. The first look is where counting
        begins, so it has gauges alone.
        """
        slot = int(now_s // FINE_STEP_S)
        if self._fine.until is not None and slot < self._fine.until:
            return
        reading = read(families)
        values = dict(reading.gauges)
        duration_s = 0.0
        if self._last is not None:
            before_s, before = self._last
            duration_s = now_s - before_s
            values |= self._flows(increase(before, reading, duration_s), reading.bounds)
        self._last = (now_s, reading)
        values = {key: float(f"{value:.5g}") for key, value in values.items()}
        self._close_coarse(slot)
        self._fine.put(slot, values)
        lasting = {
            key: value for key, value in values.items() if key.name not in {*_WINDOWED, _COUNTED}
        }
        self._means.add(lasting, duration_s or FINE_STEP_S)
        for key, value in values.items():
            if key.name == _COUNTED:
                self._sums[key] = self._sums.get(key, 0.0) + value
        self._latest = {key: value for key, value in values.items() if key.name in _WINDOWED}

    def version(self, wanted: Wanted) -> str:
        """Changes whenever `describe` would say something else."""
        ring = self._ring(wanted)
        first = ring.first(wanted.since.get(self.gateway_id))
        return f"{self.gateway_id}-{ring.step_s}-{first}-{ring.until}-{wanted.model}"

    def describe(self, wanted: Wanted) -> dict[str, Any]:
        """The answer of `GET /fleet/history`; see `docs/operate/fleet.md` for its keys."""
        ring = self._ring(wanted)
        since = wanted.since.get(self.gateway_id)
        series: dict[str, dict[str, Any]] = {}
        for key, points in ring.read(wanted.model, since):
            series.setdefault(key.name, {})[key.label] = points
        return {
            "gateway": {"id": self.gateway_id, "started_at_s": round(self._started_at_s, 3)},
            "model": wanted.model or None,
            "step_s": ring.step_s,
            "num_points": ring.num_points,
            "from": ring.first(since),
            "until": ring.until or 0,
            "num_left_out": ring.num_left_out,
            "series": series,
        }

    def _ring(self, wanted: Wanted) -> Ring:
        return self._fine if wanted.step_s == FINE_STEP_S else self._coarse

    def _close_coarse(self, slot: int) -> None:
        """Writes the coarse point before this slot, if the slot is no longer in it."""
        if self._fine.until is None:
            return
        last = (self._fine.until - 1) * FINE_STEP_S // COARSE_STEP_S
        if slot * FINE_STEP_S // COARSE_STEP_S > last:
            self._coarse.put(last, self._latest | self._means.take() | self._sums)
            self._sums = {}

    def _flows(self, latest: Increase, bounds: Mapping[str, tuple[float, ...]]) -> dict[Key, float]:
        self._recent.append(latest)
        while sum(each.duration_s for each in self._recent) > WINDOW_S + FINE_STEP_S / 2:
            if len(self._recent) == 1:
                break
            self._recent.popleft()
        window = Increase(0.0)
        for each in self._recent:
            window.add(each)
        values: dict[Key, float] = {}
        for key, count in latest.counts.items():
            if key.name == _COUNTED:
                values[key] = count
            elif key.name == TOKENS:
                values[key] = count / latest.duration_s
            elif key.name in _WINDOWED:
                values[key] = window.counts[key] / window.duration_s
        return values | dict(_quantiles(window, bounds)) | dict(_prices(window))


def _quantiles(
    window: Increase, bounds: Mapping[str, tuple[float, ...]]
) -> Iterator[tuple[Key, float]]:
    for (model, series), samples in window.samples.items():
        for label, ratio in _QUANTILES:
            value = quantile(ratio, bounds[series], samples)
            if value is not None:
                yield Key(model, series, label), value


def _prices(window: Increase) -> Iterator[tuple[Key, float]]:
    """Dollars per hour where a class has a price, and per million tokens where there were any."""
    tokens: dict[str, float] = {}
    for key, count in window.counts.items():
        if key.name == TOKENS:
            tokens[key.model] = tokens.get(key.model, 0.0) + count
    for key, usd in window.counts.items():
        if key.name == COST:
            yield Key(key.model, "usd_per_hour", ""), usd / window.duration_s * _S_PER_HOUR
            if made := tokens.get(key.model):
                yield Key(key.model, "usd_per_million_tokens", ""), usd / made * _MILLION
