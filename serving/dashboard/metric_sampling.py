"""The series of the history at one instant, and the increase between two samples of a gateway.

Owns which counter becomes which series, and how gateways add up. Does not own the samples
(`serving.domain.dashboard_messages`), nor how long anything is kept (`time_series`). Pure: no
clock, no I/O.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from serving.domain.dashboard_messages import ClassCounts, GatewaySample, LedgerEntry
from serving.ledger.states import LedgerState

# The scope of all models together.
ALL_MODELS = ""
# The outcomes of sequences that are no failure: what the engine ends by itself, and what is ended
# from outside, by the client or by a stop string.
_FINISHED = frozenset({"stop", "length", "repetition"})
_ABORTED = frozenset({"abort", "aborted"})

OUTCOMES = ("finished", "aborted", "failed", "refused")
LOSSES = ("moved_lost", "moved_draining", "links_lost")
# Counted for each compute class. The cost is divided by time and by tokens; it is no series itself.
COST, TOKENS = "cost_usd", "output_tokens_per_s"

_DUTY, _TENSORCORE = "tpu_duty_cycle_ratio", "tpu_tensorcore_utilization_ratio"
_HBM_USED, _HBM_CAPACITY = "tpu_hbm_used_bytes", "tpu_hbm_capacity_bytes"
_TPU_MEANS = {_DUTY: "duty_cycle", _TENSORCORE: "tensorcore"}
# The series of TPU exporters that are drawn.
TPU_SERIES = frozenset({_DUTY, _TENSORCORE, _HBM_USED, _HBM_CAPACITY})


class Key(NamedTuple):
    """The key of a series of the history. `model` is empty for all models together."""

    model: str
    name: str
    label: str


class TpuSample(NamedTuple):
    """The value of a series in `TPU_SERIES`, of one device."""

    model: str
    name: str
    value: float


_Counts = dict[tuple[str, ...], tuple[Key, float]]


@dataclass(slots=True)
class Increase:
    """The increase at one gateway in `duration_s`; `samples` by model and series, in buckets."""

    duration_s: float = 0.0
    counts: Counter[Key] = field(default_factory=Counter)
    samples: dict[tuple[str, str], list[int]] = field(default_factory=dict)

    def add(self, other: "Increase") -> None:
        """Adds the increase of another span of time."""
        self.duration_s += other.duration_s
        self.counts.update(other.counts)
        for model_series, buckets in other.samples.items():
            add_buckets(self.samples, model_series, buckets)


def add_buckets(
    into: dict[tuple[str, str], list[int]], key: tuple[str, str], buckets: Sequence[int]
) -> None:
    """Adds the samples of a histogram bucket by bucket."""
    known = into.get(key) or [0] * len(buckets)
    into[key] = [left + right for left, right in zip(known, buckets, strict=True)]


def gauges(samples: Collection[GatewaySample], chips: Iterable[TpuSample] = ()) -> dict[Key, float]:
    """Returns the series of present values, from the last samples of all gateways together.

    Sequences add up. Engines and the ledger are the same at every gateway: an engine counts once,
    and of the ledgers the highest value counts.
    """
    values: Counter[Key] = Counter()
    for sample in samples:
        for counts in sample.classes:
            if counts.compute_class:
                for scope in _scopes(counts.model):
                    values[Key(scope, "sequences", "in_flight")] += counts.in_flight
        for model in sample.models:
            for scope in _scopes(model.model):
                values[Key(scope, "sequences", "waiting")] += model.waiting
    return {**values, **_ledger_gauges(samples), **_kv_gauges(samples), **_tpu_gauges(chips)}


def increase(before: GatewaySample, after: GatewaySample) -> Increase:
    """Returns the increase between two samples of a gateway, for each model and for all of them.

    A counter that was not there before began at zero, except for costs. One that shows less than
    before began again. A value that is known to be nothing is zero; an unreported one is absent.
    """
    result = Increase(after.taken_at_s - before.taken_at_s)
    for model in {ALL_MODELS} | {counts.model for counts in after.models}:
        for name, labels in (("requests_per_s", OUTCOMES), ("losses", LOSSES)):
            result.counts.update({Key(model, name, label): 0 for label in labels})
    known = _counters(before)
    for source, (key, count) in _counters(after).items():
        # A ledger that learns of a slice late has counted from its start: that was not just now.
        earlier = known.get(source, (key, count if key.name == COST else 0.0))[1]
        grown = count - earlier if count >= earlier else count
        for scope in _scopes(key.model):
            result.counts[key._replace(model=scope)] += grown  # type: ignore[assignment] # dollars
    buckets = dict(_histograms(before))
    for place, counts in _histograms(after):
        grown_by_bucket = _grown(buckets.get(place), counts)
        for scope in _scopes(place[0]):
            add_buckets(result.samples, (scope, place[2]), grown_by_bucket)
    return result


def quantile(ratio: float, bounds: Sequence[float], samples: Sequence[float]) -> float | None:
    """Returns the value below which `ratio` of the samples lie; `None` without samples.

    As in PromQL's `histogram_quantile`, samples lie evenly in their bucket and the first bucket
    begins at zero. A sample beyond all bounds counts as at the last bound. `samples` has one count
    more than there are `bounds`.
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


def _counters(sample: GatewaySample) -> _Counts:
    """Returns everything that only goes up, by where it is counted, as its series and count."""
    counters: _Counts = {}
    for model in sample.models:
        key = Key(model.model, "requests_per_s", "refused")
        counters["refused", model.model] = (key, model.refused)
    for counts in sample.classes:
        for kind, label, key, count in _class_counters(counts):
            counters[kind, counts.model, counts.compute_class, label] = (key, count)
    for entry in sample.ledger:
        if entry.usd is not None:
            source = ("usd", entry.model, entry.compute_class, entry.state)
            counters[source] = (Key(entry.model, COST, ""), entry.usd)
    return counters


def _class_counters(counts: ClassCounts) -> Iterator[tuple[str, str, Key, int]]:
    model = counts.model
    for outcome, count in counts.sequences.items():
        label = "failed"
        if outcome in _FINISHED or outcome in _ABORTED:
            label = "finished" if outcome in _FINISHED else "aborted"
        yield "sequences", outcome, Key(model, "requests_per_s", label), count
    for cause, count in counts.resumes.items():
        label = "moved_draining" if cause == "draining" else "moved_lost"
        yield "resumes", cause, Key(model, "losses", label), count
    for cause, count in counts.link_losses.items():
        if cause != "draining":
            yield "link_losses", cause, Key(model, "losses", "links_lost"), count
    if counts.compute_class:
        yield "tokens", "", Key(model, TOKENS, counts.compute_class), counts.output_tokens


def _histograms(sample: GatewaySample) -> Iterator[tuple[tuple[str, str, str], Sequence[int]]]:
    for counts in sample.classes:
        place = (counts.model, counts.compute_class)
        if counts.to_first_token:
            yield (*place, "ttft_s"), counts.to_first_token
        if counts.per_output_token:
            yield (*place, "tpot_s"), counts.per_output_token


def _grown(before: Sequence[int] | None, after: Sequence[int]) -> Sequence[int]:
    """Returns the new samples by bucket; all of them where the histogram began again."""
    if before is None or len(before) != len(after) or sum(after) < sum(before):
        return after
    return [max(0, late - early) for early, late in zip(before, after, strict=True)]


def _ledger_gauges(samples: Iterable[GatewaySample]) -> dict[Key, float]:
    """Returns chips by state and by compute class; zero where a model or class has none."""
    highest: dict[Key, float] = {}
    for sample in samples:
        values: Counter[Key] = Counter()
        for counts in sample.classes:
            for scope in _scopes(counts.model):
                if counts.compute_class:
                    values[Key(scope, "chips_held", counts.compute_class)] += 0
        for scope in {ALL_MODELS} | {model.model for model in sample.models}:
            values[Key(scope, "chips", LedgerState.SERVING)] += 0
        for entry in sample.ledger:
            for key in _ledger_keys(entry):
                values[key] += entry.num_chips
        highest |= {key: max(value, highest.get(key, 0.0)) for key, value in values.items()}
    return highest


def _ledger_keys(entry: LedgerEntry) -> Iterator[Key]:
    for scope in _scopes(entry.model):
        yield Key(scope, "chips", entry.state)
        # Neither what is only requested nor what nobody has.
        if entry.model and entry.state != LedgerState.PROVISIONING:
            yield Key(scope, "chips_held", entry.compute_class)


def _kv_gauges(samples: Iterable[GatewaySample]) -> dict[Key, float]:
    usage = {engine.engine_id: engine for sample in samples for engine in sample.engines}
    ratios: dict[str, list[float]] = {}
    for engine in usage.values():
        for scope in _scopes(engine.model):
            ratios.setdefault(scope, []).append(engine.kv_usage_ratio)
    mean = {Key(scope, "kv_usage_ratio", "mean"): sum(v) / len(v) for scope, v in ratios.items()}
    return mean | {Key(scope, "kv_usage_ratio", "highest"): max(v) for scope, v in ratios.items()}


def _tpu_gauges(chips: Iterable[TpuSample]) -> dict[Key, float]:
    """Returns the means of all devices; for HBM the ratio of two sums."""
    found: dict[tuple[str, str], list[float]] = {}
    for sample in chips:
        for scope in _scopes(sample.model):
            found.setdefault((scope, sample.name), []).append(sample.value)
    values: dict[Key, float] = {}
    for (scope, name), numbers in found.items():
        if name in _TPU_MEANS:
            values[Key(scope, "tpu_ratio", _TPU_MEANS[name])] = sum(numbers) / len(numbers)
        elif name == _HBM_USED and (capacity := sum(found.get((scope, _HBM_CAPACITY), ()))):
            values[Key(scope, "tpu_ratio", "hbm")] = sum(numbers) / capacity
    return values
