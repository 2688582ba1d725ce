"""A batch is carried to its end whatever happens between two steps: each line once, none lost."""

import asyncio
import contextlib
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.gateway.batches.answers import LineReply
from serving.gateway.batches.lines import BatchLine, LineLimits
from serving.gateway.batches.records import (
    MAX_READINGS,
    Batch,
    BatchLease,
    BatchStatus,
    FilePurpose,
    KeyOfBatch,
    StoredFile,
    cancelled,
)
from serving.gateway.batches.running.job import BatchJob, JobSettings, LineCounts
from serving.gateway.batches.running.replies import wait_s
from serving.gateway.batches.running.threads import StoreCalls
from serving.gateway.batches.store import BatchStore, Page

from .kept import KINDS, Kept, kept_in

PATH = "/v1/completions"
LIMITS = LineLimits(max_lines=100, max_line_bytes=1000)
WINDOW_S, LEASE_S = 1000.0, 30.0
# No lease is renewed while a job runs unless a test wants it.
SETTINGS = JobSettings(LIMITS, 2, LEASE_S, 1e6, 1e6, patience_s=0.0)
DEADLINE_S = 30.0
NUM_LINES = 5
FINAL = 501  # a fault that says that it stays
MANY = Page(100)


class OwnerDiedError(BaseException):
    """The process of an owner is gone."""


class Interrupted:
    """A store of which each call may be preceded or followed by what a test wants."""

    def __init__(self, store: BatchStore, before: Callable[[int, str], None]) -> None:
        self._store = store
        self._before = before
        self.num_calls = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if not callable(method):
            return method

        def call(*values: Any, **named: Any) -> Any:
            self._before(self.num_calls, name)
            self.num_calls += 1
            done = method(*values, **named)
            with contextlib.ExitStack() as stack:
                if name in ("open_content", "new_content"):
                    # Of an owner that is gone nothing is open any more.
                    stack.callback(done.close if name == "open_content" else done.discard)
                self._before(self.num_calls, name)
                self.num_calls += 1
                stack.pop_all()
            return done

        return call


class World:
    """A store with one batch, a clock, and routes that answer a line with its own body."""

    def __init__(self, kept: Kept, lines: list[dict[str, Any]] | bytes | None = None) -> None:
        self.store = kept.open()
        self.now_s = 0.0
        self.asked: Counter[str] = Counter()
        self.replies: dict[str, list[int]] = {}  # statuses of a line, one after the other; then 200
        self.counts = LineCounts()
        text = lines if isinstance(lines, bytes) else jsonl(lines or requests(NUM_LINES))
        content = self.store.new_content()
        content.write(text)
        file = StoredFile("file-1", "a", "in", FilePurpose.BATCH, len(text), 0.0, None)
        self.store.add_file(file, content, 10**9)
        content.discard()
        key = KeyOfBatch("", None)
        self.store.add_batch(Batch("b1", "a", key, PATH, "file-1", "24h", 0.0, WINDOW_S))

    @property
    def batch(self) -> Batch:
        found = self.store.batch("a", "b1")
        assert found is not None
        return found

    async def ask(self, batch: Batch, line: BatchLine) -> LineReply:
        await asyncio.sleep(0)
        self.asked[line.custom_id] += 1
        statuses = self.replies.get(line.custom_id, [])
        status = statuses.pop(0) if statuses else 200
        usage = {"usage": {"prompt_tokens": 3, "completion_tokens": 2}}
        body = json.dumps(json.loads(line.body) | usage, indent=1).encode()
        request_id = f"request-of-{line.custom_id}"
        return LineReply(status, body, request_id, is_final=status == FINAL)

    def claim(self, owner: str = "gw-1") -> BatchLease | None:
        return self.store.claim(owner, self.now_s, LEASE_S)

    async def carry(
        self,
        lease: BatchLease | None = None,
        before: Callable[[int, str], None] | None = None,
        settings: JobSettings = SETTINGS,
    ) -> Interrupted:
        """Runs the job of a lease, by itself of a new one."""
        lease = lease or self.claim()
        assert lease is not None
        store = Interrupted(self.store, before or (lambda _number, _name: None))

        async def blocking(call: Callable[..., Any], *values: Any) -> Any:
            await asyncio.sleep(0)
            return call(*values)

        calls = StoreCalls(blocking, blocking)
        job = BatchJob(lease, store, self, settings, lambda: self.now_s, calls, self.counts)
        async with asyncio.timeout(DEADLINE_S):
            await job.run()
        return store

    async def finish(self) -> None:
        """Lets new owners carry the batch on until it has ended."""
        while not self.batch.has_ended:
            self.now_s += LEASE_S
            await self.carry(self.claim("last"))

    def records(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        with self.store.open_content("a", file_id) as content:
            return [json.loads(line) for line in content]

    @property
    def output(self) -> list[dict[str, Any]]:
        return self.records(self.batch.output_file_id)

    @property
    def errors(self) -> list[dict[str, Any]]:
        return self.records(self.batch.error_file_id)


def requests(num_lines: int) -> list[dict[str, Any]]:
    return [
        {"custom_id": f"line-{number}", "method": "POST", "url": PATH, "body": {"prompt": number}}
        for number in range(num_lines)
    ]


def jsonl(lines: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


@pytest.fixture(scope="module", params=KINDS, autouse=True)
def kind(request: pytest.FixtureRequest) -> str:
    """What keeps the batches of every test's world."""
    _KIND[0] = request.param
    return request.param


_KIND = list(KINDS[:1])


@contextmanager
def world_of(
    lines: list[dict[str, Any]] | bytes | None = None, kind: type[World] = World
) -> Iterator[World]:
    with tempfile.TemporaryDirectory() as folder:
        world = kind(kept_in(_KIND[0], Path(folder)), lines)
        try:
            yield world
        finally:
            world.store.close()


def assert_each_line_once(world: World, num_lines: int = NUM_LINES) -> None:
    ids = Counter(record["custom_id"] for record in world.output + world.errors)
    assert ids == Counter(f"line-{number}" for number in range(num_lines))
    batch = world.batch
    assert batch.num_completed == len(world.output)
    assert batch.num_failed == len([each for each in world.errors if each["response"]])
    for record in world.output:
        number = int(record["custom_id"].removeprefix("line-"))
        assert record["response"]["body"]["prompt"] == number
        assert record["response"]["status_code"] == 200
        assert record["error"] is None


async def test_batch_is_answered_line_by_line() -> None:
    with world_of() as world:
        await world.carry()
        batch = world.batch
        assert batch.status is BatchStatus.COMPLETED
        assert list(batch.entered) == ["in_progress", "finalizing", "completed"]
        assert (batch.num_total, batch.num_completed, batch.num_failed) == (5, 5, 0)
        assert (batch.usage.num_input, batch.usage.num_output) == (15, 10)
        assert batch.error_file_id is None
        assert_each_line_once(world)
        file = world.store.file("a", str(batch.output_file_id))
        assert file is not None
        assert (file.filename, file.expires_at_s) == ("b1_output.jsonl", 1e6)
        assert world.counts == LineCounts(num_completed=5)
        assert world.output[0]["response"]["request_id"] == "request-of-line-0"


async def test_refusal_that_passes_is_asked_again_and_any_other_is_the_answer() -> None:
    with world_of() as world:
        world.replies = {
            **{"line-0": [429, 503, 429, 500, 500], "line-1": [400]},
            **{"line-2": [429, 500, 500, 500], "line-4": [FINAL]},
        }
        await world.carry()
        assert world.asked == {
            **{"line-0": 6, "line-1": 1, "line-2": 4},
            **{"line-3": 1, "line-4": 1},
        }
        failed = {each["custom_id"]: each["response"]["status_code"] for each in world.errors}
        assert failed == {"line-1": 400, "line-2": 500, "line-4": FINAL}
        assert world.batch.status is BatchStatus.COMPLETED
        assert_each_line_once(world)
        assert world.counts == LineCounts(2, 3, 8)


async def test_model_that_refuses_all_its_lines_holds_up_no_other() -> None:
    class WithoutEngines(World):
        """Refuses the lines of one model until those of the other are answered."""

        async def ask(self, batch: Batch, line: BatchLine) -> LineReply:
            others = {f"line-{number}" for number in range(10, 20)}
            if line.model == "absent" and not others <= self.asked.keys():
                await asyncio.sleep(0)
                return LineReply(503, b"{}", "r")
            return await super().ask(batch, line)

    lines = requests(20)
    for number, line in enumerate(lines):
        line["body"]["model"] = "absent" if number < 10 else "there"
    with world_of(lines, WithoutEngines) as world:
        await world.carry()
        assert world.batch.status is BatchStatus.COMPLETED
        assert set(world.asked.values()) == {1}
        assert_each_line_once(world, 20)


async def test_file_with_a_bad_line_fails_and_nothing_is_asked() -> None:
    lines = requests(3)
    lines[1]["url"] = "/v1/embeddings"
    lines[2]["custom_id"] = "line-0"
    with world_of(lines) as world:
        await world.carry()
        batch = world.batch
        assert batch.status is BatchStatus.FAILED
        assert [(fault.line, fault.code) for fault in batch.errors] == [
            (2, "mismatched_url"),
            (3, "duplicate_custom_id"),
        ]
        assert not world.asked
        assert (batch.output_file_id, batch.error_file_id) == (None, None)


async def test_batch_whose_window_is_over_before_it_is_read_expires_and_says_so() -> None:
    with world_of() as world:
        world.now_s = WINDOW_S
        await world.carry()
        assert world.batch.status is BatchStatus.EXPIRED
        assert world.batch.entered[BatchStatus.EXPIRED] == WINDOW_S
        assert [fault.code for fault in world.batch.errors] == ["batch_expired"]
        assert not world.asked


async def test_batch_that_nobody_can_read_fails_and_says_so() -> None:
    def fail(_number: int, name: str) -> None:
        if name == "open_content":
            raise ValueError("nobody has foreseen this")

    with world_of() as world:
        for _ in range(MAX_READINGS):
            with pytest.raises(ExceptionGroup):
                await world.carry(before=fail)
            world.now_s += LEASE_S
        assert world.batch.status is BatchStatus.VALIDATING
        await world.carry(before=fail)
        assert world.batch.status is BatchStatus.FAILED
        assert [fault.code for fault in world.batch.errors] == ["validation_failed"]
        assert world.store.delete_file("a", "file-1", world.now_s)


async def test_expired_batch_keeps_its_finished_lines() -> None:
    with world_of() as world:

        def expire(_number: int, name: str) -> None:
            if name == "add_answers" and len(world.asked) >= 2:
                world.now_s = WINDOW_S
                raise OwnerDiedError

        with pytest.raises(BaseExceptionGroup):
            await world.carry(before=expire)
        num_kept = len(world.store.answered_lines("b1"))
        await world.carry(world.claim("next"))
        assert world.batch.status is BatchStatus.EXPIRED
        assert len(world.output) == num_kept
        assert {each["error"]["code"] for each in world.errors} == {"batch_expired"}
        assert_each_line_once(world)


async def test_answers_that_cannot_be_kept_while_the_batch_is_cancelled_are_no_end_of_it() -> None:
    num_renewals = 0

    class LateToEnd(World):
        """Its second line ends only when the job knows that no more are to be answered."""

        async def ask(self, batch: Batch, line: BatchLine) -> LineReply:
            if line.custom_id != "line-1":
                return await super().ask(batch, line)
            try:
                await asyncio.Event().wait()
            finally:
                begun = num_renewals
                while num_renewals < begun + 3:  # noqa: ASYNC110 - the job tells nobody
                    await asyncio.sleep(0)
            raise AssertionError("nobody sets the event")

    def fail(_number: int, name: str) -> None:
        nonlocal num_renewals
        num_renewals += name == "renew"
        if name == "add_answers":
            world.store.change("a", "b1", lambda batch: cancelled(batch, world.now_s))
            raise OSError("the disk is full")

    with world_of(kind=LateToEnd) as world:
        with pytest.raises(ExceptionGroup) as failure:
            await world.carry(before=fail, settings=replace(SETTINGS, check_s=0.0))
        assert failure.group_contains(OSError, match="disk is full")
        assert world.batch.status is BatchStatus.CANCELLING
        await world.finish()
        assert world.batch.status is BatchStatus.CANCELLED


NARROW = replace(SETTINGS, limits=LineLimits(max_lines=100, max_line_bytes=200))


@contextmanager
def world_with_a_line_that_is_too_long_now() -> Iterator[World]:
    """A batch that was read under wider limits; its second line is too long for `NARROW`."""
    lines = requests(3)
    lines[1]["body"]["prompt"] = "x" * 500

    def die(_number: int, name: str) -> None:
        if name == "answered_lines":
            raise OwnerDiedError

    with world_of(lines) as world:
        with pytest.raises(BaseExceptionGroup):
            asyncio.run(world.carry(before=die))
        assert world.batch.status is BatchStatus.IN_PROGRESS
        world.now_s = LEASE_S
        yield world


def test_line_that_is_no_request_any_more_is_a_failed_line() -> None:
    with world_with_a_line_that_is_too_long_now() as world:
        asyncio.run(world.carry(settings=NARROW))
        batch = world.batch
        assert batch.status is BatchStatus.COMPLETED
        assert (batch.num_total, batch.num_completed, batch.num_failed) == (3, 2, 1)
        assert [each["custom_id"] for each in world.output] == ["line-0", "line-2"]
        (record,) = world.errors
        assert (record["custom_id"], record["response"]) == ("line-1", None)
        assert record["error"]["code"] == "line_too_long"
        assert "200 bytes" in record["error"]["message"]
        assert set(world.asked) == {"line-0", "line-2"}


def test_batch_with_a_line_that_is_no_request_any_more_can_be_cancelled() -> None:
    with world_with_a_line_that_is_too_long_now() as world:
        world.store.change("a", "b1", lambda batch: cancelled(batch, world.now_s))
        asyncio.run(world.carry(settings=NARROW))
        assert world.batch.status is BatchStatus.CANCELLED
        assert [(each["custom_id"], each["error"]["code"]) for each in world.errors] == [
            (f"line-{number}", "batch_cancelled") for number in range(3)
        ]


async def test_batch_that_is_cancelled_before_it_is_read_has_no_files() -> None:
    with world_of() as world:
        world.store.change("a", "b1", lambda batch: cancelled(batch, 1.0))
        await world.carry()
        batch = world.batch
        assert batch.status is BatchStatus.CANCELLED
        assert (batch.output_file_id, batch.error_file_id) == (None, None)
        assert not world.asked


async def test_owner_that_dies_between_any_two_steps_is_replaced() -> None:
    with world_of() as world:
        num_calls = (await world.carry()).num_calls
    assert num_calls > 20
    for deadly in range(num_calls):
        with world_of() as world:

            def die(number: int, _name: str, deadly: int = deadly) -> None:
                if number >= deadly:
                    raise OwnerDiedError

            with pytest.raises(BaseExceptionGroup):
                await world.carry(before=die)
            await world.finish()
            assert world.batch.status is BatchStatus.COMPLETED
            assert_each_line_once(world)


EVENTS = st.tuples(
    st.integers(0, 60), st.sampled_from(["die", "steal", "steal and finish", "cancel", "expire"])
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(EVENTS, max_size=3), max_size=4), st.integers(0, 7))
def test_each_line_is_in_the_files_once_whatever_happens(
    lives: list[list[tuple[int, str]]], num_lines: int
) -> None:
    with world_of(requests(num_lines) or b"\n") as world:

        def disturb(events: dict[int, str]) -> Callable[[int, str], None]:
            def before(number: int, _name: str) -> None:
                match events.pop(number, None):
                    case "die":
                        raise OwnerDiedError
                    case "steal":
                        world.now_s += LEASE_S
                        world.claim("thief")
                    case "steal and finish":
                        world.now_s += LEASE_S
                        if (lease := world.claim("thief")) is not None:
                            others.append(lease)
                    case "cancel" if not world.batch.has_ended:
                        world.store.change("a", "b1", lambda each: cancelled(each, world.now_s))
                    case "expire":
                        world.now_s = max(world.now_s, WINDOW_S)

            return before

        others: list[BatchLease] = []

        async def live(events: dict[int, str]) -> None:
            world.now_s += LEASE_S
            if (lease := world.claim()) is None:
                return
            mine = asyncio.create_task(world.carry(lease, disturb(events)))
            thieves = []
            while not mine.done():
                await asyncio.sleep(0)
                thieves += [asyncio.create_task(world.carry(others.pop())) for _ in others[:]]
            await asyncio.gather(mine, *thieves, return_exceptions=True)

        async def whole() -> None:
            for events in lives:
                await live(dict(events))
            await world.finish()

        asyncio.run(whole())
        batch = world.batch
        if num_lines and BatchStatus.IN_PROGRESS in batch.entered:
            assert_each_line_once(world, num_lines)
            if batch.status is BatchStatus.COMPLETED:
                assert batch.num_completed == num_lines
        else:
            unread_too_late = world.now_s >= WINDOW_S and batch.status is BatchStatus.EXPIRED
            assert unread_too_late or batch.status in (BatchStatus.FAILED, BatchStatus.CANCELLED)
            assert not world.output + world.errors
        # A file that nobody has told of is nobody's.
        assert len(world.store.files("a", MANY)) == 1 + bool(world.output) + bool(world.errors)


@pytest.mark.parametrize(
    ("retry_after_s", "num_refusals", "waits_s"),
    [(None, 0, 1.0), (None, 3, 8.0), (None, 50, 60.0), (0.01, 0, 1.0), (7.0, 9, 7.0), (1e5, 0, 60)],
)
def test_refused_line_waits_as_told_within_bounds(
    retry_after_s: float | None, num_refusals: int, waits_s: float
) -> None:
    reply = LineReply(429, b"{}", "r", retry_after_s)
    assert wait_s(reply, num_refusals, 1.0) == waits_s
