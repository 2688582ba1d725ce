"""How much of the profile's law slices really carry: learned where they can carry no more. Pure.

A slice that is saturated shows its capacity: what it does in a second, in work by the law (uncached
prompt tokens and output tokens), is all that it can do. Divided by what the law says it is the
*factor* of the slice. A slice is saturated when work waits in front of full engines, or when its
steps are longer than planned for and it runs about as many sequences as the law allows at that.

Below saturation the law is refitted from step times. A step as long as an engine's would be, by the
law, with the sequences and prompt tokens that it has is how fast the engine is (its *pace*), and
what it could carry at that pace within the objective is its factor, where that is more than was
known. So a profile that is too pessimistic is corrected without ever filling a slice. Steps that
are little shorter than the law has them say that it is right, since rates scatter. Where slices
were full although their steps were short, room ran out and not time (KV caches do before sequences
do): pace then says nothing. Pace alone takes all of the law for as wrong, and says too little where
its base time is right; looks at different loads tell the two apart (`refitted_law`), and the larger
of both counts. An engine that is idle now and then looks slow by its steps and never
quick, so pace raises a factor. That keeps the highest of what was seen, which with many slices is
hardly above the mean. A few slices lower it again, to the law's at least, as long as they run about
as many sequences as the law allows and so are never idle.

What counts for a class is the median of its slices, so that one slow slice of ten is reported and
not learned. It counts the more the more was seen, and within bounds. It is kept until something
else is seen: while nothing is saturated nobody knows better. A slice that carries more than that
within the objective proves that at once. Time comes in.
"""

import hashlib
import math
import statistics
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autoscaling.policy.memory import CapacityRecord, LearnedRecord
from autoscaling.policy.profiles import Profiles
from autoscaling.policy.refitted_law import SEQUENCES_FOR_PACE, WINDOW_S, LawFit
from autoscaling.policy.rules import Rules
from autoscaling.records import ModelLoad
from serving.domain.capacity.engine_rates import EngineRate
from serving.domain.capacity.slice_profile import CapacityProfile

LEAST_FACTOR, MOST_FACTOR = 1 / 3, 3.0
# From so many observations on what is learned counts whole.
_OBSERVATIONS_NEEDED = 8.0
# In so many seconds of saturation what was learned before loses two thirds of its weight.
_MEMORY_S = 120.0
# For so much of the window engines have to have been full.
_FULL_RATIO = 0.9
# With fewer of the sequences that the law allows, steps are long for another reason than load.
_LEAST_SEQUENCES = 0.5
# The median of more slices than these hardly scatters.
_FEW = 4
# A slice is slow that carries less than this of what others of its class do, if there are others.
_SLOW, _OTHERS_NEEDED = 0.7, 3
# With less of a step for sequences and their prompts than this share, how long a full step takes is
# a guess.
_SHARE_FOR_PACE = 0.3
# Rates of half a minute scatter by some per cent, and only steps that are quicker than that teach:
# without this the law crept up by the scatter, by 1.4 % where it was right.
_DEAD_BAND = 0.05
# Twice the law is the most that pace alone is believed: nobody has seen that there is room for it.
_MOST_BY_PACE = 2.0


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
    """What was learned of slices by one profile, by compute class.

    `slow` are of the last look, `fits` of the last hours; neither is kept over restarts.
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
            shown = _shown_by(name, load, profile, rules, classes.get(name))
            slow += shown.slow
            engines = [each for each in load.engines if each.compute_class == name]
            fits[name] = fits.get(name, LawFit()).seen(elapsed_s, engines, profile)
            if shown.paced:
                fitted = _fitted_factor(fits[name], engines, profile, rules)
                shown = replace(shown, most=max(shown.most, fitted))
            learned = _learned_from(shown, classes.get(name), elapsed_s)
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
        return LearnedRecord(profile_key=self.profile_key, classes=classes)


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
        name: ClassCapacity(_bounded(each.factor), each.num_observations, each.is_room_short)
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


def paced_factor(rate: EngineRate, profile: CapacityProfile, rules: Rules) -> float | None:
    """Returns the share of the law that an engine could carry at the planned pace, by its steps.

    Its steps are so many times as long as the law has them for what is in them. By a law with all
    coefficients so many times as large it carries that. Where steps are longer than by the law, it
    may be that only what is in them takes longer: that carries less, and as little is what counts.
    `None` where too little is in its steps to say, or even an idle engine so slow would not keep to
    the objective.
    """
    if rate.step_s <= 0:
        return None
    # The law's time for what is in a step: of sequences, and of prompt tokens.
    work_s = rate.step_s * profile.work_s(rate.prompt_tokens_per_s, rate.output_tokens_per_s)
    if rate.num_running < SEQUENCES_FOR_PACE or work_s < _SHARE_FOR_PACE * (
        profile.base_s + work_s
    ):
        return None
    times = rate.step_s / (profile.base_s + work_s)
    planned_s = rules.objectives.tpot_s * rules.tpot_margin
    tokens = rate.prompt_tokens_per_s, rate.output_tokens_per_s
    # Steps that are so many times longer, or a time that is so many times shorter, are the same.
    at_pace = profile.max_requests_per_s(*tokens, planned_s / times) / times
    by_law = profile.max_requests_per_s(*tokens, planned_s)
    if at_pace <= 0 or by_law <= 0:
        return None
    factor = at_pace / by_law
    if times > 1:
        factor = min(factor, work_s / (rate.step_s - profile.base_s))
    return min(_bounded(factor), _MOST_BY_PACE)


def _fitted_factor(
    fit: LawFit, engines: Sequence[EngineRate], profile: CapacityProfile, rules: Rules
) -> float:
    """Returns the share of the law that a slice carries at the planned pace, by the fitted one."""
    tokens = (
        sum(each.prompt_tokens_per_s for each in engines),
        sum(each.output_tokens_per_s for each in engines),
    )
    planned_s = rules.objectives.tpot_s * rules.tpot_margin
    by_law = profile.max_requests_per_s(*tokens, planned_s)
    if by_law <= 0 or math.isinf(by_law):
        return 0.0
    fitted = fit.law(profile, planned_s).max_requests_per_s(*tokens, planned_s)
    return min(_bounded(fitted / by_law), _MOST_BY_PACE)


@dataclass(frozen=True, slots=True)
class _Shown:
    """What the engines of a class show in one look.

    `saturated` are the factors of those that can do no more, `paced` of those whose steps say
    something, both by engine. `most` is the median of these, or of what the `num_engines` with
    work do carry, where that is more; 0 of none. `are_busy` says that most of the paced are never
    idle, `is_room_short` that the saturated had steps shorter than planned.
    """

    saturated: Mapping[str, float]
    paced: Mapping[str, float]
    most: float
    num_engines: int
    are_busy: bool
    is_room_short: bool
    slow: Sequence[SlowSlice]


def _shown_by(
    name: str,
    load: ModelLoad,
    profile: CapacityProfile,
    rules: Rules,
    before: ClassCapacity | None,
) -> _Shown:
    """Returns what the engines of class `name` show, of which `before` is known."""
    engines = [each for each in load.engines if each.compute_class == name]
    carried = {
        each.engine_id: factor
        for each in engines
        if (factor := carried_factor(each, profile, rules)) is not None
    }
    saturated = {
        each.engine_id: carried[each.engine_id]
        for each in engines
        if each.engine_id in carried and _is_saturated(each, load, profile, rules)
    }
    is_short = before is not None and before.is_room_short
    paced = {
        each.engine_id: factor
        for each in engines
        if not is_short
        and each.engine_id not in saturated
        and (factor := paced_factor(each, profile, rules)) is not None
    }
    median, slow = _of_most(name, saturated | paced)
    return _Shown(
        saturated,
        paced,
        most=max(median, statistics.median(carried.values() or [0.0])),
        num_engines=len(carried),
        are_busy=_are_busy(engines, paced, profile, rules),
        is_room_short=_is_room_short(engines, saturated, rules) if saturated else is_short,
        slow=slow,
    )


def _learned_from(
    shown: _Shown, before: ClassCapacity | None, elapsed_s: float
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


def _is_room_short(
    engines: Iterable[EngineRate], saturated: Mapping[str, float], rules: Rules
) -> bool:
    """Whether most of the saturated engines have steps that are shorter than planned."""
    planned_s = rules.objectives.tpot_s * rules.tpot_margin
    short = sum(each.step_s < planned_s for each in engines if each.engine_id in saturated)
    return 2 * short > len(saturated)


def _of_most(name: str, factors: Mapping[str, float]) -> tuple[float, list[SlowSlice]]:
    """Returns the median, 0 of none, and those that are slow beside it."""
    median = statistics.median(factors.values()) if factors else 0.0
    return median, list(_slow(name, factors, median))


def _is_saturated(
    rate: EngineRate, load: ModelLoad, profile: CapacityProfile, rules: Rules
) -> bool:
    if load.num_waiting > 0 and load.full_ratio >= _FULL_RATIO:
        return True
    planned_s = rules.objectives.tpot_s * rules.tpot_margin
    if rate.step_s < planned_s:
        return False
    return _is_busy(rate, profile, rules)


def _is_busy(rate: EngineRate, profile: CapacityProfile, rules: Rules) -> bool:
    """Whether an engine runs about as many sequences as the law allows within the objective."""
    planned_s = rules.objectives.tpot_s * rules.tpot_margin
    times = profile.max_requests_per_s(
        rate.prompt_tokens_per_s, rate.output_tokens_per_s, planned_s
    )
    allowed = min(profile.max_num_seqs, times * rate.output_tokens_per_s * planned_s)
    return rate.num_running >= _LEAST_SEQUENCES * allowed


def _are_busy(
    engines: Iterable[EngineRate], paced: Container[str], profile: CapacityProfile, rules: Rules
) -> bool:
    """Whether engines that show their pace are busy, most of them."""
    are_busy = [_is_busy(each, profile, rules) for each in engines if each.engine_id in paced]
    return 2 * sum(are_busy) > len(are_busy)


def _learned(
    before: ClassCapacity | None, median: float, num_slices: int, elapsed_s: float
) -> ClassCapacity:
    elapsed_s = min(elapsed_s, WINDOW_S)
    num_new = num_slices * elapsed_s / WINDOW_S
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
