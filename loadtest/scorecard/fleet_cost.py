"""Sums up the platform's slices over time, and what their chips cost. Pure.

A sample holds until the next one. Where the next is long in coming, nothing is known in between,
and what is not known is neither free nor paid for: the cost is then `None`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loadtest.records import FleetSample

HOUR_S = 3600.0
# A slice is paid for from the moment its hosts exist until they are given back.
PAID_STATES = ("reserved", "probing", "loading", "ready", "draining")
STATES = ("requested", "provisioning", *PAID_STATES)
# Samples are a second apart; a gateway under load may skip some.
MAX_SAMPLE_AGE_S = 10.0
MIN_COVERED_RATIO = 0.95


@dataclass(frozen=True, slots=True)
class ClassUse:
    """The use of one compute class in the window: its paid chips in hours, and their cost.

    `usd` is `None` without a price. `min_ready_slices` and `max_ready_slices` are over the samples.
    """

    compute_class: str
    chip_hours: float
    usd_per_chip_hour: float | None
    usd: float | None
    min_ready_slices: int
    max_ready_slices: int


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of the fleet in the window.

    `covered_ratio` is the share of the window in which the fleet was observed. `usd` and what
    follows from it are `None` unless nearly all of it was observed and every class used has a
    price; `reason` names which is lacking.
    """

    classes: tuple[ClassUse, ...]
    covered_ratio: float | None
    chip_hours: float | None
    usd: float | None
    usd_per_million_output_tokens: float | None
    reason: str | None


def cost_of(
    samples: Sequence[FleetSample],
    usd_per_chip_hour: Mapping[str, float] | None,
    window_s: tuple[float, float],
    output_tokens: float | None,
) -> Cost:
    """The cost of `window_s`. Its whole answers had `output_tokens` (`None`: not known)."""
    from_s, until_s = window_s
    if not samples or until_s <= from_s:
        return Cost((), None, None, None, None, "the platform showed no fleet")
    spans = _spans(samples, from_s, until_s)
    covered_ratio = sum(length_s for _, length_s in spans) / (until_s - from_s)
    prices = usd_per_chip_hour or {}
    names = sorted({name for sample, _ in spans for name in sample.slices})
    classes = tuple(_use(name, spans, prices.get(name)) for name in names)
    chip_hours = sum(class_use.chip_hours for class_use in classes)
    reason = _lacking(classes, usd_per_chip_hour, covered_ratio)
    if reason is not None:
        return Cost(classes, covered_ratio, chip_hours, None, None, reason)
    usd = sum(class_use.usd for class_use in classes if class_use.usd is not None)
    per_million = usd / output_tokens * 1e6 if output_tokens else None
    return Cost(classes, covered_ratio, chip_hours, usd, per_million, None)


def paid_chips(sample: FleetSample, compute_class: str) -> int:
    """Returns the chips of a class that are paid for at that instant."""
    states = sample.slices.get(compute_class, {})
    return sum(states.get(state, {}).get("chips", 0) for state in PAID_STATES)


def num_slices(sample: FleetSample, compute_class: str, state: str) -> int:
    """Returns the number of a class's slices in `state` at that instant."""
    return sample.slices.get(compute_class, {}).get(state, {}).get("slices", 0)


def _spans(
    samples: Sequence[FleetSample], from_s: float, until_s: float
) -> list[tuple[FleetSample, float]]:
    """Returns samples with how long each holds inside the window."""
    nexts = [*(sample.at_s for sample in samples[1:]), until_s]
    spans: list[tuple[FleetSample, float]] = []
    for sample, next_s in zip(samples, nexts, strict=True):
        end_s = min(next_s, sample.at_s + MAX_SAMPLE_AGE_S, until_s)
        length_s = end_s - max(sample.at_s, from_s)
        if length_s > 0:
            spans.append((sample, length_s))
    return spans


def _use(name: str, spans: list[tuple[FleetSample, float]], price: float | None) -> ClassUse:
    chip_hours = sum(paid_chips(sample, name) * length_s for sample, length_s in spans) / HOUR_S
    ready = [num_slices(sample, name, "ready") for sample, _ in spans]
    usd = chip_hours * price if price is not None else None
    return ClassUse(name, chip_hours, price, usd, min(ready), max(ready))


def _lacking(
    classes: tuple[ClassUse, ...], prices: Mapping[str, float] | None, covered_ratio: float
) -> str | None:
    if prices is None:
        return "no prices were given"
    unpriced = [
        class_use.compute_class
        for class_use in classes
        if class_use.chip_hours and class_use.usd is None
    ]
    if unpriced:
        return f"no price for {', '.join(unpriced)}"
    if covered_ratio < MIN_COVERED_RATIO:
        return f"the fleet was seen for {covered_ratio:.0%} of the window only"
    return None
