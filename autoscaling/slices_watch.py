"""What is known of a model's slices, also while the directory tells nothing. Deterministic.

Owns what lies between the directory's reports and the policy: how long the last list may be planned
with, losses that were told before, what Serve was asked for and no replica tells of, and what
engines did of which nobody tells now. Decides nothing. Callers pass wall-clock seconds.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autoscaling.observations import (
    DirectoryWatch,
    Report,
    ReportMissingError,
    fleet_report_of,
    losses_of,
    slices_of,
)
from autoscaling.policy.classes.unseen_orders import UnseenOrders
from autoscaling.records import Fleet, SliceLoss, SliceView
from serving.domain.capacity.engine_rates import EngineRate
from serving.domain.compute_class import ComputeClass
from serving.domain.load_report import FleetReport
from serving.domain.slice_lifecycle import SliceState

# Of the age at which a load is none: who was not heard of for as long is late.
LATE_SHARE = 1 / 3
# How long the slices that were known last may be planned with. In less than this few slices come
# and are loaded, or are lost, without anybody's knowing.
_SLICES_KNOWN_FOR_S = 300.0
# An engine that another gateway tells of has no rate for so long.
_RATE_FOLLOWS_S = 30.0


class _Told(NamedTuple):
    """What an engine did last, who told it, and when."""

    rate: EngineRate
    gateway: str
    at_s: float


class KnownRates:
    """What engines did last, also those of which nobody tells now.

    Without a rate an engine counts as empty, and its slice goes before emptier ones. So the last
    rate stands while the gateway that told it is not heard, as one that drains, and for as long as
    another one takes to have a rate. An engine that a gateway shows and that makes no step has
    none.
    """

    def __init__(self) -> None:
        self._told: dict[str, _Told] = {}

    def look(
        self, now_s: float, told: Mapping[str, Iterable[EngineRate]]
    ) -> tuple[EngineRate, ...]:
        """Takes in the rates by the gateways that were heard in time; returns all that stand."""
        for gateway, rates in told.items():
            for rate in rates:
                self._told[rate.engine_id] = _Told(rate, gateway, now_s)
        return tuple(
            each.rate
            for each in self._told.values()
            if each.gateway not in told or now_s - each.at_s <= _RATE_FOLLOWS_S
        )

    def forget_all_but(self, engine_ids: Iterable[str]) -> None:
        """Forgets engines that the directory does not list."""
        listed = set(engine_ids)
        self._told = {name: each for name, each in self._told.items() if name in listed}


@dataclass(frozen=True, slots=True)
class SlicesSeen:
    """A model's slices as far as they are known.

    `unknown` is why the directory's list is not known now; "" if it is. Nothing may be planned with
    slices that `are_too_old`.
    """

    fleet: Fleet
    unknown: str = ""
    are_too_old: bool = False


class SlicesWatch:
    """Follows what the directory tells of one model's slices."""

    def __init__(self, model: str, max_load_age_s: float) -> None:
        """`max_load_age_s` is the age at which what was told is nothing any more."""
        self._model = model
        self._max_age_s = max_load_age_s
        self._watch = DirectoryWatch()
        self._unseen_orders = UnseenOrders()
        self._known_s: float | None = None  # when the list was read last
        self._slices: tuple[SliceView, ...] = ()
        # Ends told before, by replica and cause: of one end two hear, and each has its own time.
        # `None` before the first report: its losses are older than we are.
        self._told_losses: frozenset[tuple[str, str]] | None = None
        self._rates = KnownRates()
        self.report: FleetReport | None = None  # the last one that could be read
        self.unseen: tuple[SliceView, ...] = ()  # what Serve was asked for and nobody tells of

    def look(
        self,
        now_s: float,
        reports: Iterable[Report],
        targets: Mapping[str, int],
        terms: Mapping[str, ComputeClass],
        told: Mapping[str, Iterable[EngineRate]],
        drain_order: Sequence[str],
        *,
        shares_chips: bool,
    ) -> SlicesSeen:
        """Returns the slices on the classes of `terms`, of which Serve has `targets` now.

        `told` is what engines do, by the gateways that were heard in time, and `drain_order` is the
        order in which slices were to go. For some minutes a silent directory lets a policy plan
        with what it told last, and only add to it. It may not where models share chips: another one
        would give up what this one may not need.
        """
        rates = self._rates.look(now_s, told)
        # A slice that is lost unseen would be counted on while others are given up.
        allowed_s = self._max_age_s * (1 if shares_chips else LATE_SHARE)
        try:
            reports = tuple(reports)
            heard_s = self._watch.look(now_s, reports)
            report = fleet_report_of(reports, now_s, allowed_s, heard_s)
        except ReportMissingError as error:
            known_s = self._known_s
            if known_s is not None:  # the clock may have been set back since
                known_s = self._known_s = min(known_s, now_s)
            are_too_old = shares_chips or known_s is None or now_s - known_s > _SLICES_KNOWN_FOR_S
            late = f"{error}: slices are taken to be as they were, and none is given up"
            slices = _at_most(targets, self._slices, drain_order)
            return SlicesSeen(Fleet(slices, targets, (), late), str(error), are_too_old)
        self.report, self._known_s = report, now_s
        self._rates.forget_all_but(name for each in report.slices for name in each.engine_ids)
        slices = slices_of(self._model, report, terms, rates)
        self.unseen = self._unseen_orders.look(now_s, targets, slices)
        self._slices = (*slices, *self.unseen)
        return SlicesSeen(Fleet(self._slices, targets, self._new_losses(report)))

    def _new_losses(self, report: FleetReport) -> tuple[SliceLoss, ...]:
        losses = losses_of(self._model, report)
        before = self._told_losses
        self._told_losses = frozenset((each.slice_id, each.cause) for each in losses)
        if before is None:
            return ()
        return tuple(each for each in losses if (each.slice_id, each.cause) not in before)


def _at_most(
    targets: Mapping[str, int], slices: Sequence[SliceView], drain_order: Sequence[str]
) -> tuple[SliceView, ...]:
    """Returns the slices without those that were given up since they were listed.

    They would be bought again: of each class no more are there than Serve has targets for.
    """
    first = {slice_id: place for place, slice_id in enumerate(drain_order)}
    gone: set[str] = set()
    for name, target in targets.items():
        stay = [
            each
            for each in slices
            if each.compute_class == name and each.state != SliceState.DRAINING
        ]
        stay.sort(key=lambda each: first.get(each.slice_id, len(first)))
        gone |= {each.slice_id for each in stay[: max(0, len(stay) - target)]}
    return tuple(each for each in slices if each.slice_id not in gone)
