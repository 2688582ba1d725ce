"""What a gateway says of its requests: exact times by hand, and the edge driven as by a server."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from serving.config.api_keys import read_keys
from serving.domain.capacity.objectives import Objectives
from serving.domain.errors import NoEngineInTimeError, OverloadedError
from serving.domain.load_report import JUDGED, load_of_stats, load_stats
from serving.domain.models.request_fields.service_class import ServiceClass, ServiceTier
from serving.gateway.dispatch.requests import Account
from serving.gateway.edge.auth import ApiKeys
from serving.gateway.edge.http import HttpEdge
from serving.gateway.metrics.requests import (
    EngineCollector,
    EngineReading,
    Families,
    ServingCollector,
)
from serving.gateway.telemetry.request_metrics import (
    EdgeMetrics,
    Histogram,
    RequestMetrics,
    refusal_counts,
)
from serving.gateway.telemetry.request_story import Because, EngineChoice
from serving.gateway.telemetry.request_telemetry import (
    REQUEST_CONTEXT,
    TOKENS_PER_TIMED,
    ModelTelemetry,
    RequestContext,
    RequestTelemetry,
)
from serving.link.messages import EngineLoad, TokenOutput
from serving.telemetry.metric_names import (
    ALL,
    MAX_BUCKETS,
    SERVING_COUNTS,
    SERVING_LATENCY,
    labels_of,
)

from .rendered import rendered
from .test_http_edge import EchoFrontend, client_of, edge_over, run_raw

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@dataclass
class StagedEngine:
    """A linked engine."""

    compute_class: str
    is_draining: bool = False
    requests: list[str] = field(default_factory=list)
    engine_id: str = "e1"
    slice_name: str | None = None
    trace_attributes: dict[str, str] = field(default_factory=dict)


@dataclass
class StagedFleet:
    """One model's fleet, as the collector sees it."""

    request_metrics: RequestMetrics = field(default_factory=RequestMetrics)
    connections: list[StagedEngine] = field(default_factory=list)
    num_waiting: int = 0
    num_queued: int = 0
    num_in_line: dict[ServiceClass, int] = field(
        default_factory=lambda: dict.fromkeys(ServiceClass, 0)
    )
    num_in_line_of_account: dict[Account, int] = field(default_factory=dict)
    num_promised: int = 0


def dispatched(request: RequestTelemetry, compute_class: str, now_s: float) -> None:
    """The request is given to an engine of this class."""
    request.dispatched(StagedEngine(compute_class), EngineChoice(Because.ONLY_ONE, 1), 3, now_s)


def step(telemetry: ModelTelemetry, now_s: float, *outputs: tuple[RequestTelemetry, int]) -> None:
    """An engine makes a step; each request gets so many tokens."""
    telemetry.emitted(
        [(request, TokenOutput("r", [7] * num_tokens)) for request, num_tokens in outputs], now_s
    )


def page(fleets: dict[str, StagedFleet], edge: EdgeMetrics | None = None) -> Samples:
    """The samples of a gateway's requests, as Prometheus' own parser reads them."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ServingCollector(fleets, edge or EdgeMetrics()))
    return samples_of(registry)


def samples_of(registry: CollectorRegistry) -> Samples:
    text = rendered([registry]).decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float | None:
    return samples.get((name, frozenset(labels.items())))


def sum_and_count(samples: Samples, name: str, **labels: str) -> tuple[float | None, float | None]:
    return value(samples, f"{name}_sum", **labels), value(samples, f"{name}_count", **labels)


PRIORITY = ServiceTier.PRIORITY
SPOT = {"model": "chat", "compute_class": "spot"}
ON_DEMAND = {"model": "chat", "compute_class": "on-demand"}


def metrics_of_one_answer() -> RequestMetrics:
    """Received at 10, 0.5 s in the queue, taken at 10.75, sent at 11, tokens at 12, 13, 15."""
    telemetry = ModelTelemetry("chat", 0.0)
    context = RequestContext(10.0, waited_s=0.5, tenant="acme")
    token = REQUEST_CONTEXT.set(context)
    try:
        request = telemetry.arrived("r", 7, 10.75)
    finally:
        REQUEST_CONTEXT.reset(token)
    dispatched(request, "spot", 11.0)
    request.found_cached(4, 12.0)
    step(telemetry, 12.0, (request, 1))
    context.written(12.25)
    step(telemetry, 13.0, (request, 1))
    step(telemetry, 15.0, (request, 1))
    request.ended("stop", 15.0)
    context.written(15.5)
    context.answered(16.0)
    return telemetry.metrics


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("slicewise_time_to_first_token_seconds", (2.0, 1)),
        ("slicewise_inter_token_seconds", (1.0 + 2.0, 2)),
        ("slicewise_time_per_output_token_seconds", (1.5, 1)),
        ("slicewise_request_duration_seconds", (6.0, 1)),
        ("slicewise_engine_time_seconds", (4.0, 1)),
        ("slicewise_gateway_input_seconds", (0.25, 1)),
        ("slicewise_gateway_output_seconds", (0.25, 1)),
        ("slicewise_resume_stall_seconds", (0.0, 0)),
    ],
)
def test_every_time_of_an_answer_is_what_its_help_says(
    name: str, expected: tuple[float, int]
) -> None:
    samples = page({"chat": StagedFleet(metrics_of_one_answer())})
    assert sum_and_count(samples, name, **SPOT) == expected


def test_wait_for_an_engine_is_of_the_class_of_service() -> None:
    telemetry = ModelTelemetry("chat", 0.0)
    for tier, taken_at_s in ((ServiceTier.FLEX, 3.0), (ServiceTier.FLEX, 5.0), (PRIORITY, 0.5)):
        token = REQUEST_CONTEXT.set(RequestContext(0.0, waited_s=0.25, service_tier=tier))
        request = telemetry.arrived("r", 7, 0.0)
        REQUEST_CONTEXT.reset(token)
        dispatched(request, "spot", taken_at_s)
        request.moved("lost", "the test says so", 6.0)
        dispatched(request, "spot", 7.0)  # a later one is none
    samples = page({"chat": StagedFleet(telemetry.metrics)})
    name = "slicewise_queue_time_seconds"
    assert sum_and_count(samples, name, **SPOT, service_class="batch") == (8.5, 2)
    assert sum_and_count(samples, name, **SPOT, service_class="interactive") == (0.75, 1)
    assert sum_and_count(samples, name, **SPOT, service_class="standard") == (0.0, 0)
    means = telemetry.mean_waits_s(10.0)
    assert means == {ServiceClass.INTERACTIVE: 0.75, ServiceClass.BATCH: 4.25}
    assert telemetry.mean_waits_s(34.0) == {ServiceClass.BATCH: 5.25}, "half a minute"
    assert telemetry.mean_waits_s(60.0) == {}


def test_refusals_are_those_of_the_door_and_of_what_was_let_in() -> None:
    edge, metrics = EdgeMetrics(), RequestMetrics()
    edge.record_admission("chat", "admitted", "acme")
    for tenant in ("acme", "beta"):
        edge.record_admission("chat", "overloaded", tenant)
    edge.record_admission("other", "overloaded", "acme")
    metrics.of_class("").sequences.update({"overloaded": 3, "no_room_in_time": 1, "aborted": 9})
    metrics.of_class("spot").sequences.update({"stop": 5, "no_engine_in_time": 2})
    assert refusal_counts("chat", edge, metrics) == {
        "overloaded": 5,
        "no_room_in_time": 1,
        "no_engine_in_time": 2,
    }


def test_tokens_and_outcome_of_an_answer_are_counted_for_its_class() -> None:
    samples = page({"chat": StagedFleet(metrics_of_one_answer())})
    assert value(samples, "slicewise_input_tokens_total", **SPOT, tenant="acme") == 7
    assert value(samples, "slicewise_cached_input_tokens_total", **SPOT, tenant="acme") == 4
    assert value(samples, "slicewise_output_tokens_total", **SPOT, tenant="acme") == 3
    assert value(samples, "slicewise_sequences_total", **SPOT, outcome="stop") == 1


def test_resume_is_of_the_class_left_and_its_stall_of_the_class_that_goes_on() -> None:
    telemetry = ModelTelemetry("chat", 0.0)
    request = telemetry.arrived("r", 7, 0.0)
    dispatched(request, "spot", 0.0)
    step(telemetry, 1.0, (request, 2))
    request.moved("lost", "the test says so", 1.5)
    dispatched(request, "on-demand", 1.5)
    request.moved("draining", "the test says so", 2.0)  # before it had a token there
    dispatched(request, "spot", 2.0)
    step(telemetry, 3.0, (request, 1))
    step(telemetry, 3.5, (request, 1))
    request.ended("length", 4.0)
    samples = page({"chat": StagedFleet(telemetry.metrics)})
    assert value(samples, "slicewise_resumes_total", **SPOT, cause="lost") == 1
    assert value(samples, "slicewise_resumes_total", **ON_DEMAND, cause="draining") == 1
    assert value(samples, "slicewise_dispatches_total", **SPOT, reason="only_one") == 2
    assert value(samples, "slicewise_named_blocks_total", **SPOT) == 6
    assert value(samples, "slicewise_dispatches_total", **ON_DEMAND, reason="only_one") == 1
    assert sum_and_count(samples, "slicewise_resume_stall_seconds", **SPOT) == (1.5, 1)
    # The prompt went to an engine once for its client, however often it was computed.
    assert value(samples, "slicewise_input_tokens_total", **SPOT, tenant="default") == 7
    assert value(samples, "slicewise_input_tokens_total", **ON_DEMAND, tenant="default") == 0
    waits = ON_DEMAND | {"service_class": "standard"}
    assert sum_and_count(samples, "slicewise_queue_time_seconds", **waits) == (0.0, 0)


def test_cached_tokens_are_those_of_the_engine_that_gave_the_first_token() -> None:
    telemetry = ModelTelemetry("chat", 0.0)
    request = telemetry.arrived("r", 700, 0.0)
    dispatched(request, "spot", 0.0)
    request.moved("slow", "the test says so", 1.0)  # before it had a token there
    dispatched(request, "on-demand", 1.0)
    request.found_cached(512, 2.0)
    step(telemetry, 2.0, (request, 3))
    request.moved("lost", "the test says so", 3.0)
    dispatched(request, "spot", 3.0)
    request.found_cached(702, 4.0)  # of the prompt and what was emitted
    step(telemetry, 4.0, (request, 1))
    samples = page({"chat": StagedFleet(telemetry.metrics)})
    name = "slicewise_cached_input_tokens_total"
    assert value(samples, name, **ON_DEMAND, tenant="default") == 512
    assert value(samples, name, **SPOT, tenant="default") == 0


def test_sequence_without_an_engine_has_an_outcome_and_no_class() -> None:
    telemetry = ModelTelemetry("chat", 0.0)
    telemetry.arrived("r", 7, 0.0).failed(NoEngineInTimeError("chat", 60.0, 30.0), 0)
    samples = page({"chat": StagedFleet(telemetry.metrics)})
    ended = {key: count for key, count in samples.items() if key[0] == "slicewise_sequences_total"}
    assert {dict(labels)["outcome"]: count for (_, labels), count in ended.items()} == {
        "no_engine_in_time": 1,
        # From zero on, so that the first one is seen by a rate.
        "no_room_in_time": 0,
        "overloaded": 0,
    }
    assert not [labels for _, labels in ended if "compute_class" in dict(labels)]
    assert not [name for name, _ in samples if name.endswith("_bucket")]


def test_end_without_an_engine_is_shown_from_zero_on() -> None:
    samples = page({"chat": StagedFleet()})
    assert (
        value(samples, "slicewise_sequences_total", model="chat", outcome="no_engine_in_time") == 0
    )


def test_single_token_has_no_time_per_output_token() -> None:
    telemetry = ModelTelemetry("chat", 0.0)
    request = telemetry.arrived("r", 7, 0.0)
    dispatched(request, "spot", 0.0)
    step(telemetry, 1.0, (request, 1))
    request.ended("length", 4.0)
    samples = page({"chat": StagedFleet(telemetry.metrics)})
    assert sum_and_count(samples, "slicewise_time_per_output_token_seconds", **SPOT) == (0.0, 0)


def judged(telemetry: ModelTelemetry) -> dict[tuple[str, str], float | None]:
    """The counts of sequences by objective and result."""
    samples = page({"chat": StagedFleet(telemetry.metrics)})
    return {
        (objective, result): value(
            samples,
            "slicewise_objective_sequences_total",
            objective=objective,
            result=result,
            **SPOT,
        )
        for objective in ("ttft", "tpot")
        for result in ("met", "missed")
    }


def told(telemetry: ModelTelemetry) -> tuple[int, ...]:
    """What a policy is told of sequences that met and missed TTFT, and TPOT."""
    seen = telemetry.load.sample(5.0, num_waiting=0, oldest_wait_s=0.0, num_in_flight=0)
    sample = load_of_stats("chat", load_stats("chat", seen))
    assert sample is not None
    return tuple(getattr(sample, what) for what in JUDGED)


def test_policy_is_told_nothing_of_objectives_that_may_be_others_than_its_own() -> None:
    telemetry = ModelTelemetry("chat", 0.0)
    request = telemetry.arrived("r", 7, 0.0)
    dispatched(request, "spot", 0.0)
    step(telemetry, 1.0, (request, 1))
    step(telemetry, 2.0, (request, 1))
    request.ended("stop", 2.0)
    assert judged(telemetry)["tpot", "missed"] == 1
    assert told(telemetry) == (0, 0, 0, 0)


def test_objective_of_a_first_token_grows_with_its_prompt() -> None:
    telemetry = ModelTelemetry("chat", 0.0, Objectives(1.0, 0.5, ttft_per_prompt_token_s=0.01))
    for prompt_tokens in (199, 201):
        request = telemetry.arrived("r", prompt_tokens, 0.0)
        request.context.received_at_s = 0.0
        dispatched(request, "spot", 0.0)
        step(telemetry, 3.0, (request, 1))
        step(telemetry, 3.0 + 0.002 * prompt_tokens + 0.1, (request, 1))
        request.ended("stop", 4.0)
    assert judged(telemetry) == {
        ("ttft", "met"): 1,  # 3 s of 3.01 s
        ("ttft", "missed"): 1,  # of 2.99 s
        ("tpot", "met"): 1,
        ("tpot", "missed"): 1,
    }
    assert told(telemetry) == (1, 1, 1, 1)


def test_batch_work_has_no_objectives() -> None:
    telemetry = ModelTelemetry("chat", 0.0)
    context = RequestContext(0.0, service_tier=ServiceTier.FLEX)
    token = REQUEST_CONTEXT.set(context)
    try:
        request = telemetry.arrived("r", 7, 0.0)
    finally:
        REQUEST_CONTEXT.reset(token)
    dispatched(request, "spot", 0.0)
    step(telemetry, 100.0, (request, 1))
    step(telemetry, 200.0, (request, 1))
    request.ended("stop", 200.0)
    assert set(judged(telemetry).values()) == {0}


def test_way_through_the_gateway_is_timed_of_one_output_in_eight() -> None:
    telemetry, context = ModelTelemetry("chat", 0.0), RequestContext(0.0)
    token = REQUEST_CONTEXT.set(context)
    try:
        request = telemetry.arrived("r", 7, 0.0)
    finally:
        REQUEST_CONTEXT.reset(token)
    dispatched(request, "spot", 0.0)
    for second in range(1, 2 * TOKENS_PER_TIMED + 2):
        step(telemetry, float(second), (request, 1))
        context.written(second + 0.25)
    samples = page({"chat": StagedFleet(telemetry.metrics)})
    assert sum_and_count(samples, "slicewise_gateway_output_seconds", **SPOT) == (0.75, 3)


def test_times_between_tokens_are_counted_whoever_shares_a_step() -> None:
    telemetry = ModelTelemetry("chat", 0.0)
    requests = [telemetry.arrived("r", 7, 0.0) for _ in range(3)]
    for request in requests:
        dispatched(request, "spot", 0.0)
    for second in (1.0, 2.0, 4.0):
        step(telemetry, second, (requests[0], 1), (requests[1], 1))
        step(telemetry, second + 0.5, (requests[2], 1))
    step(telemetry, 6.0, (requests[2], 1), (requests[0], 1), (requests[1], 1))
    samples = page({"chat": StagedFleet(telemetry.metrics)})
    assert sum_and_count(samples, "slicewise_inter_token_seconds", **SPOT) == (14.5, 9)
    up_to_1_s = value(samples, "slicewise_inter_token_seconds_bucket", **SPOT, le="1.0")
    assert up_to_1_s == 3


def test_sample_on_a_bound_is_in_the_bucket_of_that_bound() -> None:
    histogram = Histogram((1.0, 2.0))
    for sample in (1.0, 1.5, 2.0, 2.5):
        histogram.observe(sample)
    families = Families()
    families.add("slicewise_inter_token_seconds", {}, histogram)
    (family,) = families
    counts = [sample.value for sample in family.samples if sample.name.endswith("_bucket")]
    assert counts == [1, 3, 4]


def test_links_and_sequences_in_flight_are_those_of_the_connections() -> None:
    fleet = StagedFleet(
        connections=[
            StagedEngine("spot", requests=["a", "b"]),
            StagedEngine("spot", is_draining=True, requests=["c"]),
        ],
        num_waiting=2,
        num_queued=3,
        num_in_line={ServiceClass.BATCH: 2},
        num_in_line_of_account={(ServiceClass.BATCH, "acme"): 2},
        num_promised=4,
    )
    fleet.request_metrics.of_class("on-demand")  # had an engine, and has none now
    samples = page({"chat": fleet})
    assert value(samples, "slicewise_links", **SPOT, state="ready") == 1
    assert value(samples, "slicewise_links", **SPOT, state="draining") == 1
    assert value(samples, "slicewise_links", **ON_DEMAND, state="ready") == 0
    assert value(samples, "slicewise_sequences_in_flight", **SPOT) == 3
    assert value(samples, "slicewise_requests_waiting", model="chat") == 5
    in_line = {"model": "chat", "service_class": "batch"}
    assert value(samples, "slicewise_line_sequences", **in_line) == 2
    of_tenant = in_line | {"tenant": "acme"}
    assert value(samples, "slicewise_line_tenant_sequences", **of_tenant) == 2
    assert value(samples, "slicewise_promised_sequences", model="chat") == 4


def test_engines_are_shown_by_slice_and_class() -> None:
    readings = [
        EngineReading("chat", "spot", "e1", "s-1", EngineLoad(3, 1, 0.25)),
        EngineReading("chat", "local", "e2", None, EngineLoad()),
    ]
    registry = CollectorRegistry(auto_describe=False)
    registry.register(EngineCollector(lambda: readings))
    samples = samples_of(registry)
    labels = {"engine": "e1", "slice": "s-1"} | SPOT
    assert value(samples, "slicewise_engine_running", **labels) == 3
    assert value(samples, "slicewise_engine_waiting", **labels) == 1
    assert value(samples, "slicewise_engine_kv_usage_ratio", **labels) == 0.25
    other = {"engine": "e2", "model": "chat", "compute_class": "local"}
    assert value(samples, "slicewise_engine_running", **other) == 0


def test_page_names_its_gateway_on_every_series() -> None:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(
        ServingCollector({"chat": StagedFleet(metrics_of_one_answer())}, EdgeMetrics())
    )
    text = rendered([registry], "g1").decode()
    families = list(text_string_to_metric_families(text))
    assert {sample.labels["gateway"] for family in families for sample in family.samples} == {"g1"}


def test_every_series_has_the_kind_and_labels_of_the_registry() -> None:
    telemetry = ModelTelemetry("chat", 0.0)
    request = telemetry.arrived("r", 1, 0.0)
    dispatched(request, "spot", 0.0)
    request.moved("lost", "the test says so", 1.0)
    telemetry.metrics.link_lost("spot", "lost")
    edge = EdgeMetrics()
    edge.record_admission("chat", "admitted", "acme")
    edge.answered("chat", "/v1/completions", 200)
    registry = CollectorRegistry(auto_describe=False)
    fleet = StagedFleet(telemetry.metrics, [StagedEngine("spot")])
    fleet.num_in_line_of_account = {(ServiceClass.STANDARD, "acme"): 1}
    registry.register(ServingCollector({"chat": fleet}, edge))
    text = rendered([registry], "g1").decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    ours = (*SERVING_LATENCY, *SERVING_COUNTS)
    stems = {metric.name.removesuffix("_total"): metric for metric in ours}
    assert {name: family.type for name, family in families.items()} == {
        stem: metric.kind for stem, metric in stems.items()
    }
    for stem, family in families.items():
        for sample in family.samples:
            assert set(sample.labels) - {"le"} <= set(labels_of(stems[stem]))


def test_histograms_have_no_more_buckets_than_the_registry_allows() -> None:
    samples = page({"chat": StagedFleet(metrics_of_one_answer())})
    for metric in SERVING_LATENCY:
        bucket = f"{metric.name}_bucket"
        bounds = {dict(labels)["le"] for name, labels in samples if name == bucket}
        assert 0 < len(bounds) - 1 <= MAX_BUCKETS


def test_documentation_names_every_series_and_no_other() -> None:
    text = (Path(__file__).parents[2] / "docs/reference/metrics.md").read_text()
    documented = set(re.findall(r"slicewise_[a-z_]+", text)) - {"slicewise_"}
    ours = {name for name in ALL if name.startswith("slicewise_")}
    assert documented == ours


# -- the edge --


def of_edge(edge: HttpEdge) -> Samples:
    return page({"chat": StagedFleet()}, edge.metrics)


CHAT = {"model": "chat", "tenant": "default"}


async def post_to(edge: HttpEdge, bodies: Iterable[dict[str, str]], **headers: str) -> None:
    async with client_of(edge) as client:
        for body in bodies:
            await client.post("/v1/completions", json=body, headers=headers)


async def test_admissions_are_counted_by_result_and_never_by_what_the_client_made_up() -> None:
    frontend = EchoFrontend("chat")
    edge = edge_over(frontend, EchoFrontend("code"))
    await post_to(edge, [{"model": "chat"}, {"model": "made-up"}, {}])
    frontend.refusal = OverloadedError("chat", 9, 1.0)
    await post_to(edge, [{"model": "chat"}])
    samples = of_edge(edge)
    admissions = {key: n for key, n in samples.items() if key[0] == "slicewise_admissions_total"}
    assert {dict(labels)["result"]: n for (_, labels), n in admissions.items()} == {
        "admitted": 1,
        "model_not_found": 1,
        "malformed": 1,
        "overloaded": 1,
        # From zero on, so that the first one is seen by a rate.
        "gateway_behind": 0,
        "no_engine_in_time": 0,
    }
    assert {dict(labels).get("model") for _, labels in admissions} == {"chat", None}


async def test_tenant_is_the_name_of_the_key_and_never_what_the_client_made_up() -> None:
    edge = edge_over(EchoFrontend("chat"), keys=ApiKeys(read_keys("acme k1, k2")))
    for key in ("k1", "k2", "acme"):
        await post_to(edge, [{"model": "chat"}], authorization=f"Bearer {key}")
    assert edge.metrics.admissions == {
        ("chat", "admitted", "acme"): 1,
        ("chat", "admitted", "default"): 1,
        ("", "invalid_api_key", "default"): 1,
    }


async def test_refusals_of_a_tenant_are_shown_from_its_first_request_on() -> None:
    edge = edge_over(EchoFrontend("chat"), keys=ApiKeys(read_keys("acme k1, k2")))
    await post_to(edge, [{"model": "chat"}], authorization="Bearer k1")
    samples = of_edge(edge)
    refused = dict.fromkeys(("gateway_behind", "no_engine_in_time", "overloaded"), 0)
    for result, count in (refused | {"admitted": 1}).items():
        of_acme = {"model": "chat", "tenant": "acme", "result": result}
        assert value(samples, "slicewise_admissions_total", **of_acme) == count


async def test_request_without_a_key_is_refused_as_such() -> None:
    edge = edge_over(EchoFrontend("chat"), keys=("secret",))
    await post_to(edge, [{"model": "chat"}])
    assert edge.metrics.admissions == {("", "invalid_api_key", "default"): 1}


async def test_responses_are_counted_by_route_and_status() -> None:
    edge = edge_over(EchoFrontend("chat"))
    await post_to(edge, [{"model": "chat"}, {"model": "made-up"}])
    async with client_of(edge) as client:
        await client.get("/nowhere/123")
    assert edge.metrics.responses == {
        ("chat", "/v1/completions", "200"): 1,
        ("", "/v1/completions", "404"): 1,
        ("", "other", "404"): 1,
    }


async def test_only_a_client_that_left_early_is_a_cancellation() -> None:
    edge = edge_over(EchoFrontend("chat"))
    await post_to(edge, [{"model": "chat"}])
    assert value(of_edge(edge), "slicewise_cancellations_total", **CHAT) == 0
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    body = b'{"model": "chat", "linger": 1}'
    await run_raw(edge, scope, {"type": "http.request", "body": body, "more_body": False})
    assert value(of_edge(edge), "slicewise_cancellations_total", **CHAT) == 1


def test_batch_work_is_load_for_itself_and_its_answers_have_a_length_of_their_own() -> None:
    telemetry = ModelTelemetry("demo", 0.0)
    token = REQUEST_CONTEXT.set(RequestContext(0.0, service_tier=ServiceTier.FLEX))
    try:
        batch = telemetry.arrived("b", 900, 1.0)
    finally:
        REQUEST_CONTEXT.reset(token)
    other = telemetry.arrived("r", 10, 1.0)
    for request, num_tokens in ((batch, 300), (other, 20)):
        dispatched(request, "spot", 1.0)
        step(telemetry, 2.0, (request, num_tokens))
        request.ended("stop", 2.0)
    loads = [
        window.sample(6.0, num_waiting=0, oldest_wait_s=0.0, num_in_flight=0)
        for window in (telemetry.load, telemetry.batch_load)
    ]
    assert [each.requests_per_s for each in loads] == [pytest.approx(1 / 6)] * 2
    assert [each.input_tokens_mean for each in loads] == [10.0, 900.0]
    assert telemetry.output_mean(ServiceClass.BATCH) == 300.0
    assert telemetry.output_mean(ServiceClass.INTERACTIVE) == 20.0
    assert ModelTelemetry("new", 0.0).output_mean(ServiceClass.BATCH) is None
