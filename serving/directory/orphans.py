"""Which replica takes over which engine without one, and which engines nobody will. Pure.

Offers only keep replicas from racing for one engine; the lock is the engine's lease. Callers pass
`now_s`, on one monotonic clock.
"""

from collections.abc import Iterable, Sequence

from serving.domain.slice_lifecycle import WAITING
from serving.domain.slice_records import SliceRecord

# How long an engine is kept for a replica to which it was offered: a claim takes milliseconds.
OFFER_S = 10.0


class OrphanOffers:
    """The engines that were offered, and to whom."""

    def __init__(self) -> None:
        self._offers: dict[str, tuple[str, float]] = {}  # engine id -> replica, until when

    def offer(
        self, own: SliceRecord, records: Sequence[SliceRecord], now_s: float
    ) -> SliceRecord | None:
        """Returns an engine that the replica of `own` may take over; `None` if there is none."""
        self._offers = {
            engine_id: offer for engine_id, offer in self._offers.items() if offer[1] > now_s
        }
        for record in sorted(records, key=lambda each: each.replica_id):
            if record.is_orphan and record.has_engine and fits(own, record):
                assert record.engine_id is not None
                to, _ = self._offers.get(record.engine_id, (own.replica_id, 0.0))
                # Who asks again could not have it.
                if to == own.replica_id and record.engine_id not in self._offers:
                    self._offers[record.engine_id] = own.replica_id, now_s + OFFER_S
                    return record
        return None


def fits(own: SliceRecord, engine: SliceRecord) -> bool:
    """Returns whether a replica may have that engine: it would start the very same."""
    return (
        own.fingerprint != ""
        and own.engine_kind == engine.engine_kind
        and own.replica_id != engine.replica_id
    )


def is_wanted(own: SliceRecord, records: Iterable[SliceRecord]) -> bool:
    """Returns whether a replica waits that could have this one's engine, and gets no other."""
    others = [each for each in records if each.has_engine and fits(each, own)]
    num_waiting = sum(each.state in WAITING for each in others)
    return num_waiting > sum(each.is_orphan for each in others)


def outdated(records: Sequence[SliceRecord]) -> tuple[SliceRecord, ...]:
    """Returns the orphans that nobody will take over: their deployment is of another version.

    An engine of a deployment that has no replica at all is left to its lease.
    """
    found = []
    for orphan in records:
        if not orphan.is_orphan or not orphan.has_engine:
            continue
        fingerprints = {
            each.fingerprint
            for each in records
            if not each.is_orphan
            and (each.model, each.compute_class) == (orphan.model, orphan.compute_class)
        }
        if fingerprints and orphan.fingerprint not in fingerprints:
            found.append(orphan)
    return tuple(found)
