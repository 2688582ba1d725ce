"""Measures one slice: its step times, then the highest rate that meets the objective.

Owns which loads are tried and what is read off them. Does not own how a load is run: a `Bench` runs
one and gives its scorecard. The order matters little to the fit and much to the search, which
starts below the rate that the fit predicts.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from loadtest.profile.search import Search, Trial, highest_passed, next_rate
from loadtest.profile.step_time_fit import SteadyState, StepTimeFit, fit_step_time
from loadtest.scorecard.measure import Scorecard
from serving.domain.capacity.slice_profile import CapacityProfile


@dataclass(frozen=True, slots=True)
class ProfileObjective:
    """The objectives of a request, in seconds, and the share of requests that have to meet them."""

    ttft_s: float
    tpot_s: float
    share: float = 0.99


@dataclass(frozen=True, slots=True)
class RequestLengths:
    """The tokens of each request."""

    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class ClosedLoad:
    """The load of so many users who send again as soon as they are answered."""

    num_users: int
    lengths: RequestLengths


@dataclass(frozen=True, slots=True)
class OpenLoad:
    """The load of Poisson arrivals."""

    requests_per_s: float
    lengths: RequestLengths


class Bench(Protocol):
    """Runs one load against the server and judges each request by the objective."""

    def run(self, load: ClosedLoad | OpenLoad) -> Scorecard:
        """The scorecard of this load, its goodput limits set to the objective.

        Raises:
            LoadTestError: the run did not come about.
        """
        ...


class ProfileFailedError(Exception):
    """The server did not answer well enough to be measured. The message names the load."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The measured model on `num_slices` equal slices, and what is known of them.

    Each is shared by `num_engines`, which are measured together; `max_num_seqs` is for one engine.
    """

    model: str
    engine: str
    num_slices: int
    generation: str | None
    topology: str | None
    load_s: float
    max_num_seqs: int
    num_engines: int = 1

    @property
    def all_engines(self) -> int:
        """The number of engines on all slices."""
        return self.num_slices * self.num_engines


@dataclass(frozen=True, slots=True)
class Measured:
    """The step times of a slice, and its rate: sustained (`None`: no rate held) and predicted."""

    step_time: StepTimeFit
    ttft_floor_s: float
    trials: tuple[Trial, ...]
    sustained_per_s: float | None
    predicted_per_s: float


def law_loads(lengths: RequestLengths, num_engines: int, most_users: int) -> list[ClosedLoad]:
    """The loads that separate the coefficients: many with short prompts, few with long ones.

    `most_users` is for one engine; the gateway spreads users evenly over `num_engines`.
    """
    short = RequestLengths(16, max(64, lengths.output_tokens))
    users = [count for count in (1, 4, 16, 64, 256) if count <= most_users]
    loads = [ClosedLoad(count * num_engines, short) for count in users]
    heavy = RequestLengths(max(1024, 2 * lengths.input_tokens), 32)
    loads += [ClosedLoad(count * num_engines, heavy) for count in (2, 8) if count <= most_users]
    return [*loads, ClosedLoad(min(16, most_users) * num_engines, lengths)]


def measure_slice(
    bench: Bench,
    subject: Subject,
    objective: ProfileObjective,
    lengths: RequestLengths,
    *,
    most_users: int,
    tolerance: float,
    show: Callable[[str], None],
) -> tuple[CapacityProfile, Measured]:
    """The profile of one slice. `show` takes a line for each load.

    Raises:
        ProfileFailedError: a steady load failed, or an idle slice already misses the objective.
        UnfitError: the loads do not separate the coefficients of a step's time.
    """
    states = []
    floors = []
    for load in law_loads(lengths, subject.all_engines, most_users):
        card = bench.run(load)
        state = steady_state(card, subject.all_engines)
        states.append(state)
        if load.num_users == subject.all_engines and card.ttft_s.p50 is not None:
            floors.append(card.ttft_s.p50 - state.step_s)
        show(
            f"{load.num_users} users, {load.lengths.input_tokens} in, "
            f"{load.lengths.output_tokens} out: step {state.step_s * 1000:.2f} ms at "
            f"{state.running:.1f} running, {state.prompt_tokens_per_s:.0f} prompt tokens/s"
        )
    step_time = fit_step_time(states)
    profile = CapacityProfile(
        model=subject.model,
        engine=subject.engine,
        generation=subject.generation,
        topology=subject.topology,
        base_s=step_time.base_s,
        per_sequence_s=step_time.per_sequence_s,
        per_prompt_token_s=step_time.per_prompt_token_s,
        max_num_seqs=subject.max_num_seqs,
        ttft_floor_s=max(0.0, min(floors, default=0.0)),
        load_s=subject.load_s,
        # The caller knows the day, and what came of the search.
        measured_on="",
        source="law only",
    ).of_slice(subject.num_engines)
    predicted = profile.max_requests_per_s(
        lengths.input_tokens, lengths.output_tokens, objective.tpot_s
    )
    if predicted <= 0:
        raise ProfileFailedError(
            f"tpot_s={objective.tpot_s:g} is out of reach: an idle slice's step takes "
            f"{step_time.base_s:g} s"
        )
    show(f"the law predicts {predicted:.2f} requests/s of a slice; looking for the real rate")
    search = Search(0.7 * predicted * subject.num_slices, objective.share, tolerance)
    trials: list[Trial] = []
    while (rate := next_rate(search, trials)) is not None:
        trials.append(_tried(bench, OpenLoad(rate, lengths)))
        show(
            f"{rate:.2f} requests/s: {trials[-1].share:.1%} of {trials[-1].num_requests} within "
            f"the objective{'' if trials[-1].is_valid else '; the client was too slow'}"
        )
    best = highest_passed(search, trials)
    sustained = None if best is None else best.requests_per_s / subject.num_slices
    return profile, Measured(step_time, profile.ttft_floor_s, tuple(trials), sustained, predicted)


def describe_source(
    objective: ProfileObjective, lengths: RequestLengths, measured: Measured
) -> str:
    """Returns what was measured and how well it fits, for the profile's `source`."""
    at = (
        f"{lengths.input_tokens} in, {lengths.output_tokens} out, TTFT {objective.ttft_s:g} s and "
        f"TPOT {objective.tpot_s:g} s for {objective.share:.0%}"
    )
    law = (
        f"law fitted within {measured.step_time.worst_error:.1%}, predicts "
        f"{measured.predicted_per_s:.2f} requests/s of a slice"
    )
    if measured.sustained_per_s is None:
        return f"slicewise profile at {at}: no rate that was tried held; {law}"
    return f"slicewise profile at {at}: {measured.sustained_per_s:.2f} requests/s sustained; {law}"


def steady_state(card: Scorecard, num_engines: int) -> SteadyState:
    """Returns what the scorecard of a steady load shows of one engine of so many.

    A step gives each running sequence one token: tokens per second times the step's length are the
    sequences that run.

    Raises:
        ProfileFailedError: requests failed, or nothing was measured.
    """
    tokens_per_s = card.throughput.output_tokens_per_s
    requests_per_s = card.throughput.requests_per_s
    step_s = card.tpot_s.mean
    if card.requests.failed or not tokens_per_s or not requests_per_s or not step_s:
        raise ProfileFailedError(
            f"{card.requests.failed} of {card.requests.total} requests failed in a steady load"
        )
    known = card.tokens.planned_input if card.tokens.input is None else card.tokens.input
    input_tokens = known / card.requests.ok
    return SteadyState(
        running=tokens_per_s * step_s / num_engines,
        prompt_tokens_per_s=requests_per_s * input_tokens / num_engines,
        step_s=step_s,
    )


def slices_of(fleet: Mapping[str, Any] | None, model: str) -> Sequence[Mapping[str, Any]]:
    """The model's ready slices in an answer of `/fleet`; none where there is no such answer."""
    if fleet is None:
        return []
    return [row for row in fleet["slices"] if row["model"] == model and row["state"] == "ready"]


def load_seconds(slices: Sequence[Mapping[str, Any]]) -> float:
    """Returns these slices' median time from reserved to ready; 0 where it is unknown."""
    took = []
    for slice in slices:
        phases = [
            phase["for_s"]
            for phase in slice.get("history", [])
            if phase["state"] in ("reserved", "probing", "loading")
        ]
        if phases:
            took.append(sum(phases))
    return statistics.median(took) if took else 0.0


def _tried(bench: Bench, load: OpenLoad) -> Trial:
    card = bench.run(load)
    assert card.goodput is not None, "the bench sets its limits"
    return Trial(
        load.requests_per_s, card.goodput.good, card.requests.total, is_valid=card.client.valid
    )
