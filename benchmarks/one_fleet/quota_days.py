"""The days of two models, the chips that they have together, and the ways to share them.

Models, lengths, prices and times are those of the scenarios `azure-day-reserved` (chat) and
`azure-code-day` (code), with eight slices of work each on average in place of twenty. Reserved
slices come in half a minute; an engine loads for three.
"""

from collections.abc import Mapping
from dataclasses import replace

import msgspec
import numpy as np

from autoscaling.policy.policy import SlicewisePolicy
from autoscaling.policy.quotas.records import ChipQuota, Member
from autoscaling.prices.table import price_table
from autoscaling.simulator.comparison import setup_of
from autoscaling.simulator.preparation import PreparedRun, Replacements, prepare_run
from autoscaling.simulator.run import SimulationSetup, simulate_together
from autoscaling.simulator.scenario import Scenario, read_scenario
from autoscaling.simulator.world.arrivals import Requests
from benchmarks.one_fleet.records import DayRun, ModelDay
from serving.domain.topology import slice_shape

CHAT, CODE = "chat", "code"
SCENARIOS: Mapping[str, str] = {CHAT: "azure-day-reserved", CODE: "azure-code-day"}
RESERVED = "reserved"
MEAN_SLICES = 8.0
SEEDS = (1, 2, 3)


class QuotaCase(msgspec.Struct, frozen=True):
    """So many reserved slices for both; `has_more`: on-demand ones may be bought besides.

    The day of code is `later_h` hours later than that of chat.
    """

    name: str
    num_reserved: int
    has_more: bool
    later_h: float


class QuotaWay(msgspec.Struct, frozen=True):
    """How the reserved slices are divided: each has half, or both have all."""

    name: str
    is_halved: bool = False
    shares: bool = True
    chat_priority: int = 0


CASES = (
    QuotaCase("reserved alone, same hours", 36, has_more=False, later_h=0.0),
    QuotaCase("on-demand besides, eight hours apart", 32, has_more=True, later_h=8.0),
)
WAYS = (
    QuotaWay("a half for each", is_halved=True, shares=False),
    QuotaWay("who orders first", shares=False),
    QuotaWay("shared, equals"),
    QuotaWay("shared, chat first", chat_priority=1),
)


def run_of(case: QuotaCase, way: QuotaWay, seed: int) -> DayRun:
    """Simulates the day of both models."""
    prepared = {model: _prepared(case, model, seed) for model in SCENARIOS}
    shape = prepared[CHAT].scenario.profile
    assert shape.generation is not None
    assert shape.topology is not None
    num_chips = slice_shape(shape.generation, shape.topology).num_chips
    members = [Member(CHAT, num_chips, way.chat_priority), Member(CODE, num_chips)]
    quota = ChipQuota(RESERVED, case.num_reserved * num_chips, frozenset(SCENARIOS))
    most = case.num_reserved // 2 if way.is_halved else case.num_reserved
    setups = {model: _setup(each, most) for model, each in prepared.items()}
    policies = {
        model: SlicewisePolicy(
            each.profile, [known.terms for known in each.classes], prepared[model].rules
        )
        for model, each in setups.items()
    }
    quotas = () if way.is_halved else (quota,)
    outcomes = simulate_together(setups, policies, quotas, members, shares=way.shares)
    days = {model: ModelDay.of(each) for model, each in outcomes.items()}
    return DayRun(case.name, way.name, seed, days)


def _prepared(case: QuotaCase, model: str, seed: int) -> PreparedRun:
    raw = read_scenario(SCENARIOS[model]).model_dump()
    given = read_scenario(SCENARIOS[CHAT]).model_dump()["classes"]
    names = {RESERVED, "on-demand"} if case.has_more else {RESERVED}
    half = case.num_reserved // 2
    classes = [
        each | {"max_slices": case.num_reserved} if each["name"] == RESERVED else each
        for each in given
        if each["name"] in names
    ]
    scenario = Scenario.model_validate(
        raw
        | {
            "name": f"one-quota-{model}",
            "classes": classes,
            "load": {**raw["load"], "mean_slices": MEAN_SLICES},
            "initial_slices": {RESERVED: half // 2},
            # What can be taken away is none of these.
            "rules": {"floor_ratio": 0.0},
        }
    )
    run = prepare_run(scenario, seed, price_table(), Replacements())
    later_s = case.later_h * 3600 if model == CODE else 0.0
    return replace(run, requests=_later(run.requests, later_s, scenario.duration_s))


def _later(requests: Requests, later_s: float, day_s: float) -> Requests:
    """The same day so much later; what would come after its end comes at its beginning."""
    arrival_s = (requests.arrival_s + later_s) % day_s
    order = np.argsort(arrival_s, kind="stable")
    return Requests(arrival_s[order], requests.input_tokens[order], requests.output_tokens[order])


def _setup(run: PreparedRun, most: int) -> SimulationSetup:
    setup = setup_of(run)
    classes = tuple(
        replace(each, terms=replace(each.terms, max_slices=most))
        if each.terms.name == RESERVED
        else each
        for each in setup.classes
    )
    return replace(setup, classes=classes)
