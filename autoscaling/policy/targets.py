"""From the mixes to each class's target: what is added now, what may go, and the reasons. Pure.

Additions are at once. What is no longer wanted goes in this order: first the wishes that nobody has
answered yet, which cost nothing; then slices, the dearest first, and only as many as leave the need
covered by slices that are ready. A slice goes after it has been more than enough for a while.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from autoscaling.policy.experience import ClassExperience
from autoscaling.policy.mix import Mix
from autoscaling.records import Decision, Fleet, Plan, SliceView
from serving.domain.slice_lifecycle import WAITING, SliceState


@dataclass(frozen=True, slots=True)
class Situation:
    """What targets are made from.

    `prices` are what a useful slice-hour of each class costs. `safe` is the mix of classes that are
    relied on, `wished` the one of all classes; both cover `need`.
    """

    now_s: float
    fleet: Fleet
    classes: Mapping[str, ClassExperience]
    prices: Mapping[str, float]
    need: int
    safe: Mix
    wished: Mix
    drain_delay_s: float


@dataclass(frozen=True, slots=True)
class _Have:
    """The slices of one class by what they are worth now."""

    waiting: tuple[SliceView, ...]
    coming: tuple[SliceView, ...]
    ready: tuple[SliceView, ...]
    expiring: int

    @property
    def held(self) -> int:
        return len(self.coming) + len(self.ready)


def plan_targets(
    situation: Situation, surplus_since_s: Mapping[str, float], arithmetic: str
) -> tuple[Plan, dict[str, float]]:
    """The plan, and since when each class has had more than is wanted of it."""
    have = {name: _sorted_out(situation, name) for name in situation.classes}
    wanted = {name: _wanted(situation, name, have[name]) for name in situation.classes}
    targets: dict[str, int] = {}
    decisions: list[Decision] = []
    refusals: list[Decision] = []
    since_s: dict[str, float] = {}
    spare = sum(len(each.ready) for each in have.values()) - situation.need
    for name in sorted(situation.classes, key=lambda name: -situation.prices[name]):
        target = situation.fleet.targets.get(name, 0)
        if wanted[name] >= target:
            targets[name] = wanted[name]
            if wanted[name] > target:
                decisions.append(_addition(situation, name, wanted[name] - target, have[name]))
            continue
        since_s[name] = surplus_since_s.get(name, situation.now_s)
        surplus = target - wanted[name]
        wishes = min(surplus, max(0, target - have[name].held))
        slices = surplus - wishes
        waited_s = situation.now_s - since_s[name]
        droppable = max(0, min(slices, spare)) if waited_s >= situation.drain_delay_s else 0
        spare -= droppable
        targets[name] = target - wishes - droppable
        if wishes:
            decisions.append(Decision(name, -wishes, "no longer wanted, and not there yet"))
        if droppable:
            decisions.append(Decision(name, -droppable, _why_dropped(situation, name, waited_s)))
        if slices > droppable:
            why = f"kept for {situation.drain_delay_s - waited_s:.0f} s more"
            if waited_s >= situation.drain_delay_s:
                why = "kept until what replaces them is ready"
            refusals.append(Decision(name, droppable - slices, why))
    refusals += _shortfalls(situation)
    plan = Plan(
        at_s=situation.now_s,
        targets=targets,
        decisions=tuple(decisions),
        refusals=tuple(refusals),
        drain_order=_drain_order(situation, have),
        demand_slices=float(situation.need),
        next_slice_at_s=_next_slice_at_s(situation, have),
        arithmetic=arithmetic,
    )
    return plan, since_s


def _sorted_out(situation: Situation, name: str) -> _Have:
    slices = situation.fleet.of_class(name)
    lead_s = situation.classes[name].lead_s
    held = [s for s in slices if s.state not in WAITING and s.state != SliceState.DRAINING]
    return _Have(
        waiting=tuple(s for s in slices if s.state in WAITING),
        coming=tuple(s for s in held if s.state != SliceState.READY),
        ready=tuple(s for s in held if s.state == SliceState.READY),
        expiring=sum(
            1
            for s in held
            if s.expires_at_s is not None and s.expires_at_s - situation.now_s < lead_s
        ),
    )


def _wanted(situation: Situation, name: str, have: _Have) -> int:
    experience = situation.classes[name]
    wanted = situation.safe.slices[name]
    if not experience.is_relied_on(situation.now_s):
        # Its wishes stay open: they cost nothing, and are how it is noticed that it is back.
        wanted = max(wanted, situation.wished.slices[name])
    # A slice whose time is up is replaced before it goes.
    replaced = min(have.expiring, experience.terms.max_slices - wanted) if wanted else 0
    return wanted + max(0, replaced)


def _addition(situation: Situation, name: str, count: int, have: _Have) -> Decision:
    experience = situation.classes[name]
    on_its_way = len(have.waiting) + len(have.coming)
    reason = (
        f"need {situation.need}, {len(have.ready)} ready, {on_its_way} on their way;"
        f" ${situation.prices[name]:.2f} per useful slice-hour,"
        f" ready in {experience.lead_s:.0f} s"
    )
    if not experience.is_relied_on(situation.now_s):
        reason += f"; not relied on: {experience.why_distrusted}"
    return Decision(name, count, reason)


def _why_dropped(situation: Situation, name: str, waited_s: float) -> str:
    dear = situation.prices[name]
    return (
        f"more than enough for {waited_s:.0f} s: need {situation.need};"
        f" ${dear:.2f} per useful slice-hour is the dearest left"
    )


def _shortfalls(situation: Situation) -> list[Decision]:
    found = []
    for name, experience in situation.classes.items():
        missing = situation.wished.slices[name] - situation.safe.slices[name]
        if missing > 0 and not experience.is_relied_on(situation.now_s):
            found.append(Decision(name, missing, f"not relied on: {experience.why_distrusted}"))
    if situation.safe.missing:
        reason = f"no class has room for {situation.safe.missing} of {situation.need}"
        found.append(Decision("", situation.safe.missing, reason))
    if situation.safe.unsafe:
        reason = f"the floor lacks {situation.safe.unsafe} if one group is lost"
        found.append(Decision("", situation.safe.unsafe, reason))
    return found


def _drain_order(situation: Situation, have: Mapping[str, _Have]) -> tuple[str, ...]:
    """Least worth first: the dearest, then what ends soonest, the emptiest; what loads comes last.

    A slice that loads was bought for load that exists, unless its class has ready ones to spare.
    """

    def worth(each: SliceView) -> tuple[bool, float, float, int, str]:
        ends_at_s = float("inf") if each.expires_at_s is None else each.expires_at_s
        return (
            each.state != SliceState.READY,
            -situation.prices[each.compute_class],
            ends_at_s,
            each.num_in_flight,
            each.slice_id,
        )

    held = [s for each in have.values() for s in (*each.ready, *each.coming)]
    return tuple(each.slice_id for each in sorted(held, key=worth))


def _next_slice_at_s(situation: Situation, have: Mapping[str, _Have]) -> float | None:
    etas = [
        situation.classes[name].eta_s(each)
        for name, slices in have.items()
        for each in (*slices.waiting, *slices.coming)
    ]
    return max(situation.now_s, min(etas)) if etas else None
