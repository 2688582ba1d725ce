"""What is kept of a run, in `docs/results/conversations.json`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import msgspec

from loadtest.records import RequestRecord

REPORT = Path(__file__).resolve().parents[2] / "docs/results/conversations.md"
RECORD = REPORT.with_suffix(".json")

OURS, BEFORE, SIMULATED = "Slicewise", "a07807c", "simulated"


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """One request that was answered whole. Times in seconds from when it was sent."""

    turn: int
    ttft_s: float
    whole_s: float
    input_tokens: int
    cached_tokens: int
    output_tokens: int

    @classmethod
    def of(cls, record: RequestRecord) -> Self:
        """The request that a load test has recorded.

        Raises:
            RuntimeError: it failed, or its answer says too little.
        """
        if record.error is not None:
            raise RuntimeError(f"{record.request_id} failed: {record.error}, {record.detail}")
        first_s, last_s = record.first_s, record.last_s
        used = record.input_tokens, record.cached_tokens, record.output_tokens
        if first_s is None or last_s is None or None in used[::2]:
            raise RuntimeError(f"{record.request_id} has no first token or no usage: {record}")
        return cls(
            record.turn,
            round(first_s - record.sent_s, 6),
            round(last_s - record.sent_s, 6),
            used[0] or 0,
            # What has cached nothing need not say so.
            used[1] or 0,
            used[2] or 0,
        )


class Run(msgspec.Struct, frozen=True):
    """One load on one system, in the order in which requests were sent.

    `pair` counts from 0. `other_cores` are those that processes of other people used meanwhile;
    `None` of a simulation.
    """

    system: str
    load: str
    pair: int
    seed: int
    other_cores: float | None
    turns: Sequence[Turn]

    @property
    def cached_ratio(self) -> float:
        """The share of the prompts' tokens that was cached."""
        found = sum(each.cached_tokens for each in self.turns)
        return found / sum(each.input_tokens for each in self.turns)

    def ttft_s(self, share: float) -> float:
        """What this share of the first tokens stays below."""
        return _quantile([each.ttft_s for each in self.turns], share)

    def whole_s(self, share: float) -> float:
        """What this share of the whole answers stays below."""
        return _quantile([each.whole_s for each in self.turns], share)


class Part(msgspec.Struct, frozen=True):
    """All runs with one kind of engine, and what has to be known to read them."""

    date: str
    commit: str
    machine: str
    python: str
    runs: Sequence[Run]


class Record(msgspec.Struct, frozen=True):
    """Both parts; `None` for one that was not run yet."""

    paced: Part | None = None
    vllm: Part | None = None


def read_record() -> Record:
    """Returns what is on record; an empty one where nothing is."""
    if not RECORD.exists():
        return Record()
    return msgspec.json.decode(RECORD.read_bytes(), type=Record)


def write_record(record: Record) -> None:
    """Writes `RECORD`."""
    RECORD.write_bytes(msgspec.json.encode(record) + b"\n")


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]
