"""Turns portfolios into a target per class: what is added now, what may go, and why. Pure.

Additions are at once. Surplus goes in this order: first orders that are not filled yet, which
cost nothing; then slices, the most expensive first, and only as many as leave the need covered by
slices that are ready; but one at a time where a maximum leaves no room (`mix.bound`), and what
another model lacks. A slice goes after it has been surplus for a while. No addition takes the
targets of all classes together beyond their maximum.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from autoscaling.policy.classes.class_history import ClassHistory
from autoscaling.policy.classes.known_ends import num_ending
from autoscaling.policy.mix.bound import SliceClaim, granted, makes_room
from autoscaling.policy.mix.horizons import AskedAhead
from autoscaling.policy.mix.portfolio import Portfolio, num_within
from autoscaling.policy.mix.stopgaps import Stopgap
from autoscaling.records import Decision, Fleet, Plan, SliceView
from serving.domain.slice_lifecycle import WAITING, SliceState


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """The inputs of a plan.

    `prices` are what a useful slice-hour of each class costs. `safe` is the portfolio of healthy
    classes, which covers `need`. `hoped` is what each class would have if it delivered, and what it
    is asked for though it backs off. `ahead` is what classes are asked for beyond that, because
    they deliver later, and `stopgaps` because others do. `missing` are slices of a class that end
    before the class replaces them: others are asked for as many in `safe`. `weights` are what a
    slice of a class carries, in those that the need is in; 1 where a class is not named. All
    classes together get `max_slices` at most, of whatever shape. `given_up` are slices that go at
    once, ready or not, because another model lacks them and comes first.
    `kept` slices of the need are there because it must not fall now, and `kept_because` says why;
    `None` if it may. `notes` are what else the need comes of: what slices were seen to carry,
    gateways that are left out, what others have.
    """

    now_s: float
    fleet: Fleet
    classes: Mapping[str, ClassHistory]
    prices: Mapping[str, float]
    need: int
    safe: Portfolio
    hoped: Mapping[str, int]
    drain_delay_s: float
    max_slices: int
    ahead: Mapping[str, AskedAhead] = field(default_factory=dict)
    stopgaps: Mapping[str, Stopgap] = field(default_factory=dict)
    missing: Mapping[str, int] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    given_up: Mapping[str, int] = field(default_factory=dict)
    kept: int = 0
    kept_because: str | None = None
    notes: str = ""


@dataclass(frozen=True, slots=True)
class _Supply:
    """The slices of one class, by what they supply now."""

    waiting: tuple[SliceView, ...]
    coming: tuple[SliceView, ...]
    ready: tuple[SliceView, ...]
    expiring: int

    @property
    def held(self) -> int:
        return len(self.coming) + len(self.ready)


@dataclass(frozen=True, slots=True)
class _Fall:
    """What becomes of a class's surplus: `orders` are withdrawn, the others are slices."""

    orders: int = 0
    given_up: int = 0
    dropped: int = 0
    kept: int = 0
    waited_s: float = 0.0

    @property
    def count(self) -> int:
        """The slices by which the target falls."""
        return self.orders + self.given_up + self.dropped


def plan_targets(
    inputs: PlanInputs, surplus_since_s: Mapping[str, float], arithmetic: str
) -> tuple[Plan, dict[str, float]]:
    """Returns the plan, and since when each class has had a surplus."""
    supply = {name: _supply(inputs, name) for name in inputs.classes}
    levels = {name: _levels(inputs, name, supply[name]) for name in inputs.classes}
    since_s = {
        name: surplus_since_s.get(name, inputs.now_s)
        for name in inputs.classes
        if levels[name][-1] < inputs.fleet.targets.get(name, 0)
    }
    falls = _falls(inputs, supply, levels, since_s)
    claims = [
        _claim(inputs, name, each, levels[name], falls[name]) for name, each in supply.items()
    ]
    targets = granted(inputs.max_slices, claims)
    decisions: list[Decision] = []
    refusals: list[Decision] = []
    for name in sorted(inputs.classes, key=lambda name: -inputs.prices[name]):
        fall, target = falls[name], inputs.fleet.targets.get(name, 0)
        if targets[name] > target:
            more = targets[name] - target
            decisions.append(_addition(inputs, name, more, supply[name]))
        decisions += _fall_decisions(inputs, name, fall)
        # What a class keeps or is asked for beyond the maximum is withdrawn, or not ordered at all.
        if (withdrawn := target - fall.count - targets[name]) > 0:
            why = f"withdrawn: {_no_room(inputs)}"
            decisions.append(Decision(name, -withdrawn, _noted(inputs, why)))
        if (short := levels[name][-1] - targets[name]) > 0:
            refusals.append(Decision(name, short, _no_room(inputs)))
        if fall.kept:
            refusals.append(Decision(name, -fall.kept, _kept_reason(inputs, fall.waited_s)))
    refusals += _shortfalls(inputs)
    plan = Plan(
        at_s=inputs.now_s,
        targets=targets,
        decisions=tuple(decisions),
        refusals=tuple(refusals),
        drain_order=_drain_order(inputs, supply),
        demand_slices=float(inputs.need),
        next_slice_at_s=_next_slice_at_s(inputs, supply),
        arithmetic=arithmetic,
    )
    return plan, since_s


def _falls(
    inputs: PlanInputs,
    supply: Mapping[str, _Supply],
    levels: Mapping[str, tuple[int, ...]],
    since_s: Mapping[str, float],
) -> Mapping[str, _Fall]:
    """Returns what goes of each class, and what is kept: the most expensive goes first."""
    weights = {name: inputs.weights.get(name, 1.0) for name in supply}
    spare = sum(len(each.ready) * weights[name] for name, each in supply.items()) - inputs.need
    falls = dict.fromkeys(supply, _Fall())
    makes_room = _makes_room(inputs, supply)
    for name in sorted(since_s, key=lambda name: -inputs.prices[name]):
        target = inputs.fleet.targets.get(name, 0)
        surplus = target - levels[name][-1]
        orders = min(surplus, max(0, target - supply[name].held))
        slices = surplus - orders
        waited_s = inputs.now_s - since_s[name]
        given_up = min(slices, inputs.given_up.get(name, 0))
        spare -= given_up * weights[name]
        dropped = 0
        if waited_s >= inputs.drain_delay_s:
            dropped = min(slices - given_up, num_within(spare, weights[name]))
            if makes_room and dropped == 0 < slices - given_up:
                dropped, makes_room = 1, False
            spare -= dropped * weights[name]
        falls[name] = _Fall(orders, given_up, dropped, slices - given_up - dropped, waited_s)
    return falls


def _makes_room(inputs: PlanInputs, supply: Mapping[str, _Supply]) -> bool:
    """Returns whether a slice goes before another is ready, for want of room for that one."""
    if inputs.kept_because is not None or not any(
        inputs.safe.slices[name] > each.held and inputs.classes[name].is_healthy(inputs.now_s)
        for name, each in supply.items()
    ):
        return False
    return makes_room(
        inputs.max_slices,
        num_staying=sum(each.held for each in supply.values()),
        num_ready=sum(len(each.ready) for each in supply.values()),
        num_coming=sum(len(each.coming) + len(each.waiting) for each in supply.values()),
    )


def _claim(
    inputs: PlanInputs, name: str, supply: _Supply, levels: tuple[int, ...], fall: _Fall
) -> SliceClaim:
    """Returns what a class is to have; what is there comes before any that are ordered."""
    target = inputs.fleet.targets.get(name, 0)
    # Nobody knows what came of its orders while no slice is told: no target falls then.
    stays = target if inputs.fleet.late else min(target - fall.count, supply.held)
    return SliceClaim(name, stays, levels, inputs.prices[name] / inputs.weights.get(name, 1.0))


def _fall_decisions(inputs: PlanInputs, name: str, fall: _Fall) -> Iterator[Decision]:
    if fall.orders:
        why = _noted(inputs, "no longer needed, and not there yet")
        yield Decision(name, -fall.orders, why)
    if fall.given_up:
        why = _noted(inputs, "given up at once: another model lacks it and comes first")
        yield Decision(name, -fall.given_up, why)
    if fall.dropped:
        yield Decision(name, -fall.dropped, _drop_reason(inputs, name, fall.waited_s))


def _no_room(inputs: PlanInputs) -> str:
    return f"max_slices is {inputs.max_slices}, which others have or come before"


def without_falls(plan: Plan, fleet: Fleet) -> Plan:
    """Returns the plan with no target below what stands, for a time at which slices are unknown."""
    falls = [each for each in plan.decisions if each.delta < 0]
    kept = (replace(each, reason=f"kept: {fleet.late}") for each in falls)
    return replace(
        plan,
        targets={
            name: max(target, fleet.targets.get(name, 0)) for name, target in plan.targets.items()
        },
        decisions=tuple(each for each in plan.decisions if each.delta > 0),
        refusals=(*plan.refusals, *kept),
    )


def _supply(inputs: PlanInputs, name: str) -> _Supply:
    slices = inputs.fleet.of_class(name)
    lead_s = inputs.classes[name].lead_s
    held = [s for s in slices if s.state not in WAITING and s.state != SliceState.DRAINING]
    return _Supply(
        waiting=tuple(s for s in slices if s.state in WAITING),
        coming=tuple(s for s in held if s.state != SliceState.READY),
        ready=tuple(s for s in held if s.state == SliceState.READY),
        expiring=num_ending(slices, inputs.now_s, lead_s),
    )


def _levels(inputs: PlanInputs, name: str, supply: _Supply) -> tuple[int, ...]:
    """Returns how many slices a class is to have, with ever less urgent ones; the last is all.

    First those of the portfolio, then those that serve until slower ones come, those for later,
    those in place of what ends, and last those that it will hardly bring.
    """
    history = inputs.classes[name]
    safe = inputs.safe.slices[name]
    soon = safe + (inputs.stopgaps[name].count if name in inputs.stopgaps else 0)
    ahead = soon + (inputs.ahead[name].count if name in inputs.ahead else 0)
    hoped = ahead
    if not history.is_healthy(inputs.now_s) or name in inputs.missing:
        # Its orders stay open: they cost nothing, and one that is filled shows that it is back.
        hoped = max(ahead, inputs.hoped[name])
    # A slice whose time is up is replaced before it goes.
    replaced = max(0, min(supply.expiring, history.most_slices - hoped)) if hoped else 0
    return safe, soon, ahead, ahead + replaced, hoped + replaced


def _addition(inputs: PlanInputs, name: str, count: int, supply: _Supply) -> Decision:
    history = inputs.classes[name]
    on_its_way = len(supply.waiting) + len(supply.coming)
    reason = (
        f"need {inputs.need}, {len(supply.ready)} ready, {on_its_way} on their way;"
        f" ${inputs.prices[name]:.2f} per useful slice-hour,"
        f" ready in {history.lead_s:.0f} s"
    )
    if ending := num_ending(inputs.fleet.slices, inputs.now_s, history.lead_s):
        reason += f"; {ending} of those held end before that"
    if name in inputs.ahead:
        reason += f"; {inputs.ahead[name].words}"
    if name in inputs.stopgaps:
        reason += f"; {inputs.stopgaps[name].words}"
    reason = _noted(inputs, reason)
    if not history.is_healthy(inputs.now_s):
        reason += f"; backing off: {history.backoff_reason}"
    return Decision(name, count, reason)


def _kept_reason(inputs: PlanInputs, waited_s: float) -> str:
    if waited_s < inputs.drain_delay_s:
        return f"kept for {inputs.drain_delay_s - waited_s:.0f} s more"
    if inputs.kept_because is not None:
        return f"kept until others are ready in their place: {inputs.kept_because}"
    return "kept until what replaces them is ready"


def _drop_reason(inputs: PlanInputs, name: str, waited_s: float) -> str:
    price = inputs.prices[name]
    return _noted(
        inputs,
        f"more than enough for {waited_s:.0f} s: need {inputs.need};"
        f" ${price:.2f} per useful slice-hour is the most expensive left",
    )


def _noted(inputs: PlanInputs, reason: str) -> str:
    return f"{reason}; {inputs.notes}" if inputs.notes else reason


def _shortfalls(inputs: PlanInputs) -> list[Decision]:
    found = []
    if inputs.kept > 0:
        found.append(Decision("", -inputs.kept, f"none goes while {inputs.kept_because}"))
    for name, history in inputs.classes.items():
        missing = inputs.hoped[name] - inputs.safe.slices[name]
        if missing > 0 and not history.is_healthy(inputs.now_s):
            found.append(Decision(name, missing, f"backing off: {history.backoff_reason}"))
    for name, missing in inputs.missing.items():
        reason = f"{missing} end before the class replaces them: others are asked meanwhile"
        found.append(Decision(name, missing, reason))
    if inputs.safe.missing:
        reason = f"no class has room for {inputs.safe.missing:g} of {inputs.need}"
        found.append(Decision("", math.ceil(inputs.safe.missing), reason))
    if inputs.safe.unsafe:
        reason = f"the floor lacks {inputs.safe.unsafe:g} if one group is lost"
        found.append(Decision("", math.ceil(inputs.safe.unsafe), reason))
    return found


def _drain_order(inputs: PlanInputs, supply: Mapping[str, _Supply]) -> tuple[str, ...]:
    """Orders slices to drain: the most expensive, then what ends soonest, then the emptiest.

    What is not ready yet comes first: nobody is served there, and Serve ends replicas that have not
    started before all others.
    """

    def worth(each: SliceView) -> tuple[bool, float, float, int, str]:
        ends_at_s = float("inf") if each.expires_at_s is None else each.expires_at_s
        return (
            each.state == SliceState.READY,
            -inputs.prices[each.compute_class],
            ends_at_s,
            each.num_in_flight,
            each.slice_id,
        )

    held = [s for each in supply.values() for s in (*each.ready, *each.coming)]
    return tuple(each.slice_id for each in sorted(held, key=worth))


def _next_slice_at_s(inputs: PlanInputs, supply: Mapping[str, _Supply]) -> float | None:
    etas = [
        inputs.classes[name].eta_s(each)
        for name, slices in supply.items()
        for each in (*slices.waiting, *slices.coming)
    ]
    return max(inputs.now_s, min(etas)) if etas else None
