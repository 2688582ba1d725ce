"""Whose slice a new replica takes: that of the replica which it replaces, and no other one.

Serve starts a replacement at the moment at which it tells the old replica to stop, and does not
wait for its end. A replacement that took a slice which happens to be free, or had one bought, would
be a surge of slices. So it waits until the old one has given its slice back. Pure.
"""

from collections.abc import Iterable, Sequence

from serving.directory import SliceRecord
from serving.slices.lifecycle import WAITING, SliceState


def is_handing_over(record: SliceRecord) -> bool:
    """Whether its replica leaves a slice that stays: nobody takes it away, and it will be free."""
    return record.state == SliceState.DRAINING and record.drain_deadline_s is None


def num_successors(records: Iterable[SliceRecord]) -> int:
    """Of replicas of one deployment that wait, how many wait for a slice that is handed over."""
    records = list(records)
    num_waiting = sum(record.state in WAITING for record in records)
    return min(num_waiting, sum(map(is_handing_over, records)))


def reason_to_wait(records: Sequence[SliceRecord], replica_id: str) -> str | None:
    """Why this replica may not take a slice yet; `None` when it may.

    Of the replicas of a deployment that wait, as many as there are slices being handed over have to
    wait for those: the ones that came last. A replica that is not among `records` may.
    """
    own = next((record for record in records if record.replica_id == replica_id), None)
    if own is None:
        return None
    deployment = [
        record
        for record in records
        if (record.model, record.compute_class) == (own.model, own.compute_class)
        and record.has_engine  # of joined slices the first stands for all
    ]
    waiting = sorted(
        (record for record in deployment if record.state in WAITING),
        key=lambda record: (record.life.phases[0].at_s, record.replica_id),
    )
    free_to_take = len(waiting) - num_successors(deployment)
    if own in waiting[:free_to_take]:
        return None
    leaving = sorted(
        record.life.slice_name or record.replica_id
        for record in deployment
        if is_handing_over(record)
    )
    return f"it waits for the slice of a replica that leaves ({', '.join(leaving)})"
