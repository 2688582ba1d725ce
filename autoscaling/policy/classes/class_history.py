"""The history of a compute class: the times of its slices, their losses, whether it is healthy.

Owns the memory of one class. A class is healthy until an order is later than usual or all its
slices are lost at once. Then it backs off (`backoff`): what it has counts, what was ordered from it
does not, and others are asked. Its orders stay open. It is healthy again once it delivers and a
while has passed, longer after each episode of failures. Deterministic: time comes in.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from autoscaling.policy.classes.backoff import Backoff
from autoscaling.policy.classes.expected_slices import ExpectedSlices
from autoscaling.policy.classes.known_ends import KnownEnds, leaves_in
from autoscaling.policy.classes.loss_rates import LossRates
from autoscaling.policy.classes.slice_times import SliceTimes
from autoscaling.policy.memory import ClassRecord
from autoscaling.policy.rules import Rules
from autoscaling.records import SliceLoss, SliceView
from serving.domain.compute_class import ComputeClass
from serving.domain.slice_lifecycle import WAITING, EndCause, SliceState

# How much later than usual an order may be where no patience is given.
_LATE_FACTOR = 1.5


@dataclass(slots=True)
class ClassHistory:
    """The memory of one class. Call `observe` before asking it anything about now."""

    terms: ComputeClass
    rules: Rules
    _times: SliceTimes = field(default_factory=SliceTimes)
    _rates: LossRates = field(default_factory=LossRates)
    _backoff: Backoff = field(init=False)
    _ends: KnownEnds = field(default_factory=KnownEnds)
    _allowed: int | None = None
    _is_full: bool = False
    # Orders made before then have waited for other models.
    _room_since_s: float = -math.inf

    def __post_init__(self) -> None:
        self._backoff = Backoff(self.rules)

    @classmethod
    def from_record(
        cls, terms: ComputeClass, rules: Rules, record: ClassRecord, written_at_s: float
    ) -> "ClassHistory":
        """Returns the history with the experience of an earlier one; slices it has seen none."""
        history = cls(
            terms,
            rules,
            SliceTimes(record.provisioning_s, record.load_s),
            LossRates.from_record(record, written_at_s),
        )
        history._backoff = Backoff.from_record(rules, record.backoff)
        return history

    def to_record(self) -> ClassRecord:
        """Returns what was learned. What is seen at every look is not part of it."""
        return ClassRecord(
            provisioning_s=self._times.took_to_come_s,
            load_s=self._times.took_to_load_s,
            held_hours=self._rates.held_hours,
            had_hours=self._rates.had_hours,
            num_losses=self._rates.num_losses,
            num_outages=self._rates.num_outages,
            backoff=self._backoff.to_record(),
        )

    def observe(
        self, now_s: float, slices: Sequence[SliceView], losses: Sequence[SliceLoss]
    ) -> None:
        """Records the class's slices of now and its losses since the last call.

        Only what was taken away is the class's doing; an engine that fails does so anywhere.
        """
        held_before = self._times.num_held
        was_out_of_stock = self._backoff.is_out_of_stock
        delivered = self._times.observe(slices, self._room_since_s)
        self._ends.observe(now_s, slices, self.lead_s)
        num_taken = sum(1 for each in losses if each.cause == EndCause.PREEMPTED)
        self._rates.observe(now_s, held_before, num_taken)
        oldest_at_s = _oldest_order_at_s(slices)
        late_s = 0.0
        if oldest_at_s is not None and not self._is_full:
            late_s = now_s - max(oldest_at_s, self._room_since_s) - self.patience_s
        failure = None
        if late_s > 0:
            failure = f"an order is {late_s:.0f} s late"
        elif self.terms.is_revocable and num_taken >= max(1, held_before):
            failure = f"all {held_before} slices were lost at once"
        self._backoff.observe(
            now_s, failure, has_delivered=delivered, oldest_order_at_s=oldest_at_s
        )
        if was_out_of_stock or self._backoff.is_out_of_stock:
            self._times.distrust_orders()

    def allow(self, now_s: float, most: int | None, *, is_full: bool) -> None:
        """Takes what other models leave of the class: `most` slices, `None`: nobody shares it.

        While it `is_full` of others' slices an order waits for them, and is not late.
        """
        self._allowed = most
        if self._is_full:
            self._room_since_s = now_s
        self._is_full = is_full

    @property
    def most_slices(self) -> int:
        """The most slices that the model may have of it now."""
        most = self.terms.max_slices
        return most if self._allowed is None else min(most, self._allowed)

    @property
    def provisioning_s(self) -> float:
        """The time from order to existence that nine of ten slices do not exceed."""
        return self._times.provisioning_s(self.terms.provisioning_s)

    @property
    def load_s(self) -> float:
        """The time until an engine is ready on a slice that nine of ten engines do not exceed."""
        return self._times.load_s(self.terms.load_s)

    @property
    def lead_s(self) -> float:
        """The time from an order to a ready engine."""
        return self.provisioning_s + self.load_s

    @property
    def patience_s(self) -> float:
        """The time that an order may take before it is late."""
        if self.terms.patience_s is not None:
            return self.terms.patience_s
        return _LATE_FACTOR * self.provisioning_s

    @property
    def losses_per_hour(self) -> float:
        """The expected losses of one slice in an hour, as configured and as observed."""
        return self._rates.losses_per_hour(self.terms)

    @property
    def outages_per_hour(self) -> float:
        """The expected losses of half the class or more at once, per hour in which it is held."""
        return self._rates.outages_per_hour(self.terms)

    @property
    def usd_per_useful_hour(self) -> float:
        """The price of an hour in which the slice serves: it is paid for while it loads, too."""
        if self.terms.is_prepaid:
            return 0.0
        ends_per_hour = self.losses_per_hour
        if self.terms.max_run_s is not None:
            ends_per_hour += 3600 / self.terms.max_run_s
        return self.terms.price * (1 + ends_per_hour * self.load_s / 3600)

    def is_healthy(self, now_s: float) -> bool:
        """Returns whether an order from this class counts as on its way."""
        return self._backoff.is_over(now_s)

    @property
    def backoff_reason(self) -> str:
        """Why it backs off, or did last."""
        return self._backoff.reason

    def num_ends(self, now_s: float, within_s: float) -> int:
        """Returns how many slices left when their run was over and may not be replaced, or will."""
        return self._ends.count(now_s, within_s)

    def num_there(self, slices: Sequence[SliceView], now_s: float, within_s: float) -> int:
        """Returns how many of the class's slices are expected to serve after a while.

        An order that is overdue, or made of a class that backs off, is not expected.
        """
        return self.expected(slices, now_s).num_within(within_s)

    def expected(self, slices: Iterable[SliceView], now_s: float) -> ExpectedSlices:
        """Returns those of `num_there`, to ask for several times."""
        is_healthy = self.is_healthy(now_s)
        lead_s, load_s = self.lead_s, self.load_s
        etas_s: list[float] = []
        ending: list[tuple[float, float]] = []
        for each in slices:
            state = each.state
            if state == SliceState.DRAINING:
                continue
            eta_s = -math.inf if state == SliceState.READY else _eta_s(each, lead_s, load_s)
            if state in WAITING and (not is_healthy or eta_s < now_s):
                continue
            if (leaves_in_s := leaves_in(each, now_s)) is None:
                etas_s.append(eta_s)
            else:
                ending.append((eta_s, leaves_in_s))
        etas_s.sort()
        return ExpectedSlices(now_s, etas_s, ending)

    def eta_s(self, each: SliceView) -> float:
        """The instant at which a slice on its way is expected to be ready."""
        return _eta_s(each, self.lead_s, self.load_s)


def _oldest_order_at_s(slices: Sequence[SliceView]) -> float | None:
    """Returns when the oldest order that waits for machines was made; what boots does not wait."""
    made_at_s = (
        each.requested_at_s
        for each in slices
        if each.state in WAITING and each.coming_since_s is None
    )
    return min(made_at_s, default=None)


def _eta_s(each: SliceView, lead_s: float, load_s: float) -> float:
    if each.state in WAITING:
        return each.requested_at_s + lead_s
    return each.since_s + load_s
