"""How much of the profile's law slices really carry: learned where they can carry no more. Pure.

A slice that is saturated shows its capacity: what it does in a second, in work by the law (uncached
prompt tokens and output tokens), is all that it can do. Divided by what the law says it is the
*factor* of the slice. A slice is saturated when work waits in front of full engines, or when its
steps are longer than planned for and it runs about as many sequences as the law allows at that.

What counts for a class is the median of its slices, so that one slow slice of ten is reported and
not learned. It counts the more the more was seen, and within bounds. It is kept until something
else is seen: while nothing is saturated nobody knows better. A slice that carries more than that
within the objective proves that at once. Time comes in.
"""

import hashlib
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from autoscaling.policy.memory import CapacityRecord, LearnedRecord
from autoscaling.policy.rules import Rules
from autoscaling.records import ModelLoad
from serving.domain.capacity.engine_rates import EngineRate
from serving.domain.capacity.slice_profile import CapacityProfile

LEAST_FACTOR, MOST_FACTOR = 1 / 3, 3.0
# Rates are of so many seconds: those of a slice are one observation in that time.
_WINDOW_S = 30.0
# From so many observations on what is learned counts whole.
_OBSERVATIONS_NEEDED = 8.0
# In so many seconds of saturation what was learned before loses two thirds of its weight.
_MEMORY_S = 120.0
# For so much of the window engines have to have been full.
_FULL_RATIO = 0.9
# With fewer of the sequences that the law allows, steps are long for another reason than load.
_LEAST_SEQUENCES = 0.5
# A slice is slow that carries less than this of what others of its class do, if there are others.
_SLOW, _OTHERS_NEEDED = 0.7, 3


@dataclass(frozen=True, slots=True)
class ClassCapacity:
    """What was learned of one class: the factor of its slices, from so many observations."""

    factor: float
    num_observations: float

    @property
    def confidence(self) -> float:
        """How much it counts, 0 to 1."""
        return min(1.0, self.num_observations / _OBSERVATIONS_NEEDED)

    @property
    def believed(self) -> float:
        """The factor to plan with: between the law's own, which is 1, and what was observed."""
        return 1 + self.confidence * (self.factor - 1)


@dataclass(frozen=True, slots=True)
class SlowSlice:
    """A saturated slice that carries much less than others of its class do."""

    engine_id: str
    compute_class: str
    factor: float
    others: float

    def __str__(self) -> str:
        return (
            f"slice of {self.engine_id} is slow: it carries {self.factor:.2f} of the profile's law,"
            f" others of {self.compute_class} {self.others:.2f}; nothing is learned from it"
        )


@dataclass(frozen=True, slots=True)
class LearnedCapacity:
    """What was learned of slices by one profile, by compute class. `slow` are of the last look."""

    profile_key: str
    classes: Mapping[str, ClassCapacity] = field(default_factory=dict)
    slow: tuple[SlowSlice, ...] = ()

    def factor(self, num_ready: Mapping[str, int]) -> float:
        """The factor of a fleet with so many ready slices of each class.

        A class of which nothing is known is as the others are: the law is of the same slices.
        """
        known = {name: each.believed for name, each in self.classes.items()}
        weights = {name: num_ready.get(name, 0) for name in known}
        if not sum(weights.values()):
            return statistics.fmean(known.values()) if known else 1.0
        return sum(known[name] * weights[name] for name in known) / sum(weights.values())

    def seen(
        self, elapsed_s: float, load: ModelLoad, profile: CapacityProfile, rules: Rules
    ) -> "LearnedCapacity":
        """What is known after `load`, `elapsed_s` after the one before."""
        classes = dict(self.classes)
        slow: list[SlowSlice] = []
        for name in {each.compute_class for each in load.engines}:
            carried = {
                each.engine_id: (factor, _is_saturated(each, load, profile, rules))
                for each in load.engines
                if each.compute_class == name
                and (factor := carried_factor(each, profile, rules)) is not None
            }
            saturated = {key: factor for key, (factor, is_full) in carried.items() if is_full}
            if saturated:
                median = statistics.median(saturated.values())
                classes[name] = _learned(classes.get(name), median, len(saturated), elapsed_s)
                slow += _slow(name, saturated, median)
                continue
            median = statistics.median([factor for factor, _ in carried.values()] or [0.0])
            if name in classes and median > classes[name].believed:
                classes[name] = _learned(classes[name], median, len(carried), elapsed_s)
        return replace(self, classes=classes, slow=tuple(slow))

    def to_record(self) -> LearnedRecord:
        """Returns what was learned. What is slow is seen at every look, and is not part of it."""
        classes = {
            name: CapacityRecord(factor=each.factor, num_observations=each.num_observations)
            for name, each in self.classes.items()
        }
        return LearnedRecord(profile_key=self.profile_key, classes=classes)


def nothing_learned(profile: CapacityProfile) -> LearnedCapacity:
    """What is known of slices by a profile before any was saturated."""
    law = (profile.base_s, profile.per_sequence_s, profile.per_prompt_token_s)
    text = repr((*law, profile.max_num_seqs, profile.max_num_batched_tokens, profile.num_slices))
    return LearnedCapacity(hashlib.sha256(text.encode()).hexdigest()[:16])


def learned_of_record(record: LearnedRecord, profile: CapacityProfile) -> LearnedCapacity:
    """Returns what was learned; nothing where it was learned by another profile."""
    empty = nothing_learned(profile)
    if record.profile_key != empty.profile_key:
        return empty
    classes = {
        name: ClassCapacity(_bounded(each.factor), each.num_observations)
        for name, each in record.classes.items()
    }
    return replace(empty, classes=classes)


def carried_factor(rate: EngineRate, profile: CapacityProfile, rules: Rules) -> float | None:
    """Returns the share of the law that an engine carries, at its pace or the planned one.

    By the law a slice could do so many times what this one does in a second, in steps as long as
    its own, or as are planned for where its own are shorter. `None` for an engine without work.
    """
    step_s = max(rate.step_s, rules.objectives.tpot_s * rules.tpot_margin)
    if rate.prompt_tokens_per_s + rate.output_tokens_per_s <= 0 or step_s <= profile.base_s:
        return None
    times = profile.max_requests_per_s(rate.prompt_tokens_per_s, rate.output_tokens_per_s, step_s)
    return _bounded(1 / times)


def _is_saturated(
    rate: EngineRate, load: ModelLoad, profile: CapacityProfile, rules: Rules
) -> bool:
    if load.num_waiting > 0 and load.full_ratio >= _FULL_RATIO:
        return True
    planned_s = rules.objectives.tpot_s * rules.tpot_margin
    if rate.step_s < planned_s:
        return False
    # A step gives each sequence a token.
    running = rate.output_tokens_per_s * rate.step_s
    times = profile.max_requests_per_s(
        rate.prompt_tokens_per_s, rate.output_tokens_per_s, planned_s
    )
    allowed = min(profile.max_num_seqs, times * rate.output_tokens_per_s * planned_s)
    return running >= _LEAST_SEQUENCES * allowed


def _learned(
    before: ClassCapacity | None, median: float, num_slices: int, elapsed_s: float
) -> ClassCapacity:
    elapsed_s = min(elapsed_s, _WINDOW_S)
    num_new = num_slices * elapsed_s / _WINDOW_S
    if before is None:
        return ClassCapacity(median, num_new)
    share = elapsed_s / (elapsed_s + _MEMORY_S) if before.confidence >= 1 else 0.5
    factor = before.factor + share * (median - before.factor)
    return ClassCapacity(factor, before.num_observations + num_new)


def _slow(name: str, factors: Mapping[str, float], median: float) -> Iterable[SlowSlice]:
    if len(factors) < _OTHERS_NEEDED:
        return ()
    return [
        SlowSlice(engine_id, name, factor, median)
        for engine_id, factor in sorted(factors.items())
        if factor < _SLOW * median
    ]


def _bounded(factor: float) -> float:
    return min(max(factor, LEAST_FACTOR), MOST_FACTOR)
