"""vLLM's records through the link's messages and back."""

import msgspec
import numpy as np
import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
)
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors
from vllm.v1.serial_utils import MsgpackEncoder

from serving.link.messages import RESERVED_ARG_PREFIX, Finish, TokenOutput, TokenRequest
from serving.link.vllm_codec import (
    EMITTED_KEY,
    decode_output,
    decode_request,
    emitted_token_ids,
    encode_outputs,
    encode_request,
    output_decoder,
    request_decoder,
)

pytestmark = pytest.mark.imports_vllm

# Every field of an output that travels in the payload, with a value that is not its default.
PAYLOAD_FIELDS = {
    "new_logprobs": LogprobsLists(
        np.array([[7, 8]]), np.array([[-0.5, -1.5]], dtype=np.float32), np.array([1])
    ),
    "new_prompt_logprobs_tensors": LogprobsTensors(
        torch.tensor([[7]]), torch.tensor([[-0.5]]), torch.tensor([1])
    ),
    "pooling_output": torch.tensor([1.0, 2.0]),
    "events": [EngineCoreEvent(EngineCoreEventType.QUEUED, 5.0)],
    "kv_transfer_params": {"a": 1},
    "ec_transfer_params": {"a": 1},
    "trace_headers": {"traceparent": "x"},
    "prefill_stats": PrefillStats(),
    "routed_experts": np.array([1, 2]),
    "num_nans_in_logits": 3,
    "mm_cache_miss_hashes": ["abc"],
    "new_sampling_mask": None,
    "spec_decode_metrics": None,
    "prompt_token_id_logprobs": torch.tensor([[0.5]]),
}
# Fields that the message itself carries.
PLAIN_FIELDS = {"request_id", "new_token_ids", "finish_reason", "stop_reason"}


def request(**changes: object) -> EngineCoreRequest:
    values = {
        "request_id": "r",
        "prompt_token_ids": [1, 2, 3],
        "mm_features": None,
        "sampling_params": SamplingParams(max_tokens=7),
        "pooling_params": None,
        "arrival_time": 12.5,
        "lora_request": None,
        "cache_salt": None,
        "data_parallel_rank": None,
    }
    return EngineCoreRequest(**(values | changes))  # type: ignore[arg-type]


def over_the_link(
    subject: EngineCoreRequest, emitted: list[int] | None = None
) -> EngineCoreRequest:
    message = TokenRequest(
        "wire",
        subject.prompt_token_ids or [],
        emitted or [],
        7,
        encode_request(subject, MsgpackEncoder()),
    )
    on_wire = msgspec.msgpack.encode(message)
    return decode_request(msgspec.msgpack.decode(on_wire, type=TokenRequest), request_decoder())


def output_over_the_link(
    output: EngineCoreOutput, sent_at_s: float = 100.0, taken_at_s: float = 100.0
) -> tuple[TokenOutput, EngineCoreOutput]:
    (message,) = encode_outputs([output], MsgpackEncoder(), lambda: sent_at_s)
    on_wire = msgspec.msgpack.encode(message)
    message = msgspec.msgpack.decode(on_wire, type=TokenOutput)
    return message, decode_output(message, output_decoder(), lambda: taken_at_s)


# -- requests --


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"cache_salt": "salt", "priority": 3, "trace_headers": {"a": "b"}, "external_req_id": "x"},
        {"lora_request": LoRARequest("lora", 1, "/adapters/lora")},
        {"reasoning_ended": True, "reasoning_parser_kwargs": {"enable_thinking": False}},
    ],
)
def test_request_arrives_as_it_was_under_the_id_of_its_attempt(changes: dict[str, object]) -> None:
    subject = request(**changes)
    arrived = over_the_link(subject)
    assert arrived.request_id == "wire"
    arrived.request_id = "r"
    assert repr(arrived) == repr(subject)


def test_sampling_parameters_arrive_as_they_were() -> None:
    params = SamplingParams(
        max_tokens=7,
        min_tokens=2,
        temperature=0.5,
        seed=11,
        presence_penalty=0.25,
        logit_bias={5: -1.0},
        stop_token_ids=[9],
        logprobs=3,
        structured_outputs=StructuredOutputsParams(json={"type": "object"}),
        extra_args={"mine": 1},
    )
    assert repr(over_the_link(request(sampling_params=params)).sampling_params) == repr(params)


def test_encoding_leaves_the_request_as_it_was() -> None:
    subject = request()
    encode_request(subject, MsgpackEncoder())
    assert subject.prompt_token_ids == [1, 2, 3]


def test_prompt_travels_once() -> None:
    prompt = [1_000_000 + number for number in range(500)]
    assert sum(map(len, encode_request(request(prompt_token_ids=prompt), MsgpackEncoder()))) < 500


def test_emitted_tokens_arrive_beside_the_callers_own_arguments() -> None:
    params = SamplingParams(max_tokens=7, extra_args={"mine": 1})
    arrived = over_the_link(request(sampling_params=params), emitted=[4, 5]).sampling_params
    assert arrived is not None
    assert emitted_token_ids(arrived) == [4, 5]
    assert arrived.extra_args is not None
    assert arrived.extra_args["mine"] == 1
    assert params.extra_args == {"mine": 1}


# Each of them ended an engine core, or put words into an answer's mouth.
FORGED = [1.5, [1.5], [2_000_000_000], [-1], 5, "tokens", [4, 5]]


@pytest.mark.parametrize("forged", FORGED)
@pytest.mark.parametrize("emitted", [[], [7, 8]])
def test_what_a_client_says_was_emitted_is_left_at_the_gateway(
    forged: object, emitted: list[int]
) -> None:
    params = SamplingParams(max_tokens=7, extra_args={"mine": 1, EMITTED_KEY: forged})
    payload = b"".join(encode_request(request(sampling_params=params), MsgpackEncoder()))
    assert EMITTED_KEY.encode() not in payload
    assert b"mine" in payload
    assert params.extra_args == {"mine": 1, EMITTED_KEY: forged}
    arrived = over_the_link(request(sampling_params=params), emitted).sampling_params
    assert emitted_token_ids(arrived) == (emitted or None)


@pytest.mark.parametrize("forged", FORGED)
@pytest.mark.parametrize("emitted", [[], [7, 8]])
def test_engine_host_takes_what_was_emitted_from_the_message_alone(
    forged: object, emitted: list[int]
) -> None:
    """A gateway of an earlier build sends the client's own arguments as they came."""
    another = f"{RESERVED_ARG_PREFIX}anything"
    params = SamplingParams(max_tokens=7, extra_args={EMITTED_KEY: forged, another: 1})
    subject = request(sampling_params=params, prompt_token_ids=None)
    payload = [bytes(part) for part in MsgpackEncoder().encode(subject)]
    assert EMITTED_KEY.encode() in b"".join(payload)
    message = TokenRequest("wire", [1], emitted, 7, payload)
    arrived = decode_request(message, request_decoder()).sampling_params
    assert arrived is not None
    assert arrived.extra_args == ({EMITTED_KEY: emitted} if emitted else None)


def test_fresh_request_has_emitted_nothing() -> None:
    assert emitted_token_ids(over_the_link(request()).sampling_params) is None
    assert emitted_token_ids(None) is None


def test_payload_that_is_not_vllms_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_request(TokenRequest("r", [1], payload=[b"\x93\x01"]), request_decoder())


# -- outputs --


def test_every_field_of_an_output_is_known_here() -> None:
    assert set(EngineCoreOutput.__struct_fields__) == PLAIN_FIELDS | PAYLOAD_FIELDS.keys()


@pytest.mark.parametrize(
    "name", [name for name, value in PAYLOAD_FIELDS.items() if value is not None]
)
def test_field_beyond_tokens_makes_a_payload_and_arrives(name: str) -> None:
    output = EngineCoreOutput("r", [1])
    setattr(output, name, PAYLOAD_FIELDS[name])
    wanted = repr(output)
    message, arrived = output_over_the_link(output)
    assert message.payload is not None
    assert repr(arrived) == wanted


@pytest.mark.parametrize(
    "output",
    [
        EngineCoreOutput("r", [1]),
        EngineCoreOutput("r", [1, 2, 3]),
        EngineCoreOutput("r", [], finish_reason=FinishReason.ABORT),
        EngineCoreOutput("r", [1], finish_reason=FinishReason.LENGTH),
        EngineCoreOutput("r", [1], finish_reason=FinishReason.STOP, stop_reason=42),
        EngineCoreOutput("r", [1], finish_reason=FinishReason.STOP, stop_reason="END"),
    ],
)
def test_output_of_tokens_alone_arrives_without_a_payload(output: EngineCoreOutput) -> None:
    message, arrived = output_over_the_link(output)
    assert message.payload is None
    assert arrived == output


def test_finish_reasons_have_the_same_numbers_on_the_link() -> None:
    assert {reason.name: reason.value for reason in FinishReason} == {
        finish.name: finish.value for finish in Finish
    }


def test_event_keeps_its_age_between_two_clocks() -> None:
    output = EngineCoreOutput("r", [1])
    output.events = [
        EngineCoreEvent(EngineCoreEventType.QUEUED, 998.0),
        EngineCoreEvent(EngineCoreEventType.SCHEDULED, 999.5),
    ]
    _, arrived = output_over_the_link(output, sent_at_s=1000.0, taken_at_s=50.0)
    assert arrived.events is not None
    assert [event.timestamp for event in arrived.events] == [48.0, 49.5]
