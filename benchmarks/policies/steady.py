"""The fewest slices for a load that never changes: what no policy saves, whatever it knows.

The lower bound divides all work by what steps carry at best. Engines do not: requests come by
chance, and an answer that shares its steps with more prompts than others do is slow. So of each
case its mean rate of requests is offered for two hours, with lengths of its own day, to fleets of
one size after the other that are there from the beginning, know nothing and cost nothing to change.
Of two cases also with engines that take fewer tokens into a step.
`python -m benchmarks steady --traces FOLDER` writes the page.
"""

import datetime
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from autoscaling.records import Observation, Plan
from autoscaling.simulator.bounds.lower_bound import mean_work
from autoscaling.simulator.comparison import setup_of
from autoscaling.simulator.preparation import PreparedRun
from autoscaling.simulator.run import SimulationSetup, simulate
from autoscaling.simulator.world.arrivals import Requests
from benchmarks.measured_part import with_measured
from benchmarks.policies.cases import REPORTING, TUNING, prepared_case
from benchmarks.policies.command import head_commit
from benchmarks.policies.jobs import HEADLINE, HELD_OUT

REPORT = Path(__file__).resolve().parents[2] / "docs/results/steady-load.md"
RECORD = REPORT.with_suffix(".json")
CASES = (HEADLINE, *TUNING, *REPORTING)
LEVELS = (0.99, 0.995)
SEEDS = (1, 2, 3)
# How many tokens a step may have, beside what the profile says.
IN_STEPS: Mapping[str, tuple[int, ...]] = {
    "azure-conversation": (512, 448, 384, 320, 256),
    HELD_OUT: (512, 448, 384, 320, 256),
}
_FOR_S = 7200.0


class SteadyFleet(msgspec.Struct, frozen=True):
    """The fleets that were tried of a case with a seed, of engines with so many tokens in a step.

    `least_work` is the work in slices, at best, less what the largest requests have that may miss,
    by service level; `slo_ratios` is what fleets kept, by their number of slices.
    """

    case: str
    seed: int
    in_step: int
    requests_per_s: float
    least_work: dict[str, float]
    slo_ratios: dict[str, float]

    def fewest(self, level: float) -> int:
        """The slices of the smallest fleet that kept a service level."""
        return min(int(count) for count, slo in self.slo_ratios.items() if slo >= level)

    def over_work(self, level: float) -> float:
        """The slices of that fleet over the work at best."""
        return self.fewest(level) / self.least_work[f"{level:g}"]


class SteadyLoads(msgspec.Struct, frozen=True):
    """What the page is made of."""

    date: str
    commit: str
    fleets: tuple[SteadyFleet, ...]


@dataclass(frozen=True, slots=True)
class _Held:
    """A policy that leaves everything as it is."""

    targets: Mapping[str, int]
    name: str = "held"

    def decide(self, observation: Observation) -> Plan:
        """The plan that changes nothing."""
        return Plan(observation.now_s, self.targets)


def steady_fleet(
    case: str, run: PreparedRun, for_s: float = _FOR_S, in_step: int | None = None
) -> SteadyFleet:
    """Tries fleets of one slice more each, from what the work takes at best, at the run's own rate.

    Ends with the first that keeps the highest of `LEVELS`. Engines take `in_step` tokens into a
    step, `None`: what the profile says.
    """
    profile = run.scenario.profile
    if in_step is not None:
        profile = profile.model_copy(update={"max_num_batched_tokens": in_step})
    rng = np.random.default_rng(run.seed)
    rate = len(run.requests) / run.scenario.duration_s
    num = round(rate * for_s)
    picked = rng.integers(len(run.requests), size=num)
    lengths = run.requests
    steady = Requests(
        np.sort(rng.uniform(0.0, for_s, num)),
        lengths.input_tokens[picked],
        lengths.output_tokens[picked],
    )
    least = {f"{level:g}": _least_work(run, steady, for_s, level) for level in LEVELS}
    slo_ratios: dict[str, float] = {}
    count = math.ceil(min(least.values()))
    while not slo_ratios or slo_ratios[str(count - 1)] < max(LEVELS):
        setup = _fleet_of(run, count)
        held = _Held(setup.ready_at_start)
        asked = replace(setup, requests=steady, duration_s=for_s, profile=profile)
        outcome = simulate(asked, held)
        slo_ratios[str(count)] = outcome.service.slo_ratio
        count += 1
    in_step = profile.max_num_batched_tokens
    return SteadyFleet(case, run.seed, in_step, rate, least, slo_ratios)


def _least_work(run: PreparedRun, requests: Requests, for_s: float, level: float) -> float:
    work = mean_work(
        requests,
        run.scenario.profile,
        objectives=run.rules.objectives,
        duration_s=for_s,
        service_level=level,
    )
    return float(work.arrived[-1] - work.may_miss) / for_s


def _fleet_of(run: PreparedRun, count: int) -> SimulationSetup:
    """Returns the run with so many slices, of a class that is always there and never ends."""
    setup = setup_of(run)
    lasting = next(
        each
        for each in setup.classes
        if not each.terms.is_revocable and each.terms.max_run_s is None and each.profile is None
    )
    roomy = replace(lasting, terms=replace(lasting.terms, max_slices=count))
    return replace(setup, classes=(roomy,), ready_at_start={lasting.terms.name: count})


def measure(traces: Path | None, say: Callable[[str], None]) -> None:
    """Tries the fleets of every case, and writes record and page. Exits without the `traces`."""
    if traces is None:
        sys.exit("--traces names the folder of the recorded traces for steady")
    fleets = []
    for case in CASES:
        for seed in SEEDS:
            run = prepared_case(case, seed, traces)
            for in_step in (None, *IN_STEPS.get(case, ())):
                fleets.append(steady_fleet(case, run, in_step=in_step))
                say(f"{fleets[-1]}")
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    loads = SteadyLoads(today, head_commit(), tuple(fleets))
    RECORD.write_bytes(msgspec.json.format(msgspec.json.encode(loads), indent=1) + b"\n")
    REPORT.write_text(updated(REPORT.read_text(encoding="utf-8"), loads), encoding="utf-8")
    say(f"written: {RECORD.name} and its page")


def read_loads() -> SteadyLoads:
    """Returns what is on record."""
    return msgspec.json.decode(RECORD.read_bytes(), type=SteadyLoads)


def updated(page: str, loads: SteadyLoads) -> str:
    """Returns the page with the table of `loads`; raises as `with_measured`."""
    return with_measured(page, lambda: "\n".join(_table(loads)))


def _table(loads: SteadyLoads) -> Iterator[str]:
    yield (
        f"Simulated on {loads.date} at {loads.commit}, seeds {', '.join(map(str, SEEDS))}: "
        "the mean, and the lowest to the highest where they differ."
    )
    yield ""
    heads = (f"work at best for {level:.1%} | slices | of it" for level in LEVELS)
    yield f"| case | tokens in a step | {' | '.join(heads)} |"
    yield "|---" * (2 + 3 * len(LEVELS)) + "|"
    for case, in_step in dict.fromkeys((each.case, each.in_step) for each in loads.fleets):
        found = [each for each in loads.fleets if (each.case, each.in_step) == (case, in_step)]
        cells = [f"`{case}`", f"{in_step:,}"]
        for level in LEVELS:
            cells.append(_spread([each.least_work[f"{level:g}"] for each in found], ".1f"))
            cells.append(_spread([each.fewest(level) for each in found], ".1f"))
            cells.append(_spread([each.over_work(level) for each in found], ".2f"))
        yield f"| {' | '.join(cells)} |"


def _spread(values: list[float] | list[int], shown: str) -> str:
    mean = format(sum(values) / len(values), shown)
    lowest, highest = format(min(values), shown), format(max(values), shown)
    return mean if lowest == highest else f"{mean} ({lowest} to {highest})"
