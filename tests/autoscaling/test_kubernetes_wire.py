"""Streams of lines, and the waits between attempts: the parts of a watch that need no server."""

from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscaling.provisioning.errors import UnusableError
from autoscaling.provisioning.objects.collection import MAX_BACKOFF_S, backoff_s
from autoscaling.provisioning.objects.wire import MAX_LINE_BYTES, Selection, split_lines


async def stream(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


@given(
    lines=st.lists(st.binary(min_size=1, max_size=8).filter(lambda line: b"\n" not in line)),
    rest=st.binary(max_size=4).filter(lambda line: b"\n" not in line),
    cuts=st.lists(st.integers(0, 80)),
)
async def test_lines_are_whole_wherever_chunks_end(
    lines: list[bytes], rest: bytes, cuts: list[int]
) -> None:
    """A piece without an end is what a cut connection leaves, and no line."""
    text = b"".join(line + b"\n" for line in lines) + rest
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    chunks = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    assert [line async for line in split_lines(stream(*chunks))] == lines


async def test_line_without_end_is_no_watch() -> None:
    half = b"x" * (MAX_LINE_BYTES // 2 + 1)
    with pytest.raises(UnusableError, match=f"longer than {MAX_LINE_BYTES} bytes"):
        assert [line async for line in split_lines(stream(half, half))] == []


def test_wait_doubles_up_to_its_bound_and_is_at_least_what_the_server_asks_for() -> None:
    assert [backoff_s(number, 1.0, None) for number in (1, 2, 3)] == [0.4, 0.8, 1.6]
    assert backoff_s(1000, 1.0, None) == MAX_BACKOFF_S
    assert backoff_s(3, 0.5, None) == 0.8
    assert backoff_s(3, 0.0, 17.0) == 17.0


def test_selection_is_by_labels_by_name_or_everything() -> None:
    assert Selection("api/v1", "pods").parameters == {}
    assert Selection("api/v1", "pods", "a=b").parameters == {"labelSelector": "a=b"}
    named = Selection("api/v1", "pods", name="x")
    assert named.parameters == {"fieldSelector": "metadata.name=x"}
