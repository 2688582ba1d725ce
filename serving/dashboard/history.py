"""The short history of the fleet: points in time, made of the samples of all gateways.

Owns how samples become rates, quantiles and prices, how gateways are put together, and the answer
that holds them. Does not own what is counted where (`metric_sampling`), nor HTTP (`history_page`).
Pure: callers pass the time.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from serving.dashboard.metric_sampling import (
    COST,
    TOKENS,
    Increase,
    Key,
    TpuSample,
    add_buckets,
    gauges,
    increase,
    quantile,
)
from serving.dashboard.time_series import TimeSeries
from serving.domain.dashboard_messages import GatewaySample

# What is kept, as step and number of points: 5 minutes finely, an hour coarsely.
FINE_STEP_S, FINE_POINTS = 1, 300
COARSE_STEP_S, COARSE_POINTS = 10, 360
STEPS_S = (FINE_STEP_S, COARSE_STEP_S)
# Bounds the memory: 512 x 660 points take some 22 MB. Ten models on four compute classes each have
# at most 396 series; one on two has 64.
MAX_SERIES = 512
# The window of requests, quantiles and prices: too little happens in one second for them.
WINDOW_S = 10.0
# A gateway that is silent for longer is left out: it ended, or the points of all would wait for it.
MAX_SILENCE_S = 3.0
# Gateways take their samples in the middle of a second. One that arrives up to this much before its
# end, or as much after it, is of that second.
_HALF_STEP_S = FINE_STEP_S / 2

_QUANTILES = (("p50", 0.5), ("p99", 0.99))
# The series over `WINDOW_S`, which is a coarse step: their coarse point is the last fine one.
_WINDOWED = frozenset(
    {"requests_per_s", "ttft_s", "tpot_s", "usd_per_hour", "usd_per_million_tokens"}
)
# The series of counts in a step, which add up; every other one is a mean over time.
_COUNTED = "losses"
_S_PER_HOUR = 3600
_MILLION = 1e6


@dataclass(frozen=True, slots=True)
class Wanted:
    """The query of a reader: a step of `STEPS_S`, and a model or all (`ALL_MODELS`)."""

    step_s: int
    model: str
    since: int | None = None  # the first slot that it does not have; None: it has nothing


class _Gateway:
    def __init__(self) -> None:
        self.last: GatewaySample | None = None
        self.received_at_s = 0.0
        self.latest = Increase()  # since the last point
        self.window = Increase()  # of the last `WINDOW_S`
        self._recent: deque[Increase] = deque()

    def take(self, sample: GatewaySample, now_s: float) -> None:
        if self.last is not None and sample.taken_at_s > self.last.taken_at_s:
            grown = increase(self.last, sample)
            self.latest.add(grown)
            self._recent.append(grown)
        self.last, self.received_at_s = sample, now_s

    def roll(self) -> None:
        while sum(span.duration_s for span in self._recent) > WINDOW_S + _HALF_STEP_S:
            if len(self._recent) == 1:
                break
            self._recent.popleft()
        self.window = Increase()
        for span in self._recent:
            self.window.add(span)

    @property
    def slot(self) -> int:
        return _slot_of(self.received_at_s)


class History:
    """The history of all gateways. `started_at_s` is since the epoch, as all times here."""

    def __init__(
        self,
        dashboard_id: str,
        started_at_s: float,
        read_chips: Callable[[], Iterable[TpuSample]] = tuple,
    ) -> None:
        """Takes `read_chips`, which returns the latest reports of TPU exporters."""
        self.dashboard_id = dashboard_id
        self._started_at_s = started_at_s
        self._read_chips = read_chips
        self._fine = TimeSeries(FINE_STEP_S, FINE_POINTS, MAX_SERIES)
        self._coarse = TimeSeries(COARSE_STEP_S, COARSE_POINTS, MAX_SERIES)
        self._gateways: dict[str, _Gateway] = {}

    @property
    def models(self) -> set[str]:
        """The models that gateways have reported."""
        samples = (gateway.last for gateway in self._gateways.values())
        return {counts.model for sample in samples if sample for counts in sample.models} - {""}

    def take(self, sample: GatewaySample, now_s: float) -> None:
        """Takes a sample, and makes the point of its second once all gateways have reported.

        The first sample of a gateway is where counting begins: it has gauges alone. A second in
        which one of several gateways is late has no point: a part of the fleet would look like the
        whole. What the late sample counts is in the next point.
        """
        self._gateways.setdefault(sample.gateway_id, _Gateway()).take(sample, now_s)
        self._gateways = {
            gateway_id: gateway
            for gateway_id, gateway in self._gateways.items()
            if now_s - gateway.received_at_s <= MAX_SILENCE_S
        }
        gateways = self._gateways.values()
        slot = _slot_of(now_s)
        if slot < self._fine.until or any(gateway.slot < slot for gateway in gateways):
            return
        values = gauges([gateway.last for gateway in gateways if gateway.last], self._read_chips())
        values |= _flows([gateway for gateway in gateways if gateway.latest.duration_s > 0])
        for gateway in gateways:
            gateway.latest = Increase()
        self._close_coarse(slot)
        self._fine.put(slot, {key: float(f"{value:.5g}") for key, value in values.items()})

    def version(self, wanted: Wanted) -> str:
        """Returns a text that changes whenever the points of `describe` do."""
        series = self._series(wanted)
        first = series.first(wanted.since)
        return f"{self.dashboard_id}-{series.step_s}-{first}-{series.until}-{wanted.model}"

    def describe(self, wanted: Wanted) -> dict[str, Any]:
        """Returns the answer of `GET /fleet/history`; see `docs/operate/fleet.md` for its keys."""
        kept = self._series(wanted)
        series: dict[str, dict[str, Any]] = {}
        for key, points in kept.read(wanted.model, wanted.since):
            series.setdefault(key.name, {})[key.label] = points
        return {
            "dashboard": {"id": self.dashboard_id, "started_at_s": round(self._started_at_s, 3)},
            "gateways": sorted(self._gateways),
            "model": wanted.model or None,
            "step_s": kept.step_s,
            "num_points": kept.num_points,
            "from": kept.first(wanted.since),
            "until": kept.until,
            "num_left_out": kept.num_left_out,
            "series": series,
        }

    def _series(self, wanted: Wanted) -> TimeSeries:
        return self._fine if wanted.step_s == FINE_STEP_S else self._coarse

    def _close_coarse(self, slot: int) -> None:
        """Writes the coarse point before this slot, if the slot is no longer in it."""
        if self._fine.until == 0:
            return
        last = (self._fine.until - 1) * FINE_STEP_S // COARSE_STEP_S
        if slot * FINE_STEP_S // COARSE_STEP_S == last:
            return
        found: dict[Key, list[float]] = {}
        points = self._fine.values_since(last * COARSE_STEP_S // FINE_STEP_S)
        for values in points:
            for key, value in values.items():
                found.setdefault(key, []).append(value)
        coarse: dict[Key, float] = {}
        for key, numbers in found.items():
            if key.name in _WINDOWED:
                if key in points[-1]:
                    coarse[key] = numbers[-1]
            else:
                coarse[key] = sum(numbers) if key.name == _COUNTED else sum(numbers) / len(numbers)
        self._coarse.put(last, coarse)


def _slot_of(now_s: float) -> int:
    return int((now_s - _HALF_STEP_S) // FINE_STEP_S)


def _flows(gateways: Iterable[_Gateway]) -> dict[Key, float]:
    """Returns rates and quantiles of all gateways together. Their costs are those of one ledger."""
    values: dict[Key, float] = {}
    windowed: dict[Key, float] = {}  # per second
    samples: dict[tuple[str, str], list[int]] = {}
    bounds: dict[str, tuple[float, ...]] = {}
    for gateway in gateways:
        gateway.roll()
        assert gateway.last is not None
        bounds["ttft_s"] = gateway.last.to_first_token_bounds_s
        bounds["tpot_s"] = gateway.last.per_output_token_bounds_s
        for key, count in gateway.latest.counts.items():
            if key.name in (_COUNTED, TOKENS):
                rate = count if key.name == _COUNTED else count / gateway.latest.duration_s
                values[key] = values.get(key, 0.0) + rate
        for key, count in gateway.window.counts.items():
            rate = count / gateway.window.duration_s
            known = windowed.get(key, 0.0)
            windowed[key] = max(known, rate) if key.name == COST else known + rate
        for model_series, buckets in gateway.window.samples.items():
            add_buckets(samples, model_series, buckets)
    values |= {key: rate for key, rate in windowed.items() if key.name in _WINDOWED}
    return values | dict(_quantiles(samples, bounds)) | dict(_prices(windowed))


def _quantiles(
    samples: dict[tuple[str, str], list[int]], bounds: dict[str, tuple[float, ...]]
) -> Iterator[tuple[Key, float]]:
    for (model, series), buckets in samples.items():
        for label, ratio in _QUANTILES:
            value = quantile(ratio, bounds[series], buckets)
            if value is not None:
                yield Key(model, series, label), value


def _prices(rates: dict[Key, float]) -> Iterator[tuple[Key, float]]:
    """Yields dollars per hour where a class has a price, and per million tokens if any."""
    tokens: dict[str, float] = {}
    for key, rate in rates.items():
        if key.name == TOKENS:
            tokens[key.model] = tokens.get(key.model, 0.0) + rate
    for key, usd in rates.items():
        if key.name == COST:
            yield Key(key.model, "usd_per_hour", ""), usd * _S_PER_HOUR
            if made := tokens.get(key.model):
                yield Key(key.model, "usd_per_million_tokens", ""), usd / made * _MILLION
