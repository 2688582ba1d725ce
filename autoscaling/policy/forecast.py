"""The work that arrives a few minutes from now, and how wrong such forecasts have been.

Work is what requests take of slices: their rate, times what one request of their lengths takes by
the capacity law. So longer prompts or answers at some time of the day are foreseen as more requests
are. Owns the history of rates and lengths and the forecasts made from it. Two forecasts compete for
each horizon: what the last minutes say (a damped trend) and what the same time of the day before
says, scaled to today. The one that has erred less is used, and its own past errors are its margin.
Deterministic: time comes in with each measurement.
"""

import bisect
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from autoscaling.policy.memory import ForecastErrors, ForecastRecord

BUCKET_S = 30.0
DAY_S = 86_400.0
# One horizon keeps so many errors: enough for a quantile, few enough to follow a change.
_ERRORS_KEPT = 240
# Errors of less work than this are not taken as shares of it.
_LEAST_SLICES = 0.005
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
# What one window happens to hold of short and long requests is smoothed: over so many seconds, and
# for longer while it is fewer requests than that.
_LENGTHS_S, _MOST_LENGTHS_S = 300.0, 900.0
_LENGTHS_REQUESTS = 1000.0
# Errors of the other method must be this much smaller before it takes over.
_BETTER = 0.95


@dataclass(frozen=True, slots=True)
class Forecast:
    """The work at a horizon, in slices by the law; `method` is `trend` or `season`.

    `margin` is what is added so that `share` of the past forecasts would not have been too low.
    """

    slices: float
    margin: float
    method: str

    @property
    def safe(self) -> float:
        """The work to plan for."""
        return max(0.0, self.slices + self.margin)


# The slices that one request per second takes, of so many prompt and output tokens.
Cost = Callable[[float, float], float]


@dataclass(frozen=True, slots=True)
class _Bucket:
    """The mean rate until `at_s`, and the tokens of a request in it, on average."""

    at_s: float
    requests_per_s: float
    input_tokens: float
    output_tokens: float


@dataclass(slots=True)
class _Method:
    """Forecasts of one method for one horizon: those not yet due, and the errors of those that are.

    An error is the excess of the work over the forecast, as a share of it (0 means right).
    """

    pending: deque[tuple[float, float]] = field(default_factory=deque)
    errors: deque[float] = field(default_factory=lambda: deque(maxlen=_ERRORS_KEPT))
    mean_error: float | None = None

    def learn(self, now_s: float, slices: float) -> None:
        while self.pending and self.pending[0][0] <= now_s:
            _, forecast = self.pending.popleft()
            scale = max(forecast, _LEAST_SLICES)
            self.errors.append((slices - forecast) / scale)
            off = abs(slices - forecast) / max(slices, forecast, _LEAST_SLICES)
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
    """Learns one model's rate and lengths and forecasts its work for a few fixed horizons."""

    def __init__(self, cost: Cost) -> None:
        self._cost = cost
        self._times: list[float] = []  # ends of buckets
        self._buckets: list[_Bucket] = []
        self._work: list[float] = []  # of each bucket
        self._levels: list[float] = []  # of each bucket's rate, in requests as they were till then
        # Of those, the ones without a gap until now: what was remembered has one.
        self._recent: deque[float] = deque(maxlen=_TREND_BUCKETS)
        self._recent_rates: deque[float] = deque(maxlen=_SMOOTH_BUCKETS)
        self._open: list[_Bucket] = []
        self._open_since_s: float | None = None
        self._newest = 0.0
        self._methods: dict[tuple[float, str], _Method] = {}
        self._asked_at_s: dict[float, float] = {}  # by horizon
        self.tokens = (0.0, 0.0)
        """Prompt and output tokens of a request lately, on average; what is told of one before the
        first, and 0 before anything is told."""

    @classmethod
    def from_record(cls, record: ForecastRecord, cost: Cost) -> "Forecaster":
        """Returns a forecaster that knows the season of an earlier one, and its errors.

        A season without lengths, as earlier builds have written it, is none.
        """
        forecaster = cls(cost)
        minutes = zip(record.rates, record.input_tokens, record.output_tokens, strict=False)
        for place, (rate, input_tokens, output_tokens) in enumerate(minutes):
            if rate is not None:
                at_s = record.since_s + _MINUTE_S * place
                bucket = _Bucket(at_s, rate, input_tokens or 0.0, output_tokens or 0.0)
                forecaster._append(bucket)
        last_s = max(forecaster._times, default=0.0)
        for each in record.errors:
            method = forecaster._method(each.horizon_s, each.method)
            method.errors.extend(each.errors)
            method.mean_error = each.mean_error
            forecaster._asked_at_s[each.horizon_s] = last_s
        return forecaster

    def to_record(self) -> ForecastRecord:
        """Returns the rate of the last day by the minute, and the errors at the horizons in use."""
        since_s, minutes = self._by_minute()
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
        return ForecastRecord(
            since_s=since_s,
            rates=tuple(
                None if each is None else round(each.requests_per_s, 4) for each in minutes
            ),
            input_tokens=tuple(
                None if each is None else round(each.input_tokens, 1) for each in minutes
            ),
            output_tokens=tuple(
                None if each is None else round(each.output_tokens, 1) for each in minutes
            ),
            errors=errors,
        )

    def _by_minute(self) -> tuple[float, tuple[_Bucket | None, ...]]:
        """Returns when the last day's first minute began, and what each was since then."""
        minutes: dict[int, list[_Bucket]] = {}
        for each in self._buckets:
            if each.at_s > self._times[-1] - DAY_S - 3600:
                minutes.setdefault(int(each.at_s // _MINUTE_S), []).append(each)
        if not minutes:
            return 0.0, ()
        first, last = min(minutes), max(minutes)
        means = tuple(
            _mean(minutes[each]) if each in minutes else None for each in range(first, last + 1)
        )
        return first * _MINUTE_S, means

    def observe(
        self, now_s: float, requests_per_s: float, input_tokens: float, output_tokens: float
    ) -> None:
        """Adds a measurement, tokens by the request; one older than the last counts as that old."""
        now_s = max(now_s, self._times[-1]) if self._times else now_s
        if self._open_since_s is None:
            self._open_since_s = now_s
        self._open.append(_Bucket(now_s, requests_per_s, input_tokens, output_tokens))
        self._newest = requests_per_s
        if now_s - self._open_since_s < BUCKET_S and self._recent:
            return
        bucket = _mean(self._open)
        self._open, self._open_since_s = [], now_s
        self._append(bucket)
        self._recent.append(self._levels[-1])
        self._recent_rates.append(bucket.requests_per_s)
        if self._times[0] < now_s - 2 * DAY_S - 3600:
            old = len(self._times) // 8
            for series in (self._times, self._buckets, self._work, self._levels):
                del series[:old]
        for method in self._methods.values():
            method.learn(now_s, self.level)
        for (horizon_s, name), method in self._methods.items():
            forecast = self._forecast(name, now_s, horizon_s)
            if forecast is not None:
                method.pending.append((now_s + horizon_s, forecast))

    def _append(self, bucket: _Bucket) -> None:
        self._times.append(bucket.at_s)
        self._buckets.append(bucket)
        self.tokens = self._latest_tokens()
        rate = bucket.requests_per_s
        self._work.append(rate * self._cost(bucket.input_tokens, bucket.output_tokens))
        self._levels.append(rate * self._cost(*self.tokens))

    def _latest_tokens(self) -> tuple[float, float]:
        """Returns the tokens of a request over the latest buckets."""
        latest: list[_Bucket] = []
        num_requests = 0.0
        until_s = now_s = self._times[-1]
        for bucket in reversed(self._buckets):
            span_s = now_s - bucket.at_s
            num_requests += bucket.requests_per_s * max(BUCKET_S, until_s - bucket.at_s)
            latest.append(bucket)
            until_s = bucket.at_s
            if span_s >= _MOST_LENGTHS_S or (
                span_s >= _LENGTHS_S and num_requests >= _LENGTHS_REQUESTS
            ):
                break
        if num_requests <= 0:
            # Before the first request, what is assumed of one: the first burst costs something.
            newest = self._buckets[-1]
            return self.tokens if any(self.tokens) else (newest.input_tokens, newest.output_tokens)
        mean = _mean(latest)
        return mean.input_tokens, mean.output_tokens

    @property
    def slices_per_request_per_s(self) -> float:
        """The slices that one request per second takes, as long as they lately were."""
        return self._cost(*self.tokens)

    @property
    def rate(self) -> float:
        """The requests per second of now, smoothed over a minute and a half; 0 at first.

        A rise that chance does not explain is believed at once.
        """
        if not self._recent_rates:
            return 0.0
        smoothed = sum(self._recent_rates) / len(self._recent_rates)
        # Poisson arrivals rarely exceed their rate by more than this within a bucket.
        chance = _RARE_DEVIATIONS * math.sqrt(max(smoothed, 1 / BUCKET_S) / BUCKET_S)
        return self._newest if self._newest > smoothed + chance else smoothed

    @property
    def level(self) -> float:
        """The work of now: the rate, in requests as long as they lately were."""
        return self.rate * self.slices_per_request_per_s

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
        # What was known then, and what came of it.
        then = self._mean_around(self._levels, now_s - DAY_S)
        ahead = self._mean_around(self._work, now_s - DAY_S + horizon_s)
        if then is None or ahead is None or then <= 0:
            return None
        # The season may change the level fourfold at most.
        return self.level * min(max(ahead / then, 0.25), 4.0)

    def _mean_around(
        self, series: list[float], at_s: float, reach_s: float = 450.0
    ) -> float | None:
        if not self._times or at_s - reach_s < self._times[0]:
            return None
        low = bisect.bisect_left(self._times, at_s - reach_s)
        high = bisect.bisect_right(self._times, at_s + reach_s)
        return sum(series[low:high]) / (high - low) if high > low else None


def _mean(buckets: Iterable[_Bucket]) -> _Bucket:
    """Returns the mean rate, and the tokens of a request, those of busy times with more weight."""
    known = list(buckets)
    rates = [each.requests_per_s for each in known]
    total = sum(rates)
    # Without any request they have no length; the last is as good as another.
    weights = [rate / total for rate in rates] if total > 0 else [*(0.0 for _ in rates[1:]), 1.0]
    pairs = list(zip(weights, known, strict=True))
    return _Bucket(
        known[-1].at_s,
        total / len(known),
        sum(weight * each.input_tokens for weight, each in pairs),
        sum(weight * each.output_tokens for weight, each in pairs),
    )
