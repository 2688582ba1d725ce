"""What a line of a batch's file may be, and what is said of one that is something else."""

import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.gateway.batches.lines import (
    MAX_FAULTS,
    MAX_MODEL_NAME,
    MAX_NESTING,
    BatchLine,
    CheckedLines,
    LineLimits,
    check_lines,
    custom_id_of,
    numbered,
    parse_line,
)

PATH = "/v1/chat/completions"
LIMITS = LineLimits(max_lines=200, max_line_bytes=30_000)


def line(**changes: Any) -> dict[str, Any]:
    whole = {"custom_id": "a", "method": "POST", "url": PATH, "body": {"model": "m"}} | changes
    return {name: value for name, value in whole.items() if value is not ...}


def latin_1(**changes: Any) -> bytes:
    return json.dumps(line(**changes), ensure_ascii=False).encode("latin-1")


def nested(num_levels: int) -> bytes:
    """A line of so many levels, of which it and its body are two."""
    arrays = b"[" * (num_levels - 2) + b"]" * (num_levels - 2)
    return json.dumps(line(body={"x": "HERE"})).encode().replace(b'"HERE"', arrays)


def check(text: bytes, limits: LineLimits = LIMITS) -> CheckedLines:
    return check_lines(io.BytesIO(text), PATH, limits)


def test_lines_are_numbered_as_an_editor_does() -> None:
    text = b"\xef\xbb\xbf{}\r\n\n  \n[1]\nlast"
    assert list(numbered(io.BytesIO(text), LIMITS)) == [(1, b"{}"), (4, b"[1]"), (5, b"last")]


def test_blank_line_is_left_out_however_long() -> None:
    blank = b" \t" * 200_000 + b"\r\n"
    text = blank + b"{}" + b"\r" * 10 + b"\n" + blank[:-2]
    limits = LineLimits(max_lines=200, max_line_bytes=1_000_000)
    ((number, found),) = numbered(io.BytesIO(text), limits)
    assert (number, found.rstrip()) == (2, b"{}")


def test_long_line_is_cut_and_the_next_one_is_whole() -> None:
    limits = LineLimits(max_lines=200, max_line_bytes=300)
    text = b"x" * 1000 + b"\n{}\n"
    (first, cut), second = numbered(io.BytesIO(text), limits)
    assert (first, second) == (1, (2, b"{}"))
    assert limits.max_line_bytes < len(cut) < 310
    fault = check(text, limits).faults[0]
    assert (fault.line, fault.code) == (1, "line_too_long")
    exact = json.dumps(line(body={"x": ""}))
    longest = line(body={"x": "y" * (300 - len(exact))})
    assert check(json.dumps(longest).encode() + b"\n", limits) == CheckedLines(1, ())


def test_lines_are_counted_by_the_models_that_they_name() -> None:
    bodies = [{"model": "a"}, {"model": "b"}, {"model": "a"}, {"model": 7}, {}]
    lines = [
        {"custom_id": str(at), "method": "POST", "url": PATH, "body": body}
        for at, body in enumerate(bodies)
    ]
    checked = check(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    assert checked == CheckedLines(5, (), {"a": 2, "b": 1})


def test_long_name_of_a_model_is_cut_where_it_is_told_and_is_not_counted() -> None:
    longest = "\N{SNOWMAN}" * MAX_MODEL_NAME
    lines = [
        line(custom_id=str(at), body={"model": model})
        for at, model in enumerate([longest, longest + "!", "!" * 20_000])
    ]
    checked = check(b"".join(json.dumps(each).encode() + b"\n" for each in lines))
    assert checked.by_model == {longest: 1}
    assert [(fault.line, fault.param) for fault in checked.faults] == [
        (2, "body.model"),
        (3, "body.model"),
    ]
    assert all(len(fault.message) < 200 for fault in checked.faults)
    assert f"allowed: {MAX_MODEL_NAME}" in checked.faults[0].message


def test_body_goes_on_as_it_came() -> None:
    text = b'{"custom_id": "a", "method": "POST", "url": "%s", "body": {"n":1e0, "n":2}}'
    parsed = parse_line(3, text % PATH.encode(), PATH, LIMITS)
    assert parsed == BatchLine(3, "a", b'{"n":1e0, "n":2}')


@pytest.mark.parametrize(
    ("bad", "code", "shown"),
    [
        (b"[]", "invalid_json_line", "JSON object"),
        (b'{"custom_id"', "invalid_json_line", "JSON object"),
        (b"\xff", "invalid_json_line", "not UTF-8"),
        (latin_1(custom_id="caf\xe9"), "invalid_json_line", "not UTF-8"),
        (latin_1(method="\xe9"), "invalid_json_line", "not UTF-8"),
        (latin_1(url="\xe9"), "invalid_json_line", "not UTF-8"),
        (latin_1(body={"model": "\xe9"}), "invalid_json_line", "not UTF-8"),
        (latin_1(body={"prompt": "\xe9"}), "invalid_json_line", "not UTF-8"),
        (line(custom_id=...), "missing_required_parameter", "custom_id: missing"),
        (line(custom_id=7), "invalid_type", "custom_id: allowed: a string"),
        (line(custom_id=""), "invalid_custom_id", "0 characters"),
        (line(method="GET"), "invalid_method", "'GET'; allowed: POST"),
        (line(url="/v1/embeddings"), "mismatched_url", f"allowed: {PATH}"),
        (line(body=...), "missing_required_parameter", "body: missing"),
        (line(body=[]), "invalid_type", "body: allowed: an object"),
        (line(body={"stream": True}), "stream_not_allowed", "body.stream"),
        (line(body={"model": "m" * 257}), "model_name_too_long", "body.model: 257 characters"),
        (nested(MAX_NESTING + 1), "nested_too_deeply", f"than the {MAX_NESTING} levels"),
        (nested(10_000), "nested_too_deeply", f"than the {MAX_NESTING} levels"),
    ],
)
def test_bad_line_is_told_by_its_number(bad: Any, code: str, shown: str) -> None:
    text = bad if isinstance(bad, bytes) else json.dumps(bad).encode()
    good = json.dumps(line(custom_id="good")).encode()
    checked = check(good + b"\n\n" + text + b"\n")
    (fault,) = checked.faults
    assert (fault.line, fault.code) == (3, code)
    assert shown in fault.message


def test_levels_are_counted_and_neither_texts_nor_siblings() -> None:
    assert not check(nested(MAX_NESTING)).faults
    siblings = [[{}]] * MAX_NESTING
    texts = ["[" * MAX_NESTING, '\\"[{' * MAX_NESTING, "[\\" * MAX_NESTING]
    assert not check(json.dumps(line(body={"x": siblings + texts})).encode()).faults


VALUES = st.recursive(
    st.text(alphabet='\\"[]{}a\n', max_size=6),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=2), values),
    max_leaves=30,
)


@given(VALUES, st.integers(MAX_NESTING - 9, MAX_NESTING))
def test_levels_are_those_that_the_reader_of_json_has(value: Any, num_around: int) -> None:
    for _ in range(num_around - 2):
        value = [value]
    # So many siblings that the brackets are looked at.
    whole = line(body={"x": value, "y": [[]] * MAX_NESTING})
    codes = [fault.code for fault in check(json.dumps(whole).encode()).faults]
    assert codes == (["nested_too_deeply"] if levels(whole) > MAX_NESTING else [])


def levels(value: Any) -> int:
    """The levels of objects and lists in a value."""
    if isinstance(value, dict):
        return 1 + max(map(levels, value.values()), default=0)
    return 1 + max(map(levels, value), default=0) if isinstance(value, list) else 0


@pytest.mark.parametrize(
    ("text", "custom_id"),
    [
        (json.dumps(line(custom_id="a", url="/other", body=[])).encode(), "a"),
        (nested(10_000), "a"),
        (latin_1(body={"prompt": "\xe9"}), "a"),
        (json.dumps(line(custom_id='"b"\n')).encode()[:40], '"b"\n'),
        (b'{"body": {"custom_id": "b"}, "custom_id": "a"', "line 7"),
        (latin_1(custom_id="\xe9"), "line 7"),
        (json.dumps(line(custom_id=7)).encode(), "line 7"),
        (json.dumps(line(custom_id="a" * 513)).encode(), "line 7"),
        (json.dumps(line(custom_id="a" * 512)).encode()[:540], "a" * 512),
        (json.dumps(line(custom_id="\N{SNOWMAN}" * 512)).encode()[:3100], "\N{SNOWMAN}" * 512),
        (b'{"custom_id": "' + rb"\"" * 10_000 + b'", x', "line 7"),
        (b"[" * 10_000, "line 7"),
        (b"\xff", "line 7"),
    ],
)
def test_line_that_is_no_request_has_its_name_if_it_can_be_read(
    text: bytes, custom_id: str
) -> None:
    assert custom_id_of(7, text) == custom_id


def test_stream_that_is_off_passes() -> None:
    text = json.dumps(line(body={"stream": False, "model": "m"})).encode()
    assert check(text) == CheckedLines(1, (), {"m": 1})


def test_id_is_that_of_one_line() -> None:
    text = "\n".join(json.dumps(line(custom_id=name)) for name in "aba").encode()
    (fault,) = check(text).faults
    assert (fault.line, fault.code, fault.param) == (3, "duplicate_custom_id", "custom_id")
    assert "that of line 1" in fault.message


def test_file_has_some_lines_and_not_too_many() -> None:
    many = b"".join(json.dumps(line(custom_id=str(n))).encode() + b"\n" for n in range(201))
    for text, code in ((b"", "empty_file"), (b"\n \n", "empty_file"), (many, "too_many_lines")):
        (fault,) = check(text).faults
        assert (fault.code, fault.line) == (code, None)
    assert check(many[: many.rindex(b"\n", 0, -1) + 1]) == CheckedLines(200, (), {"m": 200})


def test_of_many_faults_the_first_are_told() -> None:
    faults = check(b"[]\n" * 150).faults
    assert [fault.line for fault in faults] == list(range(1, MAX_FAULTS + 1))
