"""The engine contract over vLLM on CPU, and how the end of its processes is noticed."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any, NoReturn

import msgspec
import psutil
import pytest
import pytest_asyncio
from vllm.sampling_params import SamplingParams
from vllm.v1.serial_utils import MsgpackEncoder

from serving.domain.slice_lifecycle import LoadStage
from serving.domain.tokens.named_blocks import NamedBlocks
from serving.engine.load_stage import stages_reported_to
from serving.engine.vllm.engine import VllmEngine, engine_config
from serving.engine.vllm.parent_death_watch import HOST_VARIABLE, HostProcess
from serving.link.engine_protocol import EngineDiedError
from serving.link.messages import TokenRequest
from serving.link.vllm_codec import EMITTED_KEY

from .contract import DEADLINE_S, EngineContract, Subject, collect, until_it_ends
from .vllm_requests import (
    ENGINE_ARGS,
    MODEL,
    RequestMaker,
    set_engine_environment,
    start_demo_engine,
)

# One event loop for the module, because one engine serves it all.
pytestmark = [pytest.mark.starts_engine, pytest.mark.asyncio(loop_scope="module")]


class EngineShelf:
    """One live engine, started again after a test that ended it: a start takes ten seconds."""

    def __init__(self) -> None:
        self.engine: VllmEngine | None = None
        self.stages: list[LoadStage] = []  # that its worker told while it started

    async def take(self) -> VllmEngine:
        if self.engine is not None:
            try:
                await self.engine.check(DEADLINE_S)
            except EngineDiedError:
                await self.engine.close()
                self.engine = None
        if self.engine is None:
            self.stages.clear()
            with stages_reported_to(self.stages.append):
                self.engine = await start_demo_engine()
        return self.engine


@pytest.fixture(scope="module")
def requests() -> RequestMaker:
    set_engine_environment()
    return RequestMaker()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shelf(requests: RequestMaker) -> AsyncIterator[EngineShelf]:
    shelf = EngineShelf()
    yield shelf
    if shelf.engine is not None:
        await shelf.engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def subject(shelf: EngineShelf, requests: RequestMaker) -> Subject:
    def make(request_id: str, max_tokens: int, emitted: list[int]) -> TokenRequest:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        return requests.make(request_id, [5, 6, 7, 8], params, emitted)

    return Subject(await shelf.take(), make, ENGINE_ARGS["max_num_seqs"])


async def test_engine_start_names_this_process_to_those_that_watch_it(shelf: EngineShelf) -> None:
    await shelf.take()
    assert HostProcess.parse(os.environ[HOST_VARIABLE]) == HostProcess.own()


@pytest.mark.long
async def test_worker_tells_when_it_has_its_weights(shelf: EngineShelf) -> None:
    await shelf.take()
    assert shelf.stages == [LoadStage.COMPILING]


async def test_prefix_cache_is_counted(subject: Subject) -> None:
    engine_stats = subject.engine.engine_stats
    assert engine_stats is not None
    assert engine_stats.prefix_cache is not None
    assert (engine_stats.external_prefix_cache, engine_stats.drafts) == (None, None)


async def test_malformed_payload_is_refused_and_the_engine_goes_on(subject: Subject) -> None:
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(ValueError, match="malformed request payload"):
            await subject.engine.submit(TokenRequest("bad", [1], [], 5, [b"\x93\x01"]))
        await subject.engine.submit(subject.make_request("a", 2, []))
        assert len((await collect(subject.engine, "a"))["a"]) == 2


@pytest.mark.parametrize("forged", [1.5, [1.5], [2_000_000_000], 5, "tokens"])
async def test_resume_that_a_client_forged_is_left_out_and_the_engine_goes_on(
    subject: Subject, requests: RequestMaker, forged: Any
) -> None:
    """As a gateway of an earlier build sends it: what the client wrote, within the payload."""
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    params.extra_args = {EMITTED_KEY: forged}
    core_request = requests.core_request("forged", [5, 6, 7, 8], params)
    payload = [bytes(part) for part in MsgpackEncoder().encode(core_request)]
    async with asyncio.timeout(DEADLINE_S):
        await subject.engine.submit(subject.make_request("honest", 2, []))
        honest = (await collect(subject.engine, "honest"))["honest"]
        await subject.engine.submit(TokenRequest("forged", [5, 6, 7, 8], [], 2, payload))
        assert (await collect(subject.engine, "forged"))["forged"] == honest


@pytest.mark.parametrize("emitted", [[2_000_000_000], [1, -1]])
async def test_emitted_tokens_that_are_none_of_the_model_are_refused(
    subject: Subject, emitted: list[int]
) -> None:
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(ValueError, match="emitted token ids"):
            await subject.engine.submit(subject.make_request("bad", 5, emitted))
        await subject.engine.submit(subject.make_request("a", 2, []))
        assert len((await collect(subject.engine, "a"))["a"]) == 2


async def test_prefix_cache_can_be_reset_by_call(subject: Subject) -> None:
    assert await subject.engine.call("reset_prefix_cache", b"") == b"\xc3"  # msgpack: true


async def test_prompts_stand_in_line_until_a_step_computes_them(subject: Subject) -> None:
    engine = subject.engine
    assert isinstance(engine, VllmEngine)
    names = [f"line-{number}" for number in range(subject.num_slots + 3)]
    lengths = []
    async with asyncio.timeout(DEADLINE_S):
        for name in names:
            request = subject.make_request(name, 100, [])
            lengths.append(len(request.prompt_token_ids))
            await engine.submit(request)
            assert engine.load.backlog_tokens <= sum(lengths)
        assert engine.load.backlog_tokens > 0
        # An engine that has its slots full may not have received the last ones yet.
        while (engine.load.num_running, engine.load.num_waiting) != (subject.num_slots, 3):
            await engine.next_step()
        ratio = engine.load.computed_ratio
        assert 0 < ratio <= 1
        # Three have no slot; all others are computed to their end, or in the step under way.
        assert engine.load.backlog_tokens == round(sum(lengths[-3:]) * ratio)
        await collect(engine, *names)
        assert engine.load.backlog_tokens == 0


async def test_capacity_is_that_of_its_scheduler_and_its_cache(subject: Subject) -> None:
    capacity = subject.engine.capacity
    assert capacity is not None
    assert capacity.max_num_seqs == subject.num_slots
    info = subject.engine.info
    assert capacity.num_kv_tokens == int(str(info["num_kv_blocks"])) * int(str(info["block_size"]))


async def test_what_its_cache_has_is_known_by_the_names_that_a_gateway_computes(
    subject: Subject,
) -> None:
    engine = subject.engine
    assert engine.cached is not None
    layout = engine.cached.layout
    async with asyncio.timeout(DEADLINE_S):
        assert await engine.call("reset_prefix_cache", b"") == b"\xc3"
        assert not engine.cached.keys
        request = subject.make_request("named", 60, [])
        prompt = [*request.prompt_token_ids, *range(5, 305)]
        request = msgspec.structs.replace(request, prompt_token_ids=prompt)
        await engine.submit(request)
        tokens = await collect(engine, "named")
        while engine.load.num_running:
            await engine.next_step()
        # The last token was emitted, and never computed.
        whole = [*prompt, *tokens["named"]][:-1]
        assert engine.cached.keys == set(NamedBlocks(whole).keys(layout))
        assert len(engine.cached.keys) == len(whole) // layout.unit_tokens > 1
        assert await engine.call("reset_prefix_cache", b"") == b"\xc3"
        assert not engine.cached.keys


async def test_arguments_that_vllm_refuses_start_nothing() -> None:
    with pytest.raises(ValueError, match="max_model_len"):
        engine_config(MODEL, ENGINE_ARGS | {"max_model_len": 1_000_000})


@pytest.mark.long
async def test_stopped_engine_core_fails_its_check(subject: Subject) -> None:
    engine = subject.engine
    assert isinstance(engine, VllmEngine)
    (pid,) = engine.process_ids
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(EngineDiedError, match=r"did not turn for 0\.2 s"):
            await engine.check(0.2)
    finally:
        os.kill(pid, signal.SIGCONT)
    await engine.check(DEADLINE_S)


async def test_time_that_the_engine_computed_is_that_of_its_process(subject: Subject) -> None:
    engine = subject.engine
    before_s = engine.busy_s()
    assert before_s is not None
    async with asyncio.timeout(DEADLINE_S):
        await engine.submit(subject.make_request("busy", 200, []))
        await collect(engine, "busy")
    after_s = engine.busy_s()
    assert after_s is not None
    # 200 steps of the small model; asleep it would have had nothing.
    assert after_s - before_s > 0.05


# From here on tests end the engine, and the next one waits for another.
class TestVllmEngine(EngineContract):
    pass


async def test_killed_engine_core_ends_the_step_that_waits_and_says_which_process_ended(
    subject: Subject,
) -> None:
    engine = subject.engine
    assert isinstance(engine, VllmEngine)
    async with asyncio.timeout(DEADLINE_S):
        await engine.submit(subject.make_request("a", 2, []))
        await collect(engine, "a")
        step = asyncio.create_task(until_it_ends(engine))
        await asyncio.sleep(0)
        (pid,) = engine.process_ids
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDiedError, match=f"process {pid} ended"):
            await step
        with pytest.raises(EngineDiedError):
            await engine.submit(subject.make_request("b", 2, []))
        with pytest.raises(EngineDiedError):
            await engine.check(DEADLINE_S)


async def test_killed_worker_is_known_by_its_own_end_and_not_by_its_cores(
    subject: Subject,
) -> None:
    """vLLM first ends the other workers in order, for which it takes seconds."""
    engine = subject.engine
    assert isinstance(engine, VllmEngine)
    (core,) = engine.process_ids
    below = psutil.Process(core).children(recursive=True)
    (worker,) = [each for each in below if "VLLM::Worker" in " ".join(each.cmdline())]
    async with asyncio.timeout(DEADLINE_S):
        step = asyncio.create_task(until_it_ends(engine))
        await asyncio.sleep(0)
        worker.kill()
        with pytest.raises(EngineDiedError, match=f"worker process {worker.pid} ended"):
            await step
        with pytest.raises(EngineDiedError):
            await engine.check(DEADLINE_S)


async def read_unfinished(engine: VllmEngine, emitted: dict[str, list[int]]) -> NoReturn:
    """Reads until the engine's end, at which no request may have one."""
    while True:
        for output in await engine.next_step():
            assert output.finish is None, "the client did not ask for an end"
            emitted[output.request_id] += output.token_ids


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_engine_core_that_is_told_to_end_is_lost_with_what_it_had(
    subject: Subject, number: signal.Signals
) -> None:
    engine = subject.engine
    assert isinstance(engine, VllmEngine)
    emitted: dict[str, list[int]] = {"a": [], "b": []}
    async with asyncio.timeout(DEADLINE_S):
        for request_id in emitted:
            await engine.submit(subject.make_request(request_id, 1500, []))
        while not all(emitted.values()):
            for output in await engine.next_step():
                emitted[output.request_id] += output.token_ids
        (pid,) = engine.process_ids
        os.kill(pid, number)
        with pytest.raises(EngineDiedError, match="told to end"):
            await read_unfinished(engine, emitted)
        with pytest.raises(EngineDiedError):
            await engine.submit(subject.make_request("c", 2, []))
    assert all(len(token_ids) < 1500 for token_ids in emitted.values())
