"""The days of one model that may have slices of two shapes, or of one of them.

Requests, objectives, zones of spot and times are those of the scenario `azure-day`, at three loads;
so is the profile of a 2x4 slice. That of a 2x2 is expected from it, and not measured: half of the
chips read the weights in twice the time, less what a step takes besides, and have less than half of
the room for sequences, since they hold the same weights.
"""

from dataclasses import replace

import msgspec

from autoscaling.policy.policy import SlicewisePolicy
from autoscaling.prices.table import price_table
from autoscaling.simulator.comparison import setup_of
from autoscaling.simulator.preparation import PreparedRun, Replacements, prepare_run
from autoscaling.simulator.run import simulate
from autoscaling.simulator.scenario import Scenario, read_scenario
from autoscaling.simulator.world.slices import ClassSetup
from benchmarks.one_fleet.records import DayRun, ModelDay
from serving.domain.capacity.slice_profile import CapacityProfile

MODEL = "chat"
SCENARIO = "azure-day"
SMALL, LARGE = "2x2", "2x4"
SEEDS = (1, 2, 3)
_CLASSES = ("spot-a", "spot-b", "on-demand")


class ShapeCase(msgspec.Struct, frozen=True):
    """A day whose work fills so many 2x4 slices on average."""

    name: str
    mean_slices: float


class ShapeWay(msgspec.Struct, frozen=True):
    """The shapes that the policy may choose from."""

    name: str
    shapes: tuple[str, ...]


CASES = (
    ShapeCase("half a 2x4", 0.5),
    ShapeCase("two 2x4", 2.0),
    ShapeCase("eight 2x4", 8.0),
)
WAYS = (
    ShapeWay("2x2 alone", (SMALL,)),
    ShapeWay("2x4 alone", (LARGE,)),
    ShapeWay("either", (SMALL, LARGE)),
)


def small_profile(large: CapacityProfile) -> CapacityProfile:
    """The profile of a 2x2, from that of a 2x4."""
    return large.model_copy(
        update={
            "topology": SMALL,
            "base_s": 0.050,
            "per_sequence_s": 2 * large.per_sequence_s,
            "per_prompt_token_s": 2 * large.per_prompt_token_s,
            "max_num_seqs": 96,
            "source": "expected from list figures, not measured",
        }
    )


def run_of(case: ShapeCase, way: ShapeWay, seed: int) -> DayRun:
    """Simulates the day."""
    large = read_scenario(SCENARIO).profile
    profiles = {SMALL: small_profile(large), LARGE: large}
    runs = {shape: _prepared(case, profiles[shape], large, seed) for shape in way.shapes}
    # Requests are the same for all; what differs is the classes.
    own = runs[way.shapes[0]]
    classes = tuple(
        _of_shape(each, shape, None if shape == way.shapes[0] else profiles[shape])
        for shape, run in runs.items()
        for each in run.classes
    )
    setup = replace(
        setup_of(own), classes=classes, ready_at_start={f"on-demand-{way.shapes[0]}": 1}
    )
    policy = SlicewisePolicy(
        setup.profile,
        [each.terms for each in classes],
        own.rules,
        profiles={each.terms.name: each.profile for each in classes if each.profile is not None},
    )
    return DayRun(case.name, way.name, seed, {MODEL: ModelDay.of(simulate(setup, policy))})


def _prepared(
    case: ShapeCase, profile: CapacityProfile, large: CapacityProfile, seed: int
) -> PreparedRun:
    raw = read_scenario(SCENARIO).model_dump()

    def scenario(of: CapacityProfile) -> Scenario:
        return Scenario.model_validate(
            raw
            | {
                "name": f"shapes-{of.topology}",
                "profile": of.model_dump(),
                "classes": [each for each in raw["classes"] if each["name"] in _CLASSES],
                "load": {**raw["load"], "mean_slices": case.mean_slices},
                "initial_slices": {},
            }
        )

    # As much traffic whatever the shape: the work is counted in slices of the large one.
    requests = prepare_run(scenario(large), seed, price_table(), Replacements()).requests
    return prepare_run(scenario(profile), seed, price_table(), Replacements(), requests)


def _of_shape(setup: ClassSetup, shape: str, profile: CapacityProfile | None) -> ClassSetup:
    terms = replace(setup.terms, name=f"{setup.terms.name}-{shape}")
    return replace(setup, terms=terms, profile=profile)
