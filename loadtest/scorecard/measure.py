"""Makes the scorecard from the records of a run: every number and its result.

Owns what belongs to a scorecard and the version of its JSON. Pure: no clock, no I/O, no chance. The
definitions are in `latency`, `token_flow`, `counts`, `stalls` and `fleet_cost`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from loadtest.histogram import added
from loadtest.records import FleetSample, RequestRecord
from loadtest.scorecard import latency
from loadtest.scorecard.client_gates import ClientReport, check_client, num_sent_in_time
from loadtest.scorecard.counts import (
    Correctness,
    Group,
    RequestCounts,
    TokenCounts,
    count_requests,
    count_tokens,
    count_wrong_tokens,
    group_by,
)
from loadtest.scorecard.fleet_cost import Cost, cost_of
from loadtest.scorecard.formats import counted, format_seconds
from loadtest.scorecard.slo import Evidence, GoodputLimits, Objective, ServiceLevel, judge
from loadtest.scorecard.spread import Spread, spread_of, spread_of_histogram
from loadtest.scorecard.stalls import EventImpact, impacts
from loadtest.scorecard.stored_run import StoredRun
from loadtest.scorecard.timeline import Timeline, timeline_of
from loadtest.scorecard.token_flow import TokenFlow
from loadtest.scorecard.verdict import Verdict, reach_verdict

VERSION = 1
# Below this share of the TPOT, the usual gap is one inside a clump and not one between tokens.
CLUMP_RATIO = 0.1


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The facts of a run. `cut_short` states why the run is not whole, `None` when it is.

    `window_from_s` and `window_until_s` bound the steady window.
    """

    url: str
    at_unix_s: float
    seed: int
    num_workers: int
    duration_s: float
    warmup_s: float
    ended_s: float
    window_from_s: float
    window_until_s: float
    cut_short: str | None
    plan: dict[str, object]


@dataclass(frozen=True, slots=True)
class Throughput:
    """The rates over the steady window; `None` where not measured.

    `asked_requests_per_s` is the schedule's, `None` for a closed loop; `achieved_requests_per_s`
    what was sent in time.
    """

    output_tokens_per_s: float | None
    requests_per_s: float | None
    asked_requests_per_s: float | None
    achieved_requests_per_s: float | None


@dataclass(frozen=True, slots=True)
class Goodput:
    """The requests that met all of `limits`, per second and as a share of all scheduled."""

    limits: dict[str, float]
    good: int
    requests_per_s: float | None
    ratio: float | None


@dataclass(frozen=True, slots=True)
class SloReport:
    """The result of all objectives; a run without any has missed none."""

    ok: bool
    objectives: tuple[Objective, ...]


@dataclass(frozen=True, slots=True)
class Scorecard:
    """The scorecard of one run. Durations in seconds; `None` is not measured, never zero.

    `icl_s` are the gaps between events that carry tokens: gaps between tokens only where each event
    carries one. `fleet` are the samples that differ from the one before, and the last.
    """

    version: int
    verdict: Verdict
    run: RunFacts
    requests: RequestCounts
    ttft_s: Spread
    ttft_scheduled_s: Spread
    tpot_s: Spread
    e2e_s: Spread
    e2e_scheduled_s: Spread
    ntpot_s: Spread
    icl_s: Spread
    longest_gap_s: Spread
    schedule_lag_s: Spread
    throughput: Throughput
    goodput: Goodput | None
    tokens: TokenCounts
    correctness: Correctness
    client: ClientReport
    slo: SloReport
    cost: Cost
    warnings: tuple[str, ...]
    by_model: tuple[Group, ...]
    by_tenant: tuple[Group, ...]
    by_priority: tuple[Group, ...]
    events: tuple[EventImpact, ...]
    timeline: Timeline
    fleet: tuple[FleetSample, ...]

    def to_json(self) -> bytes:
        """The scorecard as indented JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


def measure(
    run: StoredRun, level: ServiceLevel, usd_per_chip_hour: Mapping[str, float] | None
) -> Scorecard:
    """The scorecard of `run` under the objectives of `level`; prices are by compute class."""
    judged = run.judged
    requests = count_requests(judged, run.num_missing, len(run.requests) - len(judged))
    tokens = count_tokens(judged)
    correctness = count_wrong_tokens(judged)
    flow = TokenFlow(run.requests)
    output_tokens = None if flow.is_empty else flow.received_in(*run.window_s)
    cost = cost_of(run.fleet, usd_per_chip_hour, run.window_s, output_tokens)
    client = check_client(run, level.client)
    throughput = _throughput(run, requests, output_tokens, level)
    goodput = _goodput(judged, level.goodput, requests.total, run.window_length_s)
    whole = [request for request in judged if request.is_ok]
    longest_gap_s = spread_of(request.longest_gap_s for request in whole)
    icl_s = spread_of_histogram(added(request.gap_counts for request in whole), longest_gap_s.max)
    tpot_s = spread_of(map(latency.tpot_s, judged))
    evidence = Evidence(
        ttft_scheduled_s=spread_of(map(latency.ttft_scheduled_s, judged)),
        tpot_s=tpot_s,
        e2e_scheduled_s=spread_of(map(latency.e2e_scheduled_s, judged)),
        error_ratio=requests.error_ratio,
        goodput_ratio=goodput.ratio if goodput is not None else None,
        output_tokens_per_s=throughput.output_tokens_per_s,
        lost_tokens=correctness.lost_tokens,
        usd_per_million_output_tokens=cost.usd_per_million_output_tokens,
    )
    objectives = judge(level, evidence)
    return Scorecard(
        version=VERSION,
        verdict=reach_verdict(client, requests, correctness, level, objectives),
        run=_facts(run),
        requests=requests,
        ttft_s=spread_of(map(latency.ttft_s, judged)),
        ttft_scheduled_s=evidence.ttft_scheduled_s,
        tpot_s=tpot_s,
        e2e_s=spread_of(map(latency.e2e_s, judged)),
        e2e_scheduled_s=evidence.e2e_scheduled_s,
        ntpot_s=spread_of(map(latency.ntpot_s, judged)),
        icl_s=icl_s,
        longest_gap_s=longest_gap_s,
        schedule_lag_s=spread_of(map(latency.schedule_lag_s, judged)),
        throughput=throughput,
        goodput=goodput,
        tokens=tokens,
        correctness=correctness,
        client=client,
        slo=SloReport(all(objective.ok for objective in objectives), objectives),
        cost=cost,
        warnings=tuple(_warnings(run, tokens, icl_s, tpot_s)),
        by_model=group_by(judged, lambda request: request.model),
        by_tenant=group_by(judged, lambda request: request.tenant),
        by_priority=group_by(judged, lambda request: str(request.priority)),
        events=impacts(run.events, run.requests, icl_s.p50),
        timeline=timeline_of(run),
        fleet=_changes(run.fleet),
    )


def _facts(run: StoredRun) -> RunFacts:
    start = run.start
    return RunFacts(
        start.url,
        start.at_unix_s,
        start.seed,
        start.num_workers,
        start.duration_s,
        start.warmup_s,
        run.ended_s,
        *run.window_s,
        run.cut_short,
        start.plan,
    )


def _throughput(
    run: StoredRun, requests: RequestCounts, output_tokens: float | None, level: ServiceLevel
) -> Throughput:
    length_s = run.window_length_s
    if not length_s:
        return Throughput(None, None, None, None)
    from_s, until_s = run.window_s
    ended = sum(from_s < request.ended_s <= until_s for request in run.requests if request.is_ok)
    is_open = run.start.num_scheduled is not None
    return Throughput(
        output_tokens_per_s=output_tokens / length_s if output_tokens is not None else None,
        requests_per_s=ended / length_s,
        asked_requests_per_s=requests.total / length_s if is_open else None,
        achieved_requests_per_s=num_sent_in_time(run, level.client.schedule_lag_p99_s) / length_s,
    )


def _goodput(
    judged: tuple[RequestRecord, ...], limits: GoodputLimits | None, total: int, length_s: float
) -> Goodput | None:
    if limits is None:
        return None
    good = sum(is_good(request, limits) for request in judged)
    return Goodput(
        limits.model_dump(exclude_none=True, exclude={"at_least"}),
        good,
        good / length_s if length_s else None,
        good / total if total else None,
    )


def is_good(request: RequestRecord, limits: GoodputLimits) -> bool:
    """Returns whether a request succeeded and met every limit. One token alone has no pace."""
    if not request.is_ok:
        return False
    prompt_tokens = request.input_tokens
    if prompt_tokens is None:
        prompt_tokens = request.planned_input_tokens
    pairs = [
        (limits.ttft_of(prompt_tokens), latency.ttft_scheduled_s(request)),
        (limits.e2e_s, latency.e2e_scheduled_s(request)),
    ]
    if request.output_tokens != 1:
        pairs.append((limits.tpot_s, latency.tpot_s(request)))
    return all(limit is None or (value is not None and value <= limit) for limit, value in pairs)


def _changes(samples: tuple[FleetSample, ...]) -> tuple[FleetSample, ...]:
    """The samples that differ from the one before, and the last."""
    pairs = zip((None, *samples), samples, strict=False)
    changed = [now for before, now in pairs if before is None or before.slices != now.slices]
    return (*changed, *(sample for sample in samples[-1:] if sample is not changed[-1]))


def _warnings(run: StoredRun, tokens: TokenCounts, icl_s: Spread, tpot_s: Spread) -> list[str]:
    warnings: list[str] = []
    if run.cut_short is not None:
        warnings.append(f"the run was cut short at {format_seconds(run.ended_s)}: {run.cut_short}")
    if icl_s.p50 is not None and tpot_s.p50 is not None and icl_s.p50 < CLUMP_RATIO * tpot_s.p50:
        gaps = f"the median gap is {format_seconds(icl_s.p50)}, TPOT {format_seconds(tpot_s.p50)}"
        warnings.append(f"tokens come in clumps ({gaps}): something on the way collects them")
    if tokens.without_usage:
        answers = counted(tokens.without_usage, "answer")
        warnings.append(f"{answers} came without usage: their tokens are not counted")
    if tokens.output_unlike_planned:
        answers = counted(tokens.output_unlike_planned, "answer")
        warnings.append(f"{answers} had another number of output tokens than asked for")
    if tokens.input_unlike_planned:
        answers = counted(tokens.input_unlike_planned, "prompt")
        warnings.append(f"{answers} had another number of tokens than planned")
    return warnings
