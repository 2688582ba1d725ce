"""The records of the batch lane, and the states of a batch. Pure.

    validating ─> in_progress ─> finalizing ─> completed, or expired if lines are left
        │  │           │
        │  └───────────┴─> cancelling ─> cancelled
        └─> failed, or expired before anybody has read it; cancelled if nobody has it

Does not own how they are kept (`store`), nor what clients see of them (`answers`). Times are Unix
seconds. The names of states and codes are OpenAI's, by the types of its Python client 2.x as read
on 2026-11-26.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType

from serving.config.api_keys import KeyRecord
from serving.gateway.telemetry.request_metrics import DEFAULT_TENANT


class BatchStatus(StrEnum):
    """The states of a batch."""

    VALIDATING = "validating"  # its lines have not been read yet
    FAILED = "failed"  # some line cannot be a request, or was not read: none was answered
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"  # all is answered, or time is up: the files are written
    COMPLETED = "completed"
    EXPIRED = "expired"  # the completion window was over before all was answered
    CANCELLING = "cancelling"  # its owner has still to stop
    CANCELLED = "cancelled"


ENDED = frozenset(
    {BatchStatus.FAILED, BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.CANCELLED}
)
# In these its owner may still have answers to lines that it asked. Files are written afterwards,
# from what is there then.
TAKING_ANSWERS = frozenset({BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING})


class FilePurpose(StrEnum):
    """What a file is for."""

    BATCH = "batch"  # the lines of a batch, uploaded
    BATCH_OUTPUT = "batch_output"  # answers or errors of one


class BatchStep(StrEnum):
    """What the owner of a batch has to do next."""

    VALIDATE = "validate"
    ANSWER = "answer"
    FINALIZE = "finalize"
    WRITE_FILES = "write_files"
    NOTHING = "nothing"


# Owners that may try to read the lines of a batch: what they raise may be unforeseen, or end them.
MAX_READINGS = 8
NO_LINES: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file of a tenant. `expires_at_s` is `None` if it stays until it is deleted."""

    file_id: str
    tenant: str
    filename: str
    purpose: FilePurpose
    num_bytes: int
    created_at_s: float
    expires_at_s: float | None


@dataclass(frozen=True, slots=True)
class LineFault:
    """Why a line cannot be a request. `line` counts from 1; `None` if it is of no single line."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class KeyOfBatch:
    """The key that made a batch. Its lines may do what this key may when they are answered.

    `digest` is the SHA-256 of the key, in hexadecimal digits, empty where none was needed. `name`
    is its record's: the key that has it later, of the same tenant, stands for one that is gone.
    """

    digest: str = ""
    name: str | None = None

    @classmethod
    def of(cls, holder: KeyRecord) -> "KeyOfBatch":
        """Returns what is kept of a key."""
        return cls(holder.digest.hex(), holder.name)


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """The tokens of answers. Cached ones are among the input."""

    num_input: int = 0
    num_cached: int = 0
    num_output: int = 0

    def __add__(self, other: "TokenUsage") -> "TokenUsage":
        """Returns the sum."""
        return TokenUsage(
            self.num_input + other.num_input,
            self.num_cached + other.num_cached,
            self.num_output + other.num_output,
        )


@dataclass(frozen=True, slots=True)
class BatchCost:
    """What lines cost on engines: chip-milliseconds of serving, as the slice ledger has them.

    `usd` is `None` if some of the chips have no price.
    """

    chip_ms: int = 0
    usd: float | None = 0.0

    def __add__(self, other: "BatchCost") -> "BatchCost":
        """Returns the sum."""
        usd = None if self.usd is None or other.usd is None else self.usd + other.usd
        return BatchCost(self.chip_ms + other.chip_ms, usd)


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch. `entered` has the time at which it came into each of its states.

    `num_total` lines is 0 until they are counted; `lines_by_model`, by the names that they give, is
    empty until then, and lines may give none. `num_completed` were answered with status 200,
    `num_failed` with another. The files are `None` until there are some; `output_lifetime_s` is how
    long they stay after they are written, `None` for as long as other files.
    """

    batch_id: str
    tenant: str
    key: KeyOfBatch
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at_s: float
    expires_at_s: float
    status: BatchStatus = BatchStatus.VALIDATING
    metadata: Mapping[str, str] = field(default_factory=dict)
    output_lifetime_s: int | None = None
    num_total: int = 0
    lines_by_model: Mapping[str, int] = field(default_factory=dict)
    num_completed: int = 0
    num_failed: int = 0
    usage: TokenUsage = TokenUsage()
    cost: BatchCost = BatchCost()
    entered: Mapping[BatchStatus, float] = field(default_factory=dict)
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: tuple[LineFault, ...] = ()

    @property
    def num_answered(self) -> int:
        """The lines that are done with, whatever came of them."""
        return self.num_completed + self.num_failed

    @property
    def has_ended(self) -> bool:
        """True if nothing of it changes any more."""
        return self.status in ENDED

    def enter(self, status: BatchStatus, now_s: float) -> "Batch":
        """Returns it in another state."""
        return replace(self, status=status, entered={**self.entered, status: now_s})


@dataclass(frozen=True, slots=True)
class BatchLease:
    """The right of one owner to go on with a batch. `term` is a new one each time it is given."""

    batch_id: str
    owner: str
    term: int
    until_s: float


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """What came of one line. `record` is its line of the output or error file, without line end."""

    line: int
    is_failure: bool
    record: bytes
    usage: TokenUsage = TokenUsage()


def tenant_of(holder: KeyRecord) -> str:
    """Returns whose files and batches the holder of a key sees."""
    return holder.tenant or DEFAULT_TENANT


def next_step(batch: Batch, now_s: float) -> BatchStep:
    """Returns what the owner of a batch has to do next."""
    match batch.status:
        case BatchStatus.VALIDATING:
            return BatchStep.VALIDATE
        case BatchStatus.IN_PROGRESS:
            is_over = batch.num_answered >= batch.num_total or now_s >= batch.expires_at_s
            return BatchStep.FINALIZE if is_over else BatchStep.ANSWER
        case BatchStatus.FINALIZING | BatchStatus.CANCELLING:
            return BatchStep.WRITE_FILES
        case _:
            return BatchStep.NOTHING


def validated(
    batch: Batch,
    num_lines: int,
    faults: tuple[LineFault, ...],
    now_s: float,
    lines_by_model: Mapping[str, int] = NO_LINES,
) -> Batch:
    """Returns a batch whose lines have been read. One that was cancelled meanwhile stays so."""
    if batch.status is not BatchStatus.VALIDATING:
        return batch
    if faults:
        return replace(batch.enter(BatchStatus.FAILED, now_s), errors=faults)
    begun = batch.enter(BatchStatus.IN_PROGRESS, now_s)
    return replace(begun, num_total=num_lines, lines_by_model=dict(lines_by_model))


def is_to_be_read(batch: Batch, term: int, now_s: float) -> bool:
    """Returns whether the lines of a batch are still to be read.

    `term` is that of the lease: each owner reads once.
    """
    return now_s < batch.expires_at_s and term <= MAX_READINGS


def unread(batch: Batch, now_s: float) -> Batch:
    """Returns a batch whose lines are not read any more; see `is_to_be_read`.

    Nothing is wrong with one whose window is over, and it may be created again: it has expired. One
    that nobody could read has failed. One that was cancelled meanwhile stays so.
    """
    if batch.status is not BatchStatus.VALIDATING:
        return batch
    if now_s >= batch.expires_at_s:
        message = "The completion window was over before the lines had been read."
        status, fault = BatchStatus.EXPIRED, LineFault("batch_expired", message)
    else:
        message = f"The lines could not be read, {MAX_READINGS} times in a row."
        status, fault = BatchStatus.FAILED, LineFault("validation_failed", message)
    return replace(batch.enter(status, now_s), errors=(fault,))


def finalizing(batch: Batch, now_s: float) -> Batch:
    """Returns a batch of which no line is answered any more. One that is cancelled stays so."""
    if batch.status is not BatchStatus.IN_PROGRESS:
        return batch
    return batch.enter(BatchStatus.FINALIZING, now_s)


def cancelled(batch: Batch, now_s: float, *, is_free: bool = False) -> Batch:
    """Returns a batch that a client has cancelled; the files of one that ends are written anyway.

    One of which nothing was read yet has none. If it `is_free`, leased by nobody, there is no owner
    to stop either, and it has ended.

    Raises:
        ValueError: it has ended.
    """
    if batch.has_ended:
        raise ValueError(f"it is {batch.status}")
    if batch.status in (BatchStatus.CANCELLING, BatchStatus.FINALIZING):
        return batch
    cancelling = batch.enter(BatchStatus.CANCELLING, now_s)
    if is_free and batch.status is BatchStatus.VALIDATING:
        return cancelling.enter(BatchStatus.CANCELLED, now_s)
    return cancelling


def outcome_of(batch: Batch) -> BatchStatus:
    """Returns the state in which a batch ends whose files are written."""
    if batch.status is BatchStatus.CANCELLING:
        return BatchStatus.CANCELLED
    is_whole = batch.num_answered >= batch.num_total
    return BatchStatus.COMPLETED if is_whole else BatchStatus.EXPIRED
