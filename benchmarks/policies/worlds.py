"""Worlds that differ from what is believed of them, as variations of any case.

A policy believes the profile and the terms of its classes. A world changes what is true, or, for
the profile, what is believed: then the work is the same, and so is what it costs at best.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from autoscaling.simulator.comparison import setup_of
from autoscaling.simulator.offered import offered_slices
from autoscaling.simulator.preparation import PreparedRun
from autoscaling.simulator.run import SimulationSetup
from autoscaling.simulator.world.arrivals import Requests
from autoscaling.simulator.world.slices import ClassSetup, Conditions
from benchmarks.policies.batches import WINDOWS_S, with_batches
from benchmarks.policies.cases import most_per_prompt_token_s

AS_BELIEVED = "as believed"
# The flood begins so far into the day, and lasts so long.
_FLOOD_FROM, _FLOOD_FOR = 0.4, 1 / 12
_FLOOD_RISES_S = 60.0
_LONG_PROMPT_TOKENS = 100_000
_ONE_LONG_PROMPT_IN = 1000


@dataclass(frozen=True, slots=True)
class Situation:
    """One run in one world: what is true (`setup`, `run`), and what policies are made from."""

    run: PreparedRun
    believed: PreparedRun
    setup: SimulationSetup


def situation(run: PreparedRun, world: str) -> Situation:
    """The run in a world of `WORLDS`, or with batches of `WINDOWS_S`."""
    if world in WINDOWS_S:
        return replace(_as_believed(run), setup=with_batches(setup_of(run), run, WINDOWS_S[world]))
    return WORLDS[world](run)


def _as_believed(run: PreparedRun) -> Situation:
    return Situation(run, run, setup_of(run))


def _profile_says(factor: float) -> Callable[[PreparedRun], Situation]:
    """The profile says that a slice carries `factor` times what it does."""

    def vary(run: PreparedRun) -> Situation:
        true = run.scenario.profile
        said = true.model_copy(
            update={
                "per_sequence_s": true.per_sequence_s / factor,
                "per_prompt_token_s": true.per_prompt_token_s / factor,
            }
        )
        believed = replace(run, scenario=run.scenario.model_copy(update={"profile": said}))
        return Situation(run, believed, setup_of(run))

    return vary


def _conditions(vary: Callable[[Conditions], Conditions]) -> Callable[[PreparedRun], Situation]:
    """Every class behaves otherwise than its terms say."""

    def of_run(run: PreparedRun) -> Situation:
        classes = tuple(ClassSetup(each.terms, vary(each.conditions)) for each in run.classes)
        return _as_believed(replace(run, classes=classes))

    return of_run


def _slow(true: Conditions) -> Conditions:
    return replace(true, provisioning_s=3 * true.provisioning_s, load_s=3 * true.load_s)


def _lossy(true: Conditions) -> Conditions:
    return replace(true, losses_per_hour=5 * true.losses_per_hour)


def _requests(
    vary: Callable[[Requests, float, np.random.Generator], Requests],
) -> Callable[[PreparedRun], Situation]:
    """Other requests come. The demand that static fleets and plans with hindsight know, too."""

    def of_run(run: PreparedRun) -> Situation:
        duration_s = run.scenario.duration_s
        requests = vary(run.requests, duration_s, np.random.default_rng(run.seed))
        offered = offered_slices(
            requests.arrival_s,
            requests.input_tokens,
            requests.output_tokens,
            run.scenario.profile,
            tpot_s=run.rules.objectives.tpot_s,
            duration_s=duration_s,
        )
        return _as_believed(replace(run, requests=requests, offered=offered))

    return of_run


def doubled(requests: Requests, duration_s: float, rng: np.random.Generator) -> Requests:
    """Twice the requests for a twelfth of the time, within a minute."""
    from_s, for_s = _FLOOD_FROM * duration_s, _FLOOD_FOR * duration_s
    into_s = requests.arrival_s - from_s
    share = np.where(into_s < for_s, np.clip(into_s / _FLOOD_RISES_S, 0.0, 1.0), 0.0)
    twice = np.flatnonzero(rng.random(len(requests)) < share)
    # Nobody asks the same at the same instant.
    arrival_s = np.concatenate(
        [requests.arrival_s, requests.arrival_s[twice] + rng.random(len(twice))]
    )
    order = np.argsort(arrival_s, kind="stable")
    picked = np.concatenate([np.arange(len(requests)), twice])[order]
    return Requests(arrival_s[order], requests.input_tokens[picked], requests.output_tokens[picked])


def with_long_prompts(requests: Requests, _: float, rng: np.random.Generator) -> Requests:
    """One request in a thousand has a prompt of 100,000 tokens."""
    is_long = rng.random(len(requests)) < 1 / _ONE_LONG_PROMPT_IN
    input_tokens = np.where(is_long, _LONG_PROMPT_TOKENS, requests.input_tokens)
    return replace(requests, input_tokens=input_tokens.astype(np.int32))


def _long_prompts(run: PreparedRun) -> Situation:
    """Prompts that no slice computes within a flat objective, and one that grows with them."""
    per_token_s = most_per_prompt_token_s(run.scenario.profile)
    objectives = replace(run.rules.objectives, ttft_per_prompt_token_s=per_token_s)
    longer = replace(run, rules=replace(run.rules, objectives=objectives))
    return _requests(with_long_prompts)(longer)


WORLDS: Mapping[str, Callable[[PreparedRun], Situation]] = {
    AS_BELIEVED: _as_believed,
    "profile +50 %": _profile_says(1.5),
    "profile -50 %": _profile_says(0.5),
    "leads x3": _conditions(_slow),
    "losses x5": _conditions(_lossy),
    "traffic doubled in a minute": _requests(doubled),
    "100k-token prompts": _long_prompts,
}
