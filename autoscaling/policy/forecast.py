"""The rate of requests a few minutes from now, and how wrong such forecasts have been.

Owns the history of the rate and the forecasts made from it. Two forecasts compete for each horizon:
what the last minutes say (a damped trend) and what the same time of the day before says, scaled to
today. The one that has erred less is used, and its own past errors are its margin. Deterministic:
time comes in with each measurement.
"""

import bisect
import math
from collections import deque
from dataclasses import dataclass, field

from autoscaling.policy.memory import ForecastErrors, ForecastRecord

BUCKET_S = 30.0
DAY_S = 86_400.0
# One horizon keeps so many errors: enough for a quantile, few enough to follow a change.
_ERRORS_KEPT = 240
# Fewer errors than this show nothing.
_ERRORS_NEEDED = 10
# Twice the forecast is the most that is planned for: beyond it, measuring is better than guessing.
_MOST_MARGIN = 1.0
_TREND_BUCKETS = 20
_LEAST_THIRD = 2
_SMOOTH_BUCKETS = 3
_RARE_DEVIATIONS = 4.0
# A trend is not believed for ever: its slope counts for at most this many seconds ahead.
_TREND_REACH_S = 600.0
# A record has the rate by the minute: windows of a quarter of an hour are compared that are as far
# apart as the shortest horizon. It has the errors at the horizons that were asked for within an
# hour, of the latest, and of each so many.
_MINUTE_S = 60.0
_IN_USE_S = 3600.0
_HORIZONS_REMEMBERED = 8
_ERRORS_REMEMBERED = 120
# Errors of the other method must be this much smaller before it takes over.
_BETTER = 0.95


@dataclass(frozen=True, slots=True)
class Forecast:
    """The rate at a horizon; `method` is `trend` or `season`.

    `margin` is what is added so that `share` of the past forecasts would not have been too low.
    """

    requests_per_s: float
    margin: float
    method: str

    @property
    def safe(self) -> float:
        """The rate to plan for."""
        return max(0.0, self.requests_per_s + self.margin)


@dataclass(slots=True)
class _Method:
    """Forecasts of one method for one horizon: those not yet due, and the errors of those that are.

    An error is the excess of the rate over the forecast, as a share of it (0 means right).
    """

    pending: deque[tuple[float, float]] = field(default_factory=deque)
    errors: deque[float] = field(default_factory=lambda: deque(maxlen=_ERRORS_KEPT))
    mean_error: float | None = None

    def learn(self, now_s: float, rate: float) -> None:
        while self.pending and self.pending[0][0] <= now_s:
            _, forecast = self.pending.popleft()
            scale = max(forecast, 0.05)
            self.errors.append((rate - forecast) / scale)
            off = abs(rate - forecast) / max(rate, forecast, 0.05)
            self.mean_error = (
                off if self.mean_error is None else self.mean_error + (off - self.mean_error) / 60
            )

    def margin_ratio(self, share: float) -> float:
        """Returns what has to be added to a forecast of 1; 0 while too few errors are known."""
        if len(self.errors) < _ERRORS_NEEDED:
            return 0.0
        ordered = sorted(self.errors)
        needed = ordered[min(len(ordered) - 1, int(share * len(ordered)))]
        return min(max(0.0, needed), _MOST_MARGIN)


class Forecaster:
    """Learns one model's rate and forecasts it for a few fixed horizons."""

    def __init__(self) -> None:
        self._times: list[float] = []  # ends of buckets
        self._rates: list[float] = []
        # Of those, the ones without a gap until now: what was remembered has one.
        self._recent: deque[float] = deque(maxlen=_TREND_BUCKETS)
        self._open: list[float] = []
        self._open_since_s: float | None = None
        self._newest = 0.0
        self._methods: dict[tuple[float, str], _Method] = {}
        self._asked_at_s: dict[float, float] = {}  # by horizon

    @classmethod
    def from_record(cls, record: ForecastRecord) -> "Forecaster":
        """Returns a forecaster that knows the season of an earlier one, and its errors."""
        forecaster = cls()
        known = [
            (record.since_s + _MINUTE_S * place, rate)
            for place, rate in enumerate(record.rates)
            if rate is not None
        ]
        forecaster._times = [at_s for at_s, _ in known]
        forecaster._rates = [rate for _, rate in known]
        last_s = max(forecaster._times, default=0.0)
        for each in record.errors:
            method = forecaster._method(each.horizon_s, each.method)
            method.errors.extend(each.errors)
            method.mean_error = each.mean_error
            forecaster._asked_at_s[each.horizon_s] = last_s
        return forecaster

    def to_record(self) -> ForecastRecord:
        """Returns the rate of the last day by the minute, and the errors at the horizons in use."""
        since_s, rates = self._by_minute()
        newest = sorted(self._asked_at_s, key=lambda horizon_s: self._asked_at_s[horizon_s])
        last_s = max(self._asked_at_s.values(), default=0.0)
        in_use = {
            horizon_s
            for horizon_s in newest[-_HORIZONS_REMEMBERED:]
            if last_s - self._asked_at_s[horizon_s] < _IN_USE_S
        }
        errors = tuple(
            ForecastErrors(
                horizon_s=horizon_s,
                method="season" if name == "season" else "trend",
                errors=tuple(round(error, 4) for error in tuple(each.errors)[-_ERRORS_REMEMBERED:]),
                mean_error=None if each.mean_error is None else round(each.mean_error, 6),
            )
            for (horizon_s, name), each in self._methods.items()
            if horizon_s in in_use
        )
        return ForecastRecord(since_s=since_s, rates=rates, errors=errors)

    def _by_minute(self) -> tuple[float, tuple[float | None, ...]]:
        """Returns when the last day's first minute began, and the mean rate of each since then."""
        minutes: dict[int, list[float]] = {}
        for at_s, rate in zip(self._times, self._rates, strict=True):
            if at_s > self._times[-1] - DAY_S - 3600:
                minutes.setdefault(int(at_s // _MINUTE_S), []).append(rate)
        if not minutes:
            return 0.0, ()
        first, last = min(minutes), max(minutes)
        rates = tuple(
            round(sum(minutes[each]) / len(minutes[each]), 4) if each in minutes else None
            for each in range(first, last + 1)
        )
        return first * _MINUTE_S, rates

    def observe(self, now_s: float, requests_per_s: float) -> None:
        """Adds a measurement of the rate; times do not run backwards."""
        if self._open_since_s is None:
            self._open_since_s = now_s
        self._open.append(requests_per_s)
        self._newest = requests_per_s
        if now_s - self._open_since_s < BUCKET_S and self._recent:
            return
        rate = sum(self._open) / len(self._open)
        self._times.append(now_s)
        self._rates.append(rate)
        self._recent.append(rate)
        self._open, self._open_since_s = [], now_s
        if self._times[0] < now_s - 2 * DAY_S - 3600:
            del self._times[: len(self._times) // 8], self._rates[: len(self._rates) // 8]
        for method in self._methods.values():
            method.learn(now_s, self.level)
        for (horizon_s, name), method in self._methods.items():
            forecast = self._forecast(name, now_s, horizon_s)
            if forecast is not None:
                method.pending.append((now_s + horizon_s, forecast))

    @property
    def level(self) -> float:
        """The rate of now, smoothed over a minute and a half; 0 before the first measurement.

        A rise that chance does not explain is believed at once.
        """
        latest = list(self._recent)[-_SMOOTH_BUCKETS:]
        if not latest:
            return 0.0
        smoothed = sum(latest) / len(latest)
        # Poisson arrivals rarely exceed their rate by more than this within a bucket.
        chance = _RARE_DEVIATIONS * math.sqrt(max(smoothed, 1 / BUCKET_S) / BUCKET_S)
        return self._newest if self._newest > smoothed + chance else smoothed

    def at(self, now_s: float, horizon_s: float, share: float) -> Forecast:
        """The forecast for `now_s + horizon_s`, with the margin that `share` of the past needed."""
        horizon_s = max(BUCKET_S, round(horizon_s / BUCKET_S) * BUCKET_S)
        self._asked_at_s[horizon_s] = now_s
        trend = self._method(horizon_s, "trend")
        season = self._method(horizon_s, "season")
        by_season = self._forecast("season", now_s, horizon_s)
        if (
            by_season is not None
            and season.mean_error is not None
            and trend.mean_error is not None
            and len(season.errors) >= _ERRORS_NEEDED
            and season.mean_error < _BETTER * trend.mean_error
        ):
            return Forecast(by_season, by_season * season.margin_ratio(share), "season")
        by_trend = self._forecast("trend", now_s, horizon_s) or 0.0
        return Forecast(by_trend, by_trend * trend.margin_ratio(share), "trend")

    def _method(self, horizon_s: float, name: str) -> _Method:
        return self._methods.setdefault((horizon_s, name), _Method())

    def _forecast(self, method: str, now_s: float, horizon_s: float) -> float | None:
        return self._by_trend(horizon_s) if method == "trend" else self._by_season(now_s, horizon_s)

    def _by_trend(self, horizon_s: float) -> float:
        """The level, carried on from the first third of the last ten minutes to the last third."""
        recent = list(self._recent)
        third = len(recent) // 3
        if third < _LEAST_THIRD:
            return self.level
        before, after = sum(recent[:third]) / third, sum(recent[-third:]) / third
        slope = (after - before) / ((len(recent) - third) * BUCKET_S)
        reach_s = horizon_s / (1 + horizon_s / _TREND_REACH_S)
        return max(0.0, self.level + slope * reach_s)

    def _by_season(self, now_s: float, horizon_s: float) -> float | None:
        then, ahead = self._mean_around(now_s - DAY_S), self._mean_around(now_s - DAY_S + horizon_s)
        if then is None or ahead is None or then <= 0:
            return None
        # The season may change the level fourfold at most.
        return self.level * min(max(ahead / then, 0.25), 4.0)

    def _mean_around(self, at_s: float, reach_s: float = 450.0) -> float | None:
        if not self._times or at_s - reach_s < self._times[0]:
            return None
        low = bisect.bisect_left(self._times, at_s - reach_s)
        high = bisect.bisect_right(self._times, at_s + reach_s)
        return sum(self._rates[low:high]) / (high - low) if high > low else None
