"""Carries one leased batch from the state it is in to its end.

Every step begins from what the store has, and ends with one write to it: whoever takes the batch
over after a crash begins with the step that was not written. Does not own which batches are leased
(`runner`), nor what becomes of a line (`LineCaller`).
"""

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from serving.domain.capacity.batch_lines import LineRoom, LinesLeft, LineTuner
from serving.domain.limits import MIB
from serving.gateway.batches.answers import LineReply, answer_of, refusal_of, unanswered
from serving.gateway.batches.costs import BatchPrices, CostMeter
from serving.gateway.batches.due import due_at_s
from serving.gateway.batches.lines import (
    BatchLine,
    LineLimits,
    ReadLine,
    RefusedLine,
    check_lines,
    line_or_refusal,
    numbered,
)
from serving.gateway.batches.records import (
    Batch,
    BatchCost,
    BatchLease,
    BatchStatus,
    BatchStep,
    FilePurpose,
    LineAnswer,
    StoredFile,
    finalizing,
    is_to_be_read,
    next_step,
    outcome_of,
    unread,
    validated,
)
from serving.gateway.batches.running.answer_writer import AnswerWriter
from serving.gateway.batches.running.line_queue import AskedLine, LineQueue
from serving.gateway.batches.running.line_source import LineSource
from serving.gateway.batches.running.line_workers import LineWorkers
from serving.gateway.batches.running.replies import is_answer, is_fault, wait_s
from serving.gateway.batches.running.threads import StoreCalls, to_its_end
from serving.gateway.batches.store import BatchStore, NewContent, discarding

# Answers that wait to be written, at most: some MB of a batch; and bytes of them, of which one may
# have tens of MB. A store takes one write of them as a whole, in memory.
_MOST_UNWRITTEN = 1000
_MOST_UNWRITTEN_BYTES = 32 * MIB

NO_ROOM = LineRoom()


class LineCaller(Protocol):
    """The way of a line to its route."""

    async def ask(self, batch: Batch, line: BatchLine) -> LineReply:
        """Returns what the route answers; being cancelled ends the request."""
        ...


@dataclass(frozen=True, slots=True)
class JobSettings:
    """How a batch is carried on.

    A lease is renewed every `check_s`, which is also how late a cancellation is seen, at most.
    `file_lifetime_s` is how long files of answers stay if their batch does not say. `patience_s` is
    the least time until a line that was refused is asked again. `read_line` is called in a thread
    for long calls.
    """

    limits: LineLimits
    lines_in_flight: int
    lease_s: float
    check_s: float
    file_lifetime_s: float
    patience_s: float = 1.0
    read_line: ReadLine = line_or_refusal


@dataclass(slots=True)
class LineCounts:
    """What came of lines at one gateway since its start."""

    num_completed: int = 0
    num_failed: int = 0
    num_refused: int = 0  # and asked again


class BatchJob:
    """One batch under a lease."""

    def __init__(
        self,
        lease: BatchLease,
        store: BatchStore,
        caller: LineCaller,
        settings: JobSettings,
        now_s: Callable[[], float],
        calls: StoreCalls,
        counts: LineCounts,
        prices: BatchPrices | None = None,
        room: LineRoom = NO_ROOM,
        *,
        asks_lines: bool = True,
    ) -> None:
        """Makes the job of a lease; without `prices` it costs nothing.

        One that does not ask lines stops where some are to be asked.
        """
        self._lease = lease
        self._store = store
        self._caller = caller
        self._settings = settings
        self._now_s = now_s
        self._calls = calls
        self._counts = counts
        self._is_to_stop = asyncio.Event()  # no line of it is to be answered any more
        self._prices = prices
        self._meter = None if prices is None else CostMeter(prices, lease.batch_id)
        self._costing = asyncio.Lock()
        self._has_asked = False
        self._room = room
        self._asks_lines = asks_lines
        self._seen: Batch | None = None  # as it was when the lease was renewed last

    async def run(self) -> bool:
        """Carries the batch to its end, or as far as it goes; returns whether it has ended.

        Raises:
            ExceptionGroup: of a `LeaseLostError`, somebody else has it, or of what the store failed
                at. The batch is as it was after the last step that was written.
        """
        try:
            async with asyncio.TaskGroup() as group:
                keeper = group.create_task(self._keep())
                try:
                    return await self._advance()
                finally:
                    keeper.cancel()
        except asyncio.CancelledError:
            # It is given back; who has it next counts its cost from then on.
            await self._renew()
            raise

    async def _advance(self) -> bool:
        while True:
            batch = await self._renew()
            match next_step(batch, self._now_s()):
                case BatchStep.VALIDATE:
                    await self._calls.bulk(self._validate, batch)
                case BatchStep.ANSWER if not self._asks_lines:
                    return False
                case BatchStep.ANSWER:
                    await self._answer(batch)
                    await self._finalize()
                case BatchStep.FINALIZE:
                    await self._finalize()
                case BatchStep.WRITE_FILES:
                    await self._settle_cost()
                    await self._calls.bulk(self._write_files, batch)
                case BatchStep.NOTHING:
                    return True

    async def _keep(self) -> None:
        """Renews the lease, and sees when no more lines are to be answered."""
        while True:
            await asyncio.sleep(self._settings.check_s)
            batch = await self._renew()
            if batch.status is not BatchStatus.VALIDATING:
                is_open = next_step(batch, self._now_s()) is BatchStep.ANSWER
                if not is_open:
                    self._is_to_stop.set()

    async def _renew(self) -> Batch:
        """Lengthens the lease, and writes down what the batch has cost since the last time."""
        async with self._costing:
            cost = BatchCost() if self._meter is None else self._meter.take()
            batch: Batch = await self._calls.brief(
                self._store.renew, self._lease, self._now_s(), self._settings.lease_s, cost
            )
        self._seen = batch
        return batch

    async def _settle_cost(self) -> None:
        """Waits until the cost of all that was asked is known: nothing changes after the end."""
        if self._prices is not None and self._has_asked:
            await asyncio.sleep(self._prices.settled_s)
            await self._renew()

    async def _finalize(self) -> None:
        now_s = self._now_s()
        await self._calls.brief(
            self._store.change_leased, self._lease, lambda batch: finalizing(batch, now_s)
        )

    # -- in a thread for long calls, of which each batch has one --

    def _validate(self, batch: Batch) -> None:
        begun_s = self._now_s()
        if not is_to_be_read(batch, self._lease.term, begun_s):
            self._store.change_leased(self._lease, lambda each: unread(each, begun_s))
            return
        with self._store.open_content(batch.tenant, batch.input_file_id) as content:
            checked = check_lines(
                content, batch.endpoint, self._settings.limits, self._settings.read_line
            )
        now_s = self._now_s()
        self._store.change_leased(
            self._lease,
            lambda each: validated(
                each, checked.num_lines, checked.faults, now_s, checked.by_model
            ),
        )

    def _write_files(self, batch: Batch) -> None:
        """Writes the files of answers, and ends the batch with them."""
        ended_as, now_s = outcome_of(batch), self._now_s()
        with contextlib.ExitStack() as stack:
            output, errors = (
                stack.enter_context(discarding(self._store.new_content())) for _ in range(2)
            )
            for answer in self._store.answers(batch.batch_id):
                (errors if answer.is_failure else output).write(answer.record + b"\n")
            for custom_id in self._unanswered(batch):
                errors.write(unanswered(custom_id, ended_as) + b"\n")
            made = [
                (self._file(batch, kind, content, now_s), content)
                for kind, content in (("output", output), ("error", errors))
                if content.num_bytes  # one without a line is none
            ]
            ids = {content: file.file_id for file, content in made}
            self._store.end(
                self._lease,
                made,
                lambda each: replace(
                    each.enter(ended_as, now_s),
                    output_file_id=ids.get(output),
                    error_file_id=ids.get(errors),
                ),
            )

    def _unanswered(self, batch: Batch) -> Iterator[str]:
        if batch.num_answered >= batch.num_total:  # also of one whose lines were never counted
            return
        answered = self._store.answered_lines(batch.batch_id)
        limits, read = self._settings.limits, self._settings.read_line
        with self._store.open_content(batch.tenant, batch.input_file_id) as content:
            for number, line in numbered(content, limits):
                if number not in answered:
                    yield read(number, line, batch.endpoint, limits).custom_id

    def _file(self, batch: Batch, kind: str, content: NewContent, now_s: float) -> StoredFile:
        lifetime_s = batch.output_lifetime_s or self._settings.file_lifetime_s
        return StoredFile(
            new_file_id(),
            batch.tenant,
            f"{batch.batch_id}_{kind}.jsonl",
            FilePurpose.BATCH_OUTPUT,
            content.num_bytes,
            now_s,
            now_s + lifetime_s,
        )

    # -- lines --

    async def _answer(self, batch: Batch) -> None:
        """Answers lines until all are answered, or no more are to be."""
        bulk = self._calls.bulk
        answered = await bulk(self._store.answered_lines, batch.batch_id)
        content = await bulk(self._store.open_content, batch.tenant, batch.input_file_id)
        try:
            limits, read = self._settings.limits, self._settings.read_line
            source = LineSource(content, batch.endpoint, limits, answered, bulk, read)
            writer = AnswerWriter(
                self._write,
                self._store.write_interval_s,
                _MOST_UNWRITTEN,
                _MOST_UNWRITTEN_BYTES,
            )
            await self._until_stopped(self._answer_all(batch, source, writer), writer)
        finally:
            # A thread may be reading, which a task that is cancelled does not wait for.
            await to_its_end(bulk(content.close))

    async def _until_stopped(self, work: Coroutine[Any, Any, None], writer: AnswerWriter) -> None:
        """Does work until it ends or no more lines are to be answered; keeps what came by then.

        Raises what the work raised, also while it was being stopped: what is not kept may be lines
        that were answered, and the batch is not to be finalized as if nothing had happened.
        """
        working = asyncio.create_task(work)
        stop = asyncio.create_task(self._is_to_stop.wait())
        try:
            await asyncio.wait([working, stop], return_when=asyncio.FIRST_COMPLETED)
        finally:
            working.cancel()
            stop.cancel()
            (ended, _) = await asyncio.gather(working, stop, return_exceptions=True)
            failure = None if isinstance(ended, asyncio.CancelledError) else ended
            if failure is None:
                await writer.flush()
        if failure is not None:
            raise failure

    async def _answer_all(self, batch: Batch, source: LineSource, writer: AnswerWriter) -> None:
        queue = LineQueue(source, lambda: workers.num_wanted, _models_of(batch))

        async def answer_one() -> bool:
            while (asked := await queue.next()) is not None:
                answer = await self._ask(batch, asked)
                if isinstance(answer, LineAnswer):
                    queue.done(asked)
                    await writer.add(answer)
                    return True
                queue.put_back(asked, answer)
            return False

        async with asyncio.TaskGroup() as group:
            writing = group.create_task(writer.run())
            workers = LineWorkers(group, answer_one, self._settings.lines_in_flight)
            tuning = group.create_task(self._tune(workers, queue))
            await workers.wait_ended()
            writing.cancel()
            tuning.cancel()

    async def _tune(self, workers: LineWorkers, queue: LineQueue) -> None:
        """Has more lines asked at once where it has to be, and fewer where others suffer."""
        tuner = LineTuner(self._room, self._settings.lines_in_flight)
        while True:
            await asyncio.sleep(self._settings.check_s)
            batch, now_s = self._seen, self._now_s()
            is_refused = queue.take_is_refused()
            if batch is None:
                continue
            num_left = batch.num_total - batch.num_answered
            left = LinesLeft(num_left, due_at_s(batch) - now_s, workers.line_s)
            names = batch.lines_by_model
            workers.want(tuner.lines(now_s, workers.num_wanted, left, names, is_refused=is_refused))

    async def _ask(self, batch: Batch, asked: AskedLine) -> LineAnswer | float:
        """Returns what is kept of a line, or in how many seconds it is to be asked again."""
        if isinstance(asked.line, RefusedLine):
            return refusal_of(asked.line)
        self._has_asked = True
        reply = await self._caller.ask(batch, asked.line)
        asked.num_faults += is_fault(reply)
        if is_answer(reply, asked.num_faults):
            return answer_of(asked.line, reply)
        self._counts.num_refused += 1
        return wait_s(reply, asked.num_refusals, self._settings.patience_s)

    async def _write(self, answers: Sequence[LineAnswer]) -> None:
        await self._calls.brief(self._store.add_answers, self._lease, answers)
        num_failed = sum(each.is_failure for each in answers)
        self._counts.num_failed += num_failed
        self._counts.num_completed += len(answers) - num_failed


def _models_of(batch: Batch) -> Collection[str]:
    """Returns the models that lines name; none if it is not known of all lines."""
    is_known = sum(batch.lines_by_model.values()) == batch.num_total
    return batch.lines_by_model.keys() if is_known else ()


def new_file_id() -> str:
    """Returns the id of a new file. It cannot be guessed, and is fit for the name of one."""
    return f"file-{uuid.uuid4().hex}"
