"""Our subclass of vLLM's frontend: it has vLLM's attributes, and failures end requests."""

import ast
import asyncio
import inspect
import textwrap
from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry
from vllm.exceptions import VLLMValidationError
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from serving.artifacts.model_source import resolve_source
from serving.domain.errors import NoEngineInTimeError, PoisonRequestError
from serving.domain.models.engine_kind import EngineKind
from serving.domain.models.request_fields.rules import EngineFacts
from serving.domain.tokens.paced import paced_token
from serving.gateway.dispatch.admission import FleetLimits
from serving.gateway.dispatch.dispatcher import Dispatcher
from serving.gateway.frontend import FleetLLM, frontend_config
from serving.gateway.streams.engine_client import FleetEngineClient
from serving.gateway.streams.failures import FleetRequestError
from serving.gateway.streams.hold import TokenHold
from serving.gateway.streams.pace import HoldBounds

from .engines import TOKEN_RANGE, ScriptedLink

pytestmark = pytest.mark.imports_vllm

DEADLINE_S = 30.0

# Set by vLLM only when its frontend is profiled, which ours never is.
PROFILED_ONLY = {"_frontend_profiler_worker_name"}


def attributes_set_by(cls: type) -> set[str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls.__init__)))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


@pytest.fixture(scope="module")
def config():
    return frontend_config(
        resolve_source("models/slicewise-demo"),
        ("demo",),
        {"max_model_len": 512, "dtype": "float32"},
    )


@pytest.fixture(params=["vllms-metrics", "none"])
async def llm(config, request) -> AsyncIterator[FleetLLM]:
    dispatcher = Dispatcher("demo", FleetLimits(request_deadline_s=600.0))
    client = FleetEngineClient(dispatcher, ("generate",))
    metrics = CollectorRegistry() if request.param == "vllms-metrics" else None
    llm = FleetLLM(config, client, metrics)
    yield llm
    llm.shutdown()


def start(llm: FleetLLM, request_id: str, **params: int) -> "asyncio.Task[int]":
    """Generates; returns how many outputs came."""

    async def run() -> int:
        num_outputs = 0
        sampling = SamplingParams(max_tokens=100, **params)
        async for _ in llm.generate(TokensPrompt(prompt_token_ids=[1, 2]), sampling, request_id):
            num_outputs += 1
        return num_outputs

    return asyncio.create_task(run())


async def until_in_flight(llm: FleetLLM, num_requests: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while llm.engine_core.dispatcher.num_in_flight != num_requests:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.001)


def test_constructor_sets_every_attribute_that_vllms_sets() -> None:
    assert attributes_set_by(AsyncLLM) - attributes_set_by(FleetLLM) == PROFILED_ONLY


async def test_answer_of_an_engine_reaches_the_caller(llm: FleetLLM) -> None:
    link = ScriptedLink(llm.engine_core.dispatcher)
    answer = start(llm, "r")
    await until_in_flight(llm, 1)
    async with asyncio.timeout(DEADLINE_S):
        while not answer.done():
            link.step()
            await asyncio.sleep(0)
    assert answer.result() > 0
    assert (llm.num_in_flight, llm.engine_core.dispatcher.num_in_flight) == (0, 0)


async def test_failed_request_raises_at_its_caller_and_leaves_others_alone(llm: FleetLLM) -> None:
    link = ScriptedLink(llm.engine_core.dispatcher)
    bad, good = start(llm, "bad"), start(llm, "good")
    await until_in_flight(llm, 2)
    (bad_id,) = (key for key in llm.output_processor.request_states if key.startswith("bad"))
    llm.fail_request(bad_id, PoisonRequestError(3))
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(FleetRequestError, match="3 engines were lost"):
            await bad
        while not good.done():
            link.step()
            await asyncio.sleep(0)
    assert (llm.num_in_flight, llm.engine_core.dispatcher.num_in_flight) == (0, 0)


async def test_failure_of_one_sample_ends_its_siblings_everywhere(llm: FleetLLM) -> None:
    link = ScriptedLink(llm.engine_core.dispatcher)
    answer = start(llm, "r", n=3)
    await until_in_flight(llm, 3)
    link.step(2)
    child_id = next(key for key in llm.output_processor.request_states if key.startswith("1_"))
    llm.fail_request(child_id, PoisonRequestError(3))
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(FleetRequestError):
            await answer
    assert (llm.num_in_flight, llm.engine_core.dispatcher.num_in_flight) == (0, 0)
    assert link.running == []
    assert llm.output_processor.parent_requests == {}


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("holds", [True, False], ids=["held", "not-held"])
async def test_tokens_that_came_before_a_failure_are_read_before_the_error(
    config, n: int, holds: bool
) -> None:
    dispatcher = Dispatcher("demo", FleetLimits(request_deadline_s=600.0, max_engine_losses=1))
    hold = TokenHold(HoldBounds(60.0, 60.0)) if holds else None
    llm = FleetLLM(config, FleetEngineClient(dispatcher, ("generate",), hold=hold), None)
    link = ScriptedLink(dispatcher)
    came: dict[int, list[int]] = {}
    has_begun = asyncio.Event()

    async def run() -> None:
        sampling = SamplingParams(max_tokens=100, n=n, output_kind=RequestOutputKind.DELTA)
        prompt = TokensPrompt(prompt_token_ids=[1, 2])
        async for answer in llm.generate(prompt, sampling, "r"):
            for output in answer.outputs:
                assert output.finish_reason is None
                came.setdefault(output.index, []).extend(output.token_ids)
            has_begun.set()

    task = asyncio.create_task(run())
    await until_in_flight(llm, n)
    link.step()
    async with asyncio.timeout(DEADLINE_S):
        await has_begun.wait()
        link.step(4)
        link.end()
        with pytest.raises(FleetRequestError, match="1 engines were lost"):
            await task
    wanted = [paced_token([1, 2], position, TOKEN_RANGE) for position in range(5)]
    assert came == dict.fromkeys(range(n), wanted)
    assert (llm.num_in_flight, dispatcher.num_in_flight) == (0, 0)
    llm.shutdown()


async def test_failure_carries_its_http_status(llm: FleetLLM) -> None:
    error = FleetRequestError(NoEngineInTimeError("demo", 60.0, 30.0))
    assert error.http_status == 503
    assert "60.0 s" in str(error)


async def test_failure_of_a_request_that_is_gone_is_ignored(llm: FleetLLM) -> None:
    llm.fail_request("nobody", PoisonRequestError(3))
    assert llm.num_in_flight == 0


async def test_caller_that_leaves_frees_its_request_on_the_engine(llm: FleetLLM) -> None:
    link = ScriptedLink(llm.engine_core.dispatcher)
    answer = start(llm, "r", n=2)
    await until_in_flight(llm, 2)
    link.step()
    answer.cancel()
    await until_in_flight(llm, 0)
    assert link.running == []
    assert llm.num_in_flight == 0


@pytest.mark.parametrize("n", [1, 2])
async def test_request_that_cannot_be_sent_is_refused_and_forgotten(llm: FleetLLM, n: int) -> None:
    with pytest.raises(VLLMValidationError, match="allowed: integers of 64 bits"):
        await start(llm, "huge", n=n, stream_interval=10**30)
    assert (llm.num_in_flight, llm.engine_core.dispatcher.num_in_flight) == (0, 0)


async def test_client_that_leaves_before_its_request_is_sent_leaves_nothing(llm: FleetLLM) -> None:
    client = llm.engine_core
    # Its turn to give the others theirs: the request is known to vLLM and not yet sent.
    client._num_since_turn = 10_000
    task = start(llm, "gone")
    async with asyncio.timeout(DEADLINE_S):
        while not llm.num_in_flight:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0)
    assert client.dispatcher.num_in_flight == 0
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert (llm.num_in_flight, client.dispatcher.num_in_flight) == (0, 0)


@pytest.mark.parametrize("params", [{"logprobs": 0}, {"prompt_logprobs": 1}])
async def test_log_probabilities_that_engines_have_not_are_refused(
    config, params: dict[str, int]
) -> None:
    client = FleetEngineClient(Dispatcher("demo", FleetLimits()), ("generate",))
    llm = FleetLLM(config, client, None, facts=EngineFacts(EngineKind.PACED))
    with pytest.raises(
        VLLMValidationError, match=r"no log-probabilities\. Allowed: false, or leave it out"
    ):
        await start(llm, "r", **params)
    assert llm.num_in_flight == 0
    llm.shutdown()
