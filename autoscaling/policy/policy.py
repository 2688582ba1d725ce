"""The policy: what was measured, what exists and what was learned become the slices of each class.

The steps, each a pure function or a small memory of its own:

1. `forecast`       the work now, and by the time a slice ordered today would be ready
2. `demand`         the slices which that takes at the objectives, by `serving.domain.capacity`,
                    as far as slices were seen to keep to that law (`learned_capacity`)
                    and a little more while objectives are missed or caches are full
                    (`need.pressure`)
3. hold             the highest need of the last `drain_delay_s`: growth is at once, decline waits,
                    and there is none while work waits (`need.scale_down`) or such pressure lasts;
                    of what is beyond the work of now, as much as service takes (`need.reserve`)
4. `need.batches`   slices of their own for batches whose time runs out, without a floor
5. `class_history`  which classes are healthy, and what a useful hour of each costs
   `quotas`         what other models leave this one of the chips that they share
6. `mix.portfolio`  the cheapest slices that meet the need and keep a floor when a group is lost,
                    up to a price (`mix.floors`)
7. `mix.bridges`    what others bring where slices end before their class replaces them
8. `mix.horizons`   what classes that deliver later are asked for, for the need of that time
   `mix.stopgaps`   what sooner ones bring until slower ones of the portfolio deliver
9. `targets`        additions at once; a slice goes only when what replaces it is ready

No clock, no chance, no I/O: production and the simulator call the same object with the same kind of
observation. A missing or stale load holds the last plan. Times are those of `steady_time`, which
never run back.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from autoscaling.policy.capacity.learned_capacity import LearnedCapacity
from autoscaling.policy.classes.class_history import ClassHistory
from autoscaling.policy.engine_failures import EngineFailures
from autoscaling.policy.memory import VERSION, PolicyRecord, slice_shape_of
from autoscaling.policy.mix.bridges import bridged
from autoscaling.policy.mix.floors import floor_within
from autoscaling.policy.mix.horizons import AskedAhead, Horizon, ahead_words, asked_ahead
from autoscaling.policy.mix.mixes import MixCover, ModelMixes
from autoscaling.policy.mix.portfolio import ClassOption, Portfolio
from autoscaling.policy.mix.stopgaps import stopgaps
from autoscaling.policy.need.model_need import ModelNeed, Needed
from autoscaling.policy.profiles import Profiles
from autoscaling.policy.quotas.records import (
    NOTHING_SHARED,
    ChipShare,
    SlicesAsked,
    chips_of,
)
from autoscaling.policy.rules import Rules
from autoscaling.policy.steady_time import SteadyTime
from autoscaling.policy.targets import PlanInputs, plan_targets, without_falls
from autoscaling.records import Observation, Plan
from serving.domain.capacity.slice_profile import CapacityProfile
from serving.domain.compute_class import ComputeClass
from serving.domain.slice_lifecycle import SliceState


@dataclass(frozen=True, slots=True)
class _Question:
    """What a decision has come to when quotas are shared; not `needed`: the last plan stands."""

    observation: Observation
    needed: Needed | None = None
    floor: float = 0


class SlicewisePolicy:
    """The production policy for one model. See the module."""

    name = "slicewise"

    def __init__(
        self,
        profile: CapacityProfile,
        terms: Sequence[ComputeClass],
        rules: Rules,
        memory: PolicyRecord | None = None,
        profiles: Mapping[str, CapacityProfile] = MappingProxyType({}),
    ) -> None:
        """Takes the `memory` of an earlier policy of the model; `None`: there is none.

        `profiles` are of classes whose slices are of another shape than `profile` is of.
        Raises `ValueError` for no class, or two of one name.
        """
        names = [each.name for each in terms]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"compute classes are {names}; allowed: one or more, each once")
        self._profiles = Profiles(profile, profiles)
        self._rules = rules
        self._classes = {
            each.name: ClassHistory.from_record(
                each, rules, memory.classes[each.name], memory.written_at_s
            )
            if memory is not None and each.name in memory.classes
            else ClassHistory(each, rules)
            for each in terms
        }
        self._need = ModelNeed(self._profiles, rules, memory)
        self._mixes = ModelMixes(
            rules, self._classes, self._need.weight, has_shapes=bool(self._profiles.by_class)
        )
        self._failures = EngineFailures()
        self._surplus_since_s: dict[str, float] = {}
        self._planned_at_s: float | None = None
        self._loaded_at_s: float | None = None  # when a load was looked at last
        self._question: _Question | None = None
        self._time = SteadyTime()

    @property
    def learned(self) -> LearnedCapacity:
        """What slices were seen to carry."""
        return self._need.learned

    def decide(self, observation: Observation, share: ChipShare = NOTHING_SHARED) -> Plan:
        """The plan for `observation`, within what other models leave this one."""
        self.ask(observation)
        return self.plan(share)

    def ask(self, observation: Observation) -> SlicesAsked | None:
        """Takes in what is observed; returns what quotas are asked for. `plan` comes next.

        Returns `None` where the last plan stands, whatever the share.
        """
        observation = self._time.observed(observation)
        now_s, load, fleet = observation.now_s, observation.load, observation.fleet
        if not fleet.late:  # else nobody knows whether what waited still waits
            for name, history in self._classes.items():
                losses = [each for each in fleet.losses if each.compute_class == name]
                history.observe(now_s, fleet.of_class(name), losses)
            self._failures.observe(now_s, fleet.losses)
        if load is None or now_s - load.at_s > self._rules.max_load_age_s:
            self._question = _Question(observation)
            return None
        self._skip(self._unseen_s(now_s))
        ready = Counter(s.compute_class for s in fleet.slices if s.state == SliceState.READY)
        lead_s = self._leading(now_s)[0].lead_s
        needed = self._need.look(now_s, load, ready, lead_s, stays=fleet.late)
        floor = self._floor_of(needed.need)
        self._question = _Question(observation, needed, floor)
        reliable, ideal = self._mixes.options(now_s, fleet, NOTHING_SHARED)
        price_ratio = self._rules.floor_price_ratio
        held, leaving = chips_of(fleet.slices)
        return SlicesAsked(
            pressing=needed.pressing,
            need=needed.need,
            whole=needed.whole,
            floor=floor_within(price_ratio, needed.whole, floor, reliable),
            reliable=reliable,
            ideal=ideal,
            held=held,
            leaving=leaving,
            max_slices=self._rules.max_slices,
        )

    def _unseen_s(self, now_s: float) -> float:
        """Returns for how long no load was known until now; an older one is no load."""
        before_s, self._loaded_at_s = self._loaded_at_s, now_s
        return 0.0 if before_s is None else max(0.0, now_s - before_s - self._rules.max_load_age_s)

    def _skip(self, unseen_s: float) -> None:
        """Lets time that nobody has seen count for nothing in what has to last before slices go."""
        if unseen_s > 0:
            self._need.skip(unseen_s)
            self._surplus_since_s = _later(self._surplus_since_s, unseen_s)
            if self._planned_at_s is not None:
                self._planned_at_s += unseen_s

    def plan(self, share: ChipShare) -> Plan:
        """The plan for what was observed last, with this `share` of what models have together."""
        assert self._question is not None  # `ask` comes first
        observation, needed = self._question.observation, self._question.needed
        now_s, fleet, floor = observation.now_s, observation.fleet, self._question.floor
        for name, history in self._classes.items():
            history.allow(now_s, share.most.get(name), is_full=name in share.full)
        if needed is None:
            return self._time.told(self._hold(observation))
        reliable, options = self._mixes.options(now_s, fleet, share)
        cover = MixCover(needed.whole, floor, needed.mean)
        rule = floor_within(self._rules.floor_price_ratio, cover.need, floor, reliable)
        ideal = self._mixes.mix(cover, options)
        lasting, missing = bridged(now_s, fleet, self._classes, reliable, ideal)
        safe = self._mixes.mix(cover, lasting)
        weights = {option.name: option.weight for option in options}
        ahead = self._ahead(now_s, needed, safe, reliable)
        inputs = PlanInputs(
            now_s=now_s,
            fleet=fleet,
            classes=self._classes,
            prices={name: each.usd_per_useful_hour for name, each in self._classes.items()},
            need=cover.need,
            safe=safe,
            hoped=self._mixes.hoped(now_s, cover, ideal, reliable, options),
            ahead=ahead,
            stopgaps=stopgaps(
                now_s,
                fleet,
                self._classes,
                _beside(reliable, ahead),
                safe.slices,
                # What a high need of some minutes ago asks for can wait.
                min(needed.need, needed.demand.slices),
            ),
            missing=missing,
            max_slices=self._rules.max_slices,
            given_up=share.given_up,
            weights=weights,
            drain_delay_s=self._rules.drain_delay_s,
            kept=needed.need - needed.least,
            kept_because=needed.stays,
            notes="; ".join(
                filter(
                    None,
                    (
                        _floor_words(floor, rule),
                        *needed.notes,
                        *self._shape_words(),
                        share.words,
                    ),
                )
            ),
        )
        plan, since_s = plan_targets(
            inputs,
            self._surplus_since_s,
            self._arithmetic(now_s, needed, inputs, floor) + ahead_words(ahead),
        )
        load = needed.load
        self._note_surplus(now_s, since_s, is_late=bool(load.late or fleet.late))
        if fleet.late:
            plan = without_falls(plan, fleet)
        late = (*load.late, *load.left_out, *filter(None, (fleet.late,)))
        plan = replace(plan, alerts=(*late, *map(str, self.learned.slow)))
        return self._time.told(plan)

    def _note_surplus(self, now_s: float, since_s: Mapping[str, float], *, is_late: bool) -> None:
        """Remembers since when classes have had a surplus.

        While a report is late none is seen, which does not say that there is none: that time counts
        for nothing. Else a gateway that stands still now and then would hold slices for ever.
        """
        elapsed_s = 0.0 if self._planned_at_s is None else now_s - self._planned_at_s
        self._planned_at_s = now_s
        unseen = _later(self._surplus_since_s, elapsed_s) if is_late else {}
        self._surplus_since_s = unseen | dict(since_s)

    def _shape_words(self) -> Iterator[str]:
        """What slices of other shapes count as."""
        for name in self._profiles.by_class:
            if name in self._classes:
                weight = self._need.weight(name)
                counts = f"counts as {weight:g}" if weight else "is slower than the objective"
                yield f"a slice of {name} {counts}"

    def to_record(self, now_s: float) -> PolicyRecord:
        """Returns what a policy after this one is to know: the season, and its classes."""
        record = PolicyRecord(
            version=VERSION,
            written_at_s=now_s,
            slice_shape=slice_shape_of(self._profiles),
            forecast=self._need.forecaster.to_record(),
            learned=self.learned.to_record(),
            reserve_share=self._need.reserve.share,
            busy_at_s=self._need.busy_at_s,
            classes={name: each.to_record() for name, each in self._classes.items()},
        )
        return self._time.recorded(record)

    def _hold(self, observation: Observation) -> Plan:
        load = observation.load
        age = "missing" if load is None else f"{observation.now_s - load.at_s:.0f} s old"
        return Plan(
            at_s=observation.now_s,
            targets={name: observation.fleet.targets.get(name, 0) for name in self._classes},
            next_slice_at_s=self._next_slice_at_s(observation),
            arithmetic=f"the load is {age}: the last plan stands",
            alerts=(f"the load is {age}; allowed: {self._rules.max_load_age_s:g} s",),
        )

    def _floor_of(self, need: int) -> float:
        """What is left of a need when a group is lost: whole slices, where all are of one shape."""
        floor = self._rules.floor_ratio * need
        return floor if self._profiles.by_class else math.ceil(floor)

    def _leading(self, now_s: float) -> list[ClassHistory]:
        """The classes by whose lead times to plan ahead: the healthy ones, the soonest first."""
        usable = [each for each in self._classes.values() if each.most_slices > 0]
        usable = usable or list(self._classes.values())
        healthy = [each for each in usable if each.is_healthy(now_s)] or usable
        return sorted(healthy, key=lambda each: (each.lead_s, each.terms.name))

    def _ahead(
        self, now_s: float, needed: Needed, base: Portfolio, options: list[ClassOption]
    ) -> Mapping[str, AskedAhead]:
        """Returns what classes that deliver later are asked for now, beyond the `base`.

        What is full has no part in what grows from one portfolio to the next, nor have slices that
        are there for batches.
        """
        later = []
        for each in self._leading(now_s)[1:]:
            name, lead_s = each.terms.name, each.lead_s
            then, mean = self._need.by(now_s, needed, lead_s, name)
            if then > needed.need:
                floor = self._floor_of(then)
                whole = min(then + needed.whole - needed.need, self._rules.max_slices)
                mix = self._mixes.mix(MixCover(whole, floor, mean), options)
                later.append(Horizon(name, lead_s, then, mix))
        return asked_ahead(base, later, {each.name: each.weight for each in options})

    def _next_slice_at_s(self, observation: Observation) -> float | None:
        return next_slice_at_s(observation.now_s, self._classes, observation)

    def _arithmetic(self, now_s: float, needed: Needed, inputs: PlanInputs, floor: float) -> str:
        notes = [inputs.notes] if inputs.notes else []
        if inputs.kept_because is not None:
            notes.append(f"none goes while {inputs.kept_because}")
        rates = self._need.rate_words(now_s, needed, self._leading(now_s)[0].lead_s)
        need = f"need {inputs.need}, floor {floor:g}"
        return "; ".join((rates, need, *notes)) + self._failures.words


def _later(since_s: Mapping[str, float], by_s: float) -> dict[str, float]:
    return {name: at_s + by_s for name, at_s in since_s.items()}


def _beside(
    options: Sequence[ClassOption], ahead: Mapping[str, AskedAhead]
) -> Sequence[ClassOption]:
    """Returns the options with the room that is left beside what is asked for ahead."""
    return [
        replace(each, at_most=each.at_most - ahead[each.name].count) if each.name in ahead else each
        for each in options
    ]


def _floor_words(floor: float, rule: float) -> str:
    """Why less is left than the rules' floor, in words; nothing while that is kept."""
    if rule >= floor:
        return ""
    return f"of the floor {rule:g} are kept at any rate, the rest by what it is worth"


def next_slice_at_s(
    now_s: float, classes: Mapping[str, ClassHistory], observation: Observation
) -> float | None:
    """Returns when the next slice is expected to be ready; `None` when none is on its way."""
    etas = [
        classes[each.compute_class].eta_s(each)
        for each in observation.fleet.slices
        if each.compute_class in classes
        and each.state not in (SliceState.READY, SliceState.DRAINING, SliceState.GONE)
    ]
    return max(now_s, min(etas)) if etas else None
