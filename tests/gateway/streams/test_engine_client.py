"""The engine client between vLLM's frontend and a dispatcher: requests in, outputs out."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.serial_utils import MsgpackEncoder

from serving.domain.errors import (
    CannotResumeError,
    NoTokenLeftError,
    PoisonRequestError,
    RequestError,
)
from serving.gateway.dispatch.admission import FleetLimits
from serving.gateway.dispatch.dispatcher import Dispatcher
from serving.gateway.streams.engine_client import FleetEngineClient
from serving.gateway.streams.hold import TokenHold
from serving.gateway.streams.pace import HoldBounds
from serving.link.messages import Step, TokenOutput
from serving.link.vllm_codec import decode_request, encode_outputs, request_decoder
from tests.gateway.core_requests import core_request
from tests.gateway.engines import ScriptedLink, answer_to

pytestmark = pytest.mark.imports_vllm

DEADLINE_S = 10.0


def fleet_client(
    limits: FleetLimits | None = None, adapters: Sequence[str] = ()
) -> FleetEngineClient:
    limits = limits or FleetLimits(request_deadline_s=600.0)
    return FleetEngineClient(Dispatcher("demo", limits), ("generate",), adapters=adapters)


async def delivered(client: FleetEngineClient) -> list[EngineCoreOutput]:
    """What vLLM's frontend gets when it asks once."""
    async with asyncio.timeout(DEADLINE_S):
        return (await client.get_output_async()).outputs


def parts(outputs: Sequence[EngineCoreOutput]) -> list[tuple[str, list[int]]]:
    return [(output.request_id, output.new_token_ids) for output in outputs]


async def test_outputs_come_as_vllms_own_one_step_at_a_time_while_they_are_fetched() -> None:
    client = fleet_client()
    link = ScriptedLink(client.dispatcher)
    for request_id in ("a", "b"):
        await client.add_request_async(core_request(request_id, 3))
    steps = []
    for _ in range(3):
        link.step()
        steps.append(await delivered(client))
    assert [[output.request_id for output in step] for step in steps] == [["a", "b"]] * 3
    of_a = [step[0] for step in steps]
    assert [output.new_token_ids for output in of_a] == [[each] for each in answer_to("a", 3)]
    assert [output.finish_reason for output in of_a] == [None, None, FinishReason.LENGTH]


async def test_steps_that_nobody_fetched_become_one_output_of_each_request() -> None:
    client = fleet_client()
    first, second = ScriptedLink(client.dispatcher, "e1"), ScriptedLink(client.dispatcher, "e2")
    for request_id in ("a", "b"):
        await client.add_request_async(core_request(request_id, 9))
    first.step(2)
    second.step(3)
    first.step(1)
    assert parts(await delivered(client)) == [("a", answer_to("a", 3)), ("b", answer_to("b", 3))]
    assert client.dispatcher.telemetry.metrics.classes["local"].output_chunks == 2


def held_client(limits: FleetLimits | None = None) -> FleetEngineClient:
    """A client whose tokens wait until they are released by hand, or by a minute."""
    limits = limits or FleetLimits(request_deadline_s=600.0)
    hold = TokenHold(HoldBounds(60.0, 60.0))
    return FleetEngineClient(Dispatcher("demo", limits), ("generate",), hold=hold)


async def test_tokens_that_are_held_come_with_the_end() -> None:
    client = held_client()
    link = ScriptedLink(client.dispatcher)
    await client.add_request_async(core_request("a", 5))
    link.step()
    assert parts(await delivered(client)) == [("a", answer_to("a", 1))]
    link.step(3)
    assert client.behind_s == 0.0
    link.step()
    (last,) = await delivered(client)
    assert (last.new_token_ids, last.finish_reason) == (answer_to("a")[1:], FinishReason.LENGTH)


async def test_tokens_that_are_held_come_when_their_time_is_over() -> None:
    dispatcher = Dispatcher("demo", FleetLimits(request_deadline_s=600.0))
    client = FleetEngineClient(dispatcher, ("generate",), hold=TokenHold(HoldBounds(0.01, 0.01)))
    link = ScriptedLink(client.dispatcher)
    await client.add_request_async(core_request("a", 50))
    link.step()
    await delivered(client)
    link.step(9)
    assert parts(await delivered(client)) == [("a", answer_to("a", 10)[1:])]
    # The ninth token was timed: how long it was held, and not as the gateway's own time.
    numbers = dispatcher.telemetry.metrics.classes["local"]
    assert sum(numbers.gateway_hold.counts) == 1
    # A timer of uvloop, which counts whole milliseconds, may be over a little early.
    assert numbers.gateway_hold.total >= 0.008


@pytest.mark.parametrize("params", [{"stop": ["end"]}, {"stop": ["a", "b"], "n": 2}])
async def test_tokens_of_a_request_with_stop_strings_are_not_held(params: dict[str, Any]) -> None:
    client = held_client()
    link = ScriptedLink(client.dispatcher)
    await client.add_request_async(core_request("a", 5, **params))
    for position in range(3):
        link.step()
        assert parts(await delivered(client)) == [("a", [answer_to("a")[position]])]


async def test_request_goes_on_elsewhere_behind_the_tokens_that_were_held() -> None:
    client = held_client()
    first, second = ScriptedLink(client.dispatcher, "e1"), ScriptedLink(client.dispatcher, "e2")
    await client.add_request_async(core_request("r", 8))
    first.step()
    came = parts(await delivered(client))
    first.step(3)
    first.end()
    assert second.submitted[0].emitted_token_ids == answer_to("r", 4)
    second.step(2)
    # More than a token, as the first output of a resumed request is.
    (wire_id,) = second.running
    output = EngineCoreOutput(wire_id, [7], prefill_stats=PrefillStats(num_cached_tokens=2))
    client.dispatcher.take_step("e2", Step(encode_outputs([output], MsgpackEncoder())))
    came += parts(await delivered(client))
    assert came == [("r", answer_to("r", 1)), ("r", answer_to("r", 6)[1:]), ("r", [7])]


async def test_aborted_request_leaves_no_tokens_behind() -> None:
    client = held_client()
    link = ScriptedLink(client.dispatcher)
    for request_id in ("a", "b"):
        await client.add_request_async(core_request(request_id, 3))
    link.step()
    await delivered(client)
    link.step()
    await client.abort_requests_async(["a"])
    link.step()
    assert parts(await delivered(client)) == [("b", answer_to("b", 3)[1:])]
    assert client.take_rest(["a"]) == []


async def test_output_that_cannot_be_read_fails_its_request_alone() -> None:
    client = fleet_client()
    failures: dict[str, RequestError] = {}
    client.set_failure_sink(failures.__setitem__)
    link = ScriptedLink(client.dispatcher)
    for request_id in ("a", "b"):
        await client.add_request_async(core_request(request_id, 3))
    client.dispatcher.take_step("e1", Step([TokenOutput("a", [1], payload=[b"\xc1"])]))
    client.dispatcher.take_step("e1", link.make_step(["b"]))
    assert parts(await delivered(client)) == [("b", answer_to("b", 1))]
    assert (list(failures), link.running) == (["a"], ["b"])


async def test_output_of_a_resumed_request_has_the_id_that_the_frontend_knows() -> None:
    client = fleet_client()
    first, second = ScriptedLink(client.dispatcher, "e1"), ScriptedLink(client.dispatcher, "e2")
    await client.add_request_async(core_request("r"))
    first.step(2)
    first.end()
    (wire_id,) = second.running
    # More than tokens, so that the output has a payload in which vLLM has written an id too.
    output = EngineCoreOutput(wire_id, [7], prefill_stats=PrefillStats(num_cached_tokens=2))
    client.dispatcher.take_step("e2", Step(encode_outputs([output], MsgpackEncoder())))
    assert {output.request_id for output in await delivered(client)} == {"r"}


@pytest.mark.parametrize(
    ("num_moves", "num_emitted", "num_counted"), [(0, 0, 2), (1, 0, 2), (1, 1, 0)]
)
async def test_cached_tokens_are_those_of_the_first_tokens_engine(
    num_moves: int, num_emitted: int, num_counted: int
) -> None:
    client = fleet_client()
    links = [ScriptedLink(client.dispatcher, f"e{number}") for number in range(num_moves + 1)]
    await client.add_request_async(core_request("r", 5, [1, 2, 3]))
    for link in links[:num_moves]:
        if num_emitted:
            link.step(num_emitted)
        link.end()
    last = links[-1]
    (wire_id,) = last.running
    output = EngineCoreOutput(wire_id, [7], prefill_stats=PrefillStats(num_cached_tokens=2))
    client.dispatcher.take_step(last.engine_id, Step(encode_outputs([output], MsgpackEncoder())))
    await delivered(client)
    assert client.dispatcher.telemetry.metrics.classes["local"].cached_tokens == num_counted


async def test_failure_reaches_the_frontend() -> None:
    client = fleet_client(FleetLimits(request_deadline_s=600.0, max_engine_losses=1))
    failures: dict[str, RequestError] = {}
    client.set_failure_sink(failures.__setitem__)
    await client.add_request_async(core_request("r"))
    ScriptedLink(client.dispatcher).end()
    assert isinstance(failures["r"], PoisonRequestError)
    assert not client.dp_engines_running()


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"bad_words": ["a"], "min_tokens": 2}, "bad_words, min_tokens"),
        ({"allowed_token_ids": [1], "stop_token_ids": [2]}, "allowed_token_ids, stop_token_ids"),
    ],
    ids=["words", "ids"],
)
async def test_fields_that_forbid_tokens_beside_a_grammar_are_named(
    changes: dict[str, Any], fields: str
) -> None:
    client = fleet_client()
    failures: dict[str, RequestError] = {}
    client.set_failure_sink(failures.__setitem__)
    link = ScriptedLink(client.dispatcher)
    grammar = StructuredOutputsParams(regex="a")
    await client.add_request_async(core_request("r", structured_outputs=grammar, **changes))
    link.fail_at("r", 7)
    assert isinstance(failures["r"], NoTokenLeftError)
    assert f"and: {fields}." in str(failures["r"])


async def test_abort_frees_the_request_on_its_engine() -> None:
    client = fleet_client()
    link = ScriptedLink(client.dispatcher)
    await client.add_request_async(core_request("r"))
    assert client.dp_engines_running()
    await client.abort_requests_async(["r", "nobody"])
    assert link.aborted == ["r"]
    assert not client.dp_engines_running()


async def test_prompt_logprobs_are_asked_for_only_until_the_first_token() -> None:
    client = fleet_client()
    client.set_failure_sink(lambda _request_id, _error: None)  # it is lost once too often
    await client.add_request_async(core_request("r", prompt_logprobs=1, logprobs=2))
    asked = []
    for number, num_steps in enumerate([0, 2, 1]):
        link = ScriptedLink(client.dispatcher, f"e{number}")
        link.step(num_steps)
        params = decode_request(link.submitted[0], request_decoder()).sampling_params
        assert params is not None
        asked.append((params.prompt_logprobs, params.logprobs))
        link.end()
    assert asked == [(1, 2), (1, 2), (None, 2)]


async def test_prompt_given_as_embeddings_is_not_resumed_once_it_has_emitted() -> None:
    client = fleet_client()
    failures: dict[str, RequestError] = {}
    client.set_failure_sink(failures.__setitem__)
    first, second = ScriptedLink(client.dispatcher, "e1"), ScriptedLink(client.dispatcher, "e2")
    for request_id in ("a", "b", "c"):
        request = core_request(request_id)
        request.prompt_embeds = torch.zeros(2, 4)
        await client.add_request_async(request)
    first.step()  # "a" and "c" have emitted
    client.dispatcher.take_step("e2", Step([]))
    first.end()
    assert {key: type(error) for key, error in failures.items()} == {
        "a": CannotResumeError,
        "c": CannotResumeError,
    }
    second.end()
    third = ScriptedLink(client.dispatcher, "e3")
    assert [request.emitted_token_ids for request in third.submitted] == [[]]


async def test_operation_reaches_every_engine() -> None:
    client = fleet_client()
    links = [ScriptedLink(client.dispatcher, f"e{i}") for i in range(2)]
    assert await client.reset_prefix_cache_async()
    assert [link.calls for link in links] == [[("reset_prefix_cache", [False, False])]] * 2


async def test_adapter_that_no_engine_has_loaded_is_refused() -> None:
    client = fleet_client(adapters=["sql"])
    assert await client.add_lora_async(LoRARequest("sql", 1, "adapters/sql"))
    with pytest.raises(ValueError, match=r"'law' is not in lora_adapters; there are: sql"):
        await client.add_lora_async(LoRARequest("law", 2, "adapters/law"))
    assert await client.list_loras_async() == {1}


async def test_gateway_is_late_if_no_engine_answers_it_sooner() -> None:
    client = fleet_client()
    assert client.behind_s == 0.0
    first, second = ScriptedLink(client.dispatcher, "e1"), ScriptedLink(client.dispatcher, "e2")
    first.late_s = 4.0
    assert client.behind_s == 0.0  # that engine's host is late, or the way to it
    second.late_s = 3.0
    assert client.behind_s == 3.0


async def test_tokens_that_nobody_takes_make_the_gateway_late() -> None:
    client = fleet_client()
    link = ScriptedLink(client.dispatcher)
    await client.add_request_async(core_request("a"))
    assert client.behind_s == 0.0
    link.step()
    first_s = client.behind_s
    link.step()
    assert client.behind_s >= first_s > 0.0
    await delivered(client)
    assert client.behind_s == 0.0
