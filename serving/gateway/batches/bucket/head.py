"""The head of a batch: the batch, its lease, and which of its answers count. Pure.

Whatever changes a batch changes its head, in one write. Answers are written into objects of their
own before; they count once the head says so. The owner of a term numbers what it writes, so that
the head says it with one number for each term.

A change may be asked for twice, if its answer was lost and somebody else has written meanwhile.
What would not be the same the second time (a claim, a cost, answers) has an id, and the head has
that of the last one: an owner makes one such change at a time.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import msgspec

from serving.gateway.batches.bucket.documents import Document
from serving.gateway.batches.records import (
    TAKING_ANSWERS,
    Batch,
    BatchCost,
    BatchLease,
    LineAnswer,
)
from serving.gateway.batches.store import LeaseLostError

# A lease is lengthened when less of it than this part is left: each time it is a write.
_RENEWED_BELOW = 0.75


class BatchHead(Document, frozen=True, kw_only=True):
    """All that is known of one batch.

    `written` has the terms in which there were answers, and how many objects of each count.
    `answered` has a bit for each line that has an answer. `file_ids` are the files it ended with.
    `change_id` is of the last claim, cost or answers.
    """

    batch: Batch
    owner: str | None = None
    term: int = 0
    until_s: float = 0.0
    written: tuple[tuple[int, int], ...] = ()
    answered: bytes = b""
    file_ids: tuple[str, ...] = ()
    change_id: str = ""

    def has_lease(self, lease: BatchLease) -> bool:
        """Returns whether the batch is that lease's."""
        return (self.owner, self.term) == (lease.owner, lease.term)

    def next_number(self, term: int) -> int:
        """Returns the number of the next answers of a term."""
        return dict(self.written).get(term, 0) + 1

    def answered_lines(self) -> set[int]:
        """Returns the lines that have an answer."""
        return {
            8 * at + bit
            for at, byte in enumerate(self.answered)
            if byte
            for bit in range(8)
            if byte >> bit & 1
        }


def claimed(head: BatchHead, owner: str, now_s: float, lease_s: float, change_id: str) -> BatchHead:
    """Returns the head under a new lease; the same head if somebody has it, or it has ended.

    Its `change_id` says whether the lease is of this claim.
    """
    if head.batch.has_ended or head.until_s > now_s:
        return head
    return msgspec.structs.replace(
        head, owner=owner, term=head.term + 1, until_s=now_s + lease_s, change_id=change_id
    )


def renewed(
    head: BatchHead,
    lease: BatchLease,
    now_s: float,
    lease_s: float,
    cost: BatchCost,
    change_id: str,
) -> BatchHead:
    """Returns the head with a longer lease and more cost; the same if neither needs a write.

    The same too if this cost is in it already.

    Raises:
        LeaseLostError: somebody else has the batch.
    """
    check_lease(head, lease)
    if head.change_id == change_id:
        return head
    if not cost.chip_ms and head.until_s - now_s > _RENEWED_BELOW * lease_s:
        return head
    batch = replace(head.batch, cost=head.batch.cost + cost)
    return msgspec.structs.replace(head, batch=batch, until_s=now_s + lease_s, change_id=change_id)


def released(head: BatchHead, lease: BatchLease) -> BatchHead:
    """Returns the head without its lease; the same if it is another one's."""
    if not head.has_lease(lease):
        return head
    return msgspec.structs.replace(head, owner=None, until_s=0.0)


def changed(head: BatchHead, decide: Callable[[Batch], Batch]) -> BatchHead:
    """Returns the head of a changed batch; the same if it stays as it is."""
    batch = decide(head.batch)
    return head if batch == head.batch else msgspec.structs.replace(head, batch=batch)


def with_answers(
    head: BatchHead,
    lease: BatchLease,
    number: int,
    answers: Sequence[LineAnswer],
    change_id: str,
) -> BatchHead:
    """Returns the head with the answers of one object; lines that have one keep it.

    The same head, once the batch takes none, or if none is new, or it has this object already.

    Raises:
        LeaseLostError: somebody else has the batch, or writes under this lease.
    """
    check_lease(head, lease)
    if head.change_id == change_id:
        return head
    if head.next_number(lease.term) != number:
        raise LeaseLostError(lease.batch_id)
    batch = head.batch
    new = list(_new(answers, head.answered_lines()))
    if batch.status not in TAKING_ANSWERS or not new:
        return head
    num_failed = sum(answer.is_failure for answer in new)
    counted = replace(
        batch,
        num_completed=batch.num_completed + len(new) - num_failed,
        num_failed=batch.num_failed + num_failed,
        usage=sum((answer.usage for answer in new), batch.usage),
    )
    return msgspec.structs.replace(
        head,
        batch=counted,
        written=tuple(sorted({**dict(head.written), lease.term: number}.items())),
        answered=_with_bits(head.answered, [answer.line for answer in new]),
        change_id=change_id,
    )


def check_lease(head: BatchHead, lease: BatchLease) -> None:
    """Refuses a lease that the batch is no longer under.

    Raises:
        LeaseLostError: somebody else has the batch.
    """
    if not head.has_lease(lease):
        raise LeaseLostError(lease.batch_id)


def _new(answers: Iterable[LineAnswer], answered: set[int]) -> Iterable[LineAnswer]:
    for answer in answers:
        if answer.line not in answered:
            answered.add(answer.line)
            yield answer


def _with_bits(bits: bytes, lines: Sequence[int]) -> bytes:
    longer = bytearray(bits)
    longer.extend(bytes(max(0, max(lines) // 8 + 1 - len(longer))))
    for line in lines:
        longer[line // 8] |= 1 << line % 8
    return bytes(longer)
