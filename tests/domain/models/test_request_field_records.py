"""The table of request fields is closed against vLLM's records."""

import msgspec
import pytest
from pydantic import BaseModel
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from serving.domain.models.request_fields.records import POOLING, REQUEST
from serving.domain.models.request_fields.rules import REFUSED, FieldRow, State
from serving.domain.models.request_fields.routes import UNREAD
from serving.domain.models.request_fields.sampling import SAMPLING
from serving.gateway.edge.routes import GENERATE_ROUTES

pytestmark = pytest.mark.imports_vllm

RECORDS = [(SamplingParams, SAMPLING), (PoolingParams, POOLING), (EngineCoreRequest, REQUEST)]


@pytest.mark.parametrize(
    ("record", "rows"), RECORDS, ids=lambda each: getattr(each, "__name__", "")
)
def test_table_has_every_field_of_vllms_record_and_no_other(
    record: type[msgspec.Struct], rows: tuple[FieldRow, ...]
) -> None:
    """An upgrade of vLLM that adds a field fails here, and the table says what becomes of it."""
    assert {row.name for row in rows} == set(record.__struct_fields__)


@pytest.mark.parametrize(
    ("record", "rows"), RECORDS, ids=lambda each: getattr(each, "__name__", "")
)
def test_vllms_own_default_is_neutral(
    record: type[msgspec.Struct], rows: tuple[FieldRow, ...]
) -> None:
    defaults = {field.name: field.default for field in msgspec.structs.fields(record)}
    for row in rows:
        default = defaults[row.name]
        if row.may_be_refused and default not in (None, msgspec.NODEFAULT):
            assert default in row.neutral, row.name


BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": AnthropicMessagesRequest,
}
# What an engine minds, and so what a client may miss.
MINDED = {
    row.name
    for row in SAMPLING
    if {row.cpu.state, row.tpu.state} <= (REFUSED | {State.HONOURED}) - {State.UNREACHABLE}
}


@pytest.mark.parametrize("path", BODIES)
def test_table_knows_what_vllms_model_of_a_body_has_not(path: str) -> None:
    assert UNREAD[path] == MINDED - BODIES[path].model_fields.keys()


def test_every_route_that_generates_is_looked_at() -> None:
    assert UNREAD.keys() == BODIES.keys() == set(map(str, GENERATE_ROUTES))


@pytest.mark.parametrize("path", BODIES)
def test_field_that_no_route_is_said_to_take_is_in_no_body(path: str) -> None:
    unreachable = {
        row.name for row in (*SAMPLING, *REQUEST) if row.cpu.state == State.UNREACHABLE
    }
    assert not unreachable & BODIES[path].model_fields.keys()
