"""The slice of a new replica: that of the replica which it replaces, and no other one.

Serve starts a replacement at the moment at which it stops the old replica, and does not wait for
its end. A replacement that took a slice which happens to be free, or had one bought, would be a
surge of slices. So it waits until the old one has given its slice back. Pure.

The replacement may even be there before the old replica has reported that it leaves. A replica of
a new version waits a moment for that report while others of another version hold slices, or have
waited for longer: a rollback replaces replicas that have no slice yet.
"""

from collections.abc import Iterable, Sequence

from serving.domain.slice_lifecycle import WAITING, SliceState
from serving.domain.slice_records import SliceRecord

# The time that a replica of a new version waits for another one to report that it leaves. A replica
# that comes on top of the others, because the deployment grows too, loses this much.
REPORT_WAIT_S = 10.0


def is_handing_over(record: SliceRecord) -> bool:
    """Returns whether the replica leaves a slice that stays, so the slice will be free."""
    return record.state == SliceState.DRAINING and record.drain_deadline_s is None


def _may_be_replaced_by(own: SliceRecord, record: SliceRecord) -> bool:
    """Returns whether the replica stays as yet, is of another version, and was there before `own`.

    One that holds a slice was: `own` holds none.
    """
    if record.state == SliceState.DRAINING or record.version in ("", own.version):
        return False
    return record.state not in WAITING or _began_s(record) < _began_s(own)


def _began_s(record: SliceRecord) -> float:
    return record.life.transitions[0].at_s


def num_successors(records: Iterable[SliceRecord]) -> int:
    """Returns how many waiting replicas of a deployment wait for a slice that is handed over."""
    records = list(records)
    num_waiting = sum(record.state in WAITING for record in records)
    return min(num_waiting, sum(map(is_handing_over, records)))


def reason_to_wait(records: Sequence[SliceRecord], replica_id: str, now_s: float) -> str | None:
    """Returns why this replica may not take a slice yet; `None` when it may.

    `now_s` is wall-clock time. For each slice that is handed over, one waiting replica of the
    deployment has to wait for it; these are the ones that came last. A replica that is not among
    `records` waits until it is, which takes one renewal: whom it replaces is not known before.
    """
    own = next((record for record in records if record.replica_id == replica_id), None)
    if own is None:
        return "the directory has no record of the replica yet"
    deployment = [
        record
        for record in records
        if (record.model, record.compute_class) == (own.model, own.compute_class)
        and record.has_engine  # of a multislice the first record stands for all
    ]
    waiting = sorted(
        (record for record in deployment if record.state in WAITING),
        key=lambda record: (_began_s(record), record.replica_id),
    )
    free_to_take = len(waiting) - num_successors(deployment)
    if own in waiting[:free_to_take]:
        is_new = now_s < _began_s(own) + REPORT_WAIT_S
        old = sorted({each.version for each in deployment if _may_be_replaced_by(own, each)})
        if is_new and old:
            return f"it may be the replacement of a replica of version {', '.join(old)}"
        return None
    leaving = sorted(
        record.life.slice_name or record.replica_id
        for record in deployment
        if is_handing_over(record)
    )
    return f"it waits for the slice of a replica that leaves ({', '.join(leaving)})"
