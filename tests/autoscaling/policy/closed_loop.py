"""A loop around the policy: engines by the law, clients that wait, slices that come after a while.

What engines can carry is theirs (`law`), whatever the policy's profile says of it. Requests flow as
a fluid: there is no chance. A gateway holds back what engines have no sequences left for.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from autoscaling.policy.policy import SlicewisePolicy
from autoscaling.policy.rules import Rules
from autoscaling.records import Fleet, ModelLoad, Observation, Plan, SliceView
from serving.domain.capacity.engine_rates import EngineRate
from serving.domain.capacity.objectives import Objectives
from serving.domain.capacity.slice_profile import CapacityProfile
from serving.domain.compute_class import ComputeClass
from serving.domain.slice_lifecycle import SliceState

OBJECTIVES = Objectives(ttft_s=3.0, tpot_s=0.05)
RULES = Rules(OBJECTIVES)
ON_DEMAND = ComputeClass("on-demand", 20.0, max_slices=100, provisioning_s=60, load_s=60)
RATE = 230.0
TICK_S, STEP_S, WINDOW_S = 5.0, 1.0, 30.0
INPUT_TOKENS = OUTPUT_TOKENS = 100.0


def law(requests_per_s: float, base_s: float = 0.025, max_num_seqs: int = 128) -> CapacityProfile:
    """The law of slices that carry so many of these requests at the objective that is planned."""
    planned_s = OBJECTIVES.tpot_s * RULES.tpot_margin
    work_s = (1 - base_s / planned_s) / requests_per_s
    return CapacityProfile(
        model="m",
        engine="paced",
        base_s=base_s,
        per_sequence_s=0.8 * work_s / OUTPUT_TOKENS,
        per_prompt_token_s=0.2 * work_s / INPUT_TOKENS,
        max_num_seqs=max_num_seqs,
        measured_on="2026-11-26",
        source="made up",
    )


@dataclass
class ClosedLoop:
    """`slow` are slices by the share of the law that they keep; `num_clients` ask again at once.

    Without clients `RATE` requests come each second whatever is answered, and who has waited for
    `patience_s` leaves.
    """

    policy: SlicewisePolicy
    law: CapacityProfile
    num_ready: int = 10
    num_clients: int | None = None
    rate: float = RATE
    patience_s: float = 60.0
    slow: Mapping[str, float] = field(default_factory=dict)
    now_s: float = 0.0
    slices: list[SliceView] = field(default_factory=list)
    target: int = 0
    waiting: float = 0.0
    plans: list[Plan] = field(default_factory=list)
    loads: list[ModelLoad] = field(default_factory=list)
    counts: list[tuple[float, int, float]] = field(default_factory=list)
    _running: dict[str, float] = field(default_factory=dict)
    _done: dict[str, deque[tuple[float, float]]] = field(default_factory=dict)
    _since: set[str] = field(default_factory=set)  # those that have worked for a window
    _arrived: deque[float] = field(default_factory=lambda: deque(maxlen=round(WINDOW_S / STEP_S)))
    _full: deque[bool] = field(default_factory=lambda: deque(maxlen=round(WINDOW_S / STEP_S)))

    def __post_init__(self) -> None:
        self.target = self.num_ready
        for number in range(self.num_ready):
            view = SliceView(f"s-{number}", ON_DEMAND.name, SliceState.READY, 0.0, 0.0)
            self.slices.append(view)
        self.waiting = float(self.num_clients or 0)

    def run(self, for_s: float) -> None:
        """Lets time pass, with a decision every `TICK_S`."""
        end_s = self.now_s + for_s
        while self.now_s < end_s:
            for _ in range(round(TICK_S / STEP_S)):
                self._flow()
            self._decide()

    @property
    def ready(self) -> list[str]:
        return [each.slice_id for each in self.slices if each.state == SliceState.READY]

    def _flow(self) -> None:
        self.now_s += STEP_S
        ready = self.ready
        gone = sum(n for name, n in self._running.items() if name not in ready)
        self._running = {name: self._running.get(name, 0.0) for name in ready}
        finished = 0.0
        for name, running in self._running.items():
            done = running * min(1.0, STEP_S / (OUTPUT_TOKENS * self._step_s(name, running)))
            self._running[name] -= done
            known = self._done.setdefault(name, deque(maxlen=round(WINDOW_S / STEP_S)))
            known.append((done * OUTPUT_TOKENS, 1 / self._step_s(name, running)))
            if len(known) == known.maxlen:
                self._since.add(name)
            finished += done
        arriving = self.rate * STEP_S if self.num_clients is None else finished
        self.waiting += arriving + gone
        self._arrived.append(arriving)
        for _ in range(20):  # evenly, a few at a time
            room = [name for name in ready if self._running[name] < self.law.max_num_seqs]
            if not room or self.waiting <= 1e-9:
                break
            least = min(self._running[name] for name in room)
            lowest = [name for name in room if self._running[name] <= least + 1e-6]
            above = [self._running[name] for name in room if self._running[name] > least + 1e-6]
            level = min([*above, float(self.law.max_num_seqs)])
            given = min(self.waiting / len(lowest), level - least)
            for name in lowest:
                self._running[name] += given
            self.waiting -= given * len(lowest)
        self.waiting = max(0.0, self.waiting)
        if self.num_clients is None:
            self.waiting = min(self.waiting, self.rate * self.patience_s)
        self._full.append(self.waiting > 0.5)

    def _step_s(self, name: str, running: float) -> float:
        work_s = self.law.work_s(INPUT_TOKENS, OUTPUT_TOKENS) / OUTPUT_TOKENS
        return (self.law.base_s + running * work_s) / self.slow.get(name, 1.0)

    def load(self) -> ModelLoad:
        """What a gateway would tell."""
        rate = sum(self._arrived) / (len(self._arrived) * STEP_S)
        return ModelLoad(
            at_s=self.now_s,
            requests_per_s=rate,
            input_tokens_mean=INPUT_TOKENS,
            output_tokens_mean=OUTPUT_TOKENS,
            num_waiting=round(self.waiting),
            oldest_wait_s=self.waiting / max(rate, 1.0),
            num_in_flight=round(sum(self._running.values())),
            full_ratio=sum(self._full) / len(self._full),
            engines=tuple(self._rate(name) for name in self.ready if name in self._since),
        )

    def _rate(self, name: str) -> EngineRate:
        known = self._done[name]
        emitted = sum(tokens for tokens, _ in known) / (len(known) * STEP_S)
        steps_per_s = sum(steps for _, steps in known) / len(known)
        computed = emitted * INPUT_TOKENS / OUTPUT_TOKENS
        return EngineRate(name, ON_DEMAND.name, computed, emitted, 1 / steps_per_s)

    def _decide(self) -> None:
        self.slices = [self._aged(each) for each in self.slices]
        self.loads.append(self.load())
        fleet = Fleet(tuple(self.slices), {ON_DEMAND.name: self.target})
        plan = self.policy.decide(Observation(self.now_s, self.loads[-1], fleet))
        self.plans.append(plan)
        self.target = plan.targets[ON_DEMAND.name]
        self.counts.append((self.now_s, self.target, self.waiting))
        for number in range(self.target - len(self.slices)):
            name = f"s-{self.now_s:.0f}-{number}"
            self.slices.append(
                SliceView(name, ON_DEMAND.name, SliceState.PROVISIONING, self.now_s, self.now_s)
            )
        unready = sorted(
            self.slices, key=lambda each: (each.state == SliceState.READY, each.since_s)
        )
        self.slices = unready[max(0, len(self.slices) - self.target) :]

    def _aged(self, each: SliceView) -> SliceView:
        lead_s = ON_DEMAND.provisioning_s + ON_DEMAND.load_s
        if each.state != SliceState.READY and self.now_s - each.since_s >= lead_s:
            return SliceView(
                each.slice_id, each.compute_class, SliceState.READY, self.now_s, each.requested_at_s
            )
        return each

    def told(self, every_s: float) -> str:
        """The slices over time, one number each `every_s`."""
        return " ".join(
            f"{at_s / 60:.0f}min:{count}"
            for at_s, count, _ in self.counts
            if round(at_s) % round(every_s) == 0
        )
