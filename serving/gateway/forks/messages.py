"""What a gateway and its fork servers tell each other: frames over pipes. Pure.

A frame is a length of 4 bytes, big-endian, and one record in msgpack.
"""

from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

LENGTH_BYTES = 4

# What a fork server does, by name. A task gets an order's payload and returns an outcome's; what it
# raises is a fault of ours, and told by its type alone.
Tasks = Mapping[str, Callable[[bytes], bytes]]

_ENCODER = msgspec.msgpack.Encoder()
_Record = TypeVar("_Record", bound=msgspec.Struct)


class ForkLimits(msgspec.Struct, frozen=True):
    """How much one order may take.

    `cpu_s` is in whole seconds of processor time, `wall_s` in seconds, `memory_bytes` beyond what
    the fork server has anyway.
    """

    cpu_s: int
    wall_s: float
    memory_bytes: int

    def __str__(self) -> str:
        """Returns the limits as a client reads them; time is none that it can keep."""
        memory = self.memory_bytes // 2**20
        return f"{self.cpu_s} s of processor time and {memory} MiB"


class Start(msgspec.Struct, frozen=True):
    """The first frame: `tasks` names a function (`module:name`) that makes them of `spec`."""

    tasks: str
    spec: bytes


class ForkOrder(msgspec.Struct, frozen=True):
    """One piece of work. Without a `task` the order of this number is withdrawn."""

    number: int
    task: str | None = None
    payload: bytes = b""
    limits: ForkLimits | None = None


class ForkOutcome(msgspec.Struct, frozen=True):
    """What came of an order: a `payload`, or a `fault` of ours, or neither, if it was ended.

    It is ended at a limit, or by what it did. One that `is_late` was ended only because its time
    was over. The first frame of all has `number` 0: the program has begun, or cannot for this
    `fault`.
    """

    number: int
    payload: bytes | None = None
    fault: str | None = None
    is_late: bool = False


def framed(record: msgspec.Struct) -> bytearray:
    """Returns a record as a frame."""
    frame = bytearray(LENGTH_BYTES)
    _ENCODER.encode_into(record, frame, LENGTH_BYTES)
    frame[:LENGTH_BYTES] = (len(frame) - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "big")
    return frame


def length_in(head: bytes | bytearray) -> int:
    """Returns the bytes of the record that follows a frame's length."""
    return int.from_bytes(head[:LENGTH_BYTES], "big")


def taken(buffer: bytearray, kind: type[_Record]) -> _Record | None:
    """Takes the first frame out of a buffer; `None` if it is not whole."""
    end = LENGTH_BYTES + length_in(buffer)
    if len(buffer) < max(end, LENGTH_BYTES):
        return None
    with memoryview(buffer) as view:
        record = msgspec.msgpack.decode(view[LENGTH_BYTES:end], type=kind)
    del buffer[:end]
    return record
