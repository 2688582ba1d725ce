"""The days that policies are compared on: those that ship, and those built from recorded traces.

Settings were chosen on `TUNING`; `REPORTING` is for what is told of them. A recorded case has
requests from one trace and spot capacity from two others. No arrival and no zone is in both sets;
lengths are: ServeGen tells arrivals only, and those of both sets have Azure's conversations'. The
scale is the scenarios' own: 20 slices of work on average.

What differs from the scenario that a recorded case is like: its objective for the first token grows
with the prompt, by as much as may be promised at most, and the fleet that is there at the beginning
is what its first minutes take, on demand. Both were fixed before anything was tuned on these cases.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from autoscaling.prices.table import price_table
from autoscaling.simulator.offered import slices_per_request_per_s
from autoscaling.simulator.preparation import PreparedRun, Replacements, prepare_run
from autoscaling.simulator.scenario import Scenario, read_scenario
from autoscaling.simulator.world.arrivals import Requests, build_day
from loadtest.workload.servegen import client_instants, mean_rate_per_s, read_clients
from loadtest.workload.traces import read_trace
from serving.domain.capacity.objectives import MOST_OF_PROFILE
from serving.domain.capacity.slice_profile import CapacityProfile

DAY_S = 86_400.0
_MEAN_SLICES = 20.0
_DAYS_PER_SET = 7
_FIRST_S = 600.0
_CONVERSATION = "azure2023/AzureLLMInferenceTrace_conv.csv"
_CODE = "azure2023/AzureLLMInferenceTrace_code.csv"
_MOONCAKE = "mooncake/conversation_trace.jsonl"
_SERVEGEN = "servegen/language-m-small"
_SPOT = "spot-traces/availability/1-node/aws-02-15-2023"
_WEST = ("us-west-2a_v100_1.json", "us-west-2b_v100_1.json")
_EAST = ("us-east-1a_v100_1.json", "us-east-2a_v100_1.json")

Draw = Callable[[Path, Scenario, int], Requests]


@dataclass(frozen=True, slots=True)
class RecordedCase:
    """A day from recorded traces: how its requests are drawn, and two zones of spot.

    `like` is the shipped scenario that classes and everything else are of. `ttft_s` is without the
    part for the prompt.
    """

    like: str
    draw: Draw
    zones: tuple[str, str]
    ttft_s: float
    tpot_s: float


def _of_hour(name: str) -> Draw:
    """A weekday built from the hour of a trace."""

    def draw(traces: Path, scenario: Scenario, seed: int) -> Requests:
        hour = hour_of(traces / name, seed)
        return build_day(hour, mean_rate=_mean_rate(scenario, hour), seed=seed)

    return draw


def _of_servegen(first_day: int) -> Draw:
    """One of seven days of ServeGen, from `first_day` (from 0) on, that the seed chooses.

    ServeGen's clients tell arrivals only. Lengths are drawn from Azure's conversations, in pairs.
    """

    def draw(traces: Path, scenario: Scenario, seed: int) -> Requests:
        rng = np.random.default_rng(seed)
        clients = read_clients(traces / _SERVEGEN)
        start_s = (first_day + (seed - 1) % _DAYS_PER_SET) * DAY_S
        lengths = hour_of(traces / _CONVERSATION, seed)
        factor = _mean_rate(scenario, lengths) / mean_rate_per_s(clients, start_s, DAY_S)
        arrival_s = np.concatenate(
            [client_instants(each.stretch(start_s, DAY_S), factor, rng) for each in clients]
        )
        arrival_s.sort()
        picked = rng.integers(len(lengths), size=len(arrival_s))
        return Requests(arrival_s, lengths.input_tokens[picked], lengths.output_tokens[picked])

    return draw


TUNING: Mapping[str, RecordedCase] = {
    "azure-conversation": RecordedCase("azure-day", _of_hour(_CONVERSATION), _WEST, 3.0, 0.1),
    "servegen-1-7": RecordedCase("azure-day", _of_servegen(0), _WEST, 3.0, 0.1),
}
REPORTING: Mapping[str, RecordedCase] = {
    "servegen-8-14": RecordedCase("azure-day", _of_servegen(7), _EAST, 3.0, 0.1),
    "azure-code": RecordedCase("azure-code-day", _of_hour(_CODE), _EAST, 5.0, 0.2),
    # 12,000 tokens of prompt on average, of which even an idle slice makes long steps.
    "mooncake": RecordedCase("azure-day", _of_hour(_MOONCAKE), _EAST, 3.0, 0.2),
}
SHIPPED = ("azure-day", "azure-day-reserved", "azure-code-day", "spot-drought", "llmd-ramp")
SCALE = "scale-1000"
# Two days, so that a batch may take one; by the scenario that they are of.
TWO_DAYS: Mapping[str, str] = {
    "azure-day-reserved-48h": "azure-day-reserved",
    "spot-drought-48h": "spot-drought",
}


def prepared_case(name: str, seed: int, traces: Path | None) -> PreparedRun:
    """The run of a case. `traces` is the folder of the recorded ones.

    Raises:
        ValueError: the case is recorded, and there is no folder.
        ScenarioError: see `read_scenario`.
    """
    recorded = {**TUNING, **REPORTING}.get(name)
    if recorded is None:
        scenario = read_scenario(TWO_DAYS.get(name, name))
        if name in TWO_DAYS:
            scenario = scenario.model_copy(update={"duration_s": 2 * DAY_S})
        return prepare_run(scenario, seed, price_table(), Replacements())
    if traces is None:
        raise ValueError(f"{name} is made from recorded traces; --traces names their folder")
    scenario = recorded_scenario(name, recorded)
    files = Replacements(spot=tuple(traces / _SPOT / zone for zone in recorded.zones))
    drawn = recorded.draw(traces, scenario, seed)
    return with_first_fleet(prepare_run(scenario, seed, price_table(), files, drawn))


def with_first_fleet(run: PreparedRun) -> PreparedRun:
    """The run with as many slices at its beginning as the busiest of its first minutes takes."""
    minutes = math.ceil(_FIRST_S / run.offered.interval_s)
    first = math.ceil(float(run.offered.slices[:minutes].max()))
    on_demand = next(each for each in run.terms if not each.is_revocable and not each.max_run_s)
    fleet = {on_demand.name: min(first, on_demand.max_slices)}
    scenario = run.scenario.model_copy(update={"initial_slices": fleet})
    return replace(run, scenario=scenario)


def recorded_scenario(name: str, recorded: RecordedCase) -> Scenario:
    """The scenario of a recorded case: as that which it is like, with two zones of spot."""
    scenario = read_scenario(recorded.like)
    raw = scenario.model_dump()
    spot = [each["name"] for each in raw["classes"] if each["market"] == "spot"]
    left_out = spot[len(recorded.zones) :]
    return Scenario.model_validate(
        raw
        | {
            "name": name,
            "description": f"A day of {name} with recorded spot capacity.",
            "classes": [each for each in raw["classes"] if each["name"] not in left_out],
            "objectives": {
                "ttft_s": recorded.ttft_s,
                "tpot_s": recorded.tpot_s,
                "ttft_per_prompt_token_s": most_per_prompt_token_s(scenario.profile),
            },
            "duration_s": DAY_S,
        }
    )


def most_per_prompt_token_s(profile: CapacityProfile) -> float:
    """The most that an objective may allow for each token of a prompt, in seconds."""
    return MOST_OF_PROFILE * profile.per_prompt_token_s


def hour_of(path: Path, seed: int) -> Requests:
    """The requests of a trace file, spread over the steps that their arrivals were rounded to."""
    trace = read_trace(path).spread(np.random.default_rng(seed))
    return Requests.of_rows(
        (row.offset_s, row.input_tokens, row.output_tokens)
        for row in trace.rows
        if row.offset_s is not None
        and row.input_tokens is not None
        and row.output_tokens is not None
    )


def _mean_rate(scenario: Scenario, lengths: Requests) -> float:
    per_request = slices_per_request_per_s(
        scenario.profile,
        math.fsum(lengths.input_tokens) / len(lengths),
        math.fsum(lengths.output_tokens) / len(lengths),
        scenario.objectives.tpot_s,
    )
    return _MEAN_SLICES / per_request
