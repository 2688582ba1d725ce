"""A tiny world for the policy: slices come after a while if there are any, nothing is random."""

from collections.abc import Callable
from dataclasses import dataclass, field

from autoscaling.policy.policy import SlicewisePolicy
from autoscaling.policy.rules import Rules
from autoscaling.records import Fleet, ModelLoad, Observation, Plan, SliceLoss, SliceView
from serving.domain.capacity.objectives import Objectives
from serving.domain.capacity.slice_profile import CapacityProfile
from serving.domain.compute_class import ComputeClass
from serving.domain.slice_lifecycle import SliceState

# One slice of it carries exactly 10 requests per second of 100 prompt and 100 output tokens at a
# TPOT of 50 ms, half of which is the base time of a step.
PROFILE = CapacityProfile(
    model="m",
    engine="paced",
    base_s=0.025,
    per_sequence_s=0.0004,
    per_prompt_token_s=0.0001,
    max_num_seqs=1000,
    measured_on="2026-11-21",
    source="made up",
)
OBJECTIVES = Objectives(ttft_s=3.0, tpot_s=0.05)
RULES = Rules(OBJECTIVES, tpot_margin=1.0, spread=0.0, floor_ratio=0.0)

RESERVED = ComputeClass(
    "reserved", 10.0, is_prepaid=True, max_slices=2, provisioning_s=60, load_s=60
)
SPOT = ComputeClass("spot", 4.0, is_revocable=True, max_slices=50, provisioning_s=60, load_s=60)
FLEX = ComputeClass("flex-start", 11.0, max_slices=50, provisioning_s=60, load_s=60)
ON_DEMAND = ComputeClass("on-demand", 20.0, max_slices=50, provisioning_s=60, load_s=60)
ALL = (RESERVED, SPOT, FLEX, ON_DEMAND)
TICK_S = 10.0
# A floor that is kept whatever it costs.
ANY_PRICE = 1000.0


def load(rate: float, at_s: float = 0.0, **more: float | int) -> ModelLoad:
    """So many requests per second of 100 prompt and 100 output tokens."""
    fields = {"input_tokens_mean": 100.0, "output_tokens_mean": 100.0, "num_in_flight": 0} | more
    return ModelLoad(at_s=at_s, requests_per_s=rate, **fields)  # type: ignore[arg-type]


@dataclass
class World:
    """Carries plans out. `dry` are the classes that give no slice at present."""

    policy: SlicewisePolicy
    terms: tuple[ComputeClass, ...] = ALL
    now_s: float = 0.0
    dry: set[str] = field(default_factory=set)
    slices: list[SliceView] = field(default_factory=list)
    targets: dict[str, int] = field(default_factory=dict)
    losses: list[SliceLoss] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    has_room: Callable[[SliceView], bool] = lambda _: True
    _made: int = 0

    @classmethod
    def of(cls, *terms: ComputeClass, rules: Rules = RULES) -> "World":
        terms = terms or ALL
        return cls(SlicewisePolicy(PROFILE, terms, rules), terms)

    def step(self, rate: float, **more: float | int) -> Plan:
        """Time goes on by a tick, slices come and become ready, then a decision is carried out."""
        plan = self.policy.decide(self.tick(rate, **more))
        self.carry_out(plan)
        return plan

    def tick(self, rate: float, **more: float | int) -> Observation:
        """Time goes on by a tick: what is observed then."""
        self.now_s += TICK_S
        self.slices = [self._aged(each) for each in self.slices]
        fleet = Fleet(tuple(self.slices), dict(self.targets), tuple(self.losses))
        self.losses = []
        return Observation(self.now_s, load(rate, self.now_s, **more), fleet)

    def run(self, rate: float, for_s: float, **more: float | int) -> Plan:
        for _ in range(round(for_s / TICK_S)):
            plan = self.step(rate, **more)
        return plan

    def lose(self, name: str, count: int | None = None, cause: str = "preempted") -> None:
        """Slices of a class end at once for `cause`; their replicas wish for others."""
        lost = [s for s in self.slices if s.compute_class == name][:count]
        for each in lost:
            self.losses.append(SliceLoss(each.slice_id, name, self.now_s, cause))
            self.slices.remove(each)
            self.slices.append(self._wish(name))

    def ready(self, name: str | None = None) -> int:
        return sum(
            s.state == SliceState.READY and name in (None, s.compute_class) for s in self.slices
        )

    def _aged(self, each: SliceView) -> SliceView:
        term = next(term for term in self.terms if term.name == each.compute_class)
        age_s = self.now_s - each.since_s
        if each.state == SliceState.PROVISIONING:
            has_come = self.now_s - each.requested_at_s >= term.provisioning_s
            if has_come and each.compute_class not in self.dry and self.has_room(each):
                return self._in_state(each, SliceState.LOADING)
        elif each.state == SliceState.LOADING and age_s >= term.load_s:
            return self._in_state(each, SliceState.READY)
        return each

    def _in_state(self, each: SliceView, state: SliceState) -> SliceView:
        return SliceView(each.slice_id, each.compute_class, state, self.now_s, each.requested_at_s)

    def _wish(self, name: str) -> SliceView:
        self._made += 1
        return SliceView(
            f"{name}-{self._made}", name, SliceState.PROVISIONING, self.now_s, self.now_s
        )

    def carry_out(self, plan: Plan) -> None:
        self.plans.append(plan)
        for name, target in plan.targets.items():
            supply = [s for s in self.slices if s.compute_class == name]
            for _ in range(target - len(supply)):
                self.slices.append(self._wish(name))
            worth = {slice_id: place for place, slice_id in enumerate(plan.drain_order)}
            supply.sort(
                key=lambda s: (s.state != SliceState.PROVISIONING, worth.get(s.slice_id, 0))
            )
            for each in supply[: max(0, len(supply) - target)]:
                self.slices.remove(each)
        self.targets = dict(plan.targets)
