"""The seam between the batch lane and what keeps its files, batches and answers.

Owns the interface and its errors. All calls block, and are safe from several threads and processes:
each is one transaction, or none at all. Does not own the states of a batch (`records`): whoever
changes one hands over a pure function from the batch as it is to the batch as it shall be.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import BinaryIO, Protocol

from serving.gateway.batches.records import Batch, BatchCost, BatchLease, LineAnswer, StoredFile

# How long the place of a record that is gone is kept, for lists that are at it: no client takes as
# long over a page, nor over the content of a file that is deleted meanwhile.
PLACE_S = 3600.0
# Batches that one sweep deletes, or notes the end of: a folder's one writer is held up for 50 ms.
MAX_SWEPT = 500


class LeaseLostError(Exception):
    """Reports that somebody else goes on with the batch. Leave it alone."""


class StoreFullError(Exception):
    """Reports that a tenant's files are as large as they may be. Delete some."""

    def __init__(self, num_bytes: int, max_bytes: float) -> None:
        super().__init__(num_bytes, max_bytes)
        self.num_bytes, self.max_bytes = num_bytes, max_bytes


class TooManyOpenError(Exception):
    """Reports that as many batches of a tenant have not ended as may. Wait, or cancel some."""

    def __init__(self, num_open: int, most: float) -> None:
        super().__init__(num_open, most)
        self.num_open, self.most = num_open, most


class MissingFileError(Exception):
    """Reports that there is no such file, or no more."""


class FileInUseError(Exception):
    """Reports that a batch that has not ended reads the file. Cancel the batch first."""

    def __init__(self, batch_id: str) -> None:
        super().__init__(batch_id)
        self.batch_id = batch_id


@dataclass(frozen=True, slots=True)
class TenantBounds:
    """What a tenant may have that makes a batch.

    With the new one, `max_open_batches` that have not ended; and `max_bytes` in its files, to which
    the answers of batches add without being asked.
    """

    max_open_batches: float = math.inf
    max_bytes: float = math.inf


NO_BOUNDS = TenantBounds()


@dataclass(frozen=True, slots=True)
class Page:
    """A part of a list. `after` is the id behind which it begins, `None` for the beginning."""

    limit: int
    after: str | None = None
    is_oldest_first: bool = False


class Claim(StrEnum):
    """Which of the batches that nobody has are claimed."""

    ANY = "any"
    OF_NEW_TENANT = "of_new_tenant"  # of a tenant of whom nobody has a batch
    WITHOUT_LINES = "without_lines"  # no line is to be asked now: it has to be read, or ended


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep has deleted, by ids. `has_more`: more may have had its time already."""

    file_ids: list[str]
    batch_ids: list[str]
    has_more: bool


class NewContent(Protocol):
    """Content that is being written, and that nobody sees until it belongs to a file."""

    @property
    def num_bytes(self) -> int:
        """The bytes written so far."""
        ...

    def write(self, data: bytes) -> None:
        """Appends."""
        ...

    def discard(self) -> None:
        """Throws it away, unless it belongs to a file already. Idempotent."""
        ...


@contextlib.contextmanager
def discarding(content: NewContent) -> Iterator[NewContent]:
    """Throws content away at the end, unless it has become a file."""
    try:
        yield content
    finally:
        content.discard()


class BatchStore(Protocol):
    """What keeps the batch lane.

    Of one batch, answers are to be written `write_interval_s` apart: some stores bear no more.
    """

    write_interval_s: float

    def new_content(self) -> NewContent:
        """Begins the content of a file."""
        ...

    def add_file(self, file: StoredFile, content: NewContent, max_tenant_bytes: int) -> None:
        """Makes a file of it.

        Raises:
            StoreFullError: the files of its tenant would be larger than that.
        """
        ...

    def file(self, tenant: str, file_id: str) -> StoredFile | None:
        """Returns a tenant's file; `None` if it has no such file."""
        ...

    def files(self, tenant: str, page: Page, purpose: str | None = None) -> list[StoredFile]:
        """Returns a tenant's files, the newest first."""
        ...

    def delete_file(self, tenant: str, file_id: str, now_s: float) -> bool:
        """Deletes a tenant's file; returns whether there was one.

        Raises:
            FileInUseError: a batch needs it.
        """
        ...

    def open_content(self, tenant: str, file_id: str) -> BinaryIO:
        """Opens the content of a file, which can be read to its end though it is deleted.

        Raises:
            MissingFileError: the tenant has no such file.
        """
        ...

    def sweep(self, now_s: float, batch_lifetime_s: float) -> Swept:
        """Deletes files that have expired, content that nobody has, and batches that are over.

        A batch goes `batch_lifetime_s` after its end, as that was at the first sweep after it, and
        not before its files of answers. Of batches a bounded number goes at once. Lists that are at
        a record that goes, or at a file that is deleted, go on behind it.
        """
        ...

    def add_batch(self, batch: Batch, bounds: TenantBounds = NO_BOUNDS) -> None:
        """Takes a new batch in.

        Raises:
            TooManyOpenError: its tenant has as many as it may.
            StoreFullError: the files of its tenant are larger than they may be.
            MissingFileError: its tenant has no such file to read.
        """
        ...

    def batch(self, tenant: str, batch_id: str) -> Batch | None:
        """Returns a tenant's batch; `None` if it has no such batch."""
        ...

    def batches(self, tenant: str, page: Page) -> list[Batch]:
        """Returns a tenant's batches, the newest first."""
        ...

    def open_batches(self, limit: int) -> list[Batch]:
        """Returns so many batches that have not ended: one of each tenant in turn.

        Of a tenant those first whose window is over first. One that this build cannot read is left
        out.
        """
        ...

    def change(self, tenant: str, batch_id: str, decide: Callable[[Batch], Batch]) -> Batch | None:
        """Changes a batch, whoever goes on with it; `None` if the tenant has no such batch.

        What `decide` raises is raised, and nothing is changed.
        """
        ...

    def change_free(
        self, tenant: str, batch_id: str, now_s: float, decide: Callable[[Batch], Batch]
    ) -> Batch | None:
        """Changes a batch that nobody has leased; `None` if somebody has, or there is none.

        `decide` may end it, if it has no answers. What it raises is raised, and nothing is changed.
        """
        ...

    def claim(
        self, owner: str, now_s: float, lease_s: float, which: Claim = Claim.ANY
    ) -> BatchLease | None:
        """Leases a batch that has not ended and that nobody has; `None` if there is none.

        Of the tenants with the fewest leased batches, and of these batches the one whose window is
        over first.
        """
        ...

    def renew(self, lease: BatchLease, now_s: float, lease_s: float, cost: BatchCost) -> Batch:
        """Lengthens a lease, and adds to what its batch has cost; returns the batch as it is now.

        Raises:
            LeaseLostError: somebody else has it.
        """
        ...

    def release(self, lease: BatchLease) -> None:
        """Gives a batch back for the next to claim. No effect if somebody else has it."""
        ...

    def change_leased(self, lease: BatchLease, decide: Callable[[Batch], Batch]) -> Batch:
        """Changes a leased batch, and returns it.

        Raises:
            LeaseLostError: somebody else has it.
        """
        ...

    def add_answers(self, lease: BatchLease, answers: Sequence[LineAnswer]) -> Batch:
        """Keeps what came of lines; a line that has an answer keeps that. Returns the batch.

        None is kept once the batch is no longer in progress: its files are written from what it
        had then.

        Raises:
            LeaseLostError: somebody else has the batch. None of them is kept.
        """
        ...

    def answered_lines(self, batch_id: str) -> set[int]:
        """Returns the numbers of the lines that have an answer."""
        ...

    def answers(self, batch_id: str) -> Iterator[LineAnswer]:
        """Yields the answers in the order of their lines, without their usage."""
        ...

    def end(
        self,
        lease: BatchLease,
        files: Sequence[tuple[StoredFile, NewContent]],
        decide: Callable[[Batch], Batch],
    ) -> Batch:
        """Adds a batch's files, ends it by `decide`, and forgets its answers: all or nothing.

        Raises:
            LeaseLostError: somebody else has it.
        """
        ...

    def close(self) -> None:
        """Closes it. Idempotent."""
        ...
