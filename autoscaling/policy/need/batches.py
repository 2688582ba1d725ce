"""The slices that batch work gets of its own, beside the room that others leave. Pure.

Room on slices that are paid for anyway is free, and there may be more of it tomorrow night. So
batch work waits for it as long as it can: until what is left to do, on as many slices as it may
have, would take half of the time that is left. The other half is for a class that does not
deliver, and for what others need meanwhile. From then on it has what it takes to be done in time,
until nothing is due any more.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from serving.domain.capacity.batch_due import BatchDue

# How many times as long as the work takes there has to be, for it to go on waiting for free room.
_PATIENCE = 2.0
# At ease batch work has as many slices as this share of those that others need, and one at least.
_SHARE_AT_EASE = 0.25
# Work that is begun with this much of its time left over is in time though a step takes longer.
_MARGIN = 1.1
# Nothing that is planned helps what is due sooner.
_LEAST_LEFT_S = 60.0


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """What is known. `requests_per_s` is what one slice carries of such work and nothing else.

    `need` are the slices of interactive and standard work, of which `busy` are at work on average.
    A slice that is asked for now is ready after `lead_s`.
    """

    now_s: float
    due: BatchDue
    requests_per_s: float
    need: int
    busy: float
    lead_s: float


@dataclass(frozen=True, slots=True)
class BatchCapacity:
    """Slices beyond those of others, and why; `words` are empty where no batch work is due."""

    slices: int = 0
    words: str = ""


@dataclass(frozen=True, slots=True)
class _Date:
    """All work that is due by a date, in slice-seconds."""

    work_s: float
    left_s: float

    @property
    def even(self) -> float:
        """The slices that do it in just the time there is."""
        return _MARGIN * self.work_s / max(self.left_s, _LEAST_LEFT_S)


class BatchPatience:
    """Remembers that work has begun to have slices of its own: it keeps them until it is done."""

    def __init__(self) -> None:
        self._has_begun = False

    def capacity(self, inputs: BatchInputs) -> BatchCapacity:
        """Returns the slices that batch work gets now."""
        dates = list(_dates(inputs))
        if not dates:
            self._has_begun = False
            return BatchCapacity()
        # Less than nothing where others need more slices once lines run beside them.
        free = inputs.need - inputs.busy
        at_ease = max(1.0, _SHARE_AT_EASE * inputs.need)
        tightest = max(dates, key=lambda each: each.even)
        what = f"{inputs.due.num_requests} requests of batches are due"
        if tightest.even <= free:
            self._has_begun = False
            return BatchCapacity(0, f"{what}: they have room on {free:.2f} slices")
        if not self._has_begun and not any(
            each.left_s < _PATIENCE * each.work_s / at_ease for each in dates
        ):
            return BatchCapacity(0, f"{what}: they can wait for room")
        self._has_begun = True
        own = math.ceil(tightest.even - free)
        left_h = max(tightest.left_s, 0.0) / 3600
        return BatchCapacity(
            own,
            f"{what}: {own} slices for them, {tightest.work_s / 3600:.1f} h of work by"
            f" {left_h:.1f} h from now",
        )


def _dates(inputs: BatchInputs) -> Iterator[_Date]:
    """Yields what is due by each date, with all that is due before."""
    if inputs.requests_per_s <= 0:
        return
    num_requests = 0
    for each in inputs.due.work:
        num_requests += each.num_requests
        left_s = each.due_at_s - inputs.now_s - inputs.lead_s
        yield _Date(num_requests / inputs.requests_per_s, left_s)
