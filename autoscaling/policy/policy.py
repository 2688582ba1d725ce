"""The policy: what was measured, what exists and what was learned become the slices of each class.

The steps, each a pure function or a small memory of its own:

1. `forecast`       the work now, and by the time a slice ordered today would be ready
2. `demand`         the slices which that takes at the objectives, by `serving.domain.capacity`,
                    as far as slices were seen to keep to that law (`learned_capacity`)
                    and a little more while objectives are missed or caches are full
                    (`need.pressure`)
3. hold             the highest need of the last `drain_delay_s`: growth is at once, decline waits,
                    and there is none while work waits (`need.scale_down`) or such pressure lasts
4. `need.batches`   slices of their own for batches whose time runs out, without a floor
5. `class_history`  which classes are healthy, and what a useful hour of each costs
6. `portfolio`      the cheapest slices that meet the need and keep a floor when a group is lost
7. `bridges`        what others bring where slices end before their class replaces them
8. `horizons`       what classes that deliver later are asked for, for the need of that time
9. `targets`        additions at once; a slice goes only when what replaces it is ready

No clock, no chance, no I/O: production and the simulator call the same object with the same kind of
observation. A missing or stale load holds the last plan.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autoscaling.policy.bridges import bridged
from autoscaling.policy.class_history import ClassHistory
from autoscaling.policy.demand import (
    Demand,
    DemandInputs,
    UnreachableObjectiveError,
    backlog_demand,
    demand_of,
    num_at_once,
)
from autoscaling.policy.engine_failures import EngineFailures
from autoscaling.policy.forecast import Forecaster
from autoscaling.policy.horizons import AskedAhead, Horizon, ahead_words, asked_ahead
from autoscaling.policy.learned_capacity import learned_of_record, nothing_learned
from autoscaling.policy.memory import VERSION, PolicyRecord, slice_shape_of
from autoscaling.policy.need.batches import BatchCapacity, BatchInputs, BatchPatience
from autoscaling.policy.need.pressure import Pressure, pressure_reason
from autoscaling.policy.need.scale_down import (
    MOST_TURNS,
    NeedFloor,
    NeedTurns,
    why_nothing_may_go,
)
from autoscaling.policy.portfolio import ClassOption, Portfolio, safest_worth_buying
from autoscaling.policy.rules import Rules
from autoscaling.policy.targets import PlanInputs, plan_targets
from autoscaling.records import ModelLoad, Observation, Plan
from serving.domain.capacity.batch_lines import STEP_SHARE
from serving.domain.capacity.slice_profile import CapacityProfile
from serving.domain.compute_class import ComputeClass
from serving.domain.slice_lifecycle import WAITING, SliceState

# Of the mean demand, the most that is bought in addition to work off what waits.
_MOST_BACKLOG = 0.1
# A backlog is older than a slice takes to come after this at the earliest.
_LEAST_LEAD_S = 60.0
_MIXES_KEPT = 64
# What slices carry is told where it differs by more from the law.
_SAME_FACTOR = 0.02


class SlicewisePolicy:
    """The production policy for one model. See the module."""

    name = "slicewise"

    def __init__(
        self,
        profile: CapacityProfile,
        terms: Sequence[ComputeClass],
        rules: Rules,
        memory: PolicyRecord | None = None,
    ) -> None:
        """Takes the `memory` of an earlier policy of the model; `None`: there is none.

        Raises `ValueError` for no class, or two of one name.
        """
        names = [each.name for each in terms]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"compute classes are {names}; allowed: one or more, each once")
        self._profile = profile
        self._rules = rules
        learned = {} if memory is None else memory.classes
        self._classes = {
            each.name: ClassHistory.from_record(each, rules, learned[each.name])
            if each.name in learned
            else ClassHistory(each, rules)
            for each in terms
        }
        most_expensive = max(each.price for each in terms)
        self._shortage_usd_per_hour = rules.shortage_ratio * most_expensive
        self._known_mixes: dict[object, Portfolio] = {}
        self._forecaster = (
            Forecaster(self._cost)
            if memory is None
            else Forecaster.from_record(memory.forecast, self._cost)
        )
        self._failures = EngineFailures()
        self._learned_at_s: float | None = None
        self._busy_at_s: float | None = None
        # By the class for whose time they are; "" is the base.
        self._needs: defaultdict[str, deque[tuple[float, int]]] = defaultdict(deque)
        self._floor = NeedFloor()
        self._turns = NeedTurns()
        self._factor = 1.0
        self._pressure = Pressure()
        self._patience = BatchPatience()
        self._pressed_because: str | None = None
        self._added = 0.0
        self.learned = (
            nothing_learned(profile)
            if memory is None
            else learned_of_record(memory.learned, profile)
        )
        self._backlog_since_s: float | None = None
        self._surplus_since_s: dict[str, float] = {}

    def decide(self, observation: Observation) -> Plan:
        """The plan for `observation`."""
        now_s, load, fleet = observation.now_s, observation.load, observation.fleet
        for name, history in self._classes.items():
            losses = [each for each in fleet.losses if each.compute_class == name]
            history.observe(now_s, fleet.of_class(name), losses)
        self._failures.observe(now_s, fleet.losses)
        if load is None or now_s - load.at_s > self._rules.max_load_age_s:
            return self._hold(observation)
        self._learn(now_s, load)
        ready = Counter(s.compute_class for s in fleet.slices if s.state == SliceState.READY)
        num_ready = ready.total()
        self._factor = self.learned.factor(ready)
        self._look_at_pressure(now_s, load, num_ready)
        demand = self._demand(now_s, load, num_ready, self._leading(now_s)[0])
        needed = self._held_need(now_s, self._bounded(now_s, load, demand))
        need, stays = self._kept_need(now_s, load, needed, num_ready)
        floor = math.ceil(self._rules.floor_ratio * need)
        batch = self._batch_capacity(now_s, load, need, demand.mean)
        whole = min(need + batch.slices, self._rules.max_slices)
        reliable, options = self._options(now_s, observation)
        ideal = self._mix(whole, floor, demand.mean, options)
        lasting, missing = bridged(now_s, fleet, self._classes, reliable, ideal)
        safe = self._mix(whole, floor, demand.mean, lasting)
        ahead = self._ahead(now_s, load, num_ready, need, whole - need, safe, reliable)
        inputs = PlanInputs(
            now_s=now_s,
            fleet=fleet,
            classes=self._classes,
            prices={name: each.usd_per_useful_hour for name, each in self._classes.items()},
            need=whole,
            safe=safe,
            hoped=self._hoped(now_s, whole, floor, demand.mean, ideal, reliable),
            ahead=ahead,
            missing=missing,
            drain_delay_s=self._rules.drain_delay_s,
            kept=need - needed,
            kept_because=stays,
            notes="; ".join(filter(None, (self._carries, batch.words, *load.left_out))),
        )
        plan, self._surplus_since_s = plan_targets(
            inputs,
            self._surplus_since_s,
            self._arithmetic(now_s, load, demand, inputs, floor) + ahead_words(ahead),
        )
        alerts = (*load.late, *load.left_out, *map(str, self.learned.slow))
        return replace(plan, alerts=alerts)

    @property
    def _carries(self) -> str:
        """What slices were seen to carry, in words; nothing while the law is believed."""
        if abs(self._factor - 1) < _SAME_FACTOR:
            return ""
        return f"slices were seen to carry {self._factor:.2f} of their profile"

    def to_record(self, now_s: float) -> PolicyRecord:
        """Returns what a policy after this one is to know: the season, and its classes."""
        return PolicyRecord(
            version=VERSION,
            written_at_s=now_s,
            slice_shape=slice_shape_of(self._profile),
            forecast=self._forecaster.to_record(),
            learned=self.learned.to_record(),
            classes={name: each.to_record() for name, each in self._classes.items()},
        )

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

    def _learn(self, now_s: float, load: ModelLoad) -> None:
        if load.has_work:
            self._busy_at_s = now_s
        elapsed_s = 0.0 if self._learned_at_s is None else now_s - self._learned_at_s
        self._learned_at_s = now_s
        self.learned = self.learned.seen(elapsed_s, load, self._profile, self._rules)
        if load.late and load.requests_per_s <= self._forecaster.rate:
            return  # it is the least that there is, and no news
        self._forecaster.observe(
            load.at_s, load.requests_per_s, load.input_tokens_mean, load.output_tokens_mean
        )

    def _cost(self, input_tokens: float, output_tokens: float) -> float:
        """The slices that one request per second takes; 0 where none meets the objective."""
        one = DemandInputs(1.0, input_tokens, output_tokens)
        try:
            return demand_of(one, self._profile, self._rules).mean
        except UnreachableObjectiveError:
            return 0.0

    def _requests_per_s(self, slices: float) -> float:
        """The rate of requests, as long as they lately were, that is so much work."""
        cost = self._forecaster.slices_per_request_per_s
        return slices / cost if cost > 0 else self._forecaster.rate

    def _demand(
        self, now_s: float, load: ModelLoad, num_ready: int, leading: ClassHistory
    ) -> Demand:
        """The greater of what is needed now and what will be when `leading` could deliver."""
        then = self._forecaster.at(now_s, leading.lead_s, self._rules.forecast_share).safe
        rate = self._requests_per_s(max(self._forecaster.level, then))
        traffic = DemandInputs(rate, *self._forecaster.tokens)
        steady = demand_of(traffic, self._profile, self._rules, self._factor)
        # What is on engines beyond what they can run waits there.
        held = num_ready * num_at_once(traffic, self._profile, self._rules, self._factor)
        num_waiting = load.num_waiting + max(0.0, load.num_in_flight - held)
        backlog = backlog_demand(num_waiting, traffic, self._profile, self._rules, self._factor)
        most = self._most_backlog(now_s, load, steady.mean, leading, has_backlog=backlog > 0)
        return Demand(steady.mean, steady.spread, min(backlog, most), self._added)

    def _look_at_pressure(self, now_s: float, load: ModelLoad, num_ready: int) -> None:
        """Notes what shows that slices have too much to do now, and what is added for it."""
        traffic = DemandInputs(self._forecaster.rate, *self._forecaster.tokens)
        mean = demand_of(traffic, self._profile, self._rules, self._factor).mean
        self._pressed_because = pressure_reason(load, mean, num_ready)
        self._added = self._pressure.added_slices(now_s, mean, self._pressed_because)

    def _most_backlog(
        self,
        now_s: float,
        load: ModelLoad,
        mean: float,
        leading: ClassHistory,
        *,
        has_backlog: bool,
    ) -> float:
        """Returns the most slices that are bought to work off what waits.

        What is on its way will have worked off most of it before a slice asked for now is ready.
        It has not where there is a backlog for longer than that: then it may be as many times more.
        """
        if not has_backlog:
            self._backlog_since_s = None
            return 0.0
        if self._backlog_since_s is None:
            self._backlog_since_s = now_s
        age_s = max(now_s - self._backlog_since_s, load.oldest_wait_s)
        lead_s = max(leading.lead_s, _LEAST_LEAD_S)
        return max(1.0, _MOST_BACKLOG * mean) * max(1.0, age_s / lead_s)

    def _leading(self, now_s: float) -> list[ClassHistory]:
        """The classes by whose lead times to plan ahead: the healthy ones, the soonest first."""
        usable = [each for each in self._classes.values() if each.terms.max_slices > 0]
        healthy = [each for each in usable if each.is_healthy(now_s)] or usable
        return sorted(healthy, key=lambda each: (each.lead_s, each.terms.name))

    def _ahead(
        self,
        now_s: float,
        load: ModelLoad,
        num_ready: int,
        need: int,
        for_batches: int,
        base: Portfolio,
        options: list[ClassOption],
    ) -> Mapping[str, AskedAhead]:
        """Returns what classes that deliver later are asked for now, beyond the `base`.

        What is full has no part in what grows from one portfolio to the next, nor have slices that
        are there `for_batches`.
        """
        later = []
        for each in self._leading(now_s)[1:]:
            demand = self._demand(now_s, load, num_ready, each)
            name, lead_s = each.terms.name, each.lead_s
            then = self._held_need(now_s, self._bounded(now_s, load, demand), name)
            if then > need:
                floor = math.ceil(self._rules.floor_ratio * then)
                whole = min(then + for_batches, self._rules.max_slices)
                later.append(
                    Horizon(name, lead_s, then, self._mix(whole, floor, demand.mean, options))
                )
        return asked_ahead(base, later)

    def _batch_capacity(
        self, now_s: float, load: ModelLoad, need: int, busy: float
    ) -> BatchCapacity:
        """Returns the slices that batch work gets of its own, by when it is due.

        Gateways let batch work make steps as long as `STEP_SHARE` says. That is less than what
        `busy` slices are planned with, so that others take more of them beside it.
        """
        due = load.batch_due
        given, taken = due.input_tokens_mean, due.output_tokens_mean
        of_lines = (
            load.input_tokens_mean if given is None else given,
            load.output_tokens_mean if taken is None else taken,
        )
        tpot_s = self._rules.objectives.tpot_s
        planned_s, beside_s = tpot_s * self._rules.tpot_margin, tpot_s * STEP_SHARE
        if beside_s <= self._profile.base_s:
            beside_s = planned_s
        of_others = self._forecaster.tokens
        alone = self._profile.max_requests_per_s(*of_others, planned_s)
        beside = self._profile.max_requests_per_s(*of_others, beside_s)
        carries = self._profile.max_requests_per_s(*of_lines, beside_s)
        return self._patience.capacity(
            BatchInputs(
                now_s=now_s,
                due=due,
                requests_per_s=self._factor * carries if math.isfinite(carries) else 0.0,
                need=need,
                busy=busy * alone / beside if 0 < beside < math.inf else busy,
                lead_s=self._leading(now_s)[0].lead_s,
            )
        )

    def _kept_need(
        self, now_s: float, load: ModelLoad, needed: int, num_ready: int
    ) -> tuple[int, str | None]:
        """Returns the slices to plan for, and why no fewer; `None` where it is what is needed."""
        stays = why_nothing_may_go(load, self._rules) or self._pressed_because
        kept = min(self._floor.raised(needed, num_ready, stays), self._rules.max_slices)
        need = self._turns.bounded(now_s, kept)
        if need > kept:
            return need, f"it has turned {MOST_TURNS} times in an hour, or would"
        return need, stays

    def _bounded(self, now_s: float, load: ModelLoad, demand: Demand) -> int:
        rules = self._rules
        wanted = demand.whole
        if load.has_work or (
            self._busy_at_s is not None and now_s - self._busy_at_s < rules.idle_s
        ):
            wanted = max(wanted, 1)
        return min(max(wanted, rules.min_slices), rules.max_slices)

    def _held_need(self, now_s: float, need: int, name: str = "") -> int:
        """The highest need of the last `drain_delay_s`, from a queue of falling needs."""
        needs = self._needs[name]
        while needs and needs[-1][1] <= need:
            needs.pop()
        needs.append((now_s, need))
        while needs[0][0] < now_s - self._rules.drain_delay_s:
            needs.popleft()
        return needs[0][1]

    def _options(
        self, now_s: float, observation: Observation
    ) -> tuple[list[ClassOption], list[ClassOption]]:
        """Returns what can be relied on, and what there is if every class delivered."""
        safe = []
        ideal = []
        for name, each in self._classes.items():
            terms, slices = each.terms, observation.fleet.of_class(name)
            held = sum(
                1
                for view in slices
                if view.state not in WAITING and view.state != SliceState.DRAINING
            )
            option = ClassOption(
                name,
                each.usd_per_useful_hour,
                terms.min_slices,
                terms.max_slices,
                terms.lost_with,
                each.outages_per_hour,
                each.lead_s / 3600,
            )
            ideal.append(option)
            if not each.is_healthy(now_s):
                most = min(terms.max_slices, max(held, terms.min_slices))
                option = replace(option, at_most=most)
            safe.append(option)
        return safe, ideal

    def _hoped(
        self,
        now_s: float,
        need: int,
        floor: int,
        demand: float,
        ideal: Portfolio,
        reliable: Sequence[ClassOption],
    ) -> Mapping[str, int]:
        """Returns how many slices each class is to have if it delivers.

        These are the `ideal` ones, if all classes do. That has none of a class that is dearer than
        others which back off as well: it would never be asked again, and never be seen to be back.
        So it is asked for what it would have if it were the only one of them to deliver.
        """
        hoped = dict(ideal.slices)
        for place, option in enumerate(reliable):
            name, terms = option.name, self._classes[option.name].terms
            if hoped[name] == 0 and not self._classes[name].is_healthy(now_s):
                options = list(reliable)
                options[place] = replace(option, at_most=terms.max_slices)
                hoped[name] = self._mix(need, floor, demand, options).slices[name]
        return hoped

    def _mix(self, need: int, floor: int, demand: float, options: list[ClassOption]) -> Portfolio:
        """The portfolio worth buying, kept because most decisions ask for the same one again."""
        # Rounded: differences that hardly change the portfolio need no other one.
        asked = (need, floor, round(demand, 1), *(_rounded(option) for option in options))
        if asked not in self._known_mixes:
            if len(self._known_mixes) >= _MIXES_KEPT:
                self._known_mixes.clear()
            self._known_mixes[asked] = safest_worth_buying(
                need, floor, round(demand, 1), options, self._shortage_usd_per_hour
            )
        return self._known_mixes[asked]

    def _next_slice_at_s(self, observation: Observation) -> float | None:
        return next_slice_at_s(observation.now_s, self._classes, observation)

    def _arithmetic(
        self, now_s: float, load: ModelLoad, demand: Demand, inputs: PlanInputs, floor: int
    ) -> str:
        lead = self._leading(now_s)[0]
        forecast = self._forecaster.at(now_s, lead.lead_s, self._rules.forecast_share)
        notes = [inputs.notes] if inputs.notes else []
        if inputs.kept_because is not None:
            notes.append(f"none goes while {inputs.kept_because}")
        rates = (
            f"{load.requests_per_s:.2f} requests/s,"
            f" {self._requests_per_s(forecast.safe):.2f} in {lead.lead_s:.0f} s"
            f" by {forecast.method}: {demand.arithmetic}"
        )
        need = f"need {inputs.need}, floor {floor}"
        return "; ".join((rates, need, *notes)) + self._failures.words


def _rounded(option: ClassOption) -> ClassOption:
    return replace(
        option,
        usd_per_hour=round(option.usd_per_hour, 2),
        outages_per_hour=round(option.outages_per_hour, 2),
        lead_h=round(option.lead_h, 3),
    )


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
