"""Which batch of a bucket is leased next, by what this process knows of those that are open.

The names of objects say which batches are open, whose they are and how long they may take. Whether
somebody has one, and what is to be done with it, says its head alone, and that is a reading for
each: so what was found there counts for a while. Does not own what the owner of a batch does
(`leases`).
"""

import logging
import threading
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from serving.gateway.batches.bucket import names
from serving.gateway.batches.bucket.bucket import BatchBucket
from serving.gateway.batches.bucket.documents import UnreadableError
from serving.gateway.batches.bucket.head import BatchHead, claimed
from serving.gateway.batches.bucket.names import OpenMarker
from serving.gateway.batches.records import Batch, BatchLease, BatchStep, next_step
from serving.gateway.batches.store import Claim

logger = logging.getLogger(__name__)

# A batch that somebody had when it was looked at is looked at again so much later, or when its
# lease is over: it may have been given back.
_LOOK_AGAIN_S = 10.0
# A batch that its catalog does not have is being made, or whoever made it died. Nobody waits for
# the answer to a request as long.
_MAKING_S = 600.0
# A head that this build cannot read is looked at again so much later, and told of again.
_UNREADABLE_S = 600.0
# One that waits until its lines can be asked is looked at again so much later for something else
# that is to be done: a client that cancels it does so at a gateway, which then knows.
_WAITING_S = 600.0
# A claim that finds so many of those leaves the others to the next one: a reading takes tens of ms.
_MOST_WAITING = 50


class _Found(StrEnum):
    """What was found when a batch was looked at."""

    LEASED = "leased"
    WAITING = "waiting"  # nobody's, with lines to ask
    UNREADABLE = "unreadable"  # of a newer build, perhaps, which goes on with it


@dataclass(frozen=True, slots=True)
class _Seen:
    """Until when a batch is taken to be as it was found."""

    tenant: str
    found: _Found
    until_s: float


class BatchClaims:
    """Claims of batches in a bucket. Used from any thread."""

    def __init__(self, bucket: BatchBucket) -> None:
        self._bucket = bucket
        self._lock = threading.Lock()
        self._seen: dict[str, _Seen] = {}

    def claim(
        self,
        markers: Sequence[OpenMarker],
        owner: str,
        now_s: float,
        lease_s: float,
        which: Claim,
    ) -> BatchLease | None:
        """Leases one of the open batches; see `BatchStore.claim`."""
        self._look_at_leased(markers, now_s)
        num_waiting = 0
        for marker in self._candidates(markers, now_s, which):
            head = self._free_head(marker, now_s)
            if head is None:
                continue
            if which is Claim.WITHOUT_LINES and next_step(head.batch, now_s) is BatchStep.ANSWER:
                until_s = min(head.batch.expires_at_s, now_s + _WAITING_S)
                self._note(marker, _Found.WAITING, until_s)
                num_waiting += 1
                if num_waiting == _MOST_WAITING:
                    return None
                continue
            lease = self._claim(marker, owner, now_s, lease_s)
            if lease is not None:
                return lease
        return None

    def forget(self, batch_id: str) -> None:
        """Has a batch looked at again that this process has changed or given back."""
        with self._lock:
            self._seen.pop(batch_id, None)

    def _look_at_leased(self, markers: Sequence[OpenMarker], now_s: float) -> None:
        """Looks whether somebody still has the batches of which that was known until lately."""
        with self._lock:
            are_open = {marker.batch_id for marker in markers}
            self._seen = {key: each for key, each in self._seen.items() if key in are_open}
            lately = {
                key
                for key, each in self._seen.items()
                if each.found is _Found.LEASED and each.until_s <= now_s
            }
        for marker in markers:
            if marker.batch_id in lately and self._free_head(marker, now_s) is not None:
                self.forget(marker.batch_id)

    def _candidates(
        self, markers: Sequence[OpenMarker], now_s: float, which: Claim
    ) -> Iterator[OpenMarker]:
        """Yields batches that may be free: of the tenants with the fewest leases, the most urgent.

        What is learnt of the one that was yielded counts for the next.
        """
        waiting: defaultdict[str, list[OpenMarker]] = defaultdict(list)
        with self._lock:
            for marker in reversed(markers):
                if not _is_known(self._seen.get(marker.batch_id), now_s, which):
                    waiting[marker.tenant].append(marker)
        while waiting:
            with self._lock:
                leased = Counter(
                    each.tenant
                    for each in self._seen.values()
                    if each.found is _Found.LEASED and each.until_s > now_s
                )
            tenant = min(waiting, key=lambda each: (leased[each], waiting[each][-1].name))
            if which is Claim.OF_NEW_TENANT and leased[tenant]:
                return
            yield waiting[tenant].pop()
            if not waiting[tenant]:
                del waiting[tenant]

    def _free_head(self, marker: OpenMarker, now_s: float) -> BatchHead | None:
        """Returns the head of an open batch, if nobody has it; sees to what is left of others."""
        try:
            head = self._bucket.head(marker.batch_id)
        except UnreadableError as error:
            logger.warning("batch_unreadable batch=%s reason=%s", marker.batch_id, error)
            self._note(marker, _Found.UNREADABLE, now_s + _UNREADABLE_S)
            return None
        if head is None:
            if now_s - marker.made_at_s > _MAKING_S:
                self._bucket.store.delete(marker.name)
        elif head.batch.has_ended:
            self._bucket.settle(head)
            self._bucket.store.delete(marker.name)  # which an earlier build may have named
        elif head.until_s > now_s:
            self._note(marker, _Found.LEASED, min(head.until_s, now_s + _LOOK_AGAIN_S))
        elif head.term or self._is_made(head.batch, marker, now_s):
            return head
        return None

    def _is_made(self, batch: Batch, marker: OpenMarker, now_s: float) -> bool:
        """Returns whether the catalog has a new batch; deletes one that was never made whole."""
        if self._bucket.catalog(batch.tenant).has_batch(batch.batch_id):
            return True
        if now_s - marker.made_at_s > _MAKING_S:
            self._bucket.store.delete(names.head_name(batch.batch_id))
            self._bucket.store.delete(marker.name)
        return False

    def _claim(
        self, marker: OpenMarker, owner: str, now_s: float, lease_s: float
    ) -> BatchLease | None:
        change_id = uuid.uuid4().hex
        found = self._bucket.heads.change(
            names.head_name(marker.batch_id),
            lambda head: None if head is None else claimed(head, owner, now_s, lease_s, change_id),
        )
        if found is None:
            return None
        head = found[0]
        self._note(marker, _Found.LEASED, min(head.until_s, now_s + _LOOK_AGAIN_S))
        if head.change_id != change_id:  # somebody else has claimed it meanwhile
            return None
        return BatchLease(marker.batch_id, owner, head.term, head.until_s)

    def _note(self, marker: OpenMarker, found: _Found, until_s: float) -> None:
        with self._lock:
            self._seen[marker.batch_id] = _Seen(marker.tenant, found, until_s)


def _is_known(seen: _Seen | None, now_s: float, which: Claim) -> bool:
    """Returns whether a batch need not be looked at for such a claim."""
    if seen is None or seen.until_s <= now_s:
        return False
    return seen.found is not _Found.WAITING or which is Claim.WITHOUT_LINES
