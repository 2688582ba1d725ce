"""What one look at the metrics page's families says, and what happened between two of them.

Owns which family becomes which series of the history. Does not own the families (`serving_metrics`,
`ledger_metrics`), nor how long anything is kept (`history_ring`). Pure: no clock, no I/O.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from prometheus_client import Metric as Family
from prometheus_client.samples import Sample

from serving.dashboard.time_series import Key
from serving.ledger.states import LedgerState

# The scope of all models together.
ALL_MODELS = ""
# The outcomes of sequences that are no failure: what the engine ends by itself, and what is ended
# from outside, by the client or by a stop string.
_FINISHED = frozenset({"stop", "length", "repetition"})
_ABORTED = frozenset({"abort", "aborted"})

OUTCOMES = ("finished", "aborted", "failed", "refused")
LOSSES = ("moved_lost", "moved_draining", "links_lost")
# Sums of the ledger and of tokens that `history` divides; the cost is no series of its own.
COST, TOKENS = "cost_usd", "output_tokens_per_s"

Labels = Mapping[str, str]
Place = tuple[str, str]  # series, label


def _outcome(labels: Labels) -> Place:
    outcome = labels["outcome"]
    if outcome in _FINISHED:
        return "requests_per_s", "finished"
    return "requests_per_s", "aborted" if outcome in _ABORTED else "failed"


def _admission(labels: Labels) -> Place | None:
    return None if labels["result"] == "admitted" else ("requests_per_s", "refused")


def _resume(labels: Labels) -> Place:
    return "losses", "moved_draining" if labels["cause"] == "draining" else "moved_lost"


def _link_loss(labels: Labels) -> Place | None:
    return None if labels["cause"] == "draining" else ("losses", "links_lost")


# What only goes up: where its increase is counted; `None`: nowhere.
_COUNTERS: Mapping[str, Callable[[Labels], Place | None]] = {
    "slicewise_sequences_total": _outcome,
    "slicewise_admissions_total": _admission,
    "slicewise_output_tokens_total": lambda labels: (TOKENS, labels["compute_class"]),
    "slicewise_resumes_total": _resume,
    "slicewise_link_losses_total": _link_loss,
    "slicewise_ledger_cost_usd_total": lambda _: (COST, ""),
}
_HISTOGRAMS = {
    "slicewise_time_to_first_token_seconds": "ttft_s",
    "slicewise_time_per_output_token_seconds": "tpot_s",
}
_GAUGES = {
    "slicewise_sequences_in_flight": ("sequences", "in_flight"),
    "slicewise_requests_waiting": ("sequences", "waiting"),
}
_CHIPS, _LEDGER_BEGAN = "slicewise_ledger_chips", "slicewise_ledger_start_time_seconds"
_KV_USAGE = "slicewise_engine_kv_usage_ratio"
# Of each device; HBM is the ratio of two sums.
_TPU_MEANS = {
    "tpu_duty_cycle_ratio": "duty_cycle",
    "tpu_tensorcore_utilization_ratio": "tensorcore",
}
_HBM_USED, _HBM_CAPACITY = "tpu_hbm_used_bytes", "tpu_hbm_capacity_bytes"

TPU_SERIES = frozenset({*_TPU_MEANS, _HBM_USED, _HBM_CAPACITY})
# All that is read: collectors need not make the rest.
READ_SERIES = frozenset(
    {*_COUNTERS, *_HISTOGRAMS, *_GAUGES, _CHIPS, _LEDGER_BEGAN, _KV_USAGE, *TPU_SERIES}
)


class _Source(NamedTuple):
    """One series of the page that only goes up."""

    model: str
    name: str
    labels: tuple[tuple[str, str], ...]


@dataclass(slots=True)
class Reading:
    """One look. `buckets` are cumulative, as on the page; `bounds` are those of a histogram."""

    counts: dict[_Source, tuple[Place, float]] = field(default_factory=dict)
    buckets: dict[_Source, list[float]] = field(default_factory=dict)
    bounds: dict[str, tuple[float, ...]] = field(default_factory=dict)
    gauges: dict[Key, float] = field(default_factory=dict)
    # Models of this gateway, and their compute classes that have or had engines.
    models: set[str] = field(default_factory=set)
    classes: set[tuple[str, str]] = field(default_factory=set)
    has_ledger: bool = False


@dataclass(slots=True)
class Increase:
    """What happened in `duration_s`. Of histograms: samples by bucket, the last beyond all."""

    duration_s: float
    counts: Counter[Key] = field(default_factory=Counter)
    samples: dict[tuple[str, str], list[float]] = field(default_factory=dict)  # by model, series

    def add(self, other: "Increase") -> None:
        """Adds what happened in another span of time."""
        self.duration_s += other.duration_s
        for key, count in other.counts.items():
            self.counts[key] += count
        for model_series, samples in other.samples.items():
            self._add_samples(model_series, samples)

    def _add_samples(self, model_series: tuple[str, str], samples: Sequence[float]) -> None:
        known = self.samples.get(model_series)
        if known is None:
            self.samples[model_series] = list(samples)
        else:
            for position, count in enumerate(samples):
                known[position] += count


def read(families: Iterable[Family]) -> Reading:
    """The series that the history needs, of everything that a page shows."""
    reading, means = Reading(), _Means()
    for family in families:
        series = _HISTOGRAMS.get(family.name)
        if series is not None:
            _take_buckets(reading, series, family.samples)
            continue
        for sample in family.samples:
            _take(reading, means, sample)
    means.give(reading.gauges)
    _fill(reading)
    return reading


def _fill(reading: Reading) -> None:
    """Says none of what the ledger would list if there was any: a fleet without chips is known."""
    if not reading.has_ledger:
        return
    for scope in (ALL_MODELS, *reading.models):
        reading.gauges.setdefault(Key(scope, "chips", LedgerState.SERVING), 0.0)
    for model, compute_class in reading.classes:
        for scope in _scopes(model):
            reading.gauges.setdefault(Key(scope, "chips_held", compute_class), 0.0)


def increase(before: Reading, after: Reading, duration_s: float) -> Increase:
    """What happened between two looks at one gateway, for each model and for all of them.

    A series that was not there before began at zero, except for costs, and so did one that shows
    less than before.
    What is known to be nothing is zero; what nobody has told is absent.
    """
    result = Increase(duration_s)
    for model in (ALL_MODELS, *after.models):
        for outcome in OUTCOMES:
            result.counts[Key(model, "requests_per_s", outcome)] = 0
        for loss in LOSSES:
            result.counts[Key(model, "losses", loss)] = 0
    for model, compute_class in after.classes:
        for scope in _scopes(model):
            result.counts[Key(scope, TOKENS, compute_class)] = 0
    for source, (place, count) in after.counts.items():
        # A ledger that learns of a slice late has counted from its start: that was not just now.
        unknown = count if place[0] == COST else 0.0
        _, known = before.counts.get(source, (place, unknown))
        grown = count - known if count >= known else count
        for scope in _scopes(source.model):
            result.counts[Key(scope, *place)] += grown  # type: ignore[assignment] # seconds, dollars
    for source, buckets in after.buckets.items():
        earlier = before.buckets.get(source)
        samples = _samples(earlier, buckets)
        for scope in _scopes(source.model):
            result._add_samples((scope, source.name), samples)
    return result


def quantile(ratio: float, bounds: Sequence[float], samples: Sequence[float]) -> float | None:
    """The value below which `ratio` of the samples lie; `None` without samples.

    As PromQL's `histogram_quantile`: samples lie evenly in their bucket, the first one begins at
    zero, and what is beyond all bounds is said to be at the last. `samples` has one count more
    than there are `bounds`.
    """
    rank = ratio * sum(samples)
    if rank <= 0:
        return None
    below, lower = 0.0, 0.0
    for upper, count in zip(bounds, samples, strict=False):
        if count and below + count >= rank:
            return lower + (upper - lower) * (rank - below) / count
        below, lower = below + count, upper
    return bounds[-1]


def _scopes(model: str) -> tuple[str, ...]:
    return (ALL_MODELS, model) if model else (ALL_MODELS,)


def _samples(before: Sequence[float] | None, after: Sequence[float]) -> list[float]:
    """Samples by bucket between two cumulative readings."""
    if before is None or after[-1] < before[-1] or len(after) != len(before):
        before = [0.0] * len(after)
    grown = [max(0.0, late - early) for early, late in zip(before, after, strict=True)]
    return [count - below for below, count in zip([0.0, *grown[:-1]], grown, strict=True)]


class _Means:
    """Gauges of single engines and devices, on their way to one value for each model."""

    def __init__(self) -> None:
        self._sums: dict[Key, tuple[float, int]] = {}
        self._highest: dict[Key, float] = {}
        self._hbm: Counter[tuple[str, str]] = Counter()

    def add(self, key: Key, value: float) -> None:
        total, number = self._sums.get(key, (0.0, 0))
        self._sums[key] = (total + value, number + 1)

    def add_highest(self, key: Key, value: float) -> None:
        self._highest[key] = max(value, self._highest.get(key, value))

    def add_hbm(self, scope: str, name: str, value: float) -> None:
        self._hbm[scope, name] += value  # type: ignore[assignment] # bytes come as floats

    def give(self, gauges: dict[Key, float]) -> None:
        gauges |= {key: total / number for key, (total, number) in self._sums.items()}
        gauges |= self._highest
        for (scope, name), used in self._hbm.items():
            capacity = self._hbm.get((scope, _HBM_CAPACITY), 0)
            if name == _HBM_USED and capacity:
                gauges[Key(scope, "tpu_ratio", "hbm")] = used / capacity


def _take(reading: Reading, means: _Means, sample: Sample) -> None:
    name, labels, value = sample.name, sample.labels, sample.value
    model = labels.get("model", "")
    if (place_of := _COUNTERS.get(name)) is not None:
        place = place_of(labels)
        if place is not None:
            source = _Source(model, name, tuple(labels.items()))
            reading.counts[source] = (place, value)
        return
    for scope in _scopes(model):
        if (place := _GAUGES.get(name)) is not None:
            _add(reading.gauges, Key(scope, *place), value)
        elif name == _CHIPS:
            _add(reading.gauges, Key(scope, "chips", labels["state"]), value)
            if labels["state"] != LedgerState.PROVISIONING:
                _add(reading.gauges, Key(scope, "chips_held", labels["compute_class"]), value)
        elif name == _KV_USAGE:
            means.add(Key(scope, "kv_usage_ratio", "mean"), value)
            means.add_highest(Key(scope, "kv_usage_ratio", "highest"), value)
        elif name in _TPU_MEANS:
            means.add(Key(scope, "tpu_ratio", _TPU_MEANS[name]), value)
        elif name in (_HBM_USED, _HBM_CAPACITY):
            means.add_hbm(scope, name, value)
    if name == "slicewise_sequences_in_flight":
        reading.classes.add((model, labels["compute_class"]))
    elif name == "slicewise_requests_waiting":
        reading.models.add(model)
    elif name == _LEDGER_BEGAN:
        reading.has_ledger = True


def _take_buckets(reading: Reading, series: str, samples: Iterable[Sample]) -> None:
    """Takes a whole family: most of a page is buckets. Each histogram's are in order."""
    before: tuple[str, str] | None = None
    buckets: list[float] = []
    bounds: list[float] = []
    for sample in samples:
        if not sample.name.endswith("_bucket"):
            continue
        labels = sample.labels
        here = (labels.get("model", ""), labels["compute_class"])
        if here != before:
            before, buckets = here, []
            source = _Source(here[0], series, (("compute_class", here[1]),))
            reading.buckets[source] = buckets
        if len(buckets) == len(bounds) and labels["le"] != "+Inf":  # of the first histogram
            bounds.append(float(labels["le"]))
        buckets.append(sample.value)
    reading.bounds[series] = tuple(bounds)


def _add(gauges: dict[Key, float], key: Key, value: float) -> None:
    gauges[key] = gauges.get(key, 0.0) + value
