"""The counts of ended slices by cause, because the directory forgets all but a few hundred.

Owns the counts of one gateway since it began. Does not own the lives (the directory does). Pure.
"""

from collections import Counter

from serving.domain.slice_lifecycle import EndCause
from serving.domain.slice_records import SliceRecord, Snapshot

# Ends that are remembered so that none is counted twice: a replica that was presumed gone may come
# back, and end again. Many times what a snapshot holds.
MAX_REMEMBERED = 2000

_ClassKey = tuple[str, str]  # model, compute class


class Endings:
    """The ends of all lives that ended after `started_at_s`, seconds since the epoch.

    Every observed class is counted for every cause, from zero on. A counter that appears with its
    first event would hide that event from every rate.
    """

    def __init__(self, started_at_s: float) -> None:
        self._started_at_s = started_at_s
        self._snapshot: Snapshot | None = None
        self._classes: set[_ClassKey] = set()
        self._remembered: dict[tuple[str, float], None] = {}
        self._counts: Counter[tuple[str, str, EndCause]] = Counter()

    def observe(self, snapshot: Snapshot) -> None:
        """Counts the ends since the last call. The same snapshot again changes nothing."""
        if snapshot is self._snapshot:
            return
        self._snapshot = snapshot
        self._classes |= {(each.model, each.compute_class) for each in snapshot.records}
        for record in snapshot.ended:
            self._end(record)

    def counts(self) -> dict[tuple[str, str, EndCause], int]:
        """Returns the ends by model, compute class and cause."""
        keys = [(*key, cause) for key in sorted(self._classes) for cause in EndCause]
        return {key: self._counts[key] for key in keys}

    def _end(self, record: SliceRecord) -> None:
        life, cause = record.life, record.life.cause
        key = (record.replica_id, life.transitions[0].at_s)
        if cause is None or key in self._remembered:
            return
        self._remembered[key] = None
        if len(self._remembered) > MAX_REMEMBERED:
            del self._remembered[next(iter(self._remembered))]
        if life.entered_at_s >= self._started_at_s:
            self._classes.add((record.model, record.compute_class))
            self._counts[record.model, record.compute_class, cause] += 1
