"""What is kept of the days, in `docs/results/one-fleet.json`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from autoscaling.simulator.outcome import SimulationOutcome
from serving.domain.slice_lifecycle import HELD_STATES

REPORT = Path(__file__).resolve().parents[2] / "docs/results/one-fleet.md"
RECORD = REPORT.with_suffix(".json")


class ModelDay(msgspec.Struct, frozen=True):
    """The day of one model. `num_slices_begun` counts slices that it got, each time again.

    `bought_usd` is what it cost besides what is prepaid; `slice_hours` are those in which slices of
    a class were held.
    """

    num_requests: int
    slo_ratio: float
    ttft_p99_s: float
    slice_hours: Mapping[str, float]
    bought_usd: float
    num_slices_begun: int

    @classmethod
    def of(cls, outcome: SimulationOutcome) -> "ModelDay":
        """What is kept of a simulated day."""
        hours: dict[str, float] = {}
        for (name, state), spent_s in outcome.seconds.items():
            if state in HELD_STATES:
                hours[name] = hours.get(name, 0.0) + spent_s / 3600
        return cls(
            num_requests=outcome.service.num_requests,
            slo_ratio=round(outcome.service.slo_ratio, 6),
            ttft_p99_s=round(outcome.service.ttft_s[99], 3),
            slice_hours={name: round(each, 2) for name, each in sorted(hours.items())},
            bought_usd=round(outcome.cost.total_usd - outcome.cost.committed_usd, 2),
            num_slices_begun=sum(each.held_at_s is not None for each in outcome.lives),
        )


class DayRun(msgspec.Struct, frozen=True):
    """A day of all models of a case, by their names."""

    case: str
    way: str
    seed: int
    models: Mapping[str, ModelDay]


class Part(msgspec.Struct, frozen=True):
    """The days of one table, simulated at one commit."""

    date: str
    commit: str
    runs: Sequence[DayRun]


class Record(msgspec.Struct, frozen=True):
    """The days of both tables."""

    quotas: Part
    shapes: Part


_NONE_YET = Record(Part("", "", ()), Part("", "", ()))


def read_record() -> Record:
    """Returns what is on record."""
    if not RECORD.exists():
        return _NONE_YET
    return msgspec.json.decode(RECORD.read_bytes(), type=Record)


def write_record(record: Record) -> None:
    """Writes `RECORD`."""
    RECORD.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
