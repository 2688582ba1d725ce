"""What every engine promises to what stands above it. Subclass, and say how to start one.

class TestSomeEngine(EngineContract):
    @pytest.fixture
    async def subject(self) -> AsyncIterator[Subject]: ...
"""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import pytest

from serving.link.engine_protocol import Engine, EngineDiedError
from serving.link.messages import Finish, TokenRequest

# Long enough for a real engine on a busy machine to run a few short requests.
DEADLINE_S = 60.0


@dataclass(frozen=True)
class Subject:
    """An engine, and greedy requests that it understands: id, tokens in all, tokens already out.

    `num_slots` is how many it runs at once.
    """

    engine: Engine
    make_request: Callable[[str, int, list[int]], TokenRequest]
    num_slots: int


async def collect(engine: Engine, *request_ids: str) -> dict[str, list[int]]:
    """Every token of every request, until these have finished; in the order of their first ones."""
    tokens: dict[str, list[int]] = {}
    unfinished = set(request_ids)
    async with asyncio.timeout(DEADLINE_S):
        while unfinished:
            for output in await engine.next_step():
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
                if output.finish is not None:
                    unfinished.discard(output.request_id)
    return tokens


async def until_it_ends(engine: Engine) -> NoReturn:
    """Reads steps, of which the first may tell of what is over."""
    while True:
        await engine.next_step()


class EngineContract:
    async def test_request_runs_to_its_length(self, subject: Subject) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await subject.engine.submit(subject.make_request("a", 5, []))
            num_tokens, finish = 0, None
            while finish is None:
                for output in await subject.engine.next_step():
                    assert output.request_id == "a"
                    num_tokens += len(output.token_ids)
                    finish = output.finish
        assert (num_tokens, finish) == (5, Finish.LENGTH)

    async def test_many_requests_each_complete(self, subject: Subject) -> None:
        wanted = {f"r{i}": i + 1 for i in range(6)}
        async with asyncio.timeout(DEADLINE_S):
            for request_id, max_tokens in wanted.items():
                await subject.engine.submit(subject.make_request(request_id, max_tokens, []))
            tokens = await collect(subject.engine, *wanted)
        assert {request_id: len(ids) for request_id, ids in tokens.items()} == wanted

    async def test_tokens_and_steps_are_added_up(self, subject: Subject) -> None:
        before = subject.engine.engine_stats
        assert before is not None
        async with asyncio.timeout(DEADLINE_S):
            request = subject.make_request("counted", 5, [])
            await subject.engine.submit(request)
            await collect(subject.engine, "counted")
        after = subject.engine.engine_stats
        assert after is not None
        assert after.generation_tokens - before.generation_tokens == 5
        num_prompt_tokens = len(request.prompt_token_ids)
        assert after.prompt_tokens - before.prompt_tokens == num_prompt_tokens
        assert sum(after.iteration_counts) - sum(before.iteration_counts) == 5
        # All but the first followed another at once.
        assert after.num_steps - before.num_steps == 4
        assert after.busy_s > before.busy_s

    async def test_resumed_request_tells_and_counts_no_prompt_a_second_time(
        self, subject: Subject
    ) -> None:
        """To a client the tokens that it emitted are no prompt, whatever of them is cached."""
        told: dict[str, list[int | None]] = {"first": [], "resumed": []}
        emitted: list[int] = []
        counted = []
        async with asyncio.timeout(DEADLINE_S):
            for request_id in told:
                await subject.engine.submit(subject.make_request(request_id, 9, emitted[:6]))
                finish = None
                while finish is None:
                    for output in await subject.engine.next_step():
                        told[request_id].append(output.num_cached)
                        emitted += output.token_ids
                        finish = output.finish
                stats = subject.engine.engine_stats
                assert stats is not None
                counted.append((stats.prompt_tokens, stats.local_cached_tokens))
        assert told["first"][1:] == [None] * 8
        assert told["resumed"] == [None] * 3
        assert counted[0] == counted[1]

    async def test_whoever_asks_is_told_when_it_begins_with_a_request(
        self, subject: Subject
    ) -> None:
        engine = subject.engine
        told: dict[str, list[float]] = {}
        engine.on_scheduled = lambda request_id, at_s: told.setdefault(request_id, []).append(at_s)
        begun_s = time.monotonic()
        async with asyncio.timeout(DEADLINE_S):
            await engine.submit(subject.make_request("new", 3, []))
            whole = (await collect(engine, "new"))["new"]
            await engine.submit(subject.make_request("resumed", 3, whole[:1]))
            await collect(engine, "resumed")
        engine.on_scheduled = None
        assert list(told) == ["new", "resumed"]
        # An engine may begin again with one that it had to put off.
        (new_s, *_), (resumed_s, *_) = told.values()
        assert begun_s <= new_s <= resumed_s <= time.monotonic()

    @pytest.mark.parametrize("num_emitted", [1, 4, 7])
    async def test_resumed_request_continues_exactly(
        self, subject: Subject, num_emitted: int
    ) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await subject.engine.submit(subject.make_request("whole", 8, []))
            whole = (await collect(subject.engine, "whole"))["whole"]
            await subject.engine.submit(subject.make_request("rest", 8, whole[:num_emitted]))
            rest = (await collect(subject.engine, "rest"))["rest"]
        assert whole[:num_emitted] + rest == whole

    async def test_resumed_request_goes_before_those_that_have_not_begun(
        self, subject: Subject
    ) -> None:
        engine = subject.engine
        async with asyncio.timeout(DEADLINE_S):
            await engine.submit(subject.make_request("whole", 8, []))
            whole = (await collect(engine, "whole"))["whole"]
            # One slot comes free first, long after all of these are in the queue.
            await engine.submit(subject.make_request("short", 100, []))
            for number in range(1, subject.num_slots):
                await engine.submit(subject.make_request(f"long-{number}", 110, []))
            await engine.submit(subject.make_request("new", 2, []))
            await engine.submit(subject.make_request("resumed-1", 8, whole[:7]))
            await engine.submit(subject.make_request("resumed-2", 8, whole[:7]))
            queued = ("resumed-1", "resumed-2", "new")
            tokens = await collect(engine, *queued)
            order = [request_id for request_id in tokens if request_id in queued]
            left = [f"long-{number}" for number in range(1, subject.num_slots)]
            await engine.abort(left)
        assert tokens["resumed-1"] == tokens["resumed-2"] == whole[7:]
        assert order == list(queued)

    async def test_aborted_request_gets_nothing_more(self, subject: Subject) -> None:
        engine = subject.engine
        async with asyncio.timeout(DEADLINE_S):
            await engine.submit(subject.make_request("long", 500, []))
            while not await engine.next_step():
                pass
            await engine.abort(["long"])
            # Its last step may already be on its way; the first probe is behind that.
            for probe in ("first", "second"):
                await engine.submit(subject.make_request(probe, 2, []))
                tokens = await collect(engine, probe)
        assert set(tokens) == {"second"}
        assert engine.load.num_running <= 1

    async def test_abort_of_unknown_requests_is_ignored(self, subject: Subject) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await subject.engine.abort(["nobody"])
            await subject.engine.submit(subject.make_request("a", 2, []))
            assert len((await collect(subject.engine, "a"))["a"]) == 2

    async def test_check_of_a_turning_engine_passes(self, subject: Subject) -> None:
        await subject.engine.check(DEADLINE_S)

    async def test_call_of_an_unknown_name_is_refused(self, subject: Subject) -> None:
        with pytest.raises(ValueError, match="no_such_operation"):
            await subject.engine.call("no_such_operation", b"")

    async def test_info_is_json_with_the_model_length(self, subject: Subject) -> None:
        info = json.loads(json.dumps(subject.engine.info))
        assert info["max_model_len"] > 0
        assert "generate" in info["supported_tasks"]

    async def test_close_ends_a_waiting_step_and_everything_after(self, subject: Subject) -> None:
        async with asyncio.timeout(DEADLINE_S):
            step = asyncio.create_task(until_it_ends(subject.engine))
            await asyncio.sleep(0)
            await subject.engine.close()
            with pytest.raises(EngineDiedError):
                await step
            with pytest.raises(EngineDiedError):
                await subject.engine.submit(subject.make_request("late", 2, []))
            await subject.engine.close()
