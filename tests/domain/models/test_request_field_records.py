"""The table of request fields is closed against vLLM's records."""

import msgspec
import pytest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from serving.domain.models.request_fields.records import POOLING, REQUEST
from serving.domain.models.request_fields.rules import FieldRow
from serving.domain.models.request_fields.sampling import SAMPLING

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
