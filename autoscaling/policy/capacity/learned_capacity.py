"""How much of the profile's law slices of a class are believed to carry. Pure.

What slices show in one look is in `shown_capacity`; here it becomes what the policy plans with.
Slices that can carry no more teach most. Others only raise what is believed: an engine that is idle
now and then looks slow by its steps and never quick. That keeps the highest of what was seen, which
with many slices is hardly above the mean. A few slices lower it again, to the law's at least, as
long as they run about as many sequences as the law allows and so are never idle. Steps that are
little shorter than the law has them say that it is right, since rates scatter.

What counts for a class is the median of its slices, so that one slow slice of ten is reported and
not learned. It counts the more the more was seen, and within bounds. It is kept until something
else is seen: while nothing is saturated nobody knows better. A slice that carries more than that
within the objective proves that at once. Time comes in.
"""

import hashlib
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from autoscaling.policy.capacity.refitted_law import WINDOW_S, LawFit
from autoscaling.policy.capacity.shown_capacity import (
    Shown,
    SlowSlice,
    bounded,
    fitted_factor,
    shown_by,
)
from autoscaling.policy.memory import CapacityRecord, FitRecord, LearnedRecord
from autoscaling.policy.profiles import Profiles
from autoscaling.policy.rules import Rules
from autoscaling.records import ModelLoad
from serving.domain.capacity.slice_profile import CapacityProfile

# From so many observations on what is learned counts whole.
_OBSERVATIONS_NEEDED = 8.0
# In so many seconds of saturation what was learned before loses two thirds of its weight.
_MEMORY_S = 120.0
# The median of more slices than these hardly scatters.
_FEW = 4
# Rates of half a minute scatter by some per cent, and only steps that are quicker than that teach:
# without this the law crept up by the scatter, by 1.4 % where it was right.
_DEAD_BAND = 0.05


@dataclass(frozen=True, slots=True)
class ClassCapacity:
    """What was learned of one class: the factor of its slices, from so many observations.

    `is_room_short` says that slices were last full with steps shorter than planned.
    """

    factor: float
    num_observations: float
    is_room_short: bool = False

    @property
    def confidence(self) -> float:
        """How much it counts, 0 to 1."""
        return min(max(0.0, self.num_observations / _OBSERVATIONS_NEEDED), 1.0)

    @property
    def believed(self) -> float:
        """The factor to plan with: between the law's own, which is 1, and what was observed."""
        return bounded(1 + self.confidence * (self.factor - 1))


@dataclass(frozen=True, slots=True)
class LearnedCapacity:
    """What was learned of slices by one profile, by compute class.

    `slow` are of the last look and not kept over restarts, `fits` are of the last hours.
    """

    profile_key: str
    classes: Mapping[str, ClassCapacity] = field(default_factory=dict)
    slow: tuple[SlowSlice, ...] = ()
    fits: Mapping[str, LawFit] = field(default_factory=dict)

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
        self, elapsed_s: float, load: ModelLoad, profiles: Profiles, rules: Rules
    ) -> "LearnedCapacity":
        """What is known after `load`, `elapsed_s` after the one before."""
        classes, fits = dict(self.classes), dict(self.fits)
        slow: list[SlowSlice] = []
        for name in {each.compute_class for each in load.engines}:
            profile = profiles.of(name)
            before = classes.get(name)
            was_room_short = before is not None and before.is_room_short
            shown = shown_by(name, load, profile, rules, was_room_short=was_room_short)
            slow += shown.slow
            engines = [each for each in load.engines if each.compute_class == name]
            fits[name] = fits.get(name, LawFit()).seen(elapsed_s, engines, profile)
            if shown.paced:
                fitted = fitted_factor(fits[name], engines, profile, rules)
                shown = replace(shown, most=max(shown.most, fitted))
            learned = _learned_from(shown, before, elapsed_s)
            if learned is not None:
                classes[name] = learned
        return replace(self, classes=classes, slow=tuple(slow), fits=fits)

    def to_record(self) -> LearnedRecord:
        """Returns what was learned. What is slow is seen at every look, and is not part of it."""
        classes = {
            name: CapacityRecord(
                factor=each.factor,
                num_observations=each.num_observations,
                is_room_short=each.is_room_short,
            )
            for name, each in self.classes.items()
        }
        fits = {name: FitRecord(**asdict(each)) for name, each in self.fits.items()}
        return LearnedRecord(profile_key=self.profile_key, classes=classes, fits=fits)


def nothing_learned(profiles: Profiles) -> LearnedCapacity:
    """What is known of slices by their profiles before any was saturated."""
    text = repr(_numbers(profiles.own))
    for name, each in sorted(profiles.by_class.items()):
        text += repr((name, _numbers(each)))
    return LearnedCapacity(hashlib.sha256(text.encode()).hexdigest()[:16])


def _numbers(profile: CapacityProfile) -> tuple[float, ...]:
    law = (profile.base_s, profile.per_sequence_s, profile.per_prompt_token_s)
    return (*law, profile.max_num_seqs, profile.max_num_batched_tokens, profile.num_slices)


def learned_of_record(record: LearnedRecord, profiles: Profiles) -> LearnedCapacity:
    """Returns what was learned; nothing where it was learned by another profile."""
    empty = nothing_learned(profiles)
    if record.profile_key != empty.profile_key:
        return empty
    classes = {
        name: ClassCapacity(bounded(each.factor), each.num_observations, each.is_room_short)
        for name, each in record.classes.items()
    }
    fits = {name: LawFit(**each.model_dump()) for name, each in record.fits.items()}
    possible = {name: fit for name, fit in fits.items() if fit.is_possible}
    return replace(empty, classes=classes, fits=possible)


def _learned_from(
    shown: Shown, before: ClassCapacity | None, elapsed_s: float
) -> ClassCapacity | None:
    """Returns what is known of a class after a look; `None`: nothing new."""
    saturated, paced = shown.saturated, shown.paced
    if saturated and len(saturated) >= len(paced):
        factor = statistics.median(saturated.values())
        learned = _learned(before, factor, len(saturated), elapsed_s)
        return replace(learned, is_room_short=shown.is_room_short)
    believed = 1.0 if before is None else before.believed
    is_as_law = shown.most <= 1 + _DEAD_BAND
    if before is not None and believed > 1 and 0 < len(paced) <= _FEW and shown.are_busy:
        # Never idle, so right on average; and the highest of a few slices is chance.
        told = 1.0 if is_as_law else shown.most
        return _kept_room(before, _learned(before, told, shown.num_engines, elapsed_s))
    if paced and believed >= 1 and believed <= 1 + _DEAD_BAND and is_as_law:
        # The law is right as far as steps can say. What once looked quicker is forgotten.
        return None if before is None else _learned(before, 1.0, shown.num_engines, elapsed_s)
    # An engine that is idle now and then looks slow by its steps. It never looks quick.
    if shown.most > believed and (before is not None or paced):
        return _kept_room(before, _learned(before, shown.most, shown.num_engines, elapsed_s))
    return None


def _kept_room(before: ClassCapacity | None, learned: ClassCapacity) -> ClassCapacity:
    """Returns what was learned of steps, which say nothing of whether room is short."""
    return replace(learned, is_room_short=before is not None and before.is_room_short)


def _learned(
    before: ClassCapacity | None, median: float, num_slices: int, elapsed_s: float
) -> ClassCapacity:
    elapsed_s = min(max(0.0, elapsed_s), WINDOW_S)
    num_new = num_slices * elapsed_s / WINDOW_S
    if before is None:
        return ClassCapacity(median, num_new)
    share = elapsed_s / (elapsed_s + _MEMORY_S) if before.confidence >= 1 else 0.5
    factor = before.factor + share * (median - before.factor)
    return ClassCapacity(factor, before.num_observations + num_new)
