"""How long slices of a class take to come, and engines on them to load. Deterministic.

An order that was open while the class failed teaches nothing: how long a stock-out lasts does not
show how long a slice usually takes. That is remembered by the order, since a class that delivers
again has stopped failing before its slices are held: their machines boot first.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autoscaling.records import SliceView
from serving.domain.slice_lifecycle import HELD_STATES, WAITING, SliceState

_SAMPLES_KEPT = 40
# With fewer samples than this, what the operator configured counts.
_SAMPLES_NEEDED = 4
_STARTING = frozenset({SliceState.RESERVED, SliceState.PROBING, SliceState.LOADING})


@dataclass(slots=True)
class _Observed:
    """The slice as it was last observed; `is_unusual`: it waited while the class failed."""

    state: SliceState
    since_s: float
    is_unusual: bool


class _Durations:
    """The last times that something took; what is typical is asked far more often than told."""

    def __init__(self, took_s: Iterable[float] = ()) -> None:
        self.kept_s = deque(took_s, maxlen=_SAMPLES_KEPT)
        self._typical_s = self._ninth_of_ten()

    def add(self, took_s: float) -> None:
        # Clocks of two hosts may differ by more than a slice took.
        self.kept_s.append(max(0.0, took_s))
        self._typical_s = self._ninth_of_ten()

    def typical_s(self, prior_s: float) -> float:
        """The time that nine of ten do not exceed; the prior one with too few."""
        return prior_s if self._typical_s is None else self._typical_s

    def _ninth_of_ten(self) -> float | None:
        if len(self.kept_s) < _SAMPLES_NEEDED:
            return None
        ordered = sorted(self.kept_s)
        return ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]


class SliceTimes:
    """The times of one class's slices, in seconds, learned from the states that are observed."""

    def __init__(self, provisioning_s: Iterable[float] = (), load_s: Iterable[float] = ()) -> None:
        """Takes the times that are known already, the latest last."""
        self._provisioning = _Durations(provisioning_s)
        self._loads = _Durations(load_s)
        self._observed: dict[str, _Observed] = {}

    @property
    def took_to_come_s(self) -> tuple[float, ...]:
        """The last times from an order to a slice, the latest last."""
        return tuple(self._provisioning.kept_s)

    @property
    def took_to_load_s(self) -> tuple[float, ...]:
        """The last times from a slice to a ready engine, the latest last."""
        return tuple(self._loads.kept_s)

    @property
    def num_held(self) -> int:
        """How many slices were held at the last look."""
        return sum(1 for each in self._observed.values() if each.state in HELD_STATES)

    def provisioning_s(self, prior_s: float) -> float:
        """The time from order to slice that nine of ten do not exceed; with too few, the prior."""
        return self._provisioning.typical_s(prior_s)

    def load_s(self, prior_s: float) -> float:
        """The time until an engine is ready on a slice, likewise."""
        return self._loads.typical_s(prior_s)

    def observe(self, slices: Sequence[SliceView], room_since_s: float) -> bool:
        """Records the slices of now; returns whether one has come, or its machines have.

        Orders made before `room_since_s` have waited for other models.
        """
        has_delivered = any(each.coming_since_s is not None for each in slices)
        observed: dict[str, _Observed] = {}
        for each in slices:
            before = self._observed.get(each.slice_id)
            is_unusual = before is not None and before.is_unusual
            observed[each.slice_id] = _Observed(each.state, each.since_s, is_unusual)
            if before is None or each.is_adopted:
                continue
            if before.state in WAITING and each.state in HELD_STATES:
                has_delivered = True
                # A slice that is ready at once was not seen while it loaded: that is in its time.
                if (
                    each.state in _STARTING
                    and not is_unusual
                    and each.requested_at_s >= room_since_s
                ):
                    self._provisioning.add(each.since_s - each.requested_at_s)
            elif before.state in _STARTING and each.state == SliceState.READY:
                self._loads.add(each.since_s - before.since_s)
        self._observed = observed
        return has_delivered

    def distrust_orders(self) -> None:
        """Notes that the class fails: orders that wait now will not show how long one takes."""
        for each in self._observed.values():
            each.is_unusual = each.is_unusual or each.state in WAITING
