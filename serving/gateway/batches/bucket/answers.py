"""Answers as objects: those that were written at once are one, and are read again in their order.

Owns the form of such an object. Which of them count says the head of their batch.
"""

import tempfile
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from serving.gateway.batches.records import LineAnswer

# What is kept in memory of answers that are put in order; the rest is in a file without a name.
_MEMORY_BYTES = 8 * 1024 * 1024


class _Kept(msgspec.Struct, frozen=True, array_like=True):
    line: int
    is_failure: bool
    record: bytes


_DECODER = msgspec.msgpack.Decoder(list[_Kept])


def packed(answers: Sequence[LineAnswer]) -> bytes:
    """Returns the object of answers."""
    kept = [_Kept(answer.line, answer.is_failure, answer.record) for answer in answers]
    return msgspec.msgpack.encode(kept)


def in_order(objects: Iterable[bytes], *, is_failure: bool) -> Iterator[LineAnswer]:
    """Yields the answers of one kind in the order of their lines.

    Of a line that is in two objects the first one counts, of whichever kind it is.
    """
    seen: set[int] = set()
    places: list[tuple[int, int, int]] = []  # line, where its record is, how long that is
    with tempfile.SpooledTemporaryFile(_MEMORY_BYTES) as spool:
        for each in objects:
            for kept in _DECODER.decode(each):
                if kept.line in seen:
                    continue
                seen.add(kept.line)
                if kept.is_failure == is_failure:
                    places.append((kept.line, spool.tell(), len(kept.record)))
                    spool.write(kept.record)
        for line, at, length in sorted(places):
            spool.seek(at)
            yield LineAnswer(line, is_failure, spool.read(length))
