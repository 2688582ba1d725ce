"""Answers as objects: those that were written at once are one, and are read again in their order.

Owns the form of such an object. Which of them count says the head of their batch.
"""

import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future

import msgspec

from serving.gateway.batches.records import LineAnswer

# What is kept in memory of answers that are put in order; the rest is in a file without a name.
_MEMORY_BYTES = 8 * 1024 * 1024
# Objects that are read before they are needed: one takes some tens of ms.
_READ_AHEAD = 4


class _Kept(msgspec.Struct, frozen=True, array_like=True):
    line: int
    is_failure: bool
    record: bytes


_DECODER = msgspec.msgpack.Decoder(list[_Kept])


def packed(answers: Sequence[LineAnswer]) -> bytes:
    """Returns the object of answers."""
    kept = [_Kept(answer.line, answer.is_failure, answer.record) for answer in answers]
    return msgspec.msgpack.encode(kept)


def read_ahead(
    readers: Executor, read: Callable[[str], bytes], names: Iterable[str]
) -> Iterator[bytes]:
    """Yields objects in the order of their names, a few of which are read at once."""
    reading: deque[Future[bytes]] = deque()
    try:
        for name in names:
            reading.append(readers.submit(read, name))
            if len(reading) > _READ_AHEAD:
                yield reading.popleft().result()
        while reading:
            yield reading.popleft().result()
    finally:
        for future in reading:
            future.cancel()


def in_order(objects: Iterable[bytes]) -> Iterator[LineAnswer]:
    """Yields answers in the order of their lines.

    Of a line that is in two objects the first one counts, of whichever kind it is.
    """
    seen: set[int] = set()
    # Line, whether it failed, where its record is, how long that is.
    places: list[tuple[int, bool, int, int]] = []
    with tempfile.SpooledTemporaryFile(_MEMORY_BYTES) as spool:
        for each in objects:
            for kept in _DECODER.decode(each):
                if kept.line in seen:
                    continue
                seen.add(kept.line)
                places.append((kept.line, kept.is_failure, spool.tell(), len(kept.record)))
                spool.write(kept.record)
        for line, is_failure, at, length in sorted(places):
            spool.seek(at)
            yield LineAnswer(line, is_failure, spool.read(length))
