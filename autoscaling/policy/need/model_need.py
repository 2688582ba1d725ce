"""How many slices a model needs, before asking what exists: steps 1 to 4 of the policy.

Remembers what needs are made of: rates and lengths, what slices were seen to carry, the needs of
the last minutes. Asks nothing of compute classes but the time at which one delivers. Deterministic:
time comes in.
"""

import math
from collections import Counter, defaultdict
from dataclasses import dataclass

from autoscaling.policy.capacity.learned_capacity import learned_of_record, nothing_learned
from autoscaling.policy.demand import (
    Demand,
    DemandInputs,
    UnreachableObjectiveError,
    backlog_demand,
    demand_of,
    num_at_once,
)
from autoscaling.policy.forecast import Forecaster
from autoscaling.policy.memory import PolicyRecord
from autoscaling.policy.need.batches import BatchCapacity, BatchInputs, BatchPatience
from autoscaling.policy.need.held import HeldDemand, RecentWork
from autoscaling.policy.need.pressure import Pressure, pressure_reason
from autoscaling.policy.need.reserve import Reserve
from autoscaling.policy.need.scale_down import (
    MOST_TURNS,
    NeedFloor,
    NeedTurns,
    why_nothing_may_go,
)
from autoscaling.policy.profiles import Profiles
from autoscaling.policy.rules import Rules
from autoscaling.records import ModelLoad
from serving.domain.capacity.batch_lines import STEP_SHARE

# Of the mean demand, the most that is bought in addition to work off what waits.
_MOST_BACKLOG = 0.1
# A backlog is older than a slice takes to come after this at the earliest.
_LEAST_LEAD_S = 60.0
# What slices carry is told where it differs by more from the law.
_SAME_FACTOR = 0.02
# The name of what comes now among needs that are held: no class has it.
_NOW = "now"


@dataclass(frozen=True, slots=True)
class Needed:
    """The slices that `load` needs, and why; they are of the model's own shape.

    `demand` is what it takes now, or by when the soonest class delivers; `num_ready` slices are
    there. `mean` is what of the demand is no reserve, or a part of it that is kept. `pressing`
    slices are for the work that comes now, without what waits or is foreseen.
    `least` slices are the demand, held for a while, with as much of its reserve as is kept; `need`
    are those that are planned for, more of them because of `stays` (`None`: no reason); `whole` are
    those with the ones for batches. `notes` say what else they come of.
    """

    load: ModelLoad
    demand: Demand
    mean: float
    num_ready: float
    pressing: int
    least: int
    need: int
    whole: int
    stays: str | None
    notes: tuple[str, ...]


class ModelNeed:
    """The need of one model, looked at again and again."""

    def __init__(
        self, profiles: Profiles, rules: Rules, memory: PolicyRecord | None = None
    ) -> None:
        """Takes the `memory` of an earlier policy of the model; `None`: there is none."""
        self._profiles = profiles
        self._profile = profiles.own
        self._rules = rules
        self.forecaster = (
            Forecaster(self._cost)
            if memory is None
            else Forecaster.from_record(memory.forecast, self._cost)
        )
        self.learned = (
            nothing_learned(profiles)
            if memory is None
            else learned_of_record(memory.learned, profiles)
        )
        self._learned_at_s: float | None = None
        self.busy_at_s: float | None = None if memory is None else memory.busy_at_s
        """When there was work last; `None`: never."""
        # By the class for whose time they are; "" is the base.
        self._held: defaultdict[str, HeldDemand] = defaultdict(
            lambda: HeldDemand(rules.drain_delay_s)
        )
        self.reserve = Reserve(rules.late_ratio, 1.0 if memory is None else memory.reserve_share)
        self._work = RecentWork(rules.drain_delay_s)
        self._floor = NeedFloor()
        self._turns = NeedTurns()
        self._factor = 1.0
        self._pressure = Pressure()
        self._patience = BatchPatience()
        self._pressed_because: str | None = None
        self._added = 0.0
        self._backlog_since_s: float | None = None

    def skip(self, unseen_s: float) -> None:
        """Lets so long a time count for nothing in needs that are held: no load was known in it."""
        self._work.skip(unseen_s)
        for each in self._held.values():
            each.skip(unseen_s)

    def look(
        self, now_s: float, load: ModelLoad, ready: Counter[str], lead_s: float, stays: str = ""
    ) -> Needed:
        """Returns what `load` needs; `ready` slices are there by class.

        A slice that is asked for now of the soonest class serves after `lead_s`. `stays` says why
        the need may not fall; empty: the load decides.
        """
        self._learn(now_s, load)
        num_ready = sum(count * self.weight(name) for name, count in ready.items())
        self._factor = self.learned.factor(ready)
        self._look_at_pressure(now_s, load, num_ready)
        self.reserve.look(now_s, load)
        demand = self._demand(now_s, load, num_ready, lead_s)
        least = self._kept_demand(now_s, load, demand)
        mean = self.reserve.kept(demand.mean, self._work.slices)
        why = stays or why_nothing_may_go(load, self._rules) or self._pressed_because
        need, kept_because = self._kept_need(now_s, why, least, num_ready)
        batch = self._batch_capacity(now_s, load, need, mean, lead_s)
        whole = min(need + batch.slices, self._rules.max_slices)
        notes = tuple(
            filter(None, (self._carries, self.reserve.words, batch.words, *load.left_out))
        )
        pressing = min(need, self._kept_demand(now_s, load, self._pressing(), _NOW))
        return Needed(
            load, demand, mean, num_ready, pressing, least, need, whole, kept_because, notes
        )

    def weight(self, compute_class: str) -> float:
        """What a slice of a class carries of requests as they lately were; see `Profiles`."""
        step_s = self._rules.planned_tpot_s
        return self._profiles.weight(compute_class, self.forecaster.tokens, step_s)

    def by(self, now_s: float, now: Needed, lead_s: float, name: str) -> tuple[int, float]:
        """Returns the need by when class `name` delivers, and its mean in slices."""
        demand = self._demand(now_s, now.load, now.num_ready, lead_s)
        need = self._kept_demand(now_s, now.load, demand, name)
        return need, self.reserve.kept(demand.mean, self._work.slices)

    def rate_words(self, now_s: float, now: Needed, lead_s: float) -> str:
        """The sums behind a need, for a reader."""
        forecast = self.forecaster.at(now_s, lead_s, self._rules.forecast_share)
        return (
            f"{now.load.requests_per_s:.2f} requests/s,"
            f" {self._requests_per_s(forecast.safe):.2f} in {lead_s:.0f} s"
            f" by {forecast.method}: {now.demand.arithmetic}"
        )

    @property
    def _carries(self) -> str:
        """What slices were seen to carry, in words; nothing while the law is believed."""
        if abs(self._factor - 1) < _SAME_FACTOR:
            return ""
        return f"slices were seen to carry {self._factor:.2f} of their profile"

    def _learn(self, now_s: float, load: ModelLoad) -> None:
        if load.has_work:
            self.busy_at_s = now_s
        elapsed_s = 0.0 if self._learned_at_s is None else max(0.0, now_s - self._learned_at_s)
        self._learned_at_s = now_s
        self.learned = self.learned.seen(elapsed_s, load, self._profiles, self._rules)
        if load.late and load.requests_per_s <= self.forecaster.rate:
            return  # it is the least that there is, and no news
        self.forecaster.observe(
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
        cost = self.forecaster.slices_per_request_per_s
        return slices / cost if cost > 0 else self.forecaster.rate

    def _demand(self, now_s: float, load: ModelLoad, num_ready: float, lead_s: float) -> Demand:
        """The greater of what is needed now and what will be in `lead_s`."""
        then = self.forecaster.at(now_s, lead_s, self._rules.forecast_share).safe
        rate = self._requests_per_s(max(self.forecaster.level, then))
        traffic = DemandInputs(rate, *self.forecaster.tokens)
        steady = demand_of(traffic, self._profile, self._rules, self._factor)
        # What is on engines beyond what they can run waits there.
        held = num_ready * num_at_once(traffic, self._profile, self._rules, self._factor)
        num_waiting = load.num_waiting + max(0.0, load.num_in_flight - held)
        backlog = backlog_demand(num_waiting, traffic, self._profile, self._rules, self._factor)
        most = self._most_backlog(now_s, load, steady.mean, lead_s, has_backlog=backlog > 0)
        return Demand(steady.mean, steady.spread, min(backlog, most), self._added)

    def _pressing(self) -> Demand:
        """The demand of the work that comes now.

        What waits is no part of it. Of two models that lack slices each would have them in turn, as
        its line grows without them, and they would load more than serve.
        """
        rate = self._requests_per_s(self.forecaster.level)
        traffic = DemandInputs(rate, *self.forecaster.tokens)
        return demand_of(traffic, self._profile, self._rules, self._factor)

    def _look_at_pressure(self, now_s: float, load: ModelLoad, num_ready: float) -> None:
        """Notes what shows that slices have too much to do now, and what is added for it."""
        traffic = DemandInputs(self.forecaster.rate, *self.forecaster.tokens)
        mean = demand_of(traffic, self._profile, self._rules, self._factor).mean
        self._work.look(now_s, mean)
        self._pressed_because = pressure_reason(load, mean, num_ready)
        self._added = self._pressure.added_slices(now_s, mean, self._pressed_because)

    def _most_backlog(
        self,
        now_s: float,
        load: ModelLoad,
        mean: float,
        lead_s: float,
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
        most_leads = max(1.0, age_s / max(lead_s, _LEAST_LEAD_S))
        return max(1.0, _MOST_BACKLOG * mean) * most_leads

    def _batch_capacity(
        self, now_s: float, load: ModelLoad, need: int, busy: float, lead_s: float
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
        planned_s = self._rules.planned_tpot_s
        beside_s = self._rules.objectives.tpot_s * STEP_SHARE
        if beside_s <= self._profile.base_s:
            beside_s = planned_s
        of_others = self.forecaster.tokens
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
                lead_s=lead_s,
            )
        )

    def _kept_need(
        self, now_s: float, stays: str | None, needed: int, num_ready: float
    ) -> tuple[int, str | None]:
        """Returns the slices to plan for, and why no fewer; `None` where it is what is needed."""
        kept = min(self._floor.raised(needed, math.floor(num_ready), stays), self._rules.max_slices)
        need = self._turns.bounded(now_s, kept)
        if need > kept:
            return need, f"it has turned {MOST_TURNS} times in an hour, or would"
        return need, stays

    def _kept_demand(self, now_s: float, load: ModelLoad, demand: Demand, name: str = "") -> int:
        """Returns the whole slices for the highest demand lately, with the reserve that is kept."""
        highest = self._held[name].look(now_s, demand)
        kept = self.reserve.kept(highest.steady, self._work.slices) + highest.more
        return self._bounded(now_s, load, math.ceil(min(kept, highest.whole) - 1e-6))

    def _bounded(self, now_s: float, load: ModelLoad, wanted: int) -> int:
        rules = self._rules
        if load.has_work or (self.busy_at_s is not None and now_s - self.busy_at_s < rules.idle_s):
            wanted = max(wanted, 1)
        return min(max(wanted, rules.min_slices), rules.max_slices)
