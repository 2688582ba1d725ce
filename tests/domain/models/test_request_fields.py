"""The closed table of request fields: what it says, and the judge of records over it. No engine."""

from pathlib import Path

import msgspec
import pytest

from serving.domain.models.engine_kind import EngineKind
from serving.domain.errors import MalformedRequestError
from serving.domain.models.request_fields.refusals import ignored_defaults, record_rules
from serving.gateway.edge.fields import BodyJudge, check_record
from serving.domain.models.request_fields.page import page
from serving.domain.models.request_fields.records import POOLING, REQUEST
from serving.domain.models.request_fields.rules import (
    REFUSED,
    EngineFacts,
    FieldRow,
    FieldOutcome,
    State,
    Trait,
)
from serving.domain.models.request_fields.routes import UNREAD
from serving.domain.models.request_fields.sampling import SAMPLING

PAGE = Path(__file__).parents[3] / "docs/reference/request-fields.md"
ROWS = (*SAMPLING, *POOLING, *REQUEST)
TPU = EngineFacts(EngineKind.VLLM_TPU)
CPU = EngineFacts(EngineKind.VLLM)


class Params(msgspec.Struct):
    """A record as vLLM has them, with one field that no table knows."""

    min_p: float = 0.0
    repetition_penalty: float = 1.0
    bad_words: list[str] | None = None
    temperature: float = 1.0
    brand_new: int = 3
    brand_new_list: list[int] = []


FIELDS = [row for row in SAMPLING if row.name in Params.__struct_fields__]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_what_is_refused_has_a_reason_and_what_is_not_has_none(row: FieldRow) -> None:
    for kind in EngineKind:
        outcome = row.outcome(kind)
        assert bool(outcome.reason) == (outcome.state in REFUSED)
        assert outcome.state in REFUSED or not outcome.traits
    assert row.source
    is_unread = any(row.name in names for names in UNREAD.values())
    assert row.may_be_refused or is_unread or not row.neutral
    assert row.may_be_refused or not (row.aliases or row.instead)


@pytest.mark.parametrize("rows", [SAMPLING, POOLING, REQUEST])
def test_field_has_one_row_in_its_record(rows: tuple[FieldRow, ...]) -> None:
    names = [row.name for row in rows]
    assert len(names) == len(set(names))


def test_nothing_is_ignored_by_vllm_where_it_passes() -> None:
    """What passes at engines of vLLM is honoured there, or has nothing to do with an engine."""
    passing = {State.HONOURED, State.GATEWAY, State.STEERING, State.HINT, State.INTERNAL}
    for row in ROWS:
        for kind in (EngineKind.VLLM, EngineKind.VLLM_TPU):
            assert row.outcome(kind).state in passing | REFUSED, row.name


@pytest.mark.parametrize(
    ("made", "named"),
    [
        (Params(min_p=0.1), "min_p"),
        (Params(repetition_penalty=1.1), "repetition_penalty"),
        (Params(repetition_penalty=0.0), "repetition_penalty"),
        (Params(bad_words=["x"]), "bad_words"),
        (Params(brand_new=4), "brand_new"),
        (Params(brand_new=0), "brand_new"),
        (Params(brand_new_list=[1]), "brand_new_list"),
    ],
)
def test_record_with_a_value_that_engines_ignore_is_refused(made: Params, named: str) -> None:
    rules = record_rules(FIELDS, TPU, Params)
    with pytest.raises(MalformedRequestError, match=f"{named}: it is a") as caught:
        check_record(made, rules)
    assert (caught.value.param, caught.value.code) == (named, "unsupported_parameter")


@pytest.mark.parametrize(
    "made",
    [
        Params(),
        Params(bad_words=[], min_p=0, repetition_penalty=1),
        Params(temperature=0.3),
        Params(brand_new_list=[]),
    ],
)
def test_neutral_record_passes(made: Params) -> None:
    check_record(made, record_rules(FIELDS, TPU, Params))


def test_unknown_field_is_refused_where_everything_else_is_honoured() -> None:
    rules = record_rules(FIELDS, CPU, Params)
    check_record(Params(min_p=0.1, bad_words=["x"]), rules)
    with pytest.raises(MalformedRequestError, match="in no table of this version"):
        check_record(Params(brand_new=4), rules)


def test_default_of_the_model_is_no_fault_of_the_client() -> None:
    rules = record_rules(FIELDS, TPU, Params, {"repetition_penalty": 1.05, "temperature": 0.6})
    check_record(Params(repetition_penalty=1.05, temperature=0.6), rules)
    check_record(Params(repetition_penalty=1.0), rules)
    with pytest.raises(MalformedRequestError, match="repetition_penalty"):
        check_record(Params(repetition_penalty=1.1), rules)


def test_client_that_asks_for_what_is_ignored_is_refused_though_the_model_has_it_as_default() -> (
    None
):
    with pytest.raises(MalformedRequestError, match="engines on TPU ignore it"):
        BodyJudge(TPU).check("/v1/completions", "repetition_penalty", 1.05)


def test_ignored_default_is_told() -> None:
    defaults = {"repetition_penalty": 1.05, "min_p": 0.0, "temperature": 0.6, "max_tokens": 9}
    (told,) = ignored_defaults(TPU, defaults)
    assert (told.field, told.value) == ("repetition_penalty", 1.05)
    assert "engines on TPU ignore it" in told.reason
    assert not list(ignored_defaults(CPU, defaults))


def test_trait_decides_for_one_engine_and_not_for_another() -> None:
    outcome = FieldOutcome(State.FATAL, "it ends", (Trait.SPECULATES, Trait.TAKES_MEDIA))
    assert outcome.state_for(TPU) == State.HONOURED
    for trait in outcome.traits:
        assert outcome.state_for(EngineFacts(TPU.kind, frozenset({trait}))) == State.FATAL
    other = EngineFacts(TPU.kind, frozenset({Trait.DATA_PARALLEL}))
    assert outcome.state_for(other) == State.HONOURED


def test_page_of_the_documentation_shows_the_table() -> None:
    assert PAGE.read_text() == page(), "write it anew: its first paragraph says how"
