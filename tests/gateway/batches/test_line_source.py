"""Lines come in their order, and few of them, or of their bytes, are read ahead."""

import io
import json
from collections.abc import Callable
from typing import Any

from serving.domain.limits import MIB
from serving.gateway.batches.lines import BatchLine, LineLimits
from serving.gateway.batches.running.line_source import LineSource

PATH = "/v1/completions"
LIMITS = LineLimits(max_lines=1000, max_line_bytes=3 * MIB)


def content(num_lines: int, num_bytes: int) -> io.BytesIO:
    """Lines whose ids are their numbers, with a prompt of so many bytes each."""
    lines = (
        {"custom_id": str(number), "method": "POST", "url": PATH, "body": {"prompt": "x"}}
        for number in range(1, num_lines + 1)
    )
    whole = (json.dumps(line).replace('"x"', f'"{"x" * num_bytes}"') for line in lines)
    return io.BytesIO("\n".join(whole).encode())


async def blocking(call: Callable[..., Any], *values: Any) -> Any:
    return call(*values)


async def ids(source: LineSource) -> list[int]:
    found = []
    while (found_line := await source.next()) is not None:
        assert isinstance(found_line.line, BatchLine)
        found.append(int(found_line.line.custom_id))
    return found


async def test_lines_without_an_answer_come_in_their_order() -> None:
    source = LineSource(content(200, 1), PATH, LIMITS, {1, 7, 200}, blocking)
    assert await ids(source) == [number for number in range(2, 200) if number != 7]
    assert await source.next() is None


async def test_of_long_lines_few_are_read_ahead() -> None:
    file = content(10, 2 * MIB)
    source = LineSource(file, PATH, LIMITS, (), blocking)
    assert await source.next() is not None
    assert file.tell() < 5 * MIB
    assert await ids(source) == list(range(2, 11))


async def test_lines_are_read_again_where_they_begin_and_the_others_go_on() -> None:
    file = io.BytesIO(b"\xef\xbb\xbf" + content(100, 1).getvalue().replace(b"\n", b"\r\n\n", 5))
    source = LineSource(file, PATH, LIMITS, (), blocking)
    read = [await source.next() for _ in range(70)]
    places = [(each.line.number, each.begin) for each in read if each is not None]
    assert await source.read_again(places[::-1])
    again = [(await source.read_again([place]))[0] for place in places]
    assert again == read
    assert await ids(source) == list(range(71, 101))


async def test_of_long_lines_few_are_read_again_at_once() -> None:
    source = LineSource(content(4, 2 * MIB), PATH, LIMITS, (), blocking)
    read = [await source.next() for _ in range(4)]
    places = [(each.line.number, each.begin) for each in read if each is not None]
    assert await source.read_again(places) == read[:2]
