"""The messages between the parent of a run and its workers, one JSON line each, over a socket.

Instants are monotonic: all workers are processes of one machine, whose monotonic clock they share.
"""

import msgspec


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Reports from a worker that it is prepared, and that the run may start."""


class Go(msgspec.Struct, frozen=True, tag="go"):
    """Orders the workers to start the run at `start_s`."""

    start_s: float


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Orders the workers to send nothing more and to end what is in flight."""


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Reports a worker's totals once a second. `ttft_counts` is a histogram of all TTFT."""

    num_sent: int
    num_in_flight: int
    num_failed: int
    ttft_counts: dict[int, int]


FromWorker = Ready | Progress
FromParent = Go | Stop

_ENCODER = msgspec.json.Encoder()
_FROM_WORKER: msgspec.json.Decoder[FromWorker] = msgspec.json.Decoder(FromWorker, strict=False)
_FROM_PARENT: msgspec.json.Decoder[FromParent] = msgspec.json.Decoder(FromParent)
# Both take one line.
from_worker, from_parent = _FROM_WORKER.decode, _FROM_PARENT.decode


def encode_message(message: FromWorker | FromParent) -> bytes:
    """Encodes one line, its end included."""
    return _ENCODER.encode(message) + b"\n"
