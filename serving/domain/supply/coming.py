"""Tells of which waiting replicas the slice is already on its way.

A class whose machines come, or whose slice is about to be handed on, has not run out of stock: the
order is not late, however long it waits. Who came first gets the first slice, as in the allocator.
Pure.
"""

from collections.abc import Iterable

from serving.domain.supply.records import TAKEN, SupplyRecord, SupplyState, WaitingReplica


def coming_since(
    waiting: Iterable[WaitingReplica], slices: Iterable[SupplyRecord]
) -> dict[str, float]:
    """Returns since when every slice that a waiting replica needs is coming, by its life.

    A slice comes once all its machines are there and it boots, once it is free, and once its
    replica hands it on. Times are wall-clock seconds. Lives that are missing have nothing coming.
    A host that is gone where nobody could replace it comes no more.
    """
    coming = [record for record in slices if _is_coming(record)]
    found = {}
    for wish in sorted(waiting, key=lambda each: (each.since_s, each.life_id)):
        own = [record for record in coming if _fits(record, wish)][: wish.num_slices]
        if len(own) == wish.num_slices:
            found[wish.life_id] = max(record.since_s for record in own)
            taken = {record.incarnation for record in own}
            coming = [record for record in coming if record.incarnation not in taken]
    return found


def _is_coming(record: SupplyRecord) -> bool:
    if record.state in TAKEN:
        return record.holder is not None and record.holder.is_handing_over
    # Without a deadline nobody makes slices here.
    boots = record.state == SupplyState.BOOTING and record.until_s is not None
    return boots or record.state == SupplyState.FREE


def _fits(record: SupplyRecord, wish: WaitingReplica) -> bool:
    return (
        (record.generation, record.topology) == (wish.generation, wish.topology)
        and record.compute_class in (None, wish.compute_class)
        and wish.zone in (None, record.zone)
    )
