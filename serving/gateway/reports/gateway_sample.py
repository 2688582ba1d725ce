"""The gateway's counters as one record, for the dashboard.

Owns which counter goes into the sample. Copies numbers and formats nothing: it runs once a second
on the loop that carries tokens. Does not own the counters, nor what the dashboard makes of them.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from serving.domain.dashboard_messages import (
    ClassCounts,
    EngineUsage,
    GatewaySample,
    LedgerEntry,
    ModelCounts,
)
from serving.gateway.metrics.ledger import chip_hours
from serving.gateway.metrics.requests import EngineReading, MeteredModel
from serving.gateway.telemetry.request_metrics import NO_CLASS, ClassMetrics, EdgeMetrics
from serving.ledger.ledger import Ledger

_EMPTY = ClassMetrics()


def take_sample(
    gateway_id: str,
    fleets: Mapping[str, MeteredModel],
    edge: EdgeMetrics,
    engines: Iterable[EngineReading],
    ledger: Iterable[LedgerEntry],
    now_s: float,
) -> GatewaySample:
    """Copies the present counters. `fleets` is by model, `now_s` monotonic time."""
    refused: Counter[str] = Counter()
    for (model, result, _), count in edge.admissions.items():
        if result != "admitted":
            refused[model] += count
    models = [
        ModelCounts(model, fleet.num_waiting + fleet.num_queued, refused.pop(model, 0))
        for model, fleet in fleets.items()
    ]
    # Requests that named no served model are refused all the same.
    models += [ModelCounts(model, 0, count) for model, count in refused.items()]
    return GatewaySample(
        gateway_id=gateway_id,
        taken_at_s=now_s,
        to_first_token_bounds_s=_EMPTY.to_first_token.bounds,
        per_output_token_bounds_s=_EMPTY.per_output_token.bounds,
        models=tuple(models),
        classes=tuple(
            counts for model, fleet in fleets.items() for counts in _classes(model, fleet)
        ),
        engines=tuple(
            EngineUsage(engine.engine_id, engine.model, engine.load.kv_usage_ratio)
            for engine in engines
        ),
        ledger=tuple(ledger),
    )


def ledger_entries(
    ledger: Ledger, usd_per_chip_hour: Mapping[str, float]
) -> tuple[LedgerEntry, ...]:
    """Returns the ledger by model, compute class and state. `usd_per_chip_hour` is by class."""
    chips: dict[tuple[str, str, str], int] = {
        (entry.model, entry.compute_class, entry.state): entry.amount for entry in ledger.chips()
    }
    usd: dict[tuple[str, str, str], float] = {}
    for entry in ledger.totals():
        price = usd_per_chip_hour.get(entry.compute_class)
        if price is not None:
            cost = chip_hours(entry) * price if entry.state.is_paid else 0.0
            usd[entry.model, entry.compute_class, entry.state] = cost
    return tuple(
        LedgerEntry(*key, num_chips=chips.get(key, 0), usd=usd.get(key)) for key in {**chips, **usd}
    )


def _classes(model: str, fleet: MeteredModel) -> Iterable[ClassCounts]:
    in_flight: Counter[str] = Counter()
    for engine in fleet.connections:
        in_flight[engine.compute_class] += len(engine.requests)
    classes = fleet.request_metrics.classes
    for compute_class in {**classes, **in_flight}:
        numbers = classes.get(compute_class, _EMPTY)
        is_class = compute_class != NO_CLASS
        yield ClassCounts(
            model=model,
            compute_class=compute_class,
            sequences=dict(numbers.sequences),
            resumes=dict(numbers.resumes),
            link_losses=dict(numbers.link_losses),
            output_tokens=numbers.output_tokens if is_class else 0,
            to_first_token=tuple(numbers.to_first_token.counts) if is_class else (),
            per_output_token=tuple(numbers.per_output_token.counts) if is_class else (),
            in_flight=in_flight[compute_class],
        )
