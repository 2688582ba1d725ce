"""What is to be run, in which order: the whole table, part by part.

A part is a section of the page. The first runs of every part come before the second ones of any
but the headline, so that a run that is broken off has something of everything.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autoscaling.simulator.policies import POLICIES, SLICEWISE
from benchmarks.policies.batches import WINDOWS_S
from benchmarks.policies.cases import REPORTING, SCALE, SHIPPED, TUNING, TWO_DAYS
from benchmarks.policies.worlds import AS_BELIEVED, WORLDS

HEADLINE, DROUGHT = "azure-day", "spot-drought"
NUM_SEEDS = 10
LOWER_BOUND, HINDSIGHT = "lower bound", "plan with hindsight"
# It pays for slices while they load: what even who knows all cannot save.
LOADING_BOUND = "lower bound with loading"
# It keeps the floor that our rules ask for: what safety costs who knows all.
SAFE_HINDSIGHT = "plan with hindsight and our floor"
# Of the reporting set, the days that cost at equal service is told of, and of whom. One day says
# little where a zone may go at a bad moment of it or not.
HELD_OUT = "servegen-8-14"
CURVE_SEEDS: Mapping[str, range] = {HEADLINE: range(1, 2), HELD_OUT: range(1, 4)}
ON_HELD_OUT = (
    SLICEWISE,
    "hpa-ladder",
    "llmd-slo-ladder",
    "dynamo-planner-ladder",
    "spothedge",
    "spothedge-quick",
)
# The days that knobs are chosen on (`choice`), of each tuning case, and what that came to. A test
# holds these values to the stored results.
CHOICE_SEEDS = range(1, 3)
CHOSEN: Mapping[str, float] = {
    SLICEWISE: 0.008,
    "static-on-demand": 0.9,
    "hpa": 0.8,
    "hpa-ladder": 0.5,
    "hpa-ladder-no-return": 0.72,
    "llmd-slo": 0.85,
    "llmd-slo-ladder": 0.65,
    "dynamo-planner": 0.6,
    "dynamo-planner-ladder": 0.4,
    "ray-serve-default": 0.57,
    "spothedge": 0.5,
    "spothedge-quick": 0.5,
}
# Those that wrong worlds are shown for: ours, and the best of each other kind.
IN_WORLDS = (SLICEWISE, "hpa-ladder", "llmd-slo-ladder", "dynamo-planner-ladder", "spothedge-quick")


class Job(NamedTuple):
    """One run. `value` is of the policy's knob, `None`: as shipped, or there is none."""

    case: str
    world: str
    policy: str
    value: float | None
    seed: int


@dataclass(frozen=True, slots=True)
class Part:
    """A section of the page, and its runs in order.

    One that `stands_alone` is compared with nothing outside of it: its records may be of another
    commit than those of the others.
    """

    name: str
    jobs: tuple[Job, ...]
    stands_alone: bool = False


def parts() -> tuple[Part, ...]:
    """The whole table."""
    everyone = tuple(POLICIES)
    return (
        Part("headline", tuple(_days((HEADLINE,), everyone, range(1, NUM_SEEDS + 1)))),
        Part("curves", tuple(_curves(HEADLINE, everyone))),
        Part("held-out-curves", tuple(_curves(HELD_OUT, ON_HELD_OUT))),
        Part("reporting", tuple(_days(tuple(REPORTING), everyone, range(1, 4)))),
        Part("choice", tuple(_choice())),
        Part("chosen", tuple(_chosen((HEADLINE, *REPORTING), range(1, 4)))),
        Part("worlds", tuple(_worlds())),
        Part("batches", tuple(_batches(range(1, 4))), stands_alone=True),
        Part("floor", tuple(_floor(range(1, 4))), stands_alone=True),
        Part("shipped", tuple(_days(SHIPPED[1:], everyone, range(1, 4)))),
        Part("tuning", tuple(_days(tuple(TUNING), everyone, range(1, 4)))),
        Part("scale", (Job(SCALE, AS_BELIEVED, SLICEWISE, None, 1),)),
    )


def in_order(chosen: Sequence[Part]) -> list[Job]:
    """Every job of these parts once, those of one seed together: a run is prepared once for all."""
    jobs = dict.fromkeys(job for part in chosen for job in part.jobs)
    place = {part.name: number for number, part in enumerate(chosen)}
    part_of = {job: part.name for part in reversed(chosen) for job in part.jobs}
    return sorted(jobs, key=lambda job: (job.seed, place[part_of[job]]))


def together(chosen: Sequence[Part]) -> list[frozenset[Job]]:
    """The jobs whose records are of one commit: those of each part that stands alone, the rest."""
    alone = [frozenset(part.jobs) for part in chosen if part.stands_alone]
    rest = frozenset(job for part in chosen if not part.stands_alone for job in part.jobs)
    return [rest, *alone]


def _days(cases: Sequence[str], names: Sequence[str], seeds: range) -> Iterator[Job]:
    for seed in seeds:
        for case in cases:
            for name in (*names, LOWER_BOUND, LOADING_BOUND, HINDSIGHT):
                yield Job(case, AS_BELIEVED, name, None, seed)


def _batches(seeds: range) -> Iterator[Job]:
    for seed in seeds:
        for case in TWO_DAYS:
            for world in (AS_BELIEVED, *WINDOWS_S):
                yield Job(case, world, SLICEWISE, None, seed)


def _floor(seeds: range) -> Iterator[Job]:
    for seed in seeds:
        yield Job(DROUGHT, AS_BELIEVED, SAFE_HINDSIGHT, None, seed)


def _choice() -> Iterator[Job]:
    for seed in CHOICE_SEEDS:
        for case in TUNING:
            for name, compared in POLICIES.items():
                for value in compared.knob.values:
                    yield Job(case, AS_BELIEVED, name, compared.knob.shown(value), seed)


def _chosen(cases: Sequence[str], seeds: range) -> Iterator[Job]:
    for seed in seeds:
        for case in cases:
            for name, value in CHOSEN.items():
                yield Job(case, AS_BELIEVED, name, POLICIES[name].knob.shown(value), seed)


def _curves(case: str, names: Sequence[str]) -> Iterator[Job]:
    for seed in CURVE_SEEDS[case]:
        for name in names:
            knob = POLICIES[name].knob
            for value in knob.values:
                yield Job(case, AS_BELIEVED, name, knob.shown(value), seed)


def _worlds() -> Iterator[Job]:
    for world in WORLDS:
        for name in (*IN_WORLDS, LOWER_BOUND):
            yield Job(HEADLINE, world, name, None, 1)
