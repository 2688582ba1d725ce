"""What is said on the stream of a host: JSON lines, and one word in the other direction.

The host sends a line every 0.25 s, and one with all present notices at once when they change. The
replica says at last that it leaves the slice. Pure.
"""

import msgspec

from serving.link.heartbeat import HeartbeatConfig
from serving.slices.notices import Notice

# A host that has ended closes its stream, and is known at once. Silence alone may be a host, or a
# network, that is only slow, and giving a slice up for it costs a load of the model. The engine
# on it is watched more closely, by the link and by the engine host.
HEARTBEAT = HeartbeatConfig(timeout_s=5.0)
# Some hundred notices; a host has a handful of sources.
MAX_LINE_BYTES = 64 * 1024
# What the replica says before it gives the slice back.
LEFT_LINE = b"left\n"


class StreamLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The line on the stream. `notices` are all present ones; `None` is a mere heartbeat.

    `refused` is set before the server hangs up on one watcher too many.
    """

    notices: tuple[Notice, ...] | None = None
    refused: bool = False


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(StreamLine)


def encode_line(line: StreamLine) -> bytes:
    """Returns the line as it is sent."""
    return _ENCODER.encode(line) + b"\n"


def decode_line(raw: bytes) -> StreamLine:
    """Returns the line that was sent.

    Raises:
        ValueError: no host sends this.
    """
    return _DECODER.decode(raw)
