"""How much of the profile's law slices show that they carry, in one look. Pure.

A slice that is saturated shows its capacity: what it does in a second, in work by the law (uncached
prompt tokens and output tokens), is all that it can do. Divided by what the law says it is the
*factor* of the slice. A slice is saturated when work waits in front of full engines, or when its
steps are longer than planned for and it runs about as many sequences as the law allows at that.

Below saturation steps say something. A step as long as an engine's would be, by the law, with the
sequences and prompt tokens that it has is how fast the engine is (its *pace*), and what it could
carry at that pace within the objective is its factor. So a profile that is too pessimistic is
corrected without ever filling a slice. Where slices were full although their steps were short, room
ran out and not time (KV caches do before sequences do): pace then says nothing. Pace alone takes
all of the law for as wrong, and says too little where its base time is right; looks at different
loads tell the two apart (`refitted_law`), and the larger of both counts.
"""

import math
import statistics
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from autoscaling.policy.capacity.refitted_law import SEQUENCES_FOR_PACE, LawFit
from autoscaling.policy.rules import Rules
from autoscaling.records import ModelLoad
from serving.domain.capacity.engine_rates import EngineRate
from serving.domain.capacity.slice_profile import CapacityProfile

LEAST_FACTOR, MOST_FACTOR = 1 / 3, 3.0
# For so much of the window engines have to have been full.
_FULL_RATIO = 0.9
# With fewer of the sequences that the law allows, steps are long for another reason than load.
_LEAST_SEQUENCES = 0.5
# A slice is slow that carries less than this of what others of its class do, if there are others.
_SLOW, _OTHERS_NEEDED = 0.7, 3
# With less of a step for sequences and their prompts than this share, how long a full step takes is
# a guess.
_SHARE_FOR_PACE = 0.3
# Twice the law is the most that pace alone is believed: nobody has seen that there is room for it.
_MOST_BY_PACE = 2.0


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
class Shown:
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


def shown_by(
    name: str,
    load: ModelLoad,
    profile: CapacityProfile,
    rules: Rules,
    *,
    was_room_short: bool,
) -> Shown:
    """Returns what the engines of class `name` show.

    `was_room_short` says that room ran out before time did when they were last full.
    """
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
    paced = {
        each.engine_id: factor
        for each in engines
        if not was_room_short
        and each.engine_id not in saturated
        and (factor := paced_factor(each, profile, rules)) is not None
    }
    median, slow = _of_most(name, saturated | paced)
    return Shown(
        saturated,
        paced,
        most=max(median, statistics.median(carried.values() or [0.0])),
        num_engines=len(carried),
        are_busy=_are_busy(engines, paced, profile, rules),
        is_room_short=_is_room_short(engines, saturated, rules) if saturated else was_room_short,
        slow=slow,
    )


def carried_factor(rate: EngineRate, profile: CapacityProfile, rules: Rules) -> float | None:
    """Returns the share of the law that an engine carries, at its pace or the planned one.

    By the law a slice could do so many times what this one does in a second, in steps as long as
    its own, or as are planned for where its own are shorter. `None` for an engine without work.
    """
    step_s = max(rate.step_s, rules.planned_tpot_s)
    if rate.prompt_tokens_per_s + rate.output_tokens_per_s <= 0 or step_s <= profile.base_s:
        return None
    times = profile.max_requests_per_s(rate.prompt_tokens_per_s, rate.output_tokens_per_s, step_s)
    return bounded(1 / times)


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
    planned_s = rules.planned_tpot_s
    tokens = rate.prompt_tokens_per_s, rate.output_tokens_per_s
    # Steps that are so many times longer, or a time that is so many times shorter, are the same.
    at_pace = profile.max_requests_per_s(*tokens, planned_s / times) / times
    by_law = profile.max_requests_per_s(*tokens, planned_s)
    if at_pace <= 0 or by_law <= 0:
        return None
    factor = at_pace / by_law
    if times > 1:
        factor = min(factor, work_s / (rate.step_s - profile.base_s))
    return min(bounded(factor), _MOST_BY_PACE)


def fitted_factor(
    fit: LawFit, engines: Sequence[EngineRate], profile: CapacityProfile, rules: Rules
) -> float:
    """Returns the share of the law that a slice carries at the planned pace, by the fitted one."""
    tokens = (
        sum(each.prompt_tokens_per_s for each in engines),
        sum(each.output_tokens_per_s for each in engines),
    )
    planned_s = rules.planned_tpot_s
    by_law = profile.max_requests_per_s(*tokens, planned_s)
    if by_law <= 0 or math.isinf(by_law):
        return 0.0
    fitted = fit.law(profile, planned_s).max_requests_per_s(*tokens, planned_s)
    return min(bounded(fitted / by_law), _MOST_BY_PACE)


def _of_most(name: str, factors: Mapping[str, float]) -> tuple[float, list[SlowSlice]]:
    """Returns the median, 0 of none, and those that are slow beside it."""
    median = statistics.median(factors.values()) if factors else 0.0
    return median, list(_slow(name, factors, median))


def _slow(name: str, factors: Mapping[str, float], median: float) -> Iterable[SlowSlice]:
    if len(factors) < _OTHERS_NEEDED:
        return ()
    return [
        SlowSlice(engine_id, name, factor, median)
        for engine_id, factor in sorted(factors.items())
        if factor < _SLOW * median
    ]


def _is_saturated(
    rate: EngineRate, load: ModelLoad, profile: CapacityProfile, rules: Rules
) -> bool:
    if load.num_waiting > 0 and load.full_ratio >= _FULL_RATIO:
        return True
    return rate.step_s >= rules.planned_tpot_s and _is_busy(rate, profile, rules)


def _is_busy(rate: EngineRate, profile: CapacityProfile, rules: Rules) -> bool:
    """Whether an engine runs about as many sequences as the law allows within the objective."""
    planned_s = rules.planned_tpot_s
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


def _is_room_short(
    engines: Iterable[EngineRate], saturated: Mapping[str, float], rules: Rules
) -> bool:
    """Whether most of the saturated engines have steps that are shorter than planned."""
    short = sum(
        each.step_s < rules.planned_tpot_s for each in engines if each.engine_id in saturated
    )
    return 2 * short > len(saturated)


def bounded(factor: float) -> float:
    """The factor, within the bounds of what is believed at all."""
    return min(max(factor, LEAST_FACTOR), MOST_FACTOR)
